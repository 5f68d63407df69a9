//! The guides: commands that are shown with what they print are run, and print it; no figure stands anywhere else.

use crate::tour;
use crate::workplace::{SMALL, Workplace};
use std::path::{Path, PathBuf};

/// The guides whose figures have a test of their own.
const HELD_ELSEWHERE: [&str; 1] = ["one-gpu.md"];

/// The guide of which every command is run.
const CHATS: &str = "chats.md";

/// What a line, or the end of one, stands for that is left out.
const LEFT_OUT: &str = "...";

fn guides() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides");
    let files = std::fs::read_dir(folder).unwrap();
    let paths = files.map(|file| file.unwrap().path());
    let named = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read_to_string(&path).unwrap())
    };
    let mut guides: Vec<(String, String)> = paths.map(named).collect();
    guides.sort();
    guides.retain(|(name, _)| !HELD_ELSEWHERE.contains(&name.as_str()));
    guides
}

/// The lines of a guide that stand within blocks of one language, or outside of all blocks.
fn lines<'a>(guide: &'a str, language: Option<&'a str>) -> impl Iterator<Item = &'a str> {
    let mut within: Option<&str> = None;
    guide.lines().filter(move |line| {
        let Some(fence) = line.strip_prefix("```") else {
            return within == language;
        };
        within = match within {
            None => Some(fence),
            Some(_) => None,
        };
        false
    })
}

/// A command of a guide, and the lines that are shown of what it prints.
struct Shown<'a> {
    command: &'a str,
    printed: Vec<&'a str>,
}

fn shown(guide: &str) -> Vec<Shown<'_>> {
    let mut all: Vec<Shown> = Vec::new();
    for line in lines(guide, Some("console")) {
        match (line.strip_prefix("$ "), all.last_mut()) {
            (Some(command), _) => all.push(Shown {
                command: command.split("  #").next().unwrap(),
                printed: Vec::new(),
            }),
            (None, Some(last)) => last.printed.push(line),
            (None, None) => panic!("a console block begins with a command: {line}"),
        }
    }
    all.retain(|shown| !shown.printed.is_empty());
    all
}

/// Words apart by one space: columns move where a cell beside them gets longer.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The first shown line that is not printed after those before it.
fn missing<'a>(shown: &[&'a str], printed: &str) -> Option<&'a str> {
    let printed: Vec<String> = printed.lines().map(words).collect();
    let mut rest = printed.iter();
    let is_printed = |line: &&str| {
        let line = words(line);
        let begins = line.strip_suffix(LEFT_OUT);
        rest.any(|printed| match begins {
            Some(begins) => printed.starts_with(begins.trim_end()),
            None => *printed == line,
        })
    };
    let mut lines = shown.iter().filter(|line| line.trim() != LEFT_OUT);
    lines
        .find({
            let mut is_printed = is_printed;
            move |line| !is_printed(line)
        })
        .copied()
}

/// The text of a guide.
fn named(wanted: &str) -> String {
    let found = guides().into_iter().find(|(name, _)| name == wanted);
    found.unwrap().1
}

/// A folder with what a guide's commands read.
fn place(guide: &str) -> Workplace {
    let place = Workplace::new();
    place.file("my-run.toml", SMALL);
    let block = |name: &str, language: &str| {
        let guide = named(name);
        let lines: Vec<&str> = lines(&guide, Some(language)).collect();
        lines.join("\n")
    };
    place.file("strategies.toml", block("guard-your-peak.md", "toml"));
    let example = include_str!("../foreign/axolotl-lora-1b.yml");
    place.file("axolotl-lora-1b.yml", example);
    place.file("pairs.jsonl", block("fine-tune.md", "json"));
    place.file("chats.jsonl", block(CHATS, "json"));
    if guide.contains("--init-from model ") {
        add_chat_model(&place);
    }
    place
}

/// Makes the folder `model`: a small model with a tokenizer and a chat template.
fn add_chat_model(place: &Workplace) {
    let tokenizer = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tokenization/tests/fixtures/chatml"
    );
    let init = "init --config small.toml --set model.vocab=360 --set data.seq=128 --out model";
    place.trainer(init).succeeds();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let copy = place.path("model").join(name);
        std::fs::copy(format!("{tokenizer}/{name}"), copy).unwrap();
    }
}

#[test]
fn what_is_shown_is_printed() {
    let mut run = 0;
    for (name, guide) in guides() {
        let place = place(&guide);
        for Shown { command, printed } in shown(&guide) {
            let arguments = command.strip_prefix("trainer ");
            let arguments = arguments.unwrap_or_else(|| panic!("{name}: {command}"));
            let outcome = place.trainer_words(&tour::words(arguments));
            let fails = printed.iter().any(|line| line.starts_with("error: "));
            assert_eq!(outcome.code != Some(0), fails, "{name}: {outcome:?}");
            let all = format!("{}\n{}", outcome.stdout, outcome.stderr);
            let missing = missing(&printed, &all);
            assert_eq!(missing, None, "{name}: not printed by {outcome:?}");
            run += 1;
        }
    }
    assert!(run > 10, "{run} commands are shown with what they print");
}

/// A user takes these commands one after the other, so none may be left untried.
#[test]
fn every_command_for_chats_is_shown_with_what_it_prints() {
    let guide = named(CHATS);
    let commands = lines(&guide, Some("console")).filter_map(|line| line.strip_prefix("$ "));
    let run: Vec<&str> = shown(&guide).iter().map(|shown| shown.command).collect();
    let untried: Vec<&str> = commands.filter(|command| !run.contains(command)).collect();
    assert!(run.len() > 10, "{run:?}");
    assert!(untried.is_empty(), "{untried:?}");
}

/// Bytes and times of runs go stale where no command stands above them.
#[test]
fn no_figure_stands_without_its_command() {
    let units = ["KiB", "MiB", "GiB", "TiB", "ms"];
    let is_number = |word: &str| word.parse::<f64>().is_ok();
    let of_word = |word: &str| {
        word.trim_matches(|letter| "|`(),.;:*".contains(letter))
            .to_owned()
    };
    for (name, guide) in guides() {
        for line in lines(&guide, None) {
            let words: Vec<String> = line.split_whitespace().map(of_word).collect();
            let figure = words.windows(2).find(|pair| {
                is_number(&pair[0].replace(',', "")) && units.contains(&pair[1].as_str())
            });
            assert_eq!(figure, None, "{name} shows it without a command: {line}");
        }
    }
}

#[test]
fn lines_that_are_not_printed_are_noticed() {
    let printed = "a  1 MiB\nb     2 MiB of 3\nc\n";
    assert_eq!(missing(&["...", "a 1 MiB", "c"], printed), None);
    assert_eq!(missing(&["  b 2 MiB ..."], printed), None);
    assert_eq!(missing(&["a 2 MiB"], printed), Some("a 2 MiB"));
    assert_eq!(
        missing(&["c", "a 1 MiB"], printed),
        Some("a 1 MiB"),
        "out of order"
    );
    let guide = "3 MiB\n```console\n$ trainer plan  # once\n  ...\n```\n```toml\nx\n```\n4\n";
    let shown = shown(guide);
    assert_eq!(
        (shown[0].command, shown[0].printed.len()),
        ("trainer plan", 1)
    );
    assert!(lines(guide, None).eq(["3 MiB", "4"]));
}
