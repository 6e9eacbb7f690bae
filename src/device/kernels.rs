//! The registry of shaders: sources, bindings, and the common files that make a variant.
//!
//! A kernel is one file of `shaders/`. What differs between variants (teams,
//! codecs, arithmetic, rows at once) lies in `shaders/common/`: a variant puts
//! the right files in front, which offer the same function names. Numbers are
//! WGSL `override`s. No text is ever replaced.

use std::fmt;

/// How a shader sees a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binding {
    /// A uniform struct.
    Uniform,
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    Write,
}

/// One shader file.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// File name without its ending, also the name of its test.
    pub name: &'static str,
    /// The text.
    pub source: &'static str,
    /// Bindings of group 0, in order.
    pub bindings: &'static [Binding],
    /// The twins in `reference` that it is tested against.
    pub twins: &'static [&'static str],
}

macro_rules! kernels {
    ($($(#[doc = $doc:literal])* $const:ident $name:literal [$($binding:ident)*] twins [$($twin:literal)*];)*) => {
        $($(#[doc = $doc])* pub const $const: Kernel = Kernel {
            name: $name,
            source: include_str!(concat!("../../shaders/", $name, ".wgsl")),
            bindings: &[$(Binding::$binding),*],
            twins: &[$($twin),*],
        };)*

        /// All kernels.
        pub const KERNELS: &[Kernel] = &[$($const),*];
    };
}

macro_rules! commons {
    ($($name:literal)*) => {
        /// All common files by name.
        pub const COMMONS: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../shaders/common/", $name, ".wgsl")))),*];
    };
}

kernels! {
    /// The block's norm and up to three matrices that read it.
    NORM_PROJ "norm_proj" [Uniform Read Uniform Read Read Read Write Write] twins ["rms_norm" "matvec"];
    /// Router logits and the shared expert's up.
    MOE_IN "moe_in" [Uniform Read Uniform Read Read Read Write Write Write] twins ["rms_norm" "matvec" "router"];
    /// Experts of each row, their weights and places.
    ROUTE "route" [Uniform Write Uniform Read Read Read Write] twins ["router"];
    /// The routed experts' up.
    EXPERTS_UP "experts_up" [Uniform Read Uniform Read Read Read Read Write Write Read] twins ["matvec" "mlp"];
    /// The routed experts' down, the sum over the picks, and the residual.
    EXPERTS_DOWN "experts_down" [Uniform Read Uniform Read Read Read Read Read Read Write Write] twins ["matvec" "moe_sum"];
    /// A matrix over encoded activations.
    PROJ_ACT "proj_act" [Uniform Read Uniform Read Read Read Read Write Read] twins ["matvec"];
    /// Convolution, scan and gate.
    SSM_STEP "ssm_step" [Uniform Read Uniform Read Read Write Write Write Write] twins ["conv_step" "ssm_step"];
    /// The projection that ends a block, with the residual.
    CLOSE_PROJ "close_proj" [Uniform Read Uniform Read Read Read Read Write] twins ["gated_group_norm" "matvec"];
    /// One part of the positions of an attention.
    ATTN_SPLIT "attn_split" [Uniform Read Uniform Read Read Write] twins ["attention"];
    /// The parts put together.
    ATTN_MERGE "attn_merge" [Uniform Read Read Write] twins ["softmax_merge"];
    /// Logits, and the best of each workgroup.
    HEAD "head" [Uniform Read Uniform Read Read Read Write Write] twins ["rms_norm" "matvec" "argmax"];
    /// What a team is on an adapter.
    LANES "lanes" [Write] twins ["lanes"];
    /// Rows from the host.
    TAKE_ROWS "take_rows" [Uniform Read Uniform Read Write] twins [];
    /// Rows of a pass as the products read them.
    PREFILL_ENCODE "prefill_encode" [Uniform Read Uniform Read Read Read Write Write] twins ["rms_norm" "gated_group_norm" "fuse" "quantize_activations"];
    /// Products of a pass in f32.
    PREFILL_MATMAT_F32 "prefill_matmat_f32" [Uniform Read Uniform Read Read Read Read Read Write] twins ["matvec"];
    /// Products of a pass in int8.
    PREFILL_MATMAT_INT8 "prefill_matmat_int8" [Uniform Read Uniform Read Read Read Read Read Write] twins ["matvec"];
    /// Products of a pass through matrix units.
    PREFILL_MATMAT_COOP "prefill_matmat_coop" [Uniform Read Uniform Read Read Read Read Read Write] twins ["matvec"];
    /// Experts of each row of a pass.
    PREFILL_ROUTE "prefill_route" [Uniform Read Uniform Read Read Read Write] twins ["router"];
    /// What a pass's rows chose.
    PREFILL_COUNT "prefill_count" [Uniform Read Uniform Read Write] twins [];
    /// A pass's picks by expert.
    PREFILL_SORT "prefill_sort" [Uniform Write Uniform Read Write] twins ["router"];
    /// The closing sum of an MoE layer over a pass.
    PREFILL_SUM "prefill_sum" [Uniform Read Uniform Read Read Read Write] twins ["moe_sum"];
    /// The convolution over a pass.
    PREFILL_CONV "prefill_conv" [Uniform Read Uniform Read Read Read Write] twins ["conv_step"];
    /// What the next convolution needs of a pass.
    PREFILL_RING "prefill_ring" [Uniform Read Read Write] twins ["conv_step"];
    /// Step sizes of a pass's scan.
    PREFILL_SSD_STEPS "prefill_ssd_steps" [Uniform Read Uniform Read Read Write] twins ["ssm_chunked"];
    /// What each chunk adds to the scan's state.
    PREFILL_SSD_STATES "prefill_ssd_states" [Uniform Read Read Read Write] twins ["ssm_chunked"];
    /// The scan's state from chunk to chunk.
    PREFILL_SSD_PASS "prefill_ssd_pass" [Uniform Read Uniform Read Write Write] twins ["ssm_chunked"];
    /// The scan's outputs.
    PREFILL_SSD_OUT "prefill_ssd_out" [Uniform Read Uniform Read Read Read Read Write] twins ["ssm_chunked"];
    /// Attention of a pass.
    PREFILL_ATTENTION "prefill_attention" [Uniform Read Uniform Read Read Write] twins ["attention"];
    /// The last row of a pass alone.
    PREFILL_LAST "prefill_last" [Uniform Read Read Write] twins [];
    /// The closing sum of a step, with what the host made.
    RESUME_STEP "resume_step" [Uniform Read Read Read Read Read Write] twins ["moe_sum"];
    /// What the host made for a pass.
    RESUME_PASS "resume_pass" [Uniform Read Read Read Write] twins [];
    /// The end of a miss.
    CURE "cure" [Uniform Write Read] twins [];
    /// One missing expert of a step, from its new place.
    FILL_STEP "fill_step" [Uniform Read Read Write] twins [];
    /// One missing expert of a pass, from its new place.
    FILL_PASS "fill_pass" [Uniform Read Read Read Write] twins [];
    /// Ids of a batch that stand, and the embedding behind the last of them.
    ACCEPT "accept" [Uniform Write Uniform Read Read Read Write Write Write Read Write Write] twins ["argmax" "embed"];
    /// A draft and its embedding.
    DRAFT_PICK "draft_pick" [Uniform Write Uniform Read Read Read Write Write Read] twins ["argmax" "embed"];
    /// Rows as the draft layer reads them.
    DRAFT_ROWS "draft_rows" [Uniform Read Uniform Read Read Read Write] twins ["rms_norm" "layer_norm"];
    /// The draft layer's two inputs made one.
    DRAFT_FUSE "draft_fuse" [Uniform Read Uniform Read Read Read Read Write Write] twins ["fuse"];
    /// The step's id and its embedding.
    PICK_EMBED "pick_embed" [Uniform Write Uniform Read Read Read Write Write] twins ["argmax" "embed"];
}

commons! {
    "columns_bf16" "columns_f32" "columns_q4" "columns_q8" "coop_head" "encode_f32" "encode_fuse_params"
    "encode_gate_params" "encode_half" "encode_int8" "encode_rows_params" "finite" "group32" "half_q4" "half_q8" "matmat"
    "pass_experts" "pass_rows" "rows_of_fuse" "rows_of_gate" "rows_of_norm" "wide_reduce"
    "cells" "choose" "parts_all" "parts_step" "picked_1" "picked_1_rows" "picked_2" "picked_n" "unite_1" "unite_n" "embed_bf16" "embed_f32" "embed_q8" "exact_bf16" "exact_f32" "guard" "guard_read" "guard_write"
    "halt_missing" "halt_never"     "in_f32" "in_linear" "in_nibble" "none" "norm" "out_f32" "out_linear" "out_nibble" "own_miss" "products_1" "products_1_rows" "products_2" "products_2_rows" "products_4" "products_4_rows" "products_n" "q4_f32"
    "q4_int8" "q4_side" "q8_f32" "q8_int8" "quantize" "relu" "routes" "rows_all" "rows_some" "rows_1" "rows_2" "rows_3" "rows_4" "rows_5" "sixteen"
    "source_group_norm" "source_plain" "staged" "team_none" "team_subgroup" "team_subgroup32" "vecs_f32" "vecs_int8"
    "vectors" "wide_1" "wide_2" "wide_4"
}

/// How invocations sum together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Team {
    /// Subgroups of 32 and no other size.
    Subgroup32,
    /// Subgroups of any size.
    Subgroup,
    /// Workgroup memory.
    None,
}

impl Team {
    /// All.
    pub const ALL: [Team; 3] = [Team::Subgroup32, Team::Subgroup, Team::None];

    const fn common(self) -> &'static str {
        match self {
            Team::Subgroup32 => "team_subgroup32",
            Team::Subgroup => "team_subgroup",
            Team::None => "team_none",
        }
    }
}

