//! Checkpoints rebuilt by the hash rule of `oracle/README.md`, and their weights under text-layout names.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use riparian::model::geometry::{BlockKind, Geometry};
use riparian::model::tensors::{Codec, Matrix};
use riparian::model::weights::{
    AttentionWeights, Block, DecoderWeights, DraftWeights, MambaWeights, Mixer, MlpWeights, MoeWeights,
};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Tensors by name: storage, shape and little-endian bytes.
#[derive(Debug, Default)]
pub(crate) struct Checkpoint(HashMap<String, (Codec, Vec<usize>, Arc<Vec<u8>>)>);

/// `u` of the rule, for one tensor: exact in f32.
fn unit(seed: u64, name: &str) -> impl Fn(u64) -> f32 + Sync {
    let hash =
        name.bytes().fold(0xCBF2_9CE4_8422_2325, |h: u64, byte| (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3));
    let base = hash.wrapping_add(seed.wrapping_mul(0xD1B5_4A32_D192_ED03));
    move |i| {
        let mut z = base.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 40) as f32 * 2f32.powi(-24) - 0.5
    }
}

/// Whether a tensor belongs to the decoder or its draft layer.
fn of_decoder(name: &str) -> bool {
    ["backbone.", "lm_head.", "mtp."].iter().any(|part| name.starts_with(part))
}

fn f32_of(value: &Value) -> f32 {
    value.as_f64().expect("a number") as f32
}

impl Checkpoint {
    /// Rebuilds every tensor of a `case.json`'s manifest but the fitted ones and those of the perception module.
    pub(crate) fn rebuild(case: &Value) -> Self {
        let seed = case["seed"].as_u64().expect("a seed");
        let manifest = case["weights"].as_array().expect("a manifest");
        let tensors = manifest.par_iter().filter_map(|entry| {
            let name = entry["name"].as_str().expect("a name");
            if entry.get("fitted").is_some() || !of_decoder(name) {
                return None;
            }
            let number = |v: &Value| usize::try_from(v.as_u64().expect("a size")).expect("a size");
            let shape: Vec<usize> = entry["shape"].as_array().expect("a shape").iter().map(number).collect();
            let (width, center, u) = (f32_of(&entry["width"]), f32_of(&entry["center"]), unit(seed, name));
            let values = (0..shape.iter().product::<usize>() as u64).map(|i| u(i) * width + center);
            let (codec, bytes): (_, Vec<u8>) = match entry["dtype"].as_str() {
                Some("F32") => (Codec::F32, values.flat_map(f32::to_le_bytes).collect()),
                Some("BF16") => {
                    (Codec::Bf16, values.flat_map(|v| half::bf16::from_f32(v).to_bits().to_le_bytes()).collect())
                }
                other => panic!("{name}: dtype {other:?}"),
            };
            Some((name.to_owned(), (codec, shape, Arc::new(bytes))))
        });
        Self(tensors.collect())
    }

    /// Whether the manifest has fitted weights of the decoder, which no rule makes.
    pub(crate) fn misses_some(&self, case: &Value) -> bool {
        let names = case["weights"].as_array().expect("a manifest").iter();
        names.map(|entry| entry["name"].as_str().expect("a name")).any(|name| of_decoder(name) && !self.has(name))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Adds what is missing from the safetensors files of a folder in the text layout.
    pub(crate) fn complete_from(&mut self, folder: &Path) {
        for entry in std::fs::read_dir(folder).expect("a checkpoint folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_none_or(|e| e != "safetensors") {
                continue;
            }
            let bytes = std::fs::read(&path).expect("a readable checkpoint");
            for (name, view) in SafeTensors::deserialize(&bytes).expect("safetensors").iter() {
                let codec = match view.dtype() {
                    Dtype::F32 => Codec::F32,
                    Dtype::BF16 => Codec::Bf16,
                    other => panic!("{name}: {other:?}"),
                };
                let stored = (codec, view.shape().to_vec(), Arc::new(view.data().to_vec()));
                match self.0.get(name) {
                    Some(rebuilt) => assert_eq!(rebuilt, &stored, "{name}: rebuilt by the rule and stored"),
                    None => drop(self.0.insert(name.to_owned(), stored)),
                }
            }
        }
    }

