//! The safetensors files of a checkpoint, mapped.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::ImportError;
use crate::model::config::parse_json;
use crate::model::mmap::{Access, FileBytes};
use crate::model::tensors::{Bytes, Codec};

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Stored {
    file: Arc<FileBytes>,
    range: Range<usize>,
    /// Its element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl Stored {
    /// Its bytes, row-major and little-endian.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.file.bytes()[self.range.clone()]
    }

    /// The codec of its elements, if it is one that can be imported.
    #[must_use]
    pub fn codec(&self) -> Option<Codec> {
        match self.dtype {
            Dtype::F32 => Some(Codec::F32),
            Dtype::F16 => Some(Codec::F16),
            Dtype::BF16 => Some(Codec::Bf16),
            _ => None,
        }
    }
}

/// All tensors of a checkpoint by name.
#[derive(Debug)]
pub struct Files {
    tensors: BTreeMap<String, Stored>,
}

impl Files {
    /// Maps `model.safetensors`, or the files an index names.
    ///
    /// # Errors
    ///
    /// Missing or damaged files, an index that does not fit them.
    pub fn open(dir: &Path) -> Result<Self, ImportError> {
        let index = dir.join("model.safetensors.index.json");
        let single = dir.join("model.safetensors");
        let mut tensors = BTreeMap::new();
        if !index.exists() {
            if !single.exists() {
                return Err(ImportError::NoWeights { dir: dir.to_owned() });
            }
            map(&single, &mut tensors)?;
            return Ok(Self { tensors });
        }
        let weight_map = read_index(&index)?;
        let mut names: Vec<&str> = weight_map.values().map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            // The index is not to lead out of the folder.
            if !matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
                return Err(ImportError::Index(format!("{name:?} is no file name")));
            }
            map(&dir.join(name), &mut tensors)?;
        }
        match weight_map.keys().find(|name| !tensors.contains_key(*name)) {
            Some(name) => Err(ImportError::Index(format!("{} has no tensor {name}", weight_map[name]))),
            None => Ok(Self { tensors }),
        }
    }

    /// A tensor by its name in the checkpoint.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Stored> {
        self.tensors.get(name)
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, ImportError> {
    let text = std::fs::read_to_string(path).map_err(|source| ImportError::Io { path: path.to_owned(), source })?;
    let index = parse_json(&text).map_err(|source| ImportError::Config { path: path.to_owned(), source })?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| ImportError::Index("there is no weight_map".into()))?;
    let entry = |(name, file): (&String, &Value)| match file.as_str() {
        Some(file) => Ok((name.clone(), file.to_owned())),
        None => Err(ImportError::Index(format!("the file of {name} is {file}"))),
    };
    map.iter().map(entry).collect()
}

/// Adds the tensors of one file.
fn map(path: &Path, tensors: &mut BTreeMap<String, Stored>) -> Result<(), ImportError> {
    let file = FileBytes::open(path, Access::Mapped);
    let file = Arc::new(file.map_err(|source| ImportError::Io { path: path.to_owned(), source })?);
    let damaged = |reason: String| ImportError::Safetensors { path: path.to_owned(), reason };
    let bytes = file.bytes();
    let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| damaged(error.to_string()))?;
    let start = header.checked_add(8).ok_or_else(|| damaged("its header is too long".into()))?;
    for (name, info) in metadata.tensors() {
        let range = start.saturating_add(info.data_offsets.0)..start.saturating_add(info.data_offsets.1);
        let bits = (info.shape.iter()).try_fold(info.dtype.bitsize(), |bits, &dim| bits.checked_mul(dim));
        if range.start > range.end || range.end > bytes.len() || bits != Some(8 * range.len()) {
            return Err(damaged(format!("tensor {name} lies outside the file or has another length than its shape")));
        }
        let stored = Stored { file: file.clone(), range, dtype: info.dtype, shape: info.shape.clone() };
        if tensors.insert(name.clone(), stored).is_some() {
            return Err(ImportError::Index(format!("tensor {name} is in two files")));
        }
    }
    Ok(())
}
