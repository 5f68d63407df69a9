//! Quantiser and 8-bit AdamW against vectors of bitsandbytes (`golden/bitsandbytes/README.md`).

use half::bf16;
use kernels::cpu::Cpu;
use kernels::quantise::{BLOCK, Map, SIGNED, UNSIGNED};
use kernels::{AdamW, Kernels, MasterOperand, MomentOperand, NormAndClip, NormGrains};
use memory::{Buffer, Category, DType, GRAIN_ELEMENTS, Memory};

/// A file of golden vectors, or the part of it behind a key. Lists are found by their key: this needs no JSON library.
#[derive(Clone, Copy)]
struct Vectors<'a>(&'a str);

impl<'a> Vectors<'a> {
    fn behind(self, key: &str) -> Vectors<'a> {
        let (_, rest) = self
            .0
            .split_once(&format!("\"{key}\": "))
            .unwrap_or_else(|| panic!("no {key}"));
        Vectors(rest)
    }

    /// The list under the first `key`.
    fn list(self, key: &str) -> Vec<u32> {
        let (list, _) = self.behind(key).0.split_once(']').unwrap();
        let numbers = list.trim_start_matches('[').split(", ");
        numbers.map(|number| number.parse().unwrap()).collect()
    }

    fn floats(self, key: &str) -> Vec<f32> {
        self.list(key).into_iter().map(f32::from_bits).collect()
    }

    fn codes(self, key: &str) -> Vec<u8> {
        let codes = self.list(key).into_iter();
        codes.map(|code| u8::try_from(code).unwrap()).collect()
    }

    /// The lists in the list under `key`.
    fn lists(self, key: &str) -> Vec<Vec<f32>> {
        let (lists, _) = self.behind(key).0.split_once("]]").unwrap();
        let lists = lists.trim_start_matches('[').split("], [");
        let bits = |bits: &str| f32::from_bits(bits.parse().unwrap());
        lists
            .map(|list| list.split(", ").map(bits).collect())
            .collect()
    }

    /// The states after each step of a track.
    fn track(self, name: &str) -> Vec<States> {
        let mut rest = self.behind(name);
        let mut steps = Vec::new();
        let (track, _) = rest.0.split_once("}]").unwrap();
        rest = Vectors(track);
        for step in rest.0.split("}, {") {
            let step = Vectors(step);
            steps.push(States {
                parameters: step.floats("p_bits"),
                codes: [step.codes("state1"), step.codes("state2")],
                absmax: [step.floats("absmax1_bits"), step.floats("absmax2_bits")],
            });
        }
        steps
    }
}

/// Weights and moments after a step.
#[derive(Clone, Debug, PartialEq)]
struct States {
    parameters: Vec<f32>,
    codes: [Vec<u8>; 2],
    absmax: [Vec<f32>; 2],
}

const MAPS: Vectors = Vectors(include_str!("../golden/bitsandbytes/dynamic_map.json"));
const SIGNED_BLOCKS: Vectors = Vectors(include_str!(
    "../golden/bitsandbytes/quantize_blockwise_signed.json"
));
const F32_STEPS: Vectors = Vectors(include_str!(
    "../golden/bitsandbytes/adamw8bit_f32_3steps.json"
));
const BF16_STEPS: Vectors = Vectors(include_str!(
    "../golden/bitsandbytes/adamw8bit_bf16_3steps.json"
));
const EDGES: Vectors = Vectors(include_str!("../golden/bitsandbytes/edge_cuda_port.json"));

/// Asserts that at most one of 200 elements is off, by one code; returns how many are. `other` is a second reference: where the two differ,
/// which is a choice between equally near entries and what follows from it, either is right.
#[track_caller]
fn assert_codes(actual: &[u8], expected: &[u8], other: &[u8], what: &str) -> usize {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let off = actual.iter().zip(expected).zip(other).enumerate();
    let off = off.filter(|(at, ((actual, expected), other))| {
        let distance = actual.abs_diff(**expected).min(actual.abs_diff(**other));
        let message = || format!("{what}: code {at} is {actual}, in bitsandbytes {expected}");
        assert!(distance <= 1, "{}", message());
        actual != expected
    });
    let off = off.count();
    assert!(200 * off <= actual.len(), "{what}: {off} codes are off");
    off
}

#[track_caller]
fn assert_relative(actual: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (actual, expected) in actual.iter().zip(expected) {
        let near = (actual - expected).abs() <= tolerance * expected.abs();
        assert!(near, "{what}: {actual:e}, in bitsandbytes {expected:e}");
    }
}

