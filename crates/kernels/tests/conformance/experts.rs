//! Rows of experts: summed by token, the weighed activation with its gradients in place, and biases of experts.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, gradient_starts};
use crate::host::Host;
use crate::oracle::{add, constant, gradients, values, variable};
use crate::swiglu::{FUNCTIONS, activated, gate_and_up, terms};
use candle_core::{DType as CandleType, Result, Tensor};
use kernels::{
    ExpertBias, ExpertBiasDweights, ExpertBiasGradient, ExpertRows, GateFunction, KernelError,
    RowWeights, SumRows, WeighedBias, WeighedGatedActivation, WeighedGatedActivationBackward,
};
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
    /// How many experts' biases are added.
    experts: Option<usize>,
    start: Start,
}

/// Which of some experts each choice is.
fn ids(dims: &[usize], experts: usize) -> Host {
    let choices = dims.iter().product();
    let ids: Vec<usize> = (0..choices)
        .map(|choice| (5 * choice + 2) % experts)
        .collect();
    table(dims, &ids)
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

    /// Biases, the experts of choices, and their weights.
    fn biases(&self) -> Option<[Host; 3]> {
        let (experts, choices) = (self.experts?, [self.tokens, self.choices]);
        Some([
            Host::random(self.dtype, [experts, self.width], 1.0, 4),
            ids(&choices, experts),
            Host::random(DType::F32, choices, 1.0, 5),
        ])
    }

    /// The bias of a choice's expert times the choice's weight: the term that `SumRows` adds to the choice's row.
    fn added(&self, choice: usize) -> Vec<f64> {
        let [bias, ids, weights] = self.biases().unwrap().map(|host| host.values());
        let bias = &bias[ids[choice] as usize * self.width..][..self.width];
        bias.iter().map(|bias| weights[choice] * bias).collect()
    }
}

impl Case for Combine {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [rows, earlier] = self.tensors();
        let mut sums = device.start(self.start, &earlier);
        let slot_row = table(&[self.tokens, self.choices], &self.slot_row());
        let [rows, earlier, slot_row] = [rows, earlier, slot_row].map(|host| device.put(&host));
        let biases = self.biases();
        let biases = biases.map(|biases| biases.map(|host| device.put(&host)));
        let bias = biases.as_ref().map(|[bias, ids, weights]| WeighedBias {
            of: ExpertBias {
                bias: bias.view(),
                ids: ids.view(),
            },
            weights: weights.view(),
        });
        device.run(SumRows {
            out: sums.view_mut(),
            rows: rows.view(),
            slot_row: slot_row.view(),
            bias,
            init: self.start.init(&earlier),
        })?;
        Ok(vec![device.take(&sums)])
    }

    /// Sums without a bias have the bits of the order that is stated.
    fn expected(&self) -> Vec<Expected> {
        let [rows, earlier] = self.tensors().map(|host| host.values());
        let row = |values: &[f64], row: usize| values[row * self.width..][..self.width].to_vec();
        let slots = self.slot_row();
        let sum = |token: usize| {
            let mut sums = vec![0.0f32; self.width];
            let choices = token * self.choices..(token + 1) * self.choices;
            let terms = choices.flat_map(|choice| {
                let added = self.experts.map(|_| self.added(choice));
                [row(&rows, slots[choice])].into_iter().chain(added)
            });
            let init = (self.start != Start::Overwrite).then(|| row(&earlier, token));
            for terms in terms.chain(init) {
                let places = sums.iter_mut().zip(terms);
                places.for_each(|(sum, term)| *sum += term as f32);
            }
            sums.into_iter().map(f64::from)
        };
        let sums = (0..self.tokens).flat_map(sum).collect();
        let rule = match self.experts {
            None => Rule::Exact,
            Some(_) => Rule::Standard,
        };
        vec![Expected::new("sum_rows", sums, rule).with_terms(1.0)]
    }
}

