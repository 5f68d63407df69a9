//! The `show` command: draws a memory snapshot as a page and a timeline.

use crate::failure::{Failure, Result};
use crate::stdout::print;
use clap::Args;
use memory::format_bytes;
use report::page;
use snapshots::{MemorySnapshot, RecordedPeak};
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::path::{Path, PathBuf};

/// Flags of `show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// A memory snapshot: of PyTorch's `torch.cuda.memory._dump_snapshot`, or memory/snapshot.pickle of --trace
    #[arg(value_name = "SNAPSHOT")]
    pub snapshot: PathBuf,
    /// Print what was live in tables, and write nothing
    #[arg(long)]
    pub text: bool,
    /// Write the page to FILE, and timelines beside it [default: beside the snapshot]
    #[arg(long, value_name = "FILE.html", conflicts_with = "text")]
    pub out: Option<PathBuf>,
}

/// Writes the page and prints its path, or prints tables.
///
/// # Errors
/// [`Failure::Malformed`] for what is no snapshot, [`Failure::Report`] if the page cannot be written.
pub(crate) fn show(args: &ShowArgs) -> Result {
    let snapshot = read_snapshot(&args.snapshot)?;
    let name = args
        .snapshot
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    let drawn = page::of_snapshot(&name, &snapshot, counted)
        .map_err(|error| malformed(&args.snapshot, error))?;
    if args.text {
        return print(drawn.text());
    }
    let default = args.snapshot.with_extension("html");
    let page = args.out.as_ref().unwrap_or(&default);
    check_writable(page)?;
    for path in drawn.write(page)? {
        print(format_args!("{}\n", path.display()))?;
    }
    Ok(())
}

/// Reads a memory snapshot.
///
/// # Errors
/// [`Failure::Malformed`] for what is none.
pub(super) fn read_snapshot(path: &Path) -> Result<MemorySnapshot> {
    let file = File::open(path).map_err(|error| malformed(path, error))?;
    MemorySnapshot::read(BufReader::new(file)).map_err(|error| malformed(path, error))
}

/// How a peak was counted, and what is special about it.
pub(super) fn counted(peak: &RecordedPeak) -> String {
    let waiting = match peak.waiting_bytes {
        0 => String::new(),
        bytes => format!(
            " Of the peak {} had been freed and waited for another stream.",
            format_bytes(bytes)
        ),
    };
    format!("the peak is {}. {}{waiting}", peak.at, peak.counted)
}

/// The error of a file that holds something else than it is for.
pub(super) fn malformed(path: &Path, reason: impl ToString) -> Failure {
    Failure::Malformed {
        path: path.into(),
        reason: reason.to_string(),
    }
}

/// Refuses a path that is no page's, or where another file is than a page of this command.
fn check_writable(page: &Path) -> Result {
    refuse_other_file(page, ("--out", "html"), page::SNAPSHOT_SUBTITLE)
}

/// Refuses the value of a flag that names no file of a kind (`html`, `svg`), or a file without `mark`, which what is written
/// there has.
pub(super) fn refuse_other_file(path: &Path, (flag, kind): (&str, &str), mark: &str) -> Result {
    let path_shown = path.display();
    if path.extension().is_none_or(|extension| extension != kind) {
        return Err(Failure::Usage(format!(
            "{flag} names the file to write, and {path_shown} does not end in .{kind}"
        )));
    }
    let is_other = match files::read_small(path) {
        Ok(bytes) => !String::from_utf8_lossy(&bytes).contains(mark),
        // What else cannot be read fails when it is written.
        Err(error) => error.kind() == ErrorKind::FileTooLarge,
    };
    match is_other {
        true => Err(Failure::Usage(format!(
            "{path_shown} is there and was not written by this command; name another file with {flag}"
        ))),
        false => Ok(()),
    }
}
