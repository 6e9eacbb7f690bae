//! Models without weights: files of any geometry for benchmarks, with known answers.
//!
//! A synthetic file is as large and as much work as a real one of its
//! geometry, and wrong kernels show in what it decodes:
//!
//! * **Known answer.** The residual stream carries the token's embedding, to
//!   which each block adds about 0.15 of its norm. Row `t + 1` of the head is
//!   the part of embedding `t` that is the token's own, so the greedy
//!   continuation of `t` is `t + 1` (modulo the vocabulary).
//! * **Routing.** Router logits are N(0, 1); the selection bias of each layer
//!   is fitted so that an expert's rate of selection follows a Zipf law, its
//!   ranks shuffled layer by layer and listed as `expert_hot`. Runs of 64
//!   tokens share one of 16 topics, a quarter of the embedding's energy, so
//!   that what is hot drifts with the position.
//! * **Drafts.** Every fourth dimension of the embedding is hidden from the
//!   draft layer. A chosen share of the tokens is told apart only there, and
//!   the draft of their successor is wrong.
//!
//! The file is laid out first and then filled from all threads of the rayon
//! pool it runs in, piece by piece, so memory does not grow with the model
//! and the disk sets the pace. The same options give the same bytes.

mod fill;
mod geometry;
mod random;
mod routing;

pub use geometry::{UnknownPreset, llm_config, preset};

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use serde_json::{Value, json};

use super::config::{ConfigError, TextConfig};
use super::convert::arch;
use super::geometry::{BlockKind, Geometry};
use super::layout::{self, Kind, Role, Wanted};
use super::tensors::Codec;
use super::writer::{Spec, WriteError, Writer};
use crate::ids::BlockIx;
use fill::Filler;

/// What a synthetic model is to be.
#[derive(Clone, Debug)]
pub struct SynthOptions {
    /// What to call the geometry in the file.
    pub name: String,
    /// Every number that decides a shape; with `draft`, the file gets the draft layer.
    pub geometry: Geometry,
    /// Codec of the routed experts, [`Codec::Q4tp`] or [`Codec::Q8_2f`]. All other matrices are q8_2f.
    pub experts: Codec,
    /// Decides all that is drawn.
    pub seed: u64,
    /// Exponent of the popularity of experts: rank `r` is chosen at a rate proportional to `(r + 1)^-zipf`. 0 is uniform.
    pub zipf: f64,
    /// Share of the tokens whose successor's draft is kept, 0 to 1.
    pub accept: f64,
    /// Whether the file lists its experts by popularity.
    pub hot: bool,
}

/// What was written.
#[derive(Clone, Debug)]
pub struct SynthReport {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its tensors.
    pub tensors: usize,
    /// Payload bytes of the decoder's routed experts.
    pub expert_bytes: u64,
    /// By rank, the rate at which an expert is selected; all together `top_k`. Empty without experts.
    pub rates: Vec<f64>,
}

impl SynthReport {
    /// The share of all routes that goes to the most popular `1 / part` of the experts.
    #[must_use]
    pub fn share_of_top(&self, part: usize) -> f64 {
        let all: f64 = self.rates.iter().sum();
        if all > 0.0 { self.rates[..self.rates.len() / part.max(1)].iter().sum::<f64>() / all } else { 0.0 }
    }
}

/// Why no file was written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// Numbers that make no model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A codec experts are not written in.
    #[error("experts are to be {seen}, wanted q4tp or q8_2f")]
    Codec {
        /// The codec.
        seen: Codec,
    },
    /// A rate or an exponent out of range.
    #[error("{what} is {seen}, wanted {want}")]
    Range {
        /// Which number.
        what: &'static str,
        /// What it is.
        seen: f64,
        /// What is accepted.
        want: &'static str,
    },
    /// The file could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Writes a synthetic model to `out`, which appears when it is whole. `progress` is told, from any thread, the payload
