//! A decoder's weights on the device.
//!
//! One buffer a block for what every token reads, one a layer for its bank of
//! experts, the head and the embedding cut into parts that a binding can hold.

use rayon::prelude::*;

use super::super::kernels::{Encoding, Format};
use super::super::params::NONE;
use super::adapter::Context;
use super::layout::{Laid, Space, codes, field, format_of, padded, rows_padded, side};
use super::upload::{Uploader, buffer};
use crate::device::DeviceError;
use crate::ids::{ExpertIx, LayerIx, PlaceIx};
use crate::knobs::Activations;
use crate::model::geometry::Geometry;
use crate::model::tensors::{Codec, Matrix};
use crate::model::weights::{AttentionWeights, Block, DecoderWeights, MambaWeights, Mixer, MlpWeights, MoeWeights};

const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_DST);

/// Where a Mamba block's weights lie in its buffer. Vectors that are read float by float are in words.
#[derive(Clone, Copy, Debug)]
pub struct MambaLaid {
    /// vec4
    pub norm: u32,
    /// `[z | x | B | C | dt]`
    pub in_proj: Laid,
    /// `[hidden, inner]`
    pub out_proj: Laid,
    /// Word: taps, bias, `A_log`, `D`, `dt_bias`.
    pub vectors: [u32; 5],
    /// vec4
    pub group_norm: u32,
}

/// Where an attention block's weights lie.
#[derive(Clone, Copy, Debug)]
pub struct AttentionLaid {
    /// vec4
    pub norm: u32,
    /// q, k, v
    pub qkv: [Laid; 3],
    /// `[hidden, heads * head_dim]`
    pub o: Laid,
}

/// Where an MoE block's weights lie, the experts aside.
#[derive(Clone, Copy, Debug)]
pub struct MoeLaid {
    /// vec4
    pub norm: u32,
    /// vec4: `[experts, padded hidden]`
    pub gate: u32,
    /// Word.
    pub bias: u32,
    /// Shared up and down.
    pub shared: [Laid; 2],
    /// Its bank.
    pub layer: LayerIx,
}

/// Where a dense block's weights lie.
#[derive(Clone, Copy, Debug)]
pub struct MlpLaid {
    /// vec4
    pub norm: u32,
    /// Up and down.
    pub mlp: [Laid; 2],
}

/// Where a block's weights lie.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "a few dozen of them, read once")]
pub enum BlockLaid {
    /// Mamba.
    Mamba(MambaLaid),
    /// Attention.
    Attention(AttentionLaid),
    /// Experts.
    Moe(MoeLaid),
    /// Dense.
    Mlp(MlpLaid),
}

/// How an expert lies in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceLaid {
    /// Bytes from place to place.
    pub bytes: u64,
    /// Up and down.
    pub mlp: [Laid; 2],
}

/// A layer's bank.
#[derive(Debug)]
pub struct Bank {
    /// The places.
    pub buffer: wgpu::Buffer,
    /// How each lies.
    pub place: PlaceLaid,
    /// Places that the map may name, with their first occupants.
    pub residents: Vec<Option<ExpertIx>>,
    /// Up and down of every expert as the file holds them.
    pub shapes: Vec<[(Codec, [usize; 2]); 2]>,
}

impl Bank {
    /// The expert that a payload of the file holds.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Unfit`] where its length is another expert's.
    pub fn expert_of(&self, expert: ExpertIx, bytes: &[u8]) -> Result<MlpWeights, DeviceError> {
        expert_in(&self.shapes, expert, bytes)
    }
}

/// The expert that a payload of the file holds, in a layer whose experts are of these shapes.
///
/// # Errors
///
/// [`DeviceError::Unfit`] where its length is another expert's.
pub fn expert_in(
    shapes: &[[(Codec, [usize; 2]); 2]],
    expert: ExpertIx,
    bytes: &[u8],
) -> Result<MlpWeights, DeviceError> {
    let mut rest = bytes;
    let mut next = |name: &str, (codec, shape): (Codec, [usize; 2])| {
        let len = codec.payload_len(shape[0], shape[1]).filter(|len| *len <= rest.len());
        let Some(len) = len else {
            return Err(DeviceError::Unfit { why: format!("{} bytes for {expert:?}", bytes.len()) });
        };
        let (own, more) = rest.split_at(len);
        rest = more;
        Ok(Matrix::from_payload(name, codec, shape, own.to_vec()))
    };
    let [up, down] = shapes[expert.index()];
    Ok(MlpWeights { up: next("up", up)?, down: next("down", down)? })
}

