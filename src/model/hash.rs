//! hash64, the checksum of headers, directories and payloads (`cmf.md` §2).
//!
//! Each 64-bit word is mixed alone and the results are folded by XOR, so the
//! words may be taken in any order: in parallel, or piece by piece as a file
//! is written. It finds accidents, not attacks.

use rayon::prelude::*;

/// Bytes one task of the parallel version takes.
const CHUNK: usize = 1 << 20;

const fn mix(mut word: u64) -> u64 {
    word ^= word >> 33;
    word = word.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    word ^= word >> 33;
    word = word.wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    word ^ (word >> 33)
}

/// The fold of `bytes`, whose first word has index `first`; the last word is zero-padded.
fn fold(bytes: &[u8], first: u64) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut sum = 0;
    let mut index = first;
    for word in words {
        sum ^= mix(u64::from_le_bytes(*word)) ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        index = index.wrapping_add(1);
    }
    if !rest.is_empty() {
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        sum ^= mix(u64::from_le_bytes(word)) ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    sum
}

/// hash64 of `bytes`; large ones are hashed by all threads of the pool it runs in.
#[must_use]
pub fn hash64(bytes: &[u8]) -> u64 {
    seal(part(bytes, 0), bytes.len() as u64)
}

/// What the bytes from `offset` on (a multiple of 8) add to a hash: the parts of a payload are joined by XOR, in any
/// order, and [`seal`]ed. Only the last part may have a length that is no multiple of 8.
pub(crate) fn part(bytes: &[u8], offset: u64) -> u64 {
    debug_assert!(offset.is_multiple_of(8), "a part begins with a word");
    let first = offset / 8;
    if bytes.len() <= CHUNK {
        return fold(bytes, first);
    }
    let folds = bytes.par_chunks(CHUNK).enumerate().map(|(i, chunk)| fold(chunk, first + (i * (CHUNK / 8)) as u64));
    folds.reduce(|| 0, |a, b| a ^ b)
}

/// The hash of `len` bytes whose parts have the XOR `sum`.
pub(crate) const fn seal(sum: u64, len: u64) -> u64 {
    mix(sum ^ len)
}

/// hash64 of bytes that come in pieces of any length.
#[derive(Clone, Debug, Default)]
pub struct Hasher {
    sum: u64,
    len: u64,
    pending: [u8; 8],
}

impl Hasher {
    /// Adds the next piece.
    pub fn update(&mut self, mut bytes: &[u8]) {
        let held = (self.len % 8) as usize;
        if held > 0 {
            let take = bytes.len().min(8 - held);
            self.pending[held..held + take].copy_from_slice(&bytes[..take]);
            self.len += take as u64;
            bytes = &bytes[take..];
            if self.len.is_multiple_of(8) {
                self.sum ^= fold(&self.pending, self.len / 8 - 1);
            }
        }
        // A word is pending still, and then nothing is left to add.
        if bytes.is_empty() {
            return;
        }
        let whole = bytes.len() / 8 * 8;
        self.sum ^= fold(&bytes[..whole], self.len / 8);
        self.pending[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
        self.len += bytes.len() as u64;
    }

    /// The hash of everything added.
    #[must_use]
    pub fn finish(&self) -> u64 {
        let held = (self.len % 8) as usize;
        let rest = if held > 0 { fold(&self.pending[..held], self.len / 8) } else { 0 };
        mix(self.sum ^ rest ^ self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, word by word.
    fn plain(bytes: &[u8]) -> u64 {
        let mut acc = 0u64;
        for (i, word) in bytes.chunks(8).enumerate() {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            acc ^= mix(u64::from_le_bytes(padded)) ^ (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        mix(acc ^ bytes.len() as u64)
    }

    #[test]
    fn chunks_do_not_show() {
        for len in [0, 1, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
            assert_eq!(hash64(&bytes), plain(&bytes), "{len} bytes");
        }
    }

    proptest! {
        #[test]
        fn pieces_do_not_show(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..12)) {
            let mut hasher = Hasher::default();
            pieces.iter().for_each(|piece| hasher.update(piece));
            prop_assert_eq!(hasher.finish(), plain(&pieces.concat()));
        }
    }
}