/// bytes written and those in all.
///
/// # Errors
///
/// See [`SynthError`]; the file that was at `out` before, if any, is then still there.
pub fn synth(
    out: &Path,
    options: &SynthOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<SynthReport, SynthError> {
    check(options)?;
    let llm_config = llm_config(&options.geometry);
    let config = TextConfig::read(&llm_config, options.geometry.draft)?;
    let wanted: Vec<Wanted> = layout::decoder(&config).collect();
    let popularity = options.geometry.moe.map(|moe| routing::fit(moe.experts, moe.top_k, options.zipf, options.seed));
    let specs: Vec<Spec> = wanted.iter().map(|wanted| spec(wanted, options.experts)).collect();
    let tensors = specs.len();
    let payload = |spec: &Spec| super::container::payload_len(spec.codec, &spec.shape).unwrap_or(0) as u64;
    let routed = wanted.iter().zip(&specs).filter(|(wanted, _)| wanted.role == Role::Routed);
    let expert_bytes = routed.map(|(_, spec)| payload(spec)).sum();
    let bytes_total: u64 = specs.iter().map(payload).sum();

    let biases = popularity.as_ref().map_or(&[][..], |fitted| &fitted.biases);
    let source = fill::Source::new(options, biases, bytes_total);
    let fillers: Vec<Filler<'_>> = specs.iter().map(|spec| source.filler(spec)).collect();
    let mut pieces: Vec<Piece> = fillers.iter().enumerate().flat_map(|(index, filler)| split(index, filler)).collect();
    // The pieces that take longest to draw come first, so that no thread ends on one of them.
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.len));

    let header = header(options, &llm_config, &config.geometry);
    let writer = Writer::create(out, header, b"", specs.clone())?;
    let done = AtomicU64::new(0);
    pieces.par_iter().try_for_each_init(Vec::new, |buffer: &mut Vec<u8>, piece| {
        buffer.clear();
        buffer.resize(piece.len, 0);
        fillers[piece.index].fill(piece.offset, buffer);
        let _span = tracing::debug_span!(target: "riparian::synth", "write", bytes = buffer.len()).entered();
        writer.write_piece(piece.index, piece.offset as u64, buffer)?;
        let len = piece.len as u64;
        progress(done.fetch_add(len, Ordering::Relaxed) + len, bytes_total);
        Ok::<(), WriteError>(())
    })?;
    let bytes = writer.finish()?;
    tracing::info!(path = %out.display(), bytes, tensors, "synthesised");
    let rates = popularity.map_or_else(Vec::new, |fitted| fitted.rates);
    Ok(SynthReport { path: out.to_owned(), bytes, tensors, expert_bytes, rates })
}

fn check(options: &SynthOptions) -> Result<(), SynthError> {
    if !options.experts.is_quantized() {
        return Err(SynthError::Codec { seen: options.experts });
    }
    for (what, seen, high, want) in [
        ("the exponent of popularity", options.zipf, 4.0, "0 to 4"),
        ("the share of drafts kept", options.accept, 1.0, "0 to 1"),
    ] {
        if !(0.0..=high).contains(&seen) {
            return Err(SynthError::Range { what, seen, want });
        }
    }
    Ok(())
}

fn spec(wanted: &Wanted, experts: Codec) -> Spec {
    let codec = match wanted.kind {
        Kind::Exact | Kind::ExactF32 => Codec::F32,
        Kind::Matrix => Codec::Q8_2f,
        Kind::Expert => experts,
    };
    Spec { name: wanted.name.clone(), codec, shape: wanted.shape.clone() }
}

/// A part of a payload that is drawn and written at once.
struct Piece {
    /// The tensor.
    index: usize,
    /// From the payload's start.
    offset: usize,
    /// Bytes.
    len: usize,
}

/// A payload's pieces: codes as the filler cuts them, and what follows the codes with the last of them.
fn split(index: usize, filler: &Filler<'_>) -> Vec<Piece> {
    let starts: Vec<usize> = (0..filler.codes.max(1)).step_by(filler.piece).collect();
    let ends = starts.iter().skip(1).copied().chain([filler.len]);
    starts.iter().zip(ends).map(|(&offset, end)| Piece { index, offset, len: end - offset }).collect()
}

