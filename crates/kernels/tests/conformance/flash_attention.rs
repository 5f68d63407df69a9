//! Causal attention without stored scores: documents, dropout, forward and backward.

use crate::DTYPES;
use crate::attention::{Attention, Scores, capped, shape, two_widths, windowed, with_values};
use crate::case::{Case, judge, run};
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor, computing, emulating_hopper, of_hopper_kind};
use crate::dropout::{Dropped, Placed};
use crate::host::Host;
use crate::oracle::{Elements, constant, gradients, values, variable};
use crate::sinks::{self, PlacedSinks, Sinks};
use candle_core::{Device as CandleDevice, Result, Tensor as CandleTensor, Var};
use kernels::{AttentionShape, FlashAttentionBackward, FlashOptions, Init, KernelError, Target};
use memory::{DType, In, Out};

#[derive(Debug)]
pub struct FlashAttention {
    pub attention: Attention,
    /// Lengths of the documents of every row, over and over; row `r` starts with the one after the `r`-th. Without
    /// lengths no documents are given.
    pub lengths: Vec<usize>,
}

impl FlashAttention {
    pub fn plain(attention: Attention) -> FlashAttention {
        FlashAttention {
            attention,
            lengths: vec![],
        }
    }

    fn options<'a>(&self, documents: &'a Option<Tensor>, dropout: &'a Placed) -> FlashOptions<'a> {
        FlashOptions {
            documents: documents.as_ref().map(Tensor::view),
            dropout: dropout.view(),
        }
    }

    /// Scratch of the forward and the backward pass.
    fn scratch_elements(&self, target: Target) -> [usize; 2] {
        let Attention { shape, dtype, .. } = self.attention;
        [
            kernels::FlashAttention::scratch_elements(target, shape, dtype),
            FlashAttentionBackward::scratch_elements(target, shape, dtype),
        ]
    }

    pub fn lse_dims(&self) -> [usize; 3] {
        let AttentionShape {
            batch, heads, seq, ..
        } = self.attention.shape;
        [batch, heads, seq]
    }

    /// The position of its document's first token, for each token.
    fn documents(&self) -> Vec<usize> {
        let AttentionShape { batch, seq, .. } = self.attention.shape;
        let mut documents = Vec::new();
        for row in 0..batch {
            let lengths = self.lengths.iter().cycle().skip(row);
            let mut first = 0;
            for length in lengths {
                if first >= seq {
                    break;
                }
                let tokens = (*length).min(seq - first);
                documents.extend(std::iter::repeat_n(first, tokens));
                first += tokens;
            }
        }
        documents.resize(batch * seq, 0);
        documents
    }

    /// The documents on the device, if there are any.
    fn put_documents(&self, device: &Device) -> Option<Tensor> {
        let shape = self.attention.shape;
        if self.lengths.is_empty() {
            return None;
        }
        let firsts = self.documents().into_iter().map(|first| first as f64);
        let dims = [shape.batch, shape.seq];
        Some(device.put(&Host::new(DType::I32, dims, firsts)))
    }

    pub fn run_forward(
        &self,
        device: &Device,
        out: Option<Out>,
        lse: Option<Out>,
        [q, k, v]: [In; 3],
        sinks: &Option<PlacedSinks>,
    ) -> std::result::Result<(), KernelError> {
        let documents = self.put_documents(device);
        let placed = Dropped::put(self.attention.dropout, device);
        let options = self.options(&documents, &placed);
        let (shape, target) = (self.attention.shape, device.kernels.target());
        let [elements, _] = self.scratch_elements(target);
        let mut scratch = device.room(DType::F32, [elements]);
        device.run(kernels::FlashAttention {
            out,
            lse,
            scratch: scratch.view_mut(),
            q,
            k,
            v,
            sinks: sinks::view(sinks),
            shape,
            options,
        })?;
        device.take(&scratch);
        Ok(())
    }

