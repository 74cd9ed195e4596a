//! A bitmap whose ranges are cheap to set and to ask: which places of a batch's sorted keys are written.
//!
//! ```text
//! words   0000 1111 1111 0110 0000      any   01110     a bit a word: it has a bit
//!                                       full  01100     a bit a word: it has them all
//! ```
//!
//! Setting a range skips the words that are full, so all ranges of a batch fill each word once. Asking skips
//! the words without a bit.

#[derive(Clone, Debug, Default)]
pub(super) struct Bits {
    words: Vec<u64>,
    any: Vec<u64>,
    full: Vec<u64>,
}

/// The bits `from..to` of a word, with `to` in `1..=64`.
const fn mask(from: usize, to: usize) -> u64 {
    (u64::MAX << from) & (u64::MAX >> (64 - to))
}

impl Bits {
    /// `len` bits, none of them set.
    pub(super) fn reset(&mut self, len: usize) {
        let words = len.div_ceil(64);
        let summary = words.div_ceil(64);
        for (column, len) in
            [(&mut self.words, words), (&mut self.any, summary), (&mut self.full, summary)]
        {
            column.clear();
            column.resize(len, 0);
        }
    }

    /// Sets `from..to`, which must not be empty.
    pub(super) fn set(&mut self, from: usize, to: usize) {
        assert!(from < to && to <= self.words.len() * 64, "{from}..{to} of {}", self.words.len());
        let (first, last) = (from / 64, (to - 1) / 64);
        let (head, tail) = (from % 64, (to - 1) % 64 + 1);
        if first == last {
            return self.fill(first, mask(head, tail));
        }
        self.fill(first, mask(head, 64));
        self.fill(last, mask(0, tail));
        let mut word = first + 1;
        while word < last {
            // The next word that is not full, if it is in the same word of the summary.
            let open = !self.full[word / 64] >> (word % 64);
            if open == 0 {
                word = (word / 64 + 1) * 64;
                continue;
            }
            word += open.trailing_zeros() as usize;
            if word < last {
                self.fill(word, u64::MAX);
                word += 1;
            }
        }
    }

    fn fill(&mut self, word: usize, mask: u64) {
        self.words[word] |= mask;
        self.any[word / 64] |= 1 << (word % 64);
        if self.words[word] == u64::MAX {
            self.full[word / 64] |= 1 << (word % 64);
        }
    }

    /// Whether a bit of `from..to` is set.
    pub(super) fn any(&self, from: usize, to: usize) -> bool {
        // The whole words between the first and the last one are asked by their summary.
        any_in(&self.words, from, to, |from, to| {
            any_in(&self.any, from, to, |from, to| self.any[from..to].iter().any(|word| *word != 0))
        })
    }
}

/// Whether a bit `from..to` of `words` is set; `between` says it of a range of whole words.
fn any_in(
    words: &[u64],
    from: usize,
    to: usize,
    between: impl FnOnce(usize, usize) -> bool,
) -> bool {
    if from >= to {
        return false;
    }
    let (first, last) = (from / 64, (to - 1) / 64);
    let (head, tail) = (from % 64, (to - 1) % 64 + 1);
    if first == last {
        return words[first] & mask(head, tail) != 0;
    }
    words[first] & mask(head, 64) != 0
        || words[last] & mask(0, tail) != 0
        || between(first + 1, last)
}

#[cfg(test)]
mod tests {
    use common::Prng;

    use super::*;

    #[test]
    fn like_a_list_of_booleans() {
        let mut bits = Bits::default();
        for seed in 0..200 {
            let mut prng = Prng::new(seed);
            let len = prng.between(1, 20_000);
            let width = *prng.pick(&[3, 70, 5000, 20_000]);
            bits.reset(len as usize);
            let mut model = vec![false; len as usize];
            for _ in 0..60 {
                let from = prng.below(len);
                let to = prng.between(from + 1, len.min(from + width).max(from + 1));
                let (from, to) = (from as usize, to as usize);
                assert_eq!(bits.any(from, to), model[from..to].contains(&true), "{from}..{to}");
                assert!(!bits.any(from, from));
                if prng.chance(1, 2) {
                    bits.set(from, to);
                    model[from..to].fill(true);
                }
            }
        }
    }
}
