//! `kernels/quantise_map.cuh` holds the maps as this crate does, bit by bit.
//!
//! `BLESS_MAP=1 cargo test --release -p kernels --test cuda_map` writes the file.

use kernels::quantise::{Map, SIGNED, UNSIGNED};
use std::fmt::Write;
use std::path::Path;

const HEAD: &str = "\
// The maps of quantise.cuh as bits of f32, written by `crates/kernels/tests/cuda_map.rs` from `quantise/map.rs`.
#pragma once

#include <stdint.h>

constexpr int CODES = 256;

// Values of the codes, ascending. Thresholds in the order of a search tree: of node n, the largest f32 that goes to
// node 2n; what is larger goes to 2n + 1. The root is node 1, and node 256 + c is code c.
";

/// The threshold between the codes on either side of a node of the search tree.
fn threshold(map: &Map, node: usize) -> f32 {
    let level = node.ilog2();
    let width = 256 >> level;
    map.thresholds[(node - (1 << level)) * width + width / 2 - 1]
}

fn write_table(text: &mut String, name: &str, values: impl Iterator<Item = f32>) {
    let words: Vec<String> = values
        .map(|value| format!("{:#010x}u", value.to_bits()))
        .collect();
    writeln!(text, "__device__ const uint32_t {name}[CODES] = {{").unwrap();
    for line in words.chunks(8) {
        writeln!(text, "    {},", line.join(", ")).unwrap();
    }
    text.push_str("};\n");
}

fn header() -> String {
    let mut text = HEAD.to_string();
    for (name, map) in [("SIGNED", &SIGNED), ("UNSIGNED", &UNSIGNED)] {
        writeln!(text, "\nconstexpr int {name}_ZERO = {};", map.zero).unwrap();
        write_table(
            &mut text,
            &format!("{name}_VALUES"),
            map.values.iter().copied(),
        );
        // There is no node 0.
        let tree = std::iter::once(0.0).chain((1..256).map(|node| threshold(map, node)));
        write_table(&mut text, &format!("{name}_THRESHOLDS"), tree);
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

/// The tree leads every value to the code that the sorted thresholds give.
#[test]
fn the_search_tree_finds_the_nearest_code() {
    for map in [&SIGNED, &UNSIGNED] {
        let borders = map.thresholds.iter().take(255);
        for x in borders.flat_map(|x| [x.next_down(), *x, x.next_up()]) {
            let mut node = 1;
            while node < 256 {
                node = 2 * node + usize::from(x > threshold(map, node));
            }
            assert_eq!(node - 256, usize::from(map.nearest(x)), "{x:e}");
        }
    }
}
