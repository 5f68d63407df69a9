//! Sizes and numbers out of their range: exit code 2, naming the key and the argument.

use crate::workplace::Workplace;

#[track_caller]
fn refused(arguments: &str, words: &[&str]) {
    let place = Workplace::new();
    for command in ["train", "plan"] {
        place
            .trainer(&format!("{command} {arguments}"))
            .fails(2, words);
    }
}

#[test]
fn zero_and_negative_sizes() {
    for (flag, key) in [
        ("--steps", "train.steps"),
        ("--micro-batch", "batch.micro"),
        ("--accum", "batch.accum"),
        ("--seq", "data.seq"),
        ("--threads", "train.threads"),
    ] {
        for value in ["0", "-1", "1.5", "x"] {
            let place = format!("in {flag} {value}");
            refused(
                &format!("{flag} {value}"),
                &[
                    &format!("`{key}` is "),
                    &place,
                    "a whole number of at least 1",
                ],
            );
        }
    }
    for key in [
        "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab",
    ] {
        for value in ["0", "-4"] {
            let setting = format!("--set model.{key}={value}");
            refused(
                &setting,
                &[&format!("`model.{key}` is {value}"), "at least 1"],
            );
        }
    }
    refused("--seed -1", &["`train.seed` is -1", "0 or more"]);
    refused("--memory-limit 0", &["`memory.limit` is 0", "above 0"]);
    refused("--memory-limit -5", &["`memory.limit` is -5", "above 0"]);
    refused("--dump-gradients 0", &["--dump-gradients", "0"]);
    refused(
        "--set memory.head_chunk=0",
        &["`memory.head_chunk` is 0", "at least 1"],
    );
    refused("--set log.every=0", &["`log.every` is 0", "at least 1"]);
}

/// cuBLASLt counts the elements of a result in 32 bits; a short batch has a short chunk, whatever is set.
#[test]
fn logits_beyond_one_product() {
    let model = "--config qwen2.5-0.5b --set memory.head_chunk";
    refused(
        &format!("{model}=14135 --micro-batch 8 --seq 4096"),
        &[
            "14135 tokens of 151936 logits",
            "memory.head_chunk at most 14134",
        ],
    );
    refused(
        "--set model.vocab=4294967296",
        &["model.vocab is 4294967296", "a smaller model.vocab"],
    );
    let place = Workplace::new();
    for fits in [
        "14134 --micro-batch 8 --seq 4096",
        "14135 --micro-batch 1 --seq 512",
    ] {
        place
            .trainer(&format!("plan --json {model}={fits}"))
            .succeeds();
    }
}

#[test]
fn learning_rates_that_are_no_rates() {
    for value in ["nan", "-1", "-0.001", "inf", "fast"] {
        refused(
            &format!("--lr {value}"),
            &[
                "`lr.peak` is",
                &format!("in --lr {value}"),
                "a finite number, 0 or more",
            ],
        );
    }
    refused("--set optim.beta1=1", &["`optim.beta1` is 1", "below 1"]);
    refused(
        "--set optim.clip_norm=-1",
        &["`optim.clip_norm` is -1", "above 0"],
    );
    refused("--set lr.min_ratio=2", &["`lr.min_ratio` is 2", "0 to 1"]);
}

#[test]
fn sizes_beyond_every_machine() {
    let beyond = ["larger than any machine holds"];
    refused("--seq 99999999999999", &beyond);
    refused("--micro-batch 9223372036854775807", &beyond);
    refused("--set model.hidden=1152921504606846976", &beyond);
    refused(
        "--steps 99999999999999999999",
        &["train.steps", "whole number"],
    );
}
