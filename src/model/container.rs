//! CMF v2 files: envelope, header, directory, payloads (`cmf.md` §1–§4, §9).
//!
//! Opening checks everything that can be checked without reading the
//! payloads, but for the scales of quantised matrices, which must be finite.
//! Payload hashes are left to [`verify`](mod@super::verify). Nothing here knows
//! what a tensor is for.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde_json::Value;

use super::dtype;
use super::hash::hash64;
use super::mmap::{Access, Changed, FileBytes};
use super::quant;
use super::tensors::{Bytes, Codec, Matrix};

/// First bytes of a file.
pub const MAGIC: [u8; 4] = *b"CMF\x01";
/// The version read and written.
pub const VERSION: u32 = 2;
/// Bytes before the first section.
pub const ENVELOPE: usize = 128;
/// Bytes of a directory record.
pub const RECORD: usize = 56;
/// Every payload starts at a multiple of this.
pub const ALIGN: u64 = 64;
/// The data section starts at a multiple of this.
pub const DATA_ALIGN: u64 = 4096;
/// A tensor has at most this many dimensions.
pub const RANK_MAX: usize = 6;
/// Feature bit 0: there is a tensor directory.
pub const FEATURE_DIRECTORY: u32 = 1 << 0;
/// Feature bit 2: some tensor is q8_2f.
pub const FEATURE_Q8_2F: u32 = 1 << 2;

/// Feature bits by number; only 0 and 2 are implemented.
const FEATURES: [&str; 16] = [
    "tensor directory",
    "masks section",
    "q8_2f or vbit tensors",
    "delta masks",
    "hot packs",
    "loop masks",
    "stand-alone skill",
    "prism hadamard",
    "prism affine",
    "skills v2",
    "router v2",
    "decision profile",
    "bounded attention state",
    "frozen genome",
    "reserved",
    "block diffusion",
];

/// What is wrong with which file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", path.display())]
pub struct ContainerError {
    /// The file, or what was given for its name.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: Fault,
}

