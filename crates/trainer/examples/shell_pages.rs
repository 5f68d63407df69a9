//! Writes completions for shells, and man pages, into the folders below DIR where shells and `man` look:
//! `cargo run --release --example shell_pages -- ~/.local/share`.

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};
use std::path::{Path, PathBuf};
use trainer::cli::Cli;

fn main() -> std::io::Result<()> {
    let share = std::env::args_os().nth(1).map(PathBuf::from);
    let share = share.expect("usage: shell_pages DIR");
    write(&share)
}

fn write(share: &Path) -> std::io::Result<()> {
    let folder = |name: &str| {
        let folder = share.join(name);
        std::fs::create_dir_all(&folder).map(|()| folder)
    };
    let shells = [
        (Shell::Bash, "bash-completion/completions", "trainer"),
        (Shell::Zsh, "zsh/site-functions", "_trainer"),
        (Shell::Fish, "fish/vendor_completions.d", "trainer.fish"),
    ];
    for (shell, place, name) in shells {
        let folder = folder(place)?;
        let written = generate_to(shell, &mut Cli::command(), "trainer", &folder)?;
        // Bash looks for a file that is named after the command alone.
        std::fs::rename(written, folder.join(name))?;
    }
    clap_mangen::generate_to(Cli::command(), folder("man/man1")?)
}

/// `cargo test` runs the examples.
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_and_every_shell_knows_them() {
        let share = tempfile::tempdir().unwrap();
        write(share.path()).unwrap();
        let text = |name: &str| std::fs::read_to_string(share.path().join(name)).unwrap();
        let shells = [
            "bash-completion/completions/trainer",
            "zsh/site-functions/_trainer",
            "fish/vendor_completions.d/trainer.fish",
        ]
        .map(text);
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            let page = text(&format!("man/man1/trainer-{name}.1"));
            assert!(page.contains(&format!("trainer\\-{name}")), "{page}");
            assert!(
                shells.iter().all(|completions| completions.contains(name)),
                "{name}"
            );
        }
        let page = text("man/man1/trainer-train.1");
        assert!(page.contains("\\-\\-recompute"), "{page}");
        assert!(
            shells
                .iter()
                .all(|completions| completions.contains("recompute"))
        );
    }
}