    fn matrix(&self, name: &str) -> Matrix {
        let (codec, shape, bytes) = self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        let shape: [usize; 2] = shape[..].try_into().unwrap_or_else(|_| panic!("{name}: {shape:?}"));
        Matrix::new(name, *codec, shape, Arc::clone(bytes) as _, 0)
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        let (codec, _, bytes) = self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        match codec {
            Codec::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Codec::Bf16 => bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            other => panic!("{name}: {other}"),
        }
    }

    /// The decoder's weights (`model.md` §3.1).
    pub(crate) fn decoder(&self, geometry: &Geometry) -> DecoderWeights {
        let blocks = geometry.blocks.iter().enumerate().map(|(i, kind)| {
            let mixer = format!("backbone.layers.{i}.mixer.");
            Block {
                norm: self.vector(&format!("backbone.layers.{i}.norm.weight")),
                mixer: match kind {
                    BlockKind::Mamba => Mixer::Mamba(Box::new(self.mamba(&mixer))),
                    BlockKind::Attention => Mixer::Attention(self.attention(&mixer)),
                    BlockKind::Moe => Mixer::Moe(Box::new(self.moe(&mixer, geometry))),
                    BlockKind::Mlp => Mixer::Mlp(self.mlp(&mixer)),
                },
            }
        });
        DecoderWeights {
            embedding: self.matrix("backbone.embeddings.weight"),
            blocks: blocks.collect(),
            final_norm: self.vector("backbone.norm_f.weight"),
            head: self.matrix("lm_head.weight"),
            draft: geometry.draft.then(|| {
                Box::new(DraftWeights {
                    enorm: self.vector("mtp.layers.0.enorm.weight"),
                    hnorm: self.vector("mtp.layers.0.hnorm.weight"),
                    eh_proj: self.matrix("mtp.layers.0.eh_proj.weight"),
                    attention_norm: self.vector("mtp.layers.0.norm.weight"),
                    attention: self.attention("mtp.layers.0.mixer."),
                    moe_norm: self.vector("mtp.layers.1.norm.weight"),
                    moe: Box::new(self.moe("mtp.layers.1.mixer.", geometry)),
                    final_norm: self.vector("mtp.layers.1.final_layernorm.weight"),
                })
            }),
        }
    }

    fn mamba(&self, mixer: &str) -> MambaWeights {
        let vector = |leaf: &str| self.vector(&format!("{mixer}{leaf}"));
        MambaWeights {
            in_proj: self.matrix(&format!("{mixer}in_proj.weight")),
            out_proj: self.matrix(&format!("{mixer}out_proj.weight")),
            conv: vector("conv1d.weight"),
            conv_bias: vector("conv1d.bias"),
            a_log: vector("A_log"),
            d_skip: vector("D"),
            dt_bias: vector("dt_bias"),
            norm: vector("norm.weight"),
        }
    }

    fn attention(&self, mixer: &str) -> AttentionWeights {
        let matrix = |leaf: &str| self.matrix(&format!("{mixer}{leaf}_proj.weight"));
        AttentionWeights { q: matrix("q"), k: matrix("k"), v: matrix("v"), o: matrix("o") }
    }

    fn mlp(&self, prefix: &str) -> MlpWeights {
        MlpWeights {
            up: self.matrix(&format!("{prefix}up_proj.weight")),
            down: self.matrix(&format!("{prefix}down_proj.weight")),
        }
    }

    fn moe(&self, mixer: &str, geometry: &Geometry) -> MoeWeights {
        let moe = geometry.moe.expect("MoE numbers");
        MoeWeights {
            gate: self.vector(&format!("{mixer}gate.weight")),
            bias: self.vector(&format!("{mixer}gate.e_score_correction_bias")),
            experts: (0..moe.experts).map(|e| self.mlp(&format!("{mixer}experts.{e}."))).collect(),
            shared: self.mlp(&format!("{mixer}shared_experts.")),
            latent: moe
                .latent
                .map(|_| ["fc1", "fc2"].map(|fc| self.matrix(&format!("{mixer}{fc}_latent_proj.weight")))),
        }
    }
}