/// Why a file was refused.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The system could not read it.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// Not even an envelope.
    #[error("{len} bytes is too short for a CMF file, whose envelope alone has {ENVELOPE}")]
    TooShort {
        /// Bytes of the file.
        len: usize,
    },
    /// Another format.
    #[error("not a CMF file: it starts with {seen:02x?}, wanted {MAGIC:02x?}")]
    Magic {
        /// The first four bytes.
        seen: [u8; 4],
    },
    /// Another version of the format.
    #[error("CMF version {seen}, wanted {VERSION}")]
    Version {
        /// The version field.
        seen: u32,
    },
    /// The file needs something that is not implemented.
    #[error("required feature bit {bit} ({name}) is not supported, only bits 0 and 2 are")]
    Feature {
        /// The lowest such bit.
        bit: u32,
        /// What the format calls it.
        name: &'static str,
    },
    /// Header or directory of length 0.
    #[error("the {section} is empty")]
    EmptySection {
        /// Which section.
        section: &'static str,
    },
    /// A section reaches past the end: the file was cut, or its envelope damaged.
    #[error("the {section} at {offset} with {len} bytes reaches past the file's {file_len}")]
    SectionRange {
        /// Which section.
        section: &'static str,
        /// Absolute offset.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the file.
        file_len: usize,
    },
    /// The data section starts askew.
    #[error("the data section starts at {offset}, wanted a multiple of {DATA_ALIGN}")]
    DataAlignment {
        /// Absolute offset.
        offset: u64,
    },
    /// Damaged header, directory or vocab.
    #[error("the {section} is damaged: its hash is {computed:016x}, recorded is {stored:016x}")]
    SectionHash {
        /// Which section.
        section: &'static str,
        /// The recorded hash64.
        stored: u64,
        /// The hash64 of what is there.
        computed: u64,
    },
    /// The header is no JSON object.
    #[error("the header does not parse: {0}")]
    Header(String),
    /// More records than the directory has room for.
    #[error("{count} directory records do not fit before the name pool at {pool} in {len} bytes")]
    Records {
        /// Record count.
        count: u64,
        /// Offset of the name pool.
        pool: u64,
        /// Bytes of the directory.
        len: usize,
    },
    /// A name outside the pool.
    #[error("directory record {record}: name at {offset} with {len} bytes lies outside the pool's {pool}")]
    NameRange {
        /// Number of the record.
        record: usize,
        /// Offset in the pool.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Bytes of the pool.
        pool: usize,
    },
    /// A name that is not UTF-8.
    #[error("directory record {record}: the name is not UTF-8")]
    NameUtf8 {
        /// Number of the record.
        record: usize,
    },
    /// Two tensors of one name.
    #[error("tensor {name} occurs twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A dtype the format does not know.
    #[error("tensor {name}: unknown dtype code {code}")]
    UnknownDtype {
        /// The tensor.
        name: String,
        /// Its code.
        code: u8,
    },
    /// A dtype the format knows and this reader does not.
    #[error("tensor {name}: dtype {dtype} (code {code}) is not supported; convert with the profile q8_2f or q4tp")]
    Dtype {
        /// The tensor.
        name: String,
        /// The dtype's name.
        dtype: &'static str,
        /// Its code.
        code: u8,
    },
    /// The 2-bit profile.
    #[error(
        "tensor {name}: dtype q2tp (code 16) is not supported: the 2-bit q2tp profile is not implemented here, \
         convert again with q4tp (4-bit experts) or q8_2f"
    )]
    Q2tp {
        /// The tensor.
        name: String,
    },
    /// Too many dimensions.
    #[error("tensor {name}: {rank} dimensions, at most {RANK_MAX} are possible")]
    Rank {
        /// The tensor.
        name: String,
        /// Its number of dimensions.
        rank: u8,
    },
    /// A dimension of 0.
    #[error("tensor {name}: shape {shape:?} has no elements")]
    EmptyShape {
        /// The tensor.
        name: String,
        /// Its dimensions.
        shape: Vec<usize>,
    },
    /// A shape the codec cannot hold.
    #[error("tensor {name}: {codec} cannot hold shape {shape:?}")]
    CodecShape {
        /// The tensor.
        name: String,
        /// Its codec.
        codec: Codec,
        /// Its dimensions.
        shape: Vec<usize>,
    },
    /// A payload whose length is not the one its shape and codec give.
    #[error("tensor {name}: payload of {seen} bytes, {codec} of shape {shape:?} has {want}")]
    PayloadLen {
        /// The tensor.
        name: String,
        /// Its codec.
        codec: Codec,
        /// Its dimensions.
        shape: Vec<usize>,
        /// Bytes recorded.
        seen: u64,
        /// Bytes of that codec and shape.
        want: usize,
    },
    /// A payload that starts askew.
    #[error("tensor {name}: payload at {offset}, wanted a multiple of {ALIGN}")]
    PayloadAlignment {
        /// The tensor.
        name: String,
        /// Offset in the data section.
        offset: u64,
    },
    /// A payload outside the data section.
    #[error("tensor {name}: payload at {offset} with {len} bytes reaches past the data section's {section}")]
    PayloadRange {
        /// The tensor.
        name: String,
        /// Offset in the data section.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the data section.
        section: u64,
    },
    /// Two payloads share bytes.
    #[error("the payloads of {first} and {second} overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The one that starts inside it.
        second: String,
    },
    /// A scale that is infinite or no number.
    #[error("tensor {name}: {plane} {index} is not finite")]
    Scale {
        /// The tensor.
        name: String,
        /// Which scales: `row scale`, `column field`, `ladder of row`.
        plane: &'static str,
        /// Which of them.
        index: usize,
    },
    /// A shard whose name does not say which it is.
    #[error("shard {no} of {count} wants a name that ends in -{no:05}-of-{count:05}.cmf")]
    ShardName {
        /// Number in the header, from 1.
        no: u64,
        /// Shards in all.
        count: u64,
    },
    /// A sibling that says it is another shard.
    #[error("shard {seen_no} of {seen_count}, wanted {want_no} of {want_count}")]
    ShardNumber {
        /// Number in its header; 0 when it says nothing.
        seen_no: u64,
        /// Count in its header.
        seen_count: u64,
        /// The number its name says.
        want_no: u64,
        /// The count its name says.
        want_count: u64,
    },
}

