//! Judges what clients were told against what consumers were given. Knows numbers and strings only: nothing
//! of the system judges itself.
//!
//! ```text
//!  callers --Told: sent, answered, verdict, what was read--.
//!                                                          |--> check() --> what is wrong, by rule
//!  consumers --Seen: stream, offset, position, value ------'
//! ```
//!
//! # Rules
//! 1. What was acknowledged is there once, where it was said to be.
//! 2. What was refused is nowhere, and nothing is there that nobody has sent.
//! 3. Nothing is there twice.
//! 4. A stream's offsets are 0, 1, 2 ..., and its positions never go back.
//! 5. All consumers were given the same.
//! 6. Who was sent after another was acknowledged comes after it in the order.
//! 7. Transfers read what those before them in the order wrote, and the sum of all accounts stays.
//! 8. No caller was told of an error.

use std::collections::{BTreeMap, BTreeSet};

/// Version, place in the batch.
pub type Place = (u64, u16);

/// What became of a transaction, as its caller was told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It is in the log at this position; each stream's offset.
    Committed(Place, Vec<(u64, u64)>),
    /// It never will be.
    Refused,
    /// Neither.
    Error(String),
}

/// One call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    /// The transaction's own name; its records' values begin with it.
    pub name: String,
    /// When it was sent, on the one clock of all callers.
    pub sent: u64,
    /// When it was answered.
    pub answered: u64,
    /// Accounts that it read and what they held.
    pub reads: Vec<(String, i64)>,
    /// What it was told.
    pub verdict: Verdict,
}

/// One record as a consumer was given it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Its stream.
    pub stream: u64,
    /// Its place in the stream.
    pub offset: u64,
    /// Its transaction's place.
    pub position: Place,
    /// Its key.
    pub key: String,
    /// Its value: a name; in the bank's stream a name and a balance.
    pub value: String,
}

impl Seen {
    fn name(&self) -> &str {
        self.value.split(' ').next().unwrap_or_default()
    }

    fn balance(&self) -> Option<i64> {
        self.value.split(' ').nth(1)?.parse().ok()
    }
}

/// Everything that was told and seen.
#[derive(Clone, Default, Debug)]
pub struct History {
    /// Every call.
    pub told: Vec<Told>,
    /// What each consumer was given, in its order, from the beginning to the end.
    pub consumers: Vec<Vec<Seen>>,
    /// The stream of accounts, and what they hold together once they are open.
    pub bank: (u64, i64),
}

/// Complaints of one rule, at most.
const COMPLAINTS_MAX: usize = 5;

/// What is wrong, with the rule's number first; nothing, when all is well.
#[must_use]
pub fn check(history: &History) -> Vec<String> {
    type Rule = fn(&History) -> Vec<String>;
    let rules: [Rule; 8] =
        [acknowledged, refused, doubled, dense, agreement, real_time, bank, errors];
    let complaints = (1..).zip(rules).flat_map(|(number, rule)| {
        let wrong = rule(history);
        let count = wrong.len();
        let told = wrong.into_iter().take(COMPLAINTS_MAX);
        told.map(move |what| format!("rule {number}, one of {count}: {what}"))
    });
    complaints.collect()
}

/// The consumer that the others are compared with.
fn read(history: &History) -> &[Seen] {
    history.consumers.first().map_or(&[], Vec::as_slice)
}

fn by_name(history: &History) -> BTreeMap<&str, Vec<&Seen>> {
    let mut all: BTreeMap<&str, Vec<&Seen>> = BTreeMap::new();
    for seen in read(history) {
        all.entry(seen.name()).or_default().push(seen);
    }
    all
}

fn acknowledged(history: &History) -> Vec<String> {
    let there = by_name(history);
    let mut wrong = Vec::new();
    for told in &history.told {
        let Verdict::Committed(position, offsets) = &told.verdict else { continue };
        let found = there.get(told.name.as_str()).map_or(&[][..], Vec::as_slice);
        if found.is_empty() || found.iter().any(|seen| seen.position != *position) {
            wrong.push(format!("{told:?}, found {found:?}"));
        }
        // A transaction's records of one stream follow each other from the offset that it was told.
        for (stream, offset) in offsets {
            let first = found.iter().filter(|seen| seen.stream == *stream).map(|seen| seen.offset);
            if first.min() != Some(*offset) {
                wrong.push(format!("{told:?}, in stream {stream} found {found:?}"));
            }
        }
    }
    wrong
}

