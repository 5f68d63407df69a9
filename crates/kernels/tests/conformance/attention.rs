//! Causal attention with grouped queries, forward and backward.

use crate::DTYPES;
use crate::case::{Case, run};
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor, computing};
use crate::dropout::{Dropped, kept};
use crate::host::Host;
use crate::oracle::{Elements, constant, gradients, values, variable};
use crate::sinks::{PlacedSinks, Sinks};
use candle_core::{Device as CandleDevice, Result, Tensor as CandleTensor, Var};
use kernels::{AttentionBackward, AttentionShape, Init, KernelError, Positive};
use memory::DType;

/// Where queries and keys come from.
#[derive(Clone, Copy, Debug)]
pub enum Scores {
    /// Uniform entries up to this.
    Random(f64),
    /// The later a key, the larger its score, by so much that every query sees its own token alone.
    Steep,
    /// Exact in f32: for a head of 16, of whole numbers up to this.
    Whole(f64),
}

#[derive(Debug)]
pub struct Attention {
    pub dtype: DType,
    pub shape: AttentionShape,
    pub scores: Scores,
    pub sinks: Option<Sinks>,
    pub dropout: Option<Dropped>,
}

impl Attention {
    pub fn qkv(&self) -> [Host; 3] {
        let (q, k, dtype) = (self.shape.q(), self.shape.k(), self.dtype);
        let v = Host::random(dtype, self.shape.v(), 1.0, 3);
        match self.scores {
            Scores::Random(range) => [
                Host::random(dtype, q, range, 1),
                Host::random(dtype, k, range, 2),
                v,
            ],
            Scores::Steep => {
                let keys = (0..k[0] * k[1]).map(|index| (index / k[1] % self.shape.seq) as f64);
                [
                    Host::new(dtype, q, vec![50.0; q[0] * q[1]]),
                    Host::new(dtype, k, keys),
                    v,
                ]
            }
            Scores::Whole(range) => {
                let whole = |dims, seed| {
                    let values = Host::random(dtype, dims, range, seed).values();
                    Host::new(dtype, dims, values.into_iter().map(f64::round))
                };
                [whole(q, 1), whole(k, 2), v]
            }
        }
    }

    pub fn dout(&self) -> Host {
        Host::random(self.dtype, self.shape.out(), 1.0, 4)
    }

    /// The factor on attention scores.
    pub fn scale(&self) -> f64 {
        let usual = (self.shape.qk_head_dim as f64).sqrt().recip();
        self.shape.scale.map_or(usual, |scale| scale.get().into())
    }

    /// Scores `[b, heads, s, s]` within their cap, before keys are hidden.
    pub fn capped_scores(&self, q: &CandleTensor, k: &CandleTensor) -> Result<CandleTensor> {
        let scores = (q.matmul(&k.t()?)? * self.scale())?;
        match self.shape.cap.map(|cap| f64::from(cap.get())) {
            Some(cap) => (scores / cap)?.tanh()? * cap,
            None => Ok(scores),
        }
    }

    /// q, k and v, `[b * s, heads * d]`, each as `[b, query heads, s, d]`, key-value heads repeated for their group.
    pub fn by_head(&self, [q, k, v]: [&CandleTensor; 3]) -> Result<[CandleTensor; 3]> {
        let (qk_dim, v_dim) = (self.shape.qk_head_dim, self.shape.v_head_dim);
        let [q, k] = [q, k].map(|x| self.of_width(x, qk_dim));
        Ok([q?, k?, self.of_width(v, v_dim)?])
    }

    fn of_width(&self, x: &CandleTensor, head_dim: usize) -> Result<CandleTensor> {
        let AttentionShape {
            batch, seq, heads, ..
        } = self.shape;
        let own = x.dim(1)? / head_dim;
        let x = x
            .reshape((batch, seq, own, 1, head_dim))?
            .permute((0, 2, 3, 1, 4))?;
        x.broadcast_as((batch, own, heads / own, seq, head_dim))?
            .reshape((batch, heads, seq, head_dim))
    }

