//! The plan is what the run uses, to the byte; a step leaves nothing behind.

use crate::common::golden::gradients;
use crate::common::{assert_as_planned, for_every_mode, plan, session, step_batch};
use memory::{Layer, round_up};
use model::{Action, Policy};
use std::collections::HashSet;

#[test]
fn every_step_uses_what_was_planned_and_gives_it_back() {
    for_every_mode(|name, settings| {
        let plan = plan(settings);
        let mut session = session(settings);
        let memory = session.memory().clone();
        let before = (memory.live_leases(), memory.live_bytes());
        assert_eq!(before.1, plan.persistent_bytes, "{name}");
        for step in 0..3 {
            let outcome = session.step(&step_batch(settings, step)).unwrap();
            assert_as_planned(name, &plan, &outcome);
            let after = (memory.live_leases(), memory.live_bytes());
            assert_eq!(after, before, "{name}");
            assert!(session.padding_is_zero(), "{name}");
        }
    });
}

/// The figures of a plan hang together.
#[test]
fn a_plan_adds_up() {
    for_every_mode(|name, settings| {
        let plan = plan(settings);
        assert_eq!(plan.peak_by_category.total(), plan.peak_bytes, "{name}");
        let at_peak: u64 = plan.largest_at_peak.iter().map(|lease| lease.bytes).sum();
        assert_eq!(at_peak, plan.peak_bytes, "{name}");
        assert!(plan.peak_bytes <= plan.reserved_bytes, "{name}");
        let per_parameter = match plan.dtype {
            "f32" => 16.0, // weight, gradient, two moments
            _ => 18.0,     // the weight in two bytes, and its master
        };
        let padded = plan.bytes_per_parameter / per_parameter;
        assert!((1.0..1.1).contains(&padded), "{name}: {padded}");
    });
}

/// The list of activations is what the ledger sees. Where the head makes the peak, every kept activation of every
/// layer is live, and the rest can be counted by hand.
#[test]
fn a_peak_in_the_head_can_be_counted_by_hand() {
    for_every_mode(|name, settings| {
        let mut settings = settings.clone();
        (settings.model.vocab, settings.head_chunk) = (8209, 1000);
        let plan = plan(&settings);
        let of_action = |action: Action| -> u64 {
            let with = plan.activations.iter().filter(|one| one.action == action);
            with.map(|activation| activation.bytes).sum()
        };
        let model = &settings.model;
        let keeps_all = settings.policy == Policy::keep_all_of(model.labels(), model.layers);
        assert_eq!(of_action(Action::Recompute) == 0, keeps_all, "{name}");
        assert_eq!(plan.peak_layer, Layer::Head, "{name}");
        let kept = of_action(Action::Keep);
        assert_eq!(plan.peak_by_category.activation, kept, "{name}");

        let tokens = settings.seq * settings.micro_batch; // all in one chunk
        let (width, vocab) = (settings.model.hidden, settings.model.vocab);
        let compute = settings.dtype.size_in_bytes();
        let bytes = |elements: usize, size: usize| round_up((elements * size) as u64);
        let ids_and_targets = 2 * bytes(tokens, 4);
        // Keys of what is dropped: of the embedding, and at three sites of a block.
        let keys = match settings.model.dropout > 0.0 {
            true => bytes(1 + 3 * settings.model.layers, 8),
            false => 0,
        };
        // A LayerNorm has a mean too.
        let statistics = if settings.model.biases { 2 } else { 1 };
        let losses_and_statistics = (1 + statistics) * bytes(tokens, 4);
        let x_normed_and_dx = 3 * bytes(tokens * width, compute);
        let logits = bytes(tokens * vocab, compute);
        let head = ids_and_targets + keys + losses_and_statistics + x_normed_and_dx + logits;
        assert_eq!(
            plan.peak_bytes,
            plan.persistent_bytes + kept + head,
            "{name}"
        );
    });
}

/// Step 1, before any update: every row of every matrix but the embeddings receives something, these exactly where their
/// token or position occurs.
#[test]
fn every_parameter_has_a_gradient_at_the_first_step() {
    for_every_mode(|name, settings| {
        let batch = step_batch(settings, 0);
        let mut session = session(settings);
        session.step(&batch).unwrap();
        let gradients = gradients(&session);
        let ids = batch.micro.iter().flat_map(|micro| &micro.input_ids);
        let used: HashSet<usize> = ids.map(|id| *id as usize).collect();
        assert!(used.len() < settings.model.vocab || settings.model.tie_embeddings);
        for entry in session.model().layout().entries() {
            let values = &gradients[&entry.name];
            let width = *entry.shape.last().unwrap();
            let is_input = entry.name == "model.embed_tokens.weight";
            for (row, values) in values.chunks_exact(width).enumerate() {
                let is_used = match entry.name.ends_with("wpe.weight") {
                    true => row < settings.seq,
                    false => used.contains(&row) || !is_input,
                };
                let is_output = is_input && settings.model.tie_embeddings;
                let expected = is_used || is_output;
                let any = values.iter().any(|value| *value != 0.0);
                assert_eq!(any, expected, "{name}: {}, row {row}", entry.name);
            }
        }
    });
}
