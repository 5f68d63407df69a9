//! `trainer check`: peaks of PyTorch's snapshots, of runs and of plans beside each other.

use crate::workplace::{Outcome, Workplace};
use serde_json::Value;

const BASE: &[u8] = include_bytes!("../../../snapshots/tests/fixtures/whole-2.9.pickle");
const NEW: &[u8] = include_bytes!("../../../snapshots/tests/fixtures/late-2.13.pickle");
/// One device with a block of 512 bytes, and no trace.
const STILL: &[u8] = include_bytes!("../../../snapshots/tests/fixtures/still-2.9.pickle");
/// Two devices, the first of which has live memory and no events. `NEW` recorded the first, and has no second one.
const TWO_DEVICES: &[u8] =
    include_bytes!("../../../snapshots/tests/fixtures/expandable-2.5.pickle");
/// The peaks that PyTorch's own module computes of these.
const PEAKS: [u64; 2] = [8_389_614, 12_581_921];

impl Outcome {
    /// It says what grew, and fails.
    #[track_caller]
    fn grew(self, words: &[&str]) -> Outcome {
        self.prints_and_fails(1, &[&["the peak grew: device 0"], words].concat())
    }
}

fn place() -> Workplace {
    let place = Workplace::new();
    place.file("base.pickle", BASE);
    place.file("new.pickle", NEW);
    place
}

#[test]
fn a_peak_that_grew_fails_and_says_from_where() {
    let place = place();
    let grown = PEAKS[1] - PEAKS[0];
    let outcome = place
        .trainer("check base.pickle new.pickle")
        .grew(&["the peak grew", "4.00 MiB (50.0 %) more"]);
    for words in [
        "peak 12.0 MiB (12581921 bytes; 8389614 before)",
        "project/train.py step",
        "before recording began",
        "reserved at the peak",
        "bytes were live when recording began, counted from the segments",
    ] {
        assert!(
            outcome.stdout.contains(words),
            "no {words:?}: {}",
            outcome.stdout
        );
    }
    // Plans and metrics record no more of the allocator than a peak.
    let reserved = |peak: u64| {
        format!(
            "{{\"kind\":\"step\",\"step\":1,\"peak_bytes\":{peak},\"device_reserved_high_bytes\":4096}}\n"
        )
    };
    place.file("base.jsonl", reserved(100));
    place.file("new.jsonl", reserved(90));
    let text = place
        .trainer("check base.jsonl new.jsonl")
        .succeeds()
        .stdout;
    assert!(text.contains("reserved at most"), "{text}");
    assert!(!text.contains(" 0 B"), "{text}");
    place.trainer("check new.pickle base.pickle").succeeds();
    place
        .trainer("check base.pickle base.pickle --tolerance 0")
        .succeeds();
    let tolerant = |tolerance: &str| {
        place.trainer(&format!(
            "check base.pickle new.pickle --tolerance {tolerance}"
        ))
    };
    tolerant(&grown.to_string()).succeeds();
    tolerant(&(grown - 1).to_string()).grew(&["are tolerated"]);
    tolerant("50%").succeeds();
    tolerant("49%").grew(&["the peak grew"]);
    tolerant("lots").fails(2, &["is not a size"]);
}