impl fmt::Display for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Team::Subgroup32 => "subgroups of 32",
            Team::Subgroup => "subgroups",
            Team::None => "no subgroups",
        })
    }
}

/// How a matrix lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// int8 codes, f32 row scales, f32 column fields.
    Q8,
    /// 4-bit codes, a ladder of f32 `lo` and `step` and 5-bit rungs a row.
    Q4,
    /// f32.
    F32,
    /// bf16 pairs.
    Bf16,
}

/// How the activations that a matrix reads are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// int8 codes in column order.
    Linear,
    /// int8 codes in nibble order.
    Nibble,
    /// f32.
    F32,
}

impl Format {
    /// All.
    pub const ALL: [Format; 4] = [Format::Q8, Format::Q4, Format::F32, Format::Bf16];

    /// Columns that one vec4 of the device's layout holds.
    #[must_use]
    pub const fn chunk(self) -> usize {
        match self {
            Format::Q8 => 16,
            Format::Q4 => 32,
            Format::F32 => 4,
            Format::Bf16 => 8,
        }
    }

    /// Side words of a row of `cols` padded columns.
    #[must_use]
    pub const fn side_words(self, cols: usize) -> usize {
        match self {
            Format::Q8 => 1,
            Format::Q4 => 2 + (cols / 32).div_ceil(6),
            Format::F32 | Format::Bf16 => 0,
        }
    }

