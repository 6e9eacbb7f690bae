//! `riparian synth`: a model of any geometry without weights, for benchmarks.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use riparian::model::SynthOptions;
use riparian::model::geometry::{AttentionGeometry, BlockKind, Geometry, MambaGeometry, MoeGeometry};
use riparian::model::synth::{preset, synth};
use riparian::model::tensors::Codec;
use serde_json::json;

use super::terminal::Terminal;
use super::{Failure, Global, Outcome, SUCCESS, pool, progress};

const EXAMPLES: &str = "\
Examples:
  riparian synth nano.cmf --geometry nano-30b --mtp           the published 30B decoder's shapes, 18 GB
  riparian synth nine.cmf --geometry nano-30b --layers 9      its first nine blocks
  riparian synth small.cmf --geometry mini --codec q8_2f      half a gigabyte and more
  riparian synth own.cmf --geometry kernel --pattern MEM*E-ME --experts 32 --top-k 4 --zipf 1.2

The greedy continuation of token t is t + 1, which riparian bench checks. Popularity of experts follows a Zipf law
(--zipf), the file lists it as expert_hot. With --mtp there is a draft layer whose drafts are kept at the rate --accept.
Geometries: nano-30b, mini, kernel, tiny.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Synth {
    /// The model file to write
    #[arg(value_name = "OUT.cmf")]
    out: PathBuf,
    /// The geometry to start from
    #[arg(long, value_name = "NAME", default_value = "nano-30b")]
    geometry: String,
    /// How routed experts are stored: q4tp or q8_2f
    #[arg(long, value_name = "CODEC", default_value = "q4tp", value_parser = codec)]
    codec: Codec,
    /// With the draft layer
    #[arg(long)]
    mtp: bool,
    /// Decides all that is drawn: the same seed gives the same file
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Exponent of the popularity of experts, 0 is uniform
    #[arg(long, value_name = "X", default_value_t = 0.8)]
    zipf: f64,
    /// Share of drafts that are kept
    #[arg(long, value_name = "X", default_value_t = 0.75)]
    accept: f64,
    /// Leave the list of popular experts out
    #[arg(long)]
    no_hot: bool,
    /// Write a JSON line about the result
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    numbers: Numbers,
}

/// What replaces the geometry's own numbers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Numbers that replace the geometry's")]
struct Numbers {
    /// Blocks by letter: M Mamba, E experts, * attention, - dense
    #[arg(long, value_name = "LETTERS", value_parser = blocks, allow_hyphen_values = true)]
    pattern: Option<Pattern>,
    /// The first so many blocks of the pattern, which repeats as often as needed
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,
    /// Rows of the embedding
    #[arg(long, value_name = "N")]
    vocab: Option<usize>,
    /// Routed experts of a layer
    #[arg(long, value_name = "N")]
    experts: Option<usize>,
    /// Experts chosen for a row
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Width of a routed expert
    #[arg(long, value_name = "N")]
    inter: Option<usize>,
    /// Width of the shared expert
    #[arg(long, value_name = "N")]
    shared_inter: Option<usize>,
    /// Width that routed experts read and write where it is not the residual stream's
    #[arg(long, value_name = "N")]
    latent: Option<usize>,
    /// Width of dense blocks
    #[arg(long, value_name = "N")]
    mlp_inter: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Key/value heads
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Width of an attention head
    #[arg(long, value_name = "N")]
    head_dim: Option<usize>,
    /// Mamba heads
    #[arg(long, value_name = "N")]
    mamba_heads: Option<usize>,
    /// Width of a Mamba head
    #[arg(long, value_name = "N")]
    mamba_head_dim: Option<usize>,
    /// Mamba groups
    #[arg(long, value_name = "N")]
    groups: Option<usize>,
    /// Mamba state size
    #[arg(long, value_name = "N")]
    d_state: Option<usize>,
}

/// A pattern of blocks; a type of its own, as clap takes a vector for a flag given several times.
#[derive(Clone, Debug)]
struct Pattern(Vec<BlockKind>);

fn codec(text: &str) -> Result<Codec, String> {
    match text {
        "q4tp" => Ok(Codec::Q4tp),
        "q8_2f" => Ok(Codec::Q8_2f),
        _ => Err("accepted are q4tp and q8_2f".into()),
    }
}

fn blocks(text: &str) -> Result<Pattern, String> {
    let kind = |letter| match letter {
        'M' => Ok(BlockKind::Mamba),
        'E' => Ok(BlockKind::Moe),
        '*' => Ok(BlockKind::Attention),
        '-' => Ok(BlockKind::Mlp),
        other => Err(format!("{other:?} names no block; M, E, * and - do")),
    };
    text.chars().map(kind).collect::<Result<_, _>>().map(Pattern)
}

