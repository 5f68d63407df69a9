//! Pictures of a real step on shapes keep the rules of their formats, and their highest instant is the recorded peak.

use kernels::meta::{FlopCounter, Meta};
use kernels::timeline::{Rates, Timeline};
use kernels::{Queue, Target};
use memory::{Layer, Lease, Memory, MemoryChange, Peak, Phase, Place, Playback, StepMemory};
use report::pictures::{RefusedLease, Trace};
use serde_json::Value;
use session::{Session, shape_of_a_step};
use settings::{Config, Settings};
use std::collections::{BTreeMap, HashMap};

const FULL: &[&str] = &["recompute.spec=full", "batch.accum=2"];
const OFFLOADED: &[&str] = &["offload.activations=mlp", "offload.optimizer=pinned"];

/// What pictures of two steps on shapes are drawn from, and what the ledger says about the second.
fn traced(set: &[&str], slab_is_reserved: bool) -> (Trace, StepMemory, Memory) {
    let set: Vec<String> = set.iter().map(|set| set.to_string()).collect();
    let settings = Settings::new(&Config::default().with(&set).unwrap()).unwrap();
    let rates = Rates {
        flops: 1e12,
        grouped_flops: 1e12,
        attention_flops: [1e12; 2],
        delta_flops: 1e12,
        memory: 1e10,
        upload: 1e9,
        download: 1e9,
        both_ways: 1.5e9,
        disk: 1e9,
        link: 1e9,
        near_link: 1e9,
        near_ranks: 8,
    };
    let (memory, timeline) = (Memory::shapes(), Timeline::new(rates));
    let clock = timeline.clone();
    memory.keep_history(move || clock.computed().with_copies);
    let dtype = settings.narrowest_dtype();
    let kernels = Meta::new(&memory, Target::Cpu, dtype, FlopCounter::default()).unwrap();
    let batch = shape_of_a_step(&settings, settings.seq);
    let mut session =
        Session::on_kernels(settings, &memory, Box::new(kernels.on(&timeline))).unwrap();
    if slab_is_reserved {
        memory.reserve_slab(1 << 30).unwrap();
    }
    timeline.keep_spans();
    session.step(&batch).unwrap();
    let outcome = session.step(&batch).unwrap();
    let trace = Trace {
        device: "CPU <on paper>".into(),
        history: memory.history().unwrap(),
        spans: timeline.take_spans(),
        refused: None,
    };
    (trace, outcome.memory, memory)
}

/// The picture that needs no viewer.
fn timeline_svg(trace: &Trace) -> String {
    let folder = tempfile::tempdir().unwrap();
    trace.write(folder.path()).unwrap();
    std::fs::read_to_string(folder.path().join("timeline.svg")).unwrap()
}

/// The files of a trace: the snapshot's bytes, the same read, the trace events.
fn written(trace: &Trace) -> (Vec<u8>, Value, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    trace.write(&folder.path().join("memory")).unwrap();
    let read = |name: &str| std::fs::read(folder.path().join("memory").join(name)).unwrap();
    let pickle = read("snapshot.pickle");
    let snapshot = serde_pickle::from_slice(&pickle, serde_pickle::DeOptions::new()).unwrap();
    let mut events: Value = serde_json::from_slice(&read("trace.json")).unwrap();
    let events = events["traceEvents"].as_array_mut().unwrap();
    (pickle, snapshot, std::mem::take(events))
}

fn number(of: &Value, key: &str) -> u64 {
    of[key]
        .as_u64()
        .unwrap_or_else(|| panic!("no {key} in {of}"))
}

/// Bytes after the opcode of every instruction that the viewer reads, for those that do not say it themselves.
fn operand_bytes(opcode: u8, rest: &[u8]) -> Option<usize> {
    let long = || u32::from_le_bytes(rest[..4].try_into().unwrap()) as usize;
    Some(match opcode {
        b'('
        | b')'
        | b'.'
        | b']'
        | b'}'
        | b'N'
        | b'a'
        | b'd'
        | b'e'
        | b'l'
        | b's'
        | b't'
        | b'u'
        | 0x85..=0x89
        | 0x94 => 0,
        b'K' | b'h' | b'q' | 0x80 => 1,
        b'M' => 2,
        b'J' | b'j' | b'r' => 4,
        b'G' | 0x95 => 8,
        // Of more than eight bytes the viewer makes a number that it cannot add to others.
        0x8a if rest[0] > 8 => return None,
        0x8a | 0x8c => 1 + usize::from(rest[0]),
        b'X' => 4 + long(),
        _ => return None,
    })
}

