//! Tests of the binary, as a person or a script uses it: what it prints, what it writes, and how it ends.
//!
//! Each test runs it in a folder of its own ([`workplace`]); `small.toml` there trains a model of 34,000 parameters
//! in milliseconds.

mod batches;
mod metrics;
mod workplace;

mod attention;
mod bad_batches;
mod bad_folders;
mod bad_model;
mod bad_settings;
mod bad_sizes;
mod bad_token_files;
mod bench;
mod chat;
mod check;
mod checkpoints;
#[cfg(feature = "cuda")]
mod cuda;
mod default_run;
mod disk_room;
mod diverged;
mod doctor;
mod documented;
mod elsewhere;
mod epochs;
mod eval;
mod every_key;
mod export;
mod foreign_data;
mod fp8;
mod freeze;
mod generate;
mod guides;
mod init;
mod last_step;
mod lora;
mod memory_limit;
mod mixed_data;
mod not_built;
mod offload_activations;
mod offload_optimizer;
mod one_gpu;
mod optimizer_states;
mod other_tools;
mod output;
mod plan;
mod plan_from;
mod policy;
mod preferences;
mod prepare;
mod profile;
mod quantised;
mod ranks;
mod recompute;
mod recompute_auto;
mod references;
mod release;
mod report;
mod resident_set;
mod resume;
mod resume_auto;
mod run_directory;
mod same_lines;
mod schemas;
mod show;
mod signals;
#[cfg(feature = "cuda")]
mod stand_in;
mod study;
mod terminal;
mod token_files;
mod tour;
mod trace;
