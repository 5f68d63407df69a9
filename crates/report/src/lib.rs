//! What a run tells: `metrics.jsonl`, progress on a terminal, tables of memory.
//!
//! This crate reads records of [`memory`] and [`model`]; it never changes anything of a run.

mod metrics;
mod progress;
mod tables;

pub use metrics::{EndRecord, MetricsFile, RunRecord, StepRecord, Timing, max_rss_bytes};
pub use progress::Progress;
pub use tables::{Align, Table, memory_table};