/// Where the draft layer's weights lie (`model.md` §2), in the arena behind the blocks'.
#[derive(Debug)]
pub struct DraftLaid {
    /// vec4: the norm of the following row.
    pub enorm: u32,
    /// vec4: the norm of the hidden row.
    pub hnorm: u32,
    /// `[hidden, 2 * hidden]`
    pub eh_proj: Laid,
    /// Its attention block.
    pub attention: AttentionLaid,
    /// Its MoE block; the layer is the one behind the decoder's.
    pub moe: MoeLaid,
    /// vec4: the norm of what it makes.
    pub final_norm: u32,
    /// vec4: the decoder's last norm, once more.
    pub decoder_norm: u32,
    /// Its experts, all of them.
    pub bank: Bank,
}

/// Rows of the head or the embedding that one binding holds.
#[derive(Debug)]
pub struct Part {
    /// The buffer.
    pub buffer: wgpu::Buffer,
    /// Where they lie.
    pub laid: Laid,
    /// The first row's id.
    pub first: usize,
    /// vec4 of the final norm; in the head's parts.
    pub norm: u32,
    /// vec4 of the draft layer's, in the head's parts.
    pub draft_norm: u32,
}

/// Everything.
#[derive(Debug)]
pub struct Weights {
    /// A block each.
    pub arenas: Vec<wgpu::Buffer>,
    /// A block each.
    pub blocks: Vec<BlockLaid>,
    /// A layer each.
    pub banks: Vec<Bank>,
    /// `[layers, experts]` places.
    pub map: wgpu::Buffer,
    /// Parts of the head.
    pub head: Vec<Part>,
    /// Parts of the embedding.
    pub embedding: Vec<Part>,
    /// The draft layer, where drafts are made.
    pub draft: Option<Box<DraftLaid>>,
}

