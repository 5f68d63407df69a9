//! `train.freeze`.

use crate::workplace::Workplace;
use serde_json::Value;

const FREEZE: &str = "--set train.freeze=[\"*embed_tokens*\",\"*.layers.0.*\"]";

fn plan(place: &Workplace, flags: &str) -> Value {
    let plan = place.trainer(&format!(
        "plan --json --config small.toml --device cpu {flags}"
    ));
    serde_json::from_str(&plan.succeeds().stdout).unwrap()
}

#[test]
fn the_plan_says_what_it_saves() {
    let place = Workplace::new();
    let [all, some] = ["", FREEZE].map(|flags| plan(&place, flags));
    assert!(all.get("freeze").is_none());
    let bytes = |plan: &Value, name: &str| -> u64 {
        let arenas = plan["arenas"].as_array().unwrap().iter();
        let own = arenas.filter(|arena| (arena["name"] == "parameters") == (name == "parameters"));
        own.map(|arena| arena["bytes"].as_u64().unwrap()).sum()
    };
    assert_eq!(bytes(&all, "parameters"), bytes(&some, "parameters"));
    let saved = bytes(&all, "states") - bytes(&some, "states");
    assert_eq!(some["freeze"]["saved_bytes"], saved);
    let printed = place.trainer(&format!("plan --config small.toml --device cpu {FREEZE}"));
    let printed = printed.succeeds().stdout;
    assert!(
        printed.contains(&format!("({saved} bytes)")) && printed.contains("train.freeze"),
        "{printed}"
    );
}

#[test]
fn patterns_are_checked_before_anything_is_made() {
    let place = Workplace::new();
    for (patterns, words) in [
        ("[\"*nrom*\"]", ["`*nrom*` in train.freeze", "norm.weight`"]),
        ("[\"*\"]", ["train.freeze", "nothing is left to train"]),
    ] {
        for command in ["train --out run", "plan"] {
            let command = format!("{command} --config small.toml --set train.freeze={patterns}");
            place.trainer(&command).fails(2, &words);
            assert!(!place.path("run").exists(), "{command}");
        }
    }
}

/// The tensors of a file whose names begin so.
fn tensors(place: &Workplace, file: &str, beginning: &str) -> Vec<(String, Vec<u8>)> {
    let bytes = std::fs::read(place.path(file)).unwrap();
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let all = all.tensors().into_iter();
    let own = all.filter(|(name, _)| name.starts_with(beginning));
    let mut own: Vec<_> = own
        .map(|(name, tensor)| (name, tensor.data().to_vec()))
        .collect();
    own.sort();
    own
}

#[test]
fn a_resumed_run_keeps_what_is_frozen() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    let run = "train --init-from model --set data.any_tokenizer=true --seq 32 --save-every 2 --dtype f32 --quiet";
    place
        .trainer(&format!(
            "{run} {FREEZE} --steps 4 --save-final final --out whole"
        ))
        .succeeds();
    let (lower, states) = ("model.layers.0.", "optimizer.safetensors");
    let checkpoint = |run: &str| format!("{run}/checkpoints/step-4");
    let of = |folder: &str, file: &str, beginning| {
        tensors(&place, &format!("{folder}/{file}"), beginning)
    };
    let weights = "model.safetensors";
    assert_eq!(of("model", weights, lower).len(), 9);
    assert!(of("model", weights, lower) == of("final", weights, lower));
    assert!(of("model", weights, "model.layers.1.") != of("final", weights, "model.layers.1."));
    assert_eq!(of(&checkpoint("whole"), states, lower).len(), 0);
    assert_eq!(
        of(&checkpoint("whole"), states, "model.layers.1.").len(),
        18
    );
    let resume = "--resume whole/checkpoints/step-2 --steps 4 --quiet";
    place.trainer(&format!("{resume} --out rest")).succeeds();
    for file in [weights, states] {
        assert!(of(&checkpoint("whole"), file, "") == of(&checkpoint("rest"), file, ""));
    }
    let more = "--set train.freeze=[\"*embed_tokens*\",\"*.layers.0.*\",\"*norm*\"]";
    let other = format!("{resume} --out other {more}");
    place
        .trainer(&other)
        .fails(2, &["train.freeze", "--allow-change"]);
    place.trainer(&format!("{other} --allow-change")).succeeds();
    let thawed = format!("{resume} --out thawed --set train.freeze=[]");
    place
        .trainer(&thawed)
        .fails(2, &["train.freeze", "trainer export", "--init-from"]);
    place
        .trainer(&format!("{thawed} --allow-change"))
        .fails(4, &["was frozen in the run that saved it"]);
}
