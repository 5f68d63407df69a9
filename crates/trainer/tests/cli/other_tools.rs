//! The scripts of the guide to reading a run that load its metrics into other tools.

use crate::workplace::Workplace;
use serde_json::Value;
use std::process::Command;

const GUIDE: &str = include_str!("../../../../docs/guides/report.md");

/// Stand-ins for the libraries, which print what they are given.
const WANDB: &str = "
import json
class Run:
    def log(self, numbers, step): print(json.dumps([step, numbers]))
    def finish(self): print('\"finished\"')
def init(project, name, config, mode):
    assert mode == 'offline' and config['kind'] == 'run', config
    return Run()
";
const MLFLOW: &str = "
import contextlib, json
@contextlib.contextmanager
def start_run(run_name):
    yield
    print('\"finished\"')
def log_metrics(numbers, step): print(json.dumps([step, numbers]))
";

/// What a script says of the run in `run`.
fn said(place: &Workplace, script: &str) -> Vec<Value> {
    place.file("script.py", script);
    let mut python = Command::new("python3");
    let output = python
        .args(["script.py", "run"])
        .current_dir(place.path(""));
    let output = output.output().expect("python3 is installed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let lines = std::str::from_utf8(&output.stdout).unwrap().lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn scripts_of_the_guide_load_every_step_and_evaluation() {
    let place = Workplace::new();
    place.file("text.txt", "Some words to train on. ".repeat(200));
    let arguments =
        "--config small.toml --device cpu --eval-data text.txt --eval-every 2 --out run";
    place.trainer(arguments).succeeds();
    place.file("wandb.py", WANDB);
    place.file("mlflow.py", MLFLOW);
    let blocks = GUIDE.split("```python\n").skip(1);
    let scripts: Vec<&str> = blocks
        .map(|block| block.split("```").next().unwrap())
        .collect();
    assert_eq!(scripts.len(), 2);
    let text = place.text("run/metrics.jsonl");
    let records: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let logged = |kind: &'static str| {
        let records = records.iter().filter(move |record| record["kind"] == kind);
        records.map(|record| (record["step"].clone(), record["loss"].clone()))
    };
    assert_eq!((logged("step").count(), logged("eval").count()), (4, 2));
    for script in scripts {
        let mut said = said(&place, script);
        assert_eq!(said.pop(), Some("finished".into()));
        assert_eq!(said.len(), 6, "{said:?}");
        for kind in ["step", "eval"] {
            for (step, loss) in logged(kind) {
                let is_it = |said: &&Value| said[1][format!("{kind}/loss")] == loss;
                let found = said.iter().find(is_it).expect("every loss is logged");
                assert_eq!(found[0], step);
            }
        }
    }
}
