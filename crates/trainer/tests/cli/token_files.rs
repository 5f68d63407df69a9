//! Every kind of data file, read in file order: the same tokens give the same losses.

use crate::batches::{bare_u16, batch_file, llmc_header, llmc_u16};
use crate::metrics::Metrics;
use crate::workplace::Workplace;

/// 8 samples of 32 tokens and the last target.
const TOKENS: usize = 8 * 32 + 1;

/// Losses of 4 steps of 4 samples: the third begins the second epoch.
fn losses(place: &Workplace, settings: &str) -> Vec<f64> {
    let out = format!("run-{}", settings.replace(['/', ' ', '.', '=', '-'], "_"));
    place
        .trainer(&format!("--config small.toml {settings} --out {out}"))
        .succeeds();
    Metrics::read(place, &out).losses()
}

#[test]
fn all_formats_give_the_same_samples_in_file_order() {
    let place = Workplace::new();
    // Bytes that text may have.
    let tokens: Vec<u16> = (0..TOKENS)
        .map(|i| 1 + (i * i + i / 7) as u16 % 250)
        .collect();
    let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
    let wide: Vec<u8> = tokens
        .iter()
        .flat_map(|token| u32::from(*token).to_le_bytes())
        .collect();
    let ids: Vec<i32> = tokens.iter().map(|token| i32::from(*token)).collect();
    place.file("u16.bin", llmc_u16(&tokens));
    place.file("u32.bin", [llmc_header(20240801, 7, TOKENS), wide].concat());
    place.file("bare.bin", bare_u16(&tokens));
    place.file("bytes.txt", bytes);
    let rows = batch_file(&ids[..TOKENS - 1], &ids[1..], 32);
    place.file("rows.safetensors", rows);

    let expected = losses(&place, "--no-shuffle --data rows.safetensors");
    assert_eq!(expected.len(), 4);
    for data in [
        "u16.bin",
        "u32.bin",
        "bare.bin --set data.format=u16",
        "bytes.txt",
        "bytes.txt --set data.format=text",
        "u16.bin --set data.format=llmc",
    ] {
        assert_eq!(
            losses(&place, &format!("--no-shuffle --data {data}")),
            expected,
            "{data}"
        );
    }
    // Shuffled, the steps have other samples, and the same command still has the same.
    let shuffled = losses(&place, "--data u16.bin");
    assert_ne!(shuffled, expected);
    assert_eq!(losses(&place, "--data u32.bin"), shuffled);
}

/// With one sample a step, the first steps see the first samples: a change further on is not seen before it.
#[test]
fn file_order_is_the_order_of_the_samples() {
    let place = Workplace::new();
    let mut text: Vec<u8> = (0..TOKENS).map(|i| 2 + (i * 7 % 250) as u8).collect();
    place.file("one.txt", &text);
    text[3 * 32 + 5] ^= 1;
    place.file("other.txt", &text);
    let run = |name: &str| {
        let small_steps = "--micro-batch 1 --accum 1 --steps 5 --no-shuffle";
        losses(&place, &format!("{small_steps} --data {name}"))
    };
    let (one, other) = (run("one.txt"), run("other.txt"));
    assert_eq!(one[..3], other[..3]);
    assert_ne!(one[3], other[3]);
}