impl Numbers {
    fn apply(&self, mut geometry: Geometry) -> Geometry {
        let set = |place: &mut usize, value: Option<usize>| *place = value.unwrap_or(*place);
        if let Some(Pattern(blocks)) = &self.pattern {
            geometry.blocks.clone_from(blocks);
        }
        if let Some(layers) = self.layers {
            geometry.blocks = geometry.blocks.iter().copied().cycle().take(layers).collect();
        }
        set(&mut geometry.hidden, self.hidden);
        set(&mut geometry.vocab, self.vocab);
        if let Some(AttentionGeometry { heads, kv_heads, head_dim }) = &mut geometry.attention {
            set(heads, self.heads);
            set(kv_heads, self.kv_heads);
            set(head_dim, self.head_dim);
        }
        if let Some(MambaGeometry { heads, head_dim, groups, d_state, .. }) = &mut geometry.mamba {
            set(heads, self.mamba_heads);
            set(head_dim, self.mamba_head_dim);
            set(groups, self.groups);
            set(d_state, self.d_state);
        }
        if let Some(MoeGeometry { experts, top_k, inter, shared_inter, latent, .. }) = &mut geometry.moe {
            set(experts, self.experts);
            set(top_k, self.top_k);
            set(inter, self.inter);
            set(shared_inter, self.shared_inter);
            *latent = self.latent.or(*latent);
        }
        // A part whose block the pattern lacks is no part of the file.
        let has = |kind| geometry.blocks.contains(&kind);
        let (attention, mamba, moe, mlp) =
            (has(BlockKind::Attention), has(BlockKind::Mamba), has(BlockKind::Moe), has(BlockKind::Mlp));
        let shared = geometry.moe.map(|moe| moe.shared_inter);
        geometry.mlp_inter = self.mlp_inter.or(geometry.mlp_inter).or(shared).filter(|_| mlp);
        geometry.attention = geometry.attention.filter(|_| attention || geometry.draft);
        geometry.mamba = geometry.mamba.filter(|_| mamba);
        geometry.moe = geometry.moe.filter(|_| moe || geometry.draft);
        geometry
    }
}

impl Synth {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        let base = preset(&self.geometry).map_err(|error| Failure::usage(error.to_string()))?;
        let options = SynthOptions {
            name: self.geometry,
            geometry: self.numbers.apply(Geometry { draft: self.mtp, ..base }),
            experts: self.codec,
            seed: self.seed,
            zipf: self.zipf,
            accept: self.accept,
            hot: !self.no_hot,
        };
        let bar = progress::bytes(terminal, "synth");
        let began = Instant::now();
        let written = pool(&knobs)?.install(|| {
            synth(&self.out, &options, &|done, total| {
                bar.set_length(total);
                bar.set_position(done);
            })
        });
        bar.finish_and_clear();
        let report = written.map_err(anyhow::Error::from)?;
        let seconds = began.elapsed().as_secs_f64();
        let gb = report.bytes as f64 / 1e9;
        let line = if self.json {
            json!({
                "cmd": "synth", "file": report.path.to_string_lossy(), "geometry": options.name,
                "blocks": options.geometry.blocks.len(), "tensors": report.tensors, "bytes": report.bytes, "gb": gb,
                "expert_gb": report.expert_bytes as f64 / 1e9, "seconds": seconds, "gb_per_s": gb / seconds,
                "codec": options.experts.to_string(), "mtp": options.geometry.draft, "seed": options.seed,
                "zipf": options.zipf, "mtp_accept": options.accept,
                "routed_share_of_top_eighth": report.share_of_top(8),
                "routed_share_of_top_quarter": report.share_of_top(4),
                "routed_share_of_top_half": report.share_of_top(2),
            })
            .to_string()
        } else {
            let shares = [8, 4, 2].map(|part| format!("{:.0}", 100.0 * report.share_of_top(part))).join(" / ");
            format!(
                "{}: {} blocks, {} tensors, {gb:.2} GB ({:.2} GB of routed experts), {seconds:.1} s, {:.2} GB/s\n\
                 the most used eighth / quarter / half of the experts get {shares} % of the routes",
                report.path.display(),
                options.geometry.blocks.len(),
                report.tensors,
                report.expert_bytes as f64 / 1e9,
                gb / seconds
            )
        };
        terminal.line(line).map_err(|error| Failure::from(anyhow::Error::from(error)))?;
        Ok(SUCCESS)
    }
}
