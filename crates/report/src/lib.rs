//! What a run tells: `metrics.jsonl`, progress on a terminal, tables and pictures of memory, and the
//! page `report.html`; and pages of memory snapshots.
//!
//! This crate reads records of [`memory`] and [`model`]; it never changes anything of a run.

mod axes;
mod growth;
mod metrics;
mod numbers;
pub mod page;
pub mod pictures;
mod process;
mod progress;
mod scatter;
mod svg;
mod tables;
mod tensorboard;

pub use growth::MemoryGrowth;
pub use metrics::{
    CheckpointRecord, EndRecord, EvalRecord, METRICS_SCHEMA_VERSION, MetricsFile, PolicyMarks,
    ResumeRecord, RewardMarks, RouterMarks, RunRecord, SampleRecord, StepRecord, Timing,
    UnderflowMarks, max_rss_bytes, milliseconds, resident_bytes,
};
pub use process::{Fate, OomKills, ProcessRecord};
pub use progress::{Busy, Progress};
pub use scatter::{Scatter, ScatterPoint, unit_of_bytes};
pub use tables::{Align, Column, Table, memory_table};
pub use tensorboard::TensorBoard;
