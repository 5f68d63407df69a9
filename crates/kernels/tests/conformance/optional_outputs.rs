//! Leaving an output out changes no bit of the other.

use crate::DTYPES;
use crate::attention::{Attention, Scores, shape};
use crate::device::{Device, Tensor, computing, of_hopper_kind};
use crate::dropout::Dropped;
use crate::flash_attention::FlashAttention;
use crate::host::Host;
use crate::sinks::{self, Sinks};
use kernels::{LayerNorm, OutputForm};
use memory::DType;

/// The output, the probabilities and the logarithms of sums, as far as they are wanted; the last with sinks alone.
fn attention(case: &Attention, device: &Device, [out, probs, lse]: [bool; 3]) -> [Option<Host>; 3] {
    let [q, k, v] = case.qkv().map(|host| device.put(&host));
    let mut out = out.then(|| device.room(case.dtype, case.shape.out()));
    let mut probs = probs.then(|| device.room(case.dtype, case.shape.probs()));
    let sinks = case.place_sinks(device);
    let lse = lse && sinks.is_some();
    let mut lse = lse.then(|| device.room(DType::F32, case.shape.statistics()));
    let mut scratch = case.scratch(device, probs.is_some());
    let placed = Dropped::put(case.dropout, device);
    let outputs = [&mut out, &mut probs, &mut lse];
    let outputs = outputs.map(|output| output.as_mut().map(|output| output.view_mut()));
    let [out_view, probs_view, lse_view] = outputs;
    let called = device.run(kernels::Attention {
        out: out_view,
        probs: probs_view,
        lse: lse_view,
        scratch: scratch.view_mut(),
        q: q.view(),
        k: k.view(),
        v: v.view(),
        sinks: sinks::view(&sinks),
        shape: case.shape,
        dropout: placed.view(),
    });
    called.unwrap();
    device.take(&scratch);
    [out, probs, lse].map(|output| output.map(|output| device.take(&output)))
}

#[test]
fn attention_without_an_output() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            let sizes = [[1, 1, 1, 1, 20], [2, 37, 8, 1, 20], [1, 150, 4, 2, 33]];
            let variants = [
                (None, None),
                (Some(0.1), None),
                (Some(0.1), Some(Sinks::EVERY[0])),
            ];
            for (sizes, (probability, sinks)) in sizes
                .into_iter()
                .flat_map(|sizes| variants.map(|variant| (sizes, variant)))
            {
                let case = Attention {
                    dtype,
                    shape: shape(sizes),
                    scores: Scores::Random(2.0),
                    sinks,
                    dropout: probability.map(|probability| Dropped {
                        probability,
                        key: 7,
                    }),
                };
                let all = attention(&case, &device, [true; 3]);
                assert_eq!(all[2].is_some(), case.sinks.is_some());
                for combination in 0..8 {
                    let wanted = [1, 2, 4].map(|bit| combination & bit != 0);
                    let some = attention(&case, &device, wanted);
                    for (index, output) in some.iter().enumerate() {
                        let expected = all[index].as_ref().filter(|_| wanted[index]);
                        assert!(
                            output.as_ref() == expected,
                            "{}: {wanted:?} of {case:?}",
                            device.name
                        );
                    }
                }
            }
        }
    }
}

/// The output and the statistics, as far as they are wanted.
pub fn flash_attention(
    case: &FlashAttention,
    device: &Device,
    [out, lse]: [bool; 2],
) -> [Option<Host>; 2] {
    let dtype = case.attention.dtype;
    let mut out = out.then(|| device.room(dtype, case.attention.shape.out()));
    let mut lse = lse.then(|| device.room(DType::F32, case.lse_dims()));
    let [out_view, lse_view] =
        [&mut out, &mut lse].map(|output| output.as_mut().map(|output| output.view_mut()));
    let qkv = case.attention.qkv().map(|host| device.put(&host));
    let qkv = qkv.each_ref().map(Tensor::view);
    let sinks = case.attention.place_sinks(device);
    case.run_forward(device, out_view, lse_view, qkv, &sinks)
        .unwrap();
    [out, lse].map(|output| output.map(|output| device.take(&output)))
}

/// Heads of every width that a kernel is compiled for, in more than a block of queries, and in the first of them documents and
/// dropout, with sinks and without. No forward pass is in parts.
fn flash_cases(dtype: DType) -> Vec<FlashAttention> {
    let case = |head_dim, probability| {
        let dropout = (probability > 0.0).then_some(Dropped {
            probability,
            key: 7,
        });
        FlashAttention::plain(Attention {
            dtype,
            shape: shape([2, 131, 2, 1, head_dim]),
            scores: Scores::Random(1.5),
            sinks: None,
            dropout,
        })
    };
    let mut cases: Vec<FlashAttention> = [20, 33, 128, 256].map(|width| case(width, 0.0)).into();
    for sinks in [None, Some(Sinks::EVERY[0])] {
        let mut case = case(20, 0.1);
        case.attention.sinks = sinks;
        case.lengths = vec![5, 1, 30, 64];
        cases.push(case);
    }
    cases
}

