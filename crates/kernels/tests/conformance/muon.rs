//! What Muon takes beside products of matrices, in every form of its states, against loops in f64.

use crate::DTYPES;
use crate::adamw::{Moments, Weights, dequantised, halves, moment, quantised, weights};
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor};
use crate::host::Host;
use half::bf16;
use kernels::quantise::SIGNED;
use kernels::{KernelError, MomentOperand};
use memory::DType;

/// An element, an odd number, a block, blocks and a rest, more than one task's.
const SIZES: [usize; 5] = [1, 37, 256, 612, 40_000];

pub fn random(elements: usize, range: f64, seed: u64) -> Vec<f64> {
    Host::random(DType::F32, [elements], range, seed).values()
}

pub fn clip(device: &Device, factor: f32) -> Tensor {
    device.put(&Host::new(DType::F32, [2], [17.0, f64::from(factor)]))
}

pub fn key(device: &Device) -> Tensor {
    device.put(&Host::new(DType::U32, [2], [3.0, 5.0]))
}

/// The rule for what is rounded to a type.
fn rounded(dtype: DType, values: &[f64]) -> Vec<f64> {
    match dtype {
        DType::BF16 => values.iter().map(|x| bf16::from_f64(*x).to_f64()).collect(),
        _ => values.to_vec(),
    }
}

#[derive(Debug)]
struct Momentum {
    form: Moments,
    out: DType,
    gradients: DType,
    elements: usize,
    clip: f32,
    nesterov: bool,
}

const DECAY: f32 = 0.95;

impl Momentum {
    fn initial(&self) -> Vec<Host> {
        moment(self.form, &SIGNED, &random(self.elements, 0.1, 2))
    }

    fn gradients(&self) -> Host {
        Host::random(self.gradients, [self.elements], 0.5, 10)
    }
}

impl Case for Momentum {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let states = self.initial();
        let mut states: Vec<Tensor> = states.iter().map(|host| device.put(host)).collect();
        let mut out = device.room(self.out, [self.elements]);
        let (gradients, clip, key) = (
            device.put(&self.gradients()),
            clip(device, self.clip),
            key(device),
        );
        let mut views = states.iter_mut().map(Tensor::view_mut);
        let mut next = || views.next().unwrap();
        device.run(kernels::Momentum {
            out: out.view_mut(),
            momentum: match self.form {
                Moments::F32 | Moments::Bf16 => MomentOperand::Plain(next()),
                Moments::Quantised => MomentOperand::Quantised {
                    codes: next(),
                    absmax: next(),
                },
            },
            gradients: gradients.view(),
            clip: clip.view(),
            key: key.view(),
            first_index: 1024,
            decay: DECAY,
            nesterov: self.nesterov,
        })?;
        let states = states.iter().map(|tensor| device.take(tensor));
        Ok([device.take(&out)].into_iter().chain(states).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let initial = self.initial();
        if !self.clip.is_finite() {
            let out = Expected::new("momentum: skipped", vec![0.0; self.elements], Rule::Exact);
            let state =
                |host: &Host| Expected::new("momentum: skipped", host.values(), Rule::Exact);
            return [out].into_iter().chain(initial.iter().map(state)).collect();
        }
        let before = match self.form {
            Moments::Quantised => dequantised(&SIGNED, &[initial[0].clone(), initial[1].clone()]),
            _ => initial[0].values(),
        };
        let (decay, scale) = (f64::from(DECAY), f64::from(self.clip));
        let pairs = before.into_iter().zip(self.gradients().values());
        let (moved, out): (Vec<f64>, Vec<f64>) = pairs
            .map(|(before, gradient)| {
                let moved = decay * before + (1.0 - decay) * gradient * scale;
                let ahead = decay * moved + (1.0 - decay) * gradient * scale;
                (moved, if self.nesterov { ahead } else { moved })
            })
            .unzip();
        let out = Expected::new("momentum: out", out, Rule::Standard);
        let states = match self.form {
            Moments::F32 => vec![Expected::new("momentum", moved, Rule::Standard)],
            Moments::Bf16 => vec![Expected::new("momentum: bf16", moved, Rule::Neighbour)],
            Moments::Quantised => {
                let [codes, absmax] = quantised(&SIGNED, &moved).map(|host| host.values());
                vec![
                    Expected::new("momentum: codes", codes, Rule::Codes),
                    Expected::new("momentum: absmax", absmax, Rule::Standard),
                ]
            }
        };
        [out].into_iter().chain(states).collect()
    }
}

#[derive(Debug)]
struct DivideByNorm {
    dtype: DType,
    elements: usize,
    norm: f32,
}

const NORM_EPS: f32 = 1e-7;

impl Case for DivideByNorm {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let mut x = device.put(&Host::random(self.dtype, [self.elements], 3.0, 1));
        let norm = device.put(&Host::new(DType::F32, [1], [f64::from(self.norm)]));
        device.run(kernels::DivideByNorm {
            x: x.view_mut(),
            norm: norm.view(),
            eps: NORM_EPS,
        })?;
        Ok(vec![device.take(&x)])
    }

    fn expected(&self) -> Vec<Expected> {
        let norm = rounded(self.dtype, &[f64::from(self.norm)])[0].max(f64::from(NORM_EPS));
        let x = Host::random(self.dtype, [self.elements], 3.0, 1).values();
        let divided = x.into_iter().map(|x| x / norm).collect();
        vec![Expected::new("divide_by_norm", divided, Rule::Standard)]
    }
}