fn assert_only_known_opcodes(pickle: &[u8]) {
    assert!(
        (2..=4).contains(&pickle[1]),
        "the viewer reads protocols 2 to 4"
    );
    let mut at = 0;
    while at < pickle.len() {
        let operand = operand_bytes(pickle[at], &pickle[at + 1..]);
        at += 1 + operand.unwrap_or_else(|| panic!("opcode {:#x} at {at}", pickle[at]));
    }
    assert_eq!(pickle.last(), Some(&b'.'));
}

/// Replays a snapshot as the viewer does; the most that was allocated, and by category then.
fn replayed(snapshot: &Value) -> (u64, HashMap<String, u64>) {
    let (mut segments, mut live) = (BTreeMap::new(), BTreeMap::<u64, (u64, String)>::new());
    let (mut peak, mut at_peak) = (0, HashMap::new());
    let entries = snapshot["device_traces"][0].as_array().unwrap();
    let actions = entries
        .iter()
        .map(|entry| entry["action"].as_str().unwrap());
    let mut following = actions.skip(1);
    for entry in entries {
        let (following, size) = (following.next(), number(entry, "size"));
        let address = entry["addr"].as_u64().unwrap_or(0);
        let end = address + size;
        match entry["action"].as_str().unwrap() {
            "segment_alloc" => assert!(segments.insert(address, end).is_none()),
            "segment_free" => assert_eq!(segments.remove(&address), Some(end)),
            "alloc" => {
                let segment = segments.range(..=address).next_back().unwrap();
                assert!(end <= *segment.1, "inside its segment");
                let before = live.range(..end).next_back();
                assert!(before.is_none_or(|(at, (size, _))| at + size <= address));
                let category = entry["category"].as_str().unwrap().to_string();
                live.insert(address, (size, category));
            }
            "free_requested" => assert_eq!(following, Some("free_completed")),
            "free_completed" => assert_eq!(live.remove(&address).unwrap().0, size),
            "oom" => assert!(entry["device_free"].is_u64()),
            other => panic!("{other}"),
        }
        let total: u64 = live.values().map(|(size, _)| size).sum();
        if total > peak {
            (peak, at_peak) = (total, HashMap::new());
            for (size, category) in live.values() {
                *at_peak.entry(category.clone()).or_insert(0) += size;
            }
        }
    }
    (peak, at_peak)
}

fn assert_segments_are_tiled(snapshot: &Value) {
    let mut reached = 0;
    for segment in snapshot["segments"].as_array().unwrap() {
        let address = number(segment, "address");
        assert!(address >= reached && address.is_multiple_of(2 << 20));
        reached = address;
        for block in segment["blocks"].as_array().unwrap() {
            assert_eq!(number(block, "address"), reached);
            reached += number(block, "size");
        }
        assert_eq!(reached, address + number(segment, "total_size"));
    }
}

/// The largest value of a counter, each of which has one.
fn counter_peak(events: &[Value], name: &str) -> u64 {
    let counters = events.iter().filter(|event| event["ph"] == "C");
    let values = counters.filter(|event| event["name"] == name).map(|event| {
        assert_eq!(event["args"].as_object().unwrap().len(), 1);
        number(&event["args"], "bytes")
    });
    values.max().unwrap()
}

fn nanoseconds(event: &Value, key: &str) -> i64 {
    (event[key].as_f64().unwrap() * 1e3).round() as i64
}

/// Within a track slices begin in order, and each lies in those that it begins in; how many there were.
fn assert_slices_nest(events: &[Value]) -> HashMap<u64, usize> {
    let mut tracks: HashMap<u64, Vec<(i64, i64)>> = HashMap::new();
    for slice in events.iter().filter(|event| event["ph"] == "X") {
        let start = nanoseconds(slice, "ts");
        let end = start + nanoseconds(slice, "dur");
        tracks
            .entry(number(slice, "tid"))
            .or_default()
            .push((start, end));
    }
    for (track, slices) in &tracks {
        assert!(
            slices.is_sorted_by_key(|(start, _)| *start),
            "track {track}"
        );
        let mut open: Vec<i64> = Vec::new();
        for &(start, end) in slices {
            open.retain(|outer| *outer > start);
            assert!(
                start <= end && open.iter().all(|outer| end <= *outer),
                "track {track}"
            );
            open.push(end);
        }
    }
    tracks
        .into_iter()
        .map(|(track, slices)| (track, slices.len()))
        .collect()
}

