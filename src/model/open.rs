//! From a container to a model: every tensor is found and its shape checked before anything reads it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::config::{ConfigError, TextConfig, token_ids};
use super::container::{Container, ContainerError, Tensor};
use super::geometry::{BlockKind, Geometry};
use super::layout::{self, Kind};
use super::mmap::{Access, Changed};
use super::popularity;
use super::tensors::{Codec, Matrix};
use super::weights::{
    AttentionWeights, Block, DecoderWeights, DraftWeights, MambaWeights, Mixer, MlpWeights, MoeWeights,
};
use crate::ids::{ExpertIx, TokenId};

/// The architecture a file must name: the peer's word for every Nemotron-H file.
pub const ARCHITECTURE: &str = "nemotron3_5_transcribe";
/// The text that ends a turn, whose id always stops decoding.
const END_OF_TURN: &str = "<|im_end|>";

/// How to open a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Map the file, or read it into memory (`CMF_NEMO_MMAP`).
    pub access: Access,
}

/// Why a file is no model that can be run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container was refused.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// A file of another architecture.
    #[error("the file's architecture is {seen:?}, wanted {ARCHITECTURE:?}")]
    Architecture {
        /// `arch.arch_name`, empty when there is none.
        seen: String,
    },
    /// Nothing says what the decoder looks like.
    #[error("the header has no provenance.nemotron_transcribe.{key}")]
    NoConfig {
        /// What is missing.
        key: &'static str,
    },
    /// The decoder's config was refused.
    #[error("llm_config: {0}")]
    Config(#[from] ConfigError),
    /// A tensor that the config calls for.
    #[error("tensor {name} is missing")]
    Missing {
        /// Its name.
        name: String,
    },
    /// A tensor whose shape the config contradicts.
    #[error("tensor {name} has the shape {seen:?}, wanted {want:?}")]
    Shape {
        /// Its name.
        name: String,
        /// Its dimensions.
        seen: Vec<usize>,
        /// The dimensions the config gives.
        want: Vec<usize>,
    },
    /// A vector, or the router, in a quantised codec.
    #[error("tensor {name} is stored as {seen}, wanted f32, f16 or bf16")]
    Quantized {
        /// Its name.
        name: String,
        /// Its codec.
        seen: Codec,
    },
    /// The file is not what was opened any more.
    #[error("{}: {changed}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// How.
        changed: Changed,
    },
    /// A list of hot experts that cannot be one.
    #[error("expert_hot: {0}")]
    ExpertHot(String),
    /// The vocab section is no tokenizer.
    #[error("the vocab section is no tokenizer.json: {0}")]
    Tokenizer(String),
}

/// A model, ready to be computed with. Immutable and shared by all actors.
#[derive(Debug)]
pub struct Model {
    /// Shapes and constants.
    pub geometry: Geometry,
    /// The decoder's weights.
    pub decoder: DecoderWeights,
    /// The file, for what is not the decoder's: perception, timestamps.
    pub container: Container,
    /// Ids that end a text: of `generation_config`, else of the config, and `<|im_end|>`'s.
    pub eos: Vec<TokenId>,
    /// For each bank of the decoder all its experts, most used first; empty when the file does not say.
    pub expert_hot: Vec<Vec<ExpertIx>>,
    /// The placeholder for an audio row in a prompt.
    pub audio_token: Option<TokenId>,
    /// `provenance.nemotron_transcribe`: audio config, processor, chat template, …
    pub provenance: Value,
}

impl Model {
    /// Whether its files are still those that were opened (`mmap.rs`).
    ///
    /// # Errors
    ///
    /// [`ModelError::Changed`].
    pub fn still_intact(&self) -> Result<(), ModelError> {
        self.container.still_intact().map_err(|(path, changed)| ModelError::Changed { path, changed })
    }

    /// The bytes of `tokenizer.json`.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&[u8]> {
        self.container.vocab()
    }

    /// The bytes of the word alignment tokenizer's `tokenizer.json`.
    #[must_use]
    pub fn alignment_tokenizer(&self) -> Option<&str> {
        self.provenance.get("alignment_tokenizer")?.as_str()
    }
}

/// Opens a file (given one shard, all of them) and checks it against its config. Popularity of experts that was
/// observed and lies beside the file goes before the file's own ([`popularity`]).
///
/// # Errors
///
/// See [`ModelError`].
pub fn open(path: &Path, options: &OpenOptions) -> Result<Arc<Model>, ModelError> {
    let container = Container::open(path, options.access)?;
    let observed = popularity::read(path, &container).map_err(ModelError::ExpertHot)?;
    let model = with_popularity(container, observed)?;
    tracing::info!(path = %path.display(), tensors = model.container.tensors().len(), draft = model.geometry.draft, "opened");
    Ok(model)
}

