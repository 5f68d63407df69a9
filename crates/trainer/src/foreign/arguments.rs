//! Arguments as shell scripts hold them: read, and never run.

use std::collections::BTreeMap;

/// The flags of a script or of a file of arguments, without their dashes, each with its value: `true` where none follows.
///
/// Variables that the text itself sets to plain text are put in. Both sides of a condition count, since nothing decides it.
pub(super) fn arguments(text: &str) -> Vec<(String, String)> {
    let mut variables = BTreeMap::new();
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    let mut takes_values = false;
    for word in words(text) {
        let Word::Text(word) = word else {
            takes_values = false;
            continue;
        };
        let word = with_values(&word, &variables);
        if let Some((name, value)) = assignment(&word) {
            variables.insert(name.to_owned(), value.to_owned());
            takes_values = false;
            continue;
        }
        // A script may keep a flag and its value in one pair of quotes.
        for part in word.split_whitespace() {
            match part.strip_prefix("--").filter(|name| !name.is_empty()) {
                Some(flag) => {
                    let (name, value) = flag.split_once('=').unwrap_or((flag, ""));
                    let value = (!value.is_empty()).then(|| value.to_owned());
                    found.push((name.to_owned(), value.into_iter().collect()));
                    takes_values = true;
                }
                None if takes_values => {
                    let (_, values) = found.last_mut().expect("a flag takes values");
                    values.push(part.trim_matches('\'').to_owned());
                }
                None => {}
            }
        }
    }
    let one = |values: Vec<String>| match values.is_empty() {
        true => "true".to_owned(),
        false => values.join(" "),
    };
    let flags = found.into_iter();
    flags.map(|(name, values)| (name, one(values))).collect()
}

/// A word of a shell, or what ends a list of values.
enum Word {
    Text(String),
    End,
}

/// The words of a script, without quotes and comments. What is in `$(...)` stays one word.
fn words(text: &str) -> Vec<Word> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' if letters.peek() == Some(&'\n') => {
                letters.next();
                words.extend(word.take().map(Word::Text));
            }
            '\\' => word.get_or_insert_default().extend(letters.next()),
            '#' if word.is_none() => while letters.next_if(|letter| *letter != '\n').is_some() {},
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                while let Some(inside) = letters.next().filter(|inside| *inside != letter) {
                    word.push(inside);
                }
            }
            '$' if letters.peek() == Some(&'(') => {
                let word = word.get_or_insert_default();
                word.push('$');
                let mut depth = 0;
                for inside in letters.by_ref() {
                    word.push(inside);
                    depth += i32::from(inside == '(') - i32::from(inside == ')');
                    if depth == 0 {
                        break;
                    }
                }
            }
            '\n' | ';' | '(' | ')' => {
                words.extend(word.take().map(Word::Text));
                words.push(Word::End);
            }
            ' ' | '\t' | '\r' => words.extend(word.take().map(Word::Text)),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word.map(Word::Text));
    words
}

/// The name and the value of `NAME=value`.
fn assignment(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let is_name = !name.is_empty()
        && name
            .chars()
            .all(|letter| letter == '_' || letter.is_ascii_alphanumeric());
    is_name.then_some((name, value))
}

/// A word with the values of `$NAME`, `${NAME}` and `${NAME:-default}`. A variable without a value stays as it is.
fn with_values(word: &str, variables: &BTreeMap<String, String>) -> String {
    let mut text = String::new();
    let mut rest = word;
    while let Some(dollar) = rest.find('$') {
        let (before, from) = rest.split_at(dollar);
        text.push_str(before);
        let (inside, after) = match from.strip_prefix("${") {
            Some(braced) => braced.split_once('}').unwrap_or((braced, "")),
            None => {
                let name = from[1..].find(|c: char| c != '_' && !c.is_ascii_alphanumeric());
                from[1..].split_at(name.unwrap_or(from.len() - 1))
            }
        };
        let (name, otherwise) = match inside.split_once(":-") {
            Some((name, otherwise)) => (name, Some(otherwise)),
            None => (inside, None),
        };
        let value = variables.get(name).map(String::as_str).or(otherwise);
        text.push_str(value.unwrap_or(&from[..from.len() - after.len()]));
        rest = after;
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<String> {
        let found = arguments(text).into_iter();
        found
            .map(|(name, value)| format!("{name}={value}"))
            .collect()
    }

    #[test]
    fn scripts_are_read_as_a_shell_would_split_them() {
        let text = "#!/bin/bash\nSEQ=4096 # --no-flag\nOUT=${1:-\"out dir\"}\nW=$((2 * 4))\nARGS=(\n  --bf16 \n  --seq-length $SEQ\n  \
                    --lr=3e-4 # fast\n  \"--split '99,1,0'\"\n  --save \"$OUT\"\n  --nnodes ${N}\n)\nif [[ \"$SEQ\" == 1 ]]; then\n  \
                    ARGS+=(--data-path 0.3 a \\\n 0.7 b)\nfi\ntorchrun x.py ${ARGS[@]} --ranks $W --end";
        let expected = [
            "bf16=true",
            "seq-length=4096",
            "lr=3e-4",
            "split=99,1,0",
            "save=out dir",
            "nnodes=${N}",
            "data-path=0.3 a 0.7 b",
            "ranks=$((2 * 4))",
            "end=true",
        ];
        assert_eq!(read(text), expected);
    }

    /// Whatever the text is, reading it ends.
    #[test]
    fn broken_texts_are_read_too() {
        for text in [
            "", "--", "\"--a", "--a \\", "$", "${", "--a ${B", "$(", "--a $é", "'",
        ] {
            read(text);
        }
        assert_eq!(read("--a ${B"), ["a=${B"]);
    }
}
