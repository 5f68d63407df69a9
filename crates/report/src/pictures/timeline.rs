//! Draws `timeline.svg`: one step's bytes by category, its phases, its peak, and what was live at the peak.

use super::Trace;
use super::slices::{Slice, Track, slices};
use crate::numbers::grouped;
use crate::svg::{Svg, round_step, tenths};
use memory::{Category, Phase, Playback, format_bytes};

/// For light and dark pages. Every selector begins with the picture's own class, so that the picture can be part of a
/// page. The colours of categories are those of PyTorch's memory timeline.
const STYLE: &str = include_str!("timeline.css");

const WIDTH: f64 = 760.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 744.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 350.0;
/// The rows of phases, replays and times below the plot.
const PHASES: f64 = BOTTOM + 6.0;
const REPLAYS: f64 = PHASES + 20.0;
const TIMES: f64 = REPLAYS + 28.0;
const BELOW: f64 = TIMES + 32.0;
const LINE: f64 = 20.0;
/// Number of tensors that are named.
const LARGEST: usize = 5;
/// Number of columns that show under the pointer what was live.
const COLUMNS: usize = 200;

/// The picture as a file.
pub(super) fn draw(trace: &Trace, playback: &Playback) -> String {
    let rows = Category::ALL.len().max(LARGEST) as f64;
    let height = BELOW + LINE * (rows + 0.5) + 8.0;
    let label = "Device memory over one step";
    let mut svg = Svg::new("memory-timeline", (WIDTH, height), label);
    svg.style(STYLE, (WIDTH, height));
    titles(&mut svg, trace, playback);
    if let Some(scale) = Scale::new(playback) {
        grid(&mut svg, &scale);
        areas(&mut svg, &scale, &outline(&scale));
        phases(&mut svg, &scale, &slices(&trace.history));
        times(&mut svg, &scale);
        mark_peak(&mut svg, &scale);
        hovers(&mut svg, &scale);
        legend(&mut svg, &scale);
        largest(&mut svg, trace, playback);
    }
    svg.finish()
}

/// Converts times and bytes to places in the picture.
struct Scale<'a> {
    playback: &'a Playback,
    start_s: f64,
    seconds: f64,
    top_bytes: u64,
}

impl Scale<'_> {
    /// None if there is no event.
    fn new(playback: &Playback) -> Option<Scale<'_>> {
        let start_s = playback.instants.get(playback.step)?.at_s;
        let seconds = playback.instants.last()?.at_s - start_s;
        let peak = playback.peak()?.bytes;
        Some(Scale {
            playback,
            start_s,
            seconds: seconds.max(f64::MIN_POSITIVE),
            // Leaves room for the peak's label.
            top_bytes: peak + peak / 8 + 1,
        })
    }

    /// The numbers of the step's events.
    fn events(&self) -> std::ops::Range<usize> {
        self.playback.step..self.playback.instants.len()
    }

    fn x_at(&self, at_s: f64) -> f64 {
        let share = (at_s - self.start_s) / self.seconds;
        LEFT + (RIGHT - LEFT) * share.clamp(0.0, 1.0)
    }

    fn x(&self, event: usize) -> f64 {
        self.x_at(self.playback.instants[event].at_s)
    }

    fn y(&self, bytes: u64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * bytes as f64 / self.top_bytes as f64
    }

    fn total(&self, event: usize) -> u64 {
        self.playback.instants[event].live.total()
    }
}

fn titles(svg: &mut Svg, trace: &Trace, playback: &Playback) {
    let title = format!("Memory of one step, {}", trace.device);
    svg.text((16.0, 26.0), "title", "start", &title);
    let peak = playback
        .peak()
        .map_or("nothing happened".to_string(), |peak| {
            format!(
                "peak {} ({} bytes): {}, {}",
                format_bytes(peak.bytes),
                grouped(peak.bytes as f64, 0),
                peak.place.phase.name(),
                peak.place.layer
            )
        });
    svg.text((16.0, 46.0), "", "start", &peak);
    let Some(refused) = &trace.refused else {
        return;
    };
    let words = format!(
        "refused: {} for `{}` ({})",
        format_bytes(refused.bytes),
        refused.name,
        refused.place
    );
    svg.text((RIGHT, 26.0), "", "end", &words)
}

