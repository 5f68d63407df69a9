//! Logs to stderr, and as one of several ranks also into the rank's own file.

use std::fs::File;
use std::io::{self, IsTerminal, Write, stderr};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// This rank and its file. Empty in a single process, and before the log is started.
static RANK: OnceLock<RankLog> = OnceLock::new();

/// The log of a rank.
struct RankLog {
    rank: usize,
    sink: Mutex<Sink>,
}

/// Where a rank's lines are written.
enum Sink {
    /// Lines that wait because the run has no directory yet.
    Waiting(Vec<u8>),
    File(File),
}

/// Starts logging to stderr, and for one of several ranks also for its file.
pub fn begin(rank: Option<usize>) {
    begin_at(LevelFilter::INFO, rank);
}

/// Starts logging warnings to stderr, within another program. One that logs itself goes on as it does.
pub fn begin_within() {
    begin_at(LevelFilter::WARN, None);
}

fn begin_at(level: LevelFilter, rank: Option<usize>) {
    let colour = std::env::var_os("NO_COLOR").is_none() && stderr().is_terminal();
    let wanted = std::env::var("RUST_LOG").ok();
    let filter = wanted.and_then(|wanted| wanted.parse::<Targets>().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(level));
    // What all ranks would report alike is reported once, by the first rank.
    let told = match rank {
        None | Some(0) => LevelFilter::TRACE,
        Some(_) => LevelFilter::WARN,
    };
    let to_stderr = tracing_subscriber::fmt::layer()
        .with_writer(Stderr)
        .with_ansi(colour)
        .with_target(false)
        .without_time()
        .log_internal_errors(false)
        .with_filter(told);
    let to_file = rank.map(|rank| {
        let sink = Mutex::new(Sink::Waiting(Vec::new()));
        let log = RANK.get_or_init(|| RankLog { rank, sink });
        tracing_subscriber::fmt::layer()
            .with_writer(move || log)
            .with_ansi(false)
            .with_target(false)
            .log_internal_errors(false)
    });
    let begun = tracing_subscriber::registry()
        .with(filter)
        .with(to_stderr)
        .with(to_file)
        .try_init();
    // A process logs in one way.
    drop(begun);
}

/// Writes the lines so far and all later ones into a file too, if this is one of several ranks.
///
/// # Errors
/// Those of the file system.
pub(crate) fn keep_in(path: &Path) -> io::Result<()> {
    let Some(log) = RANK.get() else {
        return Ok(());
    };
    let mut file = File::options().append(true).create(true).open(path)?;
    let mut sink = log.sink.lock().unwrap_or_else(PoisonError::into_inner);
    if let Sink::Waiting(said) = &*sink {
        file.write_all(said)?;
    }
    *sink = Sink::File(file);
    Ok(())
}

/// Reports why a command ended: into the rank's file, and to stderr unless another rank reports the same. Write errors
/// are ignored, because the exit code reports the failure too.
pub(crate) fn tell(lines: &str, others_do: bool) {
    if let Some(mut log) = RANK.get() {
        let _ = log.write_all(lines.as_bytes());
    }
    if !others_do {
        let _ = Stderr.make_writer().write_all(lines.as_bytes());
    }
}

impl Write for &RankLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut *self.sink.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::Waiting(said) => said.write(bytes),
            Sink::File(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard error. Each line of a rank has the rank's name before it.
struct Stderr;

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Named;

    fn make_writer(&'a self) -> Named {
        let rank = RANK.get().map(|log| log.rank);
        Named(rank.filter(|rank| *rank > 0))
    }
}

/// Writes lines, each with the rank's name before it, in one call, because other ranks write to the same place.
struct Named(Option<usize>);

impl Write for Named {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0 {
            None => stderr().write(bytes),
            Some(rank) => stderr()
                .write_all(&named(rank, bytes))
                .map(|()| bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines with a rank's name before each.
fn named(rank: usize, lines: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        text.extend(format!("rank {rank}: ").bytes());
        text.extend(line);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::named;

    #[test]
    fn every_line_of_a_rank_has_its_name() {
        let text = named(3, b"error: no\nhint: yes\n");
        assert_eq!(text, b"rank 3: error: no\nrank 3: hint: yes\n");
        assert_eq!(named(0, b""), b"");
    }
}
