//! Draws what was live over the trace of a memory snapshot, by category or by place in the code.

use crate::numbers::grouped;
use crate::svg::{Svg, round_step, tenths};
use memory::{Category, format_bytes};
use snapshots::{Layers, LiveMoment, MemoryCourse, RecordedPeak};

/// The look of timelines, and beside it colours for places in the code.
pub(super) const STYLE: &str = concat!(include_str!("timeline.css"), include_str!("course.css"));

pub(super) const WIDTH: f64 = 760.0;
pub(super) const LEFT: f64 = 76.0;
pub(super) const RIGHT: f64 = 744.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 350.0;
/// From the bottom of a plot to the line of its times.
pub(super) const TIMES: f64 = 18.0;
const BELOW: f64 = BOTTOM + TIMES + 32.0;
pub(super) const LINE: f64 = 20.0;

/// Columns that show under the pointer what was live.
const HOVERS: usize = 200;
/// Columns in which events are told apart.
pub(crate) const COLUMNS: usize = (RIGHT - LEFT) as usize;

/// The picture as a file.
pub(crate) fn draw(name: &str, peak: &RecordedPeak, course: &MemoryCourse) -> String {
    let height = BELOW + LINE * (course.layers.names.len() as f64 + 0.5) + 8.0;
    let mut svg = Svg::new(
        "memory-timeline",
        (WIDTH, height),
        "Device memory over a snapshot's trace",
    );
    svg.style(STYLE, (WIDTH, height));
    let title = format!("{name}, device {}", peak.device);
    svg.text((16.0, 26.0), "title", "start", &title);
    let bytes = grouped(peak.peak_bytes as f64, 0);
    let words = format!(
        "peak {} ({bytes} bytes) {}",
        format_bytes(peak.peak_bytes),
        peak.at
    );
    svg.text((16.0, 46.0), "", "start", &words);
    Plot::new(TOP, BOTTOM, peak.peak_bytes).draw(&mut svg, course);
    hovers(&mut svg, course);
    legend(&mut svg, course);
    svg.finish()
}

/// Where a course is drawn.
pub(super) struct Plot {
    top: f64,
    bottom: f64,
    top_bytes: u64,
}

impl Plot {
    /// A plot between two heights, with room above a peak.
    pub(super) fn new(top: f64, bottom: f64, peak_bytes: u64) -> Plot {
        Plot {
            top,
            bottom,
            top_bytes: peak_bytes + peak_bytes / 8 + 1,
        }
    }

    pub(super) fn y(&self, bytes: u64) -> f64 {
        self.bottom - (self.bottom - self.top) * bytes as f64 / self.top_bytes as f64
    }

    /// Draws both axes and the areas.
    pub(super) fn draw(&self, svg: &mut Svg, course: &MemoryCourse) {
        let step = 1_u64 << (self.top_bytes / 4).max(1).ilog2();
        for line in 0..=self.top_bytes / step {
            let y = self.y(line * step);
            svg.path("grid", &format!("M{LEFT} {y:.1}H{RIGHT}"));
            let at = (LEFT - 8.0, y + 4.0);
            svg.text(at, "quiet", "end", &format_bytes(line * step));
        }
        self.areas(svg, course);
        times(svg, course, self.bottom + TIMES);
    }

    /// Stacks each layer on those before it, as a staircase.
    fn areas(&self, svg: &mut Svg, course: &MemoryCourse) {
        let bottom = self.bottom;
        for (layer, name) in course.layers.names.iter().enumerate().rev() {
            let (mut stairs, mut height) = (String::new(), bottom);
            for moment in &course.moments {
                let top = tenths(self.y(moment.bytes[..=layer].iter().sum()));
                if top != height {
                    stairs += &format!("H{}V{top}", x(moment.at));
                    height = top;
                }
            }
            let class = class(&course.layers, layer);
            let area =
                format!("class=\"{class}\" d=\"M{LEFT} {bottom}{stairs}H{RIGHT}V{bottom}Z\"");
            svg.element("path", &area, Some(name));
        }
    }
}

/// The class of a layer: a category's own, else one by number.
pub(super) fn class(layers: &Layers, layer: usize) -> String {
    let name = &layers.names[layer];
    let mut categories = Category::ALL.iter();
    match categories.find(|category| category.name() == name) {
        Some(category) => category.name().into(),
        None if layer + 1 == layers.names.len() => "rest".into(),
        None => format!("place-{layer}"),
    }
}

pub(super) fn x(at: f64) -> f64 {
    tenths(LEFT + (RIGHT - LEFT) * at.clamp(0.0, 1.0))
}

/// Round times, or numbers of events if these have no times.
fn times(svg: &mut Svg, course: &MemoryCourse, y: f64) {
    let (unit, range) = match course.seconds {
        Some(seconds) if seconds >= 1.0 => ("s", seconds),
        Some(seconds) => ("ms", 1e3 * seconds),
        None => ("events", course.events as f64),
    };
    if range > 0.0 {
        let (step, decimals) = round_step(range, 8.0);
        let mut at = 0.0;
        // The last place is kept for the unit.
        while at < 0.94 * range {
            let place = (x(at / range), y);
            svg.text(place, "quiet", "middle", &format!("{at:.decimals$}"));
            at += step;
        }
    }
    svg.text((RIGHT, y), "quiet", "end", unit);
}

/// Draws columns that appear under the pointer, and show what was live at their highest moment.
fn hovers(svg: &mut Svg, course: &MemoryCourse) {
    let width = (RIGHT - LEFT) / HOVERS as f64;
    let mut moments = course.moments.iter().peekable();
    // What was live before a column is still live at its start.
    let mut last = None;
    for column in 0..HOVERS {
        let left = LEFT + column as f64 * width;
        let mut highest = last;
        while let Some(moment) =
            moments.next_if(|moment| column + 1 == HOVERS || x(moment.at) < left + width)
        {
            last = Some(moment);
            if highest.is_none_or(|highest: &LiveMoment| moment.total() > highest.total()) {
                highest = last;
            }
        }
        let Some(moment) = highest else { continue };
        let mut title = format_bytes(moment.total());
        for (name, bytes) in course.layers.names.iter().zip(&moment.bytes) {
            if *bytes > 0 {
                title += &format!("\n{} {}", name.replace('_', " "), format_bytes(*bytes));
            }
        }
        svg.rect("hover", (left, TOP), (width, BOTTOM - TOP), &title);
    }
}

/// The layers with their bytes at the peak.
fn legend(svg: &mut Svg, course: &MemoryCourse) {
    svg.text((16.0, BELOW), "quiet", "start", "At the peak");
    for (layer, name) in course.layers.names.iter().enumerate() {
        let y = BELOW + LINE * (layer + 1) as f64;
        let bytes = course.highest().map_or(0, |moment| moment.bytes[layer]);
        let class = class(&course.layers, layer);
        svg.rect(&class, (16.0, y - 11.0), (12.0, 12.0), name);
        svg.text((110.0, y), "", "end", &format_bytes(bytes));
        svg.text((122.0, y), "", "start", &name.replace('_', " "));
    }
}
