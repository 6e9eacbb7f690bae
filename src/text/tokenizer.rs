//! Ids to text and back, also token by token.

use std::sync::Arc;

use crate::ids::TokenId;

/// Tokens held back at most while they form no whole character: the longest UTF-8 sequence has four bytes, and
/// a token is at least one.
const HELD: usize = 4;

/// Why text and ids cannot be turned into each other.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The bytes are no `tokenizer.json`.
    #[error("the tokenizer does not parse: {reason}")]
    Parse {
        /// What the parser said.
        reason: String,
    },
    /// Text that the tokenizer refuses.
    #[error("the tokenizer cannot encode {text:?}: {reason}")]
    Encode {
        /// The beginning of the text.
        text: String,
        /// What it said.
        reason: String,
    },
    /// Ids that the tokenizer refuses.
    #[error("the tokenizer cannot decode {count} ids: {reason}")]
    Decode {
        /// How many.
        count: usize,
        /// What it said.
        reason: String,
    },
}

/// A model's tokenizer; clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tokenizer of {} ids", self.inner.get_vocab_size(true))
    }
}

impl Tokenizer {
    /// Reads the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Parse`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|error| TokenizerError::Parse { reason: error.to_string() })?;
        // Prompts are neither cut nor filled up, whatever was set when the tokenizer was trained.
        let truncation = inner.with_truncation(None);
        truncation.map_err(|error| TokenizerError::Parse { reason: error.to_string() })?;
        inner.with_padding(None);
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Ids of a text. Special tokens written out in it become their ids.
    ///
    /// `whole` adds what the tokenizer puts around a whole text (a beginning-of-text token, for instance);
    /// parts of a dialogue that is laid out already want none of it.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`].
    pub fn encode(&self, text: &str, whole: bool) -> Result<Vec<TokenId>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, whole).map_err(|error| TokenizerError::Encode {
            text: text.chars().take(80).collect(),
            reason: error.to_string(),
        })?;
        Ok(encoding.get_ids().iter().map(|id| TokenId(*id)).collect())
    }

    /// Text of some ids: what a reader should see. Speaker, event and style tags stay, other special
    /// tokens (ends of turns, paddings, placeholders) are left out. Unknown ids give nothing.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`].
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, TokenizerError> {
        let shown: Vec<u32> = ids.iter().filter(|id| self.is_shown(**id)).map(|id| id.0).collect();
        let error = |error: tokenizers::Error| TokenizerError::Decode { count: ids.len(), reason: error.to_string() };
        self.inner.decode(&shown, false).map_err(error)
    }

    /// The id of a token as the vocabulary writes it.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token).map(TokenId)
    }

    /// A token as the vocabulary writes it.
    #[must_use]
    pub fn token(&self, id: TokenId) -> Option<String> {
        self.inner.id_to_token(id.0)
    }

    /// Whether an id is a special token.
    #[must_use]
    pub fn is_special(&self, id: TokenId) -> bool {
        let added = self.inner.get_added_vocabulary();
        added.get_added_tokens_decoder().get(&id.0).is_some_and(|token| token.special)
    }

    /// Whether an id is part of the text that a reader sees.
    #[must_use]
    pub fn is_shown(&self, id: TokenId) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id.0).is_none_or(|token| !token.special || is_tag(&token.content))
    }

    /// A decoder of one stream of ids.
    #[must_use]
    pub fn stream(&self) -> TextStream {
        TextStream { tokenizer: self.clone(), ids: Vec::new(), given: 0 }
    }
}

/// Tags that belong to a transcript although the tokenizer calls them special.
fn is_tag(token: &str) -> bool {
    ["<spk:", "<ev:", "<sty:"].iter().any(|start| token.starts_with(start)) && token.ends_with('>')
}

/// Turns ids into pieces of text as they come. The pieces together are the text of all ids.
///
/// A piece never ends inside a character: bytes of an unfinished one wait for the next id, or for
/// [`TextStream::finish`].
#[derive(Clone, Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    /// Ids still needed as context: those whose text was given, then those that wait.
    ids: Vec<TokenId>,
    /// How many of them were given.
    given: usize,
}

