//! The oracle's codec vectors, bit for bit.

use std::fs;

use riparian::model::container::Container;
use riparian::model::hash::hash64;
use riparian::model::mmap::Access;
use riparian::model::quant;
use riparian::model::tensors::{Codec, Matrix};
use serde_json::Value;

use crate::common::oracle;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_vector_is_read_bit_for_bit() {
    let dir = oracle("cmf/vectors").expect("bundled");
    let list: Value = serde_json::from_slice(&fs::read(dir.join("vectors.json")).unwrap()).unwrap();
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 15);
    let container = Container::open(&dir.join("vectors.cmf"), Access::Mapped).unwrap();
    assert_eq!(container.tensors().len(), 15);
    assert_eq!(container.vocab().map(<[u8]>::len), Some(9));
    for vector in list {
        let stem = format!("{}.{}", vector["case"].as_str().unwrap(), vector["dtype"].as_str().unwrap());
        let codec = Codec::from_code(u8::try_from(vector["code"].as_u64().unwrap()).unwrap()).unwrap();
        let [rows, cols] = [0, 1].map(|i| vector["shape"][i].as_u64().unwrap() as usize);
        let payload = fs::read(dir.join(format!("{stem}.bin"))).unwrap();
        let want: Vec<f32> = (fs::read(dir.join(format!("{stem}.dequant.f32"))).unwrap().as_chunks().0.iter())
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        assert_eq!(format!("{:016x}", hash64(&payload)), vector["hash64"].as_str().unwrap(), "{stem}");
        let matrix = Matrix::from_payload(&stem, codec, [rows, cols], payload.clone());
        assert_eq!(bits(&quant::dequantize(&matrix)), bits(&want), "{stem}");
        let stored = (container.tensors().iter())
            .find(|tensor| tensor.codec() == codec && tensor.payload() == payload)
            .unwrap_or_else(|| panic!("{stem} is not in vectors.cmf"));
        assert_eq!(bits(&stored.to_f32()), bits(&want), "{stem} from the container");
    }
}
