//! `--offload-parameters`, `--offload-gradients` and `--offload-optimizer` together: the same run in less memory.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

const ELSEWHERE: &str = "--offload-parameters pinned --offload-gradients pinned --offload-optimizer pinned --set offload.slab_mib=1";

/// What a step computed, as it is written.
fn course(metrics: &Metrics, kind: &str, fields: &[&str]) -> Vec<Vec<String>> {
    let of = |record: &Value| fields.iter().map(|name| record[name].to_string()).collect();
    metrics.of_kind(kind).map(of).collect()
}

const STEP: [&str; 4] = ["step", "loss", "grad_norm", "lr"];

#[test]
fn a_model_whose_weights_alone_are_larger_than_the_limit() {
    let place = Workplace::new();
    let settings = "--config small.toml --device cpu --recompute full --set model.layers=12 --set model.hidden=128 \
                    --set model.ffn=384";
    let limit = 8 << 20;
    let limited = format!("{settings} {ELSEWHERE} --memory-limit {limit}");
    let plan = place.trainer(&format!("plan --json {limited}")).succeeds();
    let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
    let weights = 4 * plan["parameters"].as_u64().unwrap();
    assert!(weights > limit, "{weights}");

    place
        .trainer(&format!("{settings} --memory-limit {limit} --out refused"))
        .fails(3, &["CPU out of memory"]);
    place.trainer(&format!("{limited} --out run")).succeeds();
    place
        .trainer(&format!("{settings} --out resident"))
        .succeeds();
    let [run, resident] = ["run", "resident"].map(|out| Metrics::read(&place, out));
    assert_eq!(run.steps().len(), 4);
    for step in run.steps() {
        assert!(step["peak_bytes"].as_u64().unwrap() <= limit, "{step}");
        for key in ["peak_bytes", "host_pinned_bytes", "h2d_bytes", "d2h_bytes"] {
            assert_eq!(step[key], plan[key], "{key}");
        }
    }
    assert!(plan["host_pinned_bytes"].as_u64().unwrap() > 3 * weights);
    assert_eq!(
        course(&run, "step", &STEP),
        course(&resident, "step", &STEP)
    );
}

/// Evaluation, text and checkpoints read weights that are not on the device; a run goes on with them there, and the other way
/// round.
#[test]
fn what_happens_between_steps_and_a_change_on_the_way() {
    let place = Workplace::new();
    let text: Vec<u8> = (0..3331u32).map(|at| (at * at % 97) as u8 + 20).collect();
    place.file("text.txt", text);
    let settings = "--config small.toml --steps 6 --data text.txt --eval-data text.txt --eval-every 2 --set \
                    eval.samples=8 --sample-every 3 --set log.sample_tokens=8 --save-every 3 --dtype bf16 --state-dtype 8bit \
                    --recompute full --quiet";
    let tensors = |checkpoint: &str| {
        ["model", "optimizer"].map(|stem| {
            let path = format!("{checkpoint}/{stem}.safetensors");
            std::fs::read(place.path(&path)).unwrap()
        })
    };
    let runs = [("resident", ""), ("elsewhere", ELSEWHERE)].map(|(out, flags)| {
        place
            .trainer(&format!("{settings} {flags} --out {out}"))
            .succeeds();
        let metrics = Metrics::read(&place, out);
        let evals = course(&metrics, "eval", &["step", "loss"]);
        assert_eq!(evals.len(), 3, "{out}");
        let steps = course(&metrics, "step", &STEP);
        (steps, evals, tensors(&format!("{out}/checkpoints/step-6")))
    });
    assert!(runs[0] == runs[1]);
    for (out, change) in [
        ("resident", ELSEWHERE),
        (
            "elsewhere",
            "--offload-parameters none --offload-gradients none --offload-optimizer none --set offload.slab_mib=64",
        ),
    ] {
        let rest = format!("{out}-rest");
        place
            .trainer(&format!(
                "--resume {out}/checkpoints/step-3 --out {rest} --quiet {change}"
            ))
            .succeeds();
        let metrics = Metrics::read(&place, &rest);
        assert_eq!(course(&metrics, "step", &STEP), runs[0].0[3..], "{out}");
        assert!(
            tensors(&format!("{rest}/checkpoints/step-6")) == runs[0].2,
            "{out}"
        );
    }
}