/// A tensor of a file: a handle, cheap to clone, that keeps the file open.
#[derive(Clone)]
pub struct Tensor {
    name: Arc<str>,
    codec: Codec,
    shape: Vec<usize>,
    source: Arc<dyn Bytes>,
    range: Range<usize>,
    hash: u64,
}

impl Tensor {
    /// Its name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it is stored.
    #[must_use]
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The stored bytes.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.source.bytes()[self.range.clone()]
    }

    /// hash64 of the payload as the directory records it.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The tensor as a matrix, when it has two dimensions.
    #[must_use]
    pub fn matrix(&self) -> Option<Matrix> {
        let &[rows, cols] = &self.shape[..] else { return None };
        Some(Matrix::new(self.name.clone(), self.codec, [rows, cols], self.source.clone(), self.range.start))
    }

    /// All elements, row-major, as 32-bit floats.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        match self.matrix() {
            Some(matrix) => quant::dequantize(&matrix),
            None => quant::float::decode(self.codec, self.payload()),
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.codec, self.shape)
    }
}

/// A file, or all shards of one, opened and checked.
pub struct Container {
    shards: Vec<Shard>,
    tensors: Vec<Tensor>,
    by_name: HashMap<Arc<str>, usize>,
}

impl fmt::Debug for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {} tensors", self.path().display(), self.tensors.len())
    }
}

/// One file of a container.
struct Shard {
    path: PathBuf,
    bytes: Arc<dyn Bytes>,
    /// The same bytes when they are a file's.
    file: Option<Arc<FileBytes>>,
    header: Value,
    features: u32,
    vocab: Range<usize>,
    tensors: Vec<Tensor>,
}

impl Container {
    /// Opens a file; given one shard, its siblings too.
    ///
    /// # Errors
    ///
    /// The first [`Fault`] found, with the file it is in.
    pub fn open(path: &Path, access: Access) -> Result<Self, ContainerError> {
        let first = Shard::open(path, access)?;
        let Some((no, count)) = first.number().filter(|&(_, count)| count > 1) else {
            return Self::join(vec![first]);
        };
        let fail = |fault| ContainerError { path: path.to_owned(), fault };
        let suffix = |no: u64| format!("-{no:05}-of-{count:05}.cmf");
        let file_name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let stem = file_name.strip_suffix(&suffix(no)).ok_or_else(|| fail(Fault::ShardName { no, count }))?;
        let mut shards = Vec::new();
        for wanted in 1..=count {
            let path = path.with_file_name(format!("{stem}{}", suffix(wanted)));
            let shard = Shard::open(&path, access)?;
            let (seen_no, seen_count) = shard.number().unwrap_or_default();
            if (seen_no, seen_count) != (wanted, count) {
                let fault = Fault::ShardNumber { seen_no, seen_count, want_no: wanted, want_count: count };
                return Err(ContainerError { path, fault });
            }
            shards.push(shard);
        }
        Self::join(shards)
    }

    /// Reads a file that is already in memory; `path` only names it in errors. A shard is refused.
    ///
    /// # Errors
    ///
    /// As [`Container::open`].
    pub fn from_bytes(path: &Path, bytes: Arc<dyn Bytes>) -> Result<Self, ContainerError> {
        let fail = |fault| ContainerError { path: path.to_owned(), fault };
        let shard = Shard::parse(path, bytes).map_err(fail)?;
        match shard.number() {
            Some((no, count)) if count > 1 => Err(fail(Fault::ShardName { no, count })),
            _ => Self::join(vec![shard]),
        }
    }

