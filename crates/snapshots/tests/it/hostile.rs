//! Broken, foreign, huge and hostile pickles: each is a sentence, and nothing is run.

use serde_pickle::{SerOptions, Value};
use snapshots::{MemorySnapshot, RecordedPeak, SnapshotError};
use std::io::Read;

fn read(file: &[u8]) -> Result<Vec<RecordedPeak>, SnapshotError> {
    MemorySnapshot::read(file)?.peaks()
}

#[track_caller]
fn refused(file: &[u8], words: &str) {
    let error = read(file).unwrap_err().to_string();
    assert!(error.contains(words), "no {words:?}: {error}");
}

#[test]
fn what_would_run_is_named_and_not_run() {
    let ran = std::env::temp_dir().join(format!("a-pickle-ran-{}", std::process::id()));
    let command = format!("touch {}", ran.display());
    let global = format!("cposix\nsystem\n(V{command}\ntR.");
    let stack_global = [
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c".as_slice(),
        &[command.len() as u8],
        command.as_bytes(),
        b"\x85R.",
    ]
    .concat();
    let inst = format!("(V{command}\niposix\nsystem\n.");
    for file in [global.as_bytes(), &stack_global, inst.as_bytes()] {
        refused(file, "`posix.system`");
        refused(file, "nothing was run");
    }
    for (file, words) in [
        (&b"\x80\x02K\x01K\x02R."[..], "call a function"),
        (b"(K\x01K\x02o.", "make an object"),
        (b"\x80\x02)}b.", "state of an object"),
        (b"\x80\x02))\x81.", "make an object"),
        (b"\x80\x04)))\x92.", "make an object"),
        (b"\x80\x02\x82\x07.", "extension 7"),
        (b"\x80\x02\x84\x01\x02\x00\x00.", "extension 513"),
        (b"Ppassword\n.", "persistent object `password`"),
        (b"K\x01Q.", "persistent object"),
        (b"\x80\x05\x97.", "buffer"),
    ] {
        refused(file, words);
    }
    assert!(!ran.exists());
}