#[test]
fn a_replay_is_what_the_ledger_kept() {
    for set in [FULL, OFFLOADED] {
        let (trace, step, memory) = traced(set, false);
        let playback = Playback::new(&trace.history);
        assert_eq!(playback.peak(), Some(step.peak));
        let told = |lease: &Lease| (lease.name, lease.place.layer, lease.category, lease.bytes);
        let largest = playback.largest_at_peak(&trace.history);
        let ledger = memory.largest_at_peak().into_iter();
        let ledger = ledger.map(|lease| (lease.name, lease.layer, lease.category, lease.bytes));
        assert!(largest.iter().map(told).eq(ledger), "{set:?}");
    }
}

#[test]
fn the_viewer_gets_what_it_reads() {
    for (set, slab_is_reserved) in [(FULL, false), (FULL, true), (OFFLOADED, false)] {
        let (trace, step, _) = traced(set, slab_is_reserved);
        let (pickle, snapshot, _) = written(&trace);
        assert_only_known_opcodes(&pickle);
        assert_segments_are_tiled(&snapshot);
        let (peak, at_peak) = replayed(&snapshot);
        assert_eq!(peak, step.peak.bytes);
        for category in memory::Category::ALL {
            let bytes = at_peak.get(category.name()).copied().unwrap_or(0);
            assert_eq!(bytes, step.peak.by_category.get(category), "{category:?}");
        }
        let entries = snapshot["device_traces"][0].as_array().unwrap();
        let has = |key: &str, value: &str| entries.iter().any(|entry| entry[key] == value);
        assert!(has("category", "unknown"), "without it the viewer fails");
        assert!(has("user_metadata", "forward, block 3: `gate_up`"));
        assert_eq!(
            slab_is_reserved,
            entries.iter().any(|entry| number(entry, "size") == 1 << 30)
        );
    }
}

#[test]
fn perfetto_gets_counters_and_nested_slices() {
    for set in [FULL, OFFLOADED] {
        let (trace, step, _) = traced(set, false);
        let (_, _, events) = written(&trace);
        assert_eq!(counter_peak(&events, "total"), step.peak.bytes);
        for category in memory::Category::ALL {
            let most = counter_peak(&events, category.name());
            assert!(most >= step.peak.by_category.get(category), "{category:?}");
        }
        let counters = events.iter().filter(|event| event["ph"] == "C");
        assert!(counters.map(|event| nanoseconds(event, "ts")).is_sorted());
        let slices = assert_slices_nest(&events);
        let queues = Queue::ALL
            .iter()
            .filter(|queue| slices.contains_key(&(3 + **queue as u64)));
        // Without other ranks and states on a disk, their queues have nothing to do.
        let expected = if set == FULL { 1 } else { Queue::ALL.len() - 3 };
        assert_eq!(queues.count(), expected);
    }
}

/// Two micro-batches of four blocks: each block's forward pass, its backward pass, and one replay within that.
#[test]
fn phases_and_layers_are_slices_with_replays_inside() {
    let (trace, ..) = traced(FULL, false);
    let (_, _, events) = written(&trace);
    let of_track = |track: u64| {
        let slices = events
            .iter()
            .filter(move |event| event["ph"] == "X" && event["tid"] == track);
        slices.filter(|slice| slice["args"]["phase"] != "load")
    };
    let phases: Vec<&str> = of_track(1)
        .map(|slice| slice["name"].as_str().unwrap())
        .collect();
    let mut outer: Vec<&str> = phases
        .iter()
        .copied()
        .filter(|name| *name != "recompute")
        .collect();
    // The head makes its logits' gradients chunk by chunk, between forward and backward.
    outer.dedup();
    assert!(outer.starts_with(&["forward", "backward"]), "{outer:?}");
    assert_eq!(outer.iter().filter(|name| **name == "optimizer").count(), 1);
    let layers = |name: &str| of_track(2).filter(|slice| slice["name"] == name).count();
    let blocks = Config::default().model.layers;
    for block in 0..blocks {
        assert_eq!(layers(&format!("block {block}")), 4);
        assert!(layers(&format!("block {block}, again")) >= 2);
    }
}