#[test]
fn maps_are_those_of_bitsandbytes() {
    for (map, key) in [(&SIGNED, "signed_bits"), (&UNSIGNED, "unsigned_bits")] {
        let expected = MAPS.list(key);
        let bits = map.values.map(f32::to_bits);
        assert_eq!(bits.to_vec(), expected, "{key}");
        assert_eq!(map.values[usize::from(map.zero)], 0.0, "{key}");
    }
    assert_ne!(SIGNED.values, UNSIGNED.values);
}

/// 10^(i - 6) (0.1 + 0.9 (2k + 1) / (2n)) for i from 0 to 6 and k below n, which doubles with i; then 0 and 1.
#[test]
fn maps_follow_the_closed_form() {
    let closed = |signed: bool| {
        let mut values = vec![0.0f64, 1.0];
        for i in 0..7 {
            let n = if signed { 1u32 << i } else { 2 << i };
            for k in 0..n {
                let middle = f64::from(2 * k + 1) / f64::from(2 * n);
                let value = 10f64.powi(i - 6) * (0.1 + 0.9 * middle);
                values.push(value);
                values.extend(signed.then_some(-value));
            }
        }
        values.sort_by(f64::total_cmp);
        values
    };
    for (map, signed) in [(&SIGNED, true), (&UNSIGNED, false)] {
        let expected = closed(signed);
        assert_eq!(expected.len(), 256);
        for (actual, expected) in map.values.iter().zip(expected) {
            let ulps = actual.to_bits().abs_diff((expected as f32).to_bits());
            assert!(ulps <= 2, "{actual:e} {expected:e}");
        }
    }
}

fn quantise(map: &Map, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut codes = vec![0; values.len()];
    let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
    let absmax = blocks
        .map(|(values, codes)| map.quantise(values, codes))
        .collect();
    (codes, absmax)
}

#[test]
fn blocks_are_quantised_as_by_exact_search() {
    let (codes, absmax) = quantise(&SIGNED, &SIGNED_BLOCKS.floats("x_bits"));
    assert_eq!(absmax, SIGNED_BLOCKS.floats("absmax_bits"));
    assert_eq!((codes.len() % BLOCK, absmax.len()), (100, 3), "a tail");
    let exact = SIGNED_BLOCKS.codes("codes_exact_argmin");
    let off = assert_codes(&codes, &exact, &exact, "codes");
    println!("{off} codes off");
    // The look-up table of bitsandbytes' CPU kernel is seen.
    let coarse = SIGNED_BLOCKS.codes("codes_bnb_native_cpu_lut");
    let differ = exact.iter().zip(&coarse).filter(|(a, b)| a != b).count();
    assert!(200 * differ > exact.len(), "{differ}");
}

const LR: f64 = 1e-3;
const BETAS: [f64; 2] = [0.9, 0.999];
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.01;

/// A run of 8-bit AdamW in the order of bitsandbytes: decay comes after the update, as a factor of its own.
struct Run {
    memory: Memory,
    kernels: Kernels<Cpu>,
    dtype: DType,
    /// f32 weights, or the master of bf16 weights: this project has no bf16 weights that are rounded to nearest.
    parameters: Vec<f32>,
    codes: [Buffer; 2],
    absmax: [Buffer; 2],
    step: i32,
}

impl Run {
    /// A run from zero states: codes of zero, `absmax` 0.
    fn new(dtype: DType, parameters: Vec<f32>) -> Run {
        let memory = Memory::host();
        let kernels = Cpu::new(&memory, DType::F32).unwrap();
        let (n, blocks) = (parameters.len(), parameters.len().div_ceil(BLOCK));
        let lease = |n, dtype| memory.lease(Category::Temporary, "x", [n], dtype).unwrap();
        Run {
            codes: [(); 2].map(|()| lease(n, DType::U8)),
            absmax: [(); 2].map(|()| lease(blocks, DType::F32)),
            memory,
            kernels,
            dtype,
            parameters,
            step: 0,
        }
    }

    fn put(&self, dtype: DType, values: &[f32]) -> Buffer {
        let mut buffer = self
            .memory
            .lease(Category::Temporary, "x", [values.len()], dtype)
            .unwrap();
        let bytes: Vec<u8> = match dtype {
            DType::BF16 => values
                .iter()
                .flat_map(|value| bf16::from_f32(*value).to_ne_bytes())
                .collect(),
            _ => values
                .iter()
                .flat_map(|value| value.to_ne_bytes())
                .collect(),
        };
        self.kernels.upload(buffer.view_mut(), &bytes).unwrap();
        buffer
    }

