//! The commands of the tour, run as they stand there, in order.

use crate::workplace::Workplace;
use std::os::unix::fs::symlink;
use std::path::Path;

/// The lines of a guide that run the trainer.
fn commands(guide: &str) -> impl Iterator<Item = &str> {
    let lines = guide.lines();
    lines.filter_map(|line| line.strip_prefix("$ trainer "))
}

#[test]
fn every_command_works() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let place = Workplace::new();
    for name in ["README.md", "docs"] {
        symlink(repository.join(name), place.path(name)).unwrap();
    }
    let guide = place.text("docs/guides/tour.md");
    let shown = guide.matches("\n$ ").count();
    let mut run = 0;
    for command in commands(&guide) {
        // What a shell does with quotes.
        let outcome = place.trainer_words(&words(command)).succeeds();
        assert!(!outcome.stdout.is_empty(), "{command} says nothing");
        run += 1;
    }
    assert_eq!(run, shown, "a command of the guide was passed over");
    let text = place.text("runs/branch/metrics.jsonl");
    assert!(text.contains(r#""step":50"#) && !text.contains(r#""step":51"#));
    for made in [
        "model/config.json",
        "tuned/model.safetensors",
        "runs/tour/report.html",
    ] {
        assert!(place.path(made).is_file(), "{made}");
    }
}

/// Words apart by spaces, but for those in quotes.
pub fn words(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in command.split('"').enumerate() {
        match index % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    words
}
