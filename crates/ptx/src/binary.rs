//! The texts of this binary, and the compiler that knows their lines.

use crate::PtxTexts;
use nvrtc::{HOPPER, Nvrtc, PTX_OF, read_sources};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

impl PtxTexts {
    /// The PTX that this binary carries. Mistakes name lines of the CUDA sources where `CUDA_HOME` has the compiler.
    pub fn of_this_binary() -> PtxTexts {
        PtxTexts::new(kernels::cuda::ptx()).with_lines(|name| with_lines(name, PTX_OF))
    }

    /// What Hopper runs: other PTX of those sources that have their own code there.
    pub fn on_hopper() -> PtxTexts {
        let own: BTreeMap<_, _> = kernels::cuda::ptx_on_hopper().collect();
        let others = kernels::cuda::ptx().filter(|(name, _)| !own.contains_key(name));
        let all: Vec<_> = others.chain(own.clone()).collect();
        PtxTexts::new(all).with_lines(|name| with_lines(name, HOPPER))
    }
}

/// The PTX of a source of `kernels/` for a target where it has its own code, compiled a second time, with line information.
///
/// # Errors
/// If `CUDA_HOME` names no compiler, or that refuses the source.
pub fn with_lines(name: &str, target: &str) -> Result<String, String> {
    let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let compile = || {
        let nvrtc = Nvrtc::load(home.as_deref())?;
        let sources = read_sources(&folder)?;
        let source = sources.iter().find(|source| source.name == name);
        let compiled = source.map(|source| {
            let own = source
                .target(target)
                .filter(|_| source.has_own_code_on_hopper());
            nvrtc.ptx_with_lines(source, own.unwrap_or(PTX_OF))
        });
        compiled.transpose()
    };
    let compiled: Result<_, nvrtc::Error> = compile();
    let found = compiled.map_err(|error| error.to_string())?;
    found.ok_or_else(|| format!("there is no {name}.cu"))
}
