//! The twin's dequantiser against the peer's vectors, bit for bit: every codec, three matrices each.

use riparian::model::tensors::{Codec, Matrix};
use riparian::reference::dequantize::dequantize_row;

use crate::common::oracle;

#[test]
fn every_vector_is_dequantised_bit_for_bit() {
    let folder = oracle("cmf/vectors").expect("bundled");
    for (case, shape) in [("ramp", [2, 64]), ("random", [3, 96]), ("zero", [2, 64])] {
        for codec in [Codec::F32, Codec::F16, Codec::Bf16, Codec::Q8_2f, Codec::Q4tp] {
            let read = |leaf: &str| std::fs::read(folder.join(format!("{case}.{codec}.{leaf}"))).expect("a vector");
            let matrix = Matrix::from_payload(case, codec, shape, read("bin"));
            let mut values = vec![0.0; shape[0] * shape[1]];
            for (r, row) in values.chunks_exact_mut(shape[1]).enumerate() {
                dequantize_row(&matrix, r, row);
            }
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(bytes, read("dequant.f32"), "{case} in {codec}");
        }
    }
}
