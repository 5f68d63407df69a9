//! Writes `configs/reference.toml` from the rows of the keys.

use super::key::{Key, KeyDefault};
use super::keys::KEYS;

const HEAD: &str = "\
# Every configuration key with its default and what it does, written from crates/settings/src/keys.rs. A key without a
# default is commented out, with an example. Every key can also be set on the command line:
# `--set section.key=value`; keys with a flag of their own name it.
";

/// Characters in a line of explanation.
const LINE: usize = 100;

/// The reference of all keys.
pub fn reference() -> String {
    let (mut text, mut section) = (HEAD.to_owned(), "");
    for key in KEYS {
        let (own, name) = key.name.split_once('.').expect("keys lie in sections");
        if own != section {
            section = own;
            text += &format!("\n[{section}]\n");
        }
        text += &entry(key, name);
    }
    text
}

fn entry(key: &Key, name: &str) -> String {
    let mut text = String::from("#");
    let mut width = 1;
    for word in key.explanation().split(' ') {
        if width + 1 + word.len() > LINE {
            text += "\n#";
            width = 1;
        }
        text += &format!(" {word}");
        width += 1 + word.len();
    }
    let line = match key.default {
        KeyDefault::Value(value) => format!("{name} = {value}"),
        KeyDefault::Absent { example, .. } => format!("#{name} = {example}"),
    };
    format!("{text}\n{line}\n")
}
