//! The gated delta rule in chunks. The oracle is the recurrence, token by token.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, Tensor as OnDevice, computing, gradient_starts};
use crate::host::Host;
use crate::layout::COLUMNS;
use crate::oracle::{add, constant, gradients, values, variable};
use candle_core::{DType as CandleDType, Device as CandleDevice, Result, Tensor};
use kernels::{DeltaShape, GatedDelta, GatedDeltaBackward, KernelError};
use memory::{DType, Out};
use std::ops::Range;

/// Lengths of the documents of every sequence, over and over; without lengths none are given. Each sequence begins at another length.
#[derive(Clone, Debug)]
pub struct Documents(Vec<usize>);

impl Documents {
    pub fn of(lengths: &[usize]) -> Documents {
        Documents(lengths.to_vec())
    }

    /// The place in its sequence at which each token's document begins.
    pub fn firsts(&self, [batch, seq]: [usize; 2]) -> Vec<usize> {
        let of_sequence = |sequence: usize| {
            let lengths = self.0.iter().cycle().skip(sequence);
            let starts = lengths.scan(0, |end, length| {
                let first = *end;
                *end += length;
                Some(std::iter::repeat_n(first, *length))
            });
            starts.flatten().take(seq).collect::<Vec<_>>()
        };
        match self.0.is_empty() {
            true => vec![0; batch * seq],
            false => (0..batch).flat_map(of_sequence).collect(),
        }
    }

    pub fn put(&self, device: &Device, sizes: [usize; 2]) -> Option<OnDevice> {
        let firsts = self.firsts(sizes).into_iter();
        let host = Host::new(DType::I32, sizes, firsts.map(|first| first as f64));
        (!self.0.is_empty()).then(|| device.put(&host))
    }
}

pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

#[derive(Debug)]
struct Delta {
    dtype: DType,
    gradient: DType,
    start: Start,
    shape: DeltaShape,
    documents: Documents,
    /// `a_log` is about this: how fast states fade.
    fading: f64,
}

/// The inputs of the rule, the gradient of its output, and what the gradients of `a_log` and `dt_bias` are added to.
#[derive(Clone)]
struct Tensors {
    mixed: Host,
    b: Host,
    a: Host,
    a_log: Host,
    dt_bias: Host,
    dout: Host,
    earlier: Host,
}

impl Delta {
    fn sizes(&self) -> [usize; 2] {
        [self.shape.batch, self.shape.seq]
    }

    fn tensors(&self) -> Tensors {
        let (shape, heads) = (self.shape, self.shape.value_heads);
        let a_log = Host::random(DType::F32, [heads], 0.5, 4);
        let a_log = a_log.values().into_iter().map(|a| a + self.fading);
        Tensors {
            mixed: Host::random(self.dtype, shape.mixed(), 1.0, 1),
            b: Host::random(self.dtype, shape.gates(), 2.0, 2),
            a: Host::random(self.dtype, shape.gates(), 2.0, 3),
            a_log: Host::new(DType::F32, [heads], a_log),
            dt_bias: Host::random(DType::F32, [heads], 1.0, 5),
            dout: Host::random(self.dtype, shape.values(), 1.0, 6),
            earlier: Host::random(self.gradient, [heads], 1.0, 7),
        }
    }

    /// Columns `[b * s, heads * width]` of heads as `[b * value heads, s, width]`; neighbours share a head where there are fewer.
    fn by_heads(&self, x: &Tensor, heads: usize) -> Result<Tensor> {
        let DeltaShape {
            batch,
            seq,
            value_heads,
            ..
        } = self.shape;
        let width = x.dim(1)? / heads;
        let x = x.reshape((batch, seq, heads, 1, width))?;
        let x = x.broadcast_as((batch, seq, heads, value_heads / heads, width))?;
        let x = x
            .reshape((batch, seq, value_heads, width))?
            .transpose(1, 2)?;
        x.reshape((batch * value_heads, seq, width))
    }

