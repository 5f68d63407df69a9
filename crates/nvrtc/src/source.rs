//! The sources of a folder, and the target that each is compiled for.

use crate::Error;
use std::path::{Path, PathBuf};

/// Ampere (8.6 and 8.9 run it too), Hopper, and both kinds of Blackwell.
pub const MACHINE_CODE: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];

/// The target whose PTX is kept, for GPUs of other kinds: the oldest, since later GPUs have all its instructions.
pub const PTX_OF: &str = "sm_80";

/// The target whose PTX is kept beside it, for tests, of sources that are others there.
pub const HOPPER: &str = "sm_90";

/// How the names of macros begin by which a source tells architectures apart.
const ARCHITECTURE: &str = "__CUDA_ARCH_";

/// The macro that a source with instructions of Hopper alone mentions; the compiler defines it for `sm_90a`.
const HOPPER_ALONE: &str = "__CUDA_ARCH_FEAT_SM90_ALL";

/// One source file.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its path.
    pub path: PathBuf,
    /// Its name, without `.cu`.
    pub name: String,
    /// Its text.
    pub text: String,
}

impl Source {
    /// The target that the source is compiled for to get machine code for `target`: the same, or `sm_90a` for a source
    /// with instructions of Hopper alone. That runs only on 9.0, but there is no other 9.x.
    pub fn target<'a>(&self, target: &'a str) -> &'a str {
        match target {
            HOPPER if self.text.contains(HOPPER_ALONE) => "sm_90a",
            target => target,
        }
    }

    /// Whether it tells architectures apart: then Hopper runs other code than [`PTX_OF`].
    pub fn is_by_architecture(&self) -> bool {
        self.text.contains(ARCHITECTURE)
    }
}

/// The sources of a folder, by name.
///
/// # Errors
/// [`Error::File`] if the folder or a file cannot be read.
pub fn read_sources(folder: &Path) -> Result<Vec<Source>, Error> {
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |error| Error::File { path, error }
    };
    let mut sources = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed(folder))? {
        let path = entry.map_err(failed(folder))?.path();
        if path.extension().is_none_or(|end| end != "cu") {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        sources.push(Source {
            name: name.into_owned(),
            text: std::fs::read_to_string(&path).map_err(failed(&path))?,
            path,
        });
    }
    sources.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_hopper_alone_change_the_target_of_hopper_alone() {
        let source = |text: &str| Source {
            path: "x.cu".into(),
            name: "x".into(),
            text: text.into(),
        };
        let (portable, hopper) = (source("int x;"), source("#ifdef __CUDA_ARCH_FEAT_SM90_ALL"));
        assert_eq!(
            MACHINE_CODE.map(|target| portable.target(target)),
            MACHINE_CODE
        );
        let targets = MACHINE_CODE.map(|target| hopper.target(target));
        assert_eq!(targets, ["sm_80", "sm_90a", "sm_100", "sm_120"]);
        assert_eq!(
            [portable, hopper].map(|source| source.is_by_architecture()),
            [false, true]
        );
        assert!(source("#if __CUDA_ARCH__ >= 890").is_by_architecture());
    }
}
