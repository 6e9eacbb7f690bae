//! `riparian info`: what a model file holds and what a device would need for it.

use std::path::PathBuf;

use clap::Args;
use riparian::model::container::Container;
use riparian::model::geometry::{BlockKind, Geometry};
use riparian::model::layout::Role;
use riparian::model::summary::Summary;
use serde_json::{Map, Value, json};

use super::terminal::Terminal;
use super::{Failure, Global, Outcome, SUCCESS, access};

const EXAMPLES: &str = "\
Examples:
  riparian info model.cmf               for people
  riparian info model.cmf --json        for scripts";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Info {
    /// The model file
    #[arg(value_name = "MODEL.cmf")]
    model: PathBuf,
    /// Write JSON
    #[arg(long)]
    json: bool,
}

impl Info {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        let container = Container::open(&self.model, access(&knobs)).map_err(anyhow::Error::from)?;
        let summary =
            Summary::of(&container).map_err(|error| Failure::from(anyhow::Error::from(error)).about(&self.model))?;
        let text =
            if self.json { format!("{:#}\n", report(&self.model, &summary)) } else { page(&self.model, &summary) };
        terminal.put(&text).map_err(|error| Failure::from(anyhow::Error::from(error)))?;
        Ok(SUCCESS)
    }
}

/// The blocks as the config's pattern writes them.
fn pattern(geometry: &Geometry) -> String {
    let letter = |kind: &BlockKind| match kind {
        BlockKind::Mamba => 'M',
        BlockKind::Attention => '*',
        BlockKind::Moe => 'E',
        BlockKind::Mlp => '-',
    };
    geometry.blocks.iter().map(letter).collect()
}

/// What a device needs beside the weights.
struct Needs {
    /// Mamba rings and scan states of a session.
    state: usize,
    /// KV of one position, the draft layer's included.
    kv_position: usize,
    /// One routed expert, rounded up over all of them.
    expert: u64,
}

impl Needs {
    fn of(summary: &Summary) -> Self {
        let geometry = &summary.geometry;
        let count = |kind| geometry.blocks_of(kind).count();
        let mamba = geometry.mamba.map_or(0, |mamba| mamba.conv_state_len() + mamba.ssm_state_len());
        let kv = geometry.attention.map_or(0, |attention| 2 * attention.kv_width());
        let attending = count(BlockKind::Attention) + usize::from(geometry.draft);
        let experts = geometry.moe.map_or(0, |moe| moe.experts * geometry.layers()) as u64;
        Self {
            state: 4 * mamba * count(BlockKind::Mamba),
            kv_position: 4 * kv * attending,
            expert: summary.expert_bytes().div_ceil(experts.max(1)),
        }
    }
}

fn report(model: &std::path::Path, summary: &Summary) -> Value {
    let (geometry, needs) = (&summary.geometry, Needs::of(summary));
    let mut bytes: Map<String, Value> =
        summary.roles.iter().map(|size| (size.role.name().to_owned(), size.bytes.into())).collect();
    bytes.insert("tokenizer".into(), summary.vocab_bytes.into());
    bytes.insert("file".into(), summary.file_bytes.into());
    let codecs: Map<String, Value> =
        summary.roles.iter().map(|size| (size.role.name().to_owned(), json!(size.codecs))).collect();
    let elements: u64 = summary.roles.iter().map(|size| size.elements).sum();
    json!({
        "file": model.to_string_lossy(),
        "parameters": elements,
        "geometry": {
            "hidden": geometry.hidden,
            "vocab": geometry.vocab,
            "pattern": pattern(geometry),
            "max_positions": geometry.max_positions,
            "draft": geometry.draft,
            "mamba": geometry.mamba.map(|m| json!({
                "heads": m.heads, "head_dim": m.head_dim, "groups": m.groups, "d_state": m.d_state, "d_conv": m.d_conv,
            })),
            "attention": geometry.attention.map(|a| json!({
                "heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim,
            })),
            "mlp_inter": geometry.mlp_inter,
        },
        "experts": geometry.moe.map(|moe| json!({
            "layers": geometry.layers(), "routed": moe.experts, "top_k": moe.top_k, "inter": moe.inter,
            "shared_inter": moe.shared_inter, "latent": moe.latent, "bytes_each": needs.expert,
        })),
        "codecs": codecs,
        "bytes": bytes,
        "device": {
            "all_experts_bytes": summary.decoder_bytes(),
            "without_experts_bytes": summary.decoder_bytes() - summary.expert_bytes(),
            "least_experts_bytes": least_experts(summary, &needs),
            "state_bytes": needs.state,
            "kv_bytes_per_position": needs.kv_position,
        },
    })
}

