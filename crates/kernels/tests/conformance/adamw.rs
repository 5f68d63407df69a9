//! Several steps of AdamW against a loop in f64.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use kernels::{AdamW, KernelError};
use memory::DType;

#[derive(Debug)]
struct Steps {
    dtype: DType,
    elements: usize,
    steps: usize,
    weight_decay: f32,
    /// The factor on gradients; where it is not finite, nothing may change.
    clip: f32,
}

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.95;
const EPS: f32 = 1e-6;

/// Weights, first moment, second moment.
type State = [Vec<f64>; 3];

impl Steps {
    /// bf16 weights have a master.
    fn has_master(&self) -> bool {
        self.dtype == DType::BF16
    }

    /// In f32; the weights' rounding to bf16 is the first step's to make.
    fn initial(&self) -> [Host; 3] {
        let n = [self.elements];
        let squares = Host::random(DType::F32, n, 0.1, 3)
            .values()
            .into_iter()
            .map(f64::abs);
        [
            Host::random(DType::F32, n, 1.0, 1),
            Host::random(DType::F32, n, 0.1, 2),
            Host::new(DType::F32, n, squares),
        ]
    }

    /// Gradients of a step, counted from 1; some are zero at every step.
    fn gradients(&self, step: usize) -> Host {
        let random = Host::random(DType::F32, [self.elements], 0.5, 10 + step as u64).values();
        let values = random
            .into_iter()
            .enumerate()
            .map(|(index, value)| if index % 7 == 3 { 0.0 } else { value });
        Host::new(DType::F32, [self.elements], values)
    }

    /// Learning rate and the two corrections of a step.
    fn rates(&self, step: usize) -> Host {
        let power = step as i32;
        let first = 1.0 / (1.0 - f64::from(BETA1).powi(power));
        let second = 1.0 / (1.0 - f64::from(BETA2).powi(power)).sqrt();
        Host::new(DType::F32, [3], [0.02 / step as f64, first, second])
    }

    fn oracle(&self) -> State {
        let mut state = self.initial().map(|host| host.values());
        if !self.clip.is_finite() {
            return state;
        }
        for step in 1..=self.steps {
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
}

impl Case for Steps {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let initial = self.initial();
        let mut parameters =
            device.put(&Host::new(self.dtype, [self.elements], initial[0].values()));
        let [mut master, mut first, mut second] = initial.map(|host| device.put(&host));
        let clip = device.put(&Host::new(DType::F32, [2], [17.0, f64::from(self.clip)]));
        for step in 1..=self.steps {
            let [gradients, rates] =
                [self.gradients(step), self.rates(step)].map(|host| device.put(&host));
            device.kernels.adamw(AdamW {
                parameters: parameters.view_mut(),
                master: self.has_master().then(|| master.view_mut()),
                first_moment: first.view_mut(),
                second_moment: second.view_mut(),
                gradients: gradients.view(),
                rates: rates.view(),
                clip: clip.view(),
                beta1: BETA1,
                beta2: BETA2,
                eps: EPS,
                weight_decay: self.weight_decay,
            })?;
        }
        let master = self.has_master().then_some(&master);
        let state = [Some(&parameters), Some(&first), Some(&second), master];
        Ok(state
            .into_iter()
            .flatten()
            .map(|tensor| device.take(tensor))
            .collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let [weights, first, second] = self.oracle();
        let rule = if self.clip.is_finite() {
            Rule::Standard
        } else {
            Rule::Exact
        };
        let mut expected = vec![
            Expected::new("adamw: parameters", weights.clone(), rule),
            Expected::new("adamw: first moment", first, rule),
            Expected::new("adamw: second moment", second, rule),
        ];
        if self.has_master() {
            expected.push(Expected::new("adamw: master", weights, rule));
        }
        expected
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for elements in [1, 37, 40_000] {
        for (weight_decay, clip) in [
            (0.0, 1.0),
            (0.1, 1.0),
            (0.1, 0.25),
            (0.1, f32::NAN),
            (0.1, f32::INFINITY),
        ] {
            cases.push(Box::new(Steps {
                dtype,
                elements,
                steps: 6,
                weight_decay,
                clip,
            }));
        }
    }
    cases
}
