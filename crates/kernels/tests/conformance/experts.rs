//! Rows of experts: summed by token, and the weighed activation with its gradients in place.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start};
use crate::host::Host;
use crate::oracle::{constant, gradients, values, variable};
use candle_core::{DType as CandleType, Result};
use kernels::{KernelError, SumRows, WeighedSwigluBackward};
use memory::DType;

/// A permutation of places; `step` has no factor in common with their number.
fn permutation(places: usize, step: usize) -> Vec<usize> {
    (0..places)
        .map(|place| (place * step + 3) % places)
        .collect()
}

fn table(dims: &[usize], entries: &[usize]) -> Host {
    let dims = memory::Dims::try_from(dims).unwrap();
    Host::new(DType::I32, dims, entries.iter().map(|entry| *entry as f64))
}

/// The rows of a token's choices come back to it.
#[derive(Debug)]
struct Combine {
    dtype: DType,
    tokens: usize,
    choices: usize,
    width: usize,
    step: usize,
    start: Start,
}

impl Combine {
    fn slot_row(&self) -> Vec<usize> {
        permutation(self.tokens * self.choices, self.step)
    }

    /// Rows, and what the sum is added to.
    fn tensors(&self) -> [Host; 2] {
        let rows = self.tokens * self.choices;
        [(rows, 2), (self.tokens, 3)]
            .map(|(rows, seed)| Host::random(self.dtype, [rows, self.width], 1.0, seed))
    }
}

impl Case for Combine {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [rows, earlier] = self.tensors();
        let mut sums = device.start(self.start, &earlier);
        let slot_row = table(&[self.tokens, self.choices], &self.slot_row());
        let [rows, earlier, slot_row] = [rows, earlier, slot_row].map(|host| device.put(&host));
        device.run(SumRows {
            out: sums.view_mut(),
            rows: rows.view(),
            slot_row: slot_row.view(),
            init: self.start.init(&earlier),
        })?;
        Ok(vec![device.take(&sums)])
    }

    /// Sums have the bits of the order that is stated.
    fn expected(&self) -> Vec<Expected> {
        let [rows, earlier] = self.tensors().map(|host| host.values());
        let row = |values: &[f64], row: usize| values[row * self.width..][..self.width].to_vec();
        let slots = self.slot_row();
        let sum = |token: usize| {
            let mut sums = vec![0.0f32; self.width];
            let slots = slots[token * self.choices..][..self.choices].iter();
            let terms = slots.map(|slot| row(&rows, *slot));
            let init = (self.start != Start::Overwrite).then(|| row(&earlier, token));
            for terms in terms.chain(init) {
                let places = sums.iter_mut().zip(terms);
                places.for_each(|(sum, term)| *sum += term as f32);
            }
            sums.into_iter().map(f64::from)
        };
        let sums = (0..self.tokens).flat_map(sum).collect();
        vec![Expected::new("sum_rows", sums, Rule::Exact)]
    }
}

#[derive(Debug)]
struct Weighed {
    dtype: DType,
    rows: usize,
    width: usize,
    /// The step of the permutation of weights, if they are not by row.
    step: Option<usize>,
    /// Largest of the gate's entries: up to where a sigmoid is 0 or 1 in f32.
    range: f64,
}

impl Weighed {
    fn slots(&self) -> Vec<usize> {
        match self.step {
            Some(step) => permutation(self.rows, step),
            None => (0..self.rows).collect(),
        }
    }

    /// Gate and up side by side, weights, and the gradient of the activation.
    fn tensors(&self) -> [Host; 3] {
        let [rows, width] = [self.rows, self.width];
        let gate = Host::random(self.dtype, [rows, width], self.range, 1).values();
        let up = Host::random(self.dtype, [rows, width], 1.0, 2).values();
        let both = gate.chunks(width).zip(up.chunks(width));
        let gate_up = both.flat_map(|(gate, up)| [gate, up].concat());
        [
            Host::new(self.dtype, [rows, 2 * width], gate_up),
            Host::random(DType::F32, [1, rows], 1.0, 3),
            Host::random(self.dtype, [rows, width], 1.0, 4),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 3]> {
        let [gate_up, weights, dact] = self.tensors();
        let (gate_up, weights) = (variable(&gate_up)?, variable(&weights)?);
        let gate = gate_up.narrow(1, 0, self.width)?;
        let up = gate_up.narrow(1, self.width, self.width)?;
        let silu = (&gate * (gate.neg()?.exp()? + 1.0)?.recip()?)?;
        let slots = constant(&table(&[self.rows], &self.slots()))?;
        let slots = slots.to_dtype(CandleType::U32)?;
        let own = weights.flatten_all()?.index_select(&slots, 0)?;
        let act = (silu * up)?.broadcast_mul(&own.reshape((self.rows, 1))?)?;
        let mut found = gradients(&act, &constant(&dact)?, &[&gate_up, &weights])?;
        let dweights = found.remove(1);
        Ok([values(&act)?, found.remove(0), dweights])
    }
}

impl Case for Weighed {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [mut gate_up, weights, dact] = self.tensors().map(|host| device.put(&host));
        let mut act = device.room(self.dtype, [self.rows, self.width]);
        let mut dweights = device.room(DType::F32, [1, self.rows]);
        let slots = device.put(&table(&[self.rows], &self.slots()));
        let row_slot = self.step.map(|_| slots.view());
        device.run(kernels::WeighedSwiglu {
            act: act.view_mut(),
            gate_up: gate_up.view(),
            weights: weights.view(),
            row_slot,
        })?;
        device.run(WeighedSwigluBackward {
            gate_up: gate_up.view_mut(),
            dweights: dweights.view_mut(),
            dact: dact.view(),
            weights: weights.view(),
            row_slot,
        })?;
        let outputs = [&act, &gate_up, &dweights];
        Ok(outputs.map(|tensor| device.take(tensor)).into())
    }

    fn expected(&self) -> Vec<Expected> {
        let [act, dgate_up, dweights] = self.oracle().unwrap();
        vec![
            Expected::new("weighed_swiglu", act, Rule::Standard),
            Expected::new("weighed_swiglu_backward", dgate_up, Rule::Standard),
            Expected::new("dweights", dweights, Rule::Standard),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    // The last is wider than a block of threads covers.
    let sizes = [
        (1, 1, 1, 1),
        (5, 1, 131, 3),
        (37, 2, 48, 5),
        (150, 4, 33, 7),
        (3, 8, 5000, 5),
    ];
    for (tokens, choices, width, step) in sizes {
        for start in [Start::Overwrite, Start::Accumulate, Start::Add] {
            cases.push(Box::new(Combine {
                dtype,
                tokens,
                choices,
                width,
                step,
                start,
            }));
        }
    }
    for (rows, width) in [(1, 1), (1, 131), (37, 131), (37, 1000), (3, 5000)] {
        for (step, range) in [(None, 3.0), (Some(5), 3.0), (Some(5), 200.0)] {
            cases.push(Box::new(Weighed {
                dtype,
                rows,
                width,
                step,
                range,
            }));
        }
    }
    cases
}
