//! Writes `trace.json`: a history as Chrome's trace events, for Perfetto (ui.perfetto.dev) and `chrome://tracing`.
//!
//! There is a counter for each category and one for their sum, in bytes of device memory; slices for phases and layers;
//! and a track for each queue. Each counter has one value, because Perfetto imports no others. Tests and
//! `scripts/check-trace` check the format; Perfetto itself was not run.

use super::Trace;
use super::slices::{Track, slices};
use kernels::Queue;
use memory::{ByCategory, Category, Playback, format_bytes};
use serde::Serialize;
use std::borrow::Cow;
use std::io;

#[derive(Serialize)]
struct File<'a> {
    #[serde(rename = "displayTimeUnit")]
    display_time_unit: &'static str,
    #[serde(rename = "traceEvents")]
    trace_events: Vec<TraceEvent<'a>>,
}

#[derive(Serialize)]
struct TraceEvent<'a> {
    name: Cow<'a, str>,
    ph: &'static str,
    pid: u32,
    tid: u32,
    /// Microseconds.
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Args,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args {
    Bytes { bytes: u64 },
    Name { name: String },
    Sort { sort_index: u32 },
    Place { phase: &'static str, layer: String },
}

const COUNTERS: u32 = 0;
const PHASES: u32 = 1;
const LAYERS: u32 = 2;
/// The number of the first queue's track; the others follow in order.
const FIRST_QUEUE: u32 = 3;

/// Writes the events of a run.
pub(super) fn write(
    out: &mut impl io::Write,
    trace: &Trace,
    playback: &Playback,
) -> io::Result<()> {
    let mut trace_events = names(&trace.device);
    counters(playback, &mut trace_events);
    for slice in slices(&trace.history) {
        let tid = match slice.track {
            Track::Phases => PHASES,
            Track::Layers => LAYERS,
        };
        let place = Args::Place {
            phase: slice.place.phase.name(),
            layer: slice.place.layer.to_string(),
        };
        let seconds = slice.seconds(playback);
        trace_events.push(complete(slice.name().into(), tid, seconds, place));
    }
    spans(trace, playback, &mut trace_events);
    let file = File {
        display_time_unit: "ms",
        trace_events,
    };
    serde_json::to_writer(out, &file).map_err(io::Error::from)
}

/// Whole nanoseconds, so that slices that end together end at the same number.
fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

fn event<'a>(
    name: Cow<'a, str>,
    ph: &'static str,
    tid: u32,
    ts: f64,
    args: Args,
) -> TraceEvent<'a> {
    TraceEvent {
        name,
        ph,
        pid: 1,
        tid,
        ts,
        dur: None,
        args,
    }
}

fn complete(name: Cow<str>, tid: u32, (start_s, end_s): (f64, f64), args: Args) -> TraceEvent {
    let ts = microseconds(start_s);
    let nanoseconds = ((microseconds(end_s) - ts) * 1e3).round();
    TraceEvent {
        dur: Some(nanoseconds / 1e3),
        ..event(name, "X", tid, ts, args)
    }
}

/// The names of the process and its tracks, and the order of the tracks.
fn names(device: &str) -> Vec<TraceEvent<'static>> {
    let meta = |what: &'static str, tid, args| event(what.into(), "M", tid, 0.0, args);
    let name = format!("training step on {device}");
    let mut events = vec![meta("process_name", COUNTERS, Args::Name { name })];
    let queues = Queue::ALL.map(|queue| format!("queue: {}", queue.name()));
    let tracks = ["phases".to_string(), "layers".to_string()];
    for (tid, name) in (PHASES..).zip(tracks.into_iter().chain(queues)) {
        events.push(meta("thread_name", tid, Args::Name { name }));
        events.push(meta(
            "thread_sort_index",
            tid,
            Args::Sort { sort_index: tid },
        ));
    }
    events
}

/// Each counter wherever it changes, and the peak as an instant.
fn counters(playback: &Playback, events: &mut Vec<TraceEvent>) {
    let mut told: Option<ByCategory> = None;
    for (number, instant) in playback.instants.iter().enumerate() {
        let ts = microseconds(instant.at_s);
        let counter = |name: &'static str, bytes| {
            event(name.into(), "C", COUNTERS, ts, Args::Bytes { bytes })
        };
        for category in Category::ALL {
            let bytes = instant.live.get(category);
            if told.is_none_or(|told| told.get(category) != bytes) {
                events.push(counter(category.name(), bytes));
            }
        }
        let bytes = instant.live.total();
        if told.is_none_or(|told| told.total() != bytes) {
            events.push(counter("total", bytes));
        }
        if number == playback.peak {
            let name = format!("peak: {}", format_bytes(bytes));
            events.push(event(name.into(), "i", PHASES, ts, Args::Bytes { bytes }));
        }
        told = Some(instant.live);
    }
}

/// What queues worked on in the step. Work that was started before the step is cut at its beginning.
fn spans<'a>(trace: &'a Trace, playback: &Playback, events: &mut Vec<TraceEvent<'a>>) {
    let begin = playback.instants.get(playback.step);
    let Some(begin) = begin.filter(|_| playback.is_timed) else {
        return;
    };
    let in_picture = |at_s: f64| (at_s + playback.shift_s).max(begin.at_s);
    for span in &trace.spans {
        let (start_s, end_s) = (in_picture(span.start_s), in_picture(span.end_s));
        if end_s > begin.at_s {
            let place = Args::Place {
                phase: span.place.phase.name(),
                layer: span.place.layer.to_string(),
            };
            let tid = FIRST_QUEUE + span.queue as u32;
            let slice = complete(span.name.into(), tid, (start_s, end_s), place);
            events.push(slice);
        }
    }
}
