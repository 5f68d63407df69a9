//! Layers of the gated delta rule while tokens are generated. The oracles are sums over the taps, and the recurrence, of whole sequences.

use crate::DTYPES;
use crate::case::{Case, run};
use crate::compare::{Expected, Rule};
use crate::device::{Device, computing};
use crate::host::Host;
use crate::layout::COLUMNS;
use kernels::{
    CachedConvolution, CachedDelta, DeltaShape, GatedDelta, KernelError, ShortConvolution,
};
use memory::{DType, In};
use std::ops::Range;

/// How sequences arrive: in each call as many tokens of each. The last token is in the last row; shorter sequences begin later.
#[derive(Clone, Debug)]
struct Arrival {
    /// Tokens of each sequence.
    lengths: Vec<usize>,
    /// Rows of each sequence in each call.
    parts: Vec<usize>,
}

impl Arrival {
    fn of(lengths: &[usize], parts: &[usize]) -> Arrival {
        let [lengths, parts] = [lengths, parts].map(<[usize]>::to_vec);
        Arrival { lengths, parts }
    }

    fn sequences(&self) -> usize {
        self.lengths.len()
    }

    /// Rows of each sequence.
    fn rows(&self) -> usize {
        self.parts.iter().sum()
    }

    /// The first row of a sequence's first token, of its own rows.
    fn begin(&self, sequence: usize) -> usize {
        self.rows() - self.lengths[sequence]
    }

    /// Values of all rows: those of a token follow from the token's place in its sequence and from the seed, and NaN is where there are none.
    fn random(&self, dtype: DType, width: usize, range: f64, seed: u64) -> Host {
        let of_sequence = |sequence| {
            let none = vec![f64::NAN; self.begin(sequence) * width];
            let tokens = [self.lengths[sequence], width];
            [none, Host::random(dtype, tokens, range, seed).values()].concat()
        };
        let values = (0..self.sequences()).flat_map(of_sequence);
        Host::new(dtype, [self.sequences() * self.rows(), width], values)
    }

    /// Some rows of every sequence.
    fn part(&self, all: &Host, rows: Range<usize>) -> Host {
        let (width, values) = (all.dims[1], all.values());
        let sequences = values.chunks(self.rows() * width);
        let part = sequences.flat_map(|of| of[rows.start * width..rows.end * width].to_vec());
        Host::new(all.dtype, [self.sequences() * rows.len(), width], part)
    }