fn refused(history: &History) -> Vec<String> {
    let sent: BTreeMap<&str, &Told> =
        history.told.iter().map(|told| (told.name.as_str(), told)).collect();
    let mut wrong = Vec::new();
    for seen in read(history) {
        match sent.get(seen.name()) {
            None => wrong.push(format!("nobody has sent {seen:?}")),
            Some(told) if told.verdict == Verdict::Refused => {
                wrong.push(format!("refused and there: {seen:?}"));
            }
            Some(_) => {}
        }
    }
    wrong
}

fn doubled(history: &History) -> Vec<String> {
    let mut known = BTreeSet::new();
    let seen = read(history).iter();
    let twins = seen.filter(|seen| !known.insert((seen.stream, &seen.key, seen.name())));
    twins.map(|seen| format!("a second time: {seen:?}")).collect()
}

fn dense(history: &History) -> Vec<String> {
    let mut next: BTreeMap<u64, (u64, Place)> = BTreeMap::new();
    let mut wrong = Vec::new();
    for seen in read(history) {
        let (offset, position) = next.entry(seen.stream).or_default();
        if seen.offset != *offset || seen.position < *position {
            wrong.push(format!("after {position:?} comes not {offset}, but {seen:?}"));
        }
        (*offset, *position) = (seen.offset + 1, seen.position);
    }
    wrong
}

fn agreement(history: &History) -> Vec<String> {
    let mut wrong = Vec::new();
    for (number, other) in history.consumers.iter().enumerate().skip(1) {
        let first = read(history);
        let same = first.iter().zip(other).take_while(|(left, right)| left == right).count();
        if same < first.len().max(other.len()) {
            let (left, right) = (first.get(same), other.get(same));
            wrong.push(format!("record {same}: {left:?}, but to consumer {number} {right:?}"));
        }
    }
    wrong
}

fn real_time(history: &History) -> Vec<String> {
    let committed = |told: &Told| match &told.verdict {
        Verdict::Committed(position, _) => Some(*position),
        _ => None,
    };
    // Every instant is another one: (when, is it sent, where it is, who).
    let mut instants: Vec<(u64, bool, Place, &str)> = Vec::new();
    for told in &history.told {
        let Some(position) = committed(told) else { continue };
        instants.push((told.sent, true, position, &told.name));
        instants.push((told.answered, false, position, &told.name));
    }
    instants.sort_unstable();
    let (mut wrong, mut last) = (Vec::new(), None);
    for (_, is_sent, position, name) in instants {
        if !is_sent {
            last = last.max(Some((position, name)));
        } else if last.is_some_and(|(last, _)| last >= position) {
            wrong.push(format!("{name} at {position:?} was sent when {last:?} was acknowledged"));
        }
    }
    wrong
}

fn bank(history: &History) -> Vec<String> {
    let (stream, total) = history.bank;
    let sent: BTreeMap<&str, &Told> =
        history.told.iter().map(|told| (told.name.as_str(), told)).collect();
    let records: Vec<&Seen> = read(history).iter().filter(|seen| seen.stream == stream).collect();
    let (mut accounts, mut wrong) = (BTreeMap::<&str, i64>::new(), Vec::new());
    for transfer in records.chunk_by(|left, right| left.position == right.position) {
        let reads = sent.get(transfer[0].name()).map_or(&[][..], |told| told.reads.as_slice());
        for (account, held) in reads {
            let holds = accounts.get(account.as_str()).copied();
            if holds != Some(*held) {
                wrong.push(format!("{account} holds {holds:?}, not {held}: {transfer:?}"));
            }
        }
        for seen in transfer {
            let Some(balance) = seen.balance() else {
                wrong.push(format!("no balance: {seen:?}"));
                continue;
            };
            accounts.insert(&seen.key, balance);
        }
        let sum: i64 = accounts.values().sum();
        if sum != total {
            wrong.push(format!("{sum} instead of {total} after {transfer:?}"));
        }
    }
    wrong
}

