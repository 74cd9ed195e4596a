//! The hash of keys: folded multiplication over 16 bytes at a time, the same on every machine.
//!
//! Its key is a constant. A secret would have to come from the epoch's randomness, and it would buy little:
//! verdicts never depend on a hash, since every match is settled by the bytes of the key, and whoever floods
//! a bucket of [`super::points`] makes its look-ups logarithmic, no worse.

const SECRET: [u64; 3] = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0];

/// 64 bits of `key`; all of them are good.
pub(super) fn hash(key: &[u8]) -> u64 {
    let length = key.len();
    let (low, high) = match length {
        17.. => return hash_long(key),
        8.. => (word(key), word(&key[length - 8..])),
        4.. => (half(key), half(&key[length - 4..])),
        1.. => {
            let middle = u64::from(key[length / 2]);
            (u64::from(key[0]) << 8 | middle, u64::from(key[length - 1]))
        }
        0 => (0, 0),
    };
    finish(fold(low ^ SECRET[0], high ^ SECRET[1]), length)
}

fn hash_long(key: &[u8]) -> u64 {
    let (mut sum, last) = (SECRET[0], &key[key.len() - 16..]);
    for chunk in key.chunks_exact(16) {
        sum = fold(word(chunk) ^ sum, word(&chunk[8..]) ^ SECRET[1]);
    }
    finish(fold(word(last) ^ sum, word(&last[8..]) ^ SECRET[1]), key.len())
}

fn finish(sum: u64, length: usize) -> u64 {
    fold(sum ^ length as u64, SECRET[2])
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("the caller has seen 8 bytes"))
}

fn half(bytes: &[u8]) -> u64 {
    u64::from(u32::from_le_bytes(*bytes.first_chunk().expect("the caller has seen 4 bytes")))
}

#[cfg(test)]
mod tests {
    use super::hash;

    #[test]
    fn every_byte_and_the_length_count() {
        for length in 0..70 {
            let key = vec![7; length];
            let of_key = hash(&key);
            assert_ne!(of_key, hash(&[&key[..], &[0]].concat()), "length {length}");
            for place in 0..length {
                let mut other = key.clone();
                other[place] ^= 1;
                assert_ne!(of_key, hash(&other), "byte {place} of {length}");
            }
        }
    }

    #[test]
    fn low_and_high_bits_are_spread() {
        let (mut low, mut high) = ([0_u32; 256], [0_u32; 256]);
        for id in 0_u64..65_536 {
            let hash = hash(&id.to_be_bytes());
            low[(hash & 255) as usize] += 1;
            high[(hash >> 56) as usize] += 1;
        }
        for count in low.into_iter().chain(high) {
            assert!((150..370).contains(&count), "256 are expected, not {count}");
        }
    }
}
