//! Ranks that share sequences: any number of groups of them, by any engine, come to the same bits.

use crate::metrics::Metrics;
use crate::ranks::job::{MICRO_BATCHES, Run, command, mpich, open_mpi, place};
use crate::workplace::outcome;

/// A number as pages have it.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let parts = digits.as_bytes().rchunks(3).rev();
    let parts: Vec<_> = parts
        .map(|part| std::str::from_utf8(part).unwrap())
        .collect();
    parts.join(",")
}

#[test]
fn groups_give_the_same_bits() {
    let place = place();
    let train = |ranks: usize, more: &str, out: &str| {
        let launcher = match out {
            "mpich" => mpich(ranks),
            _ => open_mpi(ranks),
        };
        let accum = MICRO_BATCHES * 2 / ranks;
        let arguments =
            format!("{more} --cp 2 --accum {accum} --quiet --out {out} --save-final {out}/model");
        outcome(command(&place, launcher, &arguments), &arguments).succeeds();
        let run = Run::read(&place, out, ranks);
        for (rank, plan) in run.plans.iter().enumerate() {
            for name in ["peak_bytes", "sent_bytes"] {
                let planned = plan[name].as_u64().unwrap();
                assert!(
                    run.field(rank, name)
                        .iter()
                        .all(|measured| *measured == planned),
                    "{out}: {name}"
                );
            }
            assert_eq!(plan["context"], 2);
        }
        let report = place
            .trainer(&format!("report {out} --text"))
            .succeeds()
            .stdout;
        for (rank, plan) in run.plans.iter().enumerate() {
            let name = format!("{rank} (group {}, part {} of 2)", rank / 2, rank % 2);
            let row = report
                .split(&name)
                .nth(1)
                .and_then(|row| row.lines().next());
            let cells: Vec<&str> = row.unwrap().split_whitespace().collect();
            let [peak, sent] =
                ["peak_bytes", "sent_bytes"].map(|name| plan[name].as_u64().unwrap());
            let (peak, sent) = (grouped(peak), grouped(sent));
            assert_eq!(cells[1..], [peak.clone(), peak, sent], "{report}");
        }
        run
    };
    for model in ["llama", "gpt2"] {
        let one = train(
            2,
            &format!("--config {model}.toml --zero 1"),
            &format!("{model}-2"),
        );
        let more = format!("--config {model}.toml --zero 3 --recompute full");
        let two = train(4, &more, &format!("{model}-4"));
        assert!(one.bits() == two.bits(), "{model}");
    }
    let [one, other] = ["llama-2", "mpich"].map(|out| match out {
        "mpich" => train(2, "--config llama.toml --zero 2", out),
        out => Run::read(&place, out, 2),
    });
    assert!(one.bits() == other.bits());
}

/// At four parts one process, two ranks and four come to the same bits, and go on from each other's checkpoints.
#[test]
fn parts_have_the_same_bits_on_any_number_of_ranks() {
    let place = place();
    let llama = "--config llama.toml --set model.heads=4 --set model.head_dim=16";
    let gpt2 = "--config gpt2.toml --set model.heads=4";
    let train = |ranks: usize, more: &str, out: &str| {
        let arguments = format!(
            "{more} --context-parts 4 --cp {ranks} --accum {MICRO_BATCHES} --quiet --out {out} --save-final {out}/model"
        );
        let outcome = match ranks {
            1 => place.trainer(&arguments),
            _ => outcome(command(&place, open_mpi(ranks), &arguments), &arguments),
        };
        outcome.succeeds();
        let run = Run::read(&place, out, ranks);
        for (rank, plan) in run.plans.iter().enumerate() {
            for name in ["peak_bytes", "sent_bytes"] {
                let planned = plan[name].as_u64().unwrap();
                let mut measured = run.field(rank, name).into_iter();
                assert!(
                    measured.all(|measured| measured == planned),
                    "{out}: {name}"
                );
            }
        }
        run
    };
    for (model, config) in [("llama", llama), ("gpt2", gpt2)] {
        let of = |ranks, more: &str| {
            let out = format!("{model}-{ranks}");
            train(ranks, &format!("{config} {more}"), &out)
        };
        let (four, two) = (of(4, "--zero 1"), of(2, "--zero 3 --recompute full"));
        let one = of(1, "");
        assert!(four.bits() == two.bits(), "{model}");
        assert!(four.bits() == one.bits(), "{model}");
    }
    let begun = format!("{llama} --zero 2 --steps 2 --save-every 2");
    drop(train(2, &begun, "begun"));
    let resumed = train(1, &format!("{llama} --resume begun"), "resumed");
    assert!(resumed.weights == Run::read(&place, "llama-4", 4).weights);
    place
        .trainer("eval begun --data data.safetensors")
        .succeeds();
    let others = format!(
        "{llama} --context-parts 2 --accum {MICRO_BATCHES} --quiet --resume begun --out others"
    );
    let change = "parallel.context_parts: 4 before, 2 now";
    let refused = place.trainer(&others);
    refused.fails(2, &[change, "--context-parts N"]);
}

/// A step of packed documents, and an evaluation whose losses are those of all parts.
#[test]
fn documents_and_evaluations() {
    let place = place();
    let document = |words: usize| format!("{{\"text\": \"{}\"}}\n", "abc ".repeat(words));
    let documents = (0..60).map(|number| document(1 + number * 7 % 5));
    place.file("documents.jsonl", documents.collect::<String>());
    let prepare = "prepare documents.jsonl --tokenizer bytes --out tokens";
    place.trainer(prepare).succeeds();
    let run = |ranks: usize, more: &str, out: &str| {
        let arguments = format!(
            "--config llama.toml --data tokens --packing first-fit --set data.seq=24 --set model.vocab=257 --quiet --accum 2 \
             --eval-data tokens --eval-every 3 --set eval.samples=8 --zero 1 {more} --out {out}"
        );
        outcome(command(&place, open_mpi(ranks), &arguments), &arguments).succeeds();
        Metrics::read(&place, out)
    };
    let (one, shared) = (run(1, "", "one"), run(2, "--cp 2", "shared"));
    let far = |name: &str, one: &serde_json::Value, other: &serde_json::Value| {
        let [one, other] = [one, other].map(|record| record[name].as_f64().unwrap());
        (one / other - 1.0).abs()
    };
    for kind in ["step", "eval"] {
        let records = one.of_kind(kind).zip(shared.of_kind(kind));
        let records: Vec<_> = records.collect();
        assert!(!records.is_empty(), "{kind}");
        for (one, other) in records {
            assert!(far("loss", one, other) < 1e-5, "{one} {other}");
            assert_eq!(one["targets"], other["targets"]);
        }
    }
    for eval in shared.of_kind("eval") {
        assert_eq!(eval["peak_bytes"], eval["planned_peak_bytes"], "{eval}");
    }
}
