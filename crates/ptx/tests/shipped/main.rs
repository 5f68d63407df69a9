//! The kernels of a binary: each is decoded, and a break in one shows.
#![cfg(feature = "cuda")]

mod device;
mod lines;
mod mutations;
mod products;
mod references;

use ptx::Module;
use std::collections::BTreeSet;

/// What GPUs of 8.0 run.
fn texts() -> impl Iterator<Item = (&'static str, String)> {
    kernels::cuda::ptx()
}

/// And what those of 9.0 do, where that is other PTX.
fn all_texts() -> impl Iterator<Item = (&'static str, String)> {
    texts().chain(kernels::cuda::ptx_on_hopper())
}

#[test]
fn every_kernel_is_decoded() {
    let mut kernels = 0;
    for (name, text) in all_texts() {
        let module = Module::parse(&text).unwrap_or_else(|error| panic!("{name}.cu: {error}"));
        let entries = text.matches(".visible .entry ").count();
        assert_eq!(module.kernels().len(), entries, "{name}.cu");
        kernels += entries;
    }
    assert!(kernels > 100, "{kernels} kernels");
}

/// Opcodes of a text, found without the interpreter's own reader.
fn opcodes(text: &str) -> impl Iterator<Item = &str> {
    let code = text.lines().map(|line| line.split("//").next().unwrap());
    let statements = code.flat_map(|line| line.split([';', '{', '}']));
    statements.filter_map(|statement| {
        let mut words = statement.split_whitespace();
        let first = words.next()?;
        let opcode = if first.starts_with('@') {
            words.next()?
        } else {
            first
        };
        let is_opcode = opcode.starts_with(|first: char| first.is_ascii_lowercase());
        (is_opcode && !opcode.contains([':', ','])).then_some(opcode)
    })
}

#[test]
fn every_opcode_of_the_binary_is_supported() {
    let texts: Vec<String> = all_texts().map(|(_, text)| text).collect();
    let used: BTreeSet<&str> = texts.iter().flat_map(|text| opcodes(text)).collect();
    assert!(
        used.len() > 150 && used.contains("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        "{used:?}"
    );
    let supported: BTreeSet<&str> = ptx::supported().collect();
    let missing: Vec<&&str> = used.difference(&supported).collect();
    assert!(missing.is_empty(), "{missing:?}");
    println!("{} opcodes used, {} supported", used.len(), supported.len());
}
