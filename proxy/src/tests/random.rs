//! Random clients on a rough network, and what must hold of everything that they were told.

use common::message::CommitReply;
use common::record::{decode_records, sections};
use common::{Offset, Position};

use super::*;

/// A request, where it went, and when it was first sent.
struct Sent {
    client: Endpoint,
    proxy: u8,
    request: CommitRequest,
}

const KEYS: [&str; 6] = ["a", "c", "f", "h", "m", "x"];

fn random_request(prng: &mut Prng, number: u64, read_version: Version) -> CommitRequest {
    let mut ranges = |most: u64| -> Ranges {
        let count = prng.below(most);
        let mut owned = Vec::new();
        for _ in 0..count {
            let (one, two) = (*prng.pick(&KEYS), *prng.pick(&KEYS));
            owned.push((one.min(two), one.max(two), prng.chance(1, 2)));
        }
        Ranges::from_ranges(owned.into_iter().map(|(begin, end, is_point)| {
            if is_point {
                KeyRange::point(begin.as_bytes())
            } else {
                KeyRange::new(begin.as_bytes(), end.as_bytes()).unwrap()
            }
        }))
    };
    let (reads, writes) = (ranges(3), ranges(3));
    let base = CommitRequest { reads, writes, read_version, ..request(number) };
    let mut parts = Vec::new();
    for stream in [STREAM, StreamId(21), StreamId(22)] {
        if prng.chance(1, 3) {
            let count = prng.between(1, 3);
            let record = |at: u64| Record::append(format!("{number}/{stream}/{at}"));
            parts.push((stream, (0..count).map(record).collect()));
        }
    }
    let with_id = prng.chance(1, 3);
    let base = CommitRequest {
        id: with_id.then(|| IdempotencyId(prng.bytes16())),
        report_conflicts: prng.chance(1, 2),
        ..base
    };
    with_records(base, &parts)
}

/// A section as it lies in the log.
#[derive(Clone, PartialEq, Debug)]
struct Lying {
    base: Offset,
    offset: Offset,
    records: Vec<Record>,
}

/// All sections of a transaction as they lie in the log.
fn in_log(world: &World, position: Position) -> BTreeMap<StreamId, Lying> {
    let mut found = BTreeMap::new();
    for log in &world.logs {
        let Some((_, blocks)) = log.versions.get(&position.version) else { continue };
        for block in blocks {
            let mut offset = block.base;
            for section in sections(&block.body).unwrap() {
                let records = decode_records(&section.records).unwrap();
                if section.index == position.index {
                    let entry = Lying { base: block.base, offset, records };
                    let again = found.insert(block.stream, entry.clone());
                    assert!(again.is_none_or(|again| again == entry), "replicas agree");
                }
                offset = offset.plus(u64::from(section.record_count));
            }
            assert_eq!(offset, block.base.plus(u64::from(block.record_count)));
        }
    }
    found
}