enum Piece<'w> {
    Matrix(&'w Matrix, Laid),
    /// Floats at a vec4, in rows of so many columns that are padded.
    Rows(&'w [f32], usize, u32),
    /// Floats at a vec4 as they are.
    Floats(&'w [f32], u32),
}

#[derive(Default)]
struct Arena<'w> {
    space: Space,
    pieces: Vec<Piece<'w>>,
}

impl<'w> Arena<'w> {
    fn matrix(&mut self, matrix: &'w Matrix) -> Laid {
        let laid = self.space.matrix(matrix, matrix.rows());
        self.pieces.push(Piece::Matrix(matrix, laid));
        laid
    }

    fn mlp(&mut self, mlp: &'w MlpWeights) -> [Laid; 2] {
        [self.matrix(&mlp.up), self.matrix(&mlp.down)]
    }

    /// vec4
    fn rows(&mut self, floats: &'w [f32], cols: usize) -> u32 {
        let at = self.space.floats(floats.len() / cols * padded(cols));
        self.pieces.push(Piece::Rows(floats, cols, at));
        at
    }

    /// word
    fn floats(&mut self, floats: &'w [f32]) -> u32 {
        let at = self.space.floats(floats.len());
        self.pieces.push(Piece::Floats(floats, at));
        4 * at
    }

    fn upload(self, context: &Context, uploader: &Uploader<'_>, what: &str) -> Result<wgpu::Buffer, DeviceError> {
        let made = buffer(context, what, self.space.bytes, STORAGE)?;
        for piece in self.pieces {
            match piece {
                Piece::Matrix(matrix, laid) => write_matrix(uploader, &made, 0, matrix, &laid, 0)?,
                Piece::Rows(floats, cols, at) => uploader.write(&made, 16 * u64::from(at), &rows_padded(floats, cols)),
                Piece::Floats(floats, at) => uploader.write(&made, 16 * u64::from(at), bytemuck::cast_slice(floats)),
            }
        }
        uploader.flush()?;
        Ok(made)
    }
}

/// Writes rows `first..` of a matrix where `laid` says, `at` bytes into the buffer.
fn write_matrix(
    uploader: &Uploader<'_>,
    to: &wgpu::Buffer,
    at: u64,
    matrix: &Matrix,
    laid: &Laid,
    first: usize,
) -> Result<(), DeviceError> {
    uploader.write_long(to, at + 16 * u64::from(laid.base), &codes(matrix, first, laid.rows))?;
    uploader.write(to, at + 4 * u64::from(laid.side), &side(matrix, first, laid.rows));
    if laid.field != NONE {
        uploader.write(to, at + 16 * u64::from(laid.field), &field(matrix));
    }
    Ok(())
}

/// How this layer's experts lie in a place.
///
/// # Errors
///
/// [`DeviceError::Unfit`] where they are not all of one codec.
pub fn place_of(moe: &MoeWeights) -> Result<PlaceLaid, DeviceError> {
    let mut space = Space::default();
    let [first, ..] = moe.experts.as_slice() else {
        return Err(DeviceError::Unfit { why: "a layer without experts".into() });
    };
    let mlp = [space.matrix(&first.up, first.up.rows()), space.matrix(&first.down, first.down.rows())];
    for expert in &moe.experts {
        for (matrix, laid) in [(&expert.up, &mlp[0]), (&expert.down, &mlp[1])] {
            if format_of(matrix.codec()) != laid.format {
                return Err(DeviceError::Unfit { why: format!("{matrix:?} beside experts in {:?}", laid.format) });
            }
        }
    }
    Ok(PlaceLaid { bytes: space.bytes.next_multiple_of(256), mlp })
}

/// Writes an expert into a place.
pub fn write_expert(uploader: &Uploader<'_>, bank: &Bank, place: PlaceIx, expert: &MlpWeights) {
    let at = place.index() as u64 * bank.place.bytes;
    for (matrix, laid) in [(&expert.up, &bank.place.mlp[0]), (&expert.down, &bank.place.mlp[1])] {
        uploader.write(&bank.buffer, at + 16 * u64::from(laid.base), &codes(matrix, 0, laid.rows));
        uploader.write(&bank.buffer, at + 4 * u64::from(laid.side), &side(matrix, 0, laid.rows));
        if laid.field != NONE {
            uploader.write(&bank.buffer, at + 16 * u64::from(laid.field), &field(matrix));
        }
    }
}

/// Bytes that everything but the routed experts takes on the device.
#[must_use]
pub fn dense_bytes(geometry: &Geometry, weights: &DecoderWeights) -> u64 {
    let mut layer = 0;
    let blocks: u64 = (weights.blocks.iter())
        .map(|block| {
            let mut arena = Arena::default();
            // what cannot be laid out is refused when it is uploaded
            let _ = lay_block(&mut arena, geometry.hidden, block, &mut layer);
            arena.space.bytes
        })
        .sum();
    let mut parts = Space::default();
    for matrix in [&weights.head, &weights.embedding] {
        parts.matrix(matrix, matrix.rows());
    }
    blocks + parts.bytes
}

/// Bytes done and bytes in all.
pub type Progress<'p> = &'p mut dyn FnMut(u64, u64);

impl Weights {
    /// Whether a route can miss.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.banks.iter().any(|bank| bank.residents.len() < bank.shapes.len())
    }

    /// Whether rows of a partial bank's verify pass choose one by one: where some layer's experts read f32 rows, of which
    /// no two share a weight. One way for all layers, so that a record need not say which.
    #[must_use]
    pub fn chooses_singly(&self, activations: Activations) -> bool {
        let int8 = activations == Activations::Int8;
        let exact = |laid: &Laid| laid.format.encoding(int8) == Encoding::F32;
        self.banks.iter().any(|bank| bank.place.mlp.iter().any(exact))
    }

    /// The bank of a layer, the draft layer's behind the decoder's.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[must_use]
    pub fn bank(&self, layer: LayerIx) -> &Bank {
        let draft = || &self.draft.as_ref().expect("a layer of the decoder or the draft layer").bank;
        self.banks.get(layer.index()).unwrap_or_else(draft)
    }

    /// Uploads a decoder. `residents` names each layer's first occupants, by place. With `drafts` the draft layer comes
    /// too, all its experts resident.
    ///
    /// # Errors
    ///
    /// [`DeviceError`]: too large for the device, mixed codecs, lost.
    pub fn upload(
        context: &Context,
        window_bytes: u64,
        geometry: &Geometry,
        weights: &DecoderWeights,
        residents: &[Vec<ExpertIx>],
        drafts: bool,
        progress: Progress<'_>,
    ) -> Result<Self, DeviceError> {
        let draft_weights = weights.draft.as_deref().filter(|_| drafts);
        let uploader = Uploader::new(context, window_bytes);
        let hidden = geometry.hidden;
        let layers: Vec<&MoeWeights> = (weights.blocks.iter())
            .filter_map(|block| match &block.mixer {
                Mixer::Moe(moe) => Some(&**moe),
                _ => None,
            })
            .collect();
        let places: Vec<PlaceLaid> = layers.iter().map(|moe| place_of(moe)).collect::<Result<_, _>>()?;
        let dense = |m: &Matrix| m.payload().len() as u64;
        let mut total: u64 = places.iter().zip(residents).map(|(place, r)| place.bytes * r.len() as u64).sum();
        total += dense(&weights.head) + dense(&weights.embedding);
        let draft_place = draft_weights.map(|draft| place_of(&draft.moe)).transpose()?;
        if let (Some(draft), Some(place)) = (draft_weights, draft_place) {
            total += place.bytes * draft.moe.experts.len() as u64;
        }
        let mut done = 0;

        let (mut arenas, mut blocks, mut layer) = (Vec::new(), Vec::new(), 0);
        for (i, block) in weights.blocks.iter().enumerate() {
            let mut arena = Arena::default();
            let laid = lay_block(&mut arena, hidden, block, &mut layer)?;
            let bytes = arena.space.bytes;
            arenas.push(arena.upload(context, &uploader, &format!("block {i}"))?);
            blocks.push(laid);
            done += bytes;
            total += bytes;
            progress(done, total);
        }

        let mut banks = Vec::new();
        let every = geometry.moe.map_or(0, |moe| moe.experts);
        let mut map = vec![NONE; (layers.len() + usize::from(draft_weights.is_some())) * every];
        for (l, ((moe, place), residents)) in layers.iter().zip(&places).zip(residents).enumerate() {
            let sent = |bytes| {
                done += bytes;
                progress(done, total);
            };
            banks.push(upload_bank(context, &uploader, &format!("bank {l}"), moe, *place, residents, sent)?);
            for (i, expert) in residents.iter().enumerate() {
                map[l * moe.experts.len() + expert.index()] = i as u32;
            }
        }

        let mut draft = None;
        if let (Some(of), Some(place)) = (draft_weights, draft_place) {
            let mut arena = Arena::default();
            let attention_norm = arena.rows(&of.attention_norm, hidden);
            let attention = lay_attention(&mut arena, attention_norm, &of.attention);
            let moe_norm = arena.rows(&of.moe_norm, hidden);
            let moe = lay_moe(&mut arena, moe_norm, &of.moe, LayerIx::from(layers.len()), hidden)?;
            let [enorm, hnorm, final_norm, decoder_norm] =
                [&of.enorm, &of.hnorm, &of.final_norm, &weights.final_norm].map(|norm| arena.rows(norm, hidden));
            let eh_proj = arena.matrix(&of.eh_proj);
            arenas.push(arena.upload(context, &uploader, "draft layer")?);
            let all: Vec<ExpertIx> = (0..of.moe.experts.len()).map(ExpertIx::from).collect();
            let sent = |bytes| {
                done += bytes;
                progress(done, total);
            };
            let bank = upload_bank(context, &uploader, "draft bank", &of.moe, place, &all, sent)?;
            for (i, word) in map[layers.len() * every..].iter_mut().enumerate() {
                *word = i as u32;
            }
            draft = Some(Box::new(DraftLaid { enorm, hnorm, eh_proj, attention, moe, final_norm, decoder_norm, bank }));
        }

        let draft_norm = draft_weights.map_or(&weights.final_norm, |draft| &draft.final_norm);
        let norms = [weights.final_norm.as_slice(), draft_norm];
        let head = parts(context, &uploader, "head", &weights.head, Some(norms))?;
        let embedding = parts(context, &uploader, "embedding", &weights.embedding, None)?;
        progress(total, total);
        let map_buffer = buffer(context, "map", 4 * map.len() as u64, STORAGE)?;
        uploader.write(&map_buffer, 0, bytemuck::cast_slice(&map));
        uploader.finish()?;
        Ok(Self { arenas, blocks, banks, map: map_buffer, head, embedding, draft })
    }
}

