//! Finds the MPI library.

use crate::GroupError;
use crate::Result;
use crate::launch::Launcher;
use crate::loading;
use libloading::os::unix::{Library, RTLD_GLOBAL};
use std::path::{Path, PathBuf};

/// Names a library outright.
const VARIABLE: &str = "TRAINER_MPI";

/// The standard interface of MPI 5, Open MPI's, and MPICH's under its own name and under Debian's.
const STANDARD: &str = "libmpi_abi.so.1";
const OPEN_MPI: &str = "libmpi.so.40";
const MPICH: [&str; 2] = ["libmpi.so.12", "libmpich.so.12"];

/// The names to try under a launcher. Its own library comes first: with one of another family each process would be a
/// group of one, or end.
fn names(launcher: Launcher) -> &'static [&'static str] {
    match launcher {
        Launcher::OpenMpi => &[OPEN_MPI, STANDARD],
        Launcher::Slurm => &[OPEN_MPI, STANDARD, MPICH[0], MPICH[1]],
        Launcher::Mpich | Launcher::Torchrun => &[STANDARD, MPICH[0], MPICH[1], OPEN_MPI],
    }
}

/// Loads the library that belongs to a launcher.
pub(super) fn load(launcher: Launcher) -> Result<&'static Library> {
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return open(Path::new(&path)).map_err(|reason| {
            let path = path.to_string_lossy();
            GroupError::Missing(format!(
                "{VARIABLE} names `{path}`, which does not load: {reason}"
            ))
        });
    }
    let names = names(launcher);
    let beside = folders_beside_the_launcher().into_iter();
    let beside = beside.flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    let plain = names.iter().map(PathBuf::from);
    let mut found = Vec::new();
    for path in beside.filter(|path| path.exists()).chain(plain) {
        match open(&path) {
            Ok(library) => return Ok(library),
            Err(reason) => found.push(reason),
        }
    }
    // The loader's reason for the first name; those for the others would say the same.
    let reason = found.into_iter().next().unwrap_or_default();
    Err(GroupError::Missing(format!(
        "no MPI library loads: {} were tried ({reason}); install one (`apt install openmpi-bin`, or `pip install mpich`), \
         or name its file in {VARIABLE}",
        names.join(", ")
    )))
}

fn open(path: &Path) -> Result<&'static Library, String> {
    // Open MPI's plugins look for its symbols among all that are loaded. SAFETY: it is an MPI library, which only
    // initialises itself when it is loaded.
    unsafe { loading::load(path, RTLD_GLOBAL) }
}

/// `../lib` beside this process's parent, its parent and so on. A launcher outside the system's folders, such as one
/// from PyPI, has its library there.
fn folders_beside_the_launcher() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut process = std::os::unix::process::parent_id();
    while process > 1 {
        let program = std::fs::read_link(format!("/proc/{process}/exe"));
        let prefix = program
            .ok()
            .and_then(|program| Some(program.parent()?.parent()?.join("lib")));
        folders.extend(prefix);
        match parent(process) {
            Some(parent) => process = parent,
            None => break,
        }
    }
    folders
}

/// The parent of a process. The process's name, in parentheses, may hold any characters.
fn parent(process: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(1)?.parse().ok()
}
