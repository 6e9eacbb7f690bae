//! A published checkpoint's tensors under the names of `cmf.md` §7, as an import would write them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use riparian::audio::config::AudioConfig;
use riparian::audio::perception::Perception;
use riparian::audio::weights::Tensors;
use riparian::model::quant::{self, float};
use riparian::model::tensors::{Codec, Matrix};
use safetensors::{Dtype, SafeTensors};

/// All tensors of a safetensors file.
pub(crate) struct Checkpoint {
    tensors: HashMap<String, (Vec<usize>, Codec, Vec<u8>)>,
    integers: HashMap<String, Vec<u32>>,
}

impl Checkpoint {
    pub(crate) fn open(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (mut tensors, mut integers) = (HashMap::new(), HashMap::new());
        for (name, view) in file.iter() {
            let codec = match view.dtype() {
                Dtype::F32 => Codec::F32,
                Dtype::BF16 => Codec::Bf16,
                Dtype::I32 => {
                    let ids = view.data().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
                    integers.insert(name.to_owned(), ids.collect());
                    continue;
                }
                _ => continue,
            };
            let (name, shape, data) = rename(name, view.shape(), view.data());
            tensors.insert(name, (shape, codec, data));
        }
        Self { tensors, integers }
    }

    /// The tensor as f32.
    pub(crate) fn values(&self, name: &str) -> Vec<f32> {
        self.floats(name).unwrap_or_else(|| panic!("{name}")).1
    }
}

impl Checkpoint {
    /// The same tensors with every matrix in q8_2f.
    pub(crate) fn in_q8_2f(&self) -> Self {
        let quantize = |(shape, codec, data): &(Vec<usize>, Codec, Vec<u8>)| match shape[..] {
            [_, cols] => {
                let values = float::decode(*codec, data);
                let payload = quant::encode(Codec::Q8_2f, &quant::Floats::new(&values, cols)).unwrap();
                (shape.clone(), Codec::Q8_2f, payload)
            }
            _ => (shape.clone(), *codec, data.clone()),
        };
        let perception = |name: &str| name.starts_with("perception.") || name.starts_with("ctc_timestamp.");
        let tensors = self.tensors.iter().filter(|(name, _)| perception(name));
        Self { tensors: tensors.map(|(n, t)| (n.clone(), quantize(t))).collect(), integers: HashMap::new() }
    }

    /// A tensor of whole numbers.
    pub(crate) fn ids(&self, name: &str) -> &[u32] {
        &self.integers[name]
    }
}

/// What the file format calls a tensor, and how it lays it out.
fn rename(name: &str, shape: &[usize], data: &[u8]) -> (String, Vec<usize>, Vec<u8>) {
    let Some(rest) = name.strip_prefix("ctc_timestamp.decoder.") else {
        return (name.to_owned(), shape.to_vec(), data.to_vec());
    };
    let rest = rest.replace("decoder_layers.0.", "head.");
    let name = format!("ctc_timestamp.{rest}");
    match (rest.as_str(), shape) {
        ("head.weight", [classes, width, 1]) => (name, vec![*classes, *width], data.to_vec()),
        ("upsample.weight", &[inputs, outputs, taps]) => {
            // `[in, out, tap]` to `[tap * out, in]`, elements of two bytes.
            let size = data.len() / (inputs * outputs * taps);
            let mut turned = Vec::with_capacity(data.len());
            for tap in 0..taps {
                for output in 0..outputs {
                    for input in 0..inputs {
                        let at = ((input * outputs + output) * taps + tap) * size;
                        turned.extend_from_slice(&data[at..at + size]);
                    }
                }
            }
            (name, vec![taps * outputs, inputs], turned)
        }
        _ => (name, shape.to_vec(), data.to_vec()),
    }
}

impl Tensors for Checkpoint {
    fn matrix(&self, name: &str) -> Option<Matrix> {
        let (shape, codec, data) = self.tensors.get(name)?;
        let &[rows, cols] = &shape[..] else { return None };
        Some(Matrix::from_payload(name, *codec, [rows, cols], data.clone()))
    }

    fn floats(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let (shape, codec, data) = self.tensors.get(name).filter(|(_, codec, _)| !codec.is_quantized())?;
        Some((shape.clone(), float::decode(*codec, data)))
    }
}

/// `config.json` of a checkpoint; a bare `Infinity` is none of ours.
pub(crate) fn config(folder: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    serde_json::from_str(&text.replace("Infinity", "1e30")).unwrap()
}

/// The perception module of a checkpoint's folder.
pub(crate) fn perception(folder: &Path) -> (Arc<Perception>, Checkpoint) {
    let checkpoint = Checkpoint::open(&folder.join("model.safetensors"));
    let config = AudioConfig::from_json(&config(folder)).unwrap();
    (Arc::new(Perception::load(&checkpoint, config).unwrap()), checkpoint)
}
