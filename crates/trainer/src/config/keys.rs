//! Every key, and how keys are found in a table.

use toml::{Table, Value};

use super::args::RunArgs;
use super::choices::{
    AttentionBackend, DataFormat, Dtype, GradDtype, Master, OffloadWindow, OptimizerPlace,
    Schedule, StateDtype,
};
use super::error::ConfigError;
use super::kind::{Kind, Range};
use super::unknown::nearest_key;

/// Every key with its kind, in the order of `configs/reference.toml`.
pub const KEYS: &[(&str, Kind)] = &[
    ("model.hidden", Kind::Whole(1)),
    ("model.layers", Kind::Whole(1)),
    ("model.heads", Kind::Whole(1)),
    ("model.kv_heads", Kind::Whole(1)),
    ("model.head_dim", Kind::Whole(1)),
    ("model.ffn", Kind::Whole(1)),
    ("model.vocab", Kind::Whole(1)),
    ("model.tie_embeddings", Kind::Flag),
    ("model.qkv_bias", Kind::Flag),
    ("model.qk_norm", Kind::Flag),
    ("model.norm_eps", Kind::Real(Range::Positive)),
    ("model.rope_theta", Kind::Real(Range::Positive)),
    ("model.rope_scaling.factor", Kind::Real(Range::Positive)),
    (
        "model.rope_scaling.low_freq_factor",
        Kind::Real(Range::Positive),
    ),
    (
        "model.rope_scaling.high_freq_factor",
        Kind::Real(Range::Positive),
    ),
    ("model.rope_scaling.original_max_position", Kind::Whole(1)),
    ("model.init_std", Kind::Real(Range::Positive)),
    ("data.path", Kind::Text),
    ("data.format", Kind::Choice(DataFormat::NAMES)),
    ("data.shuffle", Kind::Flag),
    ("data.seq", Kind::Whole(1)),
    ("batch.micro", Kind::Whole(1)),
    ("batch.accum", Kind::Whole(1)),
    ("train.steps", Kind::Whole(1)),
    ("train.seed", Kind::Whole(0)),
    ("train.device", Kind::Device),
    ("train.dtype", Kind::Choice(Dtype::NAMES)),
    ("train.threads", Kind::Whole(1)),
    ("train.max_skipped", Kind::Whole(0)),
    ("optim.state_dtype", Kind::Choice(StateDtype::NAMES)),
    ("optim.master", Kind::Choice(Master::NAMES)),
    ("optim.grad_dtype", Kind::Choice(GradDtype::NAMES)),
    ("optim.beta1", Kind::Real(Range::BelowOne)),
    ("optim.beta2", Kind::Real(Range::BelowOne)),
    ("optim.eps", Kind::Real(Range::Positive)),
    ("optim.weight_decay", Kind::Real(Range::NotNegative)),
    ("optim.clip_norm", Kind::Real(Range::PositiveOrInfinite)),
    ("optim.f32_states", Kind::Texts),
    ("lr.peak", Kind::Real(Range::NotNegative)),
    ("lr.schedule", Kind::Choice(Schedule::NAMES)),
    ("lr.warmup_steps", Kind::Whole(0)),
    ("lr.decay_steps", Kind::Whole(1)),
    ("lr.min_ratio", Kind::Real(Range::Share)),
    ("recompute.spec", Kind::Text),
    ("recompute.layers", Kind::TextTable),
    ("attention.backend", Kind::Choice(AttentionBackend::NAMES)),
    ("offload.optimizer", Kind::Choice(OptimizerPlace::NAMES)),
    ("offload.activations", Kind::Text),
    ("offload.fraction", Kind::Real(Range::Share)),
    ("offload.window", Kind::Choice(OffloadWindow::NAMES)),
    ("offload.buffer_count", Kind::Whole(1)),
    ("offload.slab_mib", Kind::WholeUpTo(1, 1 << 20)),
    ("offload.path", Kind::Text),
    ("memory.limit", Kind::Size),
    ("memory.budget", Kind::Size),
    ("memory.head_chunk", Kind::Whole(1)),
    ("hardware.h2d_gbps", Kind::Real(Range::Positive)),
    ("hardware.d2h_gbps", Kind::Real(Range::Positive)),
    ("hardware.both_ways_gbps", Kind::Real(Range::Positive)),
    ("hardware.peak_tflops", Kind::Real(Range::Positive)),
    ("log.every", Kind::Whole(1)),
    ("log.trace", Kind::Flag),
    ("log.nvtx", Kind::Flag),
];

