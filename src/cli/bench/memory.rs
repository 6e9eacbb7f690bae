//! How much memory the program takes, the mapped model left out.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

/// Between two looks, unless looking takes long: then it is [`REST`] times as long as the look.
const EVERY: Duration = Duration::from_millis(20);
/// Looks take at most a share of a core of one in so many.
const REST: u32 = 50;

/// Looks at the process's memory until it is dropped. Only Linux says what is wanted; elsewhere nothing is known.
pub(super) struct Watch {
    model: Arc<str>,
    ended: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Begins to look. Pages of the file at `model` and of its other shards do not count.
    pub(super) fn start(model: &Path) -> Self {
        let model: Arc<str> = stem(model).into();
        let (ended, peak) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (until, most, mapped) = (Arc::clone(&ended), Arc::clone(&peak), Arc::clone(&model));
        let look = move || {
            while !until.load(Ordering::Relaxed) {
                let began = Instant::now();
                let Some(now) = above_mapping(&mapped) else { return };
                most.fetch_max(now, Ordering::Relaxed);
                std::thread::park_timeout(EVERY.max(began.elapsed() * REST));
            }
        };
        let thread = std::thread::Builder::new().name("memory".into()).spawn(look).ok();
        Self { model, ended, peak, thread }
    }

    /// The peaks so far: of all resident pages, and of those that are not the model's.
    pub(super) fn record(&self, line: &mut Map<String, Value>) {
        let peak = self.peak.load(Ordering::Relaxed).max(above_mapping(&self.model).unwrap_or(0));
        line.insert("peak_rss_gb".into(), json!(field("VmHWM:").map(|bytes| bytes as f64 / 1e9)));
        line.insert("peak_above_mapping_gb".into(), json!((peak > 0).then_some(peak as f64 / 1e9)));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// What the paths of all the model's shards begin with.
fn stem(model: &Path) -> String {
    let whole = fs::canonicalize(model).unwrap_or_else(|_| model.to_owned());
    let text = whole.to_string_lossy();
    let text = text.strip_suffix(".cmf").unwrap_or(&text);
    // NAME-00001-of-00003
    let shard = text.len().checked_sub("-00001-of-00003".len()).filter(|at| text.is_char_boundary(*at));
    match shard.map(|at| text.split_at(at)) {
        Some((name, tail)) if tail.starts_with('-') && tail[6..].starts_with("-of-") => name.to_owned(),
        _ => text.to_owned(),
    }
}

/// Bytes of resident pages that belong to no file. A model on a memory file system is a file too, but the kernel counts
/// its mapped pages as shared memory, so that they have to be taken off again.
fn above_mapping(model: &str) -> Option<u64> {
    let anonymous = field("RssAnon:")?;
    let shared = field("RssShmem:").unwrap_or(0);
    // Asking page by page takes time; where there is nothing to take off, it is not asked.
    let mapped = if shared < 1 << 20 { 0 } else { mapped_bytes(model).unwrap_or(0) };
    Some(anonymous + shared.saturating_sub(mapped))
}

/// Resident bytes of mappings of the model's files.
fn mapped_bytes(model: &str) -> Option<u64> {
    let (mut within, mut bytes) = (false, 0);
    for line in BufReader::new(fs::File::open("/proc/self/smaps").ok()?).lines() {
        let line = line.ok()?;
        // A mapping's own line begins with its addresses, the lines about it with a word and a colon.
        let first = line.split_whitespace().next().unwrap_or_default();
        if !first.ends_with(':') {
            within = line.find('/').is_some_and(|at| line[at..].starts_with(model));
        } else if within && first == "Rss:" {
            bytes += line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024;
        }
    }
    Some(bytes)
}

/// A line of the kernel's account of this process, in bytes.
fn field(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use riparian::model::container::Container;
    use riparian::model::mmap::Access;
    use riparian::model::synth::preset;
    use riparian::model::tensors::Codec;
    use riparian::model::{SynthOptions, synth, verify};

    fn gb(watch: &Watch) -> f64 {
        let mut line = Map::new();
        watch.record(&mut line);
        line["peak_above_mapping_gb"].as_f64().unwrap()
    }

    #[test]
    fn what_is_allocated_is_seen() {
        let watch = Watch::start(Path::new("none.cmf"));
        let before = gb(&watch);
        let held = vec![1u8; 64 << 20];
        let after = gb(&watch);
        assert!(after - before > 0.05, "{before} {after}");
        assert_eq!(held.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 64 << 20);
    }

    #[test]
    fn a_model_on_a_memory_file_system_does_not_count() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let path = dir.path().join("m.cmf");
        let mut geometry = preset("mini").unwrap();
        geometry.blocks.truncate(4);
        let (name, experts) = ("mini".to_owned(), Codec::Q4tp);
        let options = SynthOptions { name, geometry, experts, seed: 1, zipf: 0.8, accept: 0.5, hot: false };
        let bytes = synth(&path, &options, &|_, _| {}).unwrap().bytes;
        let watch = Watch::start(&path);
        let before = gb(&watch);
        let container = Container::open(&path, Access::Mapped).unwrap();
        verify(&container, |_| {}).unwrap();
        let (after, mapped) = (gb(&watch), mapped_bytes(&stem(&path)).unwrap());
        assert!(mapped > bytes / 2, "{mapped} of {bytes} bytes were read");
        assert!(after - before < bytes as f64 / 2e9, "{before} {after}: the mapping's {mapped} bytes count");
    }

    #[test]
    fn shards_have_one_stem() {
        assert_eq!(stem(Path::new("/x/a-00001-of-00003.cmf")), "/x/a");
        assert_eq!(stem(Path::new("/x/a-b.cmf")), "/x/a-b");
    }
}
