//! Flags as other trainers call them, each with what to write here.

use crate::foreign::{Meaning, find};
use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// What to write in place of `flag`.
fn ours(flag: &str) -> Option<String> {
    let name = flag.trim_start_matches('-').split('=').next()?;
    let row = find(name)?;
    Some(match row.meaning {
        Meaning::NotBuilt => format!("not built: {}", row.ours),
        Meaning::Needless => format!("not needed: {}", row.ours),
        _ => row.ours.into(),
    })
}

/// The arguments without flags of other trainers that divide a model into one part.
pub(crate) fn without_parts_of_one(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        let (flag, value) = match argument.to_str().and_then(|word| word.split_once('=')) {
            Some((flag, value)) => (flag, Some(value)),
            None => (argument.to_str().unwrap_or_default(), None),
        };
        let name = flag.strip_prefix("--").filter(|name| divides(name));
        match (name, value) {
            (Some(_), Some("1")) => {}
            (Some(_), None) if arguments.peek().is_some_and(|next| next == "1") => {
                arguments.next();
            }
            _ => kept.push(argument),
        }
    }
    kept
}

/// Whether a flag of another trainer's says into how many parts it divides a model, and nothing here does.
fn divides(name: &str) -> bool {
    let counts = name.ends_with("size") || name.ends_with("degree");
    let is_not_built = || find(name).is_some_and(|row| matches!(row.meaning, Meaning::NotBuilt));
    counts && name.contains("parallel") && is_not_built()
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
    use clap::Parser;

    #[test]
    fn a_model_in_one_part_is_one() {
        let kept = |line: &str| {
            without_parts_of_one(line.split(' ').map(OsString::from)).join(" ".as_ref())
        };
        for line in [
            "trainer --seq 64 --tensor-model-parallel-size 1",
            "trainer --tensor_parallel_degree=1 --seq 64",
            "trainer --expert-model-parallel-size=1 --seq 64",
        ] {
            assert_eq!(kept(line), "trainer --seq 64");
        }
        for line in [
            "trainer --tensor-model-parallel-size 2",
            "trainer --tensor-model-parallel-size",
            "trainer --sequence-parallel",
            "trainer --context-parallel-size 1",
            "trainer --steps 1",
        ] {
            assert_eq!(kept(line), *line);
        }
        let error = Cli::try_parse_from(["trainer", "--tensor-model-parallel-size", "2"]);
        let text = explained(error.unwrap_err()).to_string();
        assert!(text.contains("not built: --zero 3 divides"), "{text}");
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
