//! `timeline.svg`: the bytes of one step stacked by category, its phases, its peak and what was live then.

use super::Trace;
use super::slices::{Slice, Track, slices};
use crate::numbers::grouped;
use memory::{Category, Phase, Playback, format_bytes};
use std::fmt::Write;

/// Readable in light and in dark; every selector begins with the picture's own class, so that it can stand in a page. The
/// hues of categories are those of PyTorch's memory timeline.
const STYLE: &str = include_str!("timeline.css");

const WIDTH: f64 = 760.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 744.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 350.0;
/// Rows of phases, of replays and of times, below the plot.
const PHASES: f64 = BOTTOM + 6.0;
const REPLAYS: f64 = PHASES + 20.0;
const TIMES: f64 = REPLAYS + 28.0;
const BELOW: f64 = TIMES + 32.0;
const LINE: f64 = 20.0;
/// Tensors that are named.
const LARGEST: usize = 5;
/// Columns that say what was live when they are pointed at.
const COLUMNS: usize = 200;

/// The picture, as a file of its own.
pub(super) fn draw(trace: &Trace, playback: &Playback) -> String {
    let mut svg = String::new();
    // Writing to a string cannot fail.
    let _ = picture(&mut svg, trace, playback);
    svg
}

fn picture(svg: &mut String, trace: &Trace, playback: &Playback) -> std::fmt::Result {
    let rows = Category::ALL.len().max(LARGEST) as f64;
    let height = BELOW + LINE * (rows + 0.5) + 8.0;
    write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"memory-timeline\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"Device memory over one step\"><style>{STYLE}</style><rect class=\"paper\" width=\"{WIDTH}\" \
         height=\"{height}\"/>"
    )?;
    titles(svg, trace, playback)?;
    if let Some(scale) = Scale::new(playback) {
        grid(svg, &scale)?;
        areas(svg, &scale, &outline(&scale))?;
        phases(svg, &scale, &slices(&trace.history))?;
        times(svg, &scale)?;
        mark_peak(svg, &scale)?;
        hovers(svg, &scale)?;
        legend(svg, &scale)?;
        largest(svg, trace, playback)?;
    }
    svg.push_str("</svg>\n");
    Ok(())
}

/// Where things are in the picture.
struct Scale<'a> {
    playback: &'a Playback,
    start_s: f64,
    seconds: f64,
    top_bytes: u64,
}

impl Scale<'_> {
    /// None where nothing happened.
    fn new(playback: &Playback) -> Option<Scale<'_>> {
        let start_s = playback.instants.get(playback.step)?.at_s;
        let seconds = playback.instants.last()?.at_s - start_s;
        let peak = playback.peak()?.bytes;
        Some(Scale {
            playback,
            start_s,
            seconds: seconds.max(f64::MIN_POSITIVE),
            // Room for the peak's label.
            top_bytes: peak + peak / 8 + 1,
        })
    }

    /// The events of the step, by number.
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

fn text(
    svg: &mut String,
    at: (f64, f64),
    class: &str,
    anchor: &str,
    words: &str,
) -> std::fmt::Result {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    write!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" class=\"{class}\" text-anchor=\"{anchor}\">{words}</text>",
        at.0, at.1
    )
}

fn rect(
    svg: &mut String,
    class: &str,
    (x, y): (f64, f64),
    (width, height): (f64, f64),
    title: &str,
) -> std::fmt::Result {
    write!(
        svg,
        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"><title>{title}</title></rect>"
    )
}

fn titles(svg: &mut String, trace: &Trace, playback: &Playback) -> std::fmt::Result {
    let title = format!("Memory of one step, {}", trace.device);
    text(svg, (16.0, 26.0), "title", "start", &title)?;
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
    text(svg, (16.0, 46.0), "", "start", &peak)?;
    let Some(refused) = &trace.refused else {
        return Ok(());
    };
    let words = format!(
        "refused: {} for `{}` ({})",
        format_bytes(refused.bytes),
        refused.name,
        refused.place
    );
    text(svg, (RIGHT, 26.0), "", "end", &words)
}

/// Lines at round numbers of bytes, four to eight of them.
fn grid(svg: &mut String, scale: &Scale) -> std::fmt::Result {
    let step = (scale.top_bytes / 4).max(1);
    let step = 1_u64 << step.ilog2();
    for line in 0..=scale.top_bytes / step {
        let (bytes, y) = (line * step, scale.y(line * step));
        write!(svg, "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>")?;
        let at = (LEFT - 8.0, y + 4.0);
        text(svg, at, "quiet", "end", &format_bytes(bytes))?;
    }
    Ok(())
}

/// The events that can be seen: of each pixel's the highest, the lowest and the last.
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

/// Each category on those before it, as a staircase.
fn areas(svg: &mut String, scale: &Scale, events: &[usize]) -> std::fmt::Result {
    for count in (1..=Category::ALL.len()).rev() {
        let category = Category::ALL[count - 1];
        let tenths = |pixels: f64| (10.0 * pixels).round() / 10.0;
        write!(
            svg,
            "<path class=\"{}\" d=\"M{LEFT} {BOTTOM}",
            category.name()
        )?;
        let mut y = BOTTOM;
        for &event in events {
            let live = &scale.playback.instants[event].live;
            let below = Category::ALL[..count].iter();
            let top = tenths(scale.y(below.map(|category| live.get(*category)).sum()));
            if top != y {
                write!(svg, "H{}V{top}", tenths(scale.x(event)))?;
                y = top;
            }
        }
        write!(
            svg,
            "H{RIGHT}V{BOTTOM}Z\"><title>{}</title></path>",
            category.name()
        )?;
    }
    Ok(())
}