    /// Writes dq, dk and dv, and the gradient of sinks.
    pub fn run_backward(
        &self,
        device: &Device,
        [dq, dk, dv]: [Out; 3],
        [q, k, v]: [In; 3],
        [out, lse]: [&Tensor; 2],
        sinks: &mut Option<PlacedSinks>,
    ) -> std::result::Result<(), KernelError> {
        let attention = &self.attention;
        let documents = self.put_documents(device);
        let placed = Dropped::put(self.attention.dropout, device);
        let (target, shape) = (device.kernels.target(), attention.shape);
        let [_, elements] = self.scratch_elements(target);
        let mut scratch = device.room(DType::F32, [elements]);
        let (sinks, dsinks) = sinks.as_mut().map(PlacedSinks::parts).unzip();
        let (dsinks, dsinks_init) = dsinks.flatten().unzip();
        device.run(FlashAttentionBackward {
            dq,
            dk,
            dv,
            dsinks,
            dsinks_init: dsinks_init.unwrap_or(Init::Overwrite),
            scratch: scratch.view_mut(),
            dout: device.put(&attention.dout()).view(),
            out: out.view(),
            lse: lse.view(),
            q,
            k,
            v,
            sinks,
            shape,
            options: self.options(&documents, &placed),
        })?;
        device.take(&scratch);
        Ok(())
    }

    /// Negative infinity where a query sees no key, `[b, 1, s, s]`.
    fn mask(&self) -> Result<CandleTensor> {
        let AttentionShape { batch, seq, .. } = self.attention.shape;
        let rows = self.documents().into_iter().enumerate();
        let mask = rows.flat_map(|(row, first)| {
            let sees = move |key| key >= first && self.attention.sees(row % seq, key);
            (0..seq).map(move |key| match sees(key) {
                true => 0.0,
                false => f64::NEG_INFINITY,
            })
        });
        let mask: Vec<f64> = mask.collect();
        CandleTensor::from_vec(mask, (batch, 1, seq, seq), &CandleDevice::Cpu)
    }

    /// Statistics, output, and the gradients of q, k, v and of sinks.
    fn oracle(&self) -> Result<([Elements; 2], Vec<Elements>)> {
        let attention = &self.attention;
        let [q, k, v] = attention.qkv();
        let variables = [variable(&q)?, variable(&k)?, variable(&v)?];
        let [q, k, v] = attention.by_head(variables.each_ref().map(Var::as_tensor))?;
        let scores = attention
            .capped_scores(&q, &k)?
            .broadcast_add(&self.mask()?)?;
        let sinks = attention.sinks_variable()?;
        let [probs, lse] = attention.probabilities(&scores, sinks.as_ref())?;
        let out = (probs * attention.kept()?)?
            .matmul(&v)?
            .permute((0, 2, 1, 3))?
            .reshape(&attention.shape.out())?;
        let dout = constant(&attention.dout())?;
        let variables: Vec<&Var> = variables.iter().chain(&sinks).collect();
        let found = gradients(&out, &dout, &variables)?;
        Ok(([values(&lse)?, values(&out)?], found))
    }
}

impl Case for FlashAttention {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let qkv = self.attention.qkv().map(|host| device.put(&host));
        let mut out = device.room(self.attention.dtype, self.attention.shape.out());
        let mut lse = device.room(DType::F32, self.lse_dims());
        let (out_view, lse_view) = (out.view_mut(), lse.view_mut());
        let qkv = qkv.each_ref().map(Tensor::view);
        let mut sinks = self.attention.place_sinks(device);
        self.run_forward(device, Some(out_view), Some(lse_view), qkv, &sinks)?;
        let shape = self.attention.shape;
        let mut gradients =
            [shape.q(), shape.k(), shape.v()].map(|dims| device.room(self.attention.dtype, dims));
        let written = gradients.each_mut().map(Tensor::view_mut);
        self.run_backward(device, written, qkv, [&out, &lse], &mut sinks)?;
        let results = [&lse, &out].into_iter().chain(&gradients);
        let results = results.map(|tensor| device.take(tensor));
        let dsinks = sinks.and_then(|placed| placed.take_gradient(device));
        Ok(results.chain(dsinks).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let Attention { shape, scores, .. } = self.attention;
        let ([lse, out], found) = self.oracle().unwrap();
        let mut found = found.into_iter();
        let [dq, dk, dv] = std::array::from_fn(|_| found.next().unwrap());
        let dsinks = found.next().and_then(|dsinks| {
            let name = "flash_attention_backward: dsinks";
            self.attention.expected_dsinks(name, &lse, dsinks)
        });
        // Where queries see one token or two, or heed one, scores have hardly a gradient: what cancels is a product of
        // dout and v.
        let vanish = shape.reach() <= 2 || !matches!(scores, Scores::Random(_));
        let terms = if vanish {
            (shape.v_head_dim as f64).sqrt()
        } else {
            0.0
        };
        // Tensor cores multiply bf16: probabilities are rounded before they weigh values, or dout.
        let mut expected = vec![
            Expected::new("flash_attention: lse", lse, Rule::Standard),
            Expected::new("flash_attention: out", out, Rule::Standard)
                .with_exception(Target::Cuda, Rule::Chained),
            // The row sums come from the rounded output.
            Expected::new("flash_attention_backward: dq", dq, Rule::Chained).with_terms(terms),
            Expected::new("flash_attention_backward: dk", dk, Rule::Chained).with_terms(terms),
            Expected::new("flash_attention_backward: dv", dv, Rule::Standard)
                .with_exception(Target::Cuda, Rule::Chained),
        ];
        expected.extend(dsinks);
        self.attention.allowing_underflow(expected)
    }
}