#[test]
fn programs_get_json_and_pull_requests_markdown() {
    let place = place();
    let outcome = place
        .trainer("check base.pickle new.pickle --json")
        .grew(&["the peak grew"]);
    let json: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let device = &json["devices"][0];
    assert_eq!(
        (&json["schema_version"], &json["grew"]),
        (&Value::from(2), &Value::from(true))
    );
    for (side, peak) in [("base", PEAKS[0]), ("new", PEAKS[1])] {
        let live = device[side]["live"].as_array().unwrap();
        let sum: u64 = live
            .iter()
            .map(|group| group["bytes"].as_u64().unwrap())
            .sum();
        assert_eq!(
            [Value::from(peak), Value::from(sum)],
            [device[side]["peak_bytes"].clone(), peak.into()]
        );
    }
    let signed = |change: &Value| {
        change["new_bytes"].as_i64().unwrap() - change["base_bytes"].as_i64().unwrap()
    };
    let changes = device["changes"].as_array().unwrap();
    let difference: i64 = changes.iter().map(signed).sum();
    assert_eq!(difference, PEAKS[1] as i64 - PEAKS[0] as i64);
    let markdown = place
        .trainer("check base.pickle base.pickle --markdown")
        .succeeds()
        .stdout;
    assert!(
        markdown.starts_with("**device 0: peak 8.00 MiB"),
        "{markdown}"
    );
    assert!(markdown.contains("|---|---:|---:|"), "{markdown}");
}

/// Four files of one run have one peak.
#[test]
fn our_own_files_have_the_planned_peak() {
    let place = Workplace::new();
    let small = "--config small.toml --device cpu --quiet --steps 2";
    place
        .trainer(&format!("{small} --recompute full --trace --out run"))
        .succeeds();
    place.trainer(&format!("{small} --out other")).succeeds();
    let plan: Value = serde_json::from_str(&place.text("run/plan.json")).unwrap();
    for file in ["plan.json", "metrics.jsonl", "memory/snapshot.pickle"] {
        let same = place
            .trainer(&format!("check run/plan.json run/{file} --json"))
            .succeeds();
        let same: Value = serde_json::from_str(&same.stdout).unwrap();
        let new = &same["devices"][0]["new"];
        assert_eq!(new["peak_bytes"], plan["peak_bytes"], "{file}");
        let mut expected = plan["peak_by_category"].as_object().unwrap().clone();
        expected.retain(|_, bytes| bytes != 0);
        assert_eq!(new["by_category"], Value::from(expected), "{file}");
    }
    for (file, words) in [
        ("plan.json", "(forward, blocks)"),
        ("metrics.jsonl", "activation"),
    ] {
        let grown = place
            .trainer(&format!("check run/{file} other/{file}"))
            .grew(&["the peak grew"]);
        assert!(grown.stdout.contains(words), "{}", grown.stdout);
    }
}

#[test]
fn files_that_have_no_peak_are_refused() {
    let place = place();
    place.file("evil.pickle", "cposix\nsystem\n(Vtouch ran\ntR.");
    place.file("empty.pickle", "");
    place.file("cut.pickle", &NEW[..NEW.len() / 2]);
    place.file("other.json", "{\"name\": 1}");
    for (file, words) in [
        ("evil.pickle", "import `posix.system`"),
        ("empty.pickle", "it is empty"),
        ("cut.pickle", "ends in the middle"),
        ("other.json", "neither a memory snapshot"),
        ("small.toml", "no pickle"),
        ("nowhere.pickle", "No such file"),
    ] {
        for command in [
            format!("check base.pickle {file}"),
            format!("check {file} base.pickle"),
        ] {
            place.trainer(&command).fails(4, &[file, words]);
        }
    }
    assert!(!place.path("ran").exists());
}