    fn join(mut shards: Vec<Shard>) -> Result<Self, ContainerError> {
        let mut tensors = Vec::new();
        let mut by_name = HashMap::new();
        for shard in &mut shards {
            for tensor in std::mem::take(&mut shard.tensors) {
                if by_name.insert(tensor.name.clone(), tensors.len()).is_some() {
                    let fault = Fault::Duplicate { name: tensor.name.to_string() };
                    return Err(ContainerError { path: shard.path.clone(), fault });
                }
                tensors.push(tensor);
            }
        }
        Ok(Self { shards, tensors, by_name })
    }

    /// The (first) file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shards[0].path
    }

    /// The header JSON, of the first shard where there are several.
    #[must_use]
    pub fn header(&self) -> &Value {
        &self.shards[0].header
    }

    /// The required-features field of the first file.
    #[must_use]
    pub fn features(&self) -> u32 {
        self.shards[0].features
    }

    /// The vocab section, i.e. the bytes of a `tokenizer.json`, when there is one.
    #[must_use]
    pub fn vocab(&self) -> Option<&[u8]> {
        let shard = &self.shards[0];
        (!shard.vocab.is_empty()).then(|| &shard.bytes.bytes()[shard.vocab.clone()])
    }

    /// All tensors, in directory order, shard by shard.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// A tensor by name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// A tensor by name, when it has two dimensions.
    #[must_use]
    pub fn matrix(&self, name: &str) -> Option<Matrix> {
        self.tensor(name)?.matrix()
    }

    /// Bytes of all files together.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes.bytes().len() as u64).sum()
    }

    /// Whether every mapped file still has the length and inode it was opened with.
    ///
    /// # Errors
    ///
    /// The first file that changed, and how.
    pub fn still_intact(&self) -> Result<(), (PathBuf, Changed)> {
        for file in self.shards.iter().filter_map(|shard| shard.file.as_ref()) {
            file.still_intact().map_err(|changed| (file.path().to_owned(), changed))?;
        }
        Ok(())
    }

    /// Whether every mapped file still holds the bytes that were opened, wherever its path leads now.
    ///
    /// # Errors
    ///
    /// The first file that changed, and how.
    pub fn still_readable(&self) -> Result<(), (PathBuf, Changed)> {
        for file in self.shards.iter().filter_map(|shard| shard.file.as_ref()) {
            file.still_readable().map_err(|changed| (file.path().to_owned(), changed))?;
        }
        Ok(())
    }
}

impl Shard {
    fn open(path: &Path, access: Access) -> Result<Self, ContainerError> {
        let fail = |fault| ContainerError { path: path.to_owned(), fault };
        let file = Arc::new(FileBytes::open(path, access).map_err(|error| fail(error.into()))?);
        let shard = Self::parse(path, file.clone()).map_err(fail)?;
        Ok(Self { file: Some(file), ..shard })
    }

    /// `shard.no` and `shard.count` of the header.
    fn number(&self) -> Option<(u64, u64)> {
        let shard = self.header.get("shard")?;
        Some((shard.get("no")?.as_u64()?, shard.get("count")?.as_u64()?))
    }

