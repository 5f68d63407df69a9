//! AdamW in every form of its states, against a loop in f64.
//!
//! Where nothing is rounded but to f32, several steps are compared. Where states are rounded to bf16 or to codes, each
//! case is one step from states that the form can hold: then the f64 result says which values rounding may give.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor};
use crate::host::Host;
use half::bf16;
use kernels::quantise::{BLOCK, Map, SIGNED, UNSIGNED};
use kernels::split::{join, join_24_bits, split, split_24_bits};
use kernels::{AdamW, KernelError, MasterOperand, MomentOperand};
use memory::{DType, In, Out};
use std::ops::Range;

/// The weights and what stands beside them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weights {
    F32,
    /// bf16 and an f32 master.
    Master,
    /// bf16 and the remainder of an f32 master.
    Remainder,
    /// bf16 and the byte of a master of 24 bits.
    RemainderByte,
    /// bf16 alone, rounded stochastically.
    Rounded,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Moments {
    F32,
    /// Rounded stochastically.
    Bf16,
    Quantised,
}

#[derive(Clone, Copy, Debug)]
pub struct Form {
    pub weights: Weights,
    pub moments: Moments,
    pub gradients: DType,
}

impl Form {
    /// All forms of weights of a type.
    pub fn all(dtype: DType) -> Vec<Form> {
        let weights: &[Weights] = match dtype {
            DType::F32 => &[Weights::F32],
            _ => &[
                Weights::Master,
                Weights::Remainder,
                Weights::RemainderByte,
                Weights::Rounded,
            ],
        };
        let mut forms = Vec::new();
        for weights in weights {
            for moments in [Moments::F32, Moments::Bf16, Moments::Quantised] {
                for gradients in [DType::F32, DType::BF16] {
                    forms.push(Form {
                        weights: *weights,
                        moments,
                        gradients,
                    });
                }
            }
        }
        forms
    }

    /// Whether states hold every f32.
    fn is_exact(self) -> bool {
        let is_exact = !matches!(self.weights, Weights::Rounded | Weights::RemainderByte);
        is_exact && self.moments == Moments::F32
    }
}

#[derive(Debug)]
pub struct Steps {
    pub form: Form,
    pub elements: usize,
    /// Numbers of the steps.
    pub steps: Range<usize>,
    pub weight_decay: f32,
    /// The factor on gradients; where it is not finite, nothing may change.
    pub clip: f32,
}

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.95;
const EPS: f32 = 1e-6;

/// Weights, first moment, second moment.
pub type State = [Vec<f64>; 3];

