//! Compares the choice with brute force, and checks its promises.

use super::*;
use crate::Plan;
use kernels::random::random_u32;
use settings::{KernelChoice, PerFamily};

pub(super) fn config(set: &[&str]) -> Config {
    let small = [
        "model.layers=6",
        "model.hidden=64",
        "model.heads=4",
        "model.kv_heads=2",
        "model.head_dim=16",
        "model.ffn=160",
        "model.vocab=64",
        "data.seq=64",
        "batch.micro=2",
        "recompute.spec=auto",
        "memory.budget=1GiB",
    ];
    let set: Vec<String> = small.iter().chain(set).map(|set| set.to_string()).collect();
    Config::default().with(&set).unwrap()
}

/// Configurations of both families on both targets, with dropout, accumulation and offload.
fn configurations() -> Vec<(Config, Target)> {
    let gpt2 = [
        "model.norm=layer",
        "model.activation=gelu_tanh",
        "model.positions=learned",
        "model.max_positions=64",
        "model.kv_heads=4",
        "model.biases=true",
        "model.tie_embeddings=true",
        "model.dropout=0.1",
    ];
    let offload = [
        "offload.activations=auto",
        "offload.optimizer=pinned",
        "batch.accum=3",
    ];
    let both = [&gpt2[..], &offload].concat();
    vec![
        (config(&[]), Target::Cpu),
        (config(&gpt2), Target::Cpu),
        (
            config(&[
                "attention.backend=flash",
                "train.dtype=bf16",
                "batch.accum=2",
            ]),
            Target::Cuda,
        ),
        (config(&offload), Target::Cuda),
        (config(&both), Target::Cuda),
    ]
}

/// Configurations of one of several ranks. At 100 GB/s all sending is hidden. At lower rates, replays hide more of it,
/// so a step's time is not a sum over layers, and some policies with different peaks take the same time.
fn of_ranks() -> Vec<(Config, Target)> {
    let links = [("1", 100.0), ("1", 10.0), ("3", 30.0)];
    let configs = links.map(|(zero, gbps)| {
        let shape = ["data.seq=512", "batch.micro=8", "train.dtype=bf16"];
        let set = [
            format!("collectives.zero={zero}"),
            format!("hardware.link_gbps={gbps}"),
        ];
        let mut config = config(&[&shape[..], &["attention.backend=flash"]].concat());
        let rank = memory::Rank { number: 0, of: 8 };
        config.join(rank).unwrap();
        (config.with(&set).unwrap(), Target::Cuda)
    });
    configs.to_vec()
}

/// A pseudo-random assignment, the same in every run.
fn some_assignment(number: u64, terms: &Terms) -> Vec<usize> {
    let layers = terms.layers.iter().enumerate();
    let entry = |(layer, entries): (usize, &Vec<_>)| {
        random_u32(number, layer as u64) as usize % entries.len()
    };
    layers.map(entry).collect()
}

/// All assignments of entries to layers.
fn all_assignments(layers: usize, entries: usize) -> impl Iterator<Item = Vec<usize>> {
    let digits = move |number: usize| {
        let digit = |layer: usize| number / entries.pow(layer as u32) % entries;
        (0..layers).map(digit).collect()
    };
    (0..entries.pow(layers as u32)).map(digits)
}

/// The spaces to choose from: without offload, and with it if the configuration offloads.
fn spaces(config: &Config, chooser: &Chooser) -> Vec<Space> {
    let space = |offloads| {
        let (settings, paper) = (&chooser.settings, &chooser.paper);
        Space::new(settings, paper, offloads, EXHAUSTIVE_MAX).unwrap()
    };
    let mut spaces = vec![space(false)];
    if config.chooses_offload() {
        spaces.push(space(true));
    }
    spaces
}

#[test]
fn the_peak_of_any_assignment_follows_from_what_layers_contribute() {
    for (config, target) in configurations() {
        let chooser = Chooser::new(&config, target).unwrap();
        for space in spaces(&config, &chooser) {
            assert!(
                space.menu.most_entries() > 2,
                "there is something to choose"
            );
            for number in 0..40 {
                let entries = some_assignment(number, &space.terms);
                let assignment = Assignment {
                    cost: space.terms.cost(&entries),
                    peak: space.terms.peak(&entries),
                    entries,
                };
                let simulated = chooser.candidate(&space, &assignment).unwrap();
                assert_eq!(simulated.peak, assignment.peak, "{assignment:?} {target:?}");
            }
        }
    }
}