    /// Makes all calls, each with its rows and the lengths up to there, and returns the rows that they return in the order of tokens.
    fn each_call(
        &self,
        device: &Device,
        mut call: impl FnMut(Range<usize>, In) -> Result<Host, KernelError>,
    ) -> Result<Host, KernelError> {
        let (mut of_sequences, mut read) = (vec![Vec::new(); self.sequences()], 0);
        let mut like = None;
        for part in &self.parts {
            let left = self.rows() - read - part;
            let lengths = self
                .lengths
                .iter()
                .map(|all| all.saturating_sub(left) as f64);
            let lengths = device.put(&Host::new(DType::I32, [self.sequences()], lengths));
            let out = call(read..read + part, lengths.view())?;
            let values = out.values();
            for (all, own) in of_sequences
                .iter_mut()
                .zip(values.chunks(part * out.dims[1]))
            {
                all.extend_from_slice(own);
            }
            (like, read) = (Some((out.dtype, out.dims[1])), read + part);
        }
        let (dtype, width) = like.expect("there is a call");
        let rows = self.sequences() * self.rows();
        Ok(Host::new(dtype, [rows, width], of_sequences.concat()))
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[derive(Debug)]
struct Convolution {
    dtype: DType,
    arrival: Arrival,
    columns: usize,
    taps: usize,
}

impl Convolution {
    fn tensors(&self) -> [Host; 2] {
        [
            self.arrival.random(self.dtype, self.columns, 1.0, 1),
            Host::random(self.dtype, [self.columns, self.taps], 1.0, 2),
        ]
    }

    /// The outputs, and the last rows.
    fn oracle(&self) -> [Vec<f64>; 2] {
        let [x, weight] = self.tensors().map(|host| host.values());
        let (arrival, columns, taps) = (&self.arrival, self.columns, self.taps);
        let [mut out, mut before] = [Vec::new(), Vec::new()];
        for sequence in 0..arrival.sequences() {
            let begin = arrival.begin(sequence);
            let at = |row: usize, column: usize| match row < begin {
                true => 0.0,
                false => x[(sequence * arrival.rows() + row) * columns + column],
            };
            for row in 0..arrival.rows() {
                out.extend((0..columns).map(|column| {
                    let terms = (0..taps.min(row + 1)).map(|back| {
                        weight[column * taps + taps - 1 - back] * at(row - back, column)
                    });
                    let u: f64 = terms.sum();
                    if row < begin { 0.0 } else { u * sigmoid(u) }
                }));
            }
            for back in (1..taps).rev() {
                let row = arrival.rows().checked_sub(back);
                before.extend((0..columns).map(|column| row.map_or(0.0, |row| at(row, column))));
            }
        }
        [out, before]
    }
}

impl Case for Convolution {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [x, weight] = self.tensors();
        let (weight, sequences) = (device.put(&weight), self.arrival.sequences());
        let mut before = device.room(self.dtype, [sequences, self.taps - 1, self.columns]);
        let out = self.arrival.each_call(device, |rows, lengths| {
            let x = device.put(&COLUMNS.around(&self.arrival.part(&x, rows.clone())));
            let mut out = device.room(self.dtype, [sequences * rows.len(), self.columns]);
            device.run(CachedConvolution {
                out: out.view_mut(),
                before: before.view_mut(),
                x: COLUMNS.view(x.view()),
                weight: weight.view(),
                lengths,
            })?;
            Ok(device.take(&out))
        })?;
        Ok(vec![out, device.take(&before)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [out, before] = self.oracle();
        vec![
            Expected::new("cached_convolution: out", out, Rule::Standard),
            Expected::new("cached_convolution: before", before, Rule::Exact),
        ]
    }
}

#[derive(Debug)]
struct Delta {
    dtype: DType,
    arrival: Arrival,
    /// Heads of keys and of values, and their widths.
    heads: [usize; 2],
    widths: [usize; 2],
    /// `a_log` is about this: how fast states fade.
    fading: f64,
}

struct Tensors {
    mixed: Host,
    b: Host,
    a: Host,
    a_log: Host,
    dt_bias: Host,
}

impl Delta {
    fn shape(&self, seq: usize) -> DeltaShape {
        DeltaShape {
            batch: self.arrival.sequences(),
            seq,
            key_heads: self.heads[0],
            value_heads: self.heads[1],
            key_dim: self.widths[0],
            value_dim: self.widths[1],
            state_interval: 1,
        }
    }

    fn tensors(&self) -> Tensors {
        let heads = self.heads[1];
        let rows = |width, range, seed| self.arrival.random(self.dtype, width, range, seed);
        let a_log = Host::random(DType::F32, [heads], 0.5, 4).values();
        Tensors {
            mixed: rows(self.shape(1).mixed()[1], 1.0, 1),
            b: rows(heads, 2.0, 2),
            a: rows(heads, 2.0, 3),
            a_log: Host::new(
                DType::F32,
                [heads],
                a_log.into_iter().map(|a| a + self.fading),
            ),
            dt_bias: Host::random(DType::F32, [heads], 1.0, 5),
        }
    }

    /// The output of a sequence's value head, and the state behind it: token by token.
    fn head(&self, of: [&[f64]; 5], sequence: usize, head: usize) -> [Vec<f64>; 2] {
        let ([mixed, b, a, a_log, dt_bias], shape) = (of, self.shape(self.arrival.rows()));
        let ([keys, values], width) = (self.widths, shape.mixed()[1]);
        let (of_keys, own) = (self.heads[0] * keys, head / shape.group() * keys);
        let (mut state, mut out) = (vec![0.0; keys * values], Vec::new());
        for row in 0..shape.seq {
            if row < self.arrival.begin(sequence) {
                out.extend(vec![0.0; values]);
                continue;
            }
            let token = sequence * shape.seq + row;
            let mixed = &mixed[token * width..][..width];
            let normed = |x: &[f64]| -> Vec<f64> {
                let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(|x| x / norm).collect()
            };
            let (q, k) = (
                normed(&mixed[own..][..keys]),
                normed(&mixed[of_keys + own..][..keys]),
            );
            let v = &mixed[2 * of_keys + head * values..][..values];
            let [a, b] = [a, b].map(|gates| gates[token * self.heads[1] + head]);
            let decay = (-a_log[head].exp() * (a + dt_bias[head]).exp().ln_1p()).exp();
            state.iter_mut().for_each(|state| *state *= decay);
            let along = |x: &[f64], state: &[f64], column: usize| -> f64 {
                let products = x.iter().enumerate();
                products
                    .map(|(key, x)| x * state[key * values + column])
                    .sum()
            };
            let change = |column| sigmoid(b) * (v[column] - along(&k, &state, column));
            let change: Vec<f64> = (0..values).map(change).collect();
            for (state, k) in state.chunks_mut(values).zip(&k) {
                state
                    .iter_mut()
                    .zip(&change)
                    .for_each(|(state, change)| *state += k * change);
            }
            let root = (keys as f64).sqrt();
            out.extend((0..values).map(|column| along(&q, &state, column) / root));
        }
        [out, state]
    }

    /// The outputs, and the last states.
    fn oracle(&self) -> [Vec<f64>; 2] {
        let Tensors {
            mixed,
            b,
            a,
            a_log,
            dt_bias,
        } = self.tensors();
        let of = [mixed, b, a, a_log, dt_bias].map(|host| host.values());
        let [mut out, mut states] = [Vec::new(), Vec::new()];
        for sequence in 0..self.arrival.sequences() {
            let of = of.each_ref().map(Vec::as_slice);
            let heads = (0..self.heads[1]).map(|head| self.head(of, sequence, head));
            let heads: Vec<_> = heads.collect();
            for row in 0..self.arrival.rows() {
                let own = row * self.widths[1]..(row + 1) * self.widths[1];
                out.extend(heads.iter().flat_map(|[out, _]| &out[own.clone()]));
            }
            states.extend(heads.iter().flat_map(|[_, state]| state));
        }
        [out, states]
    }
}

impl Case for Delta {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let (of, shape) = (self.tensors(), self.shape(1));
        let [a_log, dt_bias] = [&of.a_log, &of.dt_bias].map(|host| device.put(host));
        let of_heads = [
            shape.batch,
            shape.value_heads,
            shape.key_dim,
            shape.value_dim,
        ];
        let mut states = device.room(DType::F32, of_heads);
        let out = self.arrival.each_call(device, |rows, lengths| {
            let shape = self.shape(rows.len());
            let part = |all: &Host| self.arrival.part(all, rows.clone());
            let mixed = device.put(&part(&of.mixed));
            let [b, a] = [&of.b, &of.a].map(|all| device.put(&COLUMNS.around(&part(all))));
            let mut out = device.room(self.dtype, shape.values());
            device.run(CachedDelta {
                out: out.view_mut(),
                states: states.view_mut(),
                mixed: mixed.view(),
                b: COLUMNS.view(b.view()),
                a: COLUMNS.view(a.view()),
                a_log: a_log.view(),
                dt_bias: dt_bias.view(),
                lengths,
                shape,
            })?;
            Ok(device.take(&out))
        })?;
        Ok(vec![out, device.take(&states)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [out, states] = self.oracle();
        // In bf16 `beta` is rounded in between.
        let rule = match self.dtype {
            DType::F32 => Rule::Standard,
            _ => Rule::Within(0.01),
        };
        vec![
            Expected::new("cached_delta: out", out, rule),
            Expected::new("cached_delta: states", states, rule),
        ]
    }
}

/// One token; a prompt at once, and in pieces; fewer tokens than taps, and more than a block has; sequences that begin later, in a later call, and
/// with the last token; heads that share keys, wide ones, and those that are no whole packs; states that fade at once, and hardly.
pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let arrivals = [
        Arrival::of(&[1], &[1]),
        Arrival::of(&[7], &[7]),
        Arrival::of(&[7], &[5, 1, 1]),
        Arrival::of(&[70], &[70]),
        Arrival::of(&[40, 23], &[38, 1, 1]),
        Arrival::of(&[9, 1, 3, 6], &[2, 3, 1, 3]),
        Arrival::of(&[17, 35], &[16, 17, 2]),
    ];
    let of_convolution = [
        [1, 4],
        [63, 4],
        [64, 2],
        [130, 4],
        [300, 3],
        [65, 8],
        [257, 4],
    ];
    let of_delta = [
        ([1, 1], [1, 1], -1.0),
        ([1, 3], [6, 5], -1.0),
        ([2, 2], [16, 8], -6.0),
        ([2, 4], [5, 20], 2.0),
        ([1, 2], [32, 17], -3.0),
        ([1, 2], [128, 70], -3.0),
        ([2, 6], [100, 33], -1.0),
    ];
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (arrival, ([columns, taps], (heads, widths, fading))) in arrivals
        .into_iter()
        .zip(of_convolution.into_iter().zip(of_delta))
    {
        cases.push(Box::new(Convolution {
            dtype,
            arrival: arrival.clone(),
            columns,
            taps,
        }));
        cases.push(Box::new(Delta {
            dtype,
            arrival,
            heads,
            widths,
            fading,
        }));
    }
    cases
}

fn convolution(dtype: DType, lengths: &[usize], parts: &[usize]) -> Convolution {
    Convolution {
        dtype,
        arrival: Arrival::of(lengths, parts),
        columns: 67,
        taps: 4,
    }
}

fn delta(dtype: DType, lengths: &[usize], parts: &[usize]) -> Delta {
    Delta {
        dtype,
        arrival: Arrival::of(lengths, parts),
        heads: [1, 2],
        widths: [20, 12],
        fading: -2.0,
    }
}

/// The bytes of the last sequence's rows of each output.
fn of_last_sequence(case: &dyn Case, device: &Device, sequences: usize) -> Vec<Vec<u8>> {
    let outputs = run(case, device).into_iter();
    let last =
        outputs.map(|host| host.bytes[host.bytes.len() / sequences * (sequences - 1)..].to_vec());
    last.collect()
}

/// A sequence has the same bits alone and in a batch, and however its tokens arrive.
#[test]
fn a_sequence_does_not_see_the_batch() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            let both = |lengths: &[usize], parts: &[usize]| {
                let cases: [Box<dyn Case>; 2] = [
                    Box::new(convolution(dtype, lengths, parts)),
                    Box::new(delta(dtype, lengths, parts)),
                ];
                cases.map(|case| of_last_sequence(case.as_ref(), &device, lengths.len()))
            };
            let alone = both(&[70], &[70]);
            assert!(both(&[69], &[69]) != alone, "lengths differ");
            for parts in [&[64, 5, 1][..], &[1, 2, 67], &[35, 35]] {
                assert_eq!(both(&[70], parts), alone, "{}: {parts:?}", device.name);
                assert_eq!(
                    both(&[70, 3, 70], parts),
                    alone,
                    "{}: {parts:?}",
                    device.name
                );
            }
        }
    }
}

