//! `kernels/quantise_map.cuh` holds the maps as this crate does, bit by bit, and finds the codes that this crate finds.
//!
//! `BLESS_MAP=1 cargo test --release -p kernels --test it -- cuda_map` writes the file.

use kernels::quantise::{Map, SIGNED, UNSIGNED};
use std::fmt::Write;
use std::path::Path;

const HEAD: &str = "\
// The maps of quantise.cuh as bits of f32, written by `crates/kernels/tests/it/cuda_map.rs` from `quantise/map.rs`.
#pragma once

#include <stdint.h>

constexpr int CODES = 256;

// Values of the codes, ascending. Magnitudes are in buckets by their bits, coarse ones from `LOWEST` on and four times as
// fine ones from `MIDDLE` on, in each of which at most one border between codes lies; the last is that of NaN. A bucket's
// word plus a magnitude's bits, or less those of a value below zero, has the code in its upper byte.
";

/// How the magnitudes of a map are parted by their bits, so that no bucket has two borders between codes.
struct Buckets {
    map: &'static Map,
    name: &'static str,
    signs: &'static [bool],
    /// Magnitudes below are as this one.
    lowest: u32,
    /// The first of the fine buckets.
    middle: u32,
    /// Bits of a fine bucket; a coarse one has two more.
    fine: u32,
}

/// Every code, on either side of every border between two, is found as by [`Map::quantise`].
const MAPS: [Buckets; 2] = [
    Buckets {
        map: &SIGNED,
        name: "SIGNED",
        signs: &[false, true],
        lowest: 0x3480_0000,
        middle: 0x3d80_0000,
        fine: 17,
    },
    Buckets {
        map: &UNSIGNED,
        name: "UNSIGNED",
        signs: &[false],
        lowest: 0x3400_0000,
        middle: 0x3d80_0000,
        fine: 16,
    },
];

/// Bits of one: no magnitude is larger, but for how it was rounded.
const ONE: u32 = 0x3f80_0000;
const INFINITY: u32 = 0x7f80_0000;

impl Buckets {
    fn coarse(&self) -> u32 {
        self.fine + 2
    }

    /// Coarse buckets.
    fn low_count(&self) -> u32 {
        (self.middle - self.lowest) >> self.coarse()
    }

    /// All buckets of a sign: the last numbers are those from one on, and NaN follows.
    fn count(&self) -> u32 {
        self.low_count() + ((ONE - self.middle) >> self.fine) + 2
    }

    /// First bits of a bucket of numbers.
    fn start(&self, bucket: u32) -> u32 {
        match bucket.checked_sub(self.low_count()) {
            None => self.lowest + (bucket << self.coarse()),
            Some(fine) => self.middle + (fine << self.fine),
        }
    }

    /// The code of a magnitude in a block whose largest magnitude is one.
    fn code(&self, bits: u32, negative: bool) -> u32 {
        let magnitude = f32::from_bits(bits);
        let nearest = self
            .map
            .nearest(if negative { -magnitude } else { magnitude });
        match negative && magnitude > 0.0 {
            true => nearest.min(self.map.zero.wrapping_sub(1)).into(),
            false => nearest.into(),
        }
    }

    /// The word of a bucket.
    fn word(&self, bucket: u32, negative: bool) -> u32 {
        if bucket == self.count() - 1 {
            // Code 0, for all bits that are no number.
            return if negative {
                !(1 << 31)
            } else {
                INFINITY.wrapping_neg()
            };
        }
        let (start, end) = (self.start(bucket), self.start(bucket + 1));
        let (first, last) = (self.code(start, negative), self.code(end - 1, negative));
        assert!(first.abs_diff(last) <= 1, "{start:#x}: two borders");
        // The first bits beyond the border, or the bucket's end.
        let (mut below, mut border) = (start, end);
        while border - below > 1 {
            let between = below.midpoint(border);
            match self.code(between, negative) == first {
                true => below = between,
                false => border = between,
            }
        }
        match negative {
            true => (first << 24).wrapping_add(border - 1),
            false => (first << 24).wrapping_add((1 << 24) - border),
        }
    }

    fn words(&self) -> Vec<u32> {
        let of_sign = |negative: &bool| {
            let negative = *negative;
            (0..self.count()).map(move |bucket| self.word(bucket, negative))
        };
        self.signs.iter().flat_map(of_sign).collect()
    }