/// Compares with all assignments of six layers, for forty budgets.
#[test]
fn no_assignment_is_cheaper_within_the_budget() {
    for (config, target) in configurations() {
        let chooser = Chooser::new(&config, target).unwrap();
        for Space { terms, .. } in spaces(&config, &chooser) {
            let all = all_assignments(6, terms.layers[0].len());
            let of = |entries: Vec<usize>| (terms.cost(&entries), terms.peak(&entries));
            let all: Vec<(u64, u64)> = all.map(of).collect();
            let peaks = || all.iter().map(|(_, peak)| *peak);
            let (least, most) = (peaks().min().unwrap(), peaks().max().unwrap());
            assert_eq!(terms.smallest().peak, least);
            assert_eq!(terms.cheapest(least - 1), None);
            for step in 0..40 {
                let budget = least + (most - least) * step / 39;
                let within = all.iter().filter(|(_, peak)| *peak <= budget);
                let best = within.min().unwrap();
                let found = terms.cheapest(budget).unwrap();
                assert_eq!((found.cost, found.peak), *best, "{budget} {target:?}");
                assert_eq!(of(found.entries), *best);
            }
        }
    }
}

/// Compares with steps on paper, which do not use the terms, for a model of fewer layers.
#[test]
fn no_policy_that_was_simulated_is_faster() {
    for target in [Target::Cpu, Target::Cuda] {
        let chooser = Chooser::new(&config(&["model.layers=4"]), target).unwrap();
        let space = &chooser.resident;
        let simulated = all_assignments(4, space.menu.most_entries()).map(|entries| {
            let (cost, peak) = (0, 0);
            let assignment = Assignment {
                entries,
                cost,
                peak,
            };
            let step = chooser.on_paper(&space.policy(&assignment)).unwrap();
            (step.peak.bytes, step.seconds)
        });
        let simulated: Vec<(u64, f64)> = simulated.collect();
        for number in 0..10 {
            let budget = simulated[number * 127 % simulated.len()].0;
            let found = chooser.within(budget).unwrap().unwrap();
            let within = simulated.iter().filter(|(peak, _)| *peak <= budget);
            let seconds = within.map(|(_, seconds)| *seconds);
            let fastest_ms = 1e3 * seconds.fold(f64::INFINITY, f64::min);
            assert!(found.step_ms <= fastest_ms * (1.0 + 1e-9), "{budget}");
        }
    }
}

#[test]
fn more_memory_never_means_more_time_and_presets_are_never_faster() {
    for (config, target) in configurations().into_iter().chain(of_ranks()) {
        let chooser = Chooser::new(&config, target).unwrap();
        let least = chooser.smallest().unwrap().peak;
        let most = chooser.keep_all.peak.bytes;
        let mut last: Option<Choice> = None;
        for step in 0..40 {
            let budget = least + (most - least) * step / 39;
            let choice = chooser.within(budget).unwrap().unwrap();
            assert!(choice.peak_bytes <= budget);
            let presets = chooser.presets.iter();
            for preset in presets.filter(|preset| preset.candidate.peak <= budget) {
                let preset_ms = 1e3 * preset.candidate.seconds;
                let is_faster = preset_ms < choice.step_ms * (1.0 - 1e-9);
                assert!(!is_faster, "{} within {budget}", preset.spec);
            }
            if let Some(last) = last {
                let is_larger = choice.peak_bytes > last.peak_bytes;
                let is_as_good = match is_larger {
                    true => choice.step_ms < last.step_ms,
                    false => (choice.peak_bytes, choice.step_ms) == (last.peak_bytes, last.step_ms),
                };
                assert!(is_as_good, "{budget}: {last:?} {choice:?}");
            }
            last = Some(choice);
        }
        let last = last.unwrap();
        assert!(last.step_ms <= last.keep_all_step_ms * (1.0 + 1e-9));
        let frontier = Frontier::new(&config, target).unwrap().chosen;
        let is_worth = |a: &Choice, b: &Choice| {
            a.peak_bytes < b.peak_bytes && b.step_ms < a.step_ms * (1.0 - 1e-4)
        };
        assert!(frontier.is_sorted_by(is_worth), "{frontier:?}");
    }
}