/// As [`open`], from a container that is open already.
///
/// # Errors
///
/// See [`ModelError`].
pub fn from_container(container: Container) -> Result<Arc<Model>, ModelError> {
    with_popularity(container, None)
}

/// With lists of hot experts that go before the file's own, as in its header.
fn with_popularity(container: Container, observed: Option<Value>) -> Result<Arc<Model>, ModelError> {
    let config = text_config(&container)?;
    check(&container, &config)?;
    let provenance = container.header()["provenance"]["nemotron_transcribe"].clone();
    let decoder = Weights { container: &container, config: &config }.decoder();
    let audio_token = token_ids(&provenance, "audio_token_id")?.first().copied();
    let eos = end_ids(&container, &provenance, &config)?;
    let expert_hot = expert_hot(observed.as_ref().or_else(|| provenance.get("expert_hot")), &config.geometry)?;
    Ok(Arc::new(Model { geometry: config.geometry, decoder, container, eos, expert_hot, audio_token, provenance }))
}

/// The decoder's config as a file's header gives it.
///
/// # Errors
///
/// Another architecture, no config, or one that is refused.
pub fn text_config(container: &Container) -> Result<TextConfig, ModelError> {
    let header = container.header();
    let seen = header.pointer("/arch/arch_name").and_then(Value::as_str).unwrap_or_default();
    if seen != ARCHITECTURE {
        return Err(ModelError::Architecture { seen: seen.into() });
    }
    let provenance =
        header.pointer("/provenance/nemotron_transcribe").ok_or(ModelError::NoConfig { key: "llm_config" })?;
    let config = provenance.get("llm_config").ok_or(ModelError::NoConfig { key: "llm_config" })?;
    Ok(TextConfig::read(config, container.tensor(layout::DRAFT_MARK).is_some())?)
}

/// Every tensor of the decoder is there, in its shape, in a codec its use allows.
fn check(container: &Container, config: &TextConfig) -> Result<(), ModelError> {
    for wanted in layout::decoder(config) {
        let Some(tensor) = container.tensor(&wanted.name) else {
            return Err(ModelError::Missing { name: wanted.name });
        };
        if tensor.shape() != wanted.shape {
            return Err(ModelError::Shape { name: wanted.name, seen: tensor.shape().to_vec(), want: wanted.shape });
        }
        let exact = matches!(wanted.kind, Kind::Exact | Kind::ExactF32);
        if exact && tensor.codec().is_quantized() {
            return Err(ModelError::Quantized { name: wanted.name, seen: tensor.codec() });
        }
    }
    Ok(())
}

fn end_ids(container: &Container, provenance: &Value, config: &TextConfig) -> Result<Vec<TokenId>, ModelError> {
    let mut ids = match provenance.get("generation_config") {
        Some(generation) => token_ids(generation, "eos_token_id")?,
        None => Vec::new(),
    };
    if ids.is_empty() {
        ids.clone_from(&config.eos);
    }
    ids.extend(container.vocab().map(end_of_turn).transpose()?.flatten());
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// The id of `<|im_end|>` among a tokenizer's added tokens.
fn end_of_turn(tokenizer: &[u8]) -> Result<Option<TokenId>, ModelError> {
    #[derive(serde::Deserialize)]
    struct Tokenizer {
        #[serde(default)]
        added_tokens: Vec<Added>,
    }
    #[derive(serde::Deserialize)]
    struct Added {
        id: u32,
        content: String,
    }
    let tokenizer: Tokenizer =
        serde_json::from_slice(tokenizer).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
    Ok(tokenizer.added_tokens.iter().find(|token| token.content == END_OF_TURN).map(|token| TokenId(token.id)))
}

/// The file's lists, each completed by the experts it leaves out, in order of their numbers.
fn expert_hot(lists: Option<&Value>, geometry: &Geometry) -> Result<Vec<Vec<ExpertIx>>, ModelError> {
    let Some(lists) = lists.filter(|lists| !lists.is_null()) else { return Ok(Vec::new()) };
    let fail = |what: String| ModelError::ExpertHot(what);
    let lists = lists.as_array().ok_or_else(|| fail("not a list".into()))?;
    let (layers, experts) = (geometry.decoder_layers(), geometry.moe.map_or(0, |moe| moe.experts));
    if lists.len() != layers {
        return Err(fail(format!("{} lists, wanted one for each of {layers} MoE blocks", lists.len())));
    }
    let complete = |(layer, list): (usize, &Value)| {
        let mut seen = vec![false; experts];
        let mut order = Vec::with_capacity(experts);
        for value in list.as_array().ok_or_else(|| fail(format!("list {layer} is no list")))? {
            let expert = value.as_u64().and_then(|e| usize::try_from(e).ok()).filter(|&e| e < experts);
            let expert =
                expert.ok_or_else(|| fail(format!("list {layer} names expert {value}, there are {experts}")))?;
            if std::mem::replace(&mut seen[expert], true) {
                return Err(fail(format!("list {layer} names expert {expert} twice")));
            }
            order.push(ExpertIx::from(expert));
        }
        order.extend((0..experts).filter(|&expert| !seen[expert]).map(ExpertIx::from));
        Ok(order)
    };
    lists.iter().enumerate().map(complete).collect()
}

/// Picks tensors out of a container that [`check`] found complete.
struct Weights<'a> {
    container: &'a Container,
    config: &'a TextConfig,
}

