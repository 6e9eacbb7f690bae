//! What each fuzz target does with its bytes. The tests run the same over the seeds (`tests/fuzz_seeds.rs`).
//!
//! Nothing may panic, hang or allocate without bound; errors are right answers.

use std::path::Path;
use std::sync::Arc;

use riparian::audio::read::read_bytes;
use riparian::model::config::{TextConfig, parse_json};
use riparian::model::container::Container;
use riparian::model::convert::{ConvertOptions, Quant, convert};
use riparian::model::hash::hash64;
use riparian::model::open::from_container;
use riparian::model::quant::{self, Floats};
use riparian::model::tensors::{Codec, Matrix};
use riparian::model::{Summary, verify};

/// A file: opened, and all of it read if it opens; as it is, and with the hashes that its sections should have, so that
/// changes get behind them.
pub(crate) fn container(data: &[u8]) {
    read(data.to_vec());
    read(sealed(data));
}

fn read(data: Vec<u8>) {
    let Ok(container) = Container::from_bytes(Path::new("input.cmf"), Arc::new(data)) else { return };
    let _ = verify(&container, |_| {});
    let _ = Summary::of(&container);
    container.tensors().iter().for_each(|tensor| drop(tensor.to_f32()));
    let _ = from_container(container);
}

/// The file with the hashes of its header and directory made right (`cmf.md` §2).
fn sealed(data: &[u8]) -> Vec<u8> {
    let mut sealed = data.to_vec();
    for (section, hash) in [(0x10, 0x70), (0x20, 0x78)] {
        let word = |at: usize| data.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes")));
        let (Some(offset), Some(len), Some(_)) = (word(section), word(section + 8), word(hash)) else { break };
        let Some(end) = offset.checked_add(len).filter(|end| *end <= data.len() as u64) else { continue };
        let right = hash64(&data[offset as usize..end as usize]);
        sealed[hash..hash + 8].copy_from_slice(&right.to_le_bytes());
    }
    sealed
}

/// A recording: what can be read of it is numbers.
pub(crate) fn audio(data: &[u8]) {
    if let Ok(audio) = read_bytes(data.to_vec(), "input") {
        assert!(!audio.samples.is_empty() && audio.samples.iter().all(|sample| sample.is_finite()));
    }
}

/// Codec, rows, columns, then a payload: decoded, and what is finite of it encoded again by every codec.
pub(crate) fn codec(data: &[u8]) {
    let &[codec, rows, cols, ref rest @ ..] = data else { return };
    let codecs = [Codec::F32, Codec::F16, Codec::Bf16, Codec::Q8_2f, Codec::Q4tp];
    let codec = codecs[usize::from(codec) % codecs.len()];
    let (rows, cols) = (1 + usize::from(rows) % 9, 1 + usize::from(cols) % 130);
    let Some(len) = codec.payload_len(rows, cols) else { return };
    let payload: Vec<u8> = rest.iter().copied().chain(std::iter::repeat(0)).take(len).collect();
    let values = quant::dequantize(&Matrix::from_payload("input", codec, [rows, cols], payload));
    let finite = values.iter().all(|value| value.is_finite());
    for codec in codecs {
        match quant::encode(codec, &Floats::new(&values, cols)) {
            Ok(payload) => {
                assert!(finite, "{codec} took a value that is not finite");
                assert_eq!(payload.len(), codec.payload_len(rows, cols).unwrap());
                let again = quant::dequantize(&Matrix::from_payload("again", codec, [rows, cols], payload));
                if codec == Codec::F32 {
                    assert_eq!(again, values);
                }
                assert!(again.iter().all(|value| value.is_finite()), "{codec} made a value that is not finite");
            }
            Err(error) => {
                let narrow = codec == Codec::F16 || codec == Codec::Bf16;
                assert!(!finite || narrow || codec.payload_len(rows, cols).is_none(), "{codec}: {error}");
            }
        }
    }
}

/// Two bytes of length, a `config.json` that long, then a `model.safetensors`: opened and converted.
pub(crate) fn import(data: &[u8]) {
    let Some((&[low, high], rest)) = data.split_first_chunk() else { return };
    let split = usize::from(u16::from_le_bytes([low, high])).min(rest.len());
    let dir = tempfile::tempdir().expect("a folder for the checkpoint");
    std::fs::write(dir.path().join("config.json"), &rest[..split]).expect("a config");
    std::fs::write(dir.path().join("model.safetensors"), &rest[split..]).expect("weights");
    let options = ConvertOptions { quant: Quant::Q4tp, perception: Quant::Q8_2f, expert_hot: None };
    let _ = convert(dir.path(), &dir.path().join("out.cmf"), &options, |_| {});
}

/// A config's text.
pub(crate) fn config(data: &[u8]) {
    let Ok(value) = parse_json(&String::from_utf8_lossy(data)) else { return };
    for draft in [false, true] {
        let _ = TextConfig::read(&value, draft);
    }
}