/// Draws four to eight lines at round numbers of bytes.
fn grid(svg: &mut Svg, scale: &Scale) {
    let step = (scale.top_bytes / 4).max(1);
    let step = 1_u64 << step.ilog2();
    for line in 0..=scale.top_bytes / step {
        let (bytes, y) = (line * step, scale.y(line * step));
        svg.path("grid", &format!("M{LEFT} {y:.1}H{RIGHT}"));
        let at = (LEFT - 8.0, y + 4.0);
        svg.text(at, "quiet", "end", &format_bytes(bytes));
    }
}

/// The events that are visible: the highest, the lowest and the last of each pixel.
fn outline(scale: &Scale) -> Vec<usize> {
    let mut seen = Vec::new();
    let mut events = scale.events().peekable();
    while let Some(first) = events.next() {
        let pixel = scale.x(first) as u64;
        let (mut highest, mut lowest, mut last) = (first, first, first);
        while let Some(event) = events.next_if(|event| scale.x(*event) as u64 == pixel) {
            last = event;
            highest = if scale.total(event) > scale.total(highest) {
                event
            } else {
                highest
            };
            lowest = if scale.total(event) < scale.total(lowest) {
                event
            } else {
                lowest
            };
        }
        let mut of_pixel = [highest, lowest, last];
        of_pixel.sort_unstable();
        seen.extend(of_pixel);
    }
    seen.dedup();
    seen
}

/// Stacks each category on those before it, as a staircase.
fn areas(svg: &mut Svg, scale: &Scale, events: &[usize]) {
    for count in (1..=Category::ALL.len()).rev() {
        let name = Category::ALL[count - 1].name();
        let mut stairs = String::new();
        let mut y = BOTTOM;
        for &event in events {
            let live = &scale.playback.instants[event].live;
            let below = Category::ALL[..count].iter();
            let top = tenths(scale.y(below.map(|category| live.get(*category)).sum()));
            if top != y {
                stairs += &format!("H{}V{top}", tenths(scale.x(event)));
                y = top;
            }
        }
        let area = format!("class=\"{name}\" d=\"M{LEFT} {BOTTOM}{stairs}H{RIGHT}V{BOTTOM}Z\"");
        svg.element("path", &area, Some(name));
    }
}

/// Draws a row of phases and a row of replays.
fn phases(svg: &mut Svg, scale: &Scale, slices: &[Slice]) {
    for (is_replay, y, height) in [(false, PHASES, 18.0), (true, REPLAYS, 8.0)] {
        let of_row = slices.iter().filter(|slice| {
            let is_phase = slice.track == Track::Phases && slice.is_replay == is_replay;
            is_phase && slice.start >= scale.playback.step
        });
        // Slices that are too close to be distinguished are joined.
        let mut stretches: Vec<(Phase, f64, f64)> = Vec::new();
        for slice in of_row {
            let (start, end) = (scale.x(slice.start), scale.x(slice.end));
            match stretches.last_mut() {
                Some((phase, _, last)) if *phase == slice.place.phase && start - *last < 0.7 => {
                    *last = end
                }
                _ => stretches.push((slice.place.phase, start, end)),
            }
        }
        for (phase, start, end) in &stretches {
            // Short replays stay visible.
            let least = if is_replay { 0.5 } else { 0.0 };
            let (name, width) = (phase.name(), (end - start).max(least));
            if width > 0.05 {
                let class = format!("phase {name}");
                svg.rect(&class, (*start, y), (width, height), name);
            }
            if !is_replay && width > 8.0 * name.len() as f64 {
                let at = ((start + end) / 2.0, y + 13.0);
                svg.text(at, "on-phase", "middle", name);
            }
        }
        if is_replay && !stretches.is_empty() {
            svg.text((LEFT - 8.0, y + 8.0), "quiet", "end", "replays");
        }
    }
}

