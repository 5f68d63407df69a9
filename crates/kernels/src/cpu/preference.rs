//! The loss of preferences, with its gradient.

use crate::operation::PreferenceLoss;

pub(super) fn preference_loss(operation: PreferenceLoss) {
    let PreferenceLoss {
        factors,
        marks,
        policy,
        reference,
        scale,
        beta,
    } = operation;
    let pairs = marks.dims()[1];
    let (factors, marks) = (factors.slice_mut::<f32>(), marks.slice_mut::<f32>());
    let (policy, reference) = (policy.slice::<f32>(), reference.slice::<f32>());
    let scale = scale.slice::<f32>()[0];
    for pair in 0..pairs {
        let reward = |sequence: usize| beta * (reference[sequence] - policy[sequence]);
        let (chosen, rejected) = (reward(2 * pair), reward(2 * pair + 1));
        let margin = chosen - rejected;
        // Both stay exact where the margin is large.
        let tail = (-margin.abs()).exp();
        let loss = (-margin).max(0.0) + tail.ln_1p();
        let missed = if margin > 0.0 { tail } else { 1.0 } / (1.0 + tail);
        let factor = beta * missed * scale;
        (factors[2 * pair], factors[2 * pair + 1]) = (factor, -factor);
        let preferred = f32::from(chosen > rejected);
        for (row, mark) in [loss, chosen, rejected, preferred].into_iter().enumerate() {
            marks[row * pairs + pair] = mark;
        }
    }
}