    /// 0 at each sequence's head whose token is a document's first, and 1 elsewhere.
    fn kept(&self, token: usize) -> Result<Tensor> {
        let DeltaShape {
            seq, value_heads, ..
        } = self.shape;
        let firsts = self.documents.firsts(self.sizes());
        let of_sequences = firsts
            .chunks(seq)
            .map(|firsts| f64::from(firsts[token] != token));
        let kept: Vec<f64> = of_sequences
            .flat_map(|kept| std::iter::repeat_n(kept, value_heads))
            .collect();
        Tensor::from_vec(
            kept,
            (self.shape.batch * value_heads, 1, 1),
            &CandleDevice::Cpu,
        )
    }

    /// The output of all heads, token by token.
    fn recurrence(&self, [mixed, g, beta]: [&Tensor; 3]) -> Result<Tensor> {
        let DeltaShape {
            batch,
            seq,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.shape;
        let keys = key_heads * key_dim;
        let normed = |first: usize| {
            let x = self.by_heads(&mixed.narrow(1, first, keys)?, key_heads)?;
            x.broadcast_div(&(x.sqr()?.sum_keepdim(2)? + 1e-6)?.sqrt()?)
        };
        let (q, k) = ((normed(0)? / (key_dim as f64).sqrt())?, normed(keys)?);
        let v = mixed.narrow(1, 2 * keys, value_heads * value_dim)?;
        let [v, g, beta] = [&v, g, beta].map(|x| self.by_heads(x, value_heads));
        let (v, g, beta) = (v?, g?, beta?);
        let zero = (batch * value_heads, key_dim, value_dim);
        let mut state = Tensor::zeros(zero, CandleDType::F64, &CandleDevice::Cpu)?;
        let mut rows = Vec::new();
        for token in 0..seq {
            let [q, k, v, g, beta] = [&q, &k, &v, &g, &beta].map(|x| x.narrow(1, token, 1));
            let (q, k, v, g, beta) = (q?, k?, v?, g?, beta?);
            state = state.broadcast_mul(&(g.exp()? * self.kept(token)?)?)?;
            let change = (v - k.matmul(&state)?)?.broadcast_mul(&beta)?;
            state = (state + k.transpose(1, 2)?.matmul(&change)?)?;
            rows.push(q.matmul(&state)?);
        }
        let out = Tensor::cat(&rows, 1)?.reshape((batch, value_heads, seq, value_dim))?;
        out.transpose(1, 2)?
            .reshape((batch * seq, value_heads * value_dim))
    }

    /// The largest sum of absolute terms of a gradient of `a_log`, from the gradient of `a`: they may cancel.
    fn terms(&self, da: &[f64]) -> f64 {
        let Tensors { a, dt_bias, .. } = self.tensors();
        let (heads, a, dt_bias) = (self.shape.value_heads, a.values(), dt_bias.values());
        let mut sums = vec![0.0; heads];
        for (at, (a, da)) in a.iter().zip(da).enumerate() {
            let x = a + dt_bias[at % heads];
            // g over its derivative by a.
            sums[at % heads] += (da * (1.0 + x.exp()).ln() * (1.0 + (-x).exp())).abs();
        }
        sums.into_iter().fold(0.0, f64::max)
    }

    /// The output, and gradients in the order of [`Case::run`].
    fn oracle(&self) -> Result<Vec<Vec<f64>>> {
        let of = self.tensors();
        let (mixed, b, a) = (variable(&of.mixed)?, variable(&of.b)?, variable(&of.a)?);
        let (a_log, dt_bias) = (variable(&of.a_log)?, variable(&of.dt_bias)?);
        let softplus = (a.broadcast_add(&dt_bias)?.exp()? + 1.0)?.log()?;
        let g = softplus.broadcast_mul(&a_log.exp()?)?.neg()?;
        let out = self.recurrence([&mixed, &g, &sigmoid(&b)?])?;
        let variables = [&mixed, &b, &a, &a_log, &dt_bias];
        let mut found = gradients(&out, &constant(&of.dout)?, &variables)?;
        for sums in &mut found[3..] {
            *sums = add(sums.clone(), &self.start.values(&of.earlier));
        }
        found.insert(0, values(&out)?);
        Ok(found)
    }
}

/// Calls of the rule on a device.
struct Calls<'a> {
    device: &'a Device,
    of: &'a Delta,
    documents: Option<OnDevice>,
    mixed: OnDevice,
    b: OnDevice,
    a: OnDevice,
    a_log: OnDevice,
    dt_bias: OnDevice,
}

