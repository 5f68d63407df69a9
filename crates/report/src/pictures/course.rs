//! Draws what was live over the trace of a memory snapshot, by category or by place in the code.

use crate::numbers::grouped;
use crate::svg::{Svg, round_step, tenths};
use memory::{Category, format_bytes};
use snapshots::{LiveMoment, MemoryCourse, RecordedPeak};

/// The look of timelines, and beside it colours for places in the code.
const STYLE: &str = concat!(include_str!("timeline.css"), include_str!("course.css"));

const WIDTH: f64 = 760.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 744.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 350.0;
const TIMES: f64 = BOTTOM + 18.0;
const BELOW: f64 = TIMES + 32.0;
const LINE: f64 = 20.0;

/// Columns in which events are told apart.
pub(crate) const COLUMNS: usize = (RIGHT - LEFT) as usize;

/// The picture as a file.
pub(crate) fn draw(name: &str, peak: &RecordedPeak, course: &MemoryCourse) -> String {
    let height = BELOW + LINE * (course.layers.len() as f64 + 0.5) + 8.0;
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
    // Leaves room above the peak.
    let top_bytes = peak.peak_bytes + peak.peak_bytes / 8 + 1;
    let y = |bytes: u64| BOTTOM - (BOTTOM - TOP) * bytes as f64 / top_bytes as f64;
    let step = 1_u64 << (top_bytes / 4).max(1).ilog2();
    for line in 0..=top_bytes / step {
        svg.path("grid", &format!("M{LEFT} {:.1}H{RIGHT}", y(line * step)));
        let at = (LEFT - 8.0, y(line * step) + 4.0);
        svg.text(at, "quiet", "end", &format_bytes(line * step));
    }
    areas(&mut svg, course, y);
    times(&mut svg, course);
    legend(&mut svg, course);
    svg.finish()
}

/// The class of a layer: a category's own, else one by number.
fn class(course: &MemoryCourse, layer: usize) -> String {
    let name = &course.layers[layer];
    match Category::ALL
        .iter()
        .find(|category| category.name() == name)
    {
        Some(category) => category.name().into(),
        None if layer + 1 == course.layers.len() => "rest".into(),
        None => format!("place-{layer}"),
    }
}

fn x(at: f64) -> f64 {
    tenths(LEFT + (RIGHT - LEFT) * at.clamp(0.0, 1.0))
}

/// Stacks each layer on those before it, as a staircase.
fn areas(svg: &mut Svg, course: &MemoryCourse, y: impl Fn(u64) -> f64) {
    for count in (1..=course.layers.len()).rev() {
        let (mut stairs, mut height) = (String::new(), BOTTOM);
        for moment in &course.moments {
            let top = tenths(y(moment.bytes[..count].iter().sum()));
            if top != height {
                stairs += &format!("H{}V{top}", x(moment.at));
                height = top;
            }
        }
        let class = class(course, count - 1);
        let area = format!("class=\"{class}\" d=\"M{LEFT} {BOTTOM}{stairs}H{RIGHT}V{BOTTOM}Z\"");
        svg.element("path", &area, Some(&course.layers[count - 1]));
    }
}

/// Round times, or numbers of events if these have no times.
fn times(svg: &mut Svg, course: &MemoryCourse) {
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
            let place = (x(at / range), TIMES);
            svg.text(place, "quiet", "middle", &format!("{at:.decimals$}"));
            at += step;
        }
    }
    svg.text((RIGHT, TIMES), "quiet", "end", unit);
}

/// The layers with their bytes at the peak.
fn legend(svg: &mut Svg, course: &MemoryCourse) {
    svg.text((16.0, BELOW), "quiet", "start", "At the peak");
    let highest = course.moments.iter().max_by_key(|moment| moment.total());
    for (layer, name) in course.layers.iter().enumerate() {
        let y = BELOW + LINE * (layer + 1) as f64;
        let bytes = highest.map_or(0, |moment: &LiveMoment| moment.bytes[layer]);
        svg.rect(&class(course, layer), (16.0, y - 11.0), (12.0, 12.0), name);
        svg.text((110.0, y), "", "end", &format_bytes(bytes));
        svg.text((122.0, y), "", "start", &name.replace('_', " "));
    }
}