    /// One step, with the clipping factor that these gradients and a loss of 1 have without clipping.
    fn step(&mut self, gradients: &[f32]) {
        self.step += 1;
        let correction = |beta: f64| 1.0 / (1.0 - beta.powi(self.step));
        let rates = [LR, correction(BETAS[0]), correction(BETAS[1]).sqrt()];
        let rates = self.put(DType::F32, &rates.map(|rate| rate as f32));
        let (mut clip, loss) = (
            self.put(DType::F32, &[0.0; 2]),
            self.put(DType::F32, &[1.0]),
        );
        let gradients = self.put(self.dtype, gradients);
        let count = self.parameters.len().div_ceil(GRAIN_ELEMENTS);
        let mut grains = self
            .memory
            .lease(Category::Temporary, "grains", [count], DType::F64)
            .unwrap();
        self.kernels
            .run(NormGrains {
                grains: grains.view_mut(),
                x: gradients.view(),
            })
            .unwrap();
        self.kernels
            .run(NormAndClip {
                out: clip.view_mut(),
                grains: grains.view(),
                loss: loss.view(),
                max_norm: None,
            })
            .unwrap();
        let key = self
            .memory
            .lease(Category::Temporary, "key", [2], DType::U32)
            .unwrap();
        let mut weights = self.put(self.dtype, &self.parameters);
        let mut master = self.put(DType::F32, &self.parameters);
        let is_bf16 = self.dtype == DType::BF16;
        let [first_codes, second_codes] = &mut self.codes;
        let [first_absmax, second_absmax] = &mut self.absmax;
        let update = AdamW {
            parameters: weights.view_mut(),
            master: match is_bf16 {
                true => MasterOperand::F32(master.view_mut()),
                false => MasterOperand::Parameters,
            },
            first_moment: MomentOperand::Quantised {
                codes: first_codes.view_mut(),
                absmax: first_absmax.view_mut(),
            },
            second_moment: MomentOperand::Quantised {
                codes: second_codes.view_mut(),
                absmax: second_absmax.view_mut(),
            },
            gradients: gradients.view(),
            rates: rates.view(),
            clip: clip.view(),
            key: key.view(),
            first_index: 0,
            beta1: BETAS[0] as f32,
            beta2: BETAS[1] as f32,
            eps: EPS as f32,
            weight_decay: 0.0,
        };
        self.kernels.run(update).unwrap();
        let updated = if is_bf16 { &master } else { &weights };
        let mut bytes = vec![0; 4 * self.parameters.len()];
        self.kernels.download(&mut bytes, updated.view()).unwrap();
        let updated = bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap()));
        let round = |value: f32| match is_bf16 {
            true => bf16::from_f32(value).to_f32(),
            false => value,
        };
        let keep = 1.0 - LR as f32 * DECAY as f32;
        self.parameters = updated.map(|value| round(round(value) * keep)).collect();
    }

    fn states(&self) -> States {
        let codes = |buffer: &Buffer| {
            let mut codes = vec![0; self.parameters.len()];
            self.kernels.download(&mut codes, buffer.view()).unwrap();
            codes
        };
        let absmax = |buffer: &Buffer| {
            let mut bytes = vec![0; 4 * self.parameters.len().div_ceil(BLOCK)];
            self.kernels.download(&mut bytes, buffer.view()).unwrap();
            let floats = bytes.chunks_exact(4);
            floats
                .map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap()))
                .collect()
        };
        States {
            parameters: self.parameters.clone(),
            codes: [codes(&self.codes[0]), codes(&self.codes[1])],
            absmax: [absmax(&self.absmax[0]), absmax(&self.absmax[1])],
        }
    }
}

const MOMENTS: [&str; 2] = ["first moment", "second moment"];

#[track_caller]
fn assert_parameters(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let distances = actual.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let most = distances.fold(0.0, f32::max);
    println!("{what}: parameters at most {most:e} apart");
    assert!(most <= 1e-6, "{what}: {most:e}");
}

/// Three steps against both references. In bitsandbytes' CPU kernel 1 - beta2 is a constant in f64, on CUDA and here it
/// is subtracted in f32: that is 1.3e-5 of the second moment.
fn three_steps(dtype: DType, vectors: Vectors) {
    let (exact, port) = (
        vectors.track("bnb_cpu_exact_quant"),
        vectors.track("cuda_semantics_numpy_port"),
    );
    let gradients = vectors.lists("grad_bits");
    assert_eq!([exact.len(), port.len(), gradients.len()], [3; 3]);
    let mut run = Run::new(dtype, vectors.floats("p0_bits"));
    let mut earlier = run.states();
    for (step, gradients) in gradients.iter().enumerate() {
        run.step(gradients);
        let (states, step) = (run.states(), format!("{dtype:?}, step {}", step + 1));
        let (exact, port) = (&exact[run.step as usize - 1], &port[run.step as usize - 1]);
        for (moment, name) in MOMENTS.into_iter().enumerate() {
            let what = format!("{step}, {name}");
            let off = assert_codes(
                &states.codes[moment],
                &exact.codes[moment],
                &port.codes[moment],
                &what,
            );
            println!("{what}: {off} codes off");
            assert_relative(&states.absmax[moment], &port.absmax[moment], 1e-6, &what);
            assert_relative(&states.absmax[moment], &exact.absmax[moment], 1.5e-5, &what);
            assert_ne!(states.codes[moment], earlier.codes[moment], "{what}: moves");
        }
        assert_parameters(&states.parameters, &port.parameters, &step);
        assert_ne!(states.parameters, earlier.parameters, "{step}: moves");
        earlier = states;
    }
}