impl<'a> Calls<'a> {
    fn new(device: &'a Device, of: &'a Delta, tensors: &Tensors) -> Calls<'a> {
        Calls {
            device,
            of,
            documents: of.documents.put(device, of.sizes()),
            mixed: device.put(&tensors.mixed),
            b: device.put(&COLUMNS.around(&tensors.b)),
            a: device.put(&COLUMNS.around(&tensors.a)),
            a_log: device.put(&tensors.a_log),
            dt_bias: device.put(&tensors.dt_bias),
        }
    }

    fn forward(
        &self,
        out: Option<Out>,
        states: Option<Out>,
    ) -> std::result::Result<(), KernelError> {
        let (device, shape) = (self.device, self.of.shape);
        let elements = GatedDelta::scratch_elements(device.kernels.target(), shape);
        let mut scratch = device.room(DType::F32, [elements]);
        device.run(GatedDelta {
            out,
            states,
            scratch: scratch.view_mut(),
            mixed: self.mixed.view(),
            b: COLUMNS.view(self.b.view()),
            a: COLUMNS.view(self.a.view()),
            a_log: self.a_log.view(),
            dt_bias: self.dt_bias.view(),
            shape,
            documents: self.documents.as_ref().map(OnDevice::view),
        })
    }

    /// All gradients.
    fn backward(
        &self,
        states: &OnDevice,
        dout: &Host,
        earlier: &Host,
    ) -> std::result::Result<Vec<Host>, KernelError> {
        let (device, of, shape) = (self.device, self.of, self.of.shape);
        let elements = GatedDeltaBackward::scratch_elements(device.kernels.target(), shape);
        let mut scratch = device.room(DType::F32, [elements]);
        let mut dmixed = device.room(of.dtype, shape.mixed());
        let gates = COLUMNS.stored(of.dtype, shape.gates(), 8);
        let [mut db, mut da] = [0, 1].map(|_| device.put(&gates));
        let [mut da_log, mut ddt_bias] = [0, 1].map(|_| device.start(of.start, earlier));
        let (earlier, dout) = (device.put(earlier), device.put(dout));
        device.run(GatedDeltaBackward {
            dmixed: dmixed.view_mut(),
            db: COLUMNS.view_mut(db.view_mut()),
            da: COLUMNS.view_mut(da.view_mut()),
            da_log: da_log.view_mut(),
            da_log_init: of.start.init(&earlier),
            ddt_bias: ddt_bias.view_mut(),
            ddt_bias_init: of.start.init(&earlier),
            scratch: scratch.view_mut(),
            dout: dout.view(),
            states: states.view(),
            mixed: self.mixed.view(),
            b: COLUMNS.view(self.b.view()),
            a: COLUMNS.view(self.a.view()),
            a_log: self.a_log.view(),
            dt_bias: self.dt_bias.view(),
            shape,
            documents: self.documents.as_ref().map(OnDevice::view),
        })?;
        let [db, da] = [&db, &da].map(|gates| COLUMNS.take(device, gates));
        let [dmixed, da_log, ddt_bias] = [&dmixed, &da_log, &ddt_bias].map(|of| device.take(of));
        Ok(vec![dmixed, db, da, da_log, ddt_bias])
    }
}

impl Delta {
    fn run_with(
        &self,
        device: &Device,
        tensors: &Tensors,
    ) -> std::result::Result<Vec<Host>, KernelError> {
        let calls = Calls::new(device, self, tensors);
        let mut out = device.room(self.dtype, self.shape.values());
        let mut states = device.room(DType::F32, self.shape.states());
        calls.forward(Some(out.view_mut()), Some(states.view_mut()))?;
        let mut outputs = vec![device.take(&out)];
        outputs.extend(calls.backward(&states, &tensors.dout, &tensors.earlier)?);
        Ok(outputs)
    }
}