/// Makes a layer's bank and fills it; `sent` is told of bytes that went.
fn upload_bank(
    context: &Context,
    uploader: &Uploader<'_>,
    what: &str,
    moe: &MoeWeights,
    place: PlaceLaid,
    residents: &[ExpertIx],
    mut sent: impl FnMut(u64),
) -> Result<Bank, DeviceError> {
    let bank = Bank {
        buffer: buffer(context, what, place.bytes * residents.len() as u64, STORAGE)?,
        place,
        residents: residents.iter().copied().map(Some).collect(),
        shapes: (moe.experts.iter())
            .map(|expert| [&expert.up, &expert.down].map(|m| (m.codec(), [m.rows(), m.cols()])))
            .collect(),
    };
    let batch = (uploader.batch_bytes() / place.bytes).max(1) as usize;
    for (b, some) in residents.chunks(batch).enumerate() {
        some.par_iter().enumerate().for_each(|(i, expert)| {
            write_expert(uploader, &bank, PlaceIx::from(b * batch + i), &moe.experts[expert.index()]);
        });
        uploader.flush()?;
        sent(place.bytes * some.len() as u64);
    }
    Ok(bank)
}

fn lay_moe<'w>(
    arena: &mut Arena<'w>,
    norm: u32,
    moe: &'w MoeWeights,
    layer: LayerIx,
    hidden: usize,
) -> Result<MoeLaid, DeviceError> {
    if moe.latent.is_some() {
        return Err(DeviceError::Unfit { why: "latent experts".into() });
    }
    let (gate, bias) = (arena.rows(&moe.gate, hidden), arena.floats(&moe.bias));
    Ok(MoeLaid { norm, gate, bias, shared: arena.mlp(&moe.shared), layer })
}