    /// The factor on every probability, `[b, heads, s, s]`.
    pub fn kept(&self) -> Result<CandleTensor> {
        let shape = self.shape.probs();
        let elements = 0..shape.iter().product::<usize>() as u64;
        let factors = elements.map(|element| kept(self.dropout, element));
        CandleTensor::from_iter(factors, &CandleDevice::Cpu)?.reshape(&shape)
    }

    /// Probabilities, the logarithms of sums, and output.
    fn forward(&self, [q, k, v]: [&Var; 3], sinks: Option<&Var>) -> Result<[CandleTensor; 3]> {
        let seq = self.shape.seq;
        let mask = (0..seq * seq).map(|index| match self.sees(index / seq, index % seq) {
            true => 0.0,
            false => f64::NEG_INFINITY,
        });
        let mask = CandleTensor::from_iter(mask, &CandleDevice::Cpu)?.reshape((seq, seq))?;
        let [q, k, v] = self.by_head([q, k, v])?;
        let scores = self.capped_scores(&q, &k)?;
        let [probs, lse] = self.probabilities(&scores.broadcast_add(&mask)?, sinks)?;
        let out = (&probs * self.kept()?)?
            .matmul(&v)?
            .permute((0, 2, 1, 3))?
            .reshape(&self.shape.out())?;
        Ok([probs, lse, out])
    }

    /// Probabilities, the logarithms of sums, output, and the gradients of q, k, v and of sinks.
    fn oracle(&self) -> Result<([Elements; 3], Vec<Elements>)> {
        let [q, k, v] = self.qkv();
        let [q, k, v] = [variable(&q)?, variable(&k)?, variable(&v)?];
        let sinks = self.sinks_variable()?;
        let [probs, lse, out] = self.forward([&q, &k, &v], sinks.as_ref())?;
        let of: Vec<&Var> = [&q, &k, &v].into_iter().chain(&sinks).collect();
        let found = gradients(&out, &constant(&self.dout())?, &of)?;
        Ok(([values(&probs)?, values(&lse)?, values(&out)?], found))
    }

    pub fn scratch(&self, device: &Device, probs_kept: bool) -> Tensor {
        let (target, dtype) = (device.kernels.target(), self.dtype);
        let elements = kernels::Attention::scratch_elements(target, self.shape, dtype, probs_kept);
        device.room(DType::F32, [elements])
    }

    /// Whether a query sees a key: up to itself, and less than a window before it.
    pub fn sees(&self, query: usize, key: usize) -> bool {
        let is_far = |window| key + window <= query;
        key <= query && !self.shape.window.is_some_and(is_far)
    }

    /// The entries of the probabilities of keys that are not seen.
    fn hidden(&self, probs: &Host) -> Host {
        let seq = self.shape.seq;
        let entries = probs.values().into_iter().enumerate();
        let hidden: Vec<f64> = entries
            .filter(|(index, _)| !self.sees(index / seq % seq, index % seq))
            .map(|(_, value)| value)
            .collect();
        Host::new(self.dtype, [hidden.len()], hidden)
    }

    fn run_backward(
        &self,
        device: &Device,
        [q, k, v]: [&Tensor; 3],
        probs: &Tensor,
        sinks: &mut Option<(PlacedSinks, Tensor)>,
    ) -> std::result::Result<Vec<Host>, KernelError> {
        let [mut dq, mut dk, mut dv] = [self.shape.q(), self.shape.k(), self.shape.v()]
            .map(|dims| device.room(self.dtype, dims));
        let target = device.kernels.target();
        let (lse, (sinks, dsinks)) = match sinks {
            Some((placed, lse)) => {
                let (sinks, gradient) = placed.parts();
                (Some(lse.view()), (Some(sinks), gradient))
            }
            None => (None, (None, None)),
        };
        let elements =
            AttentionBackward::scratch_elements(target, self.shape, self.dtype, dsinks.is_some());
        let (dsinks, dsinks_init) = dsinks.unzip();
        let mut scratch = device.room(DType::F32, [elements]);
        let placed = Dropped::put(self.dropout, device);
        device.run(AttentionBackward {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            dsinks,
            dsinks_init: dsinks_init.unwrap_or(Init::Overwrite),
            scratch: scratch.view_mut(),
            dout: device.put(&self.dout()).view(),
            probs: probs.view(),
            lse,
            q: q.view(),
            k: k.view(),
            v: v.view(),
            sinks,
            shape: self.shape,
            dropout: placed.view(),
        })?;
        device.take(&scratch);
        Ok([&dq, &dk, &dv].map(|tensor| device.take(tensor)).into())
    }
}

