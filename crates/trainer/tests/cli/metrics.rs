//! What a run wrote into `metrics.jsonl`.

use crate::workplace::Workplace;
use serde_json::Value;

/// The records of a run, in order.
pub struct Metrics(pub Vec<Value>);

impl Metrics {
    /// Reads `folder/metrics.jsonl`.
    #[track_caller]
    pub fn read(workplace: &Workplace, folder: &str) -> Metrics {
        let text = workplace.text(&format!("{folder}/metrics.jsonl"));
        assert!(text.ends_with('\n'), "the last line is whole");
        let lines = text.lines().map(|line| {
            assert!(line.starts_with(r#"{"kind":""#), "`kind` first: {line}");
            serde_json::from_str(line).unwrap()
        });
        Metrics(lines.collect())
    }

    /// The records of a kind.
    pub fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(move |record| record["kind"] == kind)
    }

    pub fn steps(&self) -> Vec<&Value> {
        self.of_kind("step").collect()
    }

    pub fn losses(&self) -> Vec<f64> {
        let losses = self.steps().into_iter().map(|step| &step["loss"]);
        losses.map(|loss| loss.as_f64().unwrap()).collect()
    }

    /// The `reason` of the last record, which is an `end`.
    #[track_caller]
    pub fn end_reason(&self) -> &str {
        let last = self.0.last().unwrap();
        assert_eq!(last["kind"], "end");
        last["reason"].as_str().unwrap()
    }

    /// The step lines without what depends on the clock.
    pub fn untimed_steps(&self) -> Vec<String> {
        let steps = self.of_kind("step").cloned();
        steps.map(|step| without_timing(step).to_string()).collect()
    }
}

fn without_timing(mut step: Value) -> Value {
    const TIMING: [&str; 3] = ["tokens_per_s", "tflops", "mfu"];
    let fields = step.as_object_mut().unwrap();
    let all = fields.len();
    fields.retain(|name, _| !name.ends_with("_ms") && !TIMING.contains(&name.as_str()));
    assert_eq!(
        all - fields.len(),
        6,
        "step_ms, phase_ms, data_wait_ms and the three rates"
    );
    step
}
