//! The decoder's config: `llm_config` of a file, or a checkpoint's own (`model.md` §1.1, `cmf.md` §6).
//!
//! Everything that decides a shape or a formula is read and checked here.
//! What the runtime does not implement is refused rather than ignored.

use serde_json::Value;

use super::geometry::{AttentionGeometry, BlockKind, Geometry, MambaGeometry, MoeGeometry};
use crate::ids::TokenId;

/// Largest width, count or vocabulary believed. Far above any model; keeps products inside 64 bits.
const DIMENSION_MAX: u64 = 1 << 20;
/// Largest number of blocks.
const BLOCKS_MAX: usize = 4096;
/// Step size limits from here on clamp nothing: some writers have `1e+30` for infinity.
const UNLIMITED: f64 = 1e30;
/// Positions of a config that names none.
const POSITIONS_DEFAULT: u64 = 262_144;

/// Why a config was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, even with bare infinities allowed.
    #[error("the config does not parse: {0}")]
    Json(#[from] serde_json::Error),
    /// A key without default.
    #[error("config key {key} is missing")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A value of the wrong kind or out of range.
    #[error("config key {key} is {seen}, wanted {want}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value.
        seen: String,
        /// What is accepted.
        want: &'static str,
    },
    /// A word or letter that names no block.
    #[error("block {block} has the type {seen:?}, wanted mamba (M), attention (*), moe (E) or mlp (-)")]
    BlockType {
        /// The block's number.
        block: usize,
        /// What stands there.
        seen: String,
    },
    /// Pattern and list of types do not say the same.
    #[error("hybrid_override_pattern and layers_block_type disagree at block {block}")]
    Disagree {
        /// The first such block.
        block: usize,
    },
    /// Two numbers that do not fit together.
    #[error("{what} is {seen}, wanted {want}")]
    Mismatch {
        /// Which numbers.
        what: &'static str,
        /// What they are.
        seen: String,
        /// How they should be.
        want: &'static str,
    },
}

/// A decoder's config, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct TextConfig {
    /// Every number that decides a shape.
    pub geometry: Geometry,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the head is the embedding.
    pub tied_head: bool,
    /// `eos_token_id`, a number or a list.
    pub eos: Vec<TokenId>,
}

impl TextConfig {
    /// Reads a config object. `draft` says whether the file holds the draft layer's tensors.
    ///
    /// # Errors
    ///
    /// A missing key, a value out of range, or an option that is not implemented.
    pub fn read(config: &Value, draft: bool) -> Result<Self, ConfigError> {
        let keys = Keys(config);
        keys.refuse_unimplemented()?;
        let blocks = block_kinds(&keys)?;
        let any = |kind| blocks.contains(&kind);
        if draft {
            keys.check_draft()?;
        }
        let geometry = Geometry {
            hidden: keys.size("hidden_size")?,
            vocab: keys.size("vocab_size")?,
            norm_eps: keys.float("layer_norm_epsilon", 1e-5, 0.0, 1.0)?,
            attention: (draft || any(BlockKind::Attention)).then(|| keys.attention()).transpose()?,
            mamba: any(BlockKind::Mamba).then(|| keys.mamba()).transpose()?,
            moe: (draft || any(BlockKind::Moe)).then(|| keys.moe()).transpose()?,
            mlp_inter: any(BlockKind::Mlp).then(|| keys.size("intermediate_size")).transpose()?,
            draft,
            max_positions: keys.size_or("max_position_embeddings", POSITIONS_DEFAULT, u64::from(u32::MAX))?,
            blocks,
        };
        Ok(Self {
            geometry,
            conv_bias: keys.flag("use_conv_bias", true)?,
            tied_head: keys.flag("tie_word_embeddings", false)?,
            eos: token_ids(config, "eos_token_id")?,
        })
    }
}