/// Runs random clients until everything has an outcome.
fn run(seed: u64, resolvers: &[&str], with_lanes: bool) -> (World, Vec<Sent>) {
    let mut prng = Prng::derive(seed, "clients", 0);
    let mut knobs = Knobs { heartbeat_ms: 200, ..Knobs::small() };
    knobs.batches_in_flight_max = prng.between(1, 6);
    knobs.batch_transactions_max = prng.between(1, 8);
    knobs.resolves_waiting_max = prng.between(4, 16);
    if prng.chance(1, 3) {
        knobs.life_versions = 200_000;
    }
    let mut world = World::serving(plan(2, resolvers, 3, 2), knobs, CALM, seed);
    for stream in [21, 22] {
        let read_version = world.read_version(client(98), 0, stream);
        let create =
            create(stream, &format!("stream {stream}").replace(' ', "-"), StreamId(stream));
        let create = CommitRequest { read_version, ..create };
        assert!(matches!(world.settle(client(98), 0, &create), CommitOutcome::Committed { .. }));
    }
    world.network = ROUGH;
    let mut sent: Vec<Sent> = Vec::new();
    let (mut read_versions, mut sequences) = (vec![RTV], BTreeMap::<(u64, u64), u64>::new());
    for number in 1..=60 {
        let from = prng.below(4);
        // A client stays with its proxy.
        let proxy = (from % 2) as u8;
        if prng.chance(1, 2) {
            let request = RequestId(1000 + number);
            world.send(client(from), proxy, ReadVersionRequest { request });
        }
        read_versions.extend(world.told.iter().rev().take(3).filter_map(|(_, _, message)| {
            match message {
                Message::ReadVersionReply(reply) => Some(reply.version),
                _ => None,
            }
        }));
        let back = prng.below(4.min(read_versions.len() as u64)) as usize;
        let read_version = read_versions[read_versions.len() - 1 - back];
        let mut request = random_request(&mut prng, number, read_version);
        if with_lanes && prng.chance(1, 2) {
            let lane = prng.below(2);
            let sequence = sequences.entry((from, lane)).or_default();
            request = in_lane(request, lane, *sequence);
            *sequence += 1;
        }
        world.send(client(from), proxy, request.clone());
        sent.push(Sent { client: client(from), proxy, request });
        world.run_for(prng.below(8));
        // What has no outcome is sent again now and then.
        for Sent { client, proxy, request } in &sent {
            if world.outcome(*client, request.request).is_none() && prng.chance(1, 10) {
                world.send(*client, *proxy, request.clone());
            }
        }
    }
    for Sent { client, proxy, request } in &sent {
        let _ = world.settle(*client, *proxy, request);
    }
    world.network = CALM;
    world.run_for(1000);
    assert!(world.halts.is_empty());
    (world, sent)
}

fn committed(world: &World, sent: &Sent) -> Option<Position> {
    match world.outcome(sent.client, sent.request.request).expect("settled") {
        CommitOutcome::Committed { position, .. } => Some(position),
        _ => None,
    }
}

/// Acknowledged exactly where it lies; everything in the log was acknowledged.
fn check_log(world: &World, sent: &[Sent]) {
    let mut positions = BTreeSet::new();
    for Sent { client, request, .. } in sent {
        let outcome = world.outcome(*client, request.request).unwrap();
        let CommitOutcome::Committed { position, base_offsets, .. } = outcome else { continue };
        assert!(positions.insert(position), "two transactions at {position}");
        let mut found = in_log(world, position);
        let id_record = found.remove(&StreamId::IDS).map(|ids| ids.records[0].clone());
        assert_eq!(
            id_record.as_ref().map(|record| record.key.to_vec()),
            request.id.map(|id| id.0.to_vec())
        );
        let (mut start, mut id_value) = (0, Vec::new());
        assert_eq!(base_offsets.len(), request.sections.len());
        for (section, base) in request.sections.iter().zip(base_offsets) {
            let bytes = request.payload.slice(start, section.bytes as usize).unwrap();
            start += bytes.len();
            let lying = found.remove(&section.stream).expect("it lies in the log");
            let ordinal = base.since(lying.base) as u32;
            assert_eq!((lying.offset, lying.records), (base, decode_records(&bytes).unwrap()));
            id_value.extend_from_slice(&section.stream.0.to_le_bytes());
            id_value.extend_from_slice(&ordinal.to_le_bytes());
            id_value.extend_from_slice(&section.record_count.to_le_bytes());
        }
        assert!(id_record.is_none_or(|record| record.value == id_value));
        assert!(found.is_empty(), "{found:?} belongs to nobody");
    }
    let first = world.logs.iter().flat_map(|log| &log.versions);
    for (version, (_, blocks)) in first {
        for section in blocks.iter().flat_map(|block| sections(&block.body).unwrap()) {
            let position = Position { version: *version, index: section.index };
            let is_setup = world.notes.iter().any(|(_, note)| {
                matches!(note, Note::Acknowledged { position: p, client, .. }
                    if *p == position && client.node.0 >= 198)
            });
            assert!(positions.contains(&position) || is_setup, "{position} was not acknowledged");
        }
    }
}