/// batch, seq, heads, kv_heads, head_dim: a token alone; below, at and above blocks of queries and keys; groups of 1
/// to 8; more tasks than pieces of scratch; without a group, heads of every width of tiles that are no whole chunks, or no
/// pairs.
const SHAPES: [[usize; 5]; 16] = [
    [1, 1, 1, 1, 20],
    [3, 1, 4, 2, 20],
    [2, 37, 8, 1, 20],
    [1, 47, 2, 2, 33],
    [1, 48, 2, 1, 16],
    [1, 63, 2, 1, 48],
    [2, 65, 4, 1, 20],
    [1, 128, 2, 2, 24],
    [1, 129, 2, 1, 256],
    [1, 150, 6, 2, 33],
    [1, 200, 2, 1, 64],
    [1, 150, 2, 2, 128],
    [1, 33, 1, 1, 40],
    [1, 70, 1, 1, 91],
    [1, 33, 1, 1, 251],
    [9, 50, 4, 4, 8],
];

/// So many blocks on CUDA that a group of query heads is in two parts, of unequal size, or in one. The emulation takes
/// seconds for each, so each compute type has one of them.
fn many_blocks(dtype: DType) -> [usize; 5] {
    match dtype {
        DType::F32 => [256, 2, 3, 1, 8],
        _ => [256, 3, 4, 2, 8],
    }
}