    fn parse(path: &Path, source: Arc<dyn Bytes>) -> Result<Self, Fault> {
        let bytes = source.bytes();
        if bytes.len() < ENVELOPE {
            return Err(Fault::TooShort { len: bytes.len() });
        }
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic != MAGIC {
            return Err(Fault::Magic { seen: magic });
        }
        let version = u32_at(bytes, 4);
        if version != VERSION {
            return Err(Fault::Version { seen: version });
        }
        let features = u32_at(bytes, 12);
        let refused = features & !(FEATURE_DIRECTORY | FEATURE_Q8_2F);
        if refused != 0 {
            let bit = refused.trailing_zeros();
            return Err(Fault::Feature { bit, name: FEATURES.get(bit as usize).copied().unwrap_or("unknown") });
        }
        let header = section(bytes, "header", 0x10)?;
        let directory = section(bytes, "directory", 0x20)?;
        let data = section(bytes, "data section", 0x30)?;
        section(bytes, "masks section", 0x40)?;
        let vocab = section(bytes, "vocab", 0x50)?;
        section(bytes, "sparse index", 0x60)?;
        for (name, range) in [("header", &header), ("directory", &directory)] {
            if range.is_empty() {
                return Err(Fault::EmptySection { section: name });
            }
        }
        if !data.is_empty() && !(data.start as u64).is_multiple_of(DATA_ALIGN) {
            return Err(Fault::DataAlignment { offset: data.start as u64 });
        }
        check_hash("header", &bytes[header.clone()], u64_at(bytes, 0x70))?;
        check_hash("directory", &bytes[directory.clone()], u64_at(bytes, 0x78))?;
        let header: Value = serde_json::from_slice(&bytes[header]).map_err(|error| Fault::Header(error.to_string()))?;
        if !header.is_object() {
            return Err(Fault::Header("not a JSON object".into()));
        }
        let recorded = header.pointer("/section_hashes/vocab").and_then(Value::as_str);
        if let Some(recorded) = recorded.filter(|_| !vocab.is_empty()) {
            let stored = u64::from_str_radix(recorded, 16)
                .map_err(|_| Fault::Header(format!("section_hashes.vocab is {recorded:?}, wanted 16 hex digits")))?;
            check_hash("vocab", &bytes[vocab.clone()], stored)?;
        }
        let tensors = read_directory(&source, &bytes[directory], &data)?;
        Ok(Self { path: path.to_owned(), file: None, header, features, vocab, tensors, bytes: source.clone() })
    }
}

/// The range at envelope offset `at`; empty when its length is 0, whatever its offset.
fn section(bytes: &[u8], name: &'static str, at: usize) -> Result<Range<usize>, Fault> {
    let (offset, len) = (u64_at(bytes, at), u64_at(bytes, at + 8));
    if len == 0 {
        return Ok(0..0);
    }
    let end = offset.checked_add(len).filter(|&end| end <= bytes.len() as u64).ok_or(Fault::SectionRange {
        section: name,
        offset,
        len,
        file_len: bytes.len(),
    })?;
    // Both fit: they are at most the length of a slice.
    Ok(offset as usize..end as usize)
}

fn check_hash(section: &'static str, bytes: &[u8], stored: u64) -> Result<(), Fault> {
    // 0 means that nothing was recorded.
    if stored == 0 {
        return Ok(());
    }
    let computed = hash64(bytes);
    if computed == stored { Ok(()) } else { Err(Fault::SectionHash { section, stored, computed }) }
}

fn read_directory(source: &Arc<dyn Bytes>, directory: &[u8], data: &Range<usize>) -> Result<Vec<Tensor>, Fault> {
    let len = directory.len();
    if len < 16 {
        return Err(Fault::Records { count: 0, pool: 0, len });
    }
    let (count, pool_at) = (u64_at(directory, 0), u64_at(directory, 8));
    let fits = count
        .checked_mul(RECORD as u64)
        .and_then(|bytes| bytes.checked_add(16))
        .is_some_and(|end| end <= pool_at && pool_at <= len as u64);
    if !fits {
        return Err(Fault::Records { count, pool: pool_at, len });
    }
    let pool = &directory[pool_at as usize..];
    let mut tensors = Vec::with_capacity(count as usize);
    for record in 0..count as usize {
        let at = 16 + record * RECORD;
        tensors.push(read_record(source, record, &directory[at..at + RECORD], pool, data)?);
    }
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.range.start);
    if let Some(pair) = order.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
        return Err(Fault::Overlap { first: pair[0].name.to_string(), second: pair[1].name.to_string() });
    }
    match tensors.par_iter().find_map_first(non_finite_scale) {
        Some(fault) => Err(fault),
        None => Ok(tensors),
    }
}