/// Nothing that committed missed a write that it should have seen; nothing was refused without one; and a
/// report names what it lost to.
///
/// With `lanes_leave`, what falls with its lane leaves its writes behind.
fn check_verdicts(world: &World, sent: &[Sent], lanes_leave: bool) {
    let mut commits: Vec<(Position, &Sent)> =
        sent.iter().filter_map(|sent| Some((committed(world, sent)?, sent))).collect();
    commits.sort_by_key(|(position, _)| *position);
    let met = |request: &CommitRequest, before: Position| -> Vec<u32> {
        let is_met = |read: KeyRange<'_>| {
            commits.iter().any(|(position, other)| {
                let is_unseen = position.version > request.read_version && *position < before;
                is_unseen && other.request.writes.iter().any(|write| read.overlaps(write))
            })
        };
        (0..).zip(request.reads.iter()).filter(|(_, read)| is_met(*read)).map(|(i, _)| i).collect()
    };
    let conflicts = |request: &CommitRequest, before| !met(request, before).is_empty();
    for (position, sent) in &commits {
        let request = &sent.request;
        assert!(!conflicts(request, *position), "{request:?} at {position} missed a write");
        let has_reads = !request.reads.is_empty() || request.id.is_some();
        let age = position.version.0.saturating_sub(request.read_version.0);
        assert!(!has_reads || age <= world.knobs.life_versions, "too old by {age}");
    }
    for Sent { client, request, .. } in sent {
        let outcome = world.outcome(*client, request.request).unwrap();
        if let (CommitOutcome::Conflict { version, ranges }, false) = (outcome, lanes_leave) {
            let (before, behind) = (Position { version, index: 0 }, u16::MAX);
            let most = met(request, Position { index: behind, ..before });
            assert!(!most.is_empty(), "{request:?} at {version} had no conflict");
            if request.report_conflicts {
                let least = met(request, before);
                let is_true = ranges.iter().all(|read| most.contains(read));
                let is_whole = least.iter().all(|read| ranges.contains(read));
                assert!(is_true && is_whole, "{ranges:?} between {least:?} and {most:?}");
            }
        }
    }
}

fn check_chain_and_reads(world: &World) {
    let (mut at, mut decided) = (RV, BTreeMap::<Version, u32>::new());
    let mut acknowledged = Vec::new();
    for (time, note) in &world.notes {
        match note {
            Note::Assigned { previous, version, .. } => {
                assert_eq!(*previous, at, "I1");
                at = *version;
            }
            Note::Decided { version, .. } => *decided.entry(*version).or_default() += 1,
            Note::Acknowledged { position, .. } => acknowledged.push((*time, position.version)),
            Note::ReadVersion { version, asked, .. } => {
                for (at, acknowledged) in &acknowledged {
                    assert!(
                        at >= asked || acknowledged <= version,
                        "I4: {version} misses {acknowledged}"
                    );
                }
            }
            _ => {}
        }
    }
    for resolver in &world.resolvers {
        assert!(resolver.status().reply_count <= 4, "I15: what is answered is let go");
    }
    let resolvers = world.resolvers.len() as u32;
    assert!(decided.values().all(|count| *count == resolvers), "each decides each version once");
    for log in &world.logs {
        assert_eq!(log.versions.keys().next_back(), Some(&at), "every server has every version");
    }
    let replies =
        world.told.iter().filter(|(_, _, m)| matches!(m, Message::CommitReply(CommitReply { .. })));
    assert!(replies.count() > 0);
}

