//! Tensors of a safetensors file, as the references need them.

use std::collections::HashMap;
use std::path::Path;

use riparian::ids::TokenId;
use safetensors::{Dtype, SafeTensors};

/// One tensor with its values.
#[derive(Debug)]
enum Values {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

/// All f32 and i32 tensors of one file; others are left out.
#[derive(Debug)]
pub(crate) struct Tensors(HashMap<String, Values>);

impl Tensors {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let words = |data: &[u8]| data.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]).collect::<Vec<_>>();
        let tensors = file.iter().filter_map(|(name, view)| {
            let values = match view.dtype() {
                Dtype::F32 => Values::F32(words(view.data()).into_iter().map(f32::from_le_bytes).collect()),
                Dtype::I32 => Values::I32(words(view.data()).into_iter().map(i32::from_le_bytes).collect()),
                _ => return None,
            };
            Some((name.to_owned(), values))
        });
        Self(tensors.collect())
    }

    /// An f32 tensor that may be absent.
    pub(crate) fn maybe_f32(&self, name: &str) -> Option<Vec<f32>> {
        self.0.get(name).map(|values| match values {
            Values::F32(values) => values.clone(),
            Values::I32(_) => panic!("{name} is i32"),
        })
    }

    /// An f32 tensor.
    pub(crate) fn f32(&self, name: &str) -> Vec<f32> {
        self.maybe_f32(name).unwrap_or_else(|| panic!("the reference has no {name}"))
    }

    /// An i32 tensor that may be absent, as plain numbers.
    pub(crate) fn maybe_i32(&self, name: &str) -> Option<Vec<usize>> {
        self.0.get(name).map(|values| match values {
            Values::I32(values) => values.iter().map(|v| usize::try_from(*v).expect("not negative")).collect(),
            Values::F32(_) => panic!("{name} is f32"),
        })
    }

    /// Token ids that may be absent.
    pub(crate) fn maybe_ids(&self, name: &str) -> Option<Vec<TokenId>> {
        self.maybe_i32(name).map(|ids| ids.into_iter().map(TokenId::from).collect())
    }

    /// Token ids.
    pub(crate) fn ids(&self, name: &str) -> Vec<TokenId> {
        self.maybe_ids(name).unwrap_or_else(|| panic!("the reference has no {name}"))
    }
}

/// `[a, b, inner]` to `[b, a, inner]`.
pub(crate) fn swap_outer(values: &[f32], a: usize, b: usize) -> Vec<f32> {
    let inner = values.len() / (a * b);
    (0..b).flat_map(|j| (0..a).flat_map(move |i| values[(i * b + j) * inner..][..inner].iter().copied())).collect()
}