    /// The code as `quantise.cuh` finds it.
    fn found(&self, words: &[u32], value: f32) -> u32 {
        let is_signed = self.signs.len() > 1;
        let bits = value.to_bits() & if is_signed { !(1 << 31) } else { u32::MAX };
        let bits = (bits as i32).max(self.lowest as i32) as u32;
        let fine = (bits >> self.fine) as i32 + self.low_count() as i32
            - (self.middle >> self.fine) as i32;
        let coarse = (bits >> self.coarse()) as i32 - (self.lowest >> self.coarse()) as i32;
        let bucket = fine.max(coarse).min(self.count() as i32 - 1) as usize;
        let negative = is_signed && value < 0.0;
        let word = words[bucket + if negative { self.count() as usize } else { 0 }];
        let distance = if negative { bits.wrapping_neg() } else { bits };
        word.wrapping_add(distance) >> 24
    }
}

fn write_table(text: &mut String, name: &str, count: &str, values: impl Iterator<Item = u32>) {
    let words: Vec<String> = values.map(|bits| format!("{bits:#010x}u")).collect();
    writeln!(text, "__device__ const uint32_t {name}[{count}] = {{").unwrap();
    for line in words.chunks(8) {
        writeln!(text, "    {},", line.join(", ")).unwrap();
    }
    text.push_str("};\n");
}

fn header() -> String {
    let mut text = HEAD.to_string();
    for buckets in &MAPS {
        let Buckets {
            map,
            name,
            lowest,
            middle,
            fine,
            ..
        } = buckets;
        writeln!(text, "\nconstexpr int {name}_ZERO = {};", map.zero).unwrap();
        writeln!(text, "constexpr int {name}_LOWEST = {lowest:#x};").unwrap();
        writeln!(text, "constexpr int {name}_MIDDLE = {middle:#x};").unwrap();
        writeln!(text, "constexpr int {name}_FINE_BITS = {fine};").unwrap();
        writeln!(text, "constexpr int {name}_BUCKETS = {};", buckets.count()).unwrap();
        let values = map.values.iter().map(|value| value.to_bits());
        write_table(&mut text, &format!("{name}_VALUES"), "CODES", values);
        let count = format!("{} * {name}_BUCKETS", buckets.signs.len());
        let words = buckets.words().into_iter();
        write_table(&mut text, &format!("{name}_WORDS"), &count, words);
    }
    text
}

#[test]
fn the_tables_of_cuda_are_the_maps() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/quantise_map.cuh");
    if std::env::var_os("BLESS_MAP").is_some() {
        std::fs::write(&file, header()).unwrap();
    }
    let found = std::fs::read_to_string(&file).unwrap();
    assert!(
        found == header(),
        "kernels/quantise_map.cuh is not what the maps give; hint: BLESS_MAP=1 writes it"
    );
}

/// What a value in a block whose inverse is one is quantised to, by the map itself.
fn expected(map: &Map, value: f32) -> u32 {
    let nearest = map.nearest(value);
    match value < 0.0 {
        true => nearest.min(map.zero.wrapping_sub(1)).into(),
        false => nearest.into(),
    }
}

/// Around every border between codes, around every border between buckets, and everywhere else in steps that are smaller
/// than any bucket; then what is no number, and what is none that a block has.
#[test]
fn buckets_lead_to_the_codes_of_the_maps() {
    for buckets in &MAPS {
        let words = buckets.words();
        let borders = buckets.map.thresholds.iter().take(255);
        let of_codes = borders.map(|x| x.abs().to_bits());
        let of_buckets = (0..buckets.count()).map(|bucket| buckets.start(bucket));
        let around = of_codes
            .chain(of_buckets)
            .flat_map(|bits| bits.saturating_sub(300)..bits + 300);
        let everywhere = (0..ONE).step_by(997);
        let special = [0, 1, ONE, ONE + 1, INFINITY + 1, 0x7fc0_0000, 0x7fff_ffff];
        for bits in around.chain(everywhere).chain(special) {
            let magnitude = f32::from_bits(bits);
            if magnitude > 1.0 + 2.0 * f32::EPSILON {
                continue;
            }
            for value in [magnitude, -magnitude] {
                let found = buckets.found(&words, value);
                let name = buckets.name;
                assert_eq!(found, expected(buckets.map, value), "{name}: {value:e}");
            }
        }
    }
}