/// The policy in the configuration has the peak of the choice.
#[test]
fn what_is_written_is_what_was_chosen() {
    for (config, target) in configurations() {
        let chooser = Chooser::new(&config, target).unwrap();
        let (least, most) = (
            chooser.smallest().unwrap().peak,
            chooser.keep_all.peak.bytes,
        );
        let choice = choose(&config, target, (least + most) / 2).unwrap();
        assert!(!choice.layers.is_empty());
        let written = choice.applied_to(&config);
        assert!(!written.chooses());
        let read = written.with(&[]).unwrap();
        assert_eq!(read, written, "the configuration is valid as it is");
        let plan = Plan::new(&Settings::new(&read).unwrap(), target).unwrap();
        assert_eq!(plan.peak_bytes, choice.peak_bytes);
    }
}

#[test]
fn a_budget_that_is_too_small_is_told_the_smallest() {
    let config = config(&[]);
    let smallest = Chooser::new(&config, Target::Cpu)
        .unwrap()
        .smallest()
        .unwrap()
        .peak;
    let refused = choose(&config, Target::Cpu, smallest - 1)
        .unwrap_err()
        .to_string();
    for words in [
        format!("{smallest} bytes"),
        "`parameters`".into(),
        "largest".into(),
    ] {
        assert!(refused.contains(&words), "{words}: {refused}");
    }
    assert_eq!(
        choose(&config, Target::Cpu, smallest).unwrap().peak_bytes,
        smallest
    );
}

/// Without measured times, halving the rate of operations makes a step slower.
#[test]
fn measured_times_count_instead_of_rates() {
    let config = config(&["attention.backend=flash"]);
    let mut chooser = Chooser::new(&config, Target::Cpu).unwrap();
    let step = chooser.paper.step(&chooser.settings).unwrap();
    chooser.paper.rates.flops /= 2.0;
    let slower = chooser.paper.step(&chooser.settings).unwrap();
    assert!(
        slower.seconds > step.seconds,
        "rates count where nothing was measured"
    );
}