pub fn all(dtype: DType) -> Vec<FlashAttention> {
    let dropped = |sizes, scores, dropout| Attention {
        dtype,
        shape: shape(sizes),
        scores,
        sinks: None,
        dropout,
    };
    let attention = |sizes, scores| dropped(sizes, scores, None);
    let random = Scores::Random(1.5);
    let mut cases: Vec<FlashAttention> = SHAPES
        .into_iter()
        .chain([many_blocks(dtype)])
        .map(|sizes| FlashAttention::plain(attention(sizes, random)))
        .collect();
    for scores in [Scores::Steep, Scores::Whole(8.0), Scores::Random(0.1)] {
        cases.push(FlashAttention::plain(attention([1, 150, 2, 1, 16], scores)));
    }
    // A document a row; of one token; ends inside of blocks and at them; documents that fill whole blocks. Two blocks of bf16
    // queries and four of f32's, which leave out two tiles of keys and more.
    let lengths: [(&[usize], &[f32]); 5] = [
        (&[1000], &[0.0]),
        (&[5, 1, 30], &[0.0, 0.1]),
        (&[1, 61, 2, 100], &[0.0]),
        (&[48, 128, 16], &[0.0, 0.1]),
        (&[150, 7], &[0.0]),
    ];
    let dropout = |probability| {
        Some(Dropped {
            probability,
            key: 0x1234_5678_9abc_def0,
        })
    };
    for (lengths, probabilities) in lengths {
        for probability in probabilities {
            let dropout = dropout(*probability).filter(|dropped| dropped.probability > 0.0);
            cases.push(FlashAttention {
                attention: dropped([2, 200, 2, 1, 20], random, dropout),
                lengths: lengths.to_vec(),
            });
        }
    }
    // Of the widest heads of which a warp owns two sixteens of rows, all at once.
    cases.push(FlashAttention {
        attention: dropped([1, 200, 4, 1, 128], random, dropout(0.1)),
        lengths: vec![70, 20],
    });
    // Windows of one key; that begin and end inside of blocks and at them, and leave out whole tiles of keys; that documents
    // cut; one short of the sequence. With 66 keys, the first query of a block is the last to see the last key of another, here
    // and there. Two sixteens of rows a warp, and one.
    let windows: [([usize; 5], usize, &[usize], f32); 7] = [
        ([1, 200, 1, 1, 20], 1, &[], 0.0),
        ([1, 200, 2, 1, 20], 7, &[], 0.1),
        ([1, 200, 2, 1, 20], 66, &[], 0.0),
        ([2, 200, 1, 1, 20], 30, &[70, 5, 40], 0.1),
        ([1, 150, 1, 1, 20], 149, &[], 0.0),
        ([1, 200, 1, 1, 128], 40, &[], 0.0),
        ([1, 129, 1, 1, 256], 33, &[], 0.0),
    ];
    for (sizes, window, lengths, probability) in windows {
        cases.push(FlashAttention {
            attention: Attention {
                shape: windowed(sizes, window),
                ..dropped(
                    sizes,
                    random,
                    dropout(probability).filter(|_| probability > 0.0),
                )
            },
            lengths: lengths.to_vec(),
        });
    }
    let of_scale = with_values([1, 65, 2, 1, 128], 128, Some(0.04));
    for (number, shape) in two_widths().into_iter().chain([of_scale]).enumerate() {
        let probability = if number.is_multiple_of(2) { 0.1 } else { 0.0 };
        cases.push(FlashAttention {
            attention: Attention {
                dtype,
                shape,
                scores: random,
                sinks: None,
                dropout: dropout(probability).filter(|_| probability > 0.0),
            },
            lengths: if number < 3 { vec![] } else { vec![70, 20] },
        });
    }
    // The kernels of heads up to 64 wide drop too, whatever shapes the properties draw.
    for (sizes, probability) in [
        ([1, 37, 2, 2, 20], 0.5),
        ([2, 131, 4, 1, 16], 0.25),
        ([1, 70, 2, 1, 64], 0.1),
    ] {
        let dropout = dropout(probability);
        cases.push(FlashAttention::plain(dropped(sizes, random, dropout)));
    }
    cases.extend(with_caps(dtype));
    cases.extend(with_sinks(dtype));
    cases
}

/// Caps that scores are far below, reach, and are far beyond; with windows, documents, dropout, two widths and sinks; query heads in parts.
fn with_caps(dtype: DType) -> Vec<FlashAttention> {
    let of = |shape, range, sinks, lengths: &[usize], probability| FlashAttention {
        attention: Attention {
            dtype,
            shape,
            scores: Scores::Random(range),
            sinks,
            dropout: (probability > 0.0).then_some(Dropped {
                probability,
                key: 5,
            }),
        },
        lengths: lengths.to_vec(),
    };
    let [among, accumulated, ..] = Sinks::EVERY.map(Some);
    let windowed = |sizes, cap, window| AttentionShape {
        window: Some(window),
        ..capped(sizes, cap)
    };
    let narrow = AttentionShape {
        v_head_dim: 12,
        ..windowed([1, 65, 2, 1, 40], 3.0, 33)
    };
    vec![
        of(capped([3, 1, 4, 2, 20], 1.0), 1.5, None, &[], 0.0),
        of(capped([2, 70, 4, 2, 20], 30.0), 1.5, None, &[], 0.0),
        of(capped([1, 140, 2, 1, 64], 1.0), 1.5, None, &[], 0.0),
        of(capped([1, 70, 1, 1, 128], 2.0), 4.0, None, &[33, 1], 0.1),
        of(
            windowed([1, 140, 2, 1, 256], 0.7, 30),
            1.5,
            among,
            &[70, 5, 40],
            0.1,
        ),
        of(narrow, 1.5, accumulated, &[], 0.0),
        of(capped([16, 70, 3, 1, 8], 0.5), 1.5, None, &[], 0.0),
    ]
}

