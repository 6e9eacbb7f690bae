//! The JSON files of a checkpoint, and what a CMF header carries of them (`model.md` §3.2, `cmf.md` §6).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::ImportError;
use super::files::Files;
use crate::model::config::{TextConfig, parse_json};
use crate::model::geometry::BlockKind;
use crate::model::quant::float;

/// A checkpoint's configs.
pub(super) struct Configs {
    /// `config.json`
    pub(super) whole: Value,
    /// The decoder's part of it, or of another file.
    pub(super) text: Value,
    /// Where that was found.
    pub(super) text_path: PathBuf,
}

/// What a header carries beside the decoder's config.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// Bytes of `tokenizer.json`; empty when there is none.
    pub tokenizer: Vec<u8>,
    /// Keys of `provenance.nemotron_transcribe`, without `llm_config`.
    pub provenance: Map<String, Value>,
    /// What a reader of the result will lack, in sentences.
    pub notes: Vec<String>,
}

/// Reads a file that may be missing.
fn optional(path: &Path) -> Result<Option<Vec<u8>>, ImportError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ImportError::Io { path: path.to_owned(), source }),
    }
}

fn optional_text(path: &Path) -> Result<Option<String>, ImportError> {
    let text = optional(path)?.map(String::from_utf8).transpose();
    text.map_err(|error| ImportError::Io { path: path.to_owned(), source: io::Error::other(error) })
}

fn optional_json(path: &Path) -> Result<Option<Value>, ImportError> {
    let Some(text) = optional_text(path)? else { return Ok(None) };
    let value = parse_json(&text).map_err(|source| ImportError::Config { path: path.to_owned(), source })?;
    Ok(Some(value))
}

/// Finds the decoder's config, by kind of model.
pub(super) fn read(dir: &Path) -> Result<Configs, ImportError> {
    let path = dir.join("config.json");
    let whole = optional_json(&path)?
        .ok_or_else(|| ImportError::Io { path: path.clone(), source: io::Error::from(io::ErrorKind::NotFound) })?;
    let quantized = ["quantization_config", "compression_config"].into_iter().find(|key| {
        let set = |config: &Value| config.get(*key).is_some_and(|value| !value.is_null());
        set(&whole) || whole.get("text_config").is_some_and(set) || whole.get("llm_config").is_some_and(set)
    });
    if let Some(key) = quantized {
        return Err(ImportError::Quantized { what: format!("config.json has a {key}") });
    }
    if dir.join("hf_quant_config.json").exists() {
        return Err(ImportError::Quantized { what: "there is a hf_quant_config.json".into() });
    }
    match whole.get("model_type").and_then(Value::as_str).unwrap_or_default() {
        "nemotron_h" => Ok(Configs { text: whole.clone(), whole, text_path: path }),
        "nemo_speechlm" | "nemotron3_5_transcribe" => {
            let inside = ["text_config", "llm_config"].into_iter().find_map(|key| whole.get(key));
            if let Some(text) = inside.filter(|text| !text.is_null()) {
                return Ok(Configs { text: text.clone(), whole, text_path: path });
            }
            let backbone = dir.join("llm_backbone/config.json");
            let text = optional_json(&backbone)?.unwrap_or_else(published);
            Ok(Configs { whole, text, text_path: backbone })
        }
        other => Err(ImportError::Architecture { seen: other.into() }),
    }
}

/// The geometry of the published 30B models, for a checkpoint that has none (`model.md` §1.1, §3.2).
fn published() -> Value {
    json!({
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 2688, "vocab_size": 131072, "tie_word_embeddings": false, "layer_norm_epsilon": 1e-5,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": true,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
        "n_group": 1, "topk_group": 1, "time_step_limit": [0.0, {"__float__": "Infinity"}], "mlp_hidden_act": "relu2",
        "max_position_embeddings": 262144, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E",
    })
}

