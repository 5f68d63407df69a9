//! Breaks one place of a kernel's PTX; each run must fail or give a wrong result.

use crate::references::{flash_attention, rms_norm};
use crate::texts;
use kernels::KernelError;
use memory::DType;
use ptx::PtxTexts;
use std::sync::Arc;

/// A source with other lines in one kernel, where `changed` gives something for them: in the first `count` such lines.
fn mutated(
    source: &str,
    kernel: &str,
    count: usize,
    changed: impl Fn(&str) -> Option<String>,
) -> Arc<PtxTexts> {
    let (_, text) = texts().find(|(name, _)| *name == source).unwrap();
    let start = text.find(&format!(".entry {kernel}(")).unwrap();
    let length = text[start..].find("\n}").unwrap();
    let (before, rest) = text.split_at(start);
    let (body, after) = rest.split_at(length);
    let mut changes = 0;
    let lines = body.lines().map(|line| {
        let other = changed(line).filter(|_| changes < count);
        changes += usize::from(other.is_some());
        other.unwrap_or_else(|| line.into())
    });
    let body = lines.collect::<Vec<String>>().join("\n");
    assert!(changes > 0, "`{kernel}` has no such line");
    Arc::new(PtxTexts::new([(source, format!("{before}{body}{after}"))]))
}

/// A line that contains something, with another text in its place.
fn replaced(line: &str, marker: &str, from: &str, to: &str) -> Option<String> {
    line.contains(marker).then(|| {
        assert!(line.contains(from), "{line}");
        line.replace(from, to)
    })
}

fn attention(changed: impl Fn(&str) -> Option<String>) -> Result<f64, KernelError> {
    let sources = mutated("flash_attention", "flash_forward_64_bf16", 1, changed);
    flash_attention(&sources, DType::BF16, 150)
}

/// In every line.
fn norm(changed: impl Fn(&str) -> Option<String>) -> Result<f64, KernelError> {
    let sources = mutated("rms_norm", "rms_norm_bf16", usize::MAX, changed);
    rms_norm(&sources, DType::BF16)
}

/// Far beyond what rounding explains.
const WRONG: f64 = 0.1;

#[test]
fn the_same_text_is_right() {
    let same = |line: &str| Some(line.into());
    assert!(attention(same).unwrap() < WRONG / 5.0);
    assert!(norm(same).unwrap() < WRONG / 5.0);
}

#[test]
fn an_address_of_a_matrix() {
    let moved = attention(|line| replaced(line, "ldmatrix", "];", "+16];"));
    assert!(moved.map_or(true, |worst| worst > WRONG));
    let crooked = attention(|line| replaced(line, "ldmatrix", "];", "+4];")).unwrap_err();
    assert!(
        crooked.message.contains("not aligned: 16 bytes"),
        "{crooked}"
    );
    assert!(
        crooked.message.contains("flash_forward_64_bf16, line "),
        "{crooked}"
    );
}

#[test]
fn a_wait_for_copies() {
    let early = attention(|line| replaced(line, "cp.async.wait_all", "cp.async.wait_all;", ""))
        .unwrap_err();
    assert!(early.message.contains("never written"), "{early}");
}

#[test]
fn a_barrier() {
    let racing =
        attention(|line| replaced(line, "bar.sync", "bar.sync", "// bar.sync")).unwrap_err();
    let finds = ["a race", "never written"];
    assert!(
        finds.iter().any(|find| racing.message.contains(find)),
        "{racing}"
    );
}

#[test]
fn a_mask_of_a_shuffle() {
    let masked = norm(|line| {
        let (start, _) = line
            .rsplit_once(", ")
            .filter(|_| line.contains("shfl.sync"))?;
        Some(format!("{start}, 65535;"))
    });
    let masked = masked.unwrap_err();
    assert!(masked.message.contains("the mask 0x0000ffff"), "{masked}");
}

#[test]
fn an_offset_of_a_parameter() {
    for (from, to) in [(0, 2), (2, 3), (3, 2), (5, 4)] {
        let other = norm(|line| {
            replaced(
                line,
                &format!("rms_norm_bf16_param_{from}]"),
                &format!("param_{from}]"),
                &format!("param_{to}]"),
            )
        });
        assert!(
            other.map_or(true, |worst| worst > WRONG),
            "{from} read at {to}"
        );
    }
}
