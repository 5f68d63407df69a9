//! Compiles CUDA sources to machine code and PTX by NVRTC, NVIDIA's run-time compiler: a library that is loaded when it
//! is needed, from whatever toolkit `CUDA_HOME` names. No GPU and no driver are asked for.
//!
//! Build scripts call [`compile_all`]; the program `nvrtc` does the same for a folder, for scripts that look at what
//! comes out.

mod error;
mod library;
mod source;
mod work;

pub use error::Error;
pub use library::{Compiled, Nvrtc};
pub use source::{MACHINE_CODE, PTX_OF, Source, read_sources};
pub use work::{Job, compile_all, jobs};
