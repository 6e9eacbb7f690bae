//! Weights as the kernels see them: a codec, a shape and bytes in the mapped file.

use std::fmt;
use std::sync::Arc;

/// How a payload is stored (`cmf.md` §3, §5). Other dtypes are refused on open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// 32-bit floats.
    F32,
    /// IEEE half floats.
    F16,
    /// The upper half of a 32-bit float.
    Bf16,
    /// int8 codes, a half-float scale a row and a half-float field a column.
    Q8_2f,
    /// 4-bit codes in groups of 32 columns, the group's scale a rung on the row's ladder.
    Q4tp,
}

impl Codec {
    /// Columns that share one scale in [`Codec::Q4tp`], and one activation scale in int8 mode.
    pub const GROUP: usize = 32;

    /// Whether `CMF_NEMO_ACT` concerns products with this codec (`runtime.md` §3a).
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        matches!(self, Codec::Q8_2f | Codec::Q4tp)
    }

    /// Payload bytes of a matrix, or `None` where the codec cannot hold the
    /// shape (q4tp wants `cols % 32 == 0`) or the size overflows.
    #[must_use]
    pub fn payload_len(self, rows: usize, cols: usize) -> Option<usize> {
        let cells = rows.checked_mul(cols)?;
        match self {
            Codec::F32 => cells.checked_mul(4),
            Codec::F16 | Codec::Bf16 => cells.checked_mul(2),
            Codec::Q8_2f => cells.checked_add(rows.checked_mul(2)?)?.checked_add(cols.checked_mul(2)?),
            Codec::Q4tp => {
                if !cols.is_multiple_of(Self::GROUP) {
                    return None;
                }
                let groups = cols / Self::GROUP;
                let row = groups.checked_mul(16)?.checked_add(4)?.checked_add(Self::code_bytes(groups))?;
                rows.checked_mul(row)
            }
        }
    }

    /// Bytes of one row's 5-bit rung codes in [`Codec::Q4tp`].
    #[must_use]
    pub const fn code_bytes(groups: usize) -> usize {
        (5 * groups).div_ceil(8)
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Codec::F32 => "f32",
            Codec::F16 => "f16",
            Codec::Bf16 => "bf16",
            Codec::Q8_2f => "q8_2f",
            Codec::Q4tp => "q4tp",
        })
    }
}

/// Bytes somebody keeps alive: the mapped file, or a vector in memory.
pub trait Bytes: Send + Sync + 'static {
    /// All of them.
    fn bytes(&self) -> &[u8];
}

impl Bytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A matrix `[rows, cols]`, applied as `y[r] = sum_c w[r, c] * x[c]`.
///
/// A handle: the payload stays where it lies, so clones are cheap and nothing
/// is dequantised. The payload is little-endian and may be unaligned beyond
/// its start (which is a multiple of 64 in a file).
#[derive(Clone)]
pub struct Matrix {
    name: Arc<str>,
    codec: Codec,
    rows: usize,
    cols: usize,
    source: Arc<dyn Bytes>,
    offset: usize,
    len: usize,
}

impl Matrix {
    /// A matrix over `source[offset..]`.
    ///
    /// # Panics
    ///
    /// If the codec cannot hold the shape or the source is too short: callers
    /// have checked both against the directory.
    #[must_use]
    pub fn new(
        name: impl Into<Arc<str>>,
        codec: Codec,
        [rows, cols]: [usize; 2],
        source: Arc<dyn Bytes>,
        offset: usize,
    ) -> Self {
        let len = codec.payload_len(rows, cols).expect("a shape the codec can hold");
        assert!(offset.checked_add(len).is_some_and(|end| end <= source.bytes().len()), "payload inside its source");
        Self { name: name.into(), codec, rows, cols, source, offset, len }
    }

    /// A matrix over bytes in memory; for tests and for encoders.
    ///
    /// # Panics
    ///
    /// As [`Matrix::new`].
    #[must_use]
    pub fn from_payload(name: &str, codec: Codec, shape: [usize; 2], payload: Vec<u8>) -> Self {
        Self::new(name, codec, shape, Arc::new(payload), 0)
    }

    /// The tensor's name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the payload is stored.
    #[must_use]
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Output dimension.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input dimension.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The payload as `cmf.md` §5 lays it out.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.source.bytes()[self.offset..self.offset + self.len]
    }

    /// What keeps the payload alive, and where in it the payload starts.
    #[must_use]
    pub fn source(&self) -> (&Arc<dyn Bytes>, usize) {
        (&self.source, self.offset)
    }

    /// The planes of a [`Codec::Q8_2f`] payload.
    ///
    /// # Panics
    ///
    /// If the codec is another.
    #[must_use]
    pub fn q8_2f(&self) -> Q8Planes<'_> {
        assert_eq!(self.codec, Codec::Q8_2f, "{}", self.name);
        let payload = self.payload();
        let (codes, rest) = payload.split_at(self.rows * self.cols);
        let (row_scales, col_fields) = rest.split_at(2 * self.rows);
        Q8Planes { codes: bytemuck::cast_slice(codes), row_scales, col_fields }
    }

    /// The planes of a [`Codec::Q4tp`] payload.
    ///
    /// # Panics
    ///
    /// If the codec is another.
    #[must_use]
    pub fn q4tp(&self) -> Q4Planes<'_> {
        assert_eq!(self.codec, Codec::Q4tp, "{}", self.name);
        let groups = self.cols / Codec::GROUP;
        let (nibbles, rest) = self.payload().split_at(self.rows * groups * 16);
        let (ladders, rungs) = rest.split_at(self.rows * 4);
        Q4Planes { nibbles, ladders, rungs, groups }
    }
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} [{}, {}]", self.name, self.codec, self.rows, self.cols)
    }
}

/// Planes of a q8_2f payload; halves are little-endian pairs of bytes, possibly unaligned.
#[derive(Clone, Copy, Debug)]
pub struct Q8Planes<'a> {
    /// `[rows, cols]`
    pub codes: &'a [i8],
    /// f16 `[rows]`
    pub row_scales: &'a [u8],
    /// f16 `[cols]`
    pub col_fields: &'a [u8],
}

/// Planes of a q4tp payload.
#[derive(Clone, Copy, Debug)]
pub struct Q4Planes<'a> {
    /// `[rows, groups, 16]`: byte k holds element 2k low, 2k + 1 high
    pub nibbles: &'a [u8],
    /// `[rows]` pairs of f16: `lo`, `step`
    pub ladders: &'a [u8],
    /// `[rows, ceil(5 * groups / 8)]`: 5-bit codes, least significant bit first
    pub rungs: &'a [u8],
    /// Groups of 32 columns a row.
    pub groups: usize,
}
