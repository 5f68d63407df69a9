//! Runs an update by its rule.

use crate::form::Form;
use crate::rule::Rule;
use crate::segment::{Round, Segment};
use crate::sources::Sources;
use crate::update::UpdateQueue;
use crate::{matrices, sums};
use kernels::Result;
use memory::{Out, Rank};

/// The name of leases for an update's scratch.
pub(crate) const SCRATCH: &str = "update_scratch";

/// Bytes of scratch that is enough for the update of each round.
pub(crate) fn room_bytes<'a>(
    form: &Form,
    rounds: impl IntoIterator<Item = &'a Round>,
    rank: Rank,
) -> usize {
    let of_round = |round: &Round| match &form.groups[round[0].group].rule {
        Rule::AdamW { .. } => 0,
        Rule::Muon(muon) => matrices::room(muon, round, rank).iter().sum(),
        Rule::Adafactor(group) => sums::room_bytes(group, round[0].whole()),
    };
    rounds.into_iter().map(of_round).max().unwrap_or(0)
}

/// Enqueues the update of this rank's ranges of a round. For a round of whole tensors, every rank must call it. `room`
/// is scratch (u8) for whole tensors.
pub(crate) fn update(
    on: &UpdateQueue,
    round: &[Segment],
    sources: &mut Sources,
    room: Option<Out>,
) -> Result {
    let (first, mut none) = (&round[0], []);
    // A rank without a piece of a round's matrices needs no scratch, but still takes part in the exchanges.
    let room = room.unwrap_or_else(|| Out::of_slice::<u8>(&mut none, [0]));
    match &sources.form.groups[first.group].rule {
        Rule::AdamW { numbers, .. } => numbers.update(on, sources.update(first, &first.range)),
        Rule::Muon(muon) => matrices::update(on, muon, round, sources, room),
        Rule::Adafactor(group) => sums::update(on, (group, first), sources, room),
    }
}
