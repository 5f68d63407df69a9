//! Other trainers: what they call things, as flags and in their files, and what that is here.

mod arguments;
mod file;
mod gathered;
mod meaning;
mod model;
mod part;
mod program;
mod table;
mod taking;

pub(crate) use file::ForeignFile;
pub(crate) use gathered::{CommandLine, Setting};
pub(crate) use meaning::Meaning;
pub(crate) use program::Program;
pub(crate) use table::find;
pub(crate) use taking::{ForeignSettings, KeyOutcome, KeyRow, take};