/// Token by token a sequence is what it is in training.
#[test]
fn a_prompt_is_as_in_training() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            let (seq, target) = (70, device.kernels.target());
            let judge = |name, cached: Vec<Host>, trained: Host| {
                let rule = match dtype {
                    DType::F32 => Rule::Standard,
                    _ => Rule::Chained,
                };
                let expected = Expected::new(name, trained.values(), rule);
                let judged = expected.judge(&cached[0], target);
                judged.unwrap_or_else(|message| panic!("{name} on {}: {message}", device.name));
            };
            let cached = convolution(dtype, &[seq], &[seq]);
            let [x, weight] = cached.tensors().map(|host| device.put(&host));
            let mut out = device.room(dtype, [seq, cached.columns]);
            device
                .run(ShortConvolution {
                    out: out.view_mut(),
                    x: x.view(),
                    weight: weight.view(),
                    seq,
                    documents: None,
                })
                .unwrap();
            judge("convolution", run(&cached, &device), device.take(&out));
            let cached = delta(dtype, &[seq], &[seq]);
            let (of, shape) = (cached.tensors(), cached.shape(seq));
            let [mixed, b, a] = [&of.mixed, &of.b, &of.a].map(|host| device.put(host));
            let [a_log, dt_bias] = [&of.a_log, &of.dt_bias].map(|host| device.put(host));
            let elements = GatedDelta::scratch_elements(target, shape);
            let mut scratch = device.room(DType::F32, [elements]);
            let mut out = device.room(dtype, shape.values());
            device
                .run(GatedDelta {
                    out: Some(out.view_mut()),
                    states: None,
                    scratch: scratch.view_mut(),
                    mixed: mixed.view(),
                    b: b.view(),
                    a: a.view(),
                    a_log: a_log.view(),
                    dt_bias: dt_bias.view(),
                    shape,
                    documents: None,
                })
                .unwrap();
            judge("rule", run(&cached, &device), device.take(&out));
        }
    }
}
