//! Whatever lease is refused, the error is explained, nothing is lost, and the fixes fit.

mod common;

use common::{odd_model, parameters, step_batch};
use kernels::Target;
use memory::{Cause, DType, GRANULARITY_BYTES, Memory};
use model::Policy;
use trainer::failure::Failure;
use trainer::oom::OomReport;
use trainer::plan::Plan;
use trainer::session::Session;
use trainer::settings::Settings;

fn settings(spec: &str) -> Settings {
    common::settings(odd_model(3), DType::F32, spec)
}

fn batch(settings: &Settings) -> data::StepBatch {
    step_batch(settings, 0)
}

fn session(settings: &Settings, memory: &Memory) -> Session {
    let mut session = Session::on_cpu(settings.clone(), memory).unwrap();
    session.initialise(1).unwrap();
    session
}

/// Refuses each lease of a step in turn, the arenas' included, until a step needs no more.
#[test]
fn every_refused_lease_is_explained_and_loses_nothing() {
    for spec in ["none", "full:uniform:2"] {
        let settings = settings(spec);
        let memory = Memory::host();
        let mut session = session(&settings, &memory);
        let (before, live) = (parameters(&session), memory.live_bytes());
        let batch = batch(&settings);
        let mut refused = std::collections::BTreeSet::new();
        for lease in 0.. {
            memory.refuse_after(lease);
            let failure = match session.step(&batch) {
                Ok(_) => {
                    assert!(
                        lease > 60,
                        "a step of {spec} takes more than {lease} leases"
                    );
                    break;
                }
                Err(failure) => failure,
            };
            let Failure::OutOfMemory { error, .. } = &failure else {
                panic!("lease {lease}: {failure}");
            };
            assert_eq!(failure.exit_code(), 3);
            let message = failure.to_string();
            assert!(
                message.starts_with("CPU out of memory. Tried to allocate "),
                "{message}"
            );
            assert!(message.contains(&format!("`{}`", error.name)), "{message}");
            let report = OomReport::new(error, &settings, Target::Cpu).unwrap();
            assert_eq!((report.cause, report.name), (Cause::Capacity, error.name));
            assert!(!report.hints().is_empty());
            assert_eq!(
                memory.live_bytes(),
                live,
                "lease {lease} (`{}`): leases come back",
                error.name
            );
            assert_eq!(
                parameters(&session),
                before,
                "lease {lease}: the weights are as they were"
            );
            refused.insert(error.name);
        }
        for name in [
            "input_ids",
            "x",
            "q",
            "o",
            "gate",
            "act",
            "logits",
            "losses",
            "d_x",
            "d_act",
            "d_q",
            "d_h1",
        ] {
            assert!(
                refused.contains(name),
                "{name} was refused once: {refused:?}"
            );
        }
    }
}

#[test]
fn every_refused_arena_is_explained() {
    let settings = settings("none");
    let mut names = Vec::new();
    for lease in 0.. {
        let memory = Memory::host();
        memory.refuse_after(lease);
        match Session::on_cpu(settings.clone(), &memory) {
            Ok(_) => break,
            Err(Failure::OutOfMemory { error, .. }) => {
                assert_eq!(memory.live_bytes(), 0, "`{}`: leases come back", error.name);
                names.push(error.name);
            }
            Err(failure) => panic!("lease {lease}: {failure}"),
        }
    }
    for name in ["parameters", "gradients", "first_moment", "second_moment"] {
        assert!(names.contains(&name), "{names:?}");
    }
}

#[test]
fn the_peak_is_the_limit_and_every_fix_fits() {
    let settings = settings("none");
    let plan = Plan::new(&settings, Target::Cpu).unwrap();
    let run = |settings: &Settings, limit: u64| {
        let memory = Memory::host();
        memory.set_limit(Some(limit));
        session(settings, &memory)
            .step(&batch(settings))
            .map(|outcome| outcome.memory.peak.bytes)
    };
    assert_eq!(run(&settings, plan.peak_bytes).unwrap(), plan.peak_bytes);
    let limit = plan.peak_bytes - GRANULARITY_BYTES;
    let failure = run(&settings, limit).unwrap_err();
    let Failure::OutOfMemory { error, .. } = &failure else {
        panic!("{failure}")
    };
    let report = OomReport::new(error, &settings, Target::Cpu).unwrap();
    assert_eq!(
        (report.limit_bytes, report.planned_peak_bytes),
        (Some(limit), plan.peak_bytes)
    );
    let recompute = |set: &[String]| -> Option<String> {
        let specs = set
            .iter()
            .find_map(|setting| setting.strip_prefix("recompute.spec="))?;
        (set.len() == 1).then(|| specs.to_string())
    };
    let specs: Vec<String> = report
        .fixes
        .iter()
        .filter_map(|fix| recompute(&fix.set))
        .collect();
    assert!(specs.len() >= 3, "{:?}", report.fixes);
    for fix in &report.fixes {
        assert!(
            fix.peak_bytes <= limit && fix.saves_bytes == plan.peak_bytes - fix.peak_bytes,
            "{fix:?}"
        );
    }
    for spec in specs {
        let fixed = Settings {
            policy: Policy::parse(&spec, 3).unwrap(),
            ..settings.clone()
        };
        run(&fixed, limit).unwrap_or_else(|failure| panic!("{spec}: {failure}"));
    }
    let costs: Vec<f64> = report
        .fixes
        .iter()
        .filter(|fix| !fix.changes_math)
        .map(|fix| fix.cost_fraction)
        .collect();
    assert!(costs.is_sorted(), "cheapest first: {costs:?}");
}
