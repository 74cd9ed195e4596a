//! The trace: a running hash over everything that happens, and its text on demand.
//!
//! Two runs of one seed agree in the hash or the simulation is broken. The text is what people read when they
//! replay a seed; making it changes nothing.

use core::fmt;
use core::hash::{Hash, Hasher};

use crate::clock::Moment;
use common::disk::{DiskCompletion, DiskOp, DiskOutput, DiskRequest};

/// A running 128-bit hash and, on demand, the last lines of text.
#[derive(Clone, Debug)]
pub struct Trace {
    state: [u64; 2],
    events: u64,
    text: Option<Vec<String>>,
}

const LINES_MAX: usize = 200_000;

impl Trace {
    /// A trace; `with_text` keeps the lines.
    #[must_use]
    pub fn new(with_text: bool) -> Self {
        Self {
            state: [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344],
            events: 0,
            text: with_text.then(Vec::new),
        }
    }

    /// Takes a word in.
    pub const fn word(&mut self, word: u64) {
        let [a, b] = self.state;
        let mixed = (a ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let a = mixed ^ (mixed >> 29);
        let b = (b.rotate_left(23) ^ a).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.state = [a, b];
    }

    /// Takes bytes in: eight at a time, the last ones with their number.
    fn bytes(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word) ^ 8 << 56);
        }
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            self.word(u64::from_le_bytes(word) ^ (rest.len() as u64) << 56);
        }
    }

    /// Takes an event in: when, at whom, what kind.
    pub const fn event(&mut self, at: Moment, node: u64, kind: u64) {
        self.events += 1;
        self.word(at.0);
        self.word(node);
        self.word(kind);
    }

    /// Takes text in, piece by piece, without building it.
    pub fn debug(&mut self, what: &impl fmt::Debug) {
        let mut hasher = TextHasher { trace: self };
        fmt::write(&mut hasher, format_args!("{what:?}")).expect("hashing does not fail");
    }

    /// Takes a value in.
    pub fn value(&mut self, what: &impl Hash) {
        what.hash(&mut ValueHasher { trace: self });
    }

    /// Adds a line when the text is wanted; the line is only made then.
    pub fn line(&mut self, at: Moment, line: impl FnOnce() -> String) {
        if let Some(text) = &mut self.text {
            if text.len() >= LINES_MAX {
                text.drain(..LINES_MAX / 2);
            }
            let (seconds, micros) = (at.0 / 1_000_000_000, at.0 / 1000 % 1_000_000);
            text.push(format!("{seconds:4}.{micros:06} {}", line()));
        }
    }

    /// The hash so far.
    #[must_use]
    pub fn hash(&self) -> u128 {
        u128::from(self.state[0]) << 64 | u128::from(self.state[1])
    }

    /// How many events there were.
    #[must_use]
    pub const fn event_count(&self) -> u64 {
        self.events
    }

    /// The lines.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        self.text.as_deref().unwrap_or_default()
    }
}

struct TextHasher<'a> {
    trace: &'a mut Trace,
}

impl fmt::Write for TextHasher<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.trace.bytes(text.as_bytes());
        Ok(())
    }
}

struct ValueHasher<'a> {
    trace: &'a mut Trace,
}

impl Hasher for ValueHasher<'_> {
    fn write(&mut self, bytes: &[u8]) {
        self.trace.bytes(bytes);
    }

    fn write_u64(&mut self, word: u64) {
        self.trace.word(word);
    }

    fn finish(&self) -> u64 {
        self.trace.state[1]
    }
}

/// A request in a line of the trace, without its data.
pub(crate) fn brief(request: &DiskRequest) -> String {
    let what = match &request.op {
        DiskOp::Write { file, offset, data, durable } => {
            format!("Write {file:?} at {offset} + {} durable {durable}", data.len())
        }
        op => format!("{op:?}"),
    };
    format!("{:?} {:?} {what}", request.id, request.lane)
}

/// What came of a request, without its data.
pub(crate) fn verdict(completion: &DiskCompletion) -> String {
    match &completion.result {
        Ok(DiskOutput::Data(data)) => format!("{} bytes", data.len()),
        result => format!("{result:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_content_change_the_hash() {
        let hash = |words: &[u64]| {
            let mut trace = Trace::new(false);
            words.iter().for_each(|word| trace.word(*word));
            trace.hash()
        };
        assert_eq!(hash(&[1, 2]), hash(&[1, 2]));
        assert_ne!(hash(&[1, 2]), hash(&[2, 1]));
        assert_ne!(hash(&[0]), hash(&[0, 0]));
    }

    #[test]
    fn text_is_kept_only_on_demand() {
        let mut trace = Trace::new(false);
        trace.line(Moment::ZERO, || panic!("nobody wants the text"));
        let mut trace = Trace::new(true);
        trace.line(Moment(1_500_000), || "x".to_owned());
        assert_eq!(trace.lines(), ["   0.001500 x"]);
    }
}