#[derive(Debug)]
struct Weighed {
    dtype: DType,
    function: GateFunction,
    rows: usize,
    width: usize,
    /// The step of the permutation of weights, if they are not by row.
    step: Option<usize>,
    /// Largest of the gate's entries: up to where a sigmoid is 0 or 1 in f32.
    range: f64,
    /// How many experts' biases are added.
    experts: Option<usize>,
    start: Start,
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
        let of = (self.dtype, self.function);
        [
            gate_and_up(of, [rows, width], [self.range, 1.0]),
            Host::random(DType::F32, [1, rows], 1.0, 3),
            Host::random(self.dtype, [rows, width], 1.0, 4),
        ]
    }

    /// Biases, and the experts of choices.
    fn biases(&self) -> Option<[Host; 2]> {
        let experts = self.experts?;
        Some([
            Host::random(self.dtype, [experts, 2 * self.width], 1.0, 5),
            ids(&[self.rows, 1], experts),
        ])
    }

    fn earlier(&self) -> Host {
        Host::random(DType::F32, [1, self.rows], 1.0, 6)
    }

    fn oracle(&self) -> Result<[Vec<f64>; 3]> {
        let [gate_up, weights, dact] = self.tensors();
        let (gate_up, weights) = (variable(&gate_up)?, variable(&weights)?);
        let mut both = gate_up.as_tensor().clone();
        if let Some([bias, ids]) = self.biases() {
            let ids = ids.values();
            let of_rows = self.slots().into_iter().map(|slot| ids[slot] as u32);
            let of_rows = Tensor::from_iter(of_rows, &candle_core::Device::Cpu)?;
            both = (both + constant(&bias)?.index_select(&of_rows, 0)?)?;
        }
        let gate = both.narrow(1, 0, self.width)?;
        let up = both.narrow(1, self.width, self.width)?;
        let slots = constant(&table(&[self.rows], &self.slots()))?;
        let slots = slots.to_dtype(CandleType::U32)?;
        let own = weights.flatten_all()?.index_select(&slots, 0)?;
        let act =
            activated(self.function, &gate, &up)?.broadcast_mul(&own.reshape((self.rows, 1))?)?;
        let mut found = gradients(&act, &constant(&dact)?, &[&gate_up, &weights])?;
        let earlier = self.start.values(&self.earlier());
        let dweights = add(found.remove(1), &earlier);
        Ok([values(&act)?, found.remove(0), dweights])
    }
}

impl Case for Weighed {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [mut gate_up, weights, dact] = self.tensors().map(|host| device.put(&host));
        let mut act = device.room(self.dtype, [self.rows, self.width]);
        let (earlier, biases) = (self.earlier(), self.biases());
        let mut dweights = device.start(self.start, &earlier);
        let (earlier, biases) = (
            device.put(&earlier),
            biases.map(|biases| biases.map(|host| device.put(&host))),
        );
        let bias = biases.as_ref().map(|[bias, ids]| ExpertBias {
            bias: bias.view(),
            ids: ids.view(),
        });
        let slots = device.put(&table(&[self.rows], &self.slots()));
        let row_slot = self.step.map(|_| slots.view());
        device.run(WeighedGatedActivation {
            act: act.view_mut(),
            gate_up: gate_up.view(),
            function: self.function,
            weights: weights.view(),
            row_slot,
            bias,
        })?;
        device.run(WeighedGatedActivationBackward {
            gate_up: gate_up.view_mut(),
            function: self.function,
            dweights: dweights.view_mut(),
            dweights_init: self.start.init(&earlier),
            dact: dact.view(),
            weights: weights.view(),
            row_slot,
            bias,
        })?;
        let outputs = [&act, &gate_up, &dweights];
        Ok(outputs.map(|tensor| device.take(tensor)).into())
    }

    fn expected(&self) -> Vec<Expected> {
        let [act, dgate_up, dweights] = self.oracle().unwrap();
        let expected = [
            Expected::new("weighed_swiglu", act, Rule::Standard),
            Expected::new("weighed_swiglu_backward", dgate_up, Rule::Standard),
            Expected::new("dweights", dweights, Rule::Standard),
        ];
        let terms = terms(self.function);
        expected.map(|expected| expected.with_terms(terms)).into()
    }
}