    /// How its activations are encoded (`runtime.md` §3a): exact matrices always read f32.
    #[must_use]
    pub const fn encoding(self, int8: bool) -> Encoding {
        match self {
            Format::Q8 if int8 => Encoding::Linear,
            Format::Q4 if int8 => Encoding::Nibble,
            _ => Encoding::F32,
        }
    }

    const fn codec(self, encoding: Encoding) -> &'static [&'static str] {
        match (self, encoding) {
            (Format::Q8, Encoding::F32) => &["q8_f32"],
            (Format::Q8, _) => &["q8_int8"],
            (Format::Q4, Encoding::F32) => &["q4_f32", "q4_side"],
            (Format::Q4, _) => &["q4_int8", "q4_side"],
            (Format::F32, _) => &["exact_f32"],
            (Format::Bf16, _) => &["exact_bf16"],
        }
    }

    const fn embed(self) -> &'static str {
        match self {
            Format::Q8 => "embed_q8",
            Format::F32 => "embed_f32",
            Format::Bf16 => "embed_bf16",
            Format::Q4 => panic!("embeddings are never q4tp"),
        }
    }
}

impl Encoding {
    /// vec4s that 32 columns take.
    #[must_use]
    pub const fn vecs(self) -> usize {
        match self {
            Encoding::Linear | Encoding::Nibble => 2,
            Encoding::F32 => 8,
        }
    }

    const fn input(self) -> &'static str {
        match self {
            Encoding::Linear => "in_linear",
            Encoding::Nibble => "in_nibble",
            Encoding::F32 => "in_f32",
        }
    }

    const fn output(self) -> &'static str {
        match self {
            Encoding::Linear => "out_linear",
            Encoding::Nibble => "out_nibble",
            Encoding::F32 => "out_f32",
        }
    }
}

/// A kernel with its common files: what a pipeline is built from, but for the overrides.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Which kernel.
    pub kernel: &'static str,
    /// Which common files go in front.
    pub commons: Vec<&'static str>,
}

