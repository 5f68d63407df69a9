//! The stand-in for cuDNN: it computes what a graph says, and refuses what the library refuses.

mod graphs;
mod library;
mod oracle;
mod ragged;
mod refusals;
mod run;