/// A number or a list of numbers under `key`; nothing when it is absent or null.
///
/// # Errors
///
/// Anything else.
pub fn token_ids(object: &Value, key: &'static str) -> Result<Vec<TokenId>, ConfigError> {
    let id = |value: &Value| {
        (value.as_u64().and_then(|id| u32::try_from(id).ok()).map(TokenId))
            .ok_or_else(|| wrong(key, value, "a token id or a list of them"))
    };
    match object.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

/// Parses JSON in which numbers may be the bare words `Infinity`, `-Infinity` and `NaN`, as published configs have
/// them. They become `{"__float__": "Infinity"}` and so on, which is how newer files write them.
///
/// # Errors
///
/// What is no JSON even so.
pub fn parse_json(text: &str) -> Result<Value, ConfigError> {
    let mut strict = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(at) = rest.find(|c| c == '"' || c == '\\' || !in_string && matches!(c, 'I' | 'N' | '-')) {
        let (before, found) = rest.split_at(at);
        strict.push_str(before);
        let word = ["Infinity", "-Infinity", "NaN"].into_iter().find(|word| found.starts_with(word));
        let taken = match (found.as_bytes()[0], word) {
            (b'"', _) => {
                in_string = !in_string;
                1
            }
            // The escaped character may be more than one byte; a lone backslash at the end stays an error.
            (b'\\', _) => found.chars().take(2).map(char::len_utf8).sum(),
            (_, Some(word)) => {
                strict.push_str(&format!("{{\"__float__\":\"{word}\"}}"));
                rest = &found[word.len()..];
                continue;
            }
            _ => 1,
        };
        strict.push_str(&found[..taken]);
        rest = &found[taken..];
    }
    strict.push_str(rest);
    Ok(serde_json::from_str(&strict)?)
}

/// A number, or one of the ways to write an infinite one.
fn number(value: &Value) -> Option<f64> {
    let word = value.as_str().or_else(|| value.get("__float__")?.as_str());
    match word {
        Some("Infinity" | "inf") => Some(f64::INFINITY),
        Some("-Infinity" | "-inf") => Some(f64::NEG_INFINITY),
        Some(_) => None,
        None => value.as_f64(),
    }
}

fn wrong(key: &'static str, value: &Value, want: &'static str) -> ConfigError {
    let mut seen = value.to_string();
    if seen.len() > 80 {
        let cut = (0..=80).rev().find(|&i| seen.is_char_boundary(i)).unwrap_or(0);
        seen.truncate(cut);
        seen.push('…');
    }
    ConfigError::Value { key, seen, want }
}

/// The kinds of blocks, from `layers_block_type` or `hybrid_override_pattern`.
fn block_kinds(keys: &Keys<'_>) -> Result<Vec<BlockKind>, ConfigError> {
    let words = keys.get("layers_block_type").map(|list| kinds_of_words("layers_block_type", list)).transpose()?;
    let letters = keys
        .get("hybrid_override_pattern")
        .map(|text| kinds_of_letters("hybrid_override_pattern", text))
        .transpose()?;
    let blocks = match (words, letters) {
        (None, None) => return Err(ConfigError::Missing { key: "layers_block_type" }),
        (Some(words), Some(letters)) => {
            if words != letters {
                let block = (words.iter().zip(&letters).position(|(a, b)| a != b))
                    .unwrap_or_else(|| words.len().min(letters.len()));
                return Err(ConfigError::Disagree { block });
            }
            words
        }
        (Some(blocks), None) | (None, Some(blocks)) => blocks,
    };
    if blocks.is_empty() || blocks.len() > BLOCKS_MAX {
        let seen = blocks.len().to_string();
        return Err(ConfigError::Mismatch { what: "the number of blocks", seen, want: "1 to 4096" });
    }
    Ok(blocks)
}

fn kinds_of_words(key: &'static str, list: &Value) -> Result<Vec<BlockKind>, ConfigError> {
    let list = list.as_array().ok_or_else(|| wrong(key, list, "a list of block types"))?;
    let kind = |(block, word): (usize, &Value)| match word.as_str() {
        Some("mamba" | "linear_attention") => Ok(BlockKind::Mamba),
        Some("attention" | "full_attention") => Ok(BlockKind::Attention),
        Some("moe") => Ok(BlockKind::Moe),
        Some("mlp") => Ok(BlockKind::Mlp),
        Some(other) => Err(ConfigError::BlockType { block, seen: other.into() }),
        None => Err(ConfigError::BlockType { block, seen: word.to_string() }),
    };
    list.iter().enumerate().map(kind).collect()
}

fn kinds_of_letters(key: &'static str, text: &Value) -> Result<Vec<BlockKind>, ConfigError> {
    let text = text.as_str().ok_or_else(|| wrong(key, text, "a string of the letters M, E, * and -"))?;
    let kind = |(block, letter)| match letter {
        'M' => Ok(BlockKind::Mamba),
        '*' => Ok(BlockKind::Attention),
        'E' => Ok(BlockKind::Moe),
        '-' => Ok(BlockKind::Mlp),
        other => Err(ConfigError::BlockType { block, seen: other.into() }),
    };
    text.chars().enumerate().map(kind).collect()
}

/// A config object, with what is read of it.
struct Keys<'a>(&'a Value);

