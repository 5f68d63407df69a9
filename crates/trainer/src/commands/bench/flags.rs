//! Refuses flags of `train` that are not for `bench`, and those that say something else than the matrix.

use super::matrix::{BenchMatrix, BenchStrategy};
use crate::args::RunArgs;
use crate::failure::{Failure, Result};
use settings::Given;
use settings::load::Override;

/// Keys of what happens between steps, which bench leaves out, and sections of such keys.
const BETWEEN_STEPS: [&str; 8] = [
    "eval",
    "checkpoint",
    "log.every",
    "log.sample_every",
    "log.sample_prompt",
    "log.sample_tokens",
    "log.tensorboard",
    "log.trace",
];

const LENGTH: &str = "says how long a run is, and bench makes as many steps as the matrix's `warmup` and `steps` say, or --steps N; \
                      leave it out";

/// Refuses flags about one run: what it writes, and what it goes on with.
///
/// # Errors
/// For the first such flag, with what to do instead.
pub(super) fn refuse_of_one_run(run: &RunArgs) -> Result {
    if run.output.trace.is_some() {
        return Err(Failure::Usage(
            "a traced run waits for every operation, so bench does not trace; use `trainer train --trace`".into(),
        ));
    }
    if let Some(resumed) = &run.resume.resume {
        return Err(Failure::Usage(format!(
            "--resume {} goes on with one run, and bench makes runs of its own: give that run's settings with --config \
             RUN/config.toml, and its weights with --init-from RUN/checkpoints/step-N (adapters with --lora-from)",
            resumed.display()
        )));
    }
    let output = &run.output;
    let written = [
        ("--out", output.out.is_some()),
        ("--save-final", output.save_final.is_some()),
        ("--dump-gradients", output.dump_gradients.is_some()),
    ];
    match written.iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Failure::Usage(format!(
            "{flag} is for a single run: bench makes many, and keeps none; leave it out"
        ))),
        None => Ok(()),
    }
}

/// Refuses settings of the command line or the matrix that no strategy could heed.
///
/// # Errors
/// For the first such setting.
pub(super) fn refuse_unheeded(
    said: &[Override],
    matrix: &BenchMatrix,
    strategies: &[BenchStrategy],
    plans_only: bool,
) -> Result {
    let unheeded = |place: &str, why: Option<&str>| match why {
        Some(why) => Err(Failure::Usage(format!("`{place}` {why}"))),
        None => Ok(()),
    };
    for setting in said {
        let is_forced = plans_only && overlap(&setting.key, "memory.force");
        let forced = is_forced.then_some(
            "tries a run whose plan does not fit, and --plan-only makes no run; leave one of the two out",
        );
        unheeded(&setting.place, forced.or(not_of_a_step(&setting.key)))?;
    }
    let sets = strategies.iter().flat_map(|strategy| &strategy.set);
    for set in matrix.set.iter().chain(sets) {
        let key = Override::from_set(set)?.key;
        let steps = overlap(&key, "train.steps").then_some(LENGTH);
        unheeded(set, steps.or(not_of_a_step(&key)))?;
    }
    Ok(())
}

/// Why a key has no effect on the steps that bench makes, if so.
fn not_of_a_step(key: &str) -> Option<&'static str> {
    if overlap(key, "train.epochs") {
        return Some(LENGTH);
    }
    let is_between = BETWEEN_STEPS.iter().any(|between| overlap(key, between));
    is_between.then_some(
        "is about what happens between steps, and bench plans and measures steps alone; leave it out",
    )
}

