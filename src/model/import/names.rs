//! Where a CMF file's tensors lie in a checkpoint (`model.md` §3, `cmf.md` §7).

use std::borrow::Cow;

use super::ImportError;
use super::files::{Files, Stored};
use crate::model::layout::{Kind, Role, Wanted};
use crate::model::tensors::Codec;

/// Where the decoder's own tensors may lie.
const ROOTS: [&str; 4] = ["llm.model", "llm.backbone", "backbone", "model"];

/// A tensor to be written, and where it comes from.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Its name in a CMF file.
    pub name: String,
    /// Its dimensions there.
    pub shape: Vec<usize>,
    /// How it may be stored.
    pub kind: Kind,
    /// What it is for.
    pub role: Role,
    /// Where it comes from.
    pub source: Source,
    /// The source's element type.
    pub codec: Codec,
}

/// How a tensor lies in its checkpoint.
#[derive(Clone, Debug)]
pub enum Source {
    /// As it is, but for dimensions of 1.
    Whole {
        /// Name in the checkpoint.
        tensor: String,
    },
    /// One matrix of a stacked bank `[experts, out, in]`.
    Stacked {
        /// Name in the checkpoint.
        tensor: String,
        /// Which matrix.
        expert: usize,
    },
    /// One matrix of a transposed bank `[experts, in, out]`.
    Transposed {
        /// Name in the checkpoint.
        tensor: String,
        /// Which matrix.
        expert: usize,
    },
    /// The taps of an upsampling convolution, `[in, out, taps]`, as rows `tap · out + o` of `in` columns.
    Taps {
        /// Name in the checkpoint.
        tensor: String,
    },
}

impl Source {
    /// The tensor's name in the checkpoint.
    #[must_use]
    pub fn tensor(&self) -> &str {
        match self {
            Self::Whole { tensor }
            | Self::Stacked { tensor, .. }
            | Self::Transposed { tensor, .. }
            | Self::Taps { tensor } => tensor,
        }
    }
}

impl Planned {
    /// The tensor's elements in the order a CMF file has them, in the source's element type. Copied only where the
    /// order differs.
    ///
    /// # Panics
    ///
    /// If `files` are not those it was planned for.
    #[must_use]
    pub fn bytes<'a>(&self, files: &'a Files) -> Cow<'a, [u8]> {
        let stored = files.get(self.source.tensor()).expect("planned from these files");
        let bytes = stored.bytes();
        let len = self.shape.iter().product::<usize>() * element(self.codec);
        match self.source {
            Source::Whole { .. } => Cow::Borrowed(bytes),
            Source::Stacked { expert, .. } => Cow::Borrowed(&bytes[expert * len..][..len]),
            Source::Transposed { expert, .. } => {
                let [rows, cols] = [self.shape[0], self.shape[1]];
                Cow::Owned(transpose(&bytes[expert * len..][..len], [cols, rows], element(self.codec)))
            }
            Source::Taps { .. } => {
                // [in, out · taps] → [out · taps, in], then the rows from (out, tap) to (tap, out).
                let [inputs, outputs, taps] = [stored.shape[0], stored.shape[1], stored.shape[2]];
                let size = element(self.codec);
                let rows = transpose(bytes, [inputs, outputs * taps], size);
                let row = inputs * size;
                let order = (0..taps).flat_map(|tap| (0..outputs).map(move |output| output * taps + tap));
                Cow::Owned(order.flat_map(|at| &rows[at * row..][..row]).copied().collect())
            }
        }
    }
}

fn element(codec: Codec) -> usize {
    crate::model::quant::float::size(codec)
}

/// `[rows, cols]` to `[cols, rows]`, by blocks that stay in the cache.
fn transpose(bytes: &[u8], [rows, cols]: [usize; 2], size: usize) -> Vec<u8> {
    match size {
        2 => transpose_of::<2>(bytes, [rows, cols]),
        _ => transpose_of::<4>(bytes, [rows, cols]),
    }
}

fn transpose_of<const SIZE: usize>(bytes: &[u8], [rows, cols]: [usize; 2]) -> Vec<u8> {
    const BLOCK: usize = 32;
    let from = bytes.as_chunks::<SIZE>().0;
    let mut out = vec![[0; SIZE]; rows * cols];
    for row_block in (0..rows).step_by(BLOCK) {
        for col_block in (0..cols).step_by(BLOCK) {
            for row in row_block..rows.min(row_block + BLOCK) {
                for col in col_block..cols.min(col_block + BLOCK) {
                    out[col * rows + row] = from[row * cols + col];
                }
            }
        }
    }
    out.into_flattened()
}

