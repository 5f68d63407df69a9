//! Whatever lease is refused, the error is explained, nothing is lost, and the fixes fit.

use crate::common::side_by_side::side_by_side;
use crate::common::{odd_model, parameters, step_batch};
use kernels::Target;
use memory::{Category, Cause, DType, GRANULARITY_BYTES, Memory};
use planner::Plan;
use planner::{Fix, OomReport, Tried};
use session::Session;
use session::SessionError;
use settings::{Config, Settings};

fn config(spec: &str) -> Config {
    crate::common::config(odd_model(3), DType::F32, spec)
}

fn settings(config: &Config) -> Settings {
    Settings::new(config).unwrap()
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
    side_by_side(["none", "full:uniform:2"], |spec| {
        let config = config(spec);
        let settings = settings(&config);
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
            let SessionError::OutOfMemory(error) = &failure else {
                panic!("lease {lease}: {failure}");
            };
            let message = failure.to_string();
            assert!(
                message.starts_with("CPU out of memory. Tried to allocate "),
                "{message}"
            );
            assert!(message.contains(&format!("`{}`", error.name)), "{message}");
            // Once for a tensor in a phase with so much room: whichever layer's it is, the same is planned.
            if refused.insert((error.name, error.place.phase.name(), error.room())) {
                let report = OomReport::new(error, &config, Target::Cpu).unwrap();
                assert_eq!((report.cause, report.name), (Cause::Capacity, error.name));
                assert!(!report.hints().is_empty());
            }
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
        }
        for name in [
            "input_ids",
            "x",
            "qkv",
            "q",
            "o",
            "gate_up",
            "act",
            "logits",
            "losses",
            "d_x",
            "d_act",
            "d_q",
            "d_qkv",
            "d_h1",
        ] {
            assert!(
                refused.iter().any(|(refused, ..)| *refused == name),
                "{name} was refused once: {refused:?}"
            );
        }
    });
}

