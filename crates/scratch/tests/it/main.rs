//! Files and folders for what lives on a disk during a run.

mod file;
mod folder;