/// The config with `layers_block_type` in the words the peer takes.
pub(super) fn with_block_words(mut config: Value, blocks: &[BlockKind]) -> Value {
    let word = |kind: &BlockKind| match kind {
        BlockKind::Mamba => "mamba",
        BlockKind::Attention => "attention",
        BlockKind::Moe => "moe",
        BlockKind::Mlp => "mlp",
    };
    config["layers_block_type"] = blocks.iter().map(word).collect();
    config
}

/// Collects what a header carries.
pub(super) fn extras(dir: &Path, whole: &Value, text: &TextConfig, files: &Files) -> Result<Extras, ImportError> {
    let mut notes = Vec::new();
    let tokenizer = optional(&dir.join("tokenizer.json"))?.unwrap_or_default();
    if tokenizer.is_empty() {
        notes.push("no tokenizer.json: ids cannot be turned into text".to_owned());
    }
    let tokenizer_config = optional_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
    let special = |key: &str| {
        let token = &tokenizer_config[key];
        token.get("content").unwrap_or(token).clone()
    };
    let generation = match optional_json(&dir.join("generation_config.json"))? {
        Some(generation) => generation,
        None if text.eos.is_empty() => json!({}),
        None => json!({"eos_token_id": text.eos.iter().map(|id| id.0).collect::<Vec<_>>()}),
    };
    let chat_template = match optional_text(&dir.join("chat_template.jinja"))? {
        Some(template) => Value::String(template),
        None => tokenizer_config["chat_template"].clone(),
    };
    let key = |name: &str| whole.get(name).cloned().unwrap_or_default();
    let audio_token = whole.get("audio_token_id").cloned().unwrap_or_else(|| json!(text.geometry.vocab));
    let mut provenance = Map::new();
    let mut set = |key: &str, value: Value| provenance.insert(key.to_owned(), value);
    set("audio_config", key("audio_config"));
    set("audio_token_id", audio_token);
    set("processor", optional_json(&dir.join("processor_config.json"))?.unwrap_or_else(|| json!({})));
    // The peer takes a list alone.
    set("generation_config", with_id_list(generation));
    set("chat_template", chat_template);
    set("audio_locator_tag", key("audio_locator_tag"));
    set("bos_token", special("bos_token"));
    set("eos_token", special("eos_token"));
    if files.get("ctc_timestamp.decoder.upsample.weight").is_some() {
        set("word_timestamp_config", timestamp_config(key("word_timestamp_config"), files)?);
        match optional_text(&dir.join("alignment_tokenizer/tokenizer.json"))? {
            Some(tokenizer) => {
                set("alignment_tokenizer", Value::String(tokenizer));
            }
            None => notes.push("no alignment_tokenizer/tokenizer.json: there will be no word times".to_owned()),
        }
    }
    Ok(Extras { tokenizer, provenance, notes })
}

fn with_id_list(mut generation: Value) -> Value {
    if let Some(id) = generation.get("eos_token_id").filter(|id| id.is_u64()).cloned() {
        generation["eos_token_id"] = json!([id]);
    }
    generation
}

/// The config of the word timestamp head, with the two scalars that a checkpoint may hold as tensors alone.
fn timestamp_config(config: Value, files: &Files) -> Result<Value, ImportError> {
    let mut config = if config.is_object() { config } else { json!({}) };
    for (tensor, key) in [("residual_scale", "residual_scale"), ("upsample_factor", "upsampling_factor")] {
        let Some(stored) = files.get(&format!("ctc_timestamp.decoder.{tensor}")) else { continue };
        if config.get(key).is_some_and(|value| !value.is_null()) {
            continue;
        }
        let value = match (stored.codec(), stored.bytes()) {
            (Some(codec), bytes) if bytes.len() == float::size(codec) => json!(float::decode(codec, bytes)[0]),
            (None, &[a, b, c, d, e, f, g, h]) => json!(i64::from_le_bytes([a, b, c, d, e, f, g, h])),
            _ => {
                let (name, seen) = (format!("ctc_timestamp.decoder.{tensor}"), stored.shape.clone());
                return Err(ImportError::Shape { name, seen, want: Vec::new() });
            }
        };
        config[key] = value;
    }
    Ok(config)
}
