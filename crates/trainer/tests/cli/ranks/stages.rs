//! The same bits at every stage, bucket size, number of ranks, recompute mode and place of states; and memory and traffic as
//! planned, on every rank.

use crate::ranks::job::{MICRO_BATCHES, Run, STEPS, place, train, train_alone};
use crate::workplace::Workplace;
use std::collections::{BTreeMap, BTreeSet};

/// One way to train.
#[derive(Clone, Copy, Debug)]
struct Way {
    ranks: usize,
    zero: usize,
    bucket: &'static str,
    recompute: &'static str,
    form: &'static str,
    states: &'static str,
    activations: &'static str,
    model: &'static str,
    more: &'static str,
}

const SMALL: &str = "8KiB";
const LARGE: &str = "1MiB";
const F32: &str = "";
const BITS_8: &str = "--state-dtype 8bit";
const SPLIT: &str = "--dtype bf16 --master bf16-split";
const OFF: &str = "--overlap-grad-reduce=false --overlap-param-gather=false";
const KEEP: &str = "--reshard-after-forward=false";
const HOST: &str = "--offload-parameters pinned";

/// Every two values of any two columns meet in a row; but for activations, which are not both recomputed and offloaded.
const WAYS: [Way; 18] = [
    way(
        (1, 0),
        (SMALL, "none"),
        (F32, "none"),
        ("mlp_act", "gpt2"),
        "",
    ),
    way(
        (1, 1),
        (LARGE, "core_attn"),
        (F32, "pinned"),
        ("none", "gpt2"),
        "",
    ),
    way(
        (1, 2),
        (SMALL, "core_attn"),
        (SPLIT, "none"),
        ("none", "llama"),
        OFF,
    ),
    way(
        (1, 3),
        (LARGE, "full"),
        (F32, "states"),
        ("none", "llama"),
        "",
    ),
    way(
        (1, 3),
        (SMALL, "core_attn"),
        (BITS_8, "states"),
        ("mlp_act", "gpt2"),
        "",
    ),
    way(
        (2, 0),
        (SMALL, "full"),
        (SPLIT, "pinned"),
        ("none", "llama"),
        "",
    ),
    way(
        (2, 0),
        (SMALL, "core_attn"),
        (SPLIT, "states"),
        ("mlp_act", "gpt2"),
        OFF,
    ),
    way(
        (2, 1),
        (SMALL, "full"),
        (BITS_8, "none"),
        ("none", "llama"),
        OFF,
    ),
    way(
        (2, 2),
        (LARGE, "core_attn"),
        (BITS_8, "none"),
        ("none", "gpt2"),
        "",
    ),
    way(
        (2, 2),
        (SMALL, "none"),
        (F32, "states"),
        ("mlp_act", "gpt2"),
        OFF,
    ),
    way(
        (2, 3),
        (LARGE, "none"),
        (BITS_8, "pinned"),
        ("none", "gpt2"),
        OFF,
    ),
    way(
        (2, 3),
        (SMALL, "full"),
        (F32, "none"),
        ("none", "llama"),
        HOST,
    ),
    way(
        (4, 0),
        (LARGE, "none"),
        (BITS_8, "pinned"),
        ("mlp_act", "llama"),
        "",
    ),
    way(
        (4, 1),
        (SMALL, "none"),
        (SPLIT, "states"),
        ("mlp_act", "gpt2"),
        "",
    ),
    way(
        (4, 2),
        (SMALL, "full"),
        (F32, "pinned"),
        ("none", "gpt2"),
        HOST,
    ),
    way(
        (4, 3),
        (LARGE, "core_attn"),
        (SPLIT, "none"),
        ("none", "llama"),
        "",
    ),
    way(
        (4, 3),
        (SMALL, "none"),
        (F32, "none"),
        ("none", "llama"),
        KEEP,
    ),
    way(
        (4, 3),
        (SMALL, "full"),
        (SPLIT, "pinned"),
        ("none", "gpt2"),
        HOST,
    ),
];

const fn way(
    (ranks, zero): (usize, usize),
    (bucket, recompute): (&'static str, &'static str),
    (form, states): (&'static str, &'static str),
    (activations, model): (&'static str, &'static str),
    more: &'static str,
) -> Way {
    Way {
        ranks,
        zero,
        bucket,
        recompute,
        form,
        states,
        activations,
        model,
        more,
    }
}

impl Way {
    fn arguments(self) -> String {
        let Way {
            zero,
            bucket,
            recompute,
            form,
            states,
            activations,
            model,
            more,
            ..
        } = self;
        format!(
            "--config {model}.toml --zero {zero} --bucket-size {bucket} --recompute {recompute} --offload-optimizer {states} \
             --offload-activations {activations} {form} {more}"
        )
    }

    /// What the bits depend on.
    fn bits(self) -> String {
        format!("--config {}.toml --zero 0 {}", self.model, self.form)
    }

