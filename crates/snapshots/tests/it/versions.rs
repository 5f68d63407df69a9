//! Snapshots in the formats of PyTorch 2.0 to 2.13, whose peaks `benches/peers/snapshot_fixtures.py` computed with the
//! `_memory_viz.py` of 2.1, 2.5, 2.9 and 2.13.

use snapshots::{Comparison, GroupChange, Layers, MemorySnapshot, RecordedPeak, peaks};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn read(name: &str) -> Vec<RecordedPeak> {
    peaks(&fixture(&format!("{name}.pickle"))).unwrap()
}

#[test]
fn peaks_are_those_of_the_versions_own_module() {
    let expected = std::fs::read_to_string(fixture("expected.json")).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, u64>> =
        serde_json::from_str(&expected).unwrap();
    for (name, expected) in &expected {
        let peaks = read(name);
        let found = peaks
            .iter()
            .map(|peak| (peak.device.to_string(), peak.peak_bytes));
        assert_eq!(&found.collect::<BTreeMap<_, _>>(), expected, "{name}");
        for peak in &peaks {
            let sum: u64 = peak.live.iter().map(|group| group.bytes).sum();
            assert_eq!(
                sum, peak.peak_bytes,
                "{name}: what is live adds up to the peak"
            );
            assert_eq!(peak.by_category.values().sum::<u64>(), sum, "{name}");
        }
    }
    assert_eq!(expected.len(), 8);
}

#[test]
fn allocations_are_known_by_the_users_own_lines() {
    for name in ["whole-2.1", "whole-2.9"] {
        let peak = &read(name)[0];
        let live: Vec<_> = peak
            .live
            .iter()
            .map(|group| (group.place.as_str(), group.line, group.bytes, group.count))
            .collect();
        let expected = [
            ("project/train.py step", Some(40), (5 << 20) + 1, 2),
            (
                "project/model.py forward",
                Some(12),
                1000 + (3 << 20) + 5,
                2,
            ),
        ];
        assert_eq!(live, expected, "{name}");
        assert_eq!(peak.at, "at event 7 of 14");
        // It was freed, and another stream still used it.
        assert_eq!(peak.waiting_bytes, (3 << 20) + 5);
    }
}

#[test]
fn what_was_live_before_is_counted_and_said() {
    for name in ["late-2.1", "late-2.5", "late-2.13"] {
        let peak = &read(name)[0];
        let before = 700 + (1 << 20) - 1500 + (1 << 20) - 3;
        assert!(
            peak.counted
                .contains(&format!("{before} bytes were live when recording began")),
            "{}",
            peak.counted
        );
        let kept = peak
            .live
            .iter()
            .find(|group| group.place == "before recording began")
            .unwrap();
        assert_eq!((kept.bytes, kept.count), ((1 << 20) - 1500, 1), "{name}");
    }
}

#[test]
fn reserved_memory_is_followed_back_from_the_end() {
    let reserved = |name: &str, device: usize| read(name)[device].reserved.clone().unwrap();
    let whole = reserved("whole-2.9", 0);
    assert_eq!(
        [whole.at_peak_bytes, whole.peak_bytes, whole.end_bytes],
        [22 << 20, 22 << 20, 20 << 20]
    );
    assert_eq!(
        [whole.rounding_bytes, whole.largest_free_bytes],
        [24, 8 << 20]
    );
    let parts = whole.live_bytes + whole.rounding_bytes + whole.free_bytes;
    assert_eq!(parts, whole.end_bytes);
    let expandable = reserved("expandable-2.5", 1);
    assert_eq!(
        [
            expandable.peak_bytes,
            expandable.end_bytes,
            expandable.segments
        ],
        [40 << 20, 20 << 20, 1]
    );
}

