//! The `check` command: compares two peaks, and fails if the second is higher.

use super::show::{counted, malformed, read_snapshot, refuse_other_file};
use crate::failure::{Failure, Result};
use crate::stdout::{print, print_json};
use clap::Args;
use memory::format_bytes;
use report::pictures::comparison;
use report::{Align, Table};
use settings::{Size, SizeError};
use snapshots::{ComparedFile, Comparison, DeviceComparison, GroupChange, RecordedPeak, peaks};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Changes that are listed.
const CHANGES: usize = 20;

/// Flags of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// What was before: a memory snapshot of PyTorch or of --trace, a metrics.jsonl, or a plan.json
    #[arg(value_name = "BASE")]
    pub base: PathBuf,
    /// What is now
    #[arg(value_name = "NEW")]
    pub new: PathBuf,
    /// By how much the peak may grow, such as 16MiB or 5% [default: not at all]
    #[arg(long, value_name = "SIZE|PERCENT", value_parser = tolerance)]
    pub tolerance: Option<Size>,
    /// Print everything as JSON
    #[arg(long, conflicts_with = "markdown")]
    pub json: bool,
    /// Print tables as Markdown, for a pull request
    #[arg(long)]
    pub markdown: bool,
    /// Draw both snapshots, one below the other
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

/// A size, or nothing at all.
fn tolerance(text: &str) -> Result<Size, SizeError> {
    match text.strip_suffix('%').unwrap_or(text) {
        "0" => Ok(Size::Bytes(0)),
        _ => text.parse(),
    }
}

/// Compares the peaks of two files and prints what grew.
///
/// # Errors
/// [`Failure::Malformed`] for a file without a peak or without a device that the other has, and [`Failure::PeakGrew`].
pub(crate) fn check(args: &CheckArgs) -> Result {
    let [base, new] = [&args.base, &args.new].map(|path| read(path));
    let (base, new) = (base?, new?);
    let tolerance = args.tolerance.unwrap_or(Size::Bytes(0));
    let comparison = Comparison::new(&base, &new, |bytes| tolerance.bytes_of(bytes));
    if let Some(file) = &args.plot {
        plot(file, args, &comparison)?;
    }
    match args.json {
        true => print_json(&comparison)?,
        false => {
            let devices = comparison.devices.iter();
            print(
                devices
                    .map(|device| text(device, args.markdown))
                    .collect::<Vec<_>>()
                    .join("\n"),
            )?;
        }
    }
    let mut devices = comparison.devices.iter();
    if let Some((device, side)) = devices.find_map(|one| Some((one.device, one.only_in?))) {
        let (lacks, has) = match side {
            ComparedFile::Base => (&args.new, &args.base),
            ComparedFile::New => (&args.base, &args.new),
        };
        let reason = format!(
            "it has no recording of device {device}, and {} has one; record both on the same devices",
            has.display()
        );
        return Err(malformed(lacks, reason));
    }
    let mut grown = comparison.devices.iter().filter(|device| device.grew);
    match grown.next() {
        None => Ok(()),
        Some(device) => Err(Failure::PeakGrew(headline(device))),
    }
}

/// Writes the picture of two snapshots.
fn plot(file: &Path, args: &CheckArgs, comparison: &Comparison) -> Result {
    refuse_other_file(file, ("--plot", "svg"), "memory-timeline")?;
    if comparison
        .devices
        .iter()
        .all(|device| device.only_in.is_some())
    {
        // There is nothing to draw beside each other; the command fails and says so.
        return Ok(());
    }
    let read = |path: &Path| {
        read_snapshot(path).map_err(|_| {
            let reason = "--plot draws what was live over time, which only snapshots have: `trainer plan --trace DIR`, and runs \
                          with --trace, write a snapshot.pickle";
            malformed(path, reason)
        })
    };
    let (base, new) = (read(&args.base)?, read(&args.new)?);
    let [base_name, new_name] = [&args.base, &args.new].map(|path| path.display().to_string());
    let names = [base_name.as_str(), &new_name];
    let picture = comparison::draw(names, [&base, &new], comparison)
        .map_err(|error| malformed(&args.new, error))?;
    std::fs::write(file, picture).map_err(Failure::file(file))
}

/// The peaks in a file.
fn read(path: &Path) -> Result<Vec<RecordedPeak>> {
    let peaks = peaks(path).map_err(|error| malformed(path, error))?;
    // A device that was not used has no events, but another has.
    match peaks.iter().all(|peak| !peak.is_recorded) {
        true => Err(malformed(
            path,
            peaks
                .first()
                .map_or("it has no devices", |peak| &peak.counted),
        )),
        false => Ok(peaks),
    }
}