fn read_record(
    source: &Arc<dyn Bytes>,
    record: usize,
    bytes: &[u8],
    pool: &[u8],
    data: &Range<usize>,
) -> Result<Tensor, Fault> {
    let (name_at, name_len) = (u32_at(bytes, 0) as usize, usize::from(u16::from_le_bytes([bytes[4], bytes[5]])));
    let name = pool.get(name_at..).and_then(|rest| rest.get(..name_len)).ok_or(Fault::NameRange {
        record,
        offset: name_at,
        len: name_len,
        pool: pool.len(),
    })?;
    let name = std::str::from_utf8(name).map_err(|_| Fault::NameUtf8 { record })?;
    let owned = || name.to_owned();
    let code = bytes[6];
    let codec = match (Codec::from_code(code), dtype::name(code)) {
        (Some(codec), _) => codec,
        (None, _) if code == dtype::Q2TP => return Err(Fault::Q2tp { name: owned() }),
        (None, Some(dtype)) => return Err(Fault::Dtype { name: owned(), dtype, code }),
        (None, None) => return Err(Fault::UnknownDtype { name: owned(), code }),
    };
    let rank = bytes[7];
    if usize::from(rank) > RANK_MAX {
        return Err(Fault::Rank { name: owned(), rank });
    }
    let shape: Vec<usize> = (0..usize::from(rank)).map(|i| u32_at(bytes, 8 + 4 * i) as usize).collect();
    if shape.contains(&0) {
        return Err(Fault::EmptyShape { name: owned(), shape });
    }
    let (offset, len) = (u64_at(bytes, 32), u64_at(bytes, 40));
    if !offset.is_multiple_of(ALIGN) {
        return Err(Fault::PayloadAlignment { name: owned(), offset });
    }
    let section = data.len() as u64;
    if offset.checked_add(len).is_none_or(|end| end > section) {
        return Err(Fault::PayloadRange { name: owned(), offset, len, section });
    }
    let Some(want) = payload_len(codec, &shape) else { return Err(Fault::CodecShape { name: owned(), codec, shape }) };
    if len != want as u64 {
        return Err(Fault::PayloadLen { name: owned(), codec, shape, seen: len, want });
    }
    let start = data.start + offset as usize;
    Ok(Tensor {
        name: name.into(),
        codec,
        shape,
        source: source.clone(),
        range: start..start + want,
        hash: u64_at(bytes, 48),
    })
}

/// Payload bytes of any shape; the quantised codecs hold matrices alone.
pub(super) fn payload_len(codec: Codec, shape: &[usize]) -> Option<usize> {
    match *shape {
        [rows, cols] => codec.payload_len(rows, cols),
        _ if codec.is_quantized() => None,
        _ => codec.payload_len(1, shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?),
    }
}

/// The first scale of a quantised matrix that is not finite (`cmf.md` §9).
fn non_finite_scale(tensor: &Tensor) -> Option<Fault> {
    let fault = |plane, index| Fault::Scale { name: tensor.name.to_string(), plane, index };
    let infinite =
        |halves: &[u8]| halves.as_chunks::<2>().0.iter().position(|half| u16::from_le_bytes(*half) & 0x7C00 == 0x7C00);
    match tensor.codec {
        Codec::F32 | Codec::F16 | Codec::Bf16 => None,
        Codec::Q8_2f => {
            let matrix = tensor.matrix()?;
            let planes = matrix.q8_2f();
            let row = infinite(planes.row_scales).map(|i| fault("row scale", i));
            row.or_else(|| infinite(planes.col_fields).map(|i| fault("column field", i)))
        }
        Codec::Q4tp => {
            let matrix = tensor.matrix()?;
            let ladders = matrix.q4tp().ladders;
            // A ladder of finite halves can still climb past the largest float.
            let row = ladders.as_chunks().0.iter().position(|pair| !quant::q4tp::Ladder::is_finite(*pair));
            row.map(|i| fault("ladder of row", i))
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
