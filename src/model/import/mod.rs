//! Published checkpoints: a folder of safetensors files and JSON (`model.md` §3).
//!
//! Weights stay mapped and are found by the names of either layout, text
//! (Nano, Lightning) or NeMo (Transcribe); nothing is copied before it is
//! asked for.

mod config;
mod files;
mod names;

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::config::{ConfigError, TextConfig};
use super::layout::{self, Kind, Role};
pub use config::Extras;
pub use files::{Files, Stored};
pub use names::{Planned, Source};

/// Why a folder is no checkpoint that can be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// What the system says.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Neither one file of weights nor an index.
    #[error("{} holds neither model.safetensors nor model.safetensors.index.json", dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
    },
    /// A damaged file of weights, or another format.
    #[error("{} is no safetensors file: {reason}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        reason: String,
    },
    /// An index that contradicts its files.
    #[error("model.safetensors.index.json: {0}")]
    Index(String),
    /// A JSON file that is none.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Why it was refused.
        source: ConfigError,
    },
    /// Another kind of model.
    #[error("model_type is {seen:?}, wanted nemotron_h (text) or nemo_speechlm (transcription)")]
    Architecture {
        /// `model_type`, empty when there is none.
        seen: String,
    },
    /// A checkpoint of already quantised weights.
    #[error(
        "{what}: quantised checkpoints (FP8, NVFP4 and others) are not supported; convert from the BF16, F16 or F32 \
         checkpoint of the same model"
    )]
    Quantized {
        /// What says so.
        what: String,
    },
    /// A tensor that the config calls for.
    #[error("no tensor for {name}, looked for {}", tried.join(", "))]
    Missing {
        /// Its name in a CMF file.
        name: String,
        /// The names it may have in a checkpoint.
        tried: Vec<String>,
    },
    /// A tensor whose shape the config contradicts.
    #[error("tensor {name} has the shape {seen:?}, wanted {want:?}")]
    Shape {
        /// Its name in the checkpoint.
        name: String,
        /// Its dimensions.
        seen: Vec<usize>,
        /// The dimensions the config gives.
        want: Vec<usize>,
    },
}

/// A checkpoint, opened: every tensor of its decoder found, its shape checked.
#[derive(Debug)]
pub struct Checkpoint {
    /// The decoder's config, checked.
    pub text: TextConfig,
    /// The same as JSON, with the blocks in the peer's words.
    pub text_json: Value,
    /// Everything else a CMF header carries.
    pub extras: Extras,
    /// The weights.
    pub files: Files,
    /// Every tensor a CMF file of it has, in the order it is written.
    pub planned: Vec<Planned>,
    /// Tensors that have no use here, by their names in the checkpoint.
    pub unused: Vec<String>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `dir`.
    ///
    /// # Errors
    ///
    /// See [`ImportError`].
    pub fn open(dir: &Path) -> Result<Self, ImportError> {
        let files = Files::open(dir)?;
        let config = config::read(dir)?;
        let draft = names::candidates(layout::DRAFT_MARK).iter().any(|name| files.get(name).is_some());
        let text = TextConfig::read(&config.text, draft)
            .map_err(|source| ImportError::Config { path: config.text_path.clone(), source })?;
        let experts = text.geometry.moe.map_or(0, |moe| moe.experts);
        let mut planned: Vec<Planned> =
            layout::decoder(&text).map(|wanted| names::find(&files, wanted, experts)).collect::<Result<_, _>>()?;
        planned.extend(names::perception(&files)?);
        planned.extend(names::timestamps(&files)?);
        let used: HashSet<&str> = planned.iter().map(|planned| planned.source.tensor()).collect();
        let unused = files.names().filter(|name| !used.contains(name) && !names::is_expected_leftover(name));
        let unused = unused.map(str::to_owned).collect();
        let text_json = config::with_block_words(config.text, &text.geometry.blocks);
        let extras = config::extras(dir, &config.whole, &text, &files)?;
        Ok(Self { text, text_json, extras, planned, unused, files })
    }

    /// Whether the checkpoint has perception towers.
    #[must_use]
    pub fn has_perception(&self) -> bool {
        self.planned.iter().any(|planned| planned.role == Role::Perception)
    }
}

/// What a converter may do with a planned tensor.
impl Planned {
    /// Whether its profile decides its codec, rather than the source.
    #[must_use]
    pub fn is_matrix(&self) -> bool {
        matches!(self.kind, Kind::Matrix | Kind::Expert)
    }
}
