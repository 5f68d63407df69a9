//! Tests of the configuration: its files, and how settings come together.

mod files;

use crate::{Config, Given, RunOptions, Task, resolve};

/// The configuration of a preset or file.
fn config(name: Option<&str>) -> Config {
    let given = Given {
        config: name.map(str::to_owned),
        ..Given::default()
    };
    let resolved = resolve(Task::Plan, given, RunOptions::default());
    resolved.unwrap().config
}

/// A file in a folder that lives as long as the returned guard.
fn file(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, text).unwrap();
    (folder, path.to_str().unwrap().to_owned())
}