    /// Column and value.
    fn values(self) -> [(&'static str, String); 8] {
        [
            ("ranks", self.ranks.to_string()),
            ("zero", self.zero.to_string()),
            ("bucket", self.bucket.into()),
            ("recompute", self.recompute.into()),
            ("form", self.form.into()),
            ("states", self.states.into()),
            ("activations", self.activations.into()),
            ("model", self.model.into()),
        ]
    }
}

#[test]
fn every_two_values_meet() {
    let mut of_column: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut met = BTreeSet::new();
    for way in WAYS {
        let values = way.values();
        for (column, value) in &values {
            of_column.entry(column).or_default().insert(value.clone());
        }
        for a in &values {
            met.extend(values.iter().map(|b| (a.clone(), b.clone())));
        }
    }
    assert_eq!(
        of_column.values().map(BTreeSet::len).collect::<Vec<_>>(),
        [2, 2, 3, 2, 3, 3, 3, 4]
    );
    for (a, values) in &of_column {
        for (b, others) in of_column.iter().filter(|(b, _)| a != *b) {
            for (value, other) in values
                .iter()
                .flat_map(|value| others.iter().map(move |other| (value, other)))
            {
                let is_both = [value, other].contains(&&"full".to_owned())
                    && [value, other].contains(&&"mlp_act".to_owned());
                let pair = ((*a, value.clone()), (*b, other.clone()));
                assert!(is_both || met.contains(&pair), "{pair:?}");
            }
        }
    }
}

/// Fields of a step, and of its plan.
const MEASURED: [(&str, &str); 5] = [
    ("peak_bytes", "peak_bytes"),
    ("planned_peak_bytes", "peak_bytes"),
    ("slab_bytes", "slab_bytes"),
    ("host_pinned_bytes", "host_pinned_bytes"),
    ("sent_bytes", "sent_bytes"),
];

/// Leaves a run, whose memory and traffic are as planned on every rank, and which is divided.
fn as_planned(place: &Workplace, way: Way, out: &str) -> Run {
    let run = train(place, way.ranks, &way.arguments(), out);
    for (rank, plan) in run.plans.iter().enumerate() {
        for (measured, planned) in MEASURED {
            let planned = plan[planned]
                .as_u64()
                .unwrap_or_else(|| panic!("no {planned} in {plan}"));
            assert_eq!(
                run.field(rank, measured),
                [planned; STEPS],
                "{measured} of rank {rank}, {way:?}"
            );
        }
    }
    let sum = |step: usize| {
        (0..way.ranks)
            .map(|rank| run.field(rank, "tokens")[step])
            .sum::<u64>()
    };
    let all: Vec<u64> = run
        .metrics
        .steps()
        .iter()
        .map(|step| step["tokens"].as_u64().unwrap())
        .collect();
    assert_eq!((0..STEPS).map(sum).collect::<Vec<_>>(), all, "{way:?}");
    run
}

fn ways_of(model: &str, form: &str) {
    let place = place();
    let ways: Vec<Way> = WAYS
        .into_iter()
        .filter(|way| (way.model, way.form) == (model, form))
        .collect();
    let alone = train_alone(&place, &ways[0].bits(), "alone");
    let mut peaks = BTreeSet::new();
    for (index, way) in ways.into_iter().enumerate() {
        let run = as_planned(&place, way, &format!("run-{index}"));
        assert!(
            run.bits() == alone.bits(),
            "{way:?}: {:?} and {:?}",
            run.bits().0,
            alone.bits().0
        );
        assert_eq!(run.field(0, "sent_bytes")[0] > 0, way.ranks > 1, "{way:?}");
        peaks.insert(run.field(0, "peak_bytes")[0]);
    }
    assert!(peaks.len() > 1, "ways differ in what they take: {peaks:?}");
}

#[test]
fn llama_in_f32() {
    ways_of("llama", F32);
}

#[test]
fn llama_with_8_bit_states() {
    ways_of("llama", BITS_8);
}

#[test]
fn llama_in_bf16_with_remainders() {
    ways_of("llama", SPLIT);
}

#[test]
fn gpt2_in_f32() {
    ways_of("gpt2", F32);
}

#[test]
fn gpt2_with_8_bit_states() {
    ways_of("gpt2", BITS_8);
}

#[test]
fn gpt2_in_bf16_with_remainders() {
    ways_of("gpt2", SPLIT);
}

/// `trainer plan` says of a rank what it finds itself: of each another thing, where what they hold does not divide evenly.
#[test]
fn a_plan_for_a_rank_is_that_ranks() {
    let place = place();
    let way = "--config llama.toml --zero 2 --state-dtype 8bit --accum 1";
    let run = train(
        &place,
        4,
        "--config llama.toml --zero 2 --state-dtype 8bit",
        "run",
    );
    let mut peaks = BTreeSet::new();
    for (rank, own) in run.plans.iter().enumerate() {
        let planned = place
            .trainer(&format!("plan {way} --ranks 4 --rank {rank} --json"))
            .succeeds();
        let planned: serde_json::Value = serde_json::from_str(&planned.stdout).unwrap();
        for (_, name) in MEASURED {
            assert_eq!(planned[name], own[name], "{name} of rank {rank}");
        }
        peaks.insert(planned["persistent_bytes"].as_u64().unwrap());
    }
    assert!(peaks.len() > 1, "{peaks:?}");
}

/// Each stage divides more: persistent bytes fall, and each rank does its part of a step.
#[test]
fn stages_divide_what_they_say() {
    let place = place();
    let mut before = u64::MAX;
    for zero in 0..4 {
        let arguments =
            format!("--config llama.toml --zero {zero} --recompute full --bucket-size 8KiB");
        let run = train(&place, 2, &arguments, &format!("stage-{zero}"));
        let persistent = run.plans[0]["persistent_bytes"].as_u64().unwrap();
        assert!(
            persistent < before,
            "stage {zero} has {persistent} bytes, the one before {before}"
        );
        before = persistent;
        for rank in 0..2 {
            let step = run.ranks[rank].steps()[0].clone();
            let replays: Vec<u64> = step["replayed"]
                .as_object()
                .unwrap()
                .values()
                .map(|count| count.as_u64().unwrap())
                .collect();
            let blocks_of_a_rank = (2 * MICRO_BATCHES / 2) as u64;
            assert!(replays.iter().any(|count| *count > 0), "{step}");
            assert!(
                replays.iter().all(|count| *count <= blocks_of_a_rank),
                "{step}"
            );
        }
    }
}
