//! A limit is met or refused exactly, and a refused step leaves everything as it was.

use crate::common::{
    DTYPES, assert_as_planned, for_every_mode, odd_model, parameters, plan, settings, step_batch,
};
use memory::{Category, Cause, GRANULARITY_BYTES, LiveLease, Memory, OutOfMemory};
use session::Session;
use session::SessionError;
use settings::Settings;

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
        Err(SessionError::OutOfMemory(refused)) => refused,
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
        let fresh = crate::common::session(settings)
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
            Err(SessionError::OutOfMemory(error)) => {
                assert!(!fits);
                assert_eq!(error.category, Category::OptimizerState);
            }
            Err(other) => panic!("{other}"),
        }
        assert_eq!(memory.live_leases(), 0, "a session gives all back");
    }
}