impl Case for Delta {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        self.run_with(device, &self.tensors())
    }

    fn expected(&self) -> Vec<Expected> {
        let names = [
            "gated_delta: out",
            "gated_delta_backward: dmixed",
            "gated_delta_backward: db",
            "gated_delta_backward: da",
            "gated_delta_backward: da_log",
            "gated_delta_backward: ddt_bias",
        ];
        // In bf16 `beta` is rounded in between.
        let rule = match self.dtype {
            DType::F32 => Rule::Standard,
            _ => Rule::Within(0.01),
        };
        let oracle = self.oracle().unwrap();
        let terms = self.terms(&oracle[3]);
        let terms = [0.0, 0.0, 0.0, 0.0, terms, terms];
        let found = oracle.into_iter().zip(names).zip(terms);
        found
            .map(|((values, name), terms)| Expected::new(name, values, rule).with_terms(terms))
            .collect()
    }
}

fn shape(
    [batch, seq]: [usize; 2],
    [key_heads, value_heads]: [usize; 2],
    [key_dim, value_dim]: [usize; 2],
) -> DeltaShape {
    DeltaShape {
        batch,
        seq,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        state_interval: 1,
    }
}

/// Sequences of one token, shorter than a chunk, as long, longer; documents of one token, that end at a chunk's end and inside, and go on over
/// chunks; states that fade at once, and hardly; heads that share keys; the widest keys, and values of several tiles;
/// all states kept, and some.
pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let starts: Vec<_> = gradient_starts()
        .filter(|(gradient, _)| dtype == DType::BF16 || *gradient == dtype)
        .collect();
    let all: [(DeltaShape, f64, &[usize]); 7] = [
        (shape([1, 1], [1, 1], [1, 1]), -1.0, &[]),
        (shape([2, 63], [1, 3], [6, 5]), -1.0, &[3, 1, 60]),
        (shape([1, 64], [2, 2], [16, 8]), -6.0, &[]),
        (shape([2, 65], [1, 2], [5, 20]), 2.0, &[64, 70, 1]),
        (
            shape([1, 200], [1, 2], [32, 17]),
            -3.0,
            &[3, 1, 60, 64, 66, 7],
        ),
        (shape([1, 130], [1, 1], [8, 36]), -4.0, &[]),
        (shape([1, 66], [1, 1], [128, 3]), -3.0, &[10, 90]),
    ];
    let all = all.into_iter().enumerate();
    let case = |(number, (shape, fading, lengths)): (usize, (DeltaShape, f64, &[usize]))| -> Box<dyn Case> {
        let (gradient, start) = starts[number % starts.len()];
        Box::new(Delta {
            dtype,
            gradient,
            start,
            shape: DeltaShape {
                state_interval: 1 + number % 3,
                ..shape
            },
            documents: Documents::of(lengths),
            fading,
        })
    };
    all.map(case).collect()
}

/// Some rows, or some columns, of a matrix.
fn part(x: &Host, rows: Range<usize>, columns: &[Range<usize>]) -> Host {
    let (width, values) = (x.dims[1], x.values());
    let own = |row: &[f64]| -> Vec<f64> {
        let columns = columns.iter().cloned();
        columns.flat_map(|columns| row[columns].to_vec()).collect()
    };
    let kept = values.chunks(width).skip(rows.start).take(rows.len());
    let kept: Vec<f64> = kept.flat_map(own).collect();
    Host::new(x.dtype, [rows.len(), kept.len() / rows.len()], kept)
}

/// All columns of a matrix.
fn whole(x: &Host) -> Vec<Range<usize>> {
    std::iter::once(0..x.dims[1]).collect()
}

/// Columns of some of all heads.
fn columns_of(heads: &Range<usize>, first: usize, width: usize) -> Range<usize> {
    first + heads.start * width..first + heads.end * width
}

