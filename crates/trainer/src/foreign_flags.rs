//! Flags as other trainers call them, each with what to write here.

use crate::foreign::{Meaning, find};
use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

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