/// Refuses flags that say something else than a strategy of the matrix, which would go unheeded there.
///
/// # Errors
/// For the first such flag, naming both.
pub(super) fn refuse_contradictions(
    run: &RunArgs,
    given: &Given,
    said: &[Override],
    strategies: &[BenchStrategy],
) -> Result {
    for strategy in strategies {
        let contradicts = |flag: String, what: String| {
            Err(Failure::Usage(format!(
                "`{flag}` and the matrix contradict each other: its strategy `{}` has {what}; leave the flag out, or take a matrix \
                 without it (--matrix FILE)",
                strategy.name
            )))
        };
        if let Some(model) = &strategy.config {
            let weights = &run.weights;
            let folders = [
                ("--init-from", &weights.init_from),
                ("--lora-from", &weights.lora_from),
            ];
            let folders = folders
                .map(|(flag, folder)| Some(format!("{flag} {}", folder.as_ref()?.display())));
            let config = given.config.as_ref().filter(|config| *config != model);
            let config = config.map(|config| format!("--config {config}"));
            if let Some(flag) = folders.into_iter().chain([config]).flatten().next() {
                return contradicts(
                    flag,
                    format!("a model of its own, `{model}` (axis `model`)"),
                );
            }
        }
        if let (Some(rank), Some(ranks)) = (given.rank, strategy.ranks)
            && rank.of != ranks
        {
            return contradicts(format!("--ranks {}", rank.of), format!("ranks = {ranks}"));
        }
        for set in &strategy.set {
            let own = Override::from_set(set)?;
            let mut flags = said.iter().rev();
            let flag = flags.find(|flag| overlap(&flag.key, &own.key));
            let is_same = |flag: &Override| flag.key == own.key && flag.value == own.value;
            if let Some(flag) = flag.filter(|flag| !is_same(flag)) {
                return contradicts(flag.place.clone(), format!("`{set}`"));
            }
        }
    }
    Ok(())
}

