//! The page of a memory snapshot: each device's peak, what was live at it, and a timeline.

use super::timeline::frame;
use super::view::{Fact, Page, Section, SectionItem};
use super::{PageError, put};
use crate::Table;
use crate::numbers::exact;
use crate::pictures::course;
use memory::format_bytes;
use snapshots::{Layers, MemorySnapshot, RecordedPeak, ReservedMemory, SnapshotError};
use std::path::{Path, PathBuf};

/// The line under the title of a snapshot's page.
pub const SNAPSHOT_SUBTITLE: &str = "a memory snapshot";

/// Lines of code that are listed.
const LIVE: usize = 40;

/// A number of reserved bytes, and its name.
type ReservedRow = (&'static str, fn(&ReservedMemory) -> u64);

/// The numbers of reserved bytes that are known, in order.
pub const RESERVED_ROWS: [ReservedRow; 6] = [
    ("reserved at the peak", |reserved| reserved.at_peak_bytes),
    ("reserved at most", |reserved| reserved.peak_bytes),
    ("reserved at the end", |reserved| reserved.end_bytes),
    ("  live", |reserved| reserved.live_bytes),
    ("  lost by rounding", |reserved| reserved.rounding_bytes),
    ("  free between", |reserved| reserved.free_bytes),
];

/// The page of a snapshot, which is not written yet.
pub struct SnapshotPage {
    page: Page,
    /// The timeline of each device, with its number.
    pictures: Vec<(u32, String)>,
}

/// Draws a snapshot. `counted` says how a peak was counted.
///
/// # Errors
/// [`SnapshotError`] if the snapshot is damaged.
pub fn of_snapshot(
    name: &str,
    snapshot: &MemorySnapshot,
    counted: impl Fn(&RecordedPeak) -> String,
) -> Result<SnapshotPage, SnapshotError> {
    let peaks = snapshot.peaks()?;
    let mut pictures = Vec::with_capacity(peaks.len());
    let mut facts = Vec::new();
    let mut parts = Vec::new();
    for peak in &peaks {
        let course = snapshot.course(peak.device, &Layers::of(&[peak]), course::COLUMNS)?;
        let picture = course::draw(name, peak, &course);
        facts.extend(facts_of(peak, peaks.len() > 1));
        parts.push(Section::new(
            "Timeline",
            vec![SectionItem::Say(sentence(peak, &counted)), frame(&picture)],
        ));
        parts.push(Section::new(
            "Live at the peak",
            vec![SectionItem::Table(live(peak))],
        ));
        parts.extend(peak.reserved.as_ref().map(|reserved| {
            Section::new(
                "Reserved by the allocator",
                vec![SectionItem::Table(of_allocator(reserved))],
            )
        }));
        pictures.push((peak.device, picture));
    }
    let page = Page {
        title: name.into(),
        about: SNAPSHOT_SUBTITLE.into(),
        endings: Vec::new(),
        facts,
        parts,
    };
    Ok(SnapshotPage { page, pictures })
}

impl SnapshotPage {
    /// The page as text.
    pub fn text(&self) -> String {
        self.page.text()
    }

    /// Writes the page, and each device's timeline beside it; returns the paths.
    ///
    /// # Errors
    /// [`PageError`].
    pub fn write(&self, file: &Path) -> Result<Vec<PathBuf>, PageError> {
        let mut written = vec![put(&self.page, file)?];
        for (device, picture) in &self.pictures {
            let path = match self.pictures.len() {
                1 => file.with_extension("svg"),
                _ => file.with_extension(format!("{device}.svg")),
            };
            std::fs::write(&path, picture).map_err(|source| PageError::Write {
                path: path.clone(),
                source,
            })?;
            written.push(path);
        }
        Ok(written)
    }
}

fn facts_of(peak: &RecordedPeak, is_one_of_several: bool) -> impl Iterator<Item = Fact> {
    let note = match is_one_of_several {
        true => format!("device {}", peak.device),
        false => String::new(),
    };
    let reserved = peak.reserved.as_ref().map(|reserved| reserved.peak_bytes);
    let facts = [
        ("peak", Some(peak.peak_bytes)),
        ("reserved at most", reserved),
    ];
    facts.into_iter().filter_map(move |(name, bytes)| {
        Some(Fact {
            name,
            value: format_bytes(bytes?),
            note: note.clone(),
        })
    })
}

fn sentence(peak: &RecordedPeak, counted: impl Fn(&RecordedPeak) -> String) -> String {
    format!(
        "Device {}: {} bytes; {}",
        peak.device,
        exact(peak.peak_bytes),
        counted(peak)
    )
}

/// The allocations that were live at the peak, by line and category.
fn live(peak: &RecordedPeak) -> Table {
    let mut table = Table::new(&["from", "category"], &["bytes", "rounded", "allocations"]);
    for group in peak.live.iter().take(LIVE) {
        let line = group.line.map_or(String::new(), |line| format!(":{line}"));
        table.row([
            format!("{}{line}", group.place),
            group.category.clone(),
            exact(group.bytes),
            format_bytes(group.bytes),
            group.count.to_string(),
        ]);
    }
    if let Some(rest) = peak.live.get(LIVE..).filter(|rest| !rest.is_empty()) {
        let bytes = rest.iter().map(|group| group.bytes).sum();
        let name = format!("{} smaller ones", rest.len());
        table.row([name, String::new(), exact(bytes), format_bytes(bytes)]);
    }
    table
}

fn of_allocator(reserved: &ReservedMemory) -> Table {
    let mut table = Table::new(&["allocator"], &["bytes", "rounded"]);
    for (name, of) in RESERVED_ROWS {
        table.row([
            name.to_string(),
            exact(of(reserved)),
            format_bytes(of(reserved)),
        ]);
    }
    table
}
