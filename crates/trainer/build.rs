//! Tells the binary of which commit and with which features it is built, for `--version`.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // What the binary is made of. Git's own files are not among it: a commit changes no source, and would build all tests anew.
    let crates =
        std::fs::read_dir(root.join("crates")).expect("the workspace's crates are beside this one");
    let folders = crates.map(|folder| folder.expect("the folder can be listed").path().join("src"));
    for path in folders.chain([root.join("Cargo.lock")]) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        println!("cargo::rerun-if-changed={}", root.join("kernels").display());
    }
    let commit = commit(&root).unwrap_or("commit unknown".into());
    println!("cargo::rustc-env=TRAINER_COMMIT={commit}");
    println!("cargo::rustc-env=TRAINER_FEATURES={}", features());
}

/// The commit of the sources; none if they are no checkout of git.
fn commit(root: &Path) -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .arg("--no-optional-locks")
            .args(arguments)
            .current_dir(root)
            .output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    // A folder above may be somebody else's repository.
    let is_root = git(&["rev-parse", "--show-prefix"])?.is_empty();
    let commit = git(&["rev-parse", "--short=10", "HEAD"]).filter(|_| is_root)?;
    let changes = git(&[
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "crates",
        "kernels",
        "Cargo.lock",
    ])?;
    let and_changes = if changes.is_empty() {
        ""
    } else {
        ", with changes"
    };
    Some(format!("commit {commit}{and_changes}"))
}

/// The features of this build, as cargo names them.
fn features() -> String {
    let names = env::vars().filter_map(|(name, _)| {
        Some(
            name.strip_prefix("CARGO_FEATURE_")?
                .to_lowercase()
                .replace('_', "-"),
        )
    });
    let mut names: Vec<String> = names.filter(|name| name != "default").collect();
    names.sort();
    match names.is_empty() {
        true => "none".into(),
        false => names.join(", "),
    }
}
