//! Progress of long operations, drawn on stderr.
//!
//! Bars are hidden when stderr is no terminal or with `--quiet`: then nothing
//! here writes a byte.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::terminal::Terminal;

/// Bytes of something, with speed and remaining time.
pub(crate) fn bytes(terminal: &Terminal, what: &str) -> ProgressBar {
    let style = "{msg:12} {wide_bar:.cyan/blue} {bytes:>11} of {total_bytes:11} {bytes_per_sec:>13} {eta:>4}";
    begin(terminal, what, style)
}

/// Seconds of a recording, with speed as a multiple of real time and remaining time.
pub(crate) fn seconds(terminal: &Terminal, what: &str) -> ProgressBar {
    begin(terminal, what, "{msg:12} {wide_bar:.cyan/blue} {pos:>6} of {len:6} s {per_sec:>12} {eta:>4}")
}

fn begin(terminal: &Terminal, what: &str, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("a template written here").progress_chars("━╸─");
    let bar = ProgressBar::new(0).with_style(style).with_message(what.to_owned());
    let bar = terminal.bars().add(bar);
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// Things done of a known number.
pub(crate) fn count(terminal: &Terminal, what: &str, all: u64) -> ProgressBar {
    let bar = begin(terminal, what, "{msg:12} {wide_bar:.cyan/blue} {pos:>6} of {len:6} {eta:>4}");
    bar.set_length(all);
    bar
}
