//! The sources of a folder, and the target that each is compiled for.

use crate::Error;
use std::path::{Path, PathBuf};

/// Ampere (8.6 and 8.9 run it too), Hopper, and both kinds of Blackwell.
pub const MACHINE_CODE: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];

/// The target whose PTX is kept, for GPUs of other kinds: the oldest, since later GPUs have all its instructions.
pub const PTX_OF: &str = "sm_80";

/// The target whose PTX is kept beside it, for tests, of sources that are others there.
pub const HOPPER: &str = "sm_90";

/// The target of instructions that Hopper alone has.
pub const SM_90A: &str = "sm_90a";

/// How the names of macros begin by which a source tells architectures apart.
const ARCHITECTURE: &str = "__CUDA_ARCH_";

/// How the names of sources end that have instructions of Hopper alone.
const HOPPER_ALONE: &str = "_sm90";

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
    /// Whether it has instructions of Hopper alone, so that no other GPU has code of it.
    pub fn is_for_hopper_alone(&self) -> bool {
        self.name.ends_with(HOPPER_ALONE)
    }

    /// The target that the source is compiled for to get machine code for `target`: the same, but for a source
    /// with instructions of Hopper alone `sm_90a` or nothing. `sm_90a` runs only on 9.0, but there is no other 9.x.
    pub fn target<'a>(&self, target: &'a str) -> Option<&'a str> {
        match (self.is_for_hopper_alone(), target) {
            (false, target) => Some(target),
            (true, HOPPER | SM_90A) => Some(SM_90A),
            (true, _) => None,
        }
    }

    /// Whether Hopper runs other code of it than [`PTX_OF`], since it tells architectures apart or is for Hopper alone.
    pub fn has_own_code_on_hopper(&self) -> bool {
        let mut texts = self.headers.iter().chain([&self.text]);
        self.is_for_hopper_alone() || texts.any(|text| text.contains(ARCHITECTURE))
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
    fn a_source_for_hopper_alone_has_no_other_target() {
        let source = |text: &str| Source {
            path: "x.cu".into(),
            name: "x".into(),
            text: text.into(),
            headers: Vec::new(),
        };
        let portable = source("int x;");
        let hopper = Source {
            name: "x_sm90".into(),
            ..portable.clone()
        };
        let targets =
            |source: &Source| MACHINE_CODE.map(|target| source.target(target).map(str::to_string));
        assert_eq!(
            targets(&portable),
            MACHINE_CODE.map(|target| Some(target.to_string()))
        );
        assert_eq!(
            targets(&hopper),
            [None, Some(SM_90A.to_string()), None, None]
        );
        assert_eq!(hopper.target(SM_90A), Some(SM_90A));
        assert_eq!(
            [portable, hopper].map(|source| source.has_own_code_on_hopper()),
            [false, true]
        );
        assert!(source("#if __CUDA_ARCH__ >= 890").has_own_code_on_hopper());
        let header = Source {
            headers: vec!["int y;".into(), "#if __CUDA_ARCH__ >= 890".into()],
            ..source("int x;")
        };
        assert!(header.has_own_code_on_hopper());
    }

    /// `swiglu.cu` includes `output.cuh`, and that `codes.cuh`, which tells architectures apart.
    #[test]
    fn headers_of_headers_are_found() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
        let sources = read_sources(&folder).unwrap();
        let own = sources
            .iter()
            .filter(|source| source.has_own_code_on_hopper());
        let names: Vec<&str> = own.map(|source| &*source.name).collect();
        assert_eq!(
            names,
            [
                "flash_backward_sm90",
                "flash_forward_sm90",
                "fp8",
                "gelu",
                "grouped_matmul_sm90",
                "layer_norm",
                "rms_norm",
                "swiglu"
            ]
        );
    }
}
