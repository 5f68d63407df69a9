//! Runs an update by its rule.

use crate::form::Form;
use crate::rule::{Rule, UpdateQueue};
use crate::segment::Segment;
use crate::sources::Sources;
use crate::tensor_states::TensorStates;
use crate::{matrices, sums};
use kernels::Result;
use memory::{Out, Rank};

/// The name of leases for an update's scratch.
pub(crate) const SCRATCH: &str = "update_scratch";

/// Bytes of scratch for the update of a round.
pub(crate) fn room_bytes(form: &Form, round: &[Segment], rank: Rank) -> usize {
    match &form.groups()[round[0].group].rule {
        Rule::Ranges(_) => 0,
        Rule::Matrices(rule) => matrices::room_bytes(&**rule, round, rank),
        Rule::Sums(rule) => sums::room_bytes(&**rule, round[0].whole()),
    }
}

/// Enqueues the update of this rank's ranges of a round. For a round of whole tensors, every rank must call it. `room`
/// is scratch (u8) for whole tensors.
pub(crate) fn update(
    on: &UpdateQueue,
    round: &[Segment],
    sources: &mut Sources,
    tensor_states: &mut TensorStates,
    room: Option<Out>,
) -> Result {
    let (first, mut none) = (&round[0], []);
    // A rank without a piece of a round's matrices needs no scratch, but still takes part in the exchanges.
    let room = room.unwrap_or_else(|| Out::of_slice::<u8>(&mut none, [0]));
    match &sources.form.groups()[first.group].rule {
        Rule::Ranges(rule) => rule.update(on, sources.update(first, &first.range)),
        Rule::Matrices(rule) => matrices::update(on, &**rule, round, sources, room),
        Rule::Sums(rule) => sums::update(on, (&**rule, first), sources, tensor_states, room),
    }
}