fn floats(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// Codes and `absmax` of values in f64.
pub fn quantised(map: &Map, values: &[f64]) -> [Host; 2] {
    let values = floats(values);
    let mut codes = vec![0; values.len()];
    let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
    let absmax: Vec<f64> = blocks
        .map(|(values, codes)| f64::from(map.quantise(values, codes)))
        .collect();
    [
        Host::new(DType::U8, [codes.len()], codes.into_iter().map(f64::from)),
        Host::new(DType::F32, [absmax.len()], absmax),
    ]
}

/// The values of codes.
pub fn dequantised(map: &Map, [codes, absmax]: &[Host; 2]) -> Vec<f64> {
    let absmax = absmax.values();
    let value = |(index, code): (usize, &u8)| {
        f64::from(map.values[usize::from(*code)] * absmax[index / BLOCK] as f32)
    };
    codes.bytes.iter().enumerate().map(value).collect()
}

/// A moment in its form.
pub fn moment(form: Moments, map: &Map, values: &[f64]) -> Vec<Host> {
    let plain = |dtype| vec![Host::new(dtype, [values.len()], values.iter().copied())];
    match form {
        Moments::F32 => plain(DType::F32),
        Moments::Bf16 => plain(DType::BF16),
        Moments::Quantised => quantised(map, values).into(),
    }
}

/// The weights in their form.
pub fn weights(form: Weights, values: &[f64]) -> Vec<Host> {
    let host = |dtype, values: &mut dyn Iterator<Item = f64>| {
        let values: Vec<f64> = values.collect();
        Host::new(dtype, [values.len()], values)
    };
    let values = floats(values);
    let parts: Vec<(bf16, i16)> = values.iter().copied().map(split).collect();
    let halves = || host(DType::BF16, &mut parts.iter().map(|part| part.0.to_f64()));
    let exact = || values.iter().copied().map(f64::from);
    match form {
        Weights::F32 => vec![host(DType::F32, &mut exact())],
        Weights::Rounded => vec![halves()],
        Weights::Master => vec![halves(), host(DType::F32, &mut exact())],
        Weights::Remainder => {
            let remainders = &mut parts.iter().map(|part| f64::from(part.1));
            vec![halves(), host(DType::I16, remainders)]
        }
        Weights::RemainderByte => {
            let parts: Vec<(bf16, u8)> = values.iter().copied().map(split_24_bits).collect();
            vec![
                host(DType::BF16, &mut parts.iter().map(|part| part.0.to_f64())),
                host(DType::U8, &mut parts.iter().map(|part| f64::from(part.1))),
            ]
        }
    }
}

impl Steps {
    /// States in their form: weights, what stands beside them, moments.
    pub fn initial(&self) -> Vec<Host> {
        let random = |range, seed| Host::random(DType::F32, [self.elements], range, seed).values();
        // Far from zero, where an update would be enormous.
        let squares: Vec<f64> = random(0.1, 3).iter().map(|x| x.abs() + 0.01).collect();
        [
            weights(self.form.weights, &random(1.0, 1)),
            moment(self.form.moments, &SIGNED, &random(0.1, 2)),
            moment(self.form.moments, &UNSIGNED, &squares),
        ]
        .concat()
    }

    /// What the initial states stand for.
    fn state(&self) -> State {
        let mut hosts = self.initial().into_iter();
        let mut next = || hosts.next().unwrap();
        let weights = match (self.form.weights, next()) {
            (Weights::F32 | Weights::Rounded, weights) => weights.values(),
            (Weights::Master, _) => next().values(),
            (Weights::Remainder | Weights::RemainderByte, halves) => {
                joined(&halves, &next()).values()
            }
        };
        let mut moment = |map| match self.form.moments {
            Moments::Quantised => dequantised(map, &[next(), next()]),
            _ => next().values(),
        };
        [weights, moment(&SIGNED), moment(&UNSIGNED)]
    }

    /// Gradients of a step; some are zero at every step.
    fn gradients(&self, step: usize) -> Host {
        let random = Host::random(DType::F32, [self.elements], 0.5, 10 + step as u64).values();
        let values = random
            .into_iter()
            .enumerate()
            .map(|(index, value)| if index % 7 == 3 { 0.0 } else { value });
        Host::new(self.form.gradients, [self.elements], values)
    }

    /// Learning rate and the two corrections of a step.
    fn rates(&self, step: usize) -> Host {
        let power = step as i32;
        let first = 1.0 / (1.0 - f64::from(BETA1).powi(power));
        let second = 1.0 / (1.0 - f64::from(BETA2).powi(power)).sqrt();
        Host::new(DType::F32, [3], [0.02 / step as f64, first, second])
    }

    pub fn oracle(&self) -> State {
        let mut state = self.state();
        for step in self.steps.clone() {
            self.step(&mut state, step);
        }
        state
    }

    fn step(&self, [weights, first, second]: &mut State, step: usize) {
        let (beta1, beta2, eps) = (f64::from(BETA1), f64::from(BETA2), f64::from(EPS));
        let (rates, gradients) = (self.rates(step).values(), self.gradients(step).values());
        for (index, gradient) in gradients.into_iter().enumerate() {
            let gradient = gradient * f64::from(self.clip);
            weights[index] -= rates[0] * f64::from(self.weight_decay) * weights[index];
            first[index] = beta1 * first[index] + (1.0 - beta1) * gradient;
            second[index] = beta2 * second[index] + (1.0 - beta2) * gradient * gradient;
            let root = second[index].sqrt() * rates[2] + eps;
            weights[index] -= rates[0] * first[index] * rates[1] / root;
        }
    }

    /// One step on device tensors: `range` of them, which counts as what follows `first_index`.
    pub fn update(
        &self,
        device: &Device,
        states: &mut [Tensor],
        step: usize,
        key: u32,
        (range, first_index): (Range<usize>, u64),
    ) -> Result<(), KernelError> {
        let [gradients, rates] =
            [self.gradients(step), self.rates(step)].map(|host| device.put(&host));
        let clip = device.put(&Host::new(DType::F32, [2], [17.0, f64::from(self.clip)]));
        let key = device.put(&Host::new(DType::U32, [2], [f64::from(key), 5.0]));
        let inputs: [In; 4] = [
            gradients.view().rows(range.clone()),
            rates.view(),
            clip.view(),
            key.view(),
        ];
        let update = self.form.update(states, &range, inputs);
        device.run(AdamW {
            first_index,
            weight_decay: self.weight_decay,
            ..update
        })
    }
}

impl Form {
    pub fn update<'a>(
        self,
        states: &'a mut [Tensor],
        range: &Range<usize>,
        [gradients, rates, clip, key]: [In<'a>; 4],
    ) -> AdamW<'a> {
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let mut states = states.iter_mut().map(Tensor::view_mut);
        let mut next =
            |rows: &Range<usize>| -> Out<'a> { states.next().unwrap().rows(rows.clone()) };
        let parameters = next(range);
        let master = self.weights.operand(|| next(range));
        let mut moment = || match self.moments {
            Moments::F32 | Moments::Bf16 => MomentOperand::Plain(next(range)),
            Moments::Quantised => MomentOperand::Quantised {
                codes: next(range),
                absmax: next(&blocks),
            },
        };
        AdamW {
            parameters,
            master,
            first_moment: moment(),
            second_moment: moment(),
            gradients,
            rates,
            clip,
            key,
            first_index: 0,
            beta1: BETA1,
            beta2: BETA2,
            eps: EPS,
            weight_decay: 0.0,
        }
    }
}