/// The smallest banks there are: `top_k` experts a layer.
fn least_experts(summary: &Summary, needs: &Needs) -> u64 {
    let geometry = &summary.geometry;
    geometry.moe.map_or(0, |moe| (moe.top_k.min(moe.experts) * geometry.layers()) as u64 * needs.expert)
}

fn page(model: &std::path::Path, summary: &Summary) -> String {
    let (geometry, needs) = (&summary.geometry, Needs::of(summary));
    let elements: u64 = summary.roles.iter().map(|size| size.elements).sum();
    let mut page = format!(
        "{}\n\nblocks      {} ({})\nhidden      {}\nvocabulary  {}\ncontext     {} positions\n",
        model.display(),
        pattern(geometry),
        geometry.blocks.len(),
        geometry.hidden,
        geometry.vocab,
        geometry.max_positions,
    );
    if let Some(mamba) = &geometry.mamba {
        page += &format!(
            "mamba       {} heads of {}, {} groups, state {}, convolution {}\n",
            mamba.heads, mamba.head_dim, mamba.groups, mamba.d_state, mamba.d_conv
        );
    }
    if let Some(attention) = &geometry.attention {
        page += &format!(
            "attention   {} heads of {}, {} key/value heads\n",
            attention.heads, attention.head_dim, attention.kv_heads
        );
    }
    if let Some(moe) = &geometry.moe {
        let latent = moe.latent.map_or_else(String::new, |latent| format!(", latent {latent}"));
        page += &format!(
            "experts     {} of width {} in {} layers, {} chosen, shared {}{latent}; one is {}\n",
            moe.experts,
            moe.inter,
            geometry.layers(),
            moe.top_k,
            moe.shared_inter,
            size(needs.expert)
        );
    }
    page += &format!("drafts      {}\n", if geometry.draft { "a draft layer" } else { "none" });
    page += &format!("parameters  {:.1} million\n\n", elements as f64 / 1e6);
    page += &format!("{:<16} {:>8} {:>14} {:>12}  codecs\n", "use", "tensors", "elements", "bytes");
    for role in &summary.roles {
        let codecs: Vec<&str> = role.codecs.iter().map(String::as_str).collect();
        page += &format!(
            "{:<16} {:>8} {:>14} {:>12}  {}\n",
            role.role.name(),
            role.tensors,
            role.elements,
            role.bytes,
            codecs.join(" ")
        );
    }
    page += &format!("{:<16} {:>8} {:>14} {:>12}\n", "tokenizer", "", "", summary.vocab_bytes);
    page += &format!("{:<16} {:>8} {:>14} {:>12}\n\n", "file", "", "", summary.file_bytes);
    let fixed = summary.decoder_bytes() - summary.expert_bytes();
    page += &format!(
        "a device needs  {} with all experts, {} with the fewest ({} a layer), {} of it whatever the experts\n",
        size(summary.decoder_bytes()),
        size(fixed + least_experts(summary, &needs)),
        geometry.moe.map_or(0, |moe| moe.top_k),
        size(fixed)
    );
    page += &format!(
        "a session adds  {} of state and {} for each 1000 positions\n",
        size(needs.state as u64),
        size(1000 * needs.kv_position as u64)
    );
    if summary.bytes_of(Role::Perception) > 0 {
        page += &format!("its encoder is  {}, on the host\n", size(summary.bytes_of(Role::Perception)));
    }
    page
}

/// Bytes in the unit that suits them.
fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        _ if bytes >= 1e9 => format!("{:.2} GB", bytes / 1e9),
        _ if bytes >= 1e6 => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.1} kB", bytes / 1e3),
    }
}
