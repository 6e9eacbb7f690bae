//! The kernels of a prefill pass: which common files make which variant.
//!
//! A product comes in three forms. Exact matrices and the `f32` arithmetic use
//! f32 tiles; the `int8` arithmetic uses int8 tiles, exactly as `runtime.md`
//! §3a says; matrix units take halves in either arithmetic, within a tolerance
//! below the int8 mode's own error.

use super::kernels::{Format, Kernel, Variant};

/// Rows of a product's tile. Taller tiles of the matrix units measured no faster on an H200, and slower where experts
/// have few rows each.
pub const TILE_ROWS: u32 = 64;

/// How a pass's activations are encoded, which decides how they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// f32 tiles.
    F32,
    /// int8 codes, integer dot products.
    Int8,
    /// Halves, matrix units.
    Half,
}

/// What rows are encoded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// f32 rows, through a norm or as they are.
    Rows,
    /// The scan's outputs, gated and normalised in groups.
    Gate,
    /// The draft layer's two inputs.
    Fuse,
}

/// What a variant of a pass's kernel is chosen by; each kernel takes what concerns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PassChoice {
    /// The kernel's matrix.
    pub format: Format,
    /// How its activations are encoded.
    pub form: Form,
    /// Whether rows are sorted by expert.
    pub experts: bool,
    /// What rows are encoded from.
    pub source: Source,
}

impl Form {
    /// The form of the products with a matrix.
    #[must_use]
    pub const fn of(format: Format, int8: bool, cooperative: bool) -> Self {
        match format {
            Format::F32 | Format::Bf16 => Form::F32,
            Format::Q8 | Format::Q4 if cooperative => Form::Half,
            Format::Q8 | Format::Q4 if int8 => Form::Int8,
            Format::Q8 | Format::Q4 => Form::F32,
        }
    }

    /// Words that `cols` encoded columns take.
    #[must_use]
    pub const fn words(self, cols: usize) -> usize {
        match self {
            Form::F32 => cols,
            Form::Int8 => cols / 4,
            Form::Half => cols / 2,
        }
    }

    /// Columns of a product's tile.
    #[must_use]
    pub const fn tile_cols(self) -> u32 {
        match self {
            Form::F32 | Form::Int8 => 64,
            Form::Half => 128,
        }
    }

    const fn encode(self) -> &'static [&'static str] {
        match self {
            Form::F32 => &["encode_f32"],
            Form::Int8 => &["group32", "encode_int8"],
            Form::Half => &["group32", "encode_half"],
        }
    }
}

impl Kernel {
    /// Whether it is one of a pass.
    #[must_use]
    pub fn is_pass(&self) -> bool {
        self.name.starts_with("prefill_")
    }

    /// A pass's kernel as `choice` wants it.
    ///
    /// # Panics
    ///
    /// If it is none of a pass.
    #[must_use]
    pub fn pass_variant(&self, choice: &PassChoice) -> Variant {
        let mut commons = Vec::new();
        match self.name {
            "prefill_encode" => {
                commons.extend(["team_none", "guard", "guard_read", "own_miss", "none", "finite"]);
                commons.extend(match choice.source {
                    Source::Rows => ["encode_rows_params", "wide_reduce", "rows_of_norm"],
                    Source::Gate => ["encode_gate_params", "wide_reduce", "rows_of_gate"],
                    Source::Fuse => ["encode_fuse_params", "wide_reduce", "rows_of_fuse"],
                });
                commons.extend(choice.form.encode());
            }
            "prefill_matmat_f32" | "prefill_matmat_int8" | "prefill_matmat_coop" => {
                let coop = self.name == "prefill_matmat_coop";
                if coop {
                    commons.push("coop_head");
                }
                commons.extend(["guard", "guard_read", "own_miss", "none", "relu", "matmat"]);
                commons.push(if choice.experts { "pass_experts" } else { "pass_rows" });
                commons.push(match choice.format {
                    Format::Q8 if coop => "half_q8",
                    Format::Q4 if coop => "half_q4",
                    Format::Q8 => "columns_q8",
                    Format::Q4 => "columns_q4",
                    Format::F32 => "columns_f32",
                    Format::Bf16 => "columns_bf16",
                });
            }
            "prefill_route" => commons.extend(["team_none", "guard", "guard_read", "rows_1", "choose", "unite_1"]),
            "prefill_count" => commons.extend(["team_none", "guard", "guard_read"]),
            "prefill_sort" => commons.extend(["team_none", "guard", "guard_write"]),
            "prefill_sum" | "prefill_conv" | "prefill_ring" | "prefill_ssd_steps" | "prefill_ssd_pass"
            | "prefill_last" => commons.extend(["team_none", "guard", "guard_read"]),
            "prefill_ssd_states" | "prefill_ssd_out" | "prefill_attention" => {
                commons.extend(["guard", "guard_read"]);
            }
            name => panic!("{name} is no kernel of a pass"),
        }
        Variant { kernel: self.name, commons }
    }
}

#[cfg(test)]
pub(super) fn variants() -> Vec<Variant> {
    let mut all: Vec<Variant> = Vec::new();
    for kernel in super::kernels::KERNELS.iter().filter(|kernel| kernel.is_pass()) {
        for format in Format::ALL {
            for form in [Form::F32, Form::Int8, Form::Half] {
                for (experts, source) in [(false, Source::Rows), (true, Source::Gate), (false, Source::Fuse)] {
                    let exact = matches!(format, Format::F32 | Format::Bf16);
                    let wanted = match kernel.name {
                        "prefill_matmat_int8" | "prefill_matmat_coop" => !exact,
                        _ => true,
                    };
                    let variant = kernel.pass_variant(&PassChoice { format, form, experts, source });
                    if wanted && !all.contains(&variant) {
                        all.push(variant);
                    }
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_follow_codec_and_arithmetic() {
        assert_eq!(Form::of(Format::F32, true, true), Form::F32);
        assert_eq!(Form::of(Format::Q8, true, true), Form::Half);
        assert_eq!(Form::of(Format::Q4, true, false), Form::Int8);
        assert_eq!(Form::of(Format::Q4, false, false), Form::F32);
    }
}