#[test]
fn whatever_the_network_does_the_outcomes_are_true() {
    let mut marks = BTreeSet::<Mark>::new();
    let (mut outcomes, mut conflicts) = (0, 0);
    for seed in 0..40 {
        let (world, sent) = run(seed, &[""], false);
        check_log(&world, &sent);
        check_verdicts(&world, &sent, false);
        check_chain_and_reads(&world);
        marks.extend(&world.marks);
        outcomes += sent.iter().filter(|sent| committed(&world, sent).is_some()).count();
        conflicts += sent
            .iter()
            .filter(|sent| {
                let outcome = world.outcome(sent.client, sent.request.request);
                matches!(outcome, Some(CommitOutcome::Conflict { .. }))
            })
            .count();
    }
    assert!(outcomes > 500 && conflicts > 50, "{outcomes} commits, {conflicts} conflicts");
    let expected = [
        Mark::VersionRequestAgain,
        Mark::VersionRequestEarly,
        Mark::ResolveEarly,
        Mark::ResolveAgain,
        Mark::CommitAgain,
        Mark::BatchFull,
        Mark::PipelineFull,
        Mark::Retransmit,
        Mark::Heartbeat,
        Mark::CatalogWait,
    ];
    for mark in expected {
        assert!(marks.contains(&mark), "{} was not reached", mark.name());
    }
}

#[test]
fn several_resolvers_and_lanes_keep_every_promise() {
    let mut marks = BTreeSet::<Mark>::new();
    for seed in 100..140 {
        let (world, sent) = run(seed, &["", "d", "k"], true);
        check_log(&world, &sent);
        check_verdicts(&world, &sent, false);
        check_chain_and_reads(&world);
        check_lanes(&world, &sent);
        check_settled(&world);
        marks.extend(&world.marks);
    }
    let expected = [
        Mark::ResolveHeld,
        Mark::LeftToProxy,
        Mark::SettlementAgain,
        Mark::SettledEarly,
        Mark::OwnConflict,
        Mark::OwnConflictVoid,
        Mark::SettleAgain,
        Mark::SettleAlone,
    ];
    for mark in expected {
        assert!(marks.contains(&mark), "{} was not reached", mark.name());
    }
}

/// Once all is quiet, nothing is open anywhere and nobody is told again.
fn check_settled(world: &World) {
    for resolver in &world.resolvers {
        let status = resolver.status();
        assert_eq!((status.unsettled_count, status.unsettled_bytes, status.held), (0, 0, None));
    }
    for proxy in &world.proxies {
        assert_eq!(proxy.status().unconfirmed_count, 0);
    }
}

#[test]
fn a_single_resolver_is_told_nothing() {
    for seed in 0..10 {
        let (world, sent) = run(seed, &[""], true);
        check_verdicts(&world, &sent, true);
        check_lanes(&world, &sent);
        check_settled(&world);
        assert!(!world.sent.contains_key("Settle"), "{:?}", world.sent);
        let unwanted = [Mark::ResolveHeld, Mark::LeftToProxy, Mark::SettlementAgain];
        assert!(unwanted.iter().all(|mark| !world.marks.contains(mark)));
    }
}

/// What commits of a lane is a prefix of it, in order.
fn check_lanes(world: &World, sent: &[Sent]) {
    let mut lanes = BTreeMap::<_, Vec<(u64, Option<Position>)>>::new();
    for one in sent {
        if let Some(order) = one.request.lane {
            let entry = (order.sequence, committed(world, one));
            lanes.entry((one.client, order.lane)).or_default().push(entry);
        }
    }
    for (lane, mut entries) in lanes {
        entries.sort_unstable();
        let prefix: Vec<Position> = entries.iter().map_while(|(_, position)| *position).collect();
        assert!(prefix.is_sorted(), "{lane:?}: {entries:?}");
        let behind = entries.iter().skip(prefix.len());
        assert!(behind.clone().all(|(_, position)| position.is_none()), "{lane:?}: {entries:?}");
    }
}
