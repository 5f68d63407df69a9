//! Draws two memory snapshots, one below the other: what was live over their traces, and what changed at the peak.

use super::course::{COLUMNS, LEFT, LINE, Plot, RIGHT, STYLE, TIMES, WIDTH, class, x};
use crate::numbers::difference;
use crate::svg::Svg;
use memory::format_bytes;
use snapshots::{
    Comparison, DeviceComparison, GroupChange, Layers, MemoryCourse, MemorySnapshot, RecordedPeak,
    SnapshotError,
};

/// The height of a plot, and of the title above both.
const PLOT: f64 = 150.0;
const TITLE: f64 = 84.0;
/// From the bottom of a plot to the top of the next: its times, and the name of the other.
const BETWEEN: f64 = TIMES + 40.0;
/// Where the columns of the table end.
const ENDS: [f64; 3] = [520.0, 612.0, RIGHT];
/// The letters that fit before the first of them.
const LETTERS: usize = 54;
/// Changes that are listed.
const CHANGES: usize = 8;

/// A device with the courses before and now.
struct Compared<'a> {
    comparison: &'a DeviceComparison,
    peaks: [&'a RecordedPeak; 2],
    courses: [MemoryCourse; 2],
}

/// The picture as a file, with the names of both snapshots. Devices that only one of them has are left out.
///
/// # Errors
/// [`SnapshotError`] if a snapshot is damaged.
pub fn draw(
    names: [&str; 2],
    [base, new]: [&MemorySnapshot; 2],
    comparison: &Comparison,
) -> Result<String, SnapshotError> {
    let mut devices = Vec::new();
    for device in &comparison.devices {
        if let (Some(was), Some(is)) = (&device.base, &device.new) {
            let layers = Layers::of(&[was, is]);
            let course = |of: &MemorySnapshot| of.course(device.device, &layers, COLUMNS);
            devices.push(Compared {
                comparison: device,
                peaks: [was, is],
                courses: [course(base)?, course(new)?],
            });
        }
    }
    let size = (WIDTH, devices.iter().map(Compared::height).sum());
    let label = "Device memory over the traces of two snapshots";
    let mut svg = Svg::new("memory-timeline", size, label);
    svg.style(STYLE, size);
    let mut top = 0.0;
    for device in &devices {
        device.draw(&mut svg, top, names);
        top += device.height();
    }
    Ok(svg.finish())
}

impl Compared<'_> {
    fn layers(&self) -> &Layers {
        &self.courses[0].layers
    }

    /// The changes that are listed: none where the layers are places in the code already.
    fn changes(&self) -> &[GroupChange] {
        let changes = &self.comparison.changes;
        match self.layers().are_categories {
            true => &changes[..changes.len().min(CHANGES)],
            false => &[],
        }
    }

    fn height(&self) -> f64 {
        let heads = if self.changes().is_empty() { 2 } else { 4 };
        let lines = heads + self.layers().names.len() + self.changes().len();
        TITLE + 2.0 * PLOT + BETWEEN + TIMES + LINE * (lines as f64 + 0.5)
    }

    fn draw(&self, svg: &mut Svg, top: f64, [base, new]: [&str; 2]) {
        let [was, is] = self.peaks.map(|peak| peak.peak_bytes);
        let title = format!(
            "Peak of device {}: {} before, {} now",
            self.comparison.device,
            format_bytes(was),
            format_bytes(is)
        );
        svg.text((16.0, top + 26.0), "title", "start", &title);
        let share = match was {
            0 => String::new(),
            was => format!(" ({:+.1} %)", 100.0 * (is as f64 / was as f64 - 1.0)),
        };
        let words = format!("{} bytes{share}", difference(was, is));
        svg.text((16.0, top + 46.0), "", "start", &words);
        let first = top + TITLE;
        let second = first + PLOT + BETWEEN;
        let names = [
            format!("before: {}", end_of(base)),
            format!("now: {} (dashed: the peak before)", end_of(new)),
        ];
        for ((top, name), course) in [first, second].iter().zip(names).zip(&self.courses) {
            let plot = Plot::new(*top, top + PLOT, was.max(is));
            svg.text((LEFT, top - 8.0), "quiet", "start", &name);
            plot.draw(svg, course);
            if *top == second {
                let line = format!("M{LEFT} {:.1}H{RIGHT}", plot.y(was));
                let dashed = format!("class=\"mark\" d=\"{line}\" stroke-dasharray=\"3 3\"");
                svg.element("path", &dashed, None);
            }
            mark_peak(svg, &plot, course);
        }
        self.table(svg, second + PLOT + TIMES + 1.5 * LINE);
    }

    /// What was live at both peaks, and what changed most.
    fn table(&self, svg: &mut Svg, mut y: f64) {
        heads(svg, y, "At the peak");
        let highest = [0, 1].map(|side: usize| self.courses[side].highest());
        for (layer, name) in self.layers().names.iter().enumerate() {
            y += LINE;
            let class = class(self.layers(), layer);
            svg.rect(&class, (16.0, y - 11.0), (12.0, 12.0), name);
            let bytes = highest.map(|moment| moment.map_or(0, |moment| moment.bytes[layer]));
            row(svg, (36.0, y), &name.replace('_', " "), bytes);
        }
        if !self.changes().is_empty() {
            y += 2.0 * LINE;
            heads(svg, y, "What changed, the largest growth first");
        }
        for change in self.changes() {
            y += LINE;
            let bytes = [change.base_bytes, change.new_bytes];
            row(svg, (16.0, y), &change.place, bytes);
        }
    }
}

fn heads(svg: &mut Svg, y: f64, name: &str) {
    svg.text((16.0, y), "quiet", "start", name);
    for (end, head) in ENDS.iter().zip(["before", "now", "difference, bytes"]) {
        svg.text((*end, y), "quiet", "end", head);
    }
}

fn row(svg: &mut Svg, at: (f64, f64), name: &str, [was, is]: [u64; 2]) {
    svg.text(at, "", "start", &end_of(name));
    let cells = [format_bytes(was), format_bytes(is), difference(was, is)];
    for (end, cell) in ENDS.iter().zip(cells) {
        svg.text((*end, at.1), "", "end", &cell);
    }
}

/// A name, or the end of one that is too long: paths differ there.
fn end_of(name: &str) -> String {
    match name.chars().count().checked_sub(LETTERS) {
        None | Some(0) => name.into(),
        Some(more) => format!("…{}", name.chars().skip(more + 1).collect::<String>()),
    }
}

fn mark_peak(svg: &mut Svg, plot: &Plot, course: &MemoryCourse) {
    let Some(highest) = course.highest() else {
        return;
    };
    let (x, y) = (x(highest.at), plot.y(highest.total()));
    svg.circle("mark", (x, y), 4.0);
    let (anchor, aside) = match x < (LEFT + RIGHT) / 2.0 {
        true => ("start", 8.0),
        false => ("end", -8.0),
    };
    let words = format_bytes(highest.total());
    svg.text((x + aside, y - 6.0), "", anchor, &words);
}