/// The gradient of weights by the bias that a sum of rows adds.
#[derive(Debug)]
struct BiasDweights {
    dtype: DType,
    tokens: usize,
    choices: usize,
    width: usize,
}

impl BiasDweights {
    const EXPERTS: usize = 3;

    /// The gradient of the sums, biases, and the experts of choices.
    fn tensors(&self) -> [Host; 3] {
        [
            Host::random(self.dtype, [self.tokens, self.width], 1.0, 1),
            Host::random(self.dtype, [BiasDweights::EXPERTS, self.width], 1.0, 2),
            ids(&[self.tokens, self.choices], BiasDweights::EXPERTS),
        ]
    }
}

impl Case for BiasDweights {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [dy, bias, ids] = self.tensors().map(|host| device.put(&host));
        let mut dweights = device.room(DType::F32, [self.tokens, self.choices]);
        device.run(ExpertBiasDweights {
            dweights: dweights.view_mut(),
            dy: dy.view(),
            bias: ExpertBias {
                bias: bias.view(),
                ids: ids.view(),
            },
        })?;
        Ok(vec![device.take(&dweights)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [dy, bias, ids] = self.tensors().map(|host| host.values());
        let dweight = |choice: usize| {
            let dy = &dy[choice / self.choices * self.width..][..self.width];
            let bias = &bias[ids[choice] as usize * self.width..][..self.width];
            dy.iter().zip(bias).map(|(dy, bias)| dy * bias).sum()
        };
        let dweights = (0..ids.len()).map(dweight).collect();
        vec![Expected::new("expert_bias_dweights", dweights, Rule::Standard).with_terms(1.0)]
    }
}

/// The gradient of experts' biases, of rows in order or of tokens, with weights or without.
#[derive(Debug)]
struct BiasGradient {
    dtype: DType,
    gradient: DType,
    /// Rows of each expert.
    rows: &'static [usize],
    width: usize,
    /// How many tokens the rows are of, if they are not in order.
    tokens: Option<usize>,
    /// The step of the permutation of weights, or whether they are by row.
    weights: Option<Option<usize>>,
    start: Start,
}

impl BiasGradient {
    fn row_count(&self) -> usize {
        self.rows.iter().sum()
    }

    /// dy, weights, and what the gradient is added to.
    fn tensors(&self) -> [Host; 3] {
        let lines = self.tokens.unwrap_or(self.row_count());
        [
            Host::random(self.dtype, [lines, self.width], 1.0, 1),
            Host::random(DType::F32, [self.row_count()], 1.0, 2),
            Host::random(self.gradient, [self.rows.len(), self.width], 1.0, 3),
        ]
    }

    fn line(&self, row: usize) -> usize {
        self.tokens.map_or(row, |tokens| (11 * row + 3) % tokens)
    }

