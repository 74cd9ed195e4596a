//! Where results and everything else go: data to stdout, the rest to stderr.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

/// The form of results.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum Form {
    /// For people.
    #[default]
    Text,
    /// One JSON value a line.
    Json,
}

/// The form of results, and how to print them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    form: Form,
}

impl Output {
    /// Prints in this form.
    #[must_use]
    pub(crate) const fn new(form: Form) -> Self {
        Self { form }
    }

    /// Whether results are JSON.
    #[must_use]
    pub(crate) const fn is_json(self) -> bool {
        matches!(self.form, Form::Json)
    }

    /// Prints one result: the JSON, or what `text` makes of it.
    ///
    /// # Errors
    /// When stdout can't be written, for example since its reader has gone.
    pub(crate) fn print(self, json: &Value, text: impl FnOnce() -> String) -> Result<()> {
        let line = if self.is_json() { json.to_string() } else { text() };
        let mut out = io::stdout().lock();
        out.write_all(line.as_bytes())?;
        out.write_all(b"\n")?;
        out.flush()?;
        Ok(())
    }

    /// A line for people, on stderr, and only when results are text.
    pub(crate) fn say(self, line: &str) {
        if !self.is_json() {
            complain(line);
        }
    }
}

/// A line on stderr.
pub(crate) fn complain(line: &str) {
    // Nobody is left to tell when stderr is gone.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// A progress bar on a terminal, nothing in a pipe. `total` 0 is unknown.
#[must_use]
pub(crate) fn progress(what: &'static str, total: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(
        (total > 0).then_some(total),
        ProgressDrawTarget::stderr_with_hz(10),
    );
    let template = if total > 0 {
        "{msg} [{bar:30}] {pos}/{len} {per_sec} {eta}"
    } else {
        "{msg} {spinner} {pos} {per_sec}"
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