impl Delta {
    /// The same with some of the key heads, and their value heads: the columns of `mixed`, of gates and of values.
    fn columns(&self, key_heads: Range<usize>) -> [Vec<Range<usize>>; 3] {
        let (shape, group) = (self.shape, self.shape.group());
        let keys = shape.key_heads * shape.key_dim;
        let heads = key_heads.start * group..key_heads.end * group;
        let values = columns_of(&heads, 2 * keys, shape.value_dim);
        let [queries, keys] = [0, keys].map(|first| columns_of(&key_heads, first, shape.key_dim));
        let of_values = columns_of(&heads, 0, shape.value_dim);
        [vec![queries, keys, values], vec![heads], vec![of_values]]
    }

    fn some_heads(&self, key_heads: Range<usize>) -> (Delta, Tensors) {
        let (of, [mixed, gates, values]) = (self.tensors(), self.columns(key_heads.clone()));
        let rows = 0..of.mixed.dims[0];
        let of_heads = |x: &Host| {
            let row = Host::new(x.dtype, [1, x.dims[0]], x.values());
            let own = part(&row, 0..1, &gates);
            Host::new(x.dtype, [own.dims[1]], own.values())
        };
        let tensors = Tensors {
            mixed: part(&of.mixed, rows.clone(), &mixed),
            b: part(&of.b, rows.clone(), &gates),
            a: part(&of.a, rows.clone(), &gates),
            a_log: of_heads(&of.a_log),
            dt_bias: of_heads(&of.dt_bias),
            dout: part(&of.dout, rows, &values),
            earlier: of_heads(&of.earlier),
        };
        let shape = DeltaShape {
            key_heads: key_heads.len(),
            value_heads: gates[0].len(),
            ..self.shape
        };
        let documents = self.documents.clone();
        (
            Delta {
                shape,
                documents,
                ..*self
            },
            tensors,
        )
    }

    /// A document of a single sequence, alone.
    fn alone(&self, rows: Range<usize>) -> (Delta, Tensors) {
        let of = self.tensors();
        let own = |x: &Host| part(x, rows.clone(), &whole(x));
        let tensors = Tensors {
            mixed: own(&of.mixed),
            b: own(&of.b),
            a: own(&of.a),
            dout: own(&of.dout),
            ..of
        };
        let shape = DeltaShape {
            seq: rows.len(),
            ..self.shape
        };
        let documents = Documents::of(&[]);
        (
            Delta {
                shape,
                documents,
                ..*self
            },
            tensors,
        )
    }
}

fn packed(dtype: DType, seq: usize, lengths: &[usize]) -> Delta {
    Delta {
        dtype,
        gradient: DType::F32,
        start: Start::Overwrite,
        shape: shape([1, seq], [2, 4], [12, 7]),
        documents: Documents::of(lengths),
        fading: -2.0,
    }
}

#[test]
fn some_heads_have_the_bits_that_they_have_among_all() {
    for dtype in crate::DTYPES {
        for device in computing(dtype) {
            let all = packed(dtype, 130, &[50, 60]);
            let of_all = all.run(&device).unwrap();
            for head in 0..2 {
                let (some, tensors) = all.some_heads(head..head + 1);
                let of_some = some.run_with(&device, &tensors).unwrap();
                let [mixed, gates, values] = all.columns(head..head + 1);
                let columns = [&values, &mixed, &gates, &gates];
                for ((all, some), columns) in of_all.iter().zip(&of_some).zip(columns) {
                    let same = part(all, 0..130, columns) == *some;
                    assert!(same, "{}: key head {head}", device.name);
                }
                for (all, some) in of_all[4..].iter().zip(&of_some[4..]) {
                    let same = all.values()[gates[0].clone()] == some.values();
                    assert!(same, "{}: key head {head}", device.name);
                }
            }
        }
    }
}

/// Documents that begin and end within a chunk, and at its end, and one that goes on for three.
const LENGTHS: [usize; 5] = [20, 44, 10, 150, 6];

