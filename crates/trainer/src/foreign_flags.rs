//! Flags as other trainers call them, each with what to write here.

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// What to write in place of a flag of Hugging Face's, Megatron-LM's, DeepSpeed's, torchtitan's, nanoGPT's or llm.c's.
struct Foreign {
    /// Their names, with dashes for underscores and without the leading ones.
    names: &'static [&'static str],
    /// Ours, and where it matters what it means.
    ours: &'static str,
}

const fn foreign(names: &'static [&'static str], ours: &'static str) -> Foreign {
    Foreign { names, ours }
}

/// `docs/guides/coming-from.md` has the same names; a test compares.
#[rustfmt::skip]
const FOREIGN: &[Foreign] = &[
    foreign(&["batch-size", "micro-batch-size", "per-device-train-batch-size", "train-micro-batch-size-per-gpu"], "--micro-batch B"),
    foreign(&["global-batch-size", "train-batch-size"], "--micro-batch B --accum A: a step has B x A sequences on each rank"),
    foreign(&["gradient-accumulation-steps", "grad-accumulation", "grad-accum"], "--accum A"),
    foreign(&["max-steps", "train-iters", "max-iters", "training-steps", "num-iterations"], "--steps N"),
    foreign(&["num-train-epochs", "num-epochs", "max-epochs"], "--epochs N"),
    foreign(&["learning-rate"], "--lr X"),
    foreign(&["min-lr"], "--set lr.min_ratio=X: a fraction of --lr"),
    foreign(&["lr-scheduler-type", "lr-scheduler", "lr-decay-style"], "--schedule constant|linear|cosine|wsd"),
    foreign(&["lr-decay-iters"], "--set lr.decay_steps=N"),
    foreign(&["warmup-steps", "num-warmup-steps", "lr-warmup-iters", "warmup-iters"], "--warmup N"),
    foreign(&["warmup-ratio", "lr-warmup-fraction"], "--warmup N: a number of steps, not a share"),
    foreign(&["max-grad-norm", "clip-grad", "grad-clip", "gradient-clipping"], "--clip NORM"),
    foreign(&["adam-beta1", "adam-beta2", "adam-eps", "adam-epsilon"], "--set optim.beta1=X, optim.beta2=X, optim.eps=X"),
    foreign(&["optim"], "--optimizer NAME"),
    foreign(&["seq-length", "seq-len", "sequence-length", "sequence-len", "max-seq-length", "max-seq-len", "max-length", "block-size"], "--seq S"),
    foreign(&["gradient-checkpointing", "activation-checkpointing"], "--recompute full"),
    foreign(&["recompute-activations", "checkpoint-activations"], "--recompute core_attn"),
    foreign(&["bf16"], "--dtype bf16"),
    foreign(&["fp32"], "--dtype f32"),
    foreign(&["fp16"], "--dtype bf16: f16 is not built, since bf16 needs no loss scaling"),
    foreign(&["attn-implementation", "use-flash-attn", "flash-attention"], "--attention flash"),
    foreign(&["model", "model-name", "model-name-or-path", "pretrained-model-name-or-path", "pretrained-checkpoint"], "--init-from DIR, a model in Hugging Face layout; or --config NAME to begin anew"),
    foreign(&["tokenizer", "tokenizer-name", "tokenizer-name-or-path", "tokenizer-model", "tokenizer-path"], "trainer prepare TEXTS --tokenizer DIR --out data, then --data data: tokens are made before a run"),
    foreign(&["dataset", "dataset-name", "dataset-path", "data-path", "train-file", "train-data-path", "input-bin"], "--data PATH"),
    foreign(&["validation-file", "valid-data-path", "val-data-path"], "--eval-data PATH"),
    foreign(&["output-dir", "save", "save-dir", "checkpoint-dir", "dump-folder"], "--out DIR"),
    foreign(&["save-steps", "save-interval", "checkpoint-interval"], "--save-every N"),
    foreign(&["save-total-limit", "keep-latest-k"], "--keep-last K"),
    foreign(&["eval-steps", "eval-interval", "val-loss-every"], "--eval-every N"),
    foreign(&["logging-steps", "log-interval"], "--set log.every=N"),
    foreign(&["report-to", "tensorboard-dir"], "--tensorboard"),
    foreign(&["load", "resume-from-checkpoint"], "--resume DIR|latest|auto"),
    foreign(&["deepspeed", "fsdp", "zero-stage"], "--zero 0|1|2|3, under mpirun, srun or torchrun"),
    foreign(&["use-distributed-optimizer"], "--zero 1, under mpirun, srun or torchrun"),
    foreign(&["optimizer-cpu-offload", "cpu-offload", "offload-optimizer-device"], "--offload-optimizer pinned"),
    foreign(&["num-layers", "hidden-size", "num-attention-heads", "num-query-groups", "ffn-hidden-size", "vocab-size"], "--config NAME, a preset or a TOML file, with --set model.KEY=N"),
    foreign(&["num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "moe-layer-freq", "multi-latent-attention"], "--config NAME, a preset or a TOML file with [model.experts] and [model.latent]"),
    foreign(&["moe-aux-loss-coeff"], "--set model.router_aux=X"),
    foreign(&["moe-router-load-balancing-type"], "--set model.router_aux_kind=pooled, layer or sequence"),
    foreign(&["moe-z-loss-coeff"], "--set model.router_z_loss=X"),
    foreign(&["moe-router-bias-update-rate"], "--set optim.router_bias_rate=X"),
    foreign(&["expert-model-parallel-size", "expert-tensor-parallel-size"], "not built: every rank computes all experts of its tokens; --zero 3 divides their weights among ranks"),
    foreign(&["moe-expert-capacity-factor", "moe-pad-expert-input-to-capacity", "moe-token-drop-policy"], "not built: no token is dropped, and the plan is exact all the same"),
    foreign(&["moe-input-jitter-eps"], "not built: routers read what the layer reads"),
    foreign(&["moe-grouped-gemm", "moe-permute-fusion", "moe-token-dispatcher-type"], "not needed: there is one way, and it is grouped"),
    foreign(&["lora-r", "lora-rank", "use-peft"], "--lora RANK"),
    foreign(&["lora-alpha", "lora-dropout"], "--set lora.alpha=X, lora.dropout=X"),
    foreign(&["lora-target-modules", "target-modules"], "--set lora.targets=LIST"),
    foreign(&["load-in-4bit", "load-in-8bit"], "not built: --base-dtype takes bf16 alone"),
    foreign(&["loss-type"], "--objective dpo has the sigmoid loss alone (dpo.loss)"),
    foreign(&["beta"], "--set dpo.beta=X, under --objective dpo"),
    foreign(&["torch-compile", "compile"], "not needed: there is nothing to compile"),
];

/// What to write in place of `flag`.
fn ours(flag: &str) -> Option<&'static str> {
    let name = flag.trim_start_matches('-').replace('_', "-");
    let name = name.split('=').next()?.to_lowercase();
    let row = FOREIGN
        .iter()
        .find(|row| row.names.contains(&name.as_str()));
    row.map(|row| row.ours)
}

/// The error of a command line that was refused, naming our flag where another trainer's was given.
pub(crate) fn explained(mut error: Error) -> Error {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let (ErrorKind::UnknownArgument, Some(ours)) = (error.kind(), ours(flag)) else {
        return error;
    };
    // What merely looks alike is not what is meant.
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::SuggestedSubcommand);
    error.insert(
        ContextKind::Suggested,
        ContextValue::StyledStrs(vec![format!("here that is {ours}").into()]),
    );
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::{Command, CommandFactory, Parser};
    use std::collections::BTreeSet;

    /// All flags of a command and those below it.
    fn flags(command: &Command, into: &mut BTreeSet<String>) {
        let longs = command
            .get_arguments()
            .filter_map(|argument| argument.get_long());
        into.extend(longs.map(|long| format!("--{long}")));
        for below in command.get_subcommands() {
            flags(below, into);
        }
    }

    #[test]
    fn answers_name_flags_and_keys_that_there_are() {
        let mut known = BTreeSet::new();
        flags(&Cli::command(), &mut known);
        let mut seen = BTreeSet::new();
        for row in FOREIGN {
            for name in row.names {
                assert!(seen.insert(*name), "{name} stands twice");
            }
            let words = row.ours.split([' ', ',', ';', ':']);
            for flag in words.filter(|word| word.starts_with("--")) {
                assert!(known.contains(flag), "{flag} in {:?}", row.ours);
            }
        }
    }

    #[test]
    fn the_guide_has_the_same_names() {
        let guide = include_str!("../../../docs/guides/coming-from.md").replace('_', "-");
        for row in FOREIGN {
            for name in row.names {
                let is_there = guide.split(|c: char| !(c.is_alphanumeric() || c == '-'));
                let is_there = is_there.map(|word| word.trim_start_matches('-'));
                assert!(is_there.into_iter().any(|word| word == *name), "{name}");
            }
        }
    }

    #[test]
    fn a_foreign_flag_is_answered_with_ours() {
        for (line, words) in [
            ("trainer --batch-size 8", "--micro-batch B"),
            ("trainer --max_steps=5", "--steps N"),
            ("trainer plan --gradient-checkpointing", "--recompute full"),
            ("trainer train --tokenizer gpt2", "trainer prepare"),
        ] {
            let error = Cli::try_parse_from(line.split(' ')).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnknownArgument, "{line}");
            let text = explained(error).to_string();
            assert!(text.contains(&format!("here that is {words}")), "{text}");
            assert_eq!(text.matches("tip:").count(), 1, "{text}");
        }
        let error = Cli::try_parse_from(["trainer", "--stepz", "5"]).unwrap_err();
        assert!(
            explained(error).to_string().contains("--steps"),
            "a slip has clap's own answer"
        );
    }
}
