//! The plan is what the run uses, to the byte; a step leaves nothing behind; a limit is met or refused exactly.

mod common;

use common::golden::gradients;
use common::{DTYPES, MODES, odd_model, parameters, plan, session, settings, step_batch, variants};
use memory::{Category, Cause, GRANULARITY_BYTES, Layer, LiveLease, Memory, OutOfMemory};
use model::{Action, Policy};
use std::collections::HashSet;
use trainer::failure::Failure;
use trainer::plan::Plan;
use trainer::session::{Session, StepOutcome};
use trainer::settings::Settings;

/// Runs `check` for every variant of the model, type and mode.
fn for_every_mode(check: impl Fn(&str, &Settings)) {
    for (variant, model) in variants(3) {
        for dtype in DTYPES {
            for mode in MODES {
                let name = format!("{variant}, {dtype:?}, {mode}");
                check(&name, &settings(model.clone(), dtype, mode));
            }
        }
    }
}

fn assert_as_planned(name: &str, plan: &Plan, outcome: &StepOutcome) {
    let memory = &outcome.memory;
    assert_eq!(memory.peak.bytes, plan.peak_bytes, "{name}");
    assert_eq!(memory.peak.by_category, plan.peak_by_category, "{name}");
    assert_eq!(memory.peak.place.phase, plan.peak_phase, "{name}");
    assert_eq!(memory.peak.place.layer, plan.peak_layer, "{name}");
    assert_eq!(memory.phase_peaks, plan.phase_peak_bytes, "{name}");
    assert_eq!(memory.slab_bytes, plan.slab_bytes, "{name}");
    assert_eq!(memory.host_pinned_bytes, plan.host_pinned_bytes, "{name}");
}

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

/// The list of activations is what the ledger sees: where the head makes the peak, every kept activation of every
/// layer is live, and nothing else is an activation.
#[test]
fn kept_activations_are_those_listed() {
    for_every_mode(|name, settings| {
        let mut settings = settings.clone();
        settings.model.vocab = 4099;
        settings.head_chunk = 1000;
        let plan = plan(&settings);
        let of_action = |action: Action| -> u64 {
            let with = plan.activations.iter().filter(|one| one.action == action);
            with.map(|activation| activation.bytes).sum()
        };
        let keeps_all = settings.policy == Policy::keep_all(settings.model.layers);
        assert_eq!(of_action(Action::Recompute) == 0, keeps_all, "{name}");
        assert_eq!(plan.peak_layer, Layer::Head, "{name}");
        let kept = of_action(Action::Keep);
        assert_eq!(plan.peak_by_category.activation, kept, "{name}");
    });
}

/// Step 1, before any update: every row of every matrix but the embedding receives something, the embedding's rows
/// exactly where their token occurs.
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
                let expected = settings.model.tie_embeddings || !is_input || used.contains(&row);
                let any = values.iter().any(|value| *value != 0.0);
                assert_eq!(any, expected, "{name}: {}, row {row}", entry.name);
            }
        }
    });
}

fn limited(settings: &Settings, limit: u64) -> Session {
    let memory = Memory::host();
    memory.set_limit(Some(limit));
    let mut session = Session::on_cpu(settings.clone(), &memory).unwrap();
    session.initialise(7).unwrap();
    memory.reserve_slab(plan(settings).slab_bytes).unwrap();
    session
}

fn refused(session: &mut Session, settings: &Settings) -> OutOfMemory {
    match session.step(&step_batch(settings, 0)) {
        Err(Failure::OutOfMemory(refused)) => refused,
        Err(other) => panic!("{other}"),
        Ok(outcome) => panic!("{:?} fits", outcome.memory.peak),
    }
}

#[test]
fn a_limit_of_the_planned_peak_is_enough() {
    for_every_mode(|name, settings| {
        let plan = plan(settings);
        let mut session = limited(settings, plan.peak_bytes);
        for step in 0..2 {
            let outcome = session.step(&step_batch(settings, step));
            assert_as_planned(name, &plan, &outcome.unwrap());
        }
    });
}

/// The lease that is refused is the one that would have made the peak; nothing is updated, everything is given back,
/// and with the memory there the session goes on as if nothing had happened.
#[test]
fn a_granule_less_is_refused_where_the_peak_is() {
    for_every_mode(|name, settings| {
        let plan = plan(settings);
        let mut session = limited(settings, plan.peak_bytes - GRANULARITY_BYTES);
        let memory = session.memory().clone();
        let weights = parameters(&session);
        let before = (memory.live_leases(), memory.live_bytes(), memory.place());

        let error = refused(&mut session, settings);
        assert_eq!(error.cause, Cause::Capacity, "{name}");
        assert_eq!(error.place.phase, plan.peak_phase, "{name}");
        assert_eq!(error.place.layer, plan.peak_layer, "{name}");
        let live = error.live_by_category.total();
        assert_eq!(live + error.requested_bytes, plan.peak_bytes, "{name}");
        let is_it =
            |lease: &LiveLease| (lease.name, lease.bytes) == (error.name, error.requested_bytes);
        assert!(plan.largest_at_peak.iter().any(is_it), "{name}: {error}");
        assert!(error.to_string().contains(error.name), "{error}");

        let after = (memory.live_leases(), memory.live_bytes(), memory.place());
        assert_eq!(after, before, "{name}");
        assert_eq!(parameters(&session), weights, "{name}");
        assert!(session.padding_is_zero(), "{name}");

        memory.set_limit(None);
        let recovered = session.step(&step_batch(settings, 0)).unwrap();
        let fresh = common::session(settings)
            .step(&step_batch(settings, 0))
            .unwrap();
        assert_eq!(
            (recovered.step, recovered.loss, recovered.grad_norm),
            (fresh.step, fresh.loss, fresh.grad_norm),
            "{name}"
        );
    });
}

/// Too small a slab is refused like too low a limit.
#[test]
fn a_slab_a_granule_short_is_refused() {
    for dtype in DTYPES {
        let settings = settings(odd_model(2), dtype, "full");
        let memory = Memory::host();
        let mut session = Session::on_cpu(settings.clone(), &memory).unwrap();
        let slab = plan(&settings).slab_bytes;
        memory.reserve_slab(slab - GRANULARITY_BYTES).unwrap();
        let live = memory.live_bytes();
        let error = refused(&mut session, &settings);
        assert_eq!(error.cause, Cause::Fragmentation);
        assert_eq!(memory.live_bytes(), live);
    }
}

/// What lives across steps is refused while it is loaded, not at a step.
#[test]
fn arenas_that_do_not_fit_are_refused_before_the_first_step() {
    let settings = settings(odd_model(2), memory::DType::F32, "none");
    let persistent = plan(&settings).persistent_bytes;
    for (limit, fits) in [(persistent, true), (persistent - GRANULARITY_BYTES, false)] {
        let memory = Memory::host();
        memory.set_limit(Some(limit));
        match Session::on_cpu(settings.clone(), &memory) {
            Ok(_) => assert!(fits),
            Err(Failure::OutOfMemory(error)) => {
                assert!(!fits);
                assert_eq!(error.category, Category::OptimizerState);
            }
            Err(other) => panic!("{other}"),
        }
        assert_eq!(memory.live_leases(), 0, "a session gives all back");
    }
}
