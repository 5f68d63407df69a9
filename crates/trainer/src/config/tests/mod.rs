//! Tests of the configuration: its files, and what is refused.

mod files;
mod refused;

use clap::Parser;

use super::{Config, ConfigError, Resolved};
use crate::cli::Cli;

fn resolve(arguments: &[&str]) -> Result<Resolved, ConfigError> {
    let cli = Cli::try_parse_from([&["trainer"], arguments].concat());
    cli.unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
        .resolve()
}

fn config(arguments: &[&str]) -> Config {
    resolve(arguments).unwrap().config
}

/// A file in a folder that lives as long as the returned guard.
fn file(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, text).unwrap();
    (folder, path.to_str().unwrap().to_owned())
}
