//! A published checkpoint becomes a CMF file (`cmf.md` §6, §7).
//!
//! Tensors are written in the order a step reads them, the two matrices of an
//! expert one after the other, so that what is needed together lies together.
//! At no time is more held in memory than 128 MiB of the source's tensors,
//! or one tensor where that is larger, and their payloads; the rest stays mapped.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Value, json};

use super::geometry::{BlockKind, Geometry};
use super::import::{Checkpoint, Files, ImportError, Planned};
use super::layout::{Kind, Role};
use super::open::ARCHITECTURE;
use super::quant::{self, EncodeError, Rows, float};
use super::tensors::Codec;
use super::writer::{Spec, WriteError, Writer};
use crate::ids::ExpertIx;

/// Source bytes encoded at a time.
const WINDOW: usize = 128 << 20;

/// How matrices are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Quant {
    /// As the source has them.
    #[default]
    Exact,
    /// All in q8_2f.
    Q8_2f,
    /// Routed experts in q4tp, the others in q8_2f.
    Q4tp,
}

impl fmt::Display for Quant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Q8_2f => "q8_2f",
            Self::Q4tp => "q4tp",
        })
    }
}

impl std::str::FromStr for Quant {
    type Err = UnknownQuant;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Exact, Self::Q8_2f, Self::Q4tp]
            .into_iter()
            .find(|quant| quant.to_string() == text)
            .ok_or_else(|| UnknownQuant(text.to_owned()))
    }
}

/// A profile that does not exist.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("unknown profile {0:?}, wanted exact, q8_2f or q4tp")]
pub struct UnknownQuant(pub String);

/// What to convert to.
#[derive(Clone, Debug, Default)]
pub struct ConvertOptions {
    /// How the decoder's matrices are stored.
    pub quant: Quant,
    /// How the matrices of perception and of the word timestamp head are stored. The peer wants them exact.
    pub perception: Quant,
    /// For each MoE block, its experts, most used first, where that is known.
    pub expert_hot: Option<Vec<Vec<ExpertIx>>>,
}

/// How far a conversion is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Tensors written.
    pub tensors: usize,
    /// Tensors in all.
    pub tensors_total: usize,
    /// Payload bytes written.
    pub bytes: u64,
    /// Payload bytes in all.
    pub bytes_total: u64,
    /// The tensor written last.
    pub name: &'a str,
}

/// What a conversion did.
#[derive(Clone, Debug)]
pub struct Report {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its tensors.
    pub tensors: usize,
    /// Matrices stored as q8_2f because q4tp cannot hold their number of columns.
    pub fallbacks: Vec<String>,
    /// Tensors of the checkpoint that were left out, though nothing says that they should be.
    pub unused: Vec<String>,
    /// What the file lacks, in sentences.
    pub notes: Vec<String>,
}

/// Why a checkpoint was not converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The checkpoint was refused.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The file could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A tensor that no codec can hold.
    #[error("tensor {name}: {source}")]
    Encode {
        /// Its name in the file.
        name: String,
        /// Why.
        source: EncodeError,
    },
    /// Hot experts that do not fit the model.
    #[error("expert_hot has {seen} lists, wanted one for each of {want} MoE blocks")]
    ExpertHot {
        /// Lists given.
        seen: usize,
        /// MoE blocks.
        want: usize,
    },
}

/// Converts the checkpoint in the folder `checkpoint` to the file `out`, which appears when it is whole.
///
/// # Errors
///
/// See [`ConvertError`]; the file that was at `out` before, if any, is then still there.
pub fn convert(
    checkpoint: &Path,
    out: &Path,
    options: &ConvertOptions,
    mut progress: impl FnMut(Progress<'_>),
) -> Result<Report, ConvertError> {
    let source = Checkpoint::open(checkpoint)?;
    let layers = source.text.geometry.decoder_layers();
    if let Some(seen) = options.expert_hot.as_ref().map(Vec::len).filter(|seen| *seen != layers) {
        return Err(ConvertError::ExpertHot { seen, want: layers });
    }
    let mut fallbacks = Vec::new();
    let specs: Vec<Spec> = (source.planned.iter())
        .map(|planned| {
            let codec = codec(planned, options, &mut fallbacks);
            Spec { name: planned.name.clone(), codec, shape: planned.shape.clone() }
        })
        .collect();
    let codecs: Vec<Codec> = specs.iter().map(|spec| spec.codec).collect();
    let header = header(&source, options, checkpoint);
    let mut writer = Writer::create(out, header, &source.extras.tokenizer, specs)?;
    let (bytes_total, tensors_total) = (writer.data_len(), codecs.len());
    let (mut bytes, mut next) = (0, 0);
    while next < tensors_total {
        let end = window(&source.planned, next);
        let payloads: Vec<Cow<'_, [u8]>> = (next..end)
            .into_par_iter()
            .map(|i| {
                let name = source.planned[i].name.as_str();
                let _span =
                    tracing::debug_span!(target: "riparian::convert", "convert", name, codec = %codecs[i]).entered();
                payload(&source.planned[i], codecs[i], &source.files)
            })
            .collect::<Result<_, _>>()?;
        for payload in payloads {
            let _span = tracing::debug_span!(target: "riparian::convert", "write", bytes = payload.len()).entered();
            writer.write(next, &payload)?;
            bytes += payload.len() as u64;
            let name = &source.planned[next].name;
            next += 1;
            progress(Progress { tensors: next, tensors_total, bytes, bytes_total, name });
        }
    }
    let bytes = writer.finish()?;
    tracing::info!(path = %out.display(), bytes, tensors = tensors_total, quant = %options.quant, "converted");
    let (unused, notes) = (source.unused, source.extras.notes);
    Ok(Report { path: out.to_owned(), bytes, tensors: tensors_total, fallbacks, unused, notes })
}

/// One past the last tensor of the window that starts at `first`.
fn window(planned: &[Planned], first: usize) -> usize {
    let mut bytes = 0usize;
    let fits = |planned: &&Planned| {
        bytes += planned.shape.iter().product::<usize>() * float::size(planned.codec);
        bytes <= WINDOW
    };
    first + planned[first..].iter().take_while(fits).count().max(1)
}

/// The codec a tensor is written in.
fn codec(planned: &Planned, options: &ConvertOptions, fallbacks: &mut Vec<String>) -> Codec {
    let towers = matches!(planned.role, Role::Perception | Role::Timestamps);
    match (planned.kind, if towers { options.perception } else { options.quant }) {
        (Kind::ExactF32, _) => Codec::F32,
        (Kind::Exact, _) | (Kind::Matrix | Kind::Expert, Quant::Exact) => planned.codec,
        (Kind::Expert, Quant::Q4tp) => {
            if planned.shape[1].is_multiple_of(Codec::GROUP) {
                Codec::Q4tp
            } else {
                fallbacks.push(planned.name.clone());
                Codec::Q8_2f
            }
        }
        (Kind::Matrix | Kind::Expert, _) => Codec::Q8_2f,
    }
}

/// A tensor's bytes in `codec`.
fn payload<'a>(planned: &Planned, codec: Codec, files: &'a Files) -> Result<Cow<'a, [u8]>, ConvertError> {
    let bytes = planned.bytes(files);
    if codec == planned.codec {
        return Ok(bytes);
    }
    let cols = planned.shape.last().copied().unwrap_or(1);
    let rows = Elements { bytes: &bytes, codec: planned.codec, cols };
    let encoded = quant::encode(codec, &rows);
    encoded.map(Cow::Owned).map_err(|source| ConvertError::Encode { name: planned.name.clone(), source })
}

