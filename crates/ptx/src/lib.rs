//! Interprets PTX on the CPU, for tests: the PTX that NVRTC makes and the binary carries.
//!
//! A [`Module`] is read from the text, and [`Module::launch`] runs one of its kernels on a [`GlobalMemory`]. Every access is
//! checked; [`MistakeKind`] lists what is found. Instructions compute what the PTX manual documents, to the bit where it does.
//!
//! ```
//! use ptx::{ArgumentValue, GlobalMemory, Module, Shape};
//!
//! let module = Module::parse(
//!     ".visible .entry add_one(.param .u64 at)
//!     {
//!         .reg .b32 %r<4>;
//!         .reg .b64 %rd<4>;
//!         ld.param.u64 %rd1, [at];
//!         mov.u32 %r1, %tid.x;
//!         mul.wide.u32 %rd2, %r1, 4;
//!         add.s64 %rd3, %rd1, %rd2;
//!         ld.global.u32 %r2, [%rd3];
//!         add.s32 %r3, %r2, 1;
//!         st.global.u32 [%rd3], %r3;
//!         ret;
//!     }",
//! )
//! .unwrap();
//! let mut memory = GlobalMemory::new();
//! let at = memory.allocate_with("numbers", &[0; 128]);
//! let shape = Shape { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
//! module.launch("add_one", shape, &[ArgumentValue::U64(at)], &mut memory).unwrap();
//! assert_eq!(memory.read(at + 124, 4).unwrap(), [1, 0, 0, 0]);
//! ```

mod access;
mod arithmetic;
mod async_copy;
mod barrier;
#[cfg(feature = "cuda")]
mod binary;
mod clock;
mod collective;
mod compare;
mod control;
mod convert;
mod copies;
mod declaration;
mod descriptor;
mod driver;
mod error;
mod executable;
mod kernel;
mod lines;
mod logic;
mod machine;
mod matrix;
mod mbarrier;
mod memory;
mod module;
mod opcodes;
mod operands;
mod parse;
mod phase;
mod products;
mod registers;
mod report;
mod shadow;
mod text;
mod texts;
mod warp;
mod warp_group;
mod wgmma;

#[cfg(feature = "cuda")]
pub use binary::with_lines;
pub use driver::Interpreter;
pub use error::{LaunchError, Mistake, MistakeKind, ParseError};
pub use kernel::{ArgumentValue, PtxKernel, PtxParameter, Shape};
pub use lines::SourceLines;
pub use memory::GlobalMemory;
pub use module::Module;
pub use opcodes::supported;
pub use report::{AccessCounts, LineCounts, Report};
pub use texts::PtxTexts;