/// Sinks of every kind in groups of heads; queries that see themselves alone; windows that documents cut, with dropout; heads of every
/// width, and query heads in parts.
fn with_sinks(dtype: DType) -> Vec<FlashAttention> {
    let of = |shape, sinks, lengths: &[usize], probability| FlashAttention {
        attention: Attention {
            dtype,
            shape,
            scores: Scores::Random(1.5),
            sinks: Some(sinks),
            dropout: (probability > 0.0).then_some(Dropped {
                probability,
                key: 5,
            }),
        },
        lengths: lengths.to_vec(),
    };
    let [among, accumulated, above, ..] = Sinks::EVERY;
    let mut cases: Vec<FlashAttention> = Sinks::EVERY
        .into_iter()
        .map(|sinks| of(shape([2, 70, 4, 2, 20]), sinks, &[], 0.0))
        .collect();
    cases.extend([
        of(shape([3, 1, 4, 2, 20]), among, &[], 0.0),
        of(windowed([1, 70, 2, 1, 40], 1), accumulated, &[], 0.0),
        of(windowed([2, 140, 2, 1, 64], 30), among, &[70, 5, 40], 0.1),
        of(shape([1, 100, 2, 1, 128]), above, &[33, 1], 0.0),
        of(shape([1, 70, 2, 1, 256]), accumulated, &[], 0.0),
        of(shape(many_blocks(dtype)), among, &[], 0.0),
    ]);
    cases
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let cases = all(dtype).into_iter();
    cases.map(|case| Box::new(case) as Box<dyn Case>).collect()
}

/// Cases of each width that kernels for Hopper have: a token alone; below, at and above blocks and tiles; groups of up to 16; windows of
/// one key, of few and of a tile; documents that begin anywhere, and with a window and dropout; scores whose base follows from tile to
/// tile.
fn widths_of_hopper(dtype: DType) -> Vec<FlashAttention> {
    /// Tokens, query heads of the one key-value head, the window, lengths of documents, and dropout.
    type Row<'a> = (usize, usize, Option<usize>, &'a [usize], f32);
    const ROWS: [Row; 11] = [
        (1, 1, None, &[], 0.0),
        (63, 16, None, &[], 0.0),
        (64, 2, None, &[], 0.1),
        (65, 1, Some(1), &[], 0.0),
        (127, 3, Some(9), &[], 0.0),
        (129, 2, None, &[1, 61, 2], 0.0),
        (193, 1, Some(128), &[], 0.1),
        (260, 2, Some(66), &[70, 5, 40], 0.1),
        (300, 1, Some(300), &[], 0.0),
        (400, 1, None, &[129, 128, 7], 0.0),
        (1000, 1, None, &[], 0.0),
    ];
    const WIDTHS: [[usize; 2]; 4] = [[64, 64], [128, 128], [192, 128], [256, 256]];
    let of =
        |(seq, heads, window, lengths, probability): Row, [qk, v]: [usize; 2]| FlashAttention {
            attention: Attention {
                dtype,
                shape: AttentionShape {
                    window,
                    ..with_values([1, seq, heads, 1, qk], v, None)
                },
                scores: Scores::Random(1.5),
                sinks: None,
                dropout: (probability > 0.0).then_some(Dropped {
                    probability,
                    key: 5,
                }),
            },
            lengths: lengths.to_vec(),
        };
    let with_sinks = WIDTHS.map(|widths| {
        let mut case = of((260, 2, Some(66), &[70, 5, 40], 0.1), widths);
        case.attention.sinks = Some(Sinks::EVERY[1]);
        case
    });
    let following = WIDTHS.map(|widths| {
        let mut case = of((400, 1, None, &[], 0.0), widths);
        case.attention.scores = Scores::Whole(4.0);
        case
    });
    let cases = WIDTHS
        .into_iter()
        .flat_map(|widths| ROWS.map(|row| of(row, widths)));
    // Blocks of keys go over two query heads of three, or one.
    let in_parts = FlashAttention::plain(Attention {
        dtype,
        shape: shape([64, 200, 3, 1, 40]),
        scores: Scores::Random(1.5),
        sinks: None,
        dropout: None,
    });
    // No whole chunks of a width that no other case has.
    let ragged = FlashAttention::plain(Attention {
        dtype,
        shape: with_values([1, 130, 2, 1, 187], 91, None),
        scores: Scores::Random(1.5),
        sinks: None,
        dropout: None,
    });
    let others = following.into_iter().chain(with_sinks);
    let others = others.chain([in_parts, ragged]);
    cases.chain(others).collect()
}