fn errors(history: &History) -> Vec<String> {
    let of = |told: &Told| match &told.verdict {
        Verdict::Error(what) => Some(format!("{}: {what}", told.name)),
        _ => None,
    };
    history.told.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: u64 = 20;
    const BANK: u64 = 21;

    fn told(name: &str, at: (u64, u64), verdict: Verdict) -> Told {
        Told { name: name.to_owned(), sent: at.0, answered: at.1, reads: Vec::new(), verdict }
    }

    fn seen(stream: u64, offset: u64, position: Place, key: &str, value: &str) -> Seen {
        Seen { stream, offset, position, key: key.to_owned(), value: value.to_owned() }
    }

    /// Two appends, two accounts and a transfer between them, one refusal.
    fn good() -> History {
        let committed =
            |version, stream, offset| Verdict::Committed((version, 0), vec![(stream, offset)]);
        let mut transfer = told("t1", (7, 8), committed(40, BANK, 2));
        transfer.reads = vec![("a".to_owned(), 100), ("b".to_owned(), 100)];
        let read = vec![
            seen(STREAM, 0, (10, 0), "", "w0"),
            seen(BANK, 0, (20, 0), "a", "open 100"),
            seen(BANK, 1, (20, 0), "b", "open 100"),
            seen(STREAM, 1, (30, 0), "", "w1"),
            seen(BANK, 2, (40, 0), "a", "t1 70"),
            seen(BANK, 3, (40, 0), "b", "t1 130"),
        ];
        History {
            told: vec![
                told("w0", (1, 2), committed(10, STREAM, 0)),
                told("open", (3, 4), committed(20, BANK, 0)),
                told("w1", (5, 6), committed(30, STREAM, 1)),
                transfer,
                told("no", (9, 10), Verdict::Refused),
            ],
            consumers: vec![read.clone(), read],
            bank: (BANK, 200),
        }
    }

    /// Spoils the good history for all consumers alike; the rules that complain.
    fn rules(spoil: impl Fn(&mut History)) -> BTreeSet<u64> {
        let mut history = good();
        spoil(&mut history);
        let first = history.consumers[0].clone();
        history.consumers[1] = first;
        broken(&history)
    }

    fn broken(history: &History) -> BTreeSet<u64> {
        let number = |text: &String| text[5..6].parse().unwrap();
        check(history).iter().map(number).collect()
    }

    #[test]
    fn a_good_history_passes() {
        assert_eq!(check(&good()), [""; 0]);
    }

    #[test]
    fn what_was_acknowledged_must_be_there_and_in_its_place() {
        let lost = rules(|history| {
            history.consumers[0].remove(3);
        });
        assert_eq!(lost, [1].into());
        let elsewhere = rules(|history| history.consumers[0][3].position = (31, 0));
        assert_eq!(elsewhere, [1].into());
        let offset = |history: &mut History| {
            history.told[2].verdict = Verdict::Committed((30, 0), vec![(STREAM, 4)]);
        };
        assert_eq!(rules(offset), [1].into());
    }

    #[test]
    fn what_was_refused_or_never_sent_must_not_be_there() {
        let refused = |history: &mut History| {
            history.consumers[0].push(seen(STREAM, 2, (50, 0), "", "no"));
        };
        assert_eq!(rules(refused), [2].into());
        let invented = |history: &mut History| {
            history.consumers[0].push(seen(STREAM, 2, (50, 0), "", "who"));
        };
        assert_eq!(rules(invented), [2].into());
    }

    #[test]
    fn nothing_may_be_there_twice() {
        let twice = |history: &mut History| {
            history.consumers[0].push(seen(STREAM, 2, (30, 0), "", "w1"));
        };
        assert_eq!(rules(twice), [3].into());
    }

    #[test]
    fn offsets_must_be_dense_and_positions_in_order() {
        let gap = |history: &mut History| {
            history.told.push(told("w2", (11, 12), Verdict::Error("lost".to_owned())));
            history.consumers[0].push(seen(STREAM, 3, (50, 0), "", "w2"));
        };
        assert_eq!(rules(gap), [4, 8].into());
        let back = |history: &mut History| {
            history.told.push(told("w2", (11, 12), Verdict::Error("lost".to_owned())));
            history.consumers[0].push(seen(STREAM, 2, (29, 0), "", "w2"));
        };
        assert_eq!(rules(back), [4, 8].into());
    }

    #[test]
    fn consumers_must_agree() {
        let mut history = good();
        history.consumers[1].pop();
        assert_eq!(broken(&history), [5].into());
        let mut history = good();
        history.consumers[1].swap(0, 1);
        assert_eq!(broken(&history), [5].into());
    }

    #[test]
    fn the_order_must_keep_to_real_time() {
        // w1 is sent only after the transfer, which comes after it, was acknowledged.
        let late = rules(|history| (history.told[2].sent, history.told[2].answered) = (11, 12));
        assert_eq!(late, [6].into());
        // While both are on their way either may be first.
        let both = rules(|history| (history.told[2].sent, history.told[2].answered) = (7, 12));
        assert_eq!(both, [].into());
    }

    #[test]
    fn transfers_must_read_what_is_there_and_keep_the_sum() {
        let stale = rules(|history| history.told[3].reads[0].1 = 90);
        assert_eq!(stale, [7].into());
        let torn = rules(|history| history.consumers[0][5].value = "t1 100".to_owned());
        assert_eq!(torn, [7].into());
    }

    #[test]
    fn no_call_may_end_in_an_error() {
        let error = |history: &mut History| {
            history.told[4].verdict = Verdict::Error("timed out".to_owned());
        };
        assert_eq!(rules(error), [8].into());
    }
}