/// Lays a block out, its bank aside; `layer` is the next one's.
fn lay_block<'w>(
    arena: &mut Arena<'w>,
    hidden: usize,
    block: &'w Block,
    layer: &mut usize,
) -> Result<BlockLaid, DeviceError> {
    let norm = arena.rows(&block.norm, hidden);
    Ok(match &block.mixer {
        Mixer::Mamba(mamba) => BlockLaid::Mamba(lay_mamba(arena, norm, mamba)),
        Mixer::Attention(attention) => BlockLaid::Attention(lay_attention(arena, norm, attention)),
        Mixer::Moe(moe) => {
            *layer += 1;
            BlockLaid::Moe(lay_moe(arena, norm, moe, LayerIx::from(*layer - 1), hidden)?)
        }
        Mixer::Mlp(mlp) => BlockLaid::Mlp(MlpLaid { norm, mlp: arena.mlp(mlp) }),
    })
}

fn lay_mamba<'w>(arena: &mut Arena<'w>, norm: u32, mamba: &'w MambaWeights) -> MambaLaid {
    MambaLaid {
        norm,
        in_proj: arena.matrix(&mamba.in_proj),
        out_proj: arena.matrix(&mamba.out_proj),
        vectors: [&mamba.conv, &mamba.conv_bias, &mamba.a_log, &mamba.d_skip, &mamba.dt_bias].map(|v| arena.floats(v)),
        group_norm: arena.rows(&mamba.norm, mamba.norm.len()),
    }
}

fn lay_attention<'w>(arena: &mut Arena<'w>, norm: u32, attention: &'w AttentionWeights) -> AttentionLaid {
    AttentionLaid {
        norm,
        qkv: [&attention.q, &attention.k, &attention.v].map(|m| arena.matrix(m)),
        o: arena.matrix(&attention.o),
    }
}

/// Cuts a large matrix into parts that a binding can hold.
fn parts(
    context: &Context,
    uploader: &Uploader<'_>,
    what: &str,
    matrix: &Matrix,
    norms: Option<[&[f32]; 2]>,
) -> Result<Vec<Part>, DeviceError> {
    let format = format_of(matrix.codec());
    if format == Format::Q4 {
        return Err(DeviceError::Unfit { why: format!("{matrix:?} as {what}") });
    }
    let cols = padded(matrix.cols());
    let row_bytes = cols / format.chunk() * 16 + 4 * format.side_words(cols);
    let room = context.limits.max_storage_buffer_binding_size.min(context.limits.max_buffer_size) as usize;
    let rows_max = ((room.saturating_sub(20 * cols + 4096)) / row_bytes / 256 * 256).max(256);
    let mut parts = Vec::new();
    let mut first = 0;
    while first < matrix.rows() {
        let rows = rows_max.min(matrix.rows() - first);
        let mut space = Space::default();
        let laid = space.matrix(matrix, rows);
        let at = [space.floats(cols), space.floats(cols)];
        let made = buffer(context, what, space.bytes, STORAGE)?;
        write_matrix(uploader, &made, 0, matrix, &laid, first)?;
        for (norm, at) in norms.into_iter().flatten().zip(at) {
            uploader.write(&made, 16 * u64::from(at), &rows_padded(norm, norm.len()));
        }
        uploader.flush()?;
        parts.push(Part { buffer: made, laid, first, norm: at[0], draft_norm: at[1] });
        first += rows;
    }
    Ok(parts)
}
