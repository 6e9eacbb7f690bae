//! Where output goes: results to stdout, notes, progress and errors to stderr.

use std::fmt::Display;
use std::io::{self, IsTerminal as _, StdoutLock, Write as _};

use indicatif::MultiProgress;

/// The two streams and whether notes are wanted.
#[derive(Debug)]
pub(crate) struct Terminal {
    quiet: bool,
    /// Progress bars are drawn, and have to step aside for lines.
    bars: MultiProgress,
}

impl Terminal {
    pub(crate) fn new(quiet: bool) -> Self {
        let bars = MultiProgress::new();
        if quiet || !io::stderr().is_terminal() {
            bars.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        }
        Self { quiet, bars }
    }

    /// Draws progress on `target`, whatever stderr is.
    #[cfg(test)]
    pub(crate) fn drawing_on(target: indicatif::ProgressDrawTarget) -> Self {
        Self { quiet: false, bars: MultiProgress::with_draw_target(target) }
    }

    pub(crate) fn bars(&self) -> &MultiProgress {
        &self.bars
    }

    /// Writes results as they stand and shows them at once.
    pub(crate) fn put(&self, text: &str) -> io::Result<()> {
        self.bars.suspend(|| {
            let mut out: StdoutLock<'_> = io::stdout().lock();
            out.write_all(text.as_bytes())?;
            out.flush()
        })
    }

    /// Writes one line of results.
    pub(crate) fn line(&self, text: impl Display) -> io::Result<()> {
        self.put(&format!("{text}\n"))
    }

    /// Something worth knowing that is no result; `--quiet` leaves it out.
    pub(crate) fn note(&self, text: impl Display) {
        if !self.quiet {
            self.complain(&format!("{text}\n"));
        }
    }

    /// What failed: the error and its causes in one line.
    pub(crate) fn error(&self, error: &anyhow::Error) {
        self.complain(&format!("error: {error:#}\n"));
    }

    fn complain(&self, text: &str) {
        // With stderr gone there is nowhere left to say so.
        let _ = self.bars.suspend(|| io::stderr().lock().write_all(text.as_bytes()));
    }
}
