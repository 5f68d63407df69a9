//! The loss of preferences, with its gradient.

use crate::operation::PreferenceLoss;

pub(super) fn preference_loss(op: PreferenceLoss) {
    let pairs = op.marks.dims()[1];
    let (factors, marks) = (op.factors.slice_mut::<f32>(), op.marks.slice_mut::<f32>());
    let (policy, reference) = (op.policy.slice::<f32>(), op.reference.slice::<f32>());
    let scale = op.scale.slice::<f32>()[0];
    for pair in 0..pairs {
        let reward = |sequence: usize| op.beta * (reference[sequence] - policy[sequence]);
        let (chosen, rejected) = (reward(2 * pair), reward(2 * pair + 1));
        let margin = chosen - rejected;
        // Both stay exact where the margin is large.
        let tail = (-margin.abs()).exp();
        let loss = (-margin).max(0.0) + tail.ln_1p();
        let missed = if margin > 0.0 { tail } else { 1.0 } / (1.0 + tail);
        let factor = op.beta * missed * scale;
        (factors[2 * pair], factors[2 * pair + 1]) = (factor, -factor);
        let preferred = f32::from(chosen > rejected);
        for (row, mark) in [loss, chosen, rejected, preferred].into_iter().enumerate() {
            marks[row * pairs + pair] = mark;
        }
    }
}
