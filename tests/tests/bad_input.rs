//! Bad input: each kind has a code of its own, and the node goes on for everybody else.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::time::Duration;

use client::face::Client;
use client::{Error, Transaction};
use common::message::{
    Announce, CommitKind, CommitOutcome, CommitRequest, Confirm, Hello, Lock, Message, Pull, Push,
    Recruited, SectionEntry, Status, VersionRequest,
};
use common::quic::{CloseCode, Lane};
use common::record::Record;
use common::wire::{self, Envelope, FRAME_BYTES_MAX, PROTOCOL};
use common::{
    Code, Endpoint, Epoch, KeyRange, NodeId, Payload, Ranges, RequestId, Role, StreamId, Version,
    WallTime,
};
use tests::{HANG, Node, Peer, Records, SMALL_FILES, TINY_FILES, run};

fn node(options: &[&str]) -> (Node, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    (Node::start(&directory.path().join("node"), options), directory)
}

fn transaction(build: impl FnOnce(&mut Transaction) -> &mut Transaction) -> Transaction {
    let mut transaction = Transaction::new();
    build(&mut transaction);
    transaction
}

async fn append(client: &Client, stream: StreamId, value: &str) -> Result<u64, Error> {
    let mut transaction = Transaction::new();
    transaction.append(stream, value.to_owned());
    Ok(client.commit(transaction).await?.offsets[0].1.unwrap().0)
}

#[test]
fn a_client_is_told_what_is_wrong_with_its_request() {
    let (node, _directory) = node(SMALL_FILES);
    run(async {
        let client = node.client().await;
        let stream = client.create_stream("orders").await.unwrap();
        let now = client.read_version().await.unwrap();
        let cases = [
            (transaction(|t| t.write_point(&[b'k'; 10_241])), Code::KeyTooLong),
            (transaction(|t| t.write(b"b", b"a")), Code::RangeInverted),
            (transaction(|t| t.append(StreamId(999), "x")), Code::UnknownStream),
            (
                transaction(|t| t.read_version(now.plus(100_000_000)).read_point(b"k")),
                Code::FutureVersion,
            ),
            (transaction(|t| t.append(stream, vec![0; 300_000])), Code::TransactionTooLarge),
            (transaction(|t| t.write_point(b"\xff")), Code::SystemKey),
            (transaction(|t| t.append(StreamId::IDS, "x")), Code::SystemStream),
            (transaction(|t| t.read_version(Version(1)).read_point(b"k")), Code::TooOld),
        ];
        for (transaction, code) in cases {
            assert_eq!(client.commit(transaction).await.unwrap_err().code(), code);
        }
        for name in ["", "no spaces", &"x".repeat(201)] {
            assert_eq!(client.create_stream(name).await.unwrap_err().code(), Code::BadName);
        }
        assert_eq!(client.create_stream("orders").await.unwrap_err().code(), Code::StreamExists);

        for number in 0..3 {
            assert_eq!(append(&client, stream, "x").await.unwrap(), number);
        }
        let records = Records::of(&client, &[stream]).await;
        let second = records.all()[1].position.version;
        assert_eq!(client.trim(stream, second).await.unwrap().first_offset.0, 2);
        let mut pull = client.pull([stream], Version::ZERO).await.unwrap();
        assert_eq!(pull.next().await.unwrap_err().code(), Code::Trimmed);
        assert_eq!(append(&client, stream, "x").await.unwrap(), 3, "the node goes on");
        client.close().await;
    });
    node.stop();
}

/// A blind append, as the client crate would send it.
fn commit(request: u64, stream: StreamId) -> CommitRequest {
    let mut records = bytes::BytesMut::new();
    Record::append("by hand").encode(&mut records);
    let bytes = records.len() as u32;
    CommitRequest {
        answered_below: RequestId(0),
        sections: vec![SectionEntry { stream, record_count: 1, bytes }],
        payload: records.freeze().into(),
        ..CommitRequest::empty(CommitKind::User, RequestId(request))
    }
}