/// Fails if the device computes attention with the bits of another one: then its kernels for Hopper were not launched.
pub fn has_own_bits(device: &Device) {
    let case = FlashAttention::plain(Attention {
        dtype: DType::BF16,
        shape: shape([1, 129, 2, 1, 64]),
        scores: Scores::Random(1.5),
        sinks: None,
        dropout: None,
    });
    let own = run(&case, device);
    for other in computing(DType::BF16) {
        assert!(
            own != run(&case, &other),
            "{} and {}",
            device.name,
            other.name
        );
    }
}

/// Cases of kernels for Hopper.
#[cfg(feature = "cuda")]
pub fn of_hopper(dtype: DType) -> Vec<Box<dyn Case>> {
    let all = all(dtype).into_iter().chain(widths_of_hopper(dtype));
    all.map(|case| Box::new(case) as Box<dyn Case>).collect()
}

/// The emulation's plain loops; those over many tokens are left to the interpreter.
#[test]
fn kernels_for_hopper_emulated() {
    let devices = [emulating_hopper(DType::BF16)];
    has_own_bits(&devices[0]);
    let every = all(DType::BF16)
        .into_iter()
        .chain(widths_of_hopper(DType::BF16));
    for case in every.filter(|case| case.attention.shape.seq <= 200) {
        judge(&case, &devices);
    }
}

/// The kernels for Hopper, if there is one.
#[cfg(feature = "cuda")]
#[test]
fn kernels_for_hopper_on_a_gpu() {
    let Some(device) = crate::device::gpu_of_hopper(DType::BF16) else {
        return;
    };
    has_own_bits(&device);
    let devices = [device];
    for case in of_hopper(DType::BF16) {
        judge(case.as_ref(), &devices);
        let [first, again] = [0, 1].map(|_| run(case.as_ref(), &devices[0]));
        assert!(first == again, "{case:?} has other bits when it runs again");
    }
    println!(
        "attention by kernels for Hopper: passed on {}",
        devices[0].name
    );
}

/// Their exponentials are far beyond f32. The statistics are as well rounded as others; at this size that is too
/// coarse for the gradients to be as close as the suite asks.
#[test]
fn scores_of_thousands_do_not_overflow() {
    for dtype in DTYPES {
        for (device, width) in devices_with_widths(dtype) {
            // Exact in f32.
            let width = if width < 32 { 16 } else { 64 };
            let case = FlashAttention::plain(Attention {
                dtype,
                shape: shape([2, 150, 4, 2, width]),
                scores: Scores::Whole(64.0),
                sinks: None,
                dropout: None,
            });
            let outputs = run(&case, &device);
            let largest = outputs[0].values().into_iter().fold(0.0, f64::max);
            assert!(largest > 2000.0, "{largest}");
            for (output, expected) in outputs.iter().zip(case.expected()).take(2) {
                expected.judge(output, device.kernels.target()).unwrap();
            }
            for gradient in &outputs[2..] {
                assert!(
                    gradient.values().into_iter().all(f64::is_finite),
                    "{}",
                    device.name
                );
            }
        }
    }
}

/// All devices, and a head's width of which they have kernels of their own.
fn devices_with_widths(dtype: DType) -> impl Iterator<Item = (Device, usize)> {
    let for_all = computing(dtype).into_iter().map(|device| (device, 20));
    for_all.chain(of_hopper_kind(dtype).into_iter().map(|device| (device, 40)))
}