#[test]
fn every_refused_arena_is_explained() {
    let settings = settings(&config("none"));
    let mut names = Vec::new();
    for lease in 0.. {
        let memory = Memory::host();
        memory.refuse_after(lease);
        match Session::on_cpu(settings.clone(), &memory) {
            Ok(_) => break,
            Err(SessionError::OutOfMemory(error)) => {
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
    let config = config("none");
    let settings = settings(&config);
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
    let SessionError::OutOfMemory(error) = &failure else {
        panic!("{failure}")
    };
    let report = OomReport::new(error, &config, Target::Cpu).unwrap();
    assert_eq!(
        (report.limit_bytes, report.planned_peak_bytes),
        (Some(limit), plan.peak_bytes)
    );
    let recomputes = |fix: &&Fix| fix.set.len() == 1 && fix.set[0].starts_with("recompute.spec=");
    assert!(
        report.fixes.iter().filter(recomputes).count() >= 3,
        "{:?}",
        report.fixes
    );
    for fix in &report.fixes {
        assert!(
            fix.peak_bytes <= limit && fix.saves_bytes == plan.peak_bytes - fix.peak_bytes,
            "{fix:?}"
        );
    }
    for fix in &report.fixes {
        let fixed = crate::common::fixed(&config, fix, limit);
        let peak = run(&fixed, limit).unwrap_or_else(|failure| panic!("{fix:?}: {failure}"));
        assert_eq!(peak, fix.peak_bytes, "{fix:?}");
    }
    let is_tried = |fix: &Fix| report.tried.iter().any(|tried| tried.set == fix.set);
    assert!(report.fixes.iter().all(is_tried), "{:?}", report.tried);
    let others: Vec<bool> = report
        .fixes
        .iter()
        .map(|fix| fix.is_other_training)
        .collect();
    assert!(others.is_sorted() && others.contains(&true), "{others:?}");
    let adapters = |fix: &&Fix| fix.set.iter().any(|set| set.starts_with("lora."));
    let adapted = report.fixes.iter().filter(adapters).count();
    assert_eq!(adapted, others.iter().filter(|other| **other).count());
    let hints = report.hints();
    let last = hints.last().unwrap();
    assert!(
        last.starts_with("another training, in which adapters alone learn: --set lora.rank="),
        "{hints:?}"
    );
    assert!(!hints[0].contains("lora."), "{hints:?}");
    let costs: Vec<f64> = report
        .fixes
        .iter()
        .filter(|fix| !fix.changes_math)
        .map(|fix| fix.cost_fraction)
        .collect();
    assert!(costs.is_sorted(), "cheapest first: {costs:?}");
}

/// The explanation of a lease that is refused under a limit.
fn explained(config: &Config, target: Target, limit: u64) -> OomReport {
    let memory = Memory::shapes();
    memory.set_limit(Some(limit));
    let larger =
        memory.lease_persistent(Category::Activation, "x", [limit as usize + 1], DType::F32);
    OomReport::new(&larger.err().unwrap(), config, target).unwrap()
}

fn peak_bytes(config: &Config, target: Target) -> u64 {
    let plan = Plan::new(&settings(config), target).unwrap();
    plan.peak_bytes
}

/// Many thin layers, of which full recompute keeps more than a second block needs while it is replayed.
#[test]
fn chunks_of_blocks_are_among_the_fixes() {
    let full = crate::common::config(odd_model(48), DType::F32, "full");
    let chunks = full
        .with(&["recompute.spec=full:uniform:2".into()])
        .unwrap();
    let limit = peak_bytes(&chunks, Target::Cpu);
    assert!(limit < peak_bytes(&full, Target::Cpu));
    let report = explained(&full, Target::Cpu, limit);
    let fix = report
        .fixes
        .iter()
        .find(|fix| fix.set == ["recompute.spec=full:uniform:2"]);
    assert_eq!(fix.unwrap().peak_bytes, limit);
}

/// On a GPU what full recompute keeps may wait in host memory; on the processor that would be the same memory.
#[test]
fn host_memory_is_among_the_fixes_of_a_gpu() {
    let config = crate::common::config(odd_model(48), DType::BF16, "none");
    let full = config.with(&["recompute.spec=full".into()]).unwrap();
    let inputs = ["recompute.spec=full", "offload.activations=block_input"];
    let both = [&["offload.optimizer=pinned"], &inputs[..]].concat();
    let limit = peak_bytes(&full, Target::Cuda) - GRANULARITY_BYTES;
    let report = explained(&config, Target::Cuda, limit);
    for set in [&inputs[..], &both] {
        let fix = report.fixes.iter().find(|fix| fix.set == set);
        let fix = fix.unwrap_or_else(|| panic!("{set:?}: {:?}", report.tried));
        assert!(!fix.changes_math && fix.cost_fraction > 0.0, "{fix:?}");
    }
    let least = report.fixes.iter().min_by_key(|fix| fix.peak_bytes);
    assert!(least.unwrap().set.contains(&both[0].to_string()));
    assert!(
        report.hints()[1].contains("time on paper"),
        "{:?}",
        report.hints()
    );

    let offloads = |tried: &Tried| tried.set.iter().any(|set| set.starts_with("offload."));
    assert!(report.tried.iter().any(offloads));
    let on_cpu = explained(&config, Target::Cpu, limit);
    assert!(!on_cpu.tried.iter().any(offloads), "{:?}", on_cpu.tried);
}

/// What no change does alone or beside full recompute, several may do together, as the advice pulls them.
#[test]
fn several_changes_together_are_a_fix_where_none_is_enough() {
    let config = config("none");
    let nothing = explained(&config, Target::Cpu, GRANULARITY_BYTES);
    let is_same = |set: &[String]| !set.iter().any(|one| one.starts_with("lora."));
    let tried = nothing.tried.iter().filter(|tried| is_same(&tried.set));
    let limit = tried.map(|tried| tried.peak_bytes).min().unwrap();
    let report = explained(&config, Target::Cpu, limit);
    let fixes = report.fixes.iter().filter(|fix| is_same(&fix.set));
    let [fix] = fixes.collect::<Vec<_>>()[..] else {
        panic!("{report:?}")
    };
    let fixed = config.with(&fix.set).unwrap();
    assert_eq!(
        (peak_bytes(&fixed, Target::Cpu), fix.peak_bytes),
        (limit, limit)
    );
    // More keys than a smaller micro-batch beside full recompute sets.
    assert!(fix.set.len() > 3, "{fix:?}");
}

#[test]
fn where_nothing_fits_what_was_tried_is_counted() {
    let report = explained(&config("none"), Target::Cpu, GRANULARITY_BYTES);
    assert_eq!(report.fixes, []);
    let least = report.tried.iter().min_by_key(|tried| tried.peak_bytes);
    let hint = &report.hints()[0];
    for words in [
        format!(
            "none of the {} other settings that were tried fits",
            report.tried.len()
        ),
        format!("--set {}", least.unwrap().set[0]),
        "a shorter --seq".into(),
    ] {
        assert!(hint.contains(&words), "no {words:?}: {hint}");
    }
}
