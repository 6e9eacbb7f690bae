//! How much memory the program takes, the mapped file left out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Map, Value, json};

/// Between two looks.
const EVERY: Duration = Duration::from_millis(20);

/// Looks at the process's memory until it is dropped. Only Linux says what is wanted; elsewhere nothing is known.
pub(super) struct Watch {
    ended: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start() -> Self {
        let (ended, peak) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (until, most) = (Arc::clone(&ended), Arc::clone(&peak));
        let look = move || {
            while !until.load(Ordering::Relaxed) {
                let Some(now) = anonymous_bytes() else { return };
                most.fetch_max(now, Ordering::Relaxed);
                std::thread::sleep(EVERY);
            }
        };
        let thread = std::thread::Builder::new().name("memory".into()).spawn(look).ok();
        Self { ended, peak, thread }
    }

    /// The peaks so far: of all resident pages, and of those that are no file's.
    pub(super) fn record(&self, line: &mut Map<String, Value>) {
        let peak = self.peak.load(Ordering::Relaxed).max(anonymous_bytes().unwrap_or(0));
        line.insert("peak_rss_gb".into(), json!(field("VmHWM:").map(|bytes| bytes as f64 / 1e9)));
        line.insert("peak_above_mapping_gb".into(), json!((peak > 0).then_some(peak as f64 / 1e9)));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Bytes of resident pages that belong to no file.
fn anonymous_bytes() -> Option<u64> {
    Some(field("RssAnon:")? + field("RssShmem:").unwrap_or(0))
}

/// A line of the kernel's account of this process, in bytes.
fn field(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_allocated_is_seen() {
        let watch = Watch::start();
        let (mut before, mut after) = (Map::new(), Map::new());
        watch.record(&mut before);
        let held = vec![1u8; 64 << 20];
        watch.record(&mut after);
        let gb = |line: &Map<String, Value>| line["peak_above_mapping_gb"].as_f64().unwrap();
        assert!(gb(&after) - gb(&before) > 0.05, "{before:?} {after:?}");
        assert_eq!(held.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 64 << 20);
    }
}
