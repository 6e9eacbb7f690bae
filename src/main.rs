//! The command line: the one place for `anyhow`, stdout and exit codes.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