/// The master that bf16 weights and remainders stand for.
fn joined(weights: &Host, remainders: &Host) -> Host {
    let pairs = weights.values().into_iter().zip(remainders.values());
    let values = pairs.map(|(weight, rest)| {
        let weight = bf16::from_f64(weight);
        f64::from(match remainders.dtype {
            DType::U8 => join_24_bits(weight, rest as u8),
            _ => join(weight, rest as i16),
        })
    });
    Host::new(DType::F32, weights.dims, values)
}

impl Weights {
    pub fn has_master(self) -> bool {
        !matches!(self, Weights::F32 | Weights::Rounded)
    }

    /// The master beside the weights, if `next` gives it.
    pub fn operand<'a>(self, mut next: impl FnMut() -> Out<'a>) -> MasterOperand<'a> {
        match self {
            Weights::F32 | Weights::Rounded => MasterOperand::Parameters,
            Weights::Master => MasterOperand::F32(next()),
            Weights::Remainder => MasterOperand::Remainder(next()),
            Weights::RemainderByte => MasterOperand::RemainderByte(next()),
        }
    }

    /// The exact weights of weights and what stands beside them.
    pub fn exact(self, states: &[Host]) -> Host {
        match self {
            Weights::F32 | Weights::Rounded => states[0].clone(),
            Weights::Master => states[1].clone(),
            Weights::Remainder | Weights::RemainderByte => joined(&states[0], &states[1]),
        }
    }

    /// How they are judged after a step. Half a step of 24 bits is 1.5e-5 of the largest weights here, below 2.
    pub fn rule(self) -> Rule {
        match self {
            Weights::Rounded => Rule::Neighbour,
            Weights::RemainderByte => Rule::Within(2.6e-5),
            Weights::F32 | Weights::Master | Weights::Remainder => Rule::Standard,
        }
    }
}

/// The bf16 weights that a master gives.
pub fn halves(master: &Host) -> Host {
    let values = floats(&master.values());
    let halves = values.into_iter().map(|value| split(value).0.to_f64());
    Host::new(DType::BF16, master.dims, halves)
}