#[test]
fn three_steps_in_f32() {
    three_steps(DType::F32, F32_STEPS);
}

#[test]
fn three_steps_in_bf16() {
    three_steps(DType::BF16, BF16_STEPS);
}

/// The native kernel's look-up table is what `three_steps` would refuse.
#[test]
fn the_coarse_track_is_told_apart() {
    let codes = |track| F32_STEPS.track(track)[0].codes[1].clone();
    let (native, exact) = (codes("bnb_native_cpu"), codes("bnb_cpu_exact_quant"));
    let differ = native.iter().zip(&exact).filter(|(a, b)| a != b).count();
    assert!(20 * differ > exact.len(), "{differ}");
}

/// The gradients of the edge file, with 0 where they are not finite: the port zeroes the moments there, which are zero at
/// the first step anyway, and leaves the parameter; a gradient of 0 does the same but for the decay. That this project
/// skips a step with such gradients instead is a deliberate difference ([`a_step_that_is_not_finite_is_skipped`]).
#[test]
fn edges() {
    let (steps, gradients) = (EDGES.track("steps"), EDGES.lists("grad_bits"));
    assert_eq!((steps.len(), gradients.len()), (2, 2));
    let not_finite: Vec<usize> = (0..512)
        .filter(|at| !gradients[0][*at].is_finite())
        .collect();
    assert_eq!(not_finite, [0, 1]);
    let mut run = Run::new(DType::F32, EDGES.floats("p0_bits"));
    for (step, gradients) in gradients.iter().enumerate() {
        let finite: Vec<f32> = gradients
            .iter()
            .map(|gradient| if gradient.is_finite() { *gradient } else { 0.0 })
            .collect();
        run.step(&finite);
        let (states, expected) = (run.states(), &steps[step]);
        for (moment, name) in MOMENTS.into_iter().enumerate() {
            let zero = [SIGNED.zero, UNSIGNED.zero][moment];
            let what = format!("step {}, {name}", step + 1);
            assert_relative(
                &states.absmax[moment],
                &expected.absmax[moment],
                1e-6,
                &what,
            );
            for (block, absmax) in states.absmax[moment].iter().enumerate() {
                let block = block * BLOCK..(block + 1) * BLOCK;
                let [codes, expected] =
                    [&states, expected].map(|states| &states.codes[moment][block.clone()]);
                // The port divides zeros by zero, and stores whatever code: all are 0 times `absmax`.
                match *absmax > 0.0 {
                    true => assert_eq!(codes, expected, "{what}"),
                    false => assert!(codes.iter().all(|code| *code == zero), "{what}"),
                }
            }
        }
        let what = format!("step {}", step + 1);
        assert_parameters(&states.parameters[2..], &expected.parameters[2..], &what);
        if step == 0 {
            // A tiny negative keeps its sign, one code below zero; a block of zeros is all zero.
            assert!(finite[3] < 0.0 && finite[3] > -1e-8);
            assert_eq!(states.codes[0][3], SIGNED.zero - 1);
            assert!(finite[256..].iter().all(|gradient| *gradient == 0.0));
            assert_eq!([states.absmax[0][1], states.absmax[1][1]], [0.0; 2]);
            assert!(
                states.codes[0][256..]
                    .iter()
                    .all(|code| *code == SIGNED.zero)
            );
            assert!(
                states.codes[1][256..]
                    .iter()
                    .all(|code| *code == UNSIGNED.zero)
            );
        }
    }
}

#[test]
fn a_step_that_is_not_finite_is_skipped() {
    let gradients = EDGES.lists("grad_bits");
    let mut run = Run::new(DType::F32, EDGES.floats("p0_bits"));
    run.step(&gradients[1]);
    let before = run.states();
    let parameters = before.parameters.clone();
    run.step(&gradients[0]);
    let mut after = run.states();
    // The factor of the decay is the test's own.
    assert_ne!(after.parameters, parameters);
    after.parameters = parameters;
    assert_eq!(after, before);
    run.step(&gradients[1]);
    assert_ne!(run.states().absmax, before.absmax, "and goes on");
}