/// A test that lost a GPU has no smaller peak, and one that has a second GPU is not the test that was.
#[test]
fn a_device_of_one_file_alone_is_an_error() {
    let place = place();
    place.file("two.pickle", TWO_DEVICES);
    place
        .trainer("check two.pickle two.pickle --plot two.svg")
        .succeeds();
    for file in ["two.pickle", "two.png"] {
        place
            .trainer(&format!("check two.pickle two.pickle --plot {file}"))
            .fails(2, &[file, "does not end in .svg"]);
    }
    place.file("own.svg", "<svg/>");
    place
        .trainer("check two.pickle two.pickle --plot own.svg")
        .fails(2, &["own.svg", "was not written by this command"]);
    for (flags, sides) in [
        ("check two.pickle new.pickle", ["new", "base"]),
        ("check new.pickle two.pickle", ["base", "new"]),
    ] {
        let tolerant = format!("{flags} --tolerance 1GiB");
        let reason = [
            "two.pickle cannot be used",
            "no recording of device 0, and new.pickle has one",
            "the same devices",
        ];
        let outcome = place.trainer(&tolerant).prints_and_fails(4, &reason);
        let words = format!(
            "device 1: peak 30.0 MiB (31457280 bytes) in {}; nothing was recorded on it in",
            sides[1].to_uppercase()
        );
        assert!(outcome.stdout.contains(&words), "{}", outcome.stdout);
        let markdown = format!("{tolerant} --markdown");
        let markdown = place.trainer(&markdown).prints_and_fails(4, &reason).stdout;
        assert!(markdown.contains(&format!("**{words}")), "{markdown}");
        let json = format!("{tolerant} --json");
        let json = place.trainer(&json).prints_and_fails(4, &reason).stdout;
        let json: Value = serde_json::from_str(&json).unwrap();
        let only: Vec<&Value> = json["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| &device["only_in"])
            .collect();
        assert_eq!(only, sides);
        let grew = ["/grew", "/devices/0/grew", "/devices/1/grew"];
        assert!(grew.map(|path| json.pointer(path) == Some(&false.into())) == [true; 3]);
    }
    // Both drawn devices stand below one another.
    let picture = place.text("two.svg");
    assert!(picture.contains("Peak of device 0") && picture.contains("Peak of device 1"));
}

/// Both snapshots have one scale, the colours of their places are the same, and what has no time is not drawn.
#[test]
fn two_snapshots_are_drawn_below_one_another() {
    let place = place();
    place
        .trainer("check base.pickle new.pickle --plot check.svg")
        .grew(&["the peak grew"]);
    let picture = place.text("check.svg");
    for words in [
        "Peak of device 0: 8.00 MiB before, 12.0 MiB now",
        "+4,192,307 bytes (+50.0 %)",
        "before: base.pickle",
        "now: new.pickle",
    ] {
        assert!(picture.contains(words), "no {words:?}: {picture}");
    }
    let areas = |class: &str| picture.matches(&format!("class=\"{class}\" d=")).count();
    assert_eq!((areas("place-0"), areas("rest")), (2, 2));
    let scale = |text: &str| picture.matches(&format!(">{text}</text>")).count();
    assert!(scale("4.00 MiB") >= 2, "{picture}");

    place
        .trainer("plan --config small.toml --device cpu --trace paper")
        .succeeds();
    place.file("plan.json", "{\"peak_bytes\": 1}");
    let mixed = "check plan.json paper/snapshot.pickle --plot none.svg";
    place
        .trainer(mixed)
        .fails(4, &["plan.json", "--plot draws", "--trace"]);
    assert!(!place.path("none.svg").exists());
}

/// A run's metrics count up to half a line at their end, and no further than a broken line before it.
#[test]
fn metrics_end_with_half_a_line_at_most() {
    let place = place();
    let step = |peak: u64| format!("{{\"kind\":\"step\",\"step\":1,\"peak_bytes\":{peak}}}\n");
    place.file("base.jsonl", step(100));
    place.file("cut.jsonl", step(100) + "{\"kind\":\"st");
    place.trainer("check base.jsonl cut.jsonl").succeeds();
    place.file("broken.jsonl", step(100) + "{\"kind\":\"st\n" + &step(200));
    place
        .trainer("check base.jsonl broken.jsonl")
        .fails(4, &["broken.jsonl", "line 2 is no JSON"]);
}

/// A snapshot without events has no peak, so nothing was measured.
#[test]
fn a_snapshot_without_events_is_refused() {
    let place = place();
    place.file("still.pickle", STILL);
    place.trainer("check base.pickle still.pickle").fails(
        4,
        &[
            "still.pickle",
            "No events were recorded",
            "_record_memory_history",
        ],
    );
}