impl Case for Attention {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [q, k, v] = self.qkv().map(|host| device.put(&host));
        let mut out = device.room(self.dtype, self.shape.out());
        let mut probs = device.room(self.dtype, self.shape.probs());
        let mut scratch = self.scratch(device, true);
        let placed = Dropped::put(self.dropout, device);
        let with_lse = |placed| (placed, device.room(DType::F32, self.shape.statistics()));
        let mut sinks = self.place_sinks(device).map(with_lse);
        let (sinks_view, lse) = match &mut sinks {
            Some((placed, lse)) => (Some(placed.parts().0), Some(lse.view_mut())),
            None => (None, None),
        };
        device.run(kernels::Attention {
            out: Some(out.view_mut()),
            probs: Some(probs.view_mut()),
            lse,
            scratch: scratch.view_mut(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            sinks: sinks_view,
            shape: self.shape,
            dropout: placed.view(),
        })?;
        device.take(&scratch);
        let mut found = self.run_backward(device, [&q, &k, &v], &probs, &mut sinks)?;
        if let Some((placed, lse)) = &sinks {
            found.extend(placed.take_gradient(device));
            found.push(device.take(lse));
        }
        let probs = device.take(&probs);
        let forward = [self.hidden(&probs), probs, device.take(&out)];
        Ok(forward.into_iter().chain(found).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let AttentionShape {
            batch,
            seq,
            heads,
            v_head_dim,
            ..
        } = self.shape;
        let pairs = (0..seq).flat_map(|query| (0..seq).map(move |key| (query, key)));
        let hidden = pairs
            .filter(|(query, key)| !self.sees(*query, *key))
            .count();
        let hidden = vec![0.0; batch * heads * hidden];
        let ([probs, lse, out], found) = self.oracle().unwrap();
        let mut found = found.into_iter();
        let [dq, dk, dv] = std::array::from_fn(|_| found.next().unwrap());
        // Where every query sees one token, no score has a gradient: what cancels is a product of dout and v.
        let vanish = self.shape.reach() == 1 || matches!(self.scores, Scores::Steep);
        let terms = if vanish {
            (v_head_dim as f64).sqrt()
        } else {
            0.0
        };
        let mut expected = vec![
            Expected::new("attention: probs of hidden keys", hidden, Rule::Exact),
            Expected::new("attention: probs", probs, Rule::Standard),
            Expected::new("attention: out", out, Rule::Chained),
            Expected::new("attention_backward: dq", dq, Rule::Chained).with_terms(terms),
            Expected::new("attention_backward: dk", dk, Rule::Chained).with_terms(terms),
            Expected::new("attention_backward: dv", dv, Rule::Chained),
        ];
        if let Some(dsinks) = found.next() {
            expected.extend(self.expected_dsinks("attention_backward: dsinks", &lse, dsinks));
            expected.push(Expected::new("attention: lse", lse, Rule::Standard));
        }
        self.allowing_underflow(expected)
    }
}

/// batch, seq, heads, kv_heads, head_dim: a token alone; below, at and above the row block; groups of 1 to 8.
const SHAPES: [[usize; 5]; 11] = [
    [1, 1, 1, 1, 20],
    [3, 1, 4, 2, 20],
    [2, 37, 1, 1, 20],
    [2, 37, 8, 1, 20],
    [1, 37, 6, 6, 20],
    [2, 37, 6, 2, 20],
    [1, 63, 2, 1, 48],
    [1, 64, 2, 2, 16],
    [2, 65, 4, 1, 20],
    [1, 150, 4, 2, 33],
    [1, 200, 8, 2, 64],
];

pub fn shape([batch, seq, heads, kv_heads, head_dim]: [usize; 5]) -> AttentionShape {
    AttentionShape::new([batch, seq], [heads, kv_heads], head_dim)
}

/// The same, with values as wide as given, and scores multiplied by another number.
pub fn with_values(sizes: [usize; 5], v_head_dim: usize, scale: Option<f32>) -> AttentionShape {
    AttentionShape {
        v_head_dim,
        scale: scale.map(Positive::new),
        ..shape(sizes)
    }
}

/// Values narrower and wider than keys, of a token alone and of more than a block; another scale, alone and with either.
pub fn two_widths() -> [AttentionShape; 6] {
    [
        with_values([3, 1, 4, 2, 20], 33, None),
        with_values([2, 37, 6, 2, 20], 12, None),
        with_values([1, 65, 4, 1, 24], 64, None),
        with_values([1, 150, 2, 1, 48], 33, Some(0.3)),
        with_values([2, 40, 2, 2, 16], 40, Some(0.05)),
        AttentionShape {
            window: Some(66),
            ..with_values([1, 150, 2, 1, 20], 13, Some(0.4))
        },
    ]
}

/// The same, where queries see so many keys.
pub fn windowed(sizes: [usize; 5], window: usize) -> AttentionShape {
    AttentionShape {
        window: Some(window),
        ..shape(sizes)
    }
}

/// The same, where scores have a cap.
pub fn capped(sizes: [usize; 5], cap: f32) -> AttentionShape {
    AttentionShape {
        cap: Some(Positive::new(cap)),
        ..shape(sizes)
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for sizes in SHAPES {
        for scores in [Scores::Random(1.0), Scores::Random(2.5)] {
            cases.push(Box::new(Attention {
                dtype,
                shape: shape(sizes),
                scores,
                sinks: None,
                dropout: None,
            }));
        }
        for probability in [0.1, 0.5] {
            cases.push(Box::new(Attention {
                dtype,
                shape: shape(sizes),
                scores: Scores::Random(1.5),
                sinks: None,
                dropout: Some(Dropped {
                    probability,
                    key: 0x1234_5678_9abc_def0,
                }),
            }));
        }
    }
    // A window of one key; below, at and above blocks of queries and packs of keys; one short of the sequence.
    for window in [1, 5, 64, 66, 149] {
        for probability in [0.0, 0.3] {
            cases.push(Box::new(Attention {
                dtype,
                shape: windowed([2, 150, 4, 2, 20], window),
                scores: Scores::Random(1.5),
                sinks: None,
                dropout: (probability > 0.0).then_some(Dropped {
                    probability,
                    key: 3,
                }),
            }));
        }
    }
    let of_scale = with_values([2, 37, 4, 2, 20], 20, Some(0.4));
    for shape in two_widths().into_iter().chain([of_scale]) {
        for probability in [0.0, 0.3] {
            cases.push(Box::new(Attention {
                dtype,
                shape,
                scores: Scores::Random(1.5),
                sinks: None,
                dropout: (probability > 0.0).then_some(Dropped {
                    probability,
                    key: 3,
                }),
            }));
        }
    }
    cases.extend(with_caps(dtype).map(|case| Box::new(case) as Box<dyn Case>));
    cases.extend(with_sinks(dtype).map(|case| Box::new(case) as Box<dyn Case>));
    let steep = shape([2, 150, 4, 2, 20]);
    cases.push(Box::new(Attention {
        dtype,
        shape: steep,
        scores: Scores::Steep,
        sinks: None,
        dropout: None,
    }));
    cases
}

/// Caps that scores are far below, reach, and are far beyond; with windows, dropout, two widths and sinks.
fn with_caps(dtype: DType) -> impl Iterator<Item = Attention> {
    let of = move |shape, range, sinks, probability| Attention {
        dtype,
        shape,
        scores: Scores::Random(range),
        sinks,
        dropout: (probability > 0.0).then_some(Dropped {
            probability,
            key: 3,
        }),
    };
    let narrow = AttentionShape {
        v_head_dim: 12,
        scale: Some(Positive::new(0.4)),
        ..capped([1, 65, 4, 1, 24], 3.0)
    };
    let windowed = AttentionShape {
        window: Some(64),
        ..capped([2, 150, 4, 2, 20], 0.7)
    };
    [
        of(capped([2, 37, 6, 2, 20], 30.0), 1.5, None, 0.0),
        of(capped([2, 150, 4, 2, 20], 1.0), 1.5, None, 0.0),
        of(capped([1, 70, 2, 1, 33], 2.0), 4.0, None, 0.1),
        of(windowed, 1.5, None, 0.3),
        of(narrow, 1.5, Some(Sinks::EVERY[0]), 0.1),
    ]
    .into_iter()
}

/// Sinks of every kind in groups of heads; queries that see themselves alone; windows, dropout and two widths.
fn with_sinks(dtype: DType) -> impl Iterator<Item = Attention> {
    let of = move |shape, sinks, probability| Attention {
        dtype,
        shape,
        scores: Scores::Random(1.5),
        sinks: Some(sinks),
        dropout: (probability > 0.0).then_some(Dropped {
            probability,
            key: 3,
        }),
    };
    let every = Sinks::EVERY.map(|sinks| of(shape([2, 37, 6, 2, 20]), sinks, 0.0));
    let [among, accumulated, ..] = Sinks::EVERY;
    let others = [
        of(shape([3, 1, 4, 2, 20]), among, 0.0),
        of(windowed([2, 150, 4, 2, 20], 1), accumulated, 0.0),
        of(windowed([2, 150, 4, 2, 20], 64), among, 0.3),
        of(
            with_values([1, 65, 4, 1, 24], 64, Some(0.3)),
            accumulated,
            0.1,
        ),
    ];
    every.into_iter().chain(others)
}

#[test]
fn a_dropout_of_nothing_changes_no_bit() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            let outputs = |probability: Option<f32>| {
                let case = Attention {
                    dtype,
                    shape: shape([2, 150, 4, 2, 20]),
                    scores: Scores::Random(1.0),
                    sinks: None,
                    dropout: probability.map(|probability| Dropped {
                        probability,
                        key: 7,
                    }),
                };
                run(&case, &device)
            };
            let [none, nothing, some] = [None, Some(0.0), Some(0.01)].map(outputs);
            assert!(nothing == none, "{}", device.name);
            // Stored probabilities are not dropped.
            assert!(some[..2] == none[..2], "{}", device.name);
            for (some, none) in some[2..].iter().zip(&none[2..]) {
                assert!(some != none, "{}", device.name);
            }
        }
    }
}

