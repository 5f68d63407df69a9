//! AdamW to the bit: the same however a range is cut and on every device, codes that are the maps' own, and rounding that
//! follows key and place.

use crate::adamw::{Form, Moments, Steps, Weights, cases};
use crate::device::{Device, Tensor, computing};
use crate::host::Host;
use half::bf16;
use kernels::AdamW;
use kernels::quantise::{BLOCK, SIGNED, UNSIGNED};
use memory::DType;
use std::collections::BTreeSet;

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
        .run(AdamW {
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
        Weights::RemainderByte => {
            states[0].bytes[..2].copy_from_slice(&0x8000u16.to_ne_bytes());
            states[1].bytes[0] = 0xff;
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
