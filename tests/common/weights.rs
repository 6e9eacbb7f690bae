//! The oracle's checkpoints, rebuilt from their `case.json` (oracle README, "Rebuilding weights without Python").
//!
//! Each weight is a function of seed, name and index, in integers and two rounded float operations. Weights marked
//! `fitted` were trained and exist only in the checkpoint's own file.
#![allow(dead_code, reason = "each target uses its own part")]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use riparian::model::config::parse_json;
use safetensors::tensor::{Dtype, View, serialize_to_file};
use serde_json::{Value, json};

#[path = "sha256.rs"]
mod sha256;

/// A `case.json`: what a checkpoint is made of.
pub(crate) struct Case {
    pub(crate) json: Value,
    seed: u64,
}

/// One tensor, in a checkpoint's storage type.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl View for &Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// How tensors are named and stacked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Layout {
    /// `backbone.*`, one tensor an expert (`model.md` §3.1).
    Text,
    /// `model.*`, experts stacked as `[E, out, in]`.
    Stacked,
    /// `llm.*`, experts stacked and transposed, Mamba scalars under `_fp32_params` (`model.md` §3.2).
    Nemo,
}

impl Case {
    /// Reads `dir/case.json`.
    pub(crate) fn read(dir: &Path) -> Self {
        let json = parse_json(&fs::read_to_string(dir.join("case.json")).unwrap()).unwrap();
        Self { seed: json["seed"].as_u64().unwrap(), json }
    }

    pub(crate) fn config(&self) -> &Value {
        &self.json["config"]
    }

    /// Every tensor of the manifest under its text-layout name, in manifest order; `fitted` supplies the trained ones.
    pub(crate) fn tensors(&self, fitted: impl Fn(&str) -> Option<Stored>) -> Vec<(String, Stored)> {
        let manifest = self.json["weights"].as_array().unwrap();
        let build = |entry: &Value| {
            let name = entry["name"].as_str().unwrap();
            if entry["fitted"].as_bool() == Some(true) {
                let stored = fitted(name).unwrap_or_else(|| panic!("{name} was trained: take it from its file"));
                return (name.to_owned(), stored);
            }
            let shape: Vec<usize> =
                entry["shape"].as_array().unwrap().iter().map(|dim| dim.as_u64().unwrap() as usize).collect();
            let [width, center] = ["width", "center"].map(|key| entry[key].as_f64().unwrap() as f32);
            let values = values(self.seed, name, shape.iter().product(), width, center);
            let (dtype, bytes) = match entry["dtype"].as_str().unwrap() {
                "F32" => (Dtype::F32, values.flat_map(f32::to_le_bytes).collect()),
                "BF16" => (Dtype::BF16, values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()),
                other => panic!("dtype {other}"),
            };
            (name.to_owned(), Stored { dtype, shape, bytes })
        };
        manifest.iter().map(build).collect()
    }

    /// Asserts that the tensors have the digest the case records.
    pub(crate) fn check_digest(&self, tensors: &[(String, Stored)]) {
        let digest = sha256::sha256(tensors.iter().map(|(_, stored)| &stored.bytes[..]));
        assert_eq!(digest, self.json["weights_sha256"].as_str().unwrap(), "{}", self.json["case"]);
    }

    /// Writes a checkpoint of the case into `out`, which is made: `config.json` and `model.safetensors`.
    pub(crate) fn write_checkpoint(&self, out: &Path, layout: Layout) {
        let tensors = self.tensors(|_| None);
        self.check_digest(&tensors);
        write_checkpoint(out, self.config(), tensors, layout);
    }
}

/// Writes a checkpoint of text-layout tensors in the layout asked for.
pub(crate) fn write_checkpoint(out: &Path, config: &Value, tensors: Vec<(String, Stored)>, layout: Layout) {
    fs::create_dir_all(out).unwrap();
    let (config, tensors) = match layout {
        Layout::Text => (config.clone(), tensors.into_iter().collect()),
        Layout::Stacked => {
            let rename = |name: &str| name.replace("backbone.", "model.");
            (config.clone(), stack(tensors, rename, [".experts.up_proj", ".experts.down_proj"], false))
        }
        Layout::Nemo => {
            let config = json!({"model_type": "nemo_speechlm", "llm_config": config, "text_config": config});
            (config, stack(tensors, nemo_name, [".experts.gate_and_up_projs", ".experts.down_projs"], true))
        }
    };
    fs::write(out.join("config.json"), config.to_string()).unwrap();
    serialize_to_file(&tensors, None, &out.join("model.safetensors")).unwrap();
}

fn nemo_name(name: &str) -> String {
    let mut name = match name {
        _ if name.starts_with("backbone.embeddings.") => {
            name.replace("backbone.embeddings.", "llm.model.embed_tokens.")
        }
        _ if name.starts_with("backbone.norm_f.") => name.replace("backbone.norm_f.", "llm.model.norm."),
        _ if name.starts_with("backbone.layers.") => name.replace("backbone.layers.", "llm.model.layers."),
        _ => format!("llm.{name}"),
    };
    for leaf in ["A_log", "D", "dt_bias"] {
        if name.ends_with(&format!(".mixer.{leaf}")) {
            name = name.replace(".mixer.", ".mixer._fp32_params.");
        }
    }
    name
}

/// Renames, and puts the experts of a block into one tensor for each of their two matrices.
fn stack(
    tensors: Vec<(String, Stored)>,
    rename: impl Fn(&str) -> String,
    [up, down]: [&str; 2],
    transposed: bool,
) -> BTreeMap<String, Stored> {
    let mut out = BTreeMap::new();
    let mut banks: BTreeMap<String, BTreeMap<usize, Stored>> = BTreeMap::new();
    for (name, stored) in tensors {
        let name = rename(&name);
        match name.split_once(".experts.") {
            Some((head, rest)) => {
                let (index, leaf) = rest.split_once('.').unwrap();
                let bank = if leaf.starts_with("up_proj") { up } else { down };
                banks.entry(format!("{head}{bank}")).or_default().insert(index.parse().unwrap(), stored);
            }
            None => {
                out.insert(name, stored);
            }
        }
    }
    for (name, experts) in banks {
        let first = &experts[&0];
        let (rows, cols, dtype) = (first.shape[0], first.shape[1], first.dtype);
        let size = dtype.bitsize() / 8;
        let mut bytes = Vec::with_capacity(experts.len() * first.bytes.len());
        for stored in experts.values() {
            if transposed {
                for col in 0..cols {
                    for row in 0..rows {
                        bytes.extend_from_slice(&stored.bytes[(row * cols + col) * size..][..size]);
                    }
                }
            } else {
                bytes.extend_from_slice(&stored.bytes);
            }
        }
        let matrix = if transposed { [cols, rows] } else { [rows, cols] };
        let shape = vec![experts.len(), matrix[0], matrix[1]];
        out.insert(name, Stored { dtype, shape, bytes });
    }
    out
}

/// The values of one tensor.
fn values(seed: u64, name: &str, count: usize, width: f32, center: f32) -> impl Iterator<Item = f32> {
    let hash = name
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3));
    let base = hash.wrapping_add(seed.wrapping_mul(0xD1B5_4A32_D192_ED03));
    (1..=count as u64).map(move |i| {
        let mut z = base.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        let unit = (z >> 40) as f32 * 2f32.powi(-24) - 0.5;
        unit * width + center
    })
}
