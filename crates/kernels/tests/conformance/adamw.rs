//! AdamW in every form of its states, against a loop in f64.
//!
//! Where nothing is rounded but to f32, several steps are compared. Where states are rounded to bf16 or to codes, each
//! case is one step from states that the form can hold: then the f64 result says which values rounding may give.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor, computing};
use crate::host::Host;
use half::bf16;
use kernels::quantise::{BLOCK, Map, SIGNED, UNSIGNED};
use kernels::split::{join, split};
use kernels::{AdamW, KernelError, Master, Moment};
use memory::{DType, In, Out};
use std::collections::BTreeSet;
use std::ops::Range;

/// The weights and what stands beside them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Weights {
    F32,
    /// bf16 and an f32 master.
    Master,
    /// bf16 and the remainder of an f32 master.
    Remainder,
    /// bf16 alone, rounded stochastically.
    Rounded,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Moments {
    F32,
    /// Rounded stochastically.
    Bf16,
    Quantised,
}

#[derive(Clone, Copy, Debug)]
struct Form {
    weights: Weights,
    moments: Moments,
    gradients: DType,
}

impl Form {
    /// All forms of weights of a type.
    fn all(dtype: DType) -> Vec<Form> {
        let weights: &[Weights] = match dtype {
            DType::F32 => &[Weights::F32],
            _ => &[Weights::Master, Weights::Remainder, Weights::Rounded],
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
        self.weights != Weights::Rounded && self.moments == Moments::F32
    }
}

#[derive(Debug)]
struct Steps {
    form: Form,
    elements: usize,
    /// Numbers of the steps.
    steps: Range<usize>,
    weight_decay: f32,
    /// The factor on gradients; where it is not finite, nothing may change.
    clip: f32,
}

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.95;
const EPS: f32 = 1e-6;

/// Weights, first moment, second moment.
type State = [Vec<f64>; 3];

fn floats(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// Codes and `absmax` of values in f64.
fn quantised(map: &Map, values: &[f64]) -> [Host; 2] {
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
fn dequantised(map: &Map, [codes, absmax]: &[Host; 2]) -> Vec<f64> {
    let absmax = absmax.values();
    let value = |(index, code): (usize, &u8)| {
        f64::from(map.values[usize::from(*code)] * absmax[index / BLOCK] as f32)
    };
    codes.bytes.iter().enumerate().map(value).collect()
}

/// A moment in its form.
fn moment(form: Moments, map: &Map, values: &[f64]) -> Vec<Host> {
    let plain = |dtype| vec![Host::new(dtype, [values.len()], values.iter().copied())];
    match form {
        Moments::F32 => plain(DType::F32),
        Moments::Bf16 => plain(DType::BF16),
        Moments::Quantised => quantised(map, values).into(),
    }
}

/// The weights in their form.
fn weights(form: Weights, values: &[f64]) -> Vec<Host> {
    let host = |dtype, values: &mut dyn Iterator<Item = f64>| {
        let values: Vec<f64> = values.collect();
        Host::new(dtype, [values.len()], values)
    };
    let parts: Vec<(bf16, i16)> = floats(values).into_iter().map(split).collect();
    let halves = || host(DType::BF16, &mut parts.iter().map(|part| part.0.to_f64()));
    match form {
        Weights::F32 => vec![host(DType::F32, &mut values.iter().copied())],
        Weights::Rounded => vec![halves()],
        Weights::Master => vec![halves(), host(DType::F32, &mut values.iter().copied())],
        Weights::Remainder => {
            let remainders = &mut parts.iter().map(|part| f64::from(part.1));
            vec![halves(), host(DType::I16, remainders)]
        }
    }
}

impl Steps {
    /// States in their form: weights, what stands beside them, moments.
    fn initial(&self) -> Vec<Host> {
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
            (Weights::Remainder, halves) => joined(&halves, &next()).values(),
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

    fn oracle(&self) -> State {
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
    fn update(
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
        device.kernels.adamw(AdamW {
            first_index,
            weight_decay: self.weight_decay,
            ..update
        })
    }
}

impl Form {
    fn update<'a>(
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
        let master = match self.weights {
            Weights::F32 | Weights::Rounded => Master::Parameters,
            Weights::Master => Master::F32(next(range)),
            Weights::Remainder => Master::Remainder(next(range)),
        };
        let mut moment = || match self.moments {
            Moments::F32 | Moments::Bf16 => Moment::Plain(next(range)),
            Moments::Quantised => Moment::Quantised {
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
    let values = pairs.map(|(weight, rest)| f64::from(join(bf16::from_f64(weight), rest as i16)));
    Host::new(DType::F32, weights.dims, values)
}

/// The bf16 weights that a master gives.
fn halves(master: &Host) -> Host {
    let values = floats(&master.values());
    let halves = values.into_iter().map(|value| split(value).0.to_f64());
    Host::new(DType::BF16, master.dims, halves)
}

impl Steps {
    /// What a case that is skipped returns: its states, bit by bit.
    fn unchanged(&self) -> Vec<Expected> {
        let mut states = self.initial();
        let has_master = matches!(self.form.weights, Weights::Master | Weights::Remainder);
        if self.form.weights == Weights::Remainder {
            states[1] = joined(&states[0], &states[1]);
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
        let of_master = match self.form.weights {
            Weights::F32 | Weights::Rounded => return Ok(states),
            Weights::Master => halves(&states[1]),
            Weights::Remainder => {
                states[1] = joined(&states[0], &states[1]);
                halves(&states[1])
            }
        };
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
        let has_master = matches!(self.form.weights, Weights::Master | Weights::Remainder);
        let of_weights = match self.form.weights {
            Weights::Rounded => Rule::Neighbour,
            _ => Rule::Standard,
        };
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

fn one_step(form: Form, elements: usize) -> Steps {
    Steps {
        form,
        elements,
        steps: 3..4,
        weight_decay: 0.1,
        clip: 0.5,
    }
}

/// The states after a step made in pieces, cut at these elements.
fn in_pieces(
    case: &Steps,
    device: &Device,
    key: u32,
    first_index: u64,
    cuts: &[usize],
) -> Vec<Host> {
    let mut states: Vec<Tensor> = case.initial().iter().map(|host| device.put(host)).collect();
    let starts = std::iter::once(&0).chain(cuts);
    for (start, end) in starts.zip(cuts.iter().chain([&case.elements])) {
        let at = (*start..*end, first_index + *start as u64);
        case.update(device, &mut states, 3, key, at).unwrap();
    }
    states.iter().map(|tensor| device.take(tensor)).collect()
}

/// However an arena is cut into ranges, the result is the same: random numbers follow the element.
#[test]
fn adamw_in_pieces_is_the_same() {
    for dtype in crate::DTYPES {
        for device in computing(dtype) {
            for form in Form::all(dtype) {
                let case = one_step(form, 40_000);
                let whole = in_pieces(&case, &device, 1, 512, &[]);
                let cut = in_pieces(&case, &device, 1, 512, &[256, 17_152]);
                assert!(whole == cut, "{form:?} on {}", device.name);
            }
        }
    }
}

/// Key and position decide what is rounded up, in exactly those forms that round stochastically.
#[test]
fn adamw_rounds_by_key_and_index() {
    for dtype in crate::DTYPES {
        for device in computing(dtype) {
            for form in Form::all(dtype) {
                let rounds = form.weights == Weights::Rounded || form.moments == Moments::Bf16;
                let case = one_step(form, 612);
                let run = |key, index| in_pieces(&case, &device, key, index, &[]);
                let states = run(1, 512);
                assert!(states == run(1, 512), "{form:?}: the same again");
                assert_eq!(states != run(2, 512), rounds, "{form:?}: another key");
                assert_eq!(states != run(1, 768), rounds, "{form:?}: another index");
            }
        }
    }
}

/// Over many keys, the mean of what is rounded is the exact result: rounding to nearest would miss it by far.
#[test]
fn adamw_rounds_without_bias() {
    const KEYS: u32 = 400;
    for device in computing(DType::BF16) {
        let form = Form {
            weights: Weights::Rounded,
            moments: Moments::Bf16,
            gradients: DType::F32,
        };
        let case = one_step(form, 612);
        let exact = case.oracle();
        let mut sums = vec![vec![0.0; 612]; 3];
        for key in 0..KEYS {
            let states = in_pieces(&case, &device, key, 0, &[]);
            for (sums, state) in sums.iter_mut().zip(states) {
                sums.iter_mut()
                    .zip(state.values())
                    .for_each(|(sum, value)| *sum += value);
            }
        }
        for (sums, exact) in sums.iter().zip(&exact) {
            let (mut bias, mut of_nearest) = (0.0, 0.0);
            for (sum, exact) in sums.iter().zip(exact) {
                let nearest = bf16::from_f64(*exact).to_f64();
                let ulp = exact.abs().log2().floor().exp2() / 128.0;
                bias += (sum / f64::from(KEYS) - exact).abs() / ulp / 612.0;
                of_nearest += (nearest - exact).abs() / ulp / 612.0;
            }
            // A rounding has a standard deviation of at most half an ulp; the mean of 400 of them a 20th of that.
            assert!(bias < 0.025, "{bias} ulp");
            assert!(of_nearest > 0.15, "{of_nearest} ulp");
        }
    }
}

/// Arithmetic is the same operations in the same order everywhere, and none is fused with another.
#[test]
fn adamw_gives_the_same_bits_everywhere() {
    for dtype in crate::DTYPES {
        let devices = computing(dtype);
        for case in cases(dtype) {
            let [reference, others @ ..] = devices.as_slice() else {
                panic!("two implementations or more");
            };
            assert!(!others.is_empty(), "two implementations or more");
            let expected = crate::case::run(case.as_ref(), reference);
            for device in others {
                let got = crate::case::run(case.as_ref(), device);
                assert!(got == expected, "{case:?} on {}", device.name);
            }
        }
    }
}

/// One step after which the first moment is the gradient and the second its square; returns the codes of both.
fn codes_of(device: &Device, gradients: &[f32]) -> [Vec<u8>; 2] {
    let n = gradients.len();
    let zeros = |dtype, n: usize| device.put(&Host::new(dtype, [n], vec![0.0; n]));
    let form = Form {
        weights: Weights::F32,
        moments: Moments::Quantised,
        gradients: DType::F32,
    };
    let blocks = n.div_ceil(BLOCK);
    let mut states = vec![zeros(DType::F32, n)];
    for _ in 0..2 {
        states.push(zeros(DType::U8, n));
        states.push(zeros(DType::F32, blocks));
    }
    let values = gradients.iter().map(|value| f64::from(*value));
    let gradients = device.put(&Host::new(DType::F32, [n], values));
    let [rates, clip] = [3, 2].map(|n| device.put(&Host::new(DType::F32, [n], vec![1.0; n])));
    let key = zeros(DType::U32, 2);
    let inputs = [gradients.view(), rates.view(), clip.view(), key.view()];
    let update = form.update(&mut states, &(0..n), inputs);
    device
        .kernels
        .adamw(AdamW {
            beta1: 0.0,
            beta2: 0.0,
            ..update
        })
        .unwrap();
    [1, 3].map(|codes| device.take(&states[codes]).bytes)
}

/// Values on both sides of every border between codes, and on it, in blocks whose `absmax` is 1.
fn borders() -> Vec<f32> {
    let around = |x: f32| [x.next_down(), x, x.next_up()];
    let signed = SIGNED.thresholds.iter().copied();
    let unsigned = UNSIGNED.thresholds.iter().map(|x| x.sqrt());
    let of_maps = signed.chain(unsigned).filter(|x| x.is_finite());
    let tiny = [0.0, -0.0, 1e-30, -1e-30, -1e-40, f32::NAN];
    let values: Vec<f32> = of_maps.flat_map(around).chain(tiny).collect();
    let blocks = values.chunks(BLOCK - 1);
    blocks.flat_map(|block| [&[1.0], block].concat()).collect()
}

/// Every entry of the maps, against the maps themselves.
#[test]
fn adamw_quantises_to_the_exact_codes() {
    let values = borders();
    let squares: Vec<f32> = values.iter().map(|x| x * x).collect();
    let exact = [(&SIGNED, &values), (&UNSIGNED, &squares)].map(|(map, values)| {
        let codes = values.iter().map(|x| match map.nearest(*x) {
            code if *x < 0.0 && code >= map.zero => map.zero - 1,
            code => code,
        });
        codes.collect::<Vec<u8>>()
    });
    for codes in &exact {
        let found: BTreeSet<&u8> = codes.iter().collect();
        assert_eq!(found.len(), 256);
    }
    for device in computing(DType::F32) {
        assert!(codes_of(&device, &values) == exact, "{}", device.name);
    }
}

/// Blocks so small that the inverse of their largest magnitude would be infinite.
#[test]
fn adamw_quantises_what_is_tiny() {
    let small = (1..=BLOCK).map(|k| if k <= 100 { k as f32 * 1e-21 } else { 0.0 });
    let smaller = (1..=BLOCK).map(|k| k as f32 * -1e-41);
    let values: Vec<f32> = small.chain(smaller).collect();
    let squares: Vec<f32> = values.iter().map(|x| x * x).collect();
    let exact = [(&SIGNED, &values), (&UNSIGNED, &squares)].map(|(map, values)| {
        let mut codes = vec![0; values.len()];
        for (values, codes) in values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)) {
            map.quantise(values, codes);
        }
        codes
    });
    for device in computing(DType::F32) {
        assert!(codes_of(&device, &values) == exact, "{}", device.name);
    }
}

/// Values after a step with infinite second moments, and with a NaN of all ones among the weights, far into the
/// parameters of a large model.
fn extreme_step(form: Form, device: &Device) -> Vec<Vec<u64>> {
    let case = Steps {
        clip: f32::MAX,
        ..one_step(form, 612)
    };
    let mut states = case.initial();
    match form.weights {
        Weights::F32 => states[0].bytes[..4].copy_from_slice(&0x7fff_ffffu32.to_ne_bytes()),
        Weights::Master => states[1].bytes[..4].copy_from_slice(&0x7fff_ffffu32.to_ne_bytes()),
        Weights::Rounded => states[0].bytes[..2].copy_from_slice(&0x7fffu16.to_ne_bytes()),
        Weights::Remainder => {
            states[0].bytes[..2].copy_from_slice(&0x8000u16.to_ne_bytes());
            states[1].bytes[..2].copy_from_slice(&(-1i16).to_ne_bytes());
        }
    }
    let mut states: Vec<Tensor> = states.iter().map(|host| device.put(host)).collect();
    let at = (0..612, (5 << 32) + 512);
    case.update(device, &mut states, 3, 1, at).unwrap();
    let bits = |value: f64| if value.is_nan() { f64::NAN } else { value }.to_bits();
    let taken = states.iter().map(|tensor| device.take(tensor).values());
    taken
        .map(|values| values.into_iter().map(bits).collect())
        .collect()
}

#[test]
fn adamw_agrees_on_extremes() {
    for dtype in crate::DTYPES {
        let devices = computing(dtype);
        assert!(devices.len() > 1, "two implementations or more");
        for form in Form::all(dtype) {
            if form.moments == Moments::Quantised {
                continue;
            }
            let expected = extreme_step(form, &devices[0]);
            let holds = |bits: f64| expected.iter().flatten().any(|x| *x == bits.to_bits());
            assert!(holds(f64::NAN) && holds(f64::INFINITY), "{form:?}");
            for device in &devices[1..] {
                let got = extreme_step(form, device);
                assert!(got == expected, "{form:?} on {}", device.name);
            }
        }
    }
}
