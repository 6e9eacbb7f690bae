//! Recomputes every payload's hash.
//!
//! Opening a file reads no weights, so a flipped bit among them opens cleanly: this is what finds it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rayon::prelude::*;

use super::container::Container;
use super::hash::hash64;
use super::mmap::Changed;

/// A tensor whose payload is not what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Its name.
    pub name: String,
    /// The hash64 in the directory.
    pub stored: u64,
    /// The hash64 of the payload.
    pub computed: u64,
}

/// What was found in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Tensors.
    pub tensors: usize,
    /// Payload bytes.
    pub bytes: u64,
}

/// Why a file is not in order.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// Payloads that differ from what was written, in directory order.
    #[error("{} damaged: {}", count(.0), .0.iter().map(describe).collect::<Vec<_>>().join(", "))]
    Damaged(Vec<Damage>),
    /// The file changed under the reader.
    #[error("{}: {changed}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// How.
        changed: Changed,
    },
}

fn count(damages: &[Damage]) -> String {
    if damages.len() == 1 { "1 tensor is".into() } else { format!("{} tensors are", damages.len()) }
}

fn describe(damage: &Damage) -> String {
    format!("{} (hash {:016x}, recorded is {:016x})", damage.name, damage.computed, damage.stored)
}

/// How far the check is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Tensors checked.
    pub tensors: usize,
    /// Payload bytes checked.
    pub bytes: u64,
    /// Payload bytes in all.
    pub bytes_total: u64,
}

/// Checks every payload, on all threads of the pool it runs in; `progress` is called from them.
///
/// # Errors
///
/// Every damaged tensor by name, or that the file was cut meanwhile.
pub fn verify(container: &Container, progress: impl Fn(Progress) + Sync) -> Result<Verified, VerifyError> {
    container.still_intact().map_err(|(path, changed)| VerifyError::Changed { path, changed })?;
    let tensors = container.tensors();
    let bytes_total = tensors.iter().map(|tensor| tensor.payload().len() as u64).sum();
    let (checked, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
    let damaged: Vec<Damage> = (tensors.par_iter())
        .filter_map(|tensor| {
            let len = tensor.payload().len() as u64;
            let span = tracing::debug_span!(target: "riparian::verify", "hash", name = tensor.name(), bytes = len);
            let computed = span.in_scope(|| hash64(tensor.payload()));
            let bytes = bytes.fetch_add(len, Ordering::Relaxed) + len;
            progress(Progress { tensors: checked.fetch_add(1, Ordering::Relaxed) + 1, bytes, bytes_total });
            let stored = tensor.hash();
            (computed != stored).then(|| Damage { name: tensor.name().to_owned(), stored, computed })
        })
        .collect();
    container.still_intact().map_err(|(path, changed)| VerifyError::Changed { path, changed })?;
    if damaged.is_empty() {
        Ok(Verified { tensors: tensors.len(), bytes: bytes_total })
    } else {
        Err(VerifyError::Damaged(damaged))
    }
}
