//! What a run saves is planned to the byte, and refused where the disk has no room for it.

use crate::workplace::{Workplace, until};
use serde_json::Value;
use std::process::Stdio;

/// Bytes of the files of tensors in a folder.
fn tensor_bytes(place: &Workplace, folder: &str) -> u64 {
    let names = place.names(folder).into_iter();
    let tensors = names.filter(|name| name.contains(".safetensors"));
    let bytes = |name| {
        std::fs::metadata(place.path(&format!("{folder}/{name}")))
            .unwrap()
            .len()
    };
    tensors.map(bytes).sum()
}

#[test]
fn a_checkpoint_is_planned_to_the_byte() {
    let place = Workplace::new();
    let ways = [
        "",
        "--dtype bf16 --state-dtype 8bit --set optim.f32_states=[]",
        "--dtype bf16 --master bf16-split --state-dtype bf16 --set model.tie_embeddings=true",
        "--dtype bf16 --master none --offload-optimizer pinned",
        "--offload-optimizer states --set model.qk_norm=true",
        "--set optim.release=backward --set optim.clip_norm=inf --accum 1",
    ];
    let mut sizes = Vec::new();
    for (number, way) in ways.into_iter().enumerate() {
        let run = format!("--config plain.toml --device cpu --steps 1 {way}");
        let plan = place.trainer(&format!("plan --json {run}")).succeeds();
        let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
        let out = format!("run-{number}");
        place
            .trainer(&format!(
                "{run} --quiet --out {out} --save-final {out}/model"
            ))
            .succeeds();
        let measured = [format!("{out}/checkpoints/step-1"), format!("{out}/model")];
        let measured = measured.map(|folder| tensor_bytes(&place, &folder));
        let planned = ["checkpoint_bytes", "model_bytes"].map(|name| plan[name].as_u64().unwrap());
        assert_eq!(planned, measured, "{way}");
        sizes.push(planned);
    }
    let all = sizes.len();
    sizes.sort_unstable();
    sizes.dedup();
    assert!(sizes.len() >= all - 1, "the ways differ: {sizes:?}");
    let plan = place.trainer("plan --config plain.toml").succeeds();
    assert!(plan.stdout.contains(" a checkpoint, "), "{plan:?}");
}

/// Checkpoints of a billion steps are more than any disk has.
#[test]
fn a_run_whose_checkpoints_have_no_room_is_refused_before_it_begins() {
    let place = Workplace::new();
    let run = "--config plain.toml --steps 1000000000 --save-every 1 --quiet --out run";
    let words = [
        "the disk has no room for 1000000000 checkpoints of",
        "in run",
        "free",
        "--keep-last 1",
        "--force",
    ];
    place.trainer(run).fails(3, &words);
    assert!(!place.path("run").exists(), "nothing was written");
    for more in ["--keep-last 2", "--force"] {
        let mut child = place.command(&format!("{run} {more}"));
        let mut child = child
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        until(&mut child, || place.path("run/checkpoints/step-2").exists());
        child.kill().unwrap();
        child.wait().unwrap();
        std::fs::remove_dir_all(place.path("run")).unwrap();
    }
}

#[test]
fn a_model_that_has_no_room_is_not_begun() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --set model.ffn=1000000000000 --out model")
        .fails(
            3,
            &["no room for a model of 698 TiB in model", "free", "--force"],
        );
    assert!(!place.path("model").exists());
}