/// The kind of the key called `name`.
pub fn kind_of(name: &str) -> Option<Kind> {
    KEYS.iter()
        .find(|(key, _)| *key == name)
        .map(|(_, kind)| *kind)
}

/// Visits every key below `prefix` (dotted, empty at the root) with its value, each checked.
///
/// # Errors
/// The first unknown key or unfitting value, which `place` has.
pub fn visit<'a>(
    prefix: &str,
    value: &'a Value,
    place: &str,
    found: &mut Vec<(String, &'a Value)>,
) -> Result<(), ConfigError> {
    if let Some(kind) = kind_of(prefix) {
        kind.check(prefix, value, place)?;
        found.push((prefix.to_owned(), value));
        return Ok(());
    }
    if !prefix.is_empty() && !is_section(prefix) {
        return Err(unknown(prefix, value, place));
    }
    let Some(table) = value.as_table() else {
        return Err(ConfigError::Value {
            key: prefix.to_owned(),
            value: value.to_string(),
            place: place.to_owned(),
            expected: "a section with keys of its own".to_owned(),
        });
    };
    for (name, value) in table {
        visit(&join(prefix, name), value, place, found)?;
    }
    Ok(())
}

fn join(prefix: &str, name: &str) -> String {
    match prefix {
        "" => name.to_owned(),
        _ => format!("{prefix}.{name}"),
    }
}

fn is_section(name: &str) -> bool {
    KEYS.iter().any(|(key, _)| {
        key.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with('.'))
    })
}

/// The error for an unknown name; below an unknown section, for the first key in it.
fn unknown(name: &str, value: &Value, place: &str) -> ConfigError {
    if let Some((first, value)) = value.as_table().and_then(|table| table.iter().next()) {
        return unknown(&join(name, first), value, place);
    }
    let keys = KEYS.iter().map(|(key, _)| *key);
    ConfigError::UnknownKey {
        key: name.to_owned(),
        place: place.to_owned(),
        nearest: nearest_key(name, keys, RunArgs::flags_and_keys()),
    }
}

/// What there is instead of an unknown key: the keys of its section, or the sections.
pub fn overview(name: &str) -> String {
    let section = name.split('.').next().unwrap_or(name);
    let names = KEYS
        .iter()
        .filter_map(|(key, _)| key.strip_prefix(section)?.strip_prefix('.'))
        .collect::<Vec<_>>();
    let explained = "configs/reference.toml in the source explains every key, and a run directory's config.toml has all \
                     their values";
    if names.is_empty() {
        let mut sections: Vec<&str> = KEYS
            .iter()
            .filter_map(|(key, _)| key.split('.').next())
            .collect();
        sections.dedup();
        return format!("the sections are {}; {explained}", sections.join(", "));
    }
    format!("[{section}] has {}; {explained}", names.join(", "))
}

/// Puts `value` at the dotted `key`, making sections on the way.
pub fn insert(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => {
            table.insert(key.to_owned(), value);
        }
        Some((section, rest)) => {
            let entry = table
                .entry(section)
                .or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(section) = entry {
                insert(section, rest, value);
            }
        }
    }
}

/// The value at the dotted `key`.
pub fn get<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        None => table.get(key),
        Some((section, rest)) => get(table.get(section)?.as_table()?, rest),
    }
}