impl Keys<'_> {
    /// The value of a key that is there and not null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn size_or(&self, key: &'static str, default: u64, max: u64) -> Result<usize, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default as usize) };
        let size = value.as_u64().filter(|size| (1..=max).contains(size));
        size.map(|size| size as usize).ok_or_else(|| wrong(key, value, "a whole number above 0 and within reason"))
    }

    fn size(&self, key: &'static str) -> Result<usize, ConfigError> {
        match self.get(key) {
            None => Err(ConfigError::Missing { key }),
            Some(_) => self.size_or(key, 0, DIMENSION_MAX),
        }
    }

    fn flag(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| wrong(key, value, "true or false")),
        }
    }

    fn float(&self, key: &'static str, default: f32, low: f64, high: f64) -> Result<f32, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let float = number(value).filter(|float| (low..=high).contains(float));
        float.map(|float| float as f32).ok_or_else(|| wrong(key, value, "a number within reason"))
    }

    /// Options of the family that would change the result and are not implemented.
    fn refuse_unimplemented(&self) -> Result<(), ConfigError> {
        if !self.0.is_object() {
            return Err(wrong("llm_config", self.0, "an object"));
        }
        for key in ["use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"] {
            if self.flag(key, false)? {
                return Err(wrong(key, &Value::Bool(true), "false: projections have no bias here"));
            }
        }
        for (key, want) in [("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")] {
            if let Some(value) = self.get(key).filter(|value| value.as_str() != Some(want)) {
                return Err(wrong(key, value, if want == "relu2" { "relu2" } else { "silu" }));
            }
        }
        if let Some(value) = self.get("n_shared_experts").filter(|value| value.as_u64() != Some(1)) {
            return Err(wrong("n_shared_experts", value, "1"));
        }
        Ok(())
    }

    /// The draft layer is one attention block and one MoE block (`model.md` §2.1).
    fn check_draft(&self) -> Result<(), ConfigError> {
        let want = [BlockKind::Attention, BlockKind::Moe];
        if let Some(list) = self.get("mtp_layers_block_type")
            && kinds_of_words("mtp_layers_block_type", list)? != want
        {
            return Err(wrong("mtp_layers_block_type", list, "attention, moe"));
        }
        if let Some(text) = self.get("mtp_hybrid_override_pattern")
            && kinds_of_letters("mtp_hybrid_override_pattern", text)? != want
        {
            return Err(wrong("mtp_hybrid_override_pattern", text, "*E"));
        }
        match self.get("num_nextn_predict_layers") {
            // 0 beside draft tensors: the file has them, so they can be used.
            Some(value) if !matches!(value.as_u64(), Some(0 | 1)) => {
                Err(wrong("num_nextn_predict_layers", value, "0 or 1"))
            }
            _ => Ok(()),
        }
    }

    fn attention(&self) -> Result<AttentionGeometry, ConfigError> {
        let (heads, kv_heads) = (self.size("num_attention_heads")?, self.size("num_key_value_heads")?);
        if !heads.is_multiple_of(kv_heads) {
            let (what, want) = ("num_attention_heads over num_key_value_heads", "a whole number");
            return Err(ConfigError::Mismatch { what, seen: format!("{heads} / {kv_heads}"), want });
        }
        Ok(AttentionGeometry { heads, kv_heads, head_dim: self.size("head_dim")? })
    }

    fn mamba(&self) -> Result<MambaGeometry, ConfigError> {
        let (heads, groups) = (self.size("mamba_num_heads")?, self.size("n_groups")?);
        if !heads.is_multiple_of(groups) {
            let (what, want) = ("mamba_num_heads over n_groups", "a whole number");
            return Err(ConfigError::Mismatch { what, seen: format!("{heads} / {groups}"), want });
        }
        Ok(MambaGeometry {
            heads,
            head_dim: self.size("mamba_head_dim")?,
            groups,
            d_state: self.size("ssm_state_size")?,
            d_conv: self.size("conv_kernel")?,
            dt_limit: self.dt_limit()?,
        })
    }

    fn dt_limit(&self) -> Result<[f32; 2], ConfigError> {
        let key = "time_step_limit";
        let Some(value) = self.get(key) else { return Ok([0.0, f32::INFINITY]) };
        let fail = || wrong(key, value, "[low, high] with 0 <= low <= high");
        let [low, high] = value.as_array().map(Vec::as_slice).unwrap_or_default() else { return Err(fail()) };
        let (low, high) = (number(low).ok_or_else(fail)?, number(high).ok_or_else(fail)?);
        if !(low.is_finite() && 0.0 <= low && low <= high) {
            return Err(fail());
        }
        Ok([low as f32, if high >= UNLIMITED { f32::INFINITY } else { high as f32 }])
    }

    fn moe(&self) -> Result<MoeGeometry, ConfigError> {
        let moe = MoeGeometry {
            experts: self.size("n_routed_experts")?,
            top_k: self.size("num_experts_per_tok")?,
            inter: self.size("moe_intermediate_size")?,
            shared_inter: self.size("moe_shared_expert_intermediate_size")?,
            latent: self.get("moe_latent_size").map(|_| self.size("moe_latent_size")).transpose()?,
            n_group: self.size_or("n_group", 1, DIMENSION_MAX)?,
            topk_group: self.size_or("topk_group", 1, DIMENSION_MAX)?,
            scale: self.float("routed_scaling_factor", 1.0, -1e6, 1e6)?,
            norm_topk: self.flag("norm_topk_prob", true)?,
        };
        let mismatch = |what, seen, want| Err(ConfigError::Mismatch { what, seen, want });
        if moe.experts > usize::from(u16::MAX) {
            return mismatch("n_routed_experts", moe.experts.to_string(), "at most 65535");
        }
        if !moe.experts.is_multiple_of(moe.n_group) {
            let seen = format!("{} / {}", moe.experts, moe.n_group);
            return mismatch("n_routed_experts over n_group", seen, "a whole number");
        }
        let in_group = moe.experts / moe.n_group;
        if moe.n_group > 1 && in_group < 2 {
            return mismatch(
                "experts of a group",
                in_group.to_string(),
                "2 or more: a group's strength is its best two",
            );
        }
        if moe.topk_group > moe.n_group {
            let seen = format!("{} of {}", moe.topk_group, moe.n_group);
            return mismatch("topk_group of n_group", seen, "at most all groups");
        }
        if moe.top_k > moe.topk_group * in_group {
            let seen = format!("{} of {}", moe.top_k, moe.topk_group * in_group);
            return mismatch("num_experts_per_tok of the experts to choose from", seen, "at most all of them");
        }
        Ok(moe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config() -> Value {
        json!({
            "hidden_size": 64, "vocab_size": 512, "layers_block_type": ["mamba", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 96,
            "intermediate_size": 96,
        })
    }

    fn with(key: &str, value: Value) -> Result<TextConfig, ConfigError> {
        let mut config = config();
        config[key] = value;
        TextConfig::read(&config, false)
    }

    #[test]
    fn defaults_are_the_specification_s() {
        let read = TextConfig::read(&config(), false).unwrap();
        let geometry = &read.geometry;
        assert_eq!(geometry.norm_eps, 1e-5);
        assert_eq!(geometry.mamba.unwrap().dt_limit, [0.0, f32::INFINITY]);
        let moe = geometry.moe.unwrap();
        assert_eq!((moe.scale, moe.norm_topk, moe.n_group, moe.topk_group, moe.latent), (1.0, true, 1, 1, None));
        assert!(read.conv_bias && !read.tied_head && read.eos.is_empty());
        let kinds = [BlockKind::Mamba, BlockKind::Moe, BlockKind::Attention, BlockKind::Mlp];
        assert_eq!(geometry.blocks, kinds);
    }

    #[test]
    fn infinity_is_read_in_all_its_spellings() {
        for text in [
            r#"{"a": [0.0, Infinity]}"#,
            r#"{"a": [0.0, {"__float__": "Infinity"}]}"#,
            r#"{"a":[0.0,1e+30],"b":"-Infinity \" Infinity"}"#,
        ] {
            let value = parse_json(text).unwrap();
            let read = with("time_step_limit", value["a"].clone()).unwrap();
            assert_eq!(read.geometry.mamba.unwrap().dt_limit, [0.0, f32::INFINITY], "{text}");
        }
        let value = parse_json(r#"{"a": "Infinity and NaN \\", "b": NaN, "c": -Infinity, "d": -1}"#).unwrap();
        assert_eq!(value["a"], "Infinity and NaN \\");
        assert_eq!(value["b"], json!({"__float__": "NaN"}));
        assert_eq!(number(&value["c"]), Some(f64::NEG_INFINITY));
        assert_eq!(value["d"], -1);
        assert_eq!(with("time_step_limit", json!([0.02, 0.2])).unwrap().geometry.mamba.unwrap().dt_limit, [0.02, 0.2]);
    }

    #[test]
    fn both_spellings_of_the_blocks_must_agree() {
        assert!(with("hybrid_override_pattern", json!("ME*-")).is_ok());
        assert!(matches!(with("hybrid_override_pattern", json!("MEM-")), Err(ConfigError::Disagree { block: 2 })));
        assert!(matches!(with("hybrid_override_pattern", json!("ME*")), Err(ConfigError::Disagree { block: 3 })));
        let mut only_pattern = config();
        only_pattern["layers_block_type"] = Value::Null;
        only_pattern["hybrid_override_pattern"] = json!("-*EM");
        assert_eq!(TextConfig::read(&only_pattern, false).unwrap().geometry.blocks[0], BlockKind::Mlp);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (key, value, want) in [
            ("hidden_size", json!(0), "config key hidden_size is 0"),
            ("hidden_size", json!(1u64 << 40), "config key hidden_size is 1099511627776"),
            ("hidden_size", json!("64"), "config key hidden_size is \"64\""),
            ("hidden_size", Value::Null, "config key hidden_size is missing"),
            ("layers_block_type", json!(["mamba", "swa"]), "block 1 has the type \"swa\""),
            ("layers_block_type", json!([]), "the number of blocks is 0"),
            ("n_groups", json!(3), "mamba_num_heads over n_groups is 8 / 3"),
            ("num_key_value_heads", json!(3), "num_attention_heads over num_key_value_heads is 4 / 3"),
            ("num_experts_per_tok", json!(9), "num_experts_per_tok of the experts to choose from is 9 of 8"),
            ("n_group", json!(3), "n_routed_experts over n_group is 8 / 3"),
            ("topk_group", json!(2), "topk_group of n_group is 2 of 1"),
            ("mlp_hidden_act", json!("silu"), "config key mlp_hidden_act is \"silu\", wanted relu2"),
            ("attention_bias", json!(true), "config key attention_bias is true"),
            ("time_step_limit", json!([0.2, 0.1]), "config key time_step_limit is [0.2,0.1]"),
            ("eos_token_id", json!(-1), "config key eos_token_id is -1"),
        ] {
            let error = with(key, value).unwrap_err().to_string();
            assert!(error.starts_with(want), "{error:?} does not start with {want:?}");
        }
    }

    #[test]
    fn end_ids_are_a_number_or_a_list() {
        assert_eq!(with("eos_token_id", json!(2)).unwrap().eos, [TokenId(2)]);
        assert_eq!(with("eos_token_id", json!([2, 11])).unwrap().eos, [TokenId(2), TokenId(11)]);
        assert_eq!(with("eos_token_id", Value::Null).unwrap().eos, []);
    }

    #[test]
    fn a_draft_layer_is_one_attention_and_one_moe_block() {
        let mut config = config();
        config["mtp_hybrid_override_pattern"] = json!("*E");
        config["num_nextn_predict_layers"] = json!(1);
        assert!(TextConfig::read(&config, true).unwrap().geometry.draft);
        config["mtp_hybrid_override_pattern"] = json!("**");
        assert!(TextConfig::read(&config, true).is_err());
        assert!(TextConfig::read(&config, false).is_ok(), "no draft tensors, so nothing to object to");
    }
}