impl TextStream {
    /// The text that `id` completes; often empty.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`].
    pub fn push(&mut self, id: TokenId) -> Result<String, TokenizerError> {
        if !self.tokenizer.is_shown(id) {
            return Ok(String::new());
        }
        self.ids.push(id);
        self.piece(false)
    }

    /// What still waits, with replacement characters for bytes that never became a character.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`].
    pub fn finish(mut self) -> Result<String, TokenizerError> {
        self.piece(true)
    }

    fn piece(&mut self, all: bool) -> Result<String, TokenizerError> {
        if self.given == self.ids.len() {
            return Ok(String::new());
        }
        // Decoders may treat the first token of a text differently, so the last token given stays as context.
        let context = self.tokenizer.decode(&self.ids[..self.given])?;
        let text = self.tokenizer.decode(&self.ids)?;
        let waiting = self.ids.len() - self.given;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && waiting < HELD && !all {
            return Ok(String::new());
        }
        let common = context.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
        let start = (0..=common).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        let piece = text[start..].to_owned();
        let keep = self.ids.len() - 1;
        self.ids.drain(..keep);
        self.given = 1;
        Ok(piece)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Byte-level, without merges: one token a byte, and a few special ones.
    pub(crate) fn bytes() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        let mut next = 0u32;
        for byte in 0..=255u8 {
            // The byte-level alphabet: printable bytes as themselves, the others from U+0100 on.
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let c = if printable {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(255 + next).unwrap()
            };
            vocab.insert(c.to_string(), u32::from(byte).into());
        }
        let special = |id: u32, content: &str| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let json = serde_json::json!({
            "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
            "padding": null, "normalizer": null,
            "added_tokens": [special(256, "<|im_end|>"), special(257, "<spk:0>"), special(258, "<|audio|>")],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}
        });
        Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn pieces_join_to_the_text_and_split_no_character() {
        let tokenizer = bytes();
        let text = "Grüße, 世界 — 🎧 <spk:0>ok";
        let mut ids = tokenizer.encode(text, false).unwrap();
        ids.push(TokenId(256));
        let mut stream = tokenizer.stream();
        let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        assert_eq!(pieces.concat() + &stream.finish().unwrap(), text);
        assert!(pieces.iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }

    #[test]
    fn broken_bytes_neither_hang_nor_vanish() {
        let tokenizer = bytes();
        // A lone start byte, then text, then an unfinished character.
        let ids = [0xC3, b'a' as u32, 0xF0, 0x9F].map(TokenId);
        let mut stream = tokenizer.stream();
        let mut text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        text += &stream.finish().unwrap();
        assert_eq!(text, tokenizer.decode(&ids).unwrap());
        assert_eq!(text.chars().filter(|c| *c == 'a').count(), 1);
        // Endless broken bytes come out after a while.
        let mut stream = tokenizer.stream();
        let given: usize = (0..100).map(|_| stream.push(TokenId(0x80)).unwrap().chars().count()).sum();
        assert!(given >= 96, "{given}");
    }

    #[test]
    fn truncation_of_the_file_is_not_ours() {
        assert_eq!(bytes().encode("more than four", true).unwrap().len(), 14);
    }

    #[test]
    fn special_tokens_are_known() {
        let tokenizer = bytes();
        assert_eq!(tokenizer.id("<|audio|>"), Some(TokenId(258)));
        assert_eq!(tokenizer.token(TokenId(257)).as_deref(), Some("<spk:0>"));
        assert!(tokenizer.is_special(TokenId(257)) && tokenizer.is_shown(TokenId(257)));
        assert!(tokenizer.is_special(TokenId(256)) && !tokenizer.is_shown(TokenId(256)));
        assert!(!tokenizer.is_special(TokenId(65)) && tokenizer.is_shown(TokenId(65)));
        assert!(matches!(Tokenizer::from_bytes(b"{}"), Err(TokenizerError::Parse { .. })));
        assert!(matches!(Tokenizer::from_bytes(b"\xff\xfe"), Err(TokenizerError::Parse { .. })));
    }
}
