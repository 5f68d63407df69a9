//! Times reads and writes of 64 MiB, one after the other, as states are streamed, and those of fio in the same folder
//! and rounds.
//!
//! `cargo bench -p scratch --bench disk -- FOLDER`; a Markdown table on stdout. fio is looked for in PATH.

use kernels::BlockFile;
use scratch::{Access, Engine, ScratchFile, ScratchFolder};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

const ROUNDS: usize = 5;

const CHUNK_BYTES: usize = 64 << 20;

const CHUNKS: usize = 32;

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Read,
    Write,
}

/// Bytes that a disk cannot compress.
fn noise() -> Vec<u8> {
    let mut state = 1u64;
    let words = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    // Align the start to a block.
    words.take((CHUNK_BYTES + 4096) / 8).flatten().collect()
}

fn ours(file: &ScratchFile, way: Way, memory: &mut [u8]) -> f64 {
    let start = memory.as_ptr().align_offset(4096);
    let chunk = &mut memory[start..start + CHUNK_BYTES];
    let began = Instant::now();
    for index in 0..CHUNKS {
        let offset = (index * CHUNK_BYTES) as u64;
        match way {
            Way::Read => file.read_at(offset, chunk),
            Way::Write => file.write_at(offset, chunk),
        }
        .unwrap();
    }
    (CHUNKS * CHUNK_BYTES) as f64 / began.elapsed().as_secs_f64() / 1e9
}

/// The same piece size and depth as ours.
fn fio(folder: &Path, way: Way) -> f64 {
    let way = match way {
        Way::Read => "read",
        Way::Write => "write",
    };
    let output = Command::new("fio")
        .args(["--name=peer", "--filename=peer.fio", "--bs=1M"])
        .args(["--iodepth=32", "--ioengine=io_uring", "--direct=1"])
        .args([
            "--overwrite=1",
            "--refill_buffers=1",
            "--output-format=json",
        ])
        .arg(format!("--rw={way}"))
        .arg(format!("--size={}", CHUNKS * CHUNK_BYTES))
        .current_dir(folder)
        .output()
        .expect("fio is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    // Notes may come before the JSON.
    let json = &text[text.find('{').unwrap_or_else(|| panic!("{output:?}"))..];
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    json["jobs"][0][way]["bw_bytes"].as_f64().unwrap() / 1e9
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn row(name: &str, way: Way, file: &Arc<ScratchFile>, memory: &mut [u8], folder: &Path) {
    let pairs: Vec<(f64, f64)> = (0..ROUNDS)
        .map(|_| (ours(file, way, memory), fio(folder, way)))
        .collect();
    let ratios: Vec<f64> = pairs.iter().map(|(ours, fio)| ours / fio).collect();
    let (least, most) = ratios
        .iter()
        .fold((f64::MAX, 0.0f64), |(least, most), ratio| {
            (least.min(*ratio), most.max(*ratio))
        });
    let [ours, fio]: [Vec<f64>; 2] = [
        pairs.iter().map(|pair| pair.0).collect(),
        pairs.iter().map(|pair| pair.1).collect(),
    ];
    let way = match way {
        Way::Read => "reads",
        Way::Write => "writes",
    };
    println!(
        "| {way} | {name} | {:.2} | {:.2} | {:.2} ({least:.2} to {most:.2}) |",
        median(ours),
        median(fio),
        median(ratios)
    );
}

fn main() {
    let folder = std::env::args()
        .skip(1)
        .find(|argument| argument != "--bench");
    let folder = std::path::PathBuf::from(folder.expect("a folder on the disk to measure"));
    let mut memory = noise();
    println!(
        "| | | GB/s | fio, GB/s | ratio, median of {ROUNDS} pairs |\n|---|---|---:|---:|---:|"
    );
    for way in [Way::Write, Way::Read] {
        for (name, engine, direct) in [
            ("io_uring", Engine::Uring, true),
            ("threads", Engine::Threads, true),
            ("io_uring, page cache", Engine::Uring, false),
        ] {
            let access = Access {
                engine: Some(engine),
                direct,
            };
            let scratch = ScratchFolder::open_for(&folder, access).unwrap();
            let bytes = (CHUNKS * CHUNK_BYTES) as u64;
            let file = scratch.create("ours", bytes).unwrap();
            ours(&file, Way::Write, &mut memory);
            row(name, way, &file, &mut memory, &folder);
        }
    }
    let _ = std::fs::remove_file(folder.join("peer.fio"));
}
