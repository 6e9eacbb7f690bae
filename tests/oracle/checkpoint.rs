//! A fixture's weights under text-layout names, straight into the decoder's types: no file and no import between.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use riparian::model::geometry::{BlockKind, Geometry};
use riparian::model::tensors::{Codec, Matrix};
use riparian::model::weights::{
    AttentionWeights, Block, DecoderWeights, DraftWeights, MambaWeights, Mixer, MlpWeights, MoeWeights,
};
use safetensors::{Dtype, SafeTensors};

use crate::weights::{self, Stored};

/// Tensors by name.
#[derive(Debug)]
pub(crate) struct Checkpoint(HashMap<String, Tensor>);

#[derive(Debug)]
struct Tensor {
    codec: Codec,
    shape: Vec<usize>,
    /// Little-endian.
    bytes: Arc<Vec<u8>>,
}

/// Whether a tensor belongs to the decoder or its draft layer.
fn of_decoder(name: &str) -> bool {
    ["backbone.", "lm_head.", "mtp."].iter().any(|part| name.starts_with(part))
}

/// A tensor of the safetensors files of a folder in the text layout.
fn stored(folder: &Path, name: &str) -> Option<Stored> {
    let files = std::fs::read_dir(folder).expect("a checkpoint folder").map(|entry| entry.expect("an entry").path());
    for path in files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")) {
        let bytes = std::fs::read(&path).expect("a readable checkpoint");
        if let Ok(view) = SafeTensors::deserialize(&bytes).expect("safetensors").tensor(name) {
            return Some(Stored { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() });
        }
    }
    None
}

impl Checkpoint {
    /// Rebuilds the decoder of a folder in `oracle/fixtures`; weights that were trained come from the folder's own
    /// checkpoint.
    pub(crate) fn of_fixture(case: &weights::Case, folder: &Path) -> Self {
        let fitted = |name: &str| {
            // one bias of the perception module: no part of the decoder
            let unread = Stored { dtype: Dtype::F32, shape: Vec::new(), bytes: Vec::new() };
            if of_decoder(name) { stored(&folder.join("checkpoint"), name) } else { Some(unread) }
        };
        let tensors = case.tensors(fitted);
        if tensors.iter().all(|(name, _)| of_decoder(name)) {
            case.check_digest(&tensors);
        }
        let tensors =
            tensors.into_iter().filter(|(name, _)| of_decoder(name)).map(|(name, Stored { dtype, shape, bytes })| {
                let codec = match dtype {
                    Dtype::F32 => Codec::F32,
                    Dtype::BF16 => Codec::Bf16,
                    other => panic!("{name}: {other:?}"),
                };
                (name, Tensor { codec, shape, bytes: Arc::new(bytes) })
            });
        Self(tensors.collect())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn matrix(&self, name: &str) -> Matrix {
        let Tensor { codec, shape, bytes } = self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        let shape: [usize; 2] = shape[..].try_into().unwrap_or_else(|_| panic!("{name}: {shape:?}"));
        Matrix::new(name, *codec, shape, Arc::clone(bytes) as _, 0)
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        let Tensor { codec, bytes, .. } = self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
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