/// A tensor's elements as rows of its last dimension.
struct Elements<'a> {
    bytes: &'a [u8],
    codec: Codec,
    cols: usize,
}

impl Rows for Elements<'_> {
    fn shape(&self) -> [usize; 2] {
        [self.bytes.len() / float::size(self.codec) / self.cols, self.cols]
    }

    fn read(&self, row: usize, out: &mut [f32]) {
        let len = self.cols * float::size(self.codec);
        float::decode_into(self.codec, &self.bytes[row * len..][..len], out);
    }
}

/// The header JSON but for its section hashes.
fn header(source: &Checkpoint, options: &ConvertOptions, checkpoint: &Path) -> Value {
    let mut model = source.extras.provenance.clone();
    model.insert("llm_config".into(), source.text_json.clone());
    if let Some(hot) = &options.expert_hot {
        let lists: Vec<Vec<u16>> = hot.iter().map(|list| list.iter().map(|expert| expert.0).collect()).collect();
        model.insert("expert_hot".into(), json!(lists));
    }
    // The folder's own name says enough; the path to it is nobody's business.
    let folder = checkpoint.file_name().map(|name| name.to_string_lossy());
    json!({
        "format": "cmf",
        "version": super::container::VERSION,
        "arch": arch(&source.text.geometry),
        "quant_type": if options.quant == Quant::Q4tp { "Q4_BLOCK" } else { "Q8_2F" },
        "provenance": {
            "source": folder,
            "converter": concat!("riparian ", env!("CARGO_PKG_VERSION")),
            "quant": options.quant.to_string(),
            "perception_quant": options.perception.to_string(),
            "nemotron_transcribe": model,
        },
    })
}

/// The record every file has for the peer; informational for this architecture.
pub(super) fn arch(geometry: &Geometry) -> Value {
    let attention = geometry.attention;
    let layer_types: Vec<&str> = (geometry.blocks.iter())
        .filter_map(|kind| match kind {
            BlockKind::Mamba => Some("LinearAttention"),
            BlockKind::Attention => Some("FullAttention"),
            BlockKind::Moe | BlockKind::Mlp => None,
        })
        .collect();
    let mut arch = json!({
        "arch_name": ARCHITECTURE,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.moe.map(|moe| moe.shared_inter).or(geometry.mlp_inter).unwrap_or(geometry.hidden),
        "num_layers": layer_types.len(),
        "num_attention_heads": attention.map_or(1, |attention| attention.heads),
        "num_kv_heads": attention.map_or(1, |attention| attention.kv_heads),
        "head_dim": attention.map_or(1, |attention| attention.head_dim),
        "vocab_size": geometry.vocab,
        "layer_types": layer_types,
        "rms_norm_eps": geometry.norm_eps,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.0,
        "hidden_act": "relu2",
        "max_position_embeddings": 65536,
    });
    if let Some(mamba) = geometry.mamba {
        arch["linear_conv_kernel_dim"] = json!(mamba.d_conv);
        arch["linear_num_key_heads"] = json!(mamba.groups);
        arch["linear_num_value_heads"] = json!(mamba.heads);
        arch["linear_key_head_dim"] = json!(mamba.d_state);
        arch["linear_value_head_dim"] = json!(mamba.head_dim);
    }
    if let Some(moe) = geometry.moe {
        arch["moe"] = json!({
            "num_experts": moe.experts,
            "top_k": moe.top_k,
            "moe_intermediate_size": moe.inter,
            "norm_topk_prob": moe.norm_topk,
            "shared_expert_intermediate_size": moe.shared_inter,
            "router_sigmoid": true,
            "routed_scaling_factor": moe.scale,
        });
    }
    arch
}
