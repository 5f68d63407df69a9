//! Compiles CUDA sources to machine code and PTX by NVRTC, NVIDIA's run-time compiler: a library that is loaded when it
//! is needed, from the toolkit that `CUDA_HOME` names. It needs no GPU and no driver. Build scripts call
//! [`compile_all`]; the program `nvrtc` does the same for a folder, for scripts that inspect the result.

mod error;
mod library;
mod source;
mod work;

pub use error::Error;
pub use library::{Compiled, Nvrtc};
pub use source::{HOPPER, MACHINE_CODE, PTX_OF, SM_90A, Source, read_sources};
pub use work::{Job, compile_all, jobs};