/// A profile for the same settings is read. For other settings, the error names the first key that differs.
#[test]
fn a_profile_of_another_model_is_refused() {
    let settings = |set: &[&str]| {
        let chosen = ["recompute.spec=none"];
        Settings::new(&config(&[set, &chosen].concat())).unwrap()
    };
    let run = settings(&["attention.backend=flash"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile.json");
    let read = || costs::read(Some(&file), &run, Target::Cpu);
    let refused = || read().unwrap_err().to_string();
    assert!(refused().contains("trainer profile --json"));
    let profile = |of: &Settings, operations: &str| {
        let of = serde_json::to_string(&MeasuredFor::new(of, Target::Cpu)).unwrap();
        let text = format!(r#"{{"measured_for": {of}, "operations": [{operations}]}}"#);
        std::fs::write(&file, text).unwrap();
    };
    profile(&run, "");
    assert!(refused().contains("no operations"));
    let hour = r#"{"operation": "flash_attention_forward", "sizes": [2, 4, 64, 16], "calls": 2, "ms": 7.2e6}"#;
    profile(&run, hour);
    let measured = read().unwrap();
    assert_eq!(measured.values().copied().collect::<Vec<f64>>(), [3600.0]);
    for (set, differs) in [
        ("model.ffn=96", "model.ffn = 96, and this run has 160"),
        ("model.layers=5", "model.layers = 5, and this run has 6"),
        ("data.seq=32", "data.seq = 32, and this run has 64"),
        ("batch.micro=1", "batch.micro = 1, and this run has 2"),
        (
            "train.dtype=bf16",
            "train.dtype = bf16, and this run has f32",
        ),
    ] {
        profile(&settings(&["attention.backend=flash", set]), hour);
        let said = refused();
        assert!(said.contains(differs), "{said}");
        assert!(said.contains("--set model.ffn=160"), "{said}");
    }
    profile(&settings(&["attention.backend=eager"]), hour);
    assert!(
        refused().contains("attention.backend = eager"),
        "{}",
        refused()
    );
    std::fs::write(&file, format!(r#"{{"operations": [{hour}]}}"#)).unwrap();
    assert!(refused().contains("does not say which model"));
    let preset = Config::default().with(&["data.seq=32".into()]).unwrap();
    let other = costs::read(Some(&file), &Settings::new(&preset).unwrap(), Target::Cpu);
    let said = other.unwrap_err().to_string();
    assert!(
        said.contains("--config tiny --set attention.backend="),
        "{said}"
    );
}

/// Times belong to the kernels that took them. A plan that leaves the kernels to the device takes any.
#[test]
fn a_profile_of_other_kernels_is_refused() {
    use KernelChoice::{Auto, Sm80, Sm90};
    let by = |attention| {
        let set = [
            "attention.backend=flash",
            "train.dtype=bf16",
            "recompute.spec=none",
        ];
        let settings = Settings::new(&config(&set)).unwrap();
        let kernels = PerFamily {
            attention,
            ..settings.kernels
        };
        Settings {
            kernels,
            ..settings
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile.json");
    let of = |settings: &Settings| MeasuredFor::new(settings, Target::Cuda);
    let [sm80, sm90] = [Sm80, Sm90].map(|kind| serde_json::to_value(of(&by(kind))).unwrap());
    let mut of_earlier_version = sm80.clone();
    let fields = of_earlier_version.as_object_mut().unwrap();
    assert_eq!(fields.remove("attention.kernels").unwrap(), "sm80");
    for (measured_for, run, is_taken) in [
        (&sm80, Sm80, true),
        (&sm80, Sm90, false),
        (&sm80, Auto, true),
        (&sm90, Sm80, false),
        (&sm90, Sm90, true),
        (&sm90, Auto, true),
        (&of_earlier_version, Sm80, true),
        (&of_earlier_version, Sm90, false),
        (&of_earlier_version, Auto, true),
    ] {
        let operations = r#"[{"operation": "matmul", "sizes": [1, 1, 1], "calls": 1, "ms": 1.0}]"#;
        let text = format!(r#"{{"measured_for": {measured_for}, "operations": {operations}}}"#);
        std::fs::write(&file, text).unwrap();
        let read = costs::read(Some(&file), &by(run), Target::Cuda);
        let refused = read.err().map(|error| error.to_string());
        assert_eq!(refused.is_none(), is_taken, "{run}: {refused:?}");
        if let Some(refused) = refused {
            let words = format!("and this run has {run}; write one with");
            assert!(refused.contains("attention.kernels = sm"), "{refused}");
            assert!(refused.contains(&words), "{refused}");
            let command = format!("--set attention.kernels={run}");
            assert!(refused.contains(&command), "{refused}");
        }
    }
}

/// If units come and go, the terms are only close to the truth. The choice is planned, and is within its budget.
#[test]
fn a_choice_holds_where_units_come_and_go() {
    let set = [
        "offload.activations=auto",
        "offload.optimizer=pinned",
        "offload.parameters=pinned",
        "offload.gradients=pinned",
        "batch.accum=2",
    ];
    let (config, target) = (config(&set), Target::Cuda);
    let chooser = Chooser::new(&config, target).unwrap();
    let (least, most) = (
        chooser.smallest().unwrap().peak,
        chooser.keep_all.peak.bytes,
    );
    assert!(least < most);
    let mut slower = f64::INFINITY;
    for step in 0..=12 {
        let budget = least + (most - least) * step / 12;
        let choice = chooser.within(budget).unwrap().unwrap();
        let chosen = Settings::new(&choice.applied_to(&config)).unwrap();
        assert!(chosen.homes.weights == memory::Home::Pinned);
        let planned = Plan::new(&chosen, target).unwrap().peak_bytes;
        assert_eq!(choice.peak_bytes, planned);
        assert!(planned <= budget && choice.step_ms <= slower, "{choice:?}");
        slower = choice.step_ms;
    }
}