/// The names a tensor of a CMF file may have in a checkpoint, but for stacked banks.
pub(super) fn candidates(name: &str) -> Vec<String> {
    let mut names = Vec::new();
    if let Some(rest) = name.strip_prefix("model.") {
        let rests: Vec<String> = match rest {
            "embed_tokens.weight" => vec![rest.into(), "embeddings.weight".into()],
            "norm.weight" => vec![rest.into(), "norm_f.weight".into()],
            _ => in_block(rest),
        };
        names.extend(ROOTS.iter().flat_map(|root| rests.iter().map(move |rest| format!("{root}.{rest}"))));
    } else {
        // lm_head and mtp
        names.extend(in_block(name).iter().flat_map(|rest| [format!("llm.{rest}"), rest.clone()]));
    }
    names
}

/// A name inside a block: checkpoints have every mixer under `mixer.`, and Mamba's scalars perhaps one step deeper.
fn in_block(rest: &str) -> Vec<String> {
    let mut names = vec![rest.replace(".mlp.", ".mixer.")];
    if rest.contains(".mlp.") {
        names.push(rest.to_owned());
    }
    if [".A_log", ".D", ".dt_bias"].iter().any(|leaf| rest.ends_with(leaf)) {
        names.insert(0, rest.replace(".mixer.", ".mixer._fp32_params."));
    }
    names
}

/// Banks an expert's matrix may lie in: name, and whether its matrices are transposed.
fn banks(name: &str) -> Option<(usize, Vec<(String, bool)>)> {
    let (head, rest) = name.split_once(".experts.")?;
    let (expert, leaf) = rest.split_once('.')?;
    let (plain, transposed) = match leaf {
        "up_proj.weight" => ("up_proj", "gate_and_up_projs"),
        "down_proj.weight" => ("down_proj", "down_projs"),
        _ => return None,
    };
    let mut banks = Vec::new();
    for (bank, turned) in [(transposed, true), (plain, false)] {
        banks.extend(candidates(&format!("{head}.experts.{bank}")).into_iter().map(|name| (name, turned)));
    }
    Some((expert.parse().ok()?, banks))
}

/// Finds one tensor of the decoder and checks its shape; `experts` is the number of matrices in a bank.
pub(super) fn find(files: &Files, wanted: Wanted, experts: usize) -> Result<Planned, ImportError> {
    let mut tried = candidates(&wanted.name);
    if let Some(name) = tried.iter().find(|name| files.get(name).is_some()) {
        let stored = files.get(name).expect("just found");
        let seen: Vec<usize> = stored.shape.iter().copied().filter(|dim| *dim != 1).collect();
        let want: Vec<usize> = wanted.shape.iter().copied().filter(|dim| *dim != 1).collect();
        let source = Source::Whole { tensor: name.clone() };
        return plan(wanted, source, stored, seen == want);
    }
    if let Some((expert, banks)) = banks(&wanted.name) {
        for (name, transposed) in banks {
            let Some(stored) = files.get(&name) else {
                tried.push(name);
                continue;
            };
            let [rows, cols] = [wanted.shape[0], wanted.shape[1]];
            let matrix = if transposed { [cols, rows] } else { [rows, cols] };
            let fits = stored.shape == [experts, matrix[0], matrix[1]];
            let source = match transposed {
                true => Source::Transposed { tensor: name, expert },
                false => Source::Stacked { tensor: name, expert },
            };
            return plan(wanted, source, stored, fits);
        }
    }
    Err(ImportError::Missing { name: wanted.name, tried })
}

fn plan(wanted: Wanted, source: Source, stored: &Stored, fits: bool) -> Result<Planned, ImportError> {
    let Some(codec) = stored.codec() else {
        return Err(ImportError::Quantized { what: format!("tensor {} is {:?}", source.tensor(), stored.dtype) });
    };
    if !fits {
        let (name, seen) = (source.tensor().to_owned(), stored.shape.clone());
        return Err(ImportError::Shape { name, seen, want: wanted.shape });
    }
    let Wanted { name, shape, kind, role } = wanted;
    Ok(Planned { name, shape, kind, role, source, codec })
}

