//! The kinds of attention, by their flag.

use crate::metrics::Metrics;
use crate::workplace::Workplace;

#[test]
fn flash_and_eager_nearly_agree_and_each_agrees_with_itself_in_every_mode() {
    let place = Workplace::new();
    let losses = |attention: &str, recompute: &str| {
        let out = format!("{attention}-{recompute}");
        let flags = format!("--attention {attention} --recompute {recompute} --out {out}");
        place
            .trainer(&format!("--config small.toml --seq 100 {flags}"))
            .succeeds();
        let metrics = Metrics::read(&place, &out);
        for step in metrics.steps() {
            assert_eq!(step["peak_bytes"], step["planned_peak_bytes"], "{out}");
        }
        (metrics.losses(), metrics.steps()[0]["peak_bytes"].as_u64())
    };
    let kinds = ["eager", "flash"].map(|attention| {
        let none = losses(attention, "none");
        for recompute in ["core_attn", "full"] {
            let (losses, peak) = losses(attention, recompute);
            assert_eq!(losses, none.0, "{attention} {recompute}");
            assert!(peak < none.1, "{attention} {recompute}");
        }
        none
    });
    assert!(kinds[1].1 < kinds[0].1, "flash stores no probabilities");
    for (eager, flash) in kinds[0].0.iter().zip(&kinds[1].0) {
        assert!((eager / flash - 1.0).abs() < 1e-5, "{eager} {flash}");
    }
}

/// Trains a step, whose attention is said in one line that has these words.
#[track_caller]
fn says_once(place: &Workplace, run: &str, words: &str) {
    let outcome = place
        .trainer(&format!("--config small.toml --steps 1 {run}"))
        .succeeds();
    let lines = outcome.stderr.lines();
    let said: Vec<&str> = lines.filter(|line| line.contains("attention is")).collect();
    let is_said = matches!(said.as_slice(), [line] if line.ends_with(words));
    assert!(is_said, "{outcome:?}");
}

/// `auto` says what it takes, and the run directory repeats it.
#[test]
fn auto_takes_flash_from_256_tokens_on() {
    let place = Workplace::new();
    for (seq, kind) in [(255, "eager"), (256, "flash")] {
        let words = format!(
            "attention is {kind}: auto takes flash from 256 tokens on, and these sequences have {seq}"
        );
        says_once(&place, &format!("--seq {seq} --out {kind}"), &words);
        let config = place.text(&format!("{kind}/config.toml"));
        assert!(
            config.contains(&format!("backend = \"{kind}\"")),
            "{config}"
        );
        let plan = place.text(&format!("{kind}/plan.json"));
        assert!(
            plan.contains(&format!("\"attention\": \"{kind}\"")),
            "{plan}"
        );
    }
}

/// Where documents are packed, the length of sequences is not why.
#[test]
fn auto_takes_flash_for_packed_documents_of_any_length() {
    let place = Workplace::new();
    let documents: String = (1..40)
        .map(|words| format!("{{\"text\": \"{}\"}}\n", "word ".repeat(words % 7 + 1)))
        .collect();
    place.file("documents.jsonl", documents);
    let prepare = "prepare documents.jsonl --out data --tokenizer bytes";
    place.trainer(prepare).succeeds();
    let words = "attention is flash: data.packing is first-fit, and eager attention cannot keep documents from seeing each other";
    for seq in [64, 256] {
        let shape = format!("--seq {seq} --set model.vocab=257 --data data --packing first-fit");
        says_once(&place, &format!("{shape} --out run-{seq}"), words);
    }
}

#[test]
fn the_plan_says_in_words_what_core_attn_still_saves() {
    let place = Workplace::new();
    let outcome = place
        .trainer("plan --config llama-3.2-1b --attention flash --recompute core_attn")
        .succeeds();
    let words = ["`core_attn` drops the log-sum-exp alone", "(0.", " %)"];
    for word in words {
        assert!(outcome.stdout.contains(word), "{outcome:?}");
    }
    let eager = place
        .trainer("plan --config llama-3.2-1b --attention eager")
        .succeeds();
    assert!(!eager.stdout.contains("log-sum-exp"), "{eager:?}");
}
