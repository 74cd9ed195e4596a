"""The parts of scripts/bench: fio before and after each measurement of millrace, and the ratios of both.

    fio 4 KiB + fdatasync | append, 1 client          | fio      latency of one durable commit
    fio at the flush size | append and batch, loaded  | fio      bytes to disk at saturation
    (nothing)             | tail at 1,000/s           |          a consumer against the commit
    fio 1 MiB reads       | pull --cold, pull         | fio      catching up from disk, and from memory

Every part is short, since the machine may be shared: compare within one run only.
"""

import json
import os
import shutil
import subprocess
import sys

MILLRACE, DIRECTORY, SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3])
FIO_FILE = os.path.join(DIRECTORY, "fio")
FIO_BYTES = 512 << 20
PULL_BYTES = 1 << 30
WARM_PULL_BYTES = 96 << 20


def say(what):
    print(what, file=sys.stderr, flush=True)


def fio(name, *options):
    """One job on the written file; the job's numbers."""
    command = ["fio", f"--name={name}", f"--filename={FIO_FILE}", f"--size={FIO_BYTES}", "--direct=1",
               "--time_based", f"--runtime={SECONDS}", "--output-format=json", "--percentile_list=50:99", *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["jobs"][0]


def fill():
    command = ["fio", "--name=fill", f"--filename={FIO_FILE}", f"--size={FIO_BYTES}", "--direct=1", "--rw=write",
               "--bs=1m", "--end_fsync=1"]
    subprocess.run(command, check=True, capture_output=True)


def fio_sync(block_bytes):
    """Sequential overwrites, each followed by fdatasync."""
    job = fio("sync", "--rw=write", f"--bs={block_bytes}", "--ioengine=psync", "--fdatasync=1", "--overwrite=1")
    write, sync = job["write"]["clat_ns"]["percentile"], job["sync"]["lat_ns"]["percentile"]
    p50_us = (write["50.000000"] + sync["50.000000"]) / 1000
    return {"block_bytes": block_bytes, "p50_us": round(p50_us), "mb_per_s": round(job["write"]["bw_bytes"] / 1e6, 1)}


def fio_read():
    """Sequential reads of 1 MiB, four at a time."""
    job = fio("read", "--rw=read", "--bs=1m", "--ioengine=io_uring", "--iodepth=4")
    return {"mb_per_s": round(job["read"]["bw_bytes"] / 1e6, 1)}


def millrace(*arguments):
    """One `millrace bench`; its results. Each has a node of its own."""
    say(f"millrace bench {' '.join(map(str, arguments))}")
    node = os.path.join(DIRECTORY, "node")
    command = [MILLRACE, "bench", *map(str, arguments), "-o", "json", "--scratch", node]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    shutil.rmtree(node)
    return [json.loads(line) for line in result.stdout.splitlines()]


def loaded(verb, clients, *options):
    return millrace(verb, "--clients", clients, "--seconds", SECONDS, *options)


def mean(before, after, field):
    return (before[field] + after[field]) / 2


def between(measure, run):
    """What `run` returns, and what `measure` says before and after it."""
    before = measure()
    result = run()
    return result, before, measure()


def brief(run):
    costs = run["costs"]
    kept = ["flushes_per_group", "writes_per_group", "bytes_per_group", "commits_per_group", "node_cpu_s",
            "client_cpu_s", "node_cpu_us_per_commit", "client_cpu_us_per_commit", "node_threads"]
    return {name: costs[name] for name in kept}


def latency(*options):
    run, before, after = between(lambda: fio_sync(4096), lambda: loaded("append", 1, *options)[0])
    fio_p50 = mean(before, after, "p50_us")
    return {
        "fio_before": before, "fio_after": after,
        "p50_us": run["p50_us"], "p99_us": run["p99_us"],
        "above_fio_us": round(run["p50_us"] - fio_p50), "times_fio": round(run["p50_us"] / fio_p50, 2),
        "goal": "at most fio + 150 us; flushes_per_group 1, writes_per_group at most 1.1",
        **brief(run),
    }


def saturation(verb, clients, *options):
    """The flush size is only known after a first run."""
    first = loaded(verb, clients, *options)[0]
    block = max(4096, round(first["costs"]["bytes_per_group"] / 4096) * 4096)
    run, before, after = between(lambda: fio_sync(block), lambda: loaded(verb, clients, *options)[0])
    fio_rate = mean(before, after, "mb_per_s")
    return {
        "verb": verb, "clients": clients, "records_per_s": run["records_per_s"], "p50_us": run["p50_us"],
        "mb_per_s": run["mb_per_s"], "fio_before": before, "fio_after": after,
        "times_fio": round(run["mb_per_s"] / fio_rate, 2), "goal": "at least 0.85, or the CPU is the limit",
        "cores_used": round((run["costs"]["node_cpu_s"] + run["costs"]["client_cpu_s"]) / run["seconds"], 2),
        **brief(run),
    }


def by_clients():
    kept = ["clients", "acks_per_s", "p50_us", "p99_us", "mb_per_s"]
    runs = loaded("append", "1,16,64,256,1024")
    return [{name: run[name] for name in kept} | brief(run) for run in runs]


def tail():
    run = millrace("tail", "--rate", 1000, "--seconds", SECONDS)[0]
    return {
        "commit": run["commit"], "consumer": run["consumer"], "call_late": run["call_late"],
        "behind_commit_p50_us": run["consumer_behind_commit_p50_us"],
        "goal": "at most 300 us",
        **brief(run),
    }


def catch_up():
    cold = lambda: millrace("pull", "--bytes", PULL_BYTES, "--cold")[0]
    run, before, after = between(fio_read, cold)
    warm = millrace("pull", "--bytes", WARM_PULL_BYTES)[0]
    kept = ["mb_per_s", "read_mb_per_s", "read_amplification", "restart_s", "seconds"]
    cpu = {name: run["costs"][name] for name in ["node_cpu_s", "client_cpu_s", "node_threads"]}
    disk, limit = mean(before, after, "mb_per_s"), warm["mb_per_s"]
    return {
        "cold": {name: run[name] for name in kept} | cpu, "fio_before": before, "fio_after": after,
        "from_memory_mb_per_s": limit,
        "times_fio": round(run["read_mb_per_s"] / disk, 2), "times_memory": round(run["mb_per_s"] / limit, 2),
        "limit": "the disk" if disk < limit else "the way through node, QUIC and client",
        "goal": "at least 0.9 of the lower of the two",
    }


def main():
    fill()
    load = os.getloadavg()[0]
    result = {
        "cores": os.cpu_count(), "load_before": round(load, 2), "seconds_each": SECONDS,
        "1_latency": latency(),
        "1_latency_without_polling": latency("--idle-poll-us", 0),
        "2_saturation": [saturation("append", 1024), saturation("batch", 64)],
        "2_by_clients": by_clients(),
        "3_catch_up": catch_up(),
        "4_tail": tail(),
    }
    result["load_after"] = round(os.getloadavg()[0], 2)
    print(json.dumps(result, indent=1))


main()