#[test]
fn flash_attention_without_an_output() {
    for dtype in DTYPES {
        for device in computing(dtype).into_iter().chain(of_hopper_kind(dtype)) {
            device.memory.set_poison(true);
            for case in flash_cases(dtype) {
                let wanted = [[true, true], [true, false], [false, true], [false, false]];
                let [both, out, lse, none] =
                    wanted.map(|wanted| flash_attention(&case, &device, wanted));
                assert!(both.iter().all(Option::is_some));
                assert!(out[0] == both[0], "{}: out alone of {case:?}", device.name);
                assert!(lse[1] == both[1], "{}: lse alone of {case:?}", device.name);
                assert_eq!(none, [None, None]);
            }
        }
    }
}

/// The normalised input and the statistic, as far as they are wanted.
fn rms_norm(
    dtype: DType,
    tokens: usize,
    hidden: usize,
    device: &Device,
    [y, rstd]: [bool; 2],
) -> [Option<Host>; 2] {
    let x = device.put(&Host::random(dtype, [tokens, hidden], 2.0, 1));
    let weight = device.put(&Host::random(dtype, [hidden], 1.0, 2));
    let mut y = y.then(|| device.room(dtype, [tokens, hidden]));
    let mut rstd = rstd.then(|| device.room(DType::F32, [tokens]));
    let [y_view, rstd_view] =
        [&mut y, &mut rstd].map(|output| output.as_mut().map(|output| output.view_mut()));
    device
        .run(kernels::RmsNorm {
            y: y_view,
            rstd: rstd_view,
            form: OutputForm::Values,
            x: x.view(),
            weight: weight.view(),
            plus_one: false,
            eps: 1e-5,
        })
        .unwrap();
    [y, rstd].map(|output| output.map(|output| device.take(&output)))
}

#[test]
fn rms_norm_without_an_output() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            for (tokens, hidden) in [(1, 48), (37, 48), (150, 288)] {
                let wanted = [[true, true], [true, false], [false, true], [false, false]];
                let [both, y, rstd, none] =
                    wanted.map(|wanted| rms_norm(dtype, tokens, hidden, &device, wanted));
                assert!(both.iter().all(Option::is_some));
                assert!(
                    y[0] == both[0],
                    "{}: y alone of {tokens} x {hidden}",
                    device.name
                );
                assert!(
                    rstd[1] == both[1],
                    "{}: rstd alone of {tokens} x {hidden}",
                    device.name
                );
                assert_eq!(none, [None, None]);
            }
        }
    }
}

/// The normalised input and the statistics, as far as they are wanted.
fn layer_norm(
    dtype: DType,
    [tokens, hidden]: [usize; 2],
    device: &Device,
    [y, mean, rstd]: [bool; 3],
) -> [Option<Host>; 3] {
    let x = device.put(&Host::random(dtype, [tokens, hidden], 2.0, 1));
    let [weight, bias] = [2, 3].map(|seed| device.put(&Host::random(dtype, [hidden], 1.0, seed)));
    let mut y = y.then(|| device.room(dtype, [tokens, hidden]));
    let [mut mean, mut rstd] =
        [mean, rstd].map(|wanted| wanted.then(|| device.room(DType::F32, [tokens])));
    let called = device.run(LayerNorm {
        y: y.as_mut().map(|y| y.view_mut()),
        mean: mean.as_mut().map(|mean| mean.view_mut()),
        rstd: rstd.as_mut().map(|rstd| rstd.view_mut()),
        form: OutputForm::Values,
        x: x.view(),
        weight: weight.view(),
        bias: bias.view(),
        eps: 1e-5,
    });
    called.unwrap();
    [y, mean, rstd].map(|output| output.map(|output| device.take(&output)))
}

#[test]
fn layer_norm_without_an_output() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            for sizes in [[1, 48], [37, 48], [150, 288]] {
                let all = layer_norm(dtype, sizes, &device, [true; 3]);
                for combination in 0..8 {
                    let wanted = [1, 2, 4].map(|bit| combination & bit != 0);
                    let some = layer_norm(dtype, sizes, &device, wanted);
                    for (index, output) in some.iter().enumerate() {
                        let expected = all[index].as_ref().filter(|_| wanted[index]);
                        assert!(
                            output.as_ref() == expected,
                            "{}: {wanted:?} of {sizes:?}",
                            device.name
                        );
                    }
                }
            }
        }
    }
}