/// The same tensors, without documents.
fn plain(dtype: DType, head_dim: usize, dropout: Option<Dropped>) -> FlashAttention {
    FlashAttention::plain(Attention {
        dtype,
        shape: shape([2, 150, 4, 2, head_dim]),
        scores: Scores::Random(1.0),
        sinks: None,
        dropout,
    })
}

#[test]
fn one_document_and_a_dropout_of_nothing_change_no_bit() {
    let dropout = |probability| {
        Some(Dropped {
            probability,
            key: 7,
        })
    };
    for dtype in DTYPES {
        for (device, width) in devices_with_widths(dtype) {
            let reference = run(&plain(dtype, width, None), &device);
            let same = FlashAttention {
                lengths: vec![150],
                ..plain(dtype, width, dropout(0.0))
            };
            assert!(run(&same, &device) == reference, "{}", device.name);
            for other in [
                FlashAttention {
                    lengths: vec![149],
                    ..plain(dtype, width, None)
                },
                plain(dtype, width, dropout(0.01)),
            ] {
                assert!(
                    run(&other, &device) != reference,
                    "{other:?} on {}",
                    device.name
                );
            }
        }
    }
}

/// Nor does a window that is as long as the sequence, of either kind of attention; one that is a key shorter does.
#[test]
fn a_window_as_long_as_the_sequence_changes_no_bit() {
    for dtype in DTYPES {
        for (device, width) in devices_with_widths(dtype) {
            let sizes = [2, 150, 4, 2, width];
            let outputs = |window: Option<usize>| {
                let attention = || Attention {
                    dtype,
                    shape: window.map_or(shape(sizes), |window| windowed(sizes, window)),
                    scores: Scores::Random(1.0),
                    sinks: None,
                    dropout: None,
                };
                let flash = FlashAttention::plain(attention());
                [run(&attention(), &device), run(&flash, &device)].map(|outputs| {
                    let bytes = outputs.into_iter().skip(1).map(|output| output.bytes);
                    bytes.collect::<Vec<_>>()
                })
            };
            let none = outputs(None);
            for window in [150, 151, usize::MAX] {
                assert!(outputs(Some(window)) == none, "{window} on {}", device.name);
            }
            for (shorter, none) in outputs(Some(149)).iter().zip(&none) {
                assert!(shorter != none, "{}", device.name);
            }
        }
    }
}

/// With equal scores and values of one, a query's output is the share of its keys that are kept, over the expected.
#[test]
fn dropout_keeps_the_share_that_it_should() {
    const SEQ: usize = 300;
    let shape = shape([1, SEQ, 4, 1, 4]);
    for device in computing(DType::F32) {
        for (key, probability) in (0..).zip([0.1, 0.5, 0.9f32]) {
            let case = FlashAttention::plain(Attention {
                dtype: DType::F32,
                shape,
                scores: Scores::Random(1.0),
                sinks: None,
                dropout: Some(Dropped { probability, key }),
            });
            let constant = |width, value| {
                device.put(&Host::new(
                    DType::F32,
                    [SEQ, width],
                    vec![value; SEQ * width],
                ))
            };
            let [q, k, v] = [constant(16, 0.0), constant(4, 0.0), constant(4, 1.0)];
            let mut out = device.room(DType::F32, [SEQ, 16]);
            case.run_forward(
                &device,
                Some(out.view_mut()),
                None,
                [&q, &k, &v].map(Tensor::view),
                &None,
            )
            .unwrap();
            let shares = device.take(&out).values();
            let kept = |(index, share): (usize, &f64)| {
                share * (1.0 - f64::from(probability)) * (index / 16 + 1) as f64
            };
            // Four columns of a head say the same.
            let kept: f64 = shares.iter().enumerate().map(kept).sum::<f64>() / 4.0;
            let elements = (4 * SEQ * (SEQ + 1) / 2) as f64;
            let (mean, probability) = (kept / elements, f64::from(probability));
            let deviation = (probability * (1.0 - probability) / elements).sqrt();
            assert!(
                (mean - (1.0 - probability)).abs() < 5.0 * deviation,
                "{mean} of {probability}"
            );
        }
    }
}