    fn slots(&self) -> Vec<usize> {
        let step = self.weights.flatten();
        step.map_or_else(
            || (0..self.row_count()).collect(),
            |step| permutation(self.row_count(), step),
        )
    }
}

impl Case for BiasGradient {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [dy, weights, earlier] = self.tensors();
        let mut out = device.start(self.start, &earlier);
        let (rows, ends) = (self.row_count(), 0..=self.rows.len());
        let offsets: Vec<usize> = ends.map(|end| self.rows[..end].iter().sum()).collect();
        let lines: Vec<usize> = (0..rows).map(|row| self.line(row)).collect();
        let tables = [
            table(&[offsets.len()], &offsets),
            table(&[rows], &lines),
            table(&[rows], &self.slots()),
        ];
        let [offsets, lines, slots] = tables.map(|host| device.put(&host));
        let [dy, weights, earlier] = [dy, weights, earlier].map(|host| device.put(&host));
        device.run(ExpertBiasGradient {
            out: out.view_mut(),
            dy: ExpertRows {
                x: dy.view(),
                row_token: self.tokens.map(|_| lines.view()),
            },
            weights: self.weights.map(|step| RowWeights {
                weights: weights.view(),
                row_slot: step.map(|_| slots.view()),
            }),
            offsets: offsets.view(),
            init: self.start.init(&earlier),
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [dy, weights, earlier] = self.tensors();
        let (dy, weights, slots) = (dy.values(), weights.values(), self.slots());
        let mut sums = self.start.values(&earlier);
        let experts = self.rows.iter().enumerate();
        let experts = experts.flat_map(|(expert, rows)| std::iter::repeat_n(expert, *rows));
        for (row, expert) in experts.enumerate() {
            let weight = self.weights.map_or(1.0, |_| weights[slots[row]]);
            let dy = &dy[self.line(row) * self.width..][..self.width];
            let sums = &mut sums[expert * self.width..][..self.width];
            sums.iter_mut()
                .zip(dy)
                .for_each(|(sum, dy)| *sum += weight * dy);
        }
        vec![Expected::new("expert_bias_gradient", sums, Rule::Standard).with_terms(1.0)]
    }
}

fn bias_gradients(dtype: DType) -> impl Iterator<Item = Box<dyn Case>> {
    let sizes: [(&[usize], usize); 4] = [
        (&[1], 1),
        (&[3, 0, 40, 7], 131),
        (&[0, 600, 1, 5], 48),
        (&[0; 3], 64),
    ];
    let of_rows = [
        (None, None),
        (Some(23), Some(None)),
        (Some(23), Some(Some(7))),
    ];
    let all = sizes
        .into_iter()
        .flat_map(move |size| of_rows.map(|of| (size, of)));
    all.flat_map(move |((rows, width), (tokens, weights))| {
        gradient_starts().map(move |(gradient, start)| {
            let case = BiasGradient {
                dtype,
                gradient,
                rows,
                width,
                tokens,
                weights,
                start,
            };
            Box::new(case) as Box<dyn Case>
        })
    })
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    // The last is wider than a block of threads covers.
    let sizes = [
        (1, 1, 1, 1),
        (5, 1, 131, 3),
        (37, 2, 48, 5),
        (150, 4, 33, 7),
        // Choices that no unrolled loop divides evenly.
        (5, 7, 33, 3),
        (5, 7, 64, 3),
        (3, 8, 5000, 5),
    ];
    for (tokens, choices, width, step) in sizes {
        for (experts, start) in [None, Some(3)].into_iter().flat_map(|experts| {
            let starts = [Start::Overwrite, Start::Accumulate, Start::Add];
            starts.map(|start| (experts, start))
        }) {
            cases.push(Box::new(Combine {
                dtype,
                tokens,
                choices,
                width,
                step,
                experts,
                start,
            }));
        }
        cases.push(Box::new(BiasDweights {
            dtype,
            tokens,
            choices,
            width,
        }));
    }
    for (rows, width) in [(1, 1), (1, 131), (37, 131), (37, 1000), (3, 5000)] {
        let (replace, accumulate) = (Start::Overwrite, Start::Accumulate);
        let steps = [
            (None, 3.0, None, replace),
            (Some(5), 3.0, None, replace),
            (Some(5), 200.0, None, accumulate),
            (Some(5), 3.0, Some(3), replace),
            (None, 3.0, Some(4), accumulate),
        ];
        for (function, (step, range, experts, start)) in FUNCTIONS
            .into_iter()
            .flat_map(|function| steps.map(|step| (function, step)))
        {
            cases.push(Box::new(Weighed {
                dtype,
                function,
                rows,
                width,
                step,
                range,
                experts,
                start,
            }));
        }
    }
    cases.extend(bias_gradients(dtype));
    cases
}