impl Weights<'_> {
    fn tensor(&self, name: &str) -> &Tensor {
        self.container.tensor(name).unwrap_or_else(|| panic!("{name} was checked to be there"))
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.tensor(name).to_f32()
    }

    fn matrix(&self, name: &str) -> Matrix {
        self.tensor(name).matrix().unwrap_or_else(|| panic!("{name} was checked to be a matrix"))
    }

    fn decoder(&self) -> DecoderWeights {
        let embedding = self.matrix("model.embed_tokens.weight");
        let block = |(i, &kind): (usize, &BlockKind)| {
            let prefix = layout::mixer(i, kind);
            let mixer = match kind {
                BlockKind::Mamba => Mixer::Mamba(Box::new(self.mamba(&prefix))),
                BlockKind::Attention => Mixer::Attention(self.attention(&prefix)),
                BlockKind::Moe => Mixer::Moe(Box::new(self.moe(&prefix))),
                BlockKind::Mlp => Mixer::Mlp(self.mlp(&prefix)),
            };
            Block { norm: self.floats(&format!("model.layers.{i}.norm.weight")), mixer }
        };
        DecoderWeights {
            blocks: self.config.geometry.blocks.iter().enumerate().map(block).collect(),
            final_norm: self.floats("model.norm.weight"),
            head: if self.config.tied_head { embedding.clone() } else { self.matrix("lm_head.weight") },
            draft: self.config.geometry.draft.then(|| Box::new(self.draft())),
            embedding,
        }
    }

    fn mamba(&self, prefix: &str) -> MambaWeights {
        let conv = self.floats(&format!("{prefix}conv1d.weight"));
        let channels = self.tensor(&format!("{prefix}conv1d.weight")).shape()[0];
        let conv_bias =
            if self.config.conv_bias { self.floats(&format!("{prefix}conv1d.bias")) } else { vec![0.0; channels] };
        MambaWeights {
            in_proj: self.matrix(&format!("{prefix}in_proj.weight")),
            out_proj: self.matrix(&format!("{prefix}out_proj.weight")),
            conv,
            conv_bias,
            a_log: self.floats(&format!("{prefix}A_log")),
            d_skip: self.floats(&format!("{prefix}D")),
            dt_bias: self.floats(&format!("{prefix}dt_bias")),
            norm: self.floats(&format!("{prefix}norm.weight")),
        }
    }

    fn attention(&self, prefix: &str) -> AttentionWeights {
        let [q, k, v, o] = ["q", "k", "v", "o"].map(|part| self.matrix(&format!("{prefix}{part}_proj.weight")));
        AttentionWeights { q, k, v, o }
    }

    fn moe(&self, prefix: &str) -> MoeWeights {
        let moe = self.config.geometry.moe.expect("read with the blocks");
        MoeWeights {
            gate: self.floats(&format!("{prefix}gate.weight")),
            bias: self.floats(&format!("{prefix}gate.e_score_correction_bias")),
            experts: (0..moe.experts).map(|expert| self.mlp(&format!("{prefix}experts.{expert}."))).collect(),
            shared: self.mlp(&format!("{prefix}shared_experts.")),
            latent: (moe.latent)
                .map(|_| ["fc1", "fc2"].map(|part| self.matrix(&format!("{prefix}{part}_latent_proj.weight")))),
        }
    }

    fn mlp(&self, prefix: &str) -> MlpWeights {
        let [up, down] = ["up", "down"].map(|part| self.matrix(&format!("{prefix}{part}_proj.weight")));
        MlpWeights { up, down }
    }

    fn draft(&self) -> DraftWeights {
        DraftWeights {
            enorm: self.floats("mtp.layers.0.enorm.weight"),
            hnorm: self.floats("mtp.layers.0.hnorm.weight"),
            eh_proj: self.matrix(layout::DRAFT_MARK),
            attention_norm: self.floats("mtp.layers.0.norm.weight"),
            attention: self.attention("mtp.layers.0.mixer."),
            moe_norm: self.floats("mtp.layers.1.norm.weight"),
            moe: Box::new(self.moe("mtp.layers.1.mlp.")),
            final_norm: self.floats("mtp.layers.1.final_layernorm.weight"),
        }
    }
}