#[derive(Debug)]
struct Combine {
    dtype: DType,
    elements: usize,
    factors: [f32; 2],
}

impl Combine {
    fn tensors(&self) -> [Host; 2] {
        [
            Host::random(self.dtype, [self.elements], 1.0, 1),
            Host::random(DType::F32, [self.elements], 1.0, 2),
        ]
    }
}

impl Case for Combine {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [mut out, x] = self.tensors().map(|host| device.put(&host));
        device.run(kernels::Combine {
            out: out.view_mut(),
            x: x.view(),
            alpha: self.factors[0],
            beta: self.factors[1],
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [out, x] = self.tensors().map(|host| host.values());
        let [alpha, beta] = self.factors.map(f64::from);
        let pairs = out.into_iter().zip(x);
        let combined = pairs.map(|(out, x)| alpha * x + beta * out).collect();
        vec![Expected::new("combine", combined, Rule::Standard)]
    }
}

#[derive(Debug)]
struct StepAlong {
    form: Weights,
    direction: DType,
    elements: usize,
    clip: f32,
}

const RATE: f32 = 0.02;
const SCALE: f32 = 1.5;
const WEIGHT_DECAY: f32 = 0.1;

impl StepAlong {
    fn initial(&self) -> Vec<Host> {
        weights(self.form, &random(self.elements, 1.0, 1))
    }

    fn direction(&self) -> Host {
        Host::random(self.direction, [self.elements], 0.5, 2)
    }
}

impl Case for StepAlong {
    /// The exact weights; behind a master, the weights less what they must be.
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let states = self.initial();
        let mut states: Vec<Tensor> = states.iter().map(|host| device.put(host)).collect();
        let rate = device.put(&Host::new(DType::F32, [1], [f64::from(RATE)]));
        let (direction, clip, key) = (
            device.put(&self.direction()),
            clip(device, self.clip),
            key(device),
        );
        let mut views = states.iter_mut().map(Tensor::view_mut);
        let mut next = || views.next().unwrap();
        device.run(kernels::StepAlong {
            parameters: next(),
            master: self.form.operand(&mut next),
            direction: direction.view(),
            rate: rate.view(),
            clip: clip.view(),
            key: key.view(),
            first_index: 1024,
            scale: SCALE,
            weight_decay: WEIGHT_DECAY,
        })?;
        let states: Vec<Host> = states.iter().map(|tensor| device.take(tensor)).collect();
        if !self.form.has_master() {
            return Ok(states);
        }
        let exact = self.form.exact(&states);
        let expected = halves(&exact).values();
        let off = states[0].values().into_iter().zip(expected);
        let off = Host::new(DType::BF16, [self.elements], off.map(|(a, b)| a - b));
        Ok(vec![exact, off])
    }

    fn expected(&self) -> Vec<Expected> {
        let initial = self.initial();
        let exact = self.form.exact(&initial).values();
        let (rate, scale, decay) = (f64::from(RATE), f64::from(SCALE), f64::from(WEIGHT_DECAY));
        let pairs = exact.iter().zip(self.direction().values());
        let moved =
            pairs.map(|(weight, along)| weight * (1.0 - rate * decay) - rate * scale * along);
        let (values, rule) = match (self.clip.is_finite(), self.form) {
            (false, _) => (exact, Rule::Exact),
            (true, form) => (moved.collect(), form.rule()),
        };
        let mut expected = vec![Expected::new("step_along", values, rule)];
        if self.form.has_master() {
            let zero = vec![0.0; self.elements];
            expected.push(Expected::new(
                "step_along: off the master",
                zero,
                Rule::Exact,
            ));
        }
        expected
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let forms: &[Weights] = match dtype {
        DType::F32 => &[Weights::F32],
        _ => &[
            Weights::Master,
            Weights::Remainder,
            Weights::RemainderByte,
            Weights::Rounded,
        ],
    };
    for elements in SIZES {
        for norm in [2.5, 0.3, 0.0] {
            cases.push(Box::new(DivideByNorm {
                dtype,
                elements,
                norm,
            }));
        }
        for factors in [[2.0, -4.75], [1.0, 3.4445]] {
            cases.push(Box::new(Combine {
                dtype,
                elements,
                factors,
            }));
        }
        for (other, clip) in DTYPES
            .into_iter()
            .flat_map(|other| [(other, 1.0), (other, 0.25), (other, f32::NAN)])
        {
            for form in [Moments::F32, Moments::Bf16, Moments::Quantised] {
                for nesterov in [false, true] {
                    cases.push(Box::new(Momentum {
                        form,
                        out: dtype,
                        gradients: other,
                        elements,
                        clip,
                        nesterov,
                    }));
                }
            }
            for form in forms {
                cases.push(Box::new(StepAlong {
                    form: *form,
                    direction: other,
                    elements,
                    clip,
                }));
            }
        }
    }
    cases
}