/// A row of phases, and one of replays.
fn phases(svg: &mut String, scale: &Scale, slices: &[Slice]) -> std::fmt::Result {
    for (is_replay, y, height) in [(false, PHASES, 18.0), (true, REPLAYS, 8.0)] {
        let of_row = slices.iter().filter(|slice| {
            let is_phase = slice.track == Track::Phases && slice.is_replay == is_replay;
            is_phase && slice.start >= scale.playback.step
        });
        // What lies closer together than can be seen is one.
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
            // Short replays are still seen.
            let least = if is_replay { 0.5 } else { 0.0 };
            let (name, width) = (phase.name(), (end - start).max(least));
            if width > 0.05 {
                let class = format!("phase {name}");
                rect(svg, &class, (*start, y), (width, height), name)?;
            }
            if !is_replay && width > 8.0 * name.len() as f64 {
                let at = ((start + end) / 2.0, y + 13.0);
                text(svg, at, "on-phase", "middle", name)?;
            }
        }
        if is_replay && !stretches.is_empty() {
            text(svg, (LEFT - 8.0, y + 8.0), "quiet", "end", "replays")?;
        }
    }
    Ok(())
}

/// Round times, or numbers of events where no time passed.
fn times(svg: &mut String, scale: &Scale) -> std::fmt::Result {
    let (unit, of_unit) = match scale.seconds {
        _ if !scale.playback.is_timed => ("events", 1e-6),
        seconds if seconds >= 1.0 => ("s", 1.0),
        seconds if seconds >= 1e-3 => ("ms", 1e-3),
        _ => ("µs", 1e-6),
    };
    let range = scale.seconds / of_unit;
    let power = 10_f64.powf((range / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    let step = steps.into_iter().find(|step| range / step <= 8.0);
    let step = step.unwrap_or(range);
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    let mut at = 0.0;
    // The last place is the unit's.
    while at < 0.94 * range {
        let x = scale.x_at(scale.start_s + at * of_unit);
        text(
            svg,
            (x, TIMES),
            "quiet",
            "middle",
            &format!("{at:.decimals$}"),
        )?;
        at += step;
    }
    text(svg, (RIGHT, TIMES), "quiet", "end", unit)
}

fn mark_peak(svg: &mut String, scale: &Scale) -> std::fmt::Result {
    let peak = scale.playback.peak;
    let (x, y) = (scale.x(peak), scale.y(scale.total(peak)));
    write!(
        svg,
        "<path class=\"mark\" d=\"M{x:.1} {y:.1}V{BOTTOM}\" stroke-dasharray=\"3 3\"/><circle class=\"mark\" cx=\"{x:.1}\" \
         cy=\"{y:.1}\" r=\"4\"/>"
    )?;
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
    text(svg, (x + aside, y - 8.0), "", anchor, &words)
}

/// Columns that are seen when they are pointed at, and say what was live at their highest.
fn hovers(svg: &mut String, scale: &Scale) -> std::fmt::Result {
    let width = (RIGHT - LEFT) / COLUMNS as f64;
    let mut events = scale.events().peekable();
    // What was live before a column is live at its beginning.
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
                write!(title, "\n{} {}", category.name(), format_bytes(bytes))?;
            }
        }
        let at = (LEFT + column as f64 * width, TOP);
        rect(svg, "hover", at, (width, BOTTOM - TOP), &title)?;
    }
    Ok(())
}

/// The categories of the step from the top of the picture down, with their bytes at the peak.
fn legend(svg: &mut String, scale: &Scale) -> std::fmt::Result {
    text(
        svg,
        (16.0, BELOW),
        "quiet",
        "start",
        "At the peak, by category",
    )?;
    let live = &scale.playback.instants[scale.playback.peak].live;
    for (row, category) in (1..).zip(Category::ALL.into_iter().rev()) {
        let y = BELOW + LINE * f64::from(row);
        let name = category.name();
        rect(svg, name, (16.0, y - 11.0), (12.0, 12.0), name)?;
        text(svg, (36.0, y), "", "start", &name.replace('_', " "))?;
        text(
            svg,
            (250.0, y),
            "",
            "end",
            &format_bytes(live.get(category)),
        )?;
    }
    Ok(())
}

fn largest(svg: &mut String, trace: &Trace, playback: &Playback) -> std::fmt::Result {
    let leases = playback.largest_at_peak(&trace.history);
    let of = format!("Largest at the peak, of {}", leases.len());
    text(svg, (300.0, BELOW), "quiet", "start", &of)?;
    for (row, lease) in (1..).zip(leases.iter().take(LARGEST)) {
        let y = BELOW + LINE * f64::from(row);
        text(svg, (370.0, y), "", "end", &format_bytes(lease.bytes))?;
        let words = format!(
            "{} ({}, {})",
            lease.name,
            lease.place.layer,
            lease.category.name().replace('_', " ")
        );
        text(svg, (382.0, y), "", "start", &words)?;
    }
    Ok(())
}