/// Draws round times, or numbers of events if no time passed.
fn times(svg: &mut Svg, scale: &Scale) {
    let (unit, of_unit) = match scale.seconds {
        _ if !scale.playback.is_timed => ("events", 1e-6),
        seconds if seconds >= 1.0 => ("s", 1.0),
        seconds if seconds >= 1e-3 => ("ms", 1e-3),
        _ => ("µs", 1e-6),
    };
    let range = scale.seconds / of_unit;
    let (step, decimals) = round_step(range, 8.0);
    let mut at = 0.0;
    // The last place is kept for the unit.
    while at < 0.94 * range {
        let x = scale.x_at(scale.start_s + at * of_unit);
        svg.text((x, TIMES), "quiet", "middle", &format!("{at:.decimals$}"));
        at += step;
    }
    svg.text((RIGHT, TIMES), "quiet", "end", unit)
}

fn mark_peak(svg: &mut Svg, scale: &Scale) {
    let peak = scale.playback.peak;
    let (x, y) = (scale.x(peak), scale.y(scale.total(peak)));
    let line = format!("class=\"mark\" d=\"M{x:.1} {y:.1}V{BOTTOM}\" stroke-dasharray=\"3 3\"");
    svg.element("path", &line, None);
    svg.circle("mark", (x, y), 4.0);
    let is_left = x < (LEFT + RIGHT) / 2.0;
    let (anchor, aside) = if is_left {
        ("start", 8.0)
    } else {
        ("end", -8.0)
    };
    let instant = &scale.playback.instants[peak];
    let words = format!(
        "peak {}: {}, {}",
        format_bytes(instant.live.total()),
        instant.place.phase.name(),
        instant.place.layer
    );
    svg.text((x + aside, y - 8.0), "", anchor, &words)
}

/// Draws columns that appear under the pointer, and show what was live at their highest event.
fn hovers(svg: &mut Svg, scale: &Scale) {
    let width = (RIGHT - LEFT) / COLUMNS as f64;
    let mut events = scale.events().peekable();
    // What was live before a column is still live at its start.
    let mut last = scale.playback.step;
    for column in 0..COLUMNS {
        let end = LEFT + (column + 1) as f64 * width;
        let mut highest = last;
        while let Some(event) = events.next_if(|event| scale.x(*event) < end) {
            last = event;
            highest = if scale.total(event) > scale.total(highest) {
                event
            } else {
                highest
            };
        }
        let instant = &scale.playback.instants[highest];
        let mut title = format!(
            "{}, {}: {}",
            instant.place.phase.name(),
            instant.place.layer,
            format_bytes(instant.live.total())
        );
        for category in Category::ALL {
            let bytes = instant.live.get(category);
            if bytes > 0 {
                title += &format!("\n{} {}", category.name(), format_bytes(bytes));
            }
        }
        let at = (LEFT + column as f64 * width, TOP);
        svg.rect("hover", at, (width, BOTTOM - TOP), &title);
    }
}

/// Draws the step's categories from the top of the picture down, with their bytes at the peak.
fn legend(svg: &mut Svg, scale: &Scale) {
    svg.text((16.0, BELOW), "quiet", "start", "At the peak, by category");
    let live = &scale.playback.instants[scale.playback.peak].live;
    for (row, category) in (1..).zip(Category::ALL.into_iter().rev()) {
        let y = BELOW + LINE * f64::from(row);
        let name = category.name();
        svg.rect(name, (16.0, y - 11.0), (12.0, 12.0), name);
        svg.text((36.0, y), "", "start", &name.replace('_', " "));
        svg.text((250.0, y), "", "end", &format_bytes(live.get(category)));
    }
}

fn largest(svg: &mut Svg, trace: &Trace, playback: &Playback) {
    let leases = playback.largest_at_peak(&trace.history);
    let of = format!("Largest at the peak, of {}", leases.len());
    svg.text((300.0, BELOW), "quiet", "start", &of);
    for (row, lease) in (1..).zip(leases.iter().take(LARGEST)) {
        let y = BELOW + LINE * f64::from(row);
        svg.text((370.0, y), "", "end", &format_bytes(lease.bytes));
        let words = format!(
            "{} ({}, {})",
            lease.name,
            lease.place.layer,
            lease.category.name().replace('_', " ")
        );
        svg.text((382.0, y), "", "start", &words);
    }
}
