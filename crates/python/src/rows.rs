//! Rows of tokens as Python has them: what belongs to a token stands at its own place, as in transformers. A model wants it at the place before.

use crate::arrays::Array;
use crate::errors::usage;
use pyo3::prelude::*;
use trainer::TokenRows;

/// A label where nothing is learnt.
const MASKED: i64 = trainer::MASKED as i64;

/// Limits on rows of tokens.
#[derive(Clone, Copy)]
pub(crate) struct RowSizes {
    /// The most tokens that the model takes of each; one more is a target alone.
    pub(crate) seq: usize,
    /// Tokens that it knows.
    pub(crate) vocab: usize,
}

/// Reads rows with their labels: the target of each token is the label of the next.
pub(crate) fn labelled(
    sizes: RowSizes,
    input_ids: &Bound<PyAny>,
    labels: &Bound<PyAny>,
    positions: Option<&Bound<PyAny>>,
) -> PyResult<TokenRows> {
    let py = input_ids.py();
    let (dims, ids) = tokens(sizes, "input_ids", input_ids)?;
    let like_ids = |name, of: &Bound<PyAny>| {
        let (of, values) = Array::read(name, of)?.whole(py)?;
        match of == dims {
            true => Ok(values),
            false => {
                let message = format!(
                    "`input_ids` are {dims:?} and `{name}` {of:?}; every token has one, and a label may be {MASKED}"
                );
                Err(usage(py, message))
            }
        }
    };
    let mut labels = like_ids("labels", labels)?;
    let is_label = |label| label == MASKED || (0..sizes.vocab as i64).contains(&label);
    check(py, ("labels", sizes.vocab), dims, &labels, is_label)?;
    let positions = positions.map(|of| like_ids("positions", of)).transpose()?;
    if let Some(positions) = &positions {
        // No document goes on with the first token of the next.
        let begins = positions.iter().map(|position| *position == 0);
        mask(&mut labels, begins);
    }
    let rows = next_tokens(dims, &ids, &labels, positions.as_deref());
    let message = "all `labels` behind the first token of a row, or of a document, are -100: a step needs one to learn from";
    has_targets(py, rows, message)
}

/// Reads rows whose tokens are targets themselves, where `mask` is not 0.
pub(crate) fn masked(
    sizes: RowSizes,
    ids: &Bound<PyAny>,
    mask_of: Option<&Bound<PyAny>>,
) -> PyResult<TokenRows> {
    let py = ids.py();
    let (dims, ids) = tokens(sizes, "ids", ids)?;
    let mut labels = ids.clone();
    if let Some(mask_of) = mask_of {
        let mask_of = Array::read("mask", mask_of)?.floats(py, dims, false)?;
        mask(&mut labels, mask_of.iter().map(|mask| *mask == 0.0));
    }
    let rows = next_tokens(dims, &ids, &labels, None);
    let message =
        "`mask` is 0 at all tokens behind the first of their row: a step needs one to learn from";
    has_targets(py, rows, message)
}

/// Reads a number for each token of [`masked`] rows, or where there may be for each row, and puts it at the place of the target. At targets they
/// are finite.
pub(crate) fn numbers(
    rows: &TokenRows,
    (name, may_be_of_rows): (&'static str, bool),
    of: &Bound<PyAny>,
) -> PyResult<Vec<f32>> {
    let ([count, width], py) = (rows.dims, of.py());
    let values = Array::read(name, of)?.floats(py, [count, width + 1], may_be_of_rows)?;
    let values = behind_first(&values, width + 1);
    let mut all = values.iter().zip(&rows.targets);
    match all.position(|(value, target)| *target != MASKED && !value.is_finite()) {
        None => Ok(values),
        Some(at) => {
            let message = format!(
                "`{name}` at [{}, {}] is {}; a step learns from finite numbers",
                at / width,
                at % width + 1,
                values[at]
            );
            Err(usage(py, message))
        }
    }
}

/// The same back: numbers of targets at the places of the tokens, and 0 at the first of each row.
pub(crate) fn at_tokens(rows: &TokenRows, values: &[f32]) -> Vec<f32> {
    let rows = values.chunks(rows.dims[1]);
    rows.flat_map(|row| std::iter::once(0.0).chain(row.iter().copied()))
        .collect()
}

fn has_targets(py: Python, rows: TokenRows, message: &str) -> PyResult<TokenRows> {
    match rows.targets.iter().all(|target| *target == MASKED) {
        true => Err(usage(py, message.into())),
        false => Ok(rows),
    }
}

fn check(
    py: Python,
    (name, vocab): (&str, usize),
    [_, width]: [usize; 2],
    tokens: &[i64],
    is_known: impl Fn(i64) -> bool,
) -> PyResult<()> {
    let Some(at) = tokens.iter().position(|token| !is_known(*token)) else {
        return Ok(());
    };
    let message = format!(
        "`{name}` at [{}, {}] is {}; the model knows tokens from 0 to {}",
        at / width,
        at % width,
        tokens[at],
        vocab - 1
    );
    Err(usage(py, message))
}

fn tokens(
    sizes: RowSizes,
    name: &'static str,
    of: &Bound<PyAny>,
) -> PyResult<([usize; 2], Vec<i64>)> {
    let py = of.py();
    let (dims, ids) = Array::read(name, of)?.whole(py)?;
    let RowSizes { seq, vocab } = sizes;
    if !(2..=seq + 1).contains(&dims[1]) {
        let message = format!(
            "`{name}` are {dims:?}; this trainer takes rows of 2 to {} tokens, of which the last is a target alone: `seq` says how many",
            seq + 1
        );
        return Err(usage(py, message));
    }
    check(py, (name, vocab), dims, &ids, |id| {
        (0..vocab as i64).contains(&id)
    })?;
    Ok((dims, ids))
}

fn mask(labels: &mut [i64], are_off: impl Iterator<Item = bool>) {
    let off = labels.iter_mut().zip(are_off).filter(|(_, is_off)| *is_off);
    off.for_each(|(label, _)| *label = MASKED);
}

/// Rows in which each token but the last has what stands at the next one as its target.
fn next_tokens(
    dims: [usize; 2],
    ids: &[i64],
    labels: &[i64],
    positions: Option<&[i64]>,
) -> TokenRows {
    let [rows, width] = dims;
    let without_last = |of: &[i64]| {
        let rows = of.chunks(width);
        rows.flat_map(|row| row[..width - 1].iter().copied())
            .collect()
    };
    TokenRows {
        dims: [rows, width - 1],
        ids: without_last(ids),
        targets: behind_first(labels, width),
        positions: positions.map(without_last),
    }
}

fn behind_first<T: Copy>(of: &[T], width: usize) -> Vec<T> {
    of.chunks(width)
        .flat_map(|row| row[1..].iter().copied())
        .collect()
}
