//! Bytes that operations read and write on the device, and their times on paper, by group.

use kernels::timeline::Span;
use memory::{Layer, Phase};
use serde::Serialize;
use std::collections::BTreeMap;

/// The operations of one group. Bytes are those of their contracts ([`kernels::Cost::bytes`]): each operand read or written once,
/// scratch left out. So they are the least, whatever a GPU's caches hold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedOperations {
    /// The group: of the operations' own ([`kernels::Operation::group`]), or `head` for all between the last block and the loss.
    pub group: &'static str,
    /// Bytes that a micro-batch reads and writes: one after the first, which adds to gradients; of a step with one micro-batch, that one.
    pub micro_batch_bytes: u64,
    /// Its time on paper, one operation after the other.
    pub micro_batch_ms: f64,
    /// Bytes that the update of a step reads and writes.
    pub update_bytes: u64,
    /// Its time on paper, one operation after the other.
    pub update_ms: f64,
}

/// Bytes and milliseconds of operations.
#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: u64,
    ms: f64,
}

/// Sums of a step's operations by group, the most bytes first: `most` are the spans of a step, `fewer` those of a step with so many
/// micro-batches less.
pub(crate) fn by_group(most: &[Span], fewer: &[Span], less: usize) -> Vec<PlannedOperations> {
    let [all, others] = [most, fewer].map(|spans| sums(spans, |phase| phase != Phase::Optimizer));
    let updates = sums(most, |phase| phase == Phase::Optimizer);
    let mut groups: Vec<&'static str> = all.keys().chain(updates.keys()).copied().collect();
    groups.sort_unstable();
    groups.dedup();
    let of = |sums: &BTreeMap<_, Sum>, group| sums.get(group).copied().unwrap_or_default();
    let mut operations: Vec<PlannedOperations> = groups
        .into_iter()
        .map(|group| {
            let [all, others, update] = [&all, &others, &updates].map(|sums| of(sums, group));
            PlannedOperations {
                group,
                micro_batch_bytes: (all.bytes - others.bytes) / less as u64,
                micro_batch_ms: (all.ms - others.ms).max(0.0) / less as f64,
                update_bytes: update.bytes,
                update_ms: update.ms,
            }
        })
        .filter(|one| one.micro_batch_bytes + one.update_bytes > 0)
        .collect();
    operations.sort_by_key(|one| std::cmp::Reverse((one.micro_batch_bytes, one.update_bytes)));
    operations
}

/// The sums of operations in the phases that `is_meant` selects.
fn sums(spans: &[Span], is_meant: impl Fn(Phase) -> bool) -> BTreeMap<&'static str, Sum> {
    let mut sums: BTreeMap<&'static str, Sum> = BTreeMap::new();
    for span in spans.iter().filter(|span| is_meant(span.place.phase)) {
        let Some(moved) = span.moved else { continue };
        let group = match (span.place.phase, span.place.layer) {
            (Phase::Forward | Phase::Backward, Layer::Head) => "head",
            _ => moved.group,
        };
        let sum = sums.entry(group).or_default();
        sum.bytes += moved.bytes;
        sum.ms += 1e3 * (span.end_s - span.start_s);
    }
    sums
}