#[test]
fn what_grew_is_named() {
    let (base, new) = (read("late-2.5"), read("whole-2.9"));
    let same = Comparison::new(&base, &base, |_| 0);
    assert!(!same.grew && same.devices[0].changes.is_empty());
    // Its peak is smaller, although one line of it grew.
    let shrunk = Comparison::new(&base, &new, |_| 0);
    let grown = &shrunk.devices[0].changes[0];
    assert!(!shrunk.grew);
    assert_eq!(
        (
            grown.place.as_str(),
            grown.lines.as_slice(),
            grown.base_bytes,
            grown.new_bytes
        ),
        (
            "project/model.py forward",
            &[12][..],
            512 + (1 << 20) - 3,
            1000 + (3 << 20) + 5
        )
    );
    let by = base[0].peak_bytes - new[0].peak_bytes;
    assert!(Comparison::new(&new, &base, |_| by - 1).grew);
    assert!(!Comparison::new(&new, &base, |_| by).grew);
}

/// Two snapshots made by hand. As with PyTorch's default `stacks="all"`, what autograd's thread allocates has frames of C++
/// alone, of which those of the recorder come first.
#[test]
fn stacks_without_python_are_known_by_their_autograd_node() {
    let [base, new] = ["backward-before", "backward-now"].map(read);
    let live = |peak: &RecordedPeak| -> Vec<(String, u64)> {
        let live = peak.live.iter();
        live.map(|group| (group.place.clone(), group.bytes))
            .collect()
    };
    let of = |place: &str, mib: u64| (place.to_owned(), mib << 20);
    assert_eq!(
        live(&new[0]),
        [
            of("SoftmaxBackward0", 3),
            of("MulBackward0", 1),
            of("me/net.py forward", 1)
        ]
    );
    let compared = Comparison::new(&base, &new, |_| 0);
    let [grown] = &compared.devices[0].changes[..] else {
        panic!("one node grew: {compared:?}");
    };
    assert_eq!(
        (&grown.place[..], grown.base_bytes, grown.new_bytes),
        ("SoftmaxBackward0", 1 << 20, 3 << 20)
    );
}

/// Allocations that are more in number and the same in bytes are no change.
#[test]
fn changes_are_of_bytes() {
    let base = read("whole-2.9");
    let mut new = base.clone();
    new[0].live[0].count += 1;
    let compared = Comparison::new(&base, &new, |_| 0);
    assert!(compared.devices[0].changes.is_empty(), "{compared:?}");
}

/// A line that is added above moves all others down, and changes nothing.
#[test]
fn moved_lines_are_no_change() {
    let at = |lines: [u32; 2], bytes: u64| {
        let mut peak = read("whole-2.9").remove(0);
        for (group, line) in peak.live.iter_mut().zip(lines) {
            (group.place, group.line) = ("model.py forward".into(), Some(line));
        }
        peak.live[1].bytes += bytes;
        vec![peak]
    };
    let changes = |new: &[RecordedPeak]| {
        Comparison::new(&at([5, 6], 0), new, |_| 0).devices[0]
            .changes
            .clone()
    };
    assert!(changes(&at([6, 7], 0)).is_empty());
    let lines = |changes: Vec<GroupChange>| -> Vec<Vec<u32>> {
        changes.into_iter().map(|change| change.lines).collect()
    };
    assert_eq!(lines(changes(&at([5, 6], 8))), [[6]]);
    assert_eq!(lines(changes(&at([6, 7], 8))), [[6, 7]]);
}

/// The course goes from what was live before, over the peak, to what is live at the end.
#[test]
fn a_course_has_the_peak() {
    for name in ["whole-2.1", "late-2.5", "late-2.13"] {
        let file = std::fs::read(fixture(&format!("{name}.pickle"))).unwrap();
        let snapshot = MemorySnapshot::read(file.as_slice()).unwrap();
        let peak = &snapshot.peaks().unwrap()[0];
        for columns in [1, 4, 600] {
            let course = snapshot.course(0, &Layers::of(&[peak]), columns).unwrap();
            let totals: Vec<u64> = course
                .moments
                .iter()
                .map(snapshots::LiveMoment::total)
                .collect();
            assert_eq!(
                totals.iter().max(),
                Some(&peak.peak_bytes),
                "{name}, {columns} columns"
            );
            assert!(totals.len() <= 2 * (columns + 1));
            assert_eq!(course.seconds.is_some(), name != "whole-2.1");
        }
    }
}