/// What a variant of a kernel is chosen by; each kernel takes what concerns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// Teams of the adapter.
    pub team: Team,
    /// The kernel's matrix.
    pub format: Format,
    /// int8 activations (`runtime.md` §3a).
    pub int8: bool,
    /// Encoding of the activations that the kernel leaves, where it leaves any.
    pub out: Encoding,
    /// Activation rows at once, from 1 to 5.
    pub rows: usize,
    /// Weight rows a team computes at once: 1, 2 or 4.
    pub wide: usize,
    /// Whether a closing projection reads gated rows through the group norm.
    pub group_norm: bool,
    /// Whether the bank holds every expert, so that a route never halts the slot.
    pub full: bool,
    /// Whether it belongs to a pass of many rows, whose attention writes every part.
    pub pass: bool,
}

impl Choice {
    /// Whether the experts' down goes over the rows' picks instead of the union's experts.
    #[must_use]
    pub fn by_pick(&self) -> bool {
        self.team == Team::Subgroup32 && self.rows > 1 && self.wide == 1
    }
}

impl Kernel {
    /// The kernel as `choice` wants it.
    #[must_use]
    pub fn variant(&self, choice: &Choice) -> Variant {
        if self.name == LANES.name {
            return Variant { kernel: self.name, commons: vec![choice.team.common()] };
        }
        let rows = match choice.rows {
            1 => "rows_1",
            2 => "rows_2",
            3 => "rows_3",
            4 => "rows_4",
            5 => "rows_5",
            n => panic!("no variant for {n} rows"),
        };
        let wide = match choice.wide {
            1 => "wide_1",
            2 => "wide_2",
            4 => "wide_4",
            n => panic!("no variant for {n} weight rows"),
        };
        let input = choice.format.encoding(choice.int8);
        let mut commons = vec![choice.team.common(), "guard"];
        commons.push(match self.name {
            "pick_embed" | "cure" | "accept" | "draft_pick" => "guard_write",
            "route" if !choice.full => "guard_write",
            _ => "guard_read",
        });
        // bodies without arrays for real GPUs; unrolled, they cost CPU drivers seconds of compiling
        let unrolled = choice.team == Team::Subgroup32;
        let which = if self.name == "experts_up" { "rows_some" } else { "rows_all" };
        let body: &[&str] = match (choice.wide, choice.rows) {
            (1, 1) if unrolled => &["products_1", which],
            (2, 1) if unrolled => &["products_2", which],
            (4, 1) if unrolled => &["products_4", which],
            (1, _) if unrolled => &[which, "products_1_rows"],
            (2, _) if unrolled => &[which, "products_2_rows"],
            (4, _) if unrolled => &[which, "products_4_rows"],
            _ => &["products_n", wide, which],
        };
        let mut products = vec!["sixteen", "none", "quantize", "relu", "vectors", rows];
        products.extend(body);
        match self.name {
            "norm_proj" | "head" => {
                commons.extend(&products);
                commons.extend(["finite", "norm", "staged", input.input()]);
                commons.extend(choice.format.codec(input));
            }
            "moe_in" => {
                commons.extend(&products);
                commons.extend(["finite", "norm", "staged", "cells", input.input(), choice.out.output()]);
                commons.extend(choice.format.codec(input));
            }
            "route" => commons.extend([
                "choose",
                if choice.rows == 1 { "unite_1" } else { "unite_n" },
                "routes",
                rows,
                if choice.full { "halt_never" } else { "halt_missing" },
            ]),
            "experts_up" => {
                commons.extend(&products);
                commons.extend(["staged", "cells", "routes", "own_miss", input.input(), choice.out.output()]);
                commons.extend(choice.format.codec(input));
            }
            "experts_down" => {
                commons.extend(["routes", "own_miss", "none", rows]);
                commons.extend(match (choice.wide, choice.rows) {
                    (1, 1) if unrolled => vec!["picked_1"],
                    (2, 1) if unrolled => vec!["picked_2"],
                    (1, _) if unrolled => vec!["picked_1_rows"],
                    _ => vec!["picked_n", wide],
                });
                commons.push(input.vecs_common());
                commons.extend(choice.format.codec(input));
            }
            "proj_act" => {
                commons.extend(["own_miss", rows]);
                commons.extend(body);
                commons.push(input.vecs_common());
                commons.extend(choice.format.codec(input));
            }
            "ssm_step" => commons.push(rows),
            "close_proj" => {
                commons.extend(&products);
                commons.extend(["finite", "staged", input.input()]);
                commons.push(if choice.group_norm { "source_group_norm" } else { "source_plain" });
                commons.extend(choice.format.codec(input));
            }
            "pick_embed" | "accept" | "draft_pick" => {
                commons.extend(["sixteen", "none", "vectors", choice.format.embed()]);
            }
            "draft_rows" => commons.push("wide_reduce"),
            "draft_fuse" => {
                commons.extend(&products);
                commons.extend(["staged", input.input()]);
                commons.extend(choice.format.codec(input));
            }
            "resume_step" | "resume_pass" | "cure" => commons.push("own_miss"),
            "fill_step" => commons.extend(["none", rows, "routes"]),
            "fill_pass" => commons.push("none"),
            "attn_merge" => commons.push(if choice.pass { "parts_all" } else { "parts_step" }),
            "attn_split" | "take_rows" => {}
            name => panic!("{name} has no variants"),
        }
        Variant { kernel: self.name, commons }
    }
}