/// Tensors that lie in checkpoints and are known to be of no use.
pub(super) fn is_expected_leftover(name: &str) -> bool {
    name.ends_with("._extra_state")
        || name.starts_with("perception.encoder.diarization_model.preprocessor.")
        || name.contains(".sortformer_modules.hidden_to_spks.")
        // Scalars and bytes that the header carries.
        || matches!(
            name,
            "ctc_timestamp.decoder.residual_scale"
                | "ctc_timestamp.decoder.upsample_factor"
                | "ctc_timestamp.tokenizer.model_proto"
        )
}

/// The perception towers: names and shapes as they are.
pub(super) fn perception(files: &Files) -> Result<Vec<Planned>, ImportError> {
    let names = files.names().filter(|name| name.starts_with("perception.") && !is_expected_leftover(name));
    let plans = names.filter_map(|name| {
        let stored = files.get(name)?;
        let kind = if stored.shape.len() == 2 { Kind::Matrix } else { Kind::Exact };
        let wanted = Wanted { name: name.to_owned(), shape: stored.shape.clone(), kind, role: Role::Perception };
        Some(plan(wanted, Source::Whole { tensor: name.to_owned() }, stored, !stored.shape.contains(&0)))
    });
    plans.collect()
}

/// The word timestamp head, under the names the peer gives it.
pub(super) fn timestamps(files: &Files) -> Result<Vec<Planned>, ImportError> {
    const PREFIX: &str = "ctc_timestamp.decoder.";
    let names = files.names().filter(|name| name.starts_with(PREFIX) && !is_expected_leftover(name));
    let plans = names.filter_map(|name| {
        let stored = files.get(name)?;
        let tensor = name.to_owned();
        let (rest, shape, source) = match (&name[PREFIX.len()..], &stored.shape[..]) {
            ("upsample.weight", &[inputs, outputs, taps]) => {
                ("upsample.weight", vec![taps * outputs, inputs], Source::Taps { tensor })
            }
            ("decoder_layers.0.weight", &[classes, width, 1]) => {
                ("head.weight", vec![classes, width], Source::Whole { tensor })
            }
            ("decoder_layers.0.bias", shape) => ("head.bias", shape.to_vec(), Source::Whole { tensor }),
            (rest, shape) => (rest, shape.to_vec(), Source::Whole { tensor }),
        };
        // The peer has these vectors in f32.
        let kind = if shape.len() == 2 { Kind::Matrix } else { Kind::ExactF32 };
        let fits = !shape.contains(&0);
        let wanted = Wanted { name: format!("ctc_timestamp.{rest}"), shape, kind, role: Role::Timestamps };
        Some(plan(wanted, source, stored, fits))
    });
    plans.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_twice_changes_nothing() {
        for [rows, cols] in [[1, 1], [3, 70], [33, 31], [64, 64]] {
            for size in [2, 4] {
                let bytes: Vec<u8> = (0..rows * cols * size).map(|i| (i * 37 + i / 256) as u8).collect();
                let turned = transpose(&bytes, [rows, cols], size);
                for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                    let (from, to) = ((row * cols + col) * size, (col * rows + row) * size);
                    assert_eq!(turned[to..to + size], bytes[from..from + size]);
                }
                assert_eq!(transpose(&turned, [cols, rows], size), bytes);
            }
        }
    }

    #[test]
    fn both_layouts_are_looked_for() {
        let has = |name: &str, want: &str| assert!(candidates(name).iter().any(|n| n == want), "{name} {want}");
        has("model.embed_tokens.weight", "backbone.embeddings.weight");
        has("model.embed_tokens.weight", "llm.model.embed_tokens.weight");
        has("model.norm.weight", "backbone.norm_f.weight");
        has("model.layers.3.mlp.gate.weight", "llm.model.layers.3.mixer.gate.weight");
        has("model.layers.3.mixer.D", "llm.model.layers.3.mixer._fp32_params.D");
        has("model.layers.3.mixer.D", "backbone.layers.3.mixer.D");
        has("lm_head.weight", "llm.lm_head.weight");
        has("mtp.layers.1.mlp.gate.weight", "mtp.layers.1.mixer.gate.weight");
        let (expert, banks) = banks("model.layers.3.mlp.experts.17.down_proj.weight").unwrap();
        assert_eq!(expert, 17);
        assert!(banks.contains(&("llm.model.layers.3.mixer.experts.down_projs".into(), true)));
        assert!(banks.contains(&("model.layers.3.mixer.experts.down_proj".into(), false)));
    }
}
