//! What can go wrong for an embedder.

use std::sync::Arc;

use crate::actors::encoder::EncodeError;
use crate::actors::payload::SessionError;
use crate::audio::weights::PerceptionError;
use crate::device::DeviceError;
use crate::ids::TokenId;
use crate::knobs::KnobError;
use crate::model::ModelError;
use crate::text::prompt::PromptError;
use crate::text::tokenizer::TokenizerError;

/// Everything the embedding API can fail with.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model file cannot be used.
    #[error(transparent)]
    Model(Arc<ModelError>),
    /// A knob is not accepted.
    #[error(transparent)]
    Knob(#[from] KnobError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The recording or the audio encoder cannot be used.
    #[error(transparent)]
    Perception(Arc<PerceptionError>),
    /// The prompt or its template cannot be used.
    #[error(transparent)]
    Prompt(Arc<PromptError>),
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(Arc<TokenizerError>),
    /// A session was refused or could not go on.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The context is used up. The ids are those made until then; they stand.
    #[error("the context of {positions} positions is used up after {} tokens", ids.len())]
    ContextUsedUp {
        /// Positions of the context.
        positions: usize,
        /// All ids of the session.
        ids: Vec<TokenId>,
    },
    /// An id that has no embedding row.
    #[error("token id {id} has no embedding: ids end at {}", vocab - 1)]
    UnknownId {
        /// The id given.
        id: TokenId,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// An input row that no decoder could go on from.
    #[error("row {row} of the input holds {value}, every value has to be finite")]
    NotFiniteInput {
        /// The row, counted from the first of this call.
        row: usize,
        /// The first such value in it.
        value: f32,
    },
    /// The file holds a decoder alone.
    #[error("the model has no {part}, which {wanted_for} needs")]
    Missing {
        /// What it lacks.
        part: &'static str,
        /// What that is needed for.
        wanted_for: &'static str,
    },
    /// A thread could not be started.
    #[error("cannot start the thread of the {actor}: {why}")]
    Thread {
        /// Which.
        actor: &'static str,
        /// What the system says.
        why: String,
    },
}

impl Error {
    /// The system refused `actor` a thread.
    pub(super) fn thread(actor: &'static str, why: &std::io::Error) -> Self {
        Self::Thread { actor, why: why.to_string() }
    }
}

impl From<ModelError> for Error {
    fn from(error: ModelError) -> Self {
        Self::Model(Arc::new(error))
    }
}

impl From<PerceptionError> for Error {
    fn from(error: PerceptionError) -> Self {
        Self::Perception(Arc::new(error))
    }
}

impl From<EncodeError> for Error {
    fn from(error: EncodeError) -> Self {
        match error {
            EncodeError::Perception(error) => error.into(),
            EncodeError::Gone => SessionError::Gone { actor: "audio encoder" }.into(),
        }
    }
}

impl From<PromptError> for Error {
    fn from(error: PromptError) -> Self {
        Self::Prompt(Arc::new(error))
    }
}

impl From<TokenizerError> for Error {
    fn from(error: TokenizerError) -> Self {
        Self::Tokenizer(Arc::new(error))
    }
}