/// A device's peaks, what changed, and what was reserved.
fn text(device: &DeviceComparison, is_markdown: bool) -> String {
    let mut text = match is_markdown {
        true => format!("**{}**\n\n", headline(device)),
        false => format!("{}\n", headline(device)),
    };
    let tables = [changes(&device.changes), reserved(device)];
    for table in tables.into_iter().flatten() {
        let _ = match is_markdown {
            true => writeln!(text, "{}", table.markdown()),
            false => write!(text, "{table}"),
        };
    }
    for (name, peak) in [("base", &device.base), ("new", &device.new)] {
        if let Some(peak) = peak {
            let item = if is_markdown { "- " } else { "" };
            let _ = writeln!(text, "{item}{name}: {}", counted(peak));
        }
    }
    text
}

/// Both peaks in one line.
fn headline(device: &DeviceComparison) -> String {
    let bytes = |peak: &Option<RecordedPeak>| peak.as_ref().map_or(0, |peak| peak.peak_bytes);
    let (was, is) = (bytes(&device.base), bytes(&device.new));
    if let Some(side) = device.only_in {
        let (has, lacks, bytes) = match side {
            ComparedFile::Base => ("BASE", "NEW", was),
            ComparedFile::New => ("NEW", "BASE", is),
        };
        return format!(
            "device {}: peak {} ({bytes} bytes) in {has}; nothing was recorded on it in {lacks}, so nothing is compared",
            device.device,
            format_bytes(bytes)
        );
    }
    let change = match is.cmp(&was) {
        std::cmp::Ordering::Equal => "the same as before".into(),
        std::cmp::Ordering::Less => format!("{} less than before", format_bytes(was - is)),
        std::cmp::Ordering::Greater => {
            let share = 100.0 * (is - was) as f64 / was as f64;
            let share = if was == 0 {
                String::new()
            } else {
                format!(" ({share:.1} %)")
            };
            format!("{}{share} more than before", format_bytes(is - was))
        }
    };
    let tolerated = match (is > was, device.grew, device.tolerance_bytes) {
        (false, ..) | (_, _, 0) => String::new(),
        (_, true, bytes) => format!(", and {} are tolerated", format_bytes(bytes)),
        (_, false, _) => ", which is tolerated".into(),
    };
    format!(
        "device {}: peak {} ({is} bytes; {was} before), {change}{tolerated}",
        device.device,
        format_bytes(is)
    )
}

/// A table of the allocations that have other bytes at the peak; none if there are none.
fn changes(changes: &[GroupChange]) -> Option<Table> {
    let mut table = Table::of(&[
        ("at the peak, from", Align::Left),
        ("category", Align::Left),
        ("before", Align::Right),
        ("now", Align::Right),
        ("difference, bytes", Align::Right),
        ("allocations", Align::Right),
    ]);
    for change in changes.iter().take(CHANGES) {
        let lines: Vec<String> = change.lines.iter().map(ToString::to_string).collect();
        let lines = match lines.is_empty() {
            true => String::new(),
            false => format!(":{}", lines.join(",")),
        };
        let count = match (change.base_count, change.new_count) {
            (was, is) if was == is => format!("{is}"),
            (was, is) => format!("{was} -> {is}"),
        };
        table.row([
            format!("{}{lines}", change.place),
            change.category.clone(),
            format_bytes(change.base_bytes),
            format_bytes(change.new_bytes),
            format!(
                "{:+}",
                i128::from(change.new_bytes) - i128::from(change.base_bytes)
            ),
            count,
        ]);
    }
    if let Some(rest) = changes.get(CHANGES..).filter(|rest| !rest.is_empty()) {
        let sum: i128 = rest
            .iter()
            .map(|change| i128::from(change.new_bytes) - i128::from(change.base_bytes))
            .sum();
        let name = format!("{} more", rest.len());
        table.row([
            name,
            String::new(),
            String::new(),
            String::new(),
            format!("{sum:+}"),
        ]);
    }
    (!changes.is_empty()).then_some(table)
}

/// A table of reserved bytes beside live ones.
fn reserved(device: &DeviceComparison) -> Option<Table> {
    let of = |peak: &Option<RecordedPeak>| peak.as_ref().and_then(|peak| peak.reserved.clone());
    let (base, new) = (of(&device.base), of(&device.new));
    let mut table = Table::new(&["allocator"], &["before", "now"]);
    let (was, is) = (base.as_ref(), new.as_ref());
    for (name, of) in report::page::RESERVED_ROWS {
        if [was, is].into_iter().flatten().all(|side| of(side) == 0) {
            continue;
        }
        let cell = |side: Option<&snapshots::ReservedMemory>| {
            side.map_or(String::new(), |side| format_bytes(of(side)))
        };
        table.row([name.to_string(), cell(was), cell(is)]);
    }
    is.or(was).map(|_| table)
}
