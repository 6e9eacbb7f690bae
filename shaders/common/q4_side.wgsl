// Side words of a q4tp row on the device: lo and step of the ladder as f32, then six 5-bit rungs a word.
override SIDE_WORDS: u32; // 2 + ceil(groups / 6)
const CHUNK: u32 = 32u;

fn chunk_scale(side: u32, i: u32) -> f32 {
    let rung = (words[side + 2u + i / 6u] >> (5u * (i % 6u))) & 31u;
    return exp2(bitcast<f32>(words[side]) + f32(rung) * bitcast<f32>(words[side + 1u]));
}

fn row_scale(side: u32) -> f32 {
    return 1.0;
}