#[test]
fn a_refused_lease_is_where_it_happened() {
    let (mut trace, ..) = traced(FULL, false);
    // The run ends where the replay of block 2 begins, and its leases go back.
    let is_replay = |change: &MemoryChange| match change {
        MemoryChange::Enter(place) => place.phase == Phase::Recompute,
        _ => false,
    };
    let events = &mut trace.history.events;
    let end = events
        .iter()
        .position(|event| is_replay(&event.change))
        .unwrap();
    let at_s = events[end].at_s;
    let mut live = Vec::new();
    for event in &events[..end] {
        match event.change {
            MemoryChange::Take {
                number,
                address: memory::Address::Slab { .. },
                ..
            } => live.push(number),
            MemoryChange::GiveBack { number } => live.retain(|other| *other != number),
            _ => (),
        }
    }
    events.truncate(end + 1);
    let live_bytes = Playback::new(&trace.history).instants[end].live.total();
    for number in live {
        let change = MemoryChange::GiveBack { number };
        trace
            .history
            .events
            .push(memory::MemoryEvent { at_s, change });
    }
    trace.refused = Some(RefusedLease {
        name: "gate",
        bytes: 1 << 40,
        place: Place {
            phase: Phase::Recompute,
            layer: Layer::Block(3),
        },
        live_bytes,
        free_bytes: 4096,
    });
    let (pickle, snapshot, _) = written(&trace);
    assert_only_known_opcodes(&pickle);
    assert_segments_are_tiled(&snapshot);
    replayed(&snapshot);
    let entries = snapshot["device_traces"][0].as_array().unwrap();
    let at = entries
        .iter()
        .position(|entry| entry["action"] == "oom")
        .unwrap();
    assert_eq!(number(&entries[at], "device_free"), 4096);
    assert_eq!(entries[at]["user_metadata"], "recompute, block 3: `gate`");
    assert!(
        entries[at + 1..]
            .iter()
            .all(|entry| entry["action"].as_str().unwrap().starts_with("free"))
    );
    assert!(at + 1 < entries.len());
    assert!(timeline_svg(&trace).contains("refused: 1.00 TiB for `gate`"));
}

#[test]
fn the_timeline_names_the_peak_and_its_largest_tensors() {
    let (trace, step, _) = traced(FULL, false);
    let svg = timeline_svg(&trace);
    let Peak { bytes, place, .. } = step.peak;
    let (phase, layer) = (place.phase.name(), place.layer);
    let peak = format!("peak {}: {phase}, {layer}<", memory::format_bytes(bytes));
    assert!(svg.contains(&peak), "{peak}");
    let playback = Playback::new(&trace.history);
    for lease in &playback.largest_at_peak(&trace.history)[..5] {
        assert!(svg.contains(&format!(">{} ({}, ", lease.name, lease.place.layer)));
    }
    for words in [
        ">forward<",
        ">backward<",
        ">replays<",
        "CPU &lt;on paper>",
        "optimizer state",
    ] {
        assert!(svg.contains(words), "{words}");
    }
    let shown = svg.matches("<path class=\"activation\"").count();
    assert_eq!(shown, 1);
}

/// Where a clock stands still, events are counted; where nothing happened, nothing is drawn.
#[test]
fn histories_without_times_and_without_events_are_drawn_too() {
    let (mut trace, step, _) = traced(FULL, false);
    trace
        .history
        .events
        .iter_mut()
        .for_each(|event| event.at_s = 0.0);
    let (_, _, events) = written(&trace);
    assert_eq!(counter_peak(&events, "total"), step.peak.bytes);
    assert_slices_nest(&events);
    assert!(timeline_svg(&trace).contains(">events<"));
    trace.history.events.clear();
    let (_, snapshot, events) = written(&trace);
    assert_eq!(replayed(&snapshot).0, 0);
    assert!(events.iter().all(|event| event["ph"] == "M"));
}