/// The rows of each document.
fn documents() -> impl Iterator<Item = Range<usize>> {
    LENGTHS.iter().scan(0, |end, length| {
        let first = *end;
        *end += length;
        Some(first..*end)
    })
}

#[test]
fn a_document_changes_no_bit_of_another() {
    for dtype in crate::DTYPES {
        for device in computing(dtype) {
            let case = packed(dtype, LENGTHS.iter().sum(), &LENGTHS);
            let before = case.run(&device).unwrap();
            for changed in documents() {
                let mut tensors = case.tensors();
                let of = [
                    &mut tensors.mixed,
                    &mut tensors.a,
                    &mut tensors.b,
                    &mut tensors.dout,
                ];
                for x in of {
                    let (width, mut values) = (x.dims[1], x.values());
                    let own = &mut values[changed.start * width..changed.end * width];
                    own.iter_mut().for_each(|value| *value = 0.7 - *value);
                    *x = Host::new(x.dtype, x.dims, values);
                }
                let after = case.run_with(&device, &tensors).unwrap();
                for rows in documents() {
                    for (before, after) in before.iter().zip(&after).take(4) {
                        let [before, after] =
                            [before, after].map(|x| part(x, rows.clone(), &whole(x)));
                        let is_same = before == after;
                        assert_eq!(
                            is_same,
                            rows != changed,
                            "{}: {rows:?} as {changed:?} changes",
                            device.name
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_packed_document_is_the_same_alone() {
    for device in computing(DType::F32) {
        let case = packed(DType::F32, LENGTHS.iter().sum(), &LENGTHS);
        let all = case.run(&device).unwrap();
        for rows in documents() {
            let (alone, tensors) = case.alone(rows.clone());
            let alone = alone.run_with(&device, &tensors).unwrap();
            for (all, alone) in all.iter().zip(&alone).take(4) {
                let expected = Expected::new("packed", alone.values(), Rule::Standard);
                let own = part(all, rows.clone(), &whole(all));
                let judged = expected.judge(&own, device.kernels.target());
                judged.unwrap_or_else(|message| panic!("{}: {rows:?}: {message}", device.name));
            }
        }
    }
}

#[test]
fn states_that_are_made_again_have_the_bits_that_they_had() {
    for dtype in crate::DTYPES {
        for device in computing(dtype) {
            let all_kept = packed(dtype, 290, &[50, 60, 150]);
            let expected = all_kept.run(&device).unwrap();
            // Segments of equal length, a shorter last one, and a single one.
            for (state_interval, kept) in [(2, 3), (3, 2), (7, 1)] {
                let shape = DeltaShape {
                    state_interval,
                    ..all_kept.shape
                };
                assert_eq!(shape.kept_states(), kept);
                let documents = all_kept.documents.clone();
                let some_kept = Delta {
                    shape,
                    documents,
                    ..all_kept
                };
                let found = some_kept.run(&device).unwrap();
                assert!(found == expected, "{}: {state_interval}", device.name);
            }
        }
    }
}

#[test]
fn leaving_an_output_out_changes_no_bit_of_the_other() {
    for dtype in crate::DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            let case = packed(dtype, 130, &[50, 60]);
            let calls = Calls::new(&device, &case, &case.tensors());
            let run = |wanted: [bool; 2]| {
                let mut out = wanted[0].then(|| device.room(dtype, case.shape.values()));
                let mut states = wanted[1].then(|| device.room(DType::F32, case.shape.states()));
                let [out_view, states_view] =
                    [&mut out, &mut states].map(|of| of.as_mut().map(|of| of.view_mut()));
                calls.forward(out_view, states_view).unwrap();
                [out, states].map(|of| of.map(|of| device.take(&of)))
            };
            let both = run([true, true]);
            assert!(run([true, false])[0] == both[0], "{}", device.name);
            assert!(run([false, true])[1] == both[1], "{}", device.name);
            assert_eq!(run([false, false]), [None, None]);
        }
    }
}