/// Whether two keys are the same, or one is of the other's section.
fn overlap(one: &str, other: &str) -> bool {
    let is_in = |key: &str, section: &str| {
        let rest = key.strip_prefix(section);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    is_in(one, other) || is_in(other, one)
}

#[cfg(test)]
mod tests {
    use crate::begin::complete;
    use crate::cli::{Cli, Command};
    use crate::commands::bench::BenchArgs;
    use crate::commands::bench::measure::{arguments, configuration};
    use crate::failure::Result;
    use clap::{Args, Parser};
    use memory::Rank;
    use settings::Completed;
    use std::path::Path;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/torch_llama_tiny");
    const ADAPTERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/peft/llama/start");

    /// What `bench` does with a flag of `train`.
    enum Does {
        /// It is heeded: the first flags train something else than the second.
        Heeds(&'static str, &'static str),
        /// It is refused; the message names the second.
        Refuses(&'static str, &'static str),
    }
    use Does::{Heeds, Refuses};

    const FULL: &str = "--recompute-granularity full --recompute-method";
    const ZERO_3: &str = "--ranks 4 --zero 3";
    const STAGES: &str = "--ranks 2 --accum 4 --pp 2";
    const LAYERS: &str = "--set model.layers=8 --num-layers-per-virtual-pipeline-stage";

    /// Every flag of `train`. A new one needs a row here.
    #[rustfmt::skip]
    fn rows() -> Vec<(&'static str, Does)> {
        vec![
            ("--config", Heeds("--config gpt2", "")),
            ("--set", Heeds("--set optim.beta1=0.8", "")),
            ("--init-from", Heeds("--init-from MODEL", "")),
            ("--lora-from", Heeds("--init-from MODEL --lora-from ADAPTERS", "--init-from MODEL")),
            ("--data", Heeds("--data a.txt:1 --data b.txt:2", "")),
            ("--no-shuffle", Heeds("--no-shuffle", "")),
            ("--packing", Heeds("--data a --packing first-fit", "--data a")),
            ("--seq", Heeds("--seq 64", "")),
            ("--micro-batch", Heeds("--micro-batch 4", "")),
            ("--accum", Heeds("--accum 3", "")),
            ("--steps", Heeds("--steps 5", "")),
            ("--epochs", Refuses("--epochs 2", "--epochs 2")),
            ("--objective", Heeds("--data a --packing pad --lora 4 --objective dpo", "--data a --packing pad --lora 4")),
            ("--seed", Heeds("--seed 7", "")),
            ("--device", Heeds("--device cpu", "")),
            ("--dtype", Heeds("--dtype bf16", "")),
            ("--threads", Heeds("--threads 1", "")),
            ("--optimizer", Heeds("--optimizer muon", "")),
            ("--state-dtype", Heeds("--state-dtype 8bit", "")),
            ("--master", Heeds("--dtype bf16 --master none", "--dtype bf16")),
            ("--grad-dtype", Heeds("--dtype bf16 --grad-dtype bf16", "--dtype bf16")),
            ("--weight-decay", Heeds("--weight-decay 0.2", "")),
            ("--clip", Heeds("--clip inf", "")),
            ("--lr", Heeds("--lr 1", "")),
            ("--schedule", Heeds("--schedule wsd --set lr.decay_steps=100", "")),
            ("--warmup", Heeds("--warmup 3", "")),
            ("--fp8", Heeds("--dtype bf16 --fp8 tensor", "--dtype bf16")),
            ("--lora", Heeds("--lora 4", "")),
            ("--base-dtype", Heeds("--lora 4 --base-dtype nf4", "--lora 4")),
            ("--recompute", Heeds("--recompute full", "")),
            ("--recompute-granularity", Heeds("--recompute-granularity selective", "")),
            ("--recompute-modules", Heeds("--recompute-granularity selective --recompute-modules mlp", "--recompute-granularity selective")),
            ("--recompute-method", Heeds("FULL block --recompute-num-layers 2", "FULL uniform --recompute-num-layers 2")),
            ("--recompute-num-layers", Heeds("FULL block --recompute-num-layers 2", "FULL block --recompute-num-layers 1")),
            ("--costs", Heeds("--recompute auto --memory-budget 1GiB --costs a.json", "--recompute auto --memory-budget 1GiB")),
            ("--attention", Heeds("--attention flash", "")),
            ("--offload-optimizer", Heeds("--offload-optimizer pinned", "")),
            ("--offload-parameters", Heeds("--offload-parameters pinned", "")),
            ("--offload-gradients", Heeds("--offload-gradients pinned", "")),
            ("--offload-activations", Heeds("--offload-activations mlp", "")),
            ("--expert-unit", Heeds(
                "--config tiny-moe --zero 3 --ranks 2 --expert-unit 4",
                "--config tiny-moe --zero 3 --ranks 2",
            )),
            ("--state-interval", Heeds("--config qwen3.5-0.8b --state-interval 16", "--config qwen3.5-0.8b")),
            ("--memory-limit", Heeds("--memory-limit 90%", "")),
            ("--memory-budget", Heeds("--recompute auto --memory-budget 2GiB", "--recompute auto --memory-budget 1GiB")),
            ("--force", Heeds("--force", "")),
            ("--zero", Heeds("--zero 2", "")),
            ("--bucket-size", Heeds("--zero 1 --bucket-size 1MiB", "--zero 1")),
            ("--reduce", Heeds("--zero 1 --reduce step", "--zero 1")),
            ("--overlap-grad-reduce", Heeds("--zero 1 --overlap-grad-reduce=false", "--zero 1")),
            ("--overlap-param-gather", Heeds("--zero 1 --overlap-param-gather=false", "--zero 1")),
            ("--reshard-after-forward", Heeds("ZERO_3 --reshard-after-forward=false", "ZERO_3")),
            ("--shard-group", Heeds("ZERO_3 --shard-group 2", "ZERO_3")),
            ("--context-parallel-size", Heeds("--ranks 2 --context-parallel-size 2", "--ranks 2")),
            ("--context-parts", Heeds("--context-parts 2", "")),
            ("--pipeline-model-parallel-size", Heeds("--ranks 2 --pipeline-model-parallel-size 2", "--ranks 2")),
            ("--pipeline-schedule", Heeds("STAGES --pipeline-schedule gpipe", "STAGES")),
            ("--num-layers-per-virtual-pipeline-stage", Heeds("STAGES --pipeline-schedule interleaved LAYERS 1", "STAGES --pipeline-schedule interleaved LAYERS 2")),
            ("--pipeline-layout", Heeds("STAGES --pipeline-layout [1,3]", "STAGES")),
            ("--quiet", Heeds("--quiet", "")),
            ("--eval-every", Refuses("--eval-every 2 --eval-data a", "--eval-every 2")),
            ("--eval-data", Refuses("--eval-data a", "--eval-data a")),
            ("--eval-micro-batch", Refuses("--eval-micro-batch 2", "--eval-micro-batch 2")),
            ("--save-every", Refuses("--save-every 2", "--save-every 2")),
            ("--keep-last", Refuses("--keep-last 2", "--keep-last 2")),
            ("--keep-best", Refuses("--keep-best", "--keep-best")),
            ("--save-blocking", Refuses("--save-blocking", "--save-blocking")),
            ("--tensorboard", Refuses("--tensorboard", "--tensorboard")),
            ("--sample-every", Refuses("--sample-every 2", "--sample-every 2")),
            ("--out", Refuses("--out run", "--out")),
            ("--save-final", Refuses("--save-final model", "--save-final")),
            ("--trace", Refuses("--trace", "--trace")),
            ("--dump-gradients", Refuses("--dump-gradients 1", "--dump-gradients")),
            ("--resume", Refuses("--resume run", "--resume run")),
            ("--allow-change", Refuses("--resume run --allow-change", "--resume run")),
        ]
    }

    fn parsed(command: &str, flags: &str) -> Cli {
        let flags = flags.replace("FULL", FULL).replace("ZERO_3", ZERO_3);
        let flags = flags.replace("STAGES", STAGES).replace("LAYERS", LAYERS);
        let flags = flags.replace("MODEL", MODEL).replace("ADAPTERS", ADAPTERS);
        let words = command.split_whitespace().chain(flags.split_whitespace());
        Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{flags}: {error}"))
    }

    /// The only strategy of a matrix that has no settings of its own, as `bench` resolves it.
    fn benched(matrix: &Path, flags: &str) -> Result<(Completed, Option<usize>)> {
        let command = format!("trainer bench --matrix {}", matrix.display());
        let cli = parsed(&command, flags);
        let Some(Command::Bench(args)) = &cli.command else {
            panic!("{cli:?}")
        };
        let args: &BenchArgs = args;
        let shared = args.shared()?;
        let resolved = shared.resolve(&shared.strategies[0])?;
        Ok((resolved, shared.matrix.steps))
    }

    /// The same run, as `train` resolves it for the first of the ranks, without what happens between steps.
    fn trained(flags: &str) -> Completed {
        let mut words: Vec<&str> = flags.split_whitespace().collect();
        let ranks = words.iter().position(|word| *word == "--ranks");
        let of = ranks.map(|at| words.drain(at..at + 2).nth(1).unwrap().parse().unwrap());
        let cli = parsed("trainer train", &words.join(" "));
        let rank = of.map(|of| Rank { number: 0, of });
        let completed = complete(cli.resolve_as(rank, None).unwrap());
        completed.unwrap().of_steps_alone()
    }

    #[test]
    fn every_flag_of_train_is_heeded_or_refused_by_name() {
        let known = rows();
        let command = super::RunArgs::augment_args(clap::Command::new("train"));
        let flags = command.get_arguments().filter_map(clap::Arg::get_long);
        let flags: Vec<String> = flags.map(|flag| format!("--{flag}")).collect();
        for flag in &flags {
            let is_known = known.iter().any(|(name, _)| name == flag);
            assert!(is_known, "{flag} needs a row: what does bench do with it?");
        }
        assert_eq!(flags.len(), known.len());
        let place = tempfile::tempdir().unwrap();
        let matrix = place.path().join("matrix.toml");
        let text = "steps = 3\n[[strategy]]\nname = 'as it is'\nset = []\n";
        std::fs::write(&matrix, text).unwrap();
        for (flag, does) in known {
            match does {
                Refuses(flags, named) => {
                    let refused = benched(&matrix, flags).unwrap_err();
                    assert_eq!(refused.exit_code(), 2, "{flag}: {refused}");
                    assert!(refused.to_string().contains(named), "{flag}: {refused}");
                }
                Heeds(with, without) => {
                    let (resolved, steps) = benched(&matrix, with).unwrap();
                    let (other, other_steps) = benched(&matrix, without).unwrap();
                    let expands =
                        |flags: &str| flags.replace("ZERO_3", ZERO_3).replace("STAGES", STAGES);
                    let expected = trained(&expands(with));
                    assert_eq!(resolved.config, expected.config, "{flag}");
                    assert_eq!(resolved.options, expected.options, "{flag}");
                    let differs =
                        resolved.config != other.config || resolved.options != other.options;
                    assert!(differs, "{flag} changes nothing");
                    assert_eq!(steps != other_steps, flag == "--steps");
                    // Several ranks are planned, and no process is started for them.
                    if resolved.config.rank.is_none() {
                        is_started(&resolved, place.path());
                    }
                }
            }
        }
    }

    /// The process that is started for a strategy trains its configuration.
    fn is_started(completed: &Completed, place: &Path) {
        let config = configuration(completed, 9);
        let file = place.join("run.toml");
        std::fs::write(&file, config.to_toml().unwrap()).unwrap();
        let words = arguments(&completed.options, &file, &place.join("run"));
        let cli = Cli::try_parse_from(std::iter::once("trainer".into()).chain(words)).unwrap();
        let started = complete(cli.resolve().unwrap()).unwrap();
        assert_eq!(started.config, config);
        assert_eq!(started.options.init_from, completed.options.init_from);
        assert_eq!(started.options.lora_from, completed.options.lora_from);
    }
}