impl Steps {
    /// What a case that is skipped returns: its states, bit by bit.
    fn unchanged(&self) -> Vec<Expected> {
        let mut states = self.initial();
        let has_master = self.form.weights.has_master();
        if has_master {
            states[1] = self.form.weights.exact(&states);
        }
        let states = states.iter().map(Host::values);
        let off_the_master = has_master.then(|| vec![0.0; self.elements]);
        states
            .chain(off_the_master)
            .map(|values| Expected::new("adamw: skipped", values, Rule::Exact))
            .collect()
    }
}

impl Case for Steps {
    /// The states; behind a master, the weights less what they must be.
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let mut states: Vec<Tensor> = self.initial().iter().map(|host| device.put(host)).collect();
        for step in self.steps.clone() {
            let whole = (0..self.elements, 1024);
            self.update(device, &mut states, step, 3, whole)?;
        }
        let mut states: Vec<Host> = states.iter().map(|tensor| device.take(tensor)).collect();
        if !self.form.weights.has_master() {
            return Ok(states);
        }
        states[1] = self.form.weights.exact(&states);
        let of_master = halves(&states[1]);
        let (weights, expected) = (states[0].values(), of_master.values());
        let off = weights.into_iter().zip(expected).map(|(a, b)| a - b);
        states.push(Host::new(DType::F32, of_master.dims, off));
        Ok(states)
    }

    fn expected(&self) -> Vec<Expected> {
        if !self.clip.is_finite() {
            return self.unchanged();
        }
        let [weights, first, second] = self.oracle();
        let has_master = self.form.weights.has_master();
        let of_weights = self.form.weights.rule();
        // A master's bf16 copy rounds ties away from zero, and the judge to even.
        let of_copy = if has_master {
            Rule::Standard
        } else {
            of_weights
        };
        let mut expected = vec![Expected::new("adamw: parameters", weights.clone(), of_copy)];
        if has_master {
            expected.push(Expected::new("adamw: master", weights, of_weights));
        }
        for (moment, map, [name, codes, absmax]) in [
            (first, &SIGNED, FIRST_NAMES),
            (second, &UNSIGNED, SECOND_NAMES),
        ] {
            match self.form.moments {
                Moments::F32 => expected.push(Expected::new(name, moment, Rule::Standard)),
                Moments::Bf16 => expected.push(Expected::new(name, moment, Rule::Neighbour)),
                Moments::Quantised => {
                    let [code, largest] = quantised(map, &moment).map(|host| host.values());
                    expected.push(Expected::new(codes, code, Rule::Codes));
                    expected.push(Expected::new(absmax, largest, Rule::Standard));
                }
            }
        }
        if has_master {
            let zero = vec![0.0; self.elements];
            expected.push(Expected::new("adamw: off the master", zero, Rule::Exact));
        }
        expected
    }
}

const FIRST_NAMES: [&str; 3] = [
    "adamw: first moment",
    "adamw: first moment's codes",
    "adamw: first moment's absmax",
];
const SECOND_NAMES: [&str; 3] = [
    "adamw: second moment",
    "adamw: second moment's codes",
    "adamw: second moment's absmax",
];

/// An element, an odd number, a block, blocks and a rest, more than one task's.
const SIZES: [usize; 5] = [1, 37, 256, 612, 40_000];

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for form in Form::all(dtype) {
        for elements in SIZES {
            for (weight_decay, clip) in [
                (0.0, 1.0),
                (0.1, 1.0),
                (0.1, 0.25),
                (0.1, f32::NAN),
                (0.1, f32::INFINITY),
            ] {
                // With the corrections of a first step, and of later ones.
                let runs: &[(usize, usize)] = match form.is_exact() {
                    true => &[(1, 7)],
                    false => &[(1, 2), (4, 5)],
                };
                for (first, end) in runs {
                    cases.push(Box::new(Steps {
                        form,
                        elements,
                        steps: *first..*end,
                        weight_decay,
                        clip,
                    }));
                }
            }
        }
    }
    cases
}