impl Encoding {
    const fn vecs_common(self) -> &'static str {
        match self {
            Encoding::F32 => "vecs_f32",
            Encoding::Linear | Encoding::Nibble => "vecs_int8",
        }
    }
}

impl Variant {
    /// The whole text.
    ///
    /// # Panics
    ///
    /// If a file is not in the registry: a bug here.
    #[must_use]
    pub fn source(&self) -> String {
        let mut text = String::new();
        for name in &self.commons {
            let (_, common) = COMMONS.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("common file {name}"));
            text.push_str(common);
            text.push('\n');
        }
        text.push_str(self.kernel().source);
        text
    }

    /// Bindings of group 0, in order: the kernel's, but for a route that writes no stop.
    #[must_use]
    pub fn bindings(&self) -> Vec<Binding> {
        let mut bindings = self.kernel().bindings.to_vec();
        if self.commons.contains(&"guard_read") {
            bindings[1] = Binding::Read;
        }
        bindings
    }

    /// Its kernel.
    ///
    /// # Panics
    ///
    /// As [`Variant::source`].
    #[must_use]
    pub fn kernel(&self) -> &'static Kernel {
        KERNELS.iter().find(|k| k.name == self.kernel).expect("a kernel of the registry")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use naga::valid::{Capabilities, ValidationFlags, Validator};

    /// Every choice that changes a text.
    fn choices() -> Vec<Choice> {
        let mut all = Vec::new();
        for team in Team::ALL {
            for format in Format::ALL {
                for int8 in [true, false] {
                    for out in [Encoding::Linear, Encoding::Nibble, Encoding::F32] {
                        for (rows, wide) in [(1, 4), (1, 2), (1, 1), (4, 1), (2, 2), (3, 4), (5, 1)] {
                            let group_norm = rows != 2;
                            all.push(Choice {
                                team,
                                format,
                                int8,
                                out,
                                rows,
                                wide,
                                group_norm,
                                full: !group_norm,
                                pass: int8,
                            });
                        }
                    }
                }
            }
        }
        all
    }

    fn variants() -> Vec<Variant> {
        let mut all: Vec<Variant> = Vec::new();
        for kernel in KERNELS.iter().filter(|kernel| !kernel.is_pass()) {
            for choice in choices() {
                if ["pick_embed", "accept", "draft_pick"].contains(&kernel.name) && choice.format == Format::Q4 {
                    continue;
                }
                let variant = kernel.variant(&choice);
                if !all.contains(&variant) {
                    all.push(variant);
                }
            }
        }
        all.extend(super::super::pass::variants());
        all
    }

    #[test]
    fn every_variant_parses_and_validates() {
        for variant in variants() {
            let source = variant.source();
            let module = naga::front::wgsl::parse_str(&source)
                .unwrap_or_else(|e| panic!("{variant:?}: {}", e.emit_to_string(&source)));
            let info = Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module);
            if let Err(e) = info {
                panic!("{variant:?}: {}", e.emit_to_string(&source));
            }
        }
    }

    #[test]
    fn bindings_are_those_of_the_text() {
        for variant in variants() {
            let module = naga::front::wgsl::parse_str(&variant.source()).expect("parses");
            for (_, global) in module.global_variables.iter() {
                let Some(at) = &global.binding else { continue };
                let seen = match global.space {
                    naga::AddressSpace::Uniform => Binding::Uniform,
                    naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE) => {
                        Binding::Write
                    }
                    _ => Binding::Read,
                };
                let wanted = variant.bindings().get(at.binding as usize).copied();
                assert_eq!(wanted, Some(seen), "{}: {:?}", variant.kernel, global.name);
            }
        }
    }
}
