//! Lists of arguments, as a launcher is given them.

use shlex::Shlex;

/// What a list of arguments says.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Arguments {
    /// The Python program that is started, if the list begins with it.
    pub(super) program: Option<String>,
    /// Its flags and its launcher's, without their dashes, each with its value: `true` where none follows.
    pub(super) flags: Vec<(String, String)>,
}

impl Arguments {
    /// Reads words in a shell's quotes.
    ///
    /// # Errors
    /// The instruction, variable or value that only a shell understands.
    pub(super) fn read(text: &str) -> Result<Arguments, String> {
        let mut arguments = Arguments::default();
        let mut flags: Vec<(String, Vec<String>)> = Vec::new();
        let mut takes_values = false;
        // The library takes what continues a line for a word.
        let text = text.replace("\\\n", " ");
        let mut words = Shlex::new(&text);
        for word in &mut words {
            let is_value =
                takes_values && flags.last().is_some_and(|(_, values)| values.is_empty());
            if is_shell(&word) || is_assignment(&word) && !is_value {
                return Err(word.split(['=', ' ']).next().unwrap_or(&word).to_owned());
            }
            match word.strip_prefix("--").filter(|name| !name.is_empty()) {
                Some(flag) => {
                    let (name, value) = match flag.split_once('=') {
                        Some((name, value)) => (name, Some(value.to_owned())),
                        None => (flag, None),
                    };
                    takes_values = value.is_none();
                    flags.push((name.to_owned(), Vec::from_iter(value)));
                }
                None if word.ends_with(".py") => {
                    arguments.program = Some(word);
                    takes_values = false;
                }
                None if takes_values => flags.last_mut().expect("a flag takes values").1.push(word),
                None => {}
            }
        }
        if words.had_error {
            return Err("a quote without its end".into());
        }
        let one = |values: Vec<String>| match values.is_empty() {
            true => "true".to_owned(),
            false => values.join(" "),
        };
        let flags = flags.into_iter().map(|(name, values)| (name, one(values)));
        arguments.flags = flags.collect();
        Ok(arguments)
    }
}

/// Whether a word is an instruction to a shell, or holds a value that only a shell knows.
fn is_shell(word: &str) -> bool {
    const WORDS: [&str; 18] = [
        "if", "then", "else", "elif", "fi", "for", "while", "do", "done", "case", "esac",
        "function", "export", "set", "[", "[[", "&&", "||",
    ];
    word.contains(['$', '`']) || word.ends_with(';') || WORDS.contains(&word)
}

/// Whether a word is `NAME=value` or `NAME+=value`.
fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        let name = name.strip_suffix('+').unwrap_or(name);
        let is_letter = |letter: char| letter == '_' || letter.is_ascii_alphanumeric();
        !name.is_empty() && name.chars().all(is_letter)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<String> {
        let flags = Arguments::read(text).unwrap().flags.into_iter();
        flags
            .map(|(name, value)| format!("{name}={value}"))
            .collect()
    }

    #[test]
    fn lists_are_read_as_a_shell_would_split_them() {
        let text = "torchrun --nproc_per_node=8 --log_dir x pretrain_gpt.py --bf16 \\\n --seq-length 4096 # --no-flag\n --lr=3e-4 \
                    more\n --split '99,1,0' --save 'out dir' --data-path 0.3 a \\\n 0.7 b --moe-layer-freq \"([0]*3+[1]*2)\" --x a=b";
        let expected = [
            "nproc_per_node=8",
            "log_dir=x",
            "bf16=true",
            "seq-length=4096",
            "lr=3e-4",
            "split=99,1,0",
            "save=out dir",
            "data-path=0.3 a 0.7 b",
            "moe-layer-freq=([0]*3+[1]*2)",
            "x=a=b",
        ];
        assert_eq!(read(text), expected);
        let program = Arguments::read(text).unwrap().program;
        assert_eq!(program.as_deref(), Some("pretrain_gpt.py"));
        // A backslash before a line's end is no part of a value.
        assert_eq!(read("\" \\\n --a\" --b 4 \\\n"), ["b=4"]);
    }

    #[test]
    fn what_only_a_shell_knows_is_named() {
        for (text, word) in [
            ("SEQ=4096 torchrun x.py --seq-length 4096", "SEQ"),
            ("--a 1\nARGS+=(--bf16)", "ARGS+"),
            ("--seq-length $SEQ", "$SEQ"),
            ("--nnodes ${N:-1}", "${N:-1}"),
            ("--ranks `nproc`", "`nproc`"),
            ("if [ -f x ]; then", "if"),
            ("set -e\n--a", "set"),
            ("--a 'b", "a quote without its end"),
        ] {
            assert_eq!(Arguments::read(text), Err(word.to_owned()), "{text}");
        }
        for text in ["", "--", "echo hello", "é --"] {
            assert_eq!(Arguments::read(text), Ok(Arguments::default()), "{text}");
        }
    }
}