fn header(options: &SynthOptions, llm_config: &Value, geometry: &Geometry) -> Value {
    let mut model = json!({ "llm_config": llm_config });
    if let Some(moe) = geometry.moe.filter(|_| options.hot) {
        let blocks = geometry.blocks_of(BlockKind::Moe);
        let order = |block: BlockIx| {
            let prefix = layout::mixer(block.index(), BlockKind::Moe);
            routing::order(options.seed, &prefix, moe.experts)
        };
        model["expert_hot"] = json!(blocks.map(order).collect::<Vec<_>>());
    }
    json!({
        "format": "cmf",
        "version": super::container::VERSION,
        "arch": arch(geometry),
        "quant_type": if options.experts == Codec::Q4tp { "Q4_BLOCK" } else { "Q8_2F" },
        "provenance": {
            "source": "synthetic",
            "converter": concat!("riparian ", env!("CARGO_PKG_VERSION")),
            "quant": options.experts.to_string(),
            "nemotron_transcribe": model,
            "synthetic": {
                "geometry": options.name, "seed": options.seed, "zipf": options.zipf, "mtp_accept": options.accept,
                "next_token": NEXT_TOKEN,
            },
        },
    })
}

/// What the header of a synthetic file says of its continuation.
const NEXT_TOKEN: &str = "t + 1 mod vocab";

/// Whether a file's header says that the greedy continuation of each token is its successor.
#[must_use]
pub fn has_known_answer(header: &Value) -> bool {
    header.pointer("/provenance/synthetic/next_token").and_then(Value::as_str) == Some(NEXT_TOKEN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{OpenOptions, open, verify};

    fn options(name: &str, draft: bool) -> SynthOptions {
        let geometry = Geometry { draft, ..preset(name).unwrap() };
        SynthOptions { name: name.into(), geometry, experts: Codec::Q4tp, seed: 5, zipf: 0.8, accept: 0.75, hot: true }
    }

    #[test]
    fn a_file_opens_verifies_and_is_reproduced_on_any_number_of_threads() {
        let dir = tempfile::tempdir().unwrap();
        let options = options("kernel", true);
        let mut files = Vec::new();
        for threads in [1, 3] {
            let path = dir.path().join(format!("{threads}.cmf"));
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let most = AtomicU64::new(0);
            let report = pool
                .install(|| {
                    synth(&path, &options, &|done, total| {
                        assert!(done <= total);
                        most.fetch_max(done * 100 / total, Ordering::Relaxed);
                    })
                })
                .unwrap();
            assert_eq!(most.into_inner(), 100);
            assert_eq!(std::fs::metadata(&path).unwrap().len(), report.bytes);
            files.push(std::fs::read(&path).unwrap());
        }
        assert!(files[0] == files[1]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing but the files");
        let model = open(&dir.path().join("1.cmf"), &OpenOptions::default()).unwrap();
        assert_eq!(verify(&model.container, |_| {}).unwrap().tensors, model.container.tensors().len());
        assert_eq!(model.geometry, options.geometry);
        assert_eq!(model.expert_hot.len(), model.geometry.decoder_layers());
        assert!(has_known_answer(model.container.header()));
        let (first, second) = (&model.expert_hot[0], &model.expert_hot[1]);
        assert_ne!(first, second, "each layer has its own favourites");
        let moe = model.decoder.blocks.iter().find_map(|block| match &block.mixer {
            crate::model::weights::Mixer::Moe(moe) => Some(moe),
            _ => None,
        });
        let bias = &moe.unwrap().bias;
        assert!(first.windows(2).all(|pair| bias[pair[0].index()] >= bias[pair[1].index()] - 0.05), "hottest first");
    }

    #[test]
    fn what_makes_no_model_is_refused_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let refuse = |change: &dyn Fn(&mut SynthOptions)| {
            let mut options = options("tiny", false);
            change(&mut options);
            synth(&dir.path().join("a.cmf"), &options, &|_, _| {}).unwrap_err().to_string()
        };
        let moe = |options: &mut SynthOptions, change: &dyn Fn(&mut crate::model::geometry::MoeGeometry)| {
            change(options.geometry.moe.as_mut().unwrap());
        };
        for (says, change) in [
            ("wanted q4tp or q8_2f", &(|o: &mut SynthOptions| o.experts = Codec::Bf16) as &dyn Fn(&mut SynthOptions)),
            ("the share of drafts kept is 1.5", &|o| o.accept = 1.5),
            ("the exponent of popularity is NaN", &|o| o.zipf = f64::NAN),
            ("num_experts_per_tok", &|o| moe(o, &|moe| moe.top_k = 9999)),
            ("q4tp cannot hold shape", &|o| moe(o, &|moe| moe.inter = 40)),
            ("the number of blocks is 0", &|o| o.geometry.blocks.clear()),
        ] {
            let error = refuse(change);
            assert!(error.contains(says), "{error:?} does not say {says:?}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