/// What a hand-made request is answered.
async fn outcome(peer: &mut Peer, request: CommitRequest) -> CommitOutcome {
    let number = request.request;
    let frame = wire::encode(&peer.envelope(Role::Proxy(0), request)).to_bytes();
    peer.write(Lane::Commit, &frame).await;
    match peer.receive(Lane::Commit).await {
        Message::CommitReply(reply) if reply.request == number => reply.outcome,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_proxy_checks_what_a_client_should_have_checked() {
    let (node, _directory) = node(SMALL_FILES);
    run(async {
        let client = node.client().await;
        let stream = client.create_stream("orders").await.unwrap();
        let mut peer = Peer::greeted(&node, 0xbad).await;
        let base = |number| commit(number, stream);
        let with = |number, change: fn(&mut CommitRequest)| {
            let mut request = base(number);
            change(&mut request);
            request
        };
        let inverted = |request: &mut CommitRequest| {
            let range = KeyRange { begin: b"b", end: common::RangeEnd::Before(b"a") };
            request.writes = Ranges::from_ranges([range]);
        };
        let cases = [
            (
                with(1, |r| r.writes = Ranges::from_ranges([KeyRange::point(&[b'k'; 10_241])])),
                Code::KeyTooLong,
            ),
            (with(2, inverted), Code::RangeInverted),
            (
                with(3, |r| r.writes = Ranges::from_ranges([KeyRange::point(b"\xff")])),
                Code::SystemKey,
            ),
            (with(4, |r| r.sections[0].stream = StreamId(999)), Code::UnknownStream),
            (with(5, |r| r.sections[0].stream = StreamId::IDS), Code::SystemStream),
            (with(6, |r| r.sections[0].record_count = 2), Code::Malformed),
            (with(7, |r| r.sections[0].bytes += 1), Code::Malformed),
            (
                with(8, |r| r.payload = bytes::Bytes::from_static(b"no record").into()),
                Code::Malformed,
            ),
            (
                with(9, |r| r.payload = bytes::Bytes::from(vec![0; 300_000]).into()),
                Code::TransactionTooLarge,
            ),
            (with(10, |r| r.kind = CommitKind::Recovery), Code::Malformed),
            (
                with(11, |r| {
                    r.read_version = Version(u64::MAX);
                    r.reads = Ranges::from_ranges([KeyRange::point(b"k")]);
                }),
                Code::FutureVersion,
            ),
        ];
        for (request, code) in cases {
            let number = request.request;
            match outcome(&mut peer, request).await {
                CommitOutcome::Refused(refusal) => assert_eq!(refusal.code(), code, "{refusal}"),
                other => panic!("{number}: {other:?} instead of {code}"),
            }
        }
        let good = outcome(&mut peer, base(12)).await;
        assert!(matches!(good, CommitOutcome::Committed { .. }), "{good:?}");
        assert!(peer.is_open());
        assert_eq!(Records::of(&client, &[stream]).await.values(stream), ["by hand"]);
        client.close().await;
    });
    node.stop();
}

/// A frame with a good checksum over whatever it holds.
fn frame_with(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = bytes.len() as u32;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    let checksum = crc32c::crc32c(&bytes[8..]);
    bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn status_frame(peer: &Peer) -> Vec<u8> {
    let status = Status { request: RequestId(1) };
    wire::encode(&peer.envelope(Role::Node, status)).to_bytes().to_vec()
}

const PROTOCOL_CODE: u64 = CloseCode::PROTOCOL.0 as u64;

#[test]
fn frames_that_are_none_close_their_connection_and_nothing_else() {
    let (node, _directory) = node(SMALL_FILES);
    run(async {
        let client = node.client().await;
        let stream = client.create_stream("orders").await.unwrap();
        let mut count = 0;
        let mut next = async |said: &str, spoil: fn(Vec<u8>) -> Vec<u8>, greets: bool| {
            count += 1;
            let mut peer = match greets {
                true => Peer::greeted(&node, 0x0bad_0000 + count).await,
                false => Peer::connect(&node, 0x0bad_0000 + count).await,
            };
            let bytes = spoil(status_frame(&peer));
            peer.write(Lane::Control, &bytes).await;
            if said == "inside" {
                peer.finish(Lane::Control);
            }
            let (code, reason) = peer.closed().await;
            assert_eq!(code, PROTOCOL_CODE, "{said}: {reason}");
            assert!(reason.contains(said), "{said} is not in {reason:?}");
            // Another client of the same node.
            let offset = append(&client, stream, said).await.unwrap();
            assert_eq!(offset, count - 1);
        };
        // The transport's frames.
        next("inside", |frame| frame[..frame.len() - 1].to_vec(), true).await;
        next("Control", |_| b"GET / HTTP/1.1\r\nHost: millrace\r\n\r\n".repeat(10), true).await;
        next("Control", |_| vec![0; 100], true).await;
        let over = |_| (FRAME_BYTES_MAX as u32 + 1).to_le_bytes().to_vec();
        next("Control", over, true).await;
        // The messages in them.
        let flipped = |mut frame: Vec<u8>| {
            *frame.last_mut().unwrap() ^= 1;
            frame
        };
        next("checksum", flipped, true).await;
        let bad_role = |mut frame: Vec<u8>| {
            frame[16] = 77;
            frame_with(frame)
        };
        next("role", bad_role, true).await;
        let bad_body = |mut frame: Vec<u8>| {
            frame.pop();
            let body = frame.len() as u32 - 40;
            frame[20..24].copy_from_slice(&body.to_le_bytes());
            frame_with(frame)
        };
        next("type 62", bad_body, true).await;
        let bad_length = |mut frame: Vec<u8>| {
            frame[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
            frame_with(frame)
        };
        next("outside", bad_length, true).await;
        // No hello.
        next("hello", |frame| frame, false).await;
        client.close().await;
    });
    node.stop();
}

#[test]
fn an_unknown_message_is_refused_and_the_connection_stays() {
    let (node, _directory) = node(SMALL_FILES);
    run(async {
        let mut peer = Peer::greeted(&node, 0xbad).await;
        let mut frame = status_frame(&peer);
        frame[10..12].copy_from_slice(&999_u16.to_le_bytes());
        peer.write(Lane::Control, &frame_with(frame)).await;
        match peer.receive(Lane::Control).await {
            Message::Refused(refused) => assert_eq!(refused.refusal.code(), Code::Unsupported),
            other => panic!("{other:?}"),
        }
        let frame = status_frame(&peer);
        peer.write(Lane::Control, &frame).await;
        let answer = peer.receive(Lane::Control).await;
        assert!(matches!(answer, Message::StatusReply(_)), "{answer:?}");

        // To a role that is not played here.
        let pull = Pull {
            request: RequestId(5),
            streams: vec![StreamId(16)],
            after: Version::ZERO,
            bytes_max: 1,
            wait_ms: 0,
            want: Version::ZERO,
        };
        let frame = wire::encode(&peer.envelope(Role::Proxy(9), pull)).to_bytes();
        peer.write(Lane::Pull, &frame).await;
        match peer.receive(Lane::Control).await {
            Message::Refused(refused) => assert_eq!(refused.refusal.code(), Code::NotHere),
            other => panic!("{other:?}"),
        }
        assert!(peer.is_open());
    });
    node.stop();
}

#[test]
fn a_client_can_not_say_what_only_roles_say() {
    let (node, _directory) = node(SMALL_FILES);
    run(async {
        let client = node.client().await;
        let stream = client.create_stream("orders").await.unwrap();
        append(&client, stream, "x").await.unwrap();
        let epoch = client.cluster().await.unwrap().epoch;
        let mut peer = Peer::greeted(&node, 0xbad).await;
        let forged: [(Role, Message); 5] = [
            (Role::LogServer, Lock { generation: Epoch(1) }.into()),
            (Role::LogServer, Announce { known_committed: Version(u64::MAX) }.into()),
            (Role::LogServer, Confirm { number: 1 }.into()),
            (Role::Sequencer, VersionRequest { number: 1, answered: 0 }.into()),
            (Role::Leader, Recruited { role: Role::LogServer }.into()),
        ];
        for (to, message) in forged {
            for epoch in [epoch, epoch.plus(1)] {
                let envelope = Envelope { epoch, ..peer.envelope(to, message.clone()) };
                peer.write(Lane::Control, &wire::encode(&envelope).to_bytes()).await;
                match peer.receive(Lane::Control).await {
                    Message::Refused(refused) => {
                        assert_eq!(refused.refusal.code(), Code::Malformed, "{to:?}");
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(append(&client, stream, "y").await.unwrap(), 1, "the node goes on");
        assert_eq!(client.cluster().await.unwrap().epoch, epoch, "in the same epoch");
        client.close().await;
    });
    node.stop();
}

#[test]
fn who_lies_about_itself_is_sent_away() {
    let (node, _directory) = node(SMALL_FILES);
    run(async {
        let client = node.client().await;
        let stream = client.create_stream("orders").await.unwrap();

        // A client that speaks as a proxy.
        let mut peer = Peer::greeted(&node, 0xbad).await;
        let Envelope { from, to, .. } =
            peer.envelope(Role::LogServer, Status { request: RequestId(1) });
        let push = Push {
            previous_version: Version(1),
            version: Version(2),
            commit_time: WallTime(0),
            known_committed: Version(u64::MAX),
            answered: Version::ZERO,
            blocks: Vec::new(),
            payload: Payload::new(),
        };
        let from = Endpoint { role: Role::Proxy(0), ..from };
        let forged = Envelope { from, to, epoch: Epoch(1), message: push.into() };
        peer.write(Lane::Commit, &wire::encode(&forged).to_bytes()).await;
        let (code, reason) = peer.closed().await;
        assert_eq!(code, u64::from(CloseCode::IDENTITY.0), "{reason}");
        assert!(reason.contains("Proxy"), "{reason}");

        // A hello under the node's own name, under that of somebody who is there, and as another node.
        let Message::Hello(own) = hello_answer(&node).await else { panic!("a hello") };
        let there = Peer::greeted(&node, 0x900d).await;
        let stranger =
            Hello { is_client: false, peer: common::Peer { node: NodeId(7), ..own.peer }, ..own };
        for hello in [Hello { is_client: true, ..own }, there.hello(), stranger] {
            let mut liar = Peer::connect(&node, 0xbad).await;
            liar.send(Lane::Control, hello).await;
            let (code, reason) = liar.closed().await;
            assert_eq!(code, u64::from(CloseCode::IDENTITY.0), "{reason}");
        }
        assert!(there.is_open());

        // Another protocol.
        let mut late = Peer::connect(&node, 0xbad3).await;
        let hello =
            Hello { protocol_min: PROTOCOL + 1, protocol_max: PROTOCOL + 5, ..late.hello() };
        late.send(Lane::Control, hello).await;
        let (code, reason) = late.closed().await;
        assert_eq!(code, u64::from(CloseCode::PROTOCOL_MISMATCH.0), "{reason}");
        let (low, high) = (PROTOCOL + 1, PROTOCOL + 5);
        assert!(reason.contains(&format!("protocol {low} to {high}")), "{reason}");

        assert_eq!(append(&client, stream, "x").await.unwrap(), 0, "the node goes on");
        client.close().await;
    });
    node.stop();
}

async fn hello_answer(node: &Node) -> Message {
    let mut peer = Peer::connect(node, 0xbad1).await;
    peer.send(Lane::Control, peer.hello()).await;
    peer.receive(Lane::Control).await
}

#[test]
fn a_full_disk_refuses_commits_until_a_trim_makes_room() {
    let quota = ["--quota-bytes", "1_600_000"].map(|word| word.replace('_', ""));
    let quota: Vec<&str> = quota.iter().map(String::as_str).collect();
    let (node, _directory) = node(&[TINY_FILES, &quota].concat());
    run(async {
        let client = node.client().await;
        let stream = client.create_stream("orders").await.unwrap();
        // An id lives for ten minutes, and what it lies in as long: it would keep the room.
        let append = async |value: String| {
            let mut transaction = Transaction::new();
            transaction.at_most_once().append(stream, value);
            client.commit(transaction).await
        };
        let mut kept = Vec::new();
        let refusal = loop {
            let value = format!("{} {}", kept.len(), "x".repeat(30_000));
            match append(value.clone()).await {
                Ok(_) => kept.push(value),
                Err(error) => break error,
            }
            assert!(kept.len() < 60, "a quota of 1.6 MB holds no 1.8 MB");
        };
        assert_eq!(refusal.code(), Code::DiskFull);
        assert!(refusal.is_retryable());
        assert!(kept.len() >= 8, "{} fit", kept.len());
        let status: serde_json::Value =
            serde_json::from_str(&client.status().await.unwrap()).unwrap();
        assert_eq!(status["log"]["state"], "full");

        // What is there can be read, and questions be asked.
        let records = Records::of(&client, &[stream]).await;
        assert_eq!(records.values(stream), kept);
        assert_eq!(append("late".to_owned()).await.unwrap_err().code(), Code::DiskFull);

        let through = records.all().last().unwrap().position.version;
        let trimmed = client.trim(stream, through).await.unwrap();
        assert_eq!(trimmed.first_offset.0, kept.len() as u64);
        let goes_on = async {
            loop {
                match append("again".to_owned()).await {
                    Ok(committed) => return committed,
                    Err(error) => assert_eq!(error.code(), Code::DiskFull),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let committed = tokio::time::timeout(HANG, goes_on).await.expect("it goes on by itself");
        assert_eq!(committed.offsets[0].1.unwrap().0, kept.len() as u64);
        client.close().await;
    });
    node.stop();
}
