//! What a caller may choose for one session, and what a session is like at its end.

use std::fmt;

use super::stats::Stats;
use crate::ids::{Position, TokenId};

/// Choices for one session; the default takes all of them from the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Ids to make at most; what is left of the context by default.
    pub max_new_tokens: Option<usize>,
    /// Ids that end the text; the model's own by default. An empty list never ends it.
    pub eos: Option<Vec<TokenId>>,
    /// Drafts a round, cut to what the device verifies (4 at most); 0 is plain decode. `CMF_NEMO_MTP_DEPTH` by default.
    /// Without effect where nothing drafts. The ids do not depend on it.
    pub draft_depth: Option<usize>,
    /// Whether the prompt's rows are kept for [`Tokens::prompt_rows`](super::Tokens::prompt_rows).
    pub keep_rows: bool,
}

/// One token as it leaves a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The id; the end id comes too.
    pub id: TokenId,
    /// What it adds to the text. Empty for the end id, for special tokens that
    /// have no text, and while a character is not complete.
    pub text: String,
    /// Where it stands in the sequence, the prompt's rows counted.
    pub position: Position,
    /// Whether it came from a draft that the decoder confirmed.
    pub drafted: bool,
}

/// Why a session ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model ended the text.
    Stop,
    /// `max_new_tokens` were made.
    Length,
    /// The caller had enough.
    Cancelled,
}

impl FinishReason {
    /// The name reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// All of a session that ended well.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// Every id, the end id included.
    pub ids: Vec<TokenId>,
    /// The text, without the end id and without special tokens that have none.
    pub text: String,
    /// What it took.
    pub stats: Stats,
}
