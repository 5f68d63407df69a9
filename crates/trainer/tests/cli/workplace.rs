//! A folder to run the binary in, and what came of running it.

use std::fmt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A model that trains in milliseconds: 4 steps of 2 x 2 samples of 32 bytes.
pub const SMALL: &str = r#"
[model]
hidden = 32
layers = 2
heads = 2
ffn = 48
vocab = 256
[data]
seq = 32
[batch]
micro = 2
accum = 2
[train]
steps = 4
[lr]
peak = 1e-3
"#;

/// Most tests look at what a run computes: it saves nothing that is not asked for.
const UNSAVED: &str = "[checkpoint]\nevery = 0\n";

/// Nothing that these tests do takes nearly as long, on however busy a machine; a binary that hangs fails its test.
const LONGEST: Duration = Duration::from_secs(600);

/// A folder that is removed at the end of the test, with `small.toml` in it.
pub struct Workplace(TempDir);

impl Workplace {
    pub fn new() -> Workplace {
        let workplace = Workplace(tempfile::tempdir().unwrap());
        workplace.file("small.toml", format!("{SMALL}{UNSAVED}"));
        workplace.file("plain.toml", SMALL);
        workplace
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), contents).unwrap();
    }

    pub fn folder(&self, name: &str) {
        std::fs::create_dir_all(self.path(name)).unwrap();
    }

    /// The names in a folder, in order.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    pub fn text(&self, name: &str) -> String {
        let path = self.path(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Runs the binary in this folder, with arguments split at spaces.
    pub fn trainer(&self, arguments: &str) -> Outcome {
        self.trainer_with(arguments, &[])
    }

    /// Runs it with a text on its standard input.
    pub fn trainer_reading(&self, arguments: &str, text: &str) -> Outcome {
        outcome_reading(self.command(arguments), arguments, text)
    }

    /// Runs it with variables of the environment set.
    pub fn trainer_with(&self, arguments: &str, variables: &[(&str, &str)]) -> Outcome {
        let mut command = self.command(arguments);
        command.envs(variables.iter().copied());
        outcome(command, arguments)
    }

    /// Runs it with arguments that may have spaces in them.
    pub fn trainer_words(&self, arguments: &[String]) -> Outcome {
        let mut command = self.command("");
        command.args(arguments);
        outcome(command, &arguments.join(" "))
    }

    /// The binary, ready to be run in this folder.
    pub fn command(&self, arguments: &str) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trainer"));
        command
            .args(arguments.split_whitespace())
            .current_dir(self.0.path())
            .env_remove("RUST_LOG")
            .env_remove("NO_COLOR")
            .env_remove("CLICOLOR_FORCE")
            // What somebody keeps on this machine is no part of a test.
            .env("XDG_CACHE_HOME", self.path("caches"))
            .stdin(Stdio::null());
        command
    }
}

pub fn outcome(command: std::process::Command, arguments: &str) -> Outcome {
    outcome_reading(command, arguments, "")
}

/// How a command ends that has a text on its standard input.
fn outcome_reading(command: std::process::Command, arguments: &str, text: &str) -> Outcome {
    let mut command = assert_cmd::Command::from_std(command);
    command.write_stdin(text);
    let output = command.timeout(LONGEST).output().unwrap();
    Outcome {
        command: format!("trainer {arguments}"),
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Waits until something is so that a child brings about: in vain once it has ended.
#[track_caller]
pub fn until(child: &mut Child, is_so: impl Fn() -> bool) {
    look_until(child, |ended| {
        // What it did last counts too.
        let is_so = is_so();
        assert!(is_so || ended.is_none(), "it came to nothing: {ended:?}");
        is_so
    });
}

/// Waits until a child has ended.
#[track_caller]
pub fn until_end(child: &mut Child) {
    look_until(child, |ended| ended.is_some());
}

#[track_caller]
fn look_until(child: &mut Child, is_over: impl Fn(Option<ExitStatus>) -> bool) {
    let begun = Instant::now();
    while !is_over(child.try_wait().unwrap()) {
        if begun.elapsed() > LONGEST {
            let _ = child.kill();
            panic!("waited for {LONGEST:?}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a signal, by the shell's own `kill`: the program of that name may not be there.
#[track_caller]
pub fn signal(child: &Child, name: &str) {
    let kill = format!("kill -s {name} {}", child.id());
    let sent = std::process::Command::new("sh")
        .args(["-c", &kill])
        .status();
    assert!(sent.unwrap().success());
}

/// How the binary ended.
pub struct Outcome {
    command: String,
    /// None where a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// As a terminal would show it.
impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome {
            command,
            code,
            stdout,
            stderr,
        } = self;
        write!(
            f,
            "$ {command}\nended with {code:?}\nstdout:\n{stdout}\nstderr:\n{stderr}"
        )
    }
}

impl Outcome {
    /// It did what it was asked to.
    #[track_caller]
    pub fn succeeds(self) -> Outcome {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// It ended with `code` and an error on stderr that has all of `words`; nothing on stdout, and no panic.
    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) -> Outcome {
        assert_eq!(self.stdout, "", "{self:?}");
        self.prints_and_fails(code, words)
    }

    /// As [`Outcome::fails`], with something on stdout first.
    #[track_caller]
    pub fn prints_and_fails(self, code: i32, words: &[&str]) -> Outcome {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        let message = self.message();
        for word in words {
            assert!(message.contains(word), "no {word:?}: {self:?}");
        }
        self
    }

    /// The error and its hints.
    #[track_caller]
    fn message(&self) -> &str {
        let begins_line = |at: &usize| *at == 0 || self.stderr[..*at].ends_with('\n');
        let errors = self.stderr.match_indices("error: ").map(|(at, _)| at);
        let errors: Vec<usize> = errors.filter(begins_line).collect();
        assert_eq!(errors.len(), 1, "one error: {self:?}");
        &self.stderr[errors[0]..]
    }
}

/// A port of this machine that is free just now.
#[cfg(feature = "cuda")]
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}