/// A cap changes every result, and one far above all scores none but their last bits.
#[test]
fn a_cap_changes_results() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            let outputs = |shape| {
                let case = Attention {
                    dtype,
                    shape,
                    scores: Scores::Random(1.0),
                    sinks: None,
                    dropout: None,
                };
                run(&case, &device)
            };
            let sizes = [2, 37, 4, 2, 20];
            let plain = outputs(shape(sizes));
            let [low, high] = [0.5, 1e4].map(|cap| outputs(capped(sizes, cap)));
            for ((plain, low), high) in plain.iter().zip(&low).zip(&high).skip(1) {
                assert!(low != plain, "{}", device.name);
                let expected = Expected::new("capped", plain.values(), Rule::Chained);
                expected.judge(high, device.kernels.target()).unwrap();
            }
        }
    }
}

/// Proves that the cases differ: another scale changes every result, and another width of v changes o and dv.
#[test]
fn a_scale_and_wider_values_change_results() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            let usual = shape([2, 37, 4, 2, 20]);
            let outputs = |v_head_dim, scale| {
                let case = Attention {
                    dtype,
                    shape: with_values([2, 37, 4, 2, 20], v_head_dim, scale),
                    scores: Scores::Random(1.0),
                    sinks: None,
                    dropout: None,
                };
                run(&case, &device)
            };
            let plain = outputs(20, None);
            assert!(plain == outputs(20, Some(usual.scale())), "{}", device.name);
            for (scaled, plain) in outputs(20, Some(0.4))[1..].iter().zip(&plain[1..]) {
                assert!(scaled != plain, "{}", device.name);
            }
            let wide = outputs(28, None);
            assert!(wide[..2] == plain[..2], "{}", device.name);
            let widths = [2, 3, 4, 5].map(|output: usize| wide[output].dims[1]);
            assert_eq!(widths, [4 * 28, 4 * 20, 2 * 20, 2 * 28]);
        }
    }
}
