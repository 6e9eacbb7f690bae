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
    // A tick takes a thread, which nobody needs where nothing is drawn.
    if !bar.is_hidden() {
        bar.enable_steady_tick(Duration::from_millis(120));
    }
    bar
}

/// Things done of a known number.
pub(crate) fn count(terminal: &Terminal, what: &str, all: u64) -> ProgressBar {
    let bar = begin(terminal, what, "{msg:12} {wide_bar:.cyan/blue} {pos:>6} of {len:6} {eta:>4}");
    bar.set_length(all);
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::{ProgressDrawTarget, TermLike};
    use std::io;
    use std::sync::{Arc, Mutex};

    /// A terminal of 100 columns that keeps what is written to it.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            100
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, line: &str) -> io::Result<()> {
            self.write_str(line)?;
            self.write_str("\n")
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.write_str("\r")
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What stands on the screen after half of `all` was done in some time.
    fn half_way(begin: fn(&Terminal, &str) -> ProgressBar, all: u64) -> String {
        let screen = Screen::default();
        let terminal = Terminal::drawing_on(ProgressDrawTarget::term_like_with_hz(Box::new(screen.clone()), 255));
        let bar = begin(&terminal, "work");
        bar.set_length(all);
        for part in 1..=5 {
            std::thread::sleep(Duration::from_millis(30));
            bar.set_position(all * part / 10);
        }
        std::thread::sleep(Duration::from_millis(150));
        bar.tick();
        let text = screen.0.lock().unwrap().clone();
        text.rsplit(['\r', '\n']).find(|line| line.contains("work")).unwrap_or_default().to_owned()
    }

    #[test]
    fn position_speed_and_remaining_are_shown() {
        let loaded = half_way(bytes, 40 << 20);
        assert!(loaded.contains("20.00 MiB of 40.00 MiB") && loaded.contains("iB/s"), "{loaded:?}");
        assert!(loaded.trim_end().ends_with('s'), "no remaining time: {loaded:?}");
        let encoded = half_way(seconds, 600);
        assert!(encoded.contains("300 of 600") && encoded.contains("/s"), "{encoded:?}");
        let counted = half_way(|terminal, what| count(terminal, what, 12), 12);
        assert!(counted.contains("6 of 12"), "{counted:?}");
    }

    #[test]
    fn nothing_is_drawn_where_nobody_looks() {
        // Under a test runner stderr may be a terminal; asked to be quiet, it is none for us.
        let bar = bytes(&Terminal::new(true), "work");
        bar.set_length(10);
        bar.set_position(5);
        assert!(bar.is_hidden());
    }
}