#[test]
fn what_is_no_snapshot_is_a_sentence() {
    for (file, words) in [
        (&b""[..], "ends in the middle"),
        (b"\x80\x02}", "ends in the middle"),
        (b"\x7fELF\x02\x01", "no pickle"),
        (b"\x80\x02}.", "no `segments`"),
        (b"\x80\x02]K\x07a.", "no `blocks`"),
        (b"\x80\x02].", "neither segments nor events"),
        (b".", "without its values"),
        (b"a.", "without its values"),
        (b"(.", "without its values"),
        (b"e.", "without its mark"),
        (b"}(K\x01u.", "key without its value"),
        (b"K\x01K\x02a.", "no list"),
        (b"h\x07.", "memo with nothing"),
        (b"g-3\n.", "no number"),
        (b"Inine\n.", "no number"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", "more than 768 MiB"),
        (b"X\xff\xff\xff\x1f", "ends in the middle"),
        (b"\x8b\xff\xff\xff\x1f", "ends in the middle"),
    ] {
        refused(file, words);
    }
}

/// A snapshot of numbered blocks and events, with whatever a test puts into one.
fn snapshot(size: i64, addr: i64) -> Vec<u8> {
    let text = |text: &str| Value::String(text.into());
    let dict = |fields: &[(&str, Value)]| {
        let key = |name: &str| serde_pickle::HashableValue::String(name.into());
        Value::Dict(
            fields
                .iter()
                .map(|(name, value)| (key(name), value.clone()))
                .collect(),
        )
    };
    let entry = dict(&[
        ("action", text("alloc")),
        ("addr", Value::I64(addr)),
        ("size", Value::I64(size)),
    ]);
    let free = dict(&[
        ("action", text("free_completed")),
        ("addr", Value::I64(addr)),
        ("size", Value::I64(size)),
    ]);
    let trace = Value::List(vec![entry, free]);
    let all = dict(&[
        ("segments", Value::List(Vec::new())),
        ("device_traces", Value::List(vec![trace])),
    ]);
    serde_pickle::value_to_vec(&all, SerOptions::new()).unwrap()
}

#[test]
fn sizes_that_no_memory_has_are_refused() {
    assert_eq!(read(&snapshot(1 << 40, 5)).unwrap()[0].peak_bytes, 1 << 40);
    for size in [-1, (1 << 40) + 1, i64::MAX, i64::MIN] {
        refused(&snapshot(size, 5), "`size`");
    }
}

/// Protocols 0 and 1 have numbers and texts in lines, and marks where later ones have counts.
#[test]
fn old_protocols_are_read() {
    let file = b"(dp0\nVsegments\np1\n(lp2\nsVdevice_traces\np3\n(lp4\n(lp5\n(dp6\nVaction\np7\nValloc\np8\nsVaddr\n\
                 L12884901888L\nsVsize\nI0300\nsVuser_metadata\nV\\u00fcber\nsaas.";
    let peak = read(file).unwrap().remove(0);
    assert_eq!(peak.peak_bytes, 300);
    assert_eq!(peak.live[0].place, "über");
}

/// Small files that stand for much: nested, shared and endless values, on memory that is counted.
#[test]
fn little_that_stands_for_much_takes_little_memory() {
    let repeated = |start: &[u8], part: &[u8], times: usize, end: &[u8]| {
        [start, &part.repeat(times), end].concat()
    };
    // A million lists within each other.
    refused(&repeated(b"", b"(", 2_000_000, b"."), "without its values");
    refused(
        &repeated(b"\x80\x02]", b"\x85", 2_000_000, b"."),
        "no `blocks`",
    );
    // Ten lists of ten of the list before: 10^40 values for who unfolds them.
    let laughs = repeated(b"]q\0", b"(h\0h\0h\0h\0h\0h\0h\0h\0h\0h\0lq\0", 40, b".");
    refused(&laughs, "no `blocks`");
    // A list that holds itself, as segments and as blocks.
    refused(b"]q\0h\0a.", "no `blocks`");
    refused(
        b"}q\0X\x08\0\0\0segments]q\x01h\0asX\x06\0\0\0blocksh\x01sX\x0a\0\0\0total_sizeK\x01s.",
        "`size`",
    );
    // One segment with many blocks, many times over.
    let block = b"}(X\x04\0\0\0sizeK\x01X\x05\0\0\0stateX\x06\0\0\0activeuq\x01";
    let blocks = repeated(b"0](", b"h\x01", 3000, b"eq\x020");
    let segment = b"}(X\x06\0\0\0blocksh\x02X\x0a\0\0\0total_sizeK\x01uq\x030](";
    let all = [&block[..], &blocks, segment, &b"h\x03".repeat(3000), b"e."].concat();
    refused(&all, "more than 4194304 entries");
    // Values until there is no room.
    let endless = std::io::repeat(b'N').take(200_000_000);
    let error = MemorySnapshot::read(std::io::BufReader::new(endless)).unwrap_err();
    assert!(error.to_string().contains("more than 768 MiB"), "{error}");

    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let highest = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    let kib: u64 = highest.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kib < 1 << 20, "{kib} KiB");
}

/// Bytes that are changed, left out, doubled and moved: an answer or a sentence, and no panic.
#[test]
fn mutated_pickles_are_answered() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    let mut files: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|end| end == "pickle"))
        .collect();
    files.sort();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let (mut answers, mut sentences) = (0, 0);
    for number in 0..350 {
        let mut bytes = std::fs::read(&files[number % files.len()]).unwrap();
        for _ in 0..=random(4) {
            let (at, len) = (random(bytes.len() - 1), random(24) + 1);
            let end = (at + len).min(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes[at] ^= 1 << random(8),
                2 => drop(bytes.drain(at..end)),
                _ => {
                    let part = bytes[at..end].to_vec();
                    let to = random(bytes.len());
                    bytes.splice(to..to, part);
                }
            }
        }
        match read(&bytes) {
            Ok(_) => answers += 1,
            Err(error) => sentences += usize::from(error.to_string().len() > 20),
        }
    }
    assert_eq!(answers + sentences, 350);
    assert!(
        answers > 20 && sentences > 100,
        "{answers} answers, {sentences} sentences"
    );
}
