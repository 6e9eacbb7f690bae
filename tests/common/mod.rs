//! What several test targets share.
#![allow(dead_code, reason = "each target uses its own part")]

use std::path::{Path, PathBuf};

/// The whole oracle, where it stands beside the clone.
pub(crate) fn oracle_dir() -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/oracle");
    dir.is_dir().then_some(dir)
}

/// The part of the oracle that travels with the source, in the same folders.
pub(crate) fn bundled_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracle")
}

/// A file or folder of the oracle: the whole one's, else the bundled one. Without either the test says so and gets
/// nothing.
pub(crate) fn oracle(path: &str) -> Option<PathBuf> {
    let found = oracle_dir().into_iter().chain([bundled_dir()]).map(|dir| dir.join(path)).find(|path| path.exists());
    if found.is_none() {
        eprintln!("{path}: not in the bundled subset, and no ../shared/oracle beside the clone; skipped");
    }
    found
}

/// The trained model and its recordings, where they stand beside the clone.
pub(crate) fn tiny_transcribe_dir() -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/tiny-transcribe");
    if !dir.is_dir() {
        eprintln!("no ../shared/tiny-transcribe beside the clone; skipped");
        return None;
    }
    Some(dir)
}
