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
    /// The texts of the headers that it includes, each once.
    pub headers: Vec<String>,
}

impl Source {
    /// The target that the source is compiled for to get machine code for `target`: the same, or `sm_90a` for a source
    /// with instructions of Hopper alone. That runs only on 9.0, but there is no other 9.x.
    pub fn target<'a>(&self, target: &'a str) -> &'a str {
        match target {
            HOPPER if self.names(HOPPER_ALONE) => "sm_90a",
            target => target,
        }
    }

    fn names(&self, macro_name: &str) -> bool {
        let mut texts = self.headers.iter().chain([&self.text]);
        texts.any(|text| text.contains(macro_name))
    }

    /// Whether it tells architectures apart: then Hopper runs other code than [`PTX_OF`].
    pub fn is_by_architecture(&self) -> bool {
        self.names(ARCHITECTURE)
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
        let text = std::fs::read_to_string(&path).map_err(failed(&path))?;
        sources.push(Source {
            name: name.into_owned(),
            headers: read_headers(folder, &text)?,
            text,
            path,
        });
    }
    sources.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(sources)
}

/// The texts of all headers of the folder that a source includes, or another of them.
fn read_headers(folder: &Path, source: &str) -> Result<Vec<String>, Error> {
    let (mut paths, mut texts) = (Vec::new(), Vec::new());
    add_included(&mut paths, folder, source);
    while let Some(path) = paths.get(texts.len()).cloned() {
        let text = std::fs::read_to_string(&path).map_err(|error| Error::File { path, error })?;
        add_included(&mut paths, folder, &text);
        texts.push(text);
    }
    Ok(texts)
}

/// Adds the headers of the folder that a text includes, unless they are there.
fn add_included(paths: &mut Vec<PathBuf>, folder: &Path, text: &str) {
    for line in text.lines() {
        let name = line.trim_start().strip_prefix("#include \"");
        let Some((name, _)) = name.and_then(|name| name.split_once('"')) else {
            continue;
        };
        let path = folder.join(name);
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
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
            headers: Vec::new(),
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
        let header = Source {
            headers: vec!["int y;".into(), "#if __CUDA_ARCH__ >= 890".into()],
            ..source("int x;")
        };
        assert!(header.is_by_architecture());
    }

    /// `swiglu.cu` includes `output.cuh`, and that `codes.cuh`, which tells architectures apart.
    #[test]
    fn headers_of_headers_are_found() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
        let sources = read_sources(&folder).unwrap();
        let by_architecture = sources.iter().filter(|source| source.is_by_architecture());
        let names: Vec<&str> = by_architecture.map(|source| &*source.name).collect();
        assert_eq!(names, ["fp8", "gelu", "layer_norm", "rms_norm", "swiglu"]);
    }
}
