//! Attention over keys and values in blocks, against a plain one in f64; and what its bits do not depend on.

use crate::DTYPES;
use crate::case::{Case, run};
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor, computing};
use crate::host::Host;
use crate::sinks::{self, Sinks};
use kernels::{AttentionShape, CACHE_BLOCK, KernelError, Positive, StoreInCache};
use memory::DType;

#[derive(Debug)]
struct CachedAttention {
    dtype: DType,
    /// Tokens of each sequence, the new ones included.
    lengths: Vec<usize>,
    /// The shape of attention for the new tokens: its sequence length counts those alone.
    shape: AttentionShape,
    /// Values are the first columns of keys, and the last columns are stored as if they were values.
    is_latent: bool,
    /// Scores are as large as this, about.
    range: f64,
    sinks: Option<Sinks>,
}

impl CachedAttention {
    fn longest(&self) -> usize {
        *self.lengths.iter().max().unwrap()
    }

    /// Blocks of each sequence in the table: one more than it needs.
    fn blocks(&self) -> usize {
        self.longest().div_ceil(CACHE_BLOCK) + 1
    }

    /// Blocks of one sequence lie apart from each other, and come in no order.
    fn block(&self, sequence: usize, index: usize) -> usize {
        let last = self.lengths.len() * self.blocks() - 1;
        last - (index * self.lengths.len() + sequence)
    }

    fn table(&self) -> Host {
        let indices = |sequence| (0..self.blocks()).map(move |index| (sequence, index));
        let all = (0..self.lengths.len()).flat_map(indices);
        let blocks = all.map(|(sequence, index)| self.block(sequence, index) as f64);
        Host::new(DType::I32, [self.lengths.len(), self.blocks()], blocks)
    }

    fn put_lengths(&self, device: &Device, lengths: impl Iterator<Item = usize>) -> Tensor {
        let lengths = lengths.map(|length| length as f64);
        device.put(&Host::new(DType::I32, [self.lengths.len()], lengths))
    }

    /// A row for every token of every sequence, the same for a position whatever the batch: the last token is the last
    /// row, and shorter sequences begin later.
    fn rows(&self, width: usize, seed: u64) -> Host {
        let mut values = Vec::new();
        for length in &self.lengths {
            let before = (self.longest() - length) * width;
            let own = Host::random(self.dtype, [*length, width], self.range, seed).values();
            values.extend(std::iter::repeat_n(0.0, before).chain(own));
        }
        let rows = self.lengths.len() * self.longest();
        Host::new(self.dtype, [rows, width], values)
    }

    /// The rows of positions `from..to` from the end of the longest sequence, of every sequence.
    fn part(&self, rows: &Host, from: usize, to: usize) -> Host {
        let (width, longest) = (rows.dims[1], self.longest());
        let values = rows.values();
        let sequences = values.chunks(longest * width);
        let part = sequences.flat_map(|rows| rows[from * width..to * width].to_vec());
        Host::new(self.dtype, [self.lengths.len() * (to - from), width], part)
    }

    fn qkv(&self) -> [Host; 3] {
        let [q, k, v] = [self.shape.q(), self.shape.k(), self.shape.v()].map(|[_, width]| width);
        let (q, k) = (self.rows(q, 1), self.rows(k, 2));
        let v = match self.is_latent {
            true => columns(&k, 0..v),
            false => self.rows(v, 3),
        };
        [q, k, v]
    }

    /// The two tensors that a cache stores: keys and values; or of latents, the columns of keys that are also values, and
    /// the other columns of keys.
    fn stored(&self) -> [Host; 2] {
        let [_, k, v] = self.qkv();
        match self.is_latent {
            true => {
                let rest = columns(&k, v.dims[1]..k.dims[1]);
                [v, rest]
            }
            false => [k, v],
        }
    }

    /// Stores tokens a part at a time: in each, so many of every sequence. The last part attends.
    fn read(&self, device: &Device, parts: &[usize]) -> Result<Vec<Host>, KernelError> {
        let (sequences, longest) = (self.lengths.len(), self.longest());
        assert_eq!(parts.iter().sum::<usize>(), longest);
        let widths = [self.shape.k(), self.shape.v()];
        let mut caches = widths.map(|[_, width]| {
            let cache = [sequences * self.blocks(), CACHE_BLOCK, width];
            device.put(&Host::new(
                self.dtype,
                cache,
                vec![0.5; cache.iter().product()],
            ))
        });
        let table = device.put(&self.table());
        let ([q, ..], [k, v]) = (self.qkv(), self.stored());
        let (mut read, mut lengths) = (0, device.room(DType::I32, [sequences]));
        for new in parts {
            let left = longest - read - new;
            let counts = self
                .lengths
                .iter()
                .map(|length| length.saturating_sub(left));
            lengths = self.put_lengths(device, counts);
            let [k, v] = [&k, &v].map(|rows| device.put(&self.part(rows, read, read + new)));
            let [k_cache, v_cache] = &mut caches;
            device.run(StoreInCache {
                k_cache: k_cache.view_mut(),
                v_cache: (!self.is_latent).then(|| v_cache.view_mut()),
                k: k.view(),
                v: v.view(),
                table: table.view(),
                lengths: lengths.view(),
            })?;
            read += new;
        }
        let seq = *parts.last().unwrap();
        let q = device.put(&self.part(&q, longest - seq, longest));
        let shape = AttentionShape { seq, ..self.shape };
        let mut out = device.room(self.dtype, shape.out());
        let sinks = self.sinks.as_ref();
        let sinks = sinks.map(|sinks| sinks.put(self.dtype, shape.heads, device));
        device.run(kernels::CachedAttention {
            out: out.view_mut(),
            q: q.view(),
            k_cache: caches[0].view(),
            v_cache: (!self.is_latent).then(|| caches[1].view()),
            table: table.view(),
            lengths: lengths.view(),
            sinks: sinks::view(&sinks),
            shape,
        })?;
        let read = if self.is_latent { 1 } else { 2 };
        let tensors = [&out].into_iter().chain(&caches[..read]);
        Ok(tensors.map(|tensor| device.take(tensor)).collect())
    }

    /// What a cache holds in the end: what it held where there is no token.
    fn cached(&self, rows: &Host) -> Vec<f64> {
        let width = rows.dims[1];
        let mut cache = vec![0.5; self.lengths.len() * self.blocks() * CACHE_BLOCK * width];
        let values = rows.values();
        for (sequence, length) in self.lengths.iter().enumerate() {
            for position in 0..*length {
                let row = (sequence + 1) * self.longest() - length + position;
                let block = self.block(sequence, position / CACHE_BLOCK);
                let slot = block * CACHE_BLOCK + position % CACHE_BLOCK;
                let value = &values[row * width..][..width];
                cache[slot * width..][..width].copy_from_slice(value);
            }
        }
        cache
    }

    /// One head of one query over rows of keys and values.
    fn attend(&self, q: &[f64], [k, v]: [&[f64]; 2], head: usize) -> Vec<f64> {
        let AttentionShape {
            kv_heads,
            v_head_dim,
            ..
        } = self.shape;
        let (own, dim) = (head / self.shape.group(), q.len());
        let usual = 1.0 / (dim as f64).sqrt();
        let scale: f64 = self.shape.scale.map_or(usual, |scale| scale.get().into());
        let score = |k: &[f64]| -> f64 {
            let products = q.iter().zip(&k[own * dim..][..dim]).map(|(q, k)| q * k);
            let score = products.sum::<f64>() * scale;
            let cap = self.shape.cap.map(|cap| f64::from(cap.get()));
            cap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f64> = k.chunks(kv_heads * dim).map(score).collect();
        let sinks = self.sinks.as_ref();
        let sinks = sinks.map(|sinks| sinks.host(self.dtype, self.shape.heads).values());
        let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[head]);
        let largest = scores.iter().copied().fold(sink, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum::<f64>() + (sink - largest).exp();
        let column = |column: usize| {
            let values = v.chunks(kv_heads * v_head_dim).zip(&weights);
            values
                .map(|(v, weight)| weight * v[own * v_head_dim + column])
                .sum::<f64>()
                / total
        };
        (0..v_head_dim).map(column).collect()
    }

    /// Zeros before a sequence's first token.
    fn output(&self) -> Vec<f64> {
        let [q, k, v] = self.qkv().map(|rows| rows.values());
        let (shape, dim) = (self.shape, self.shape.qk_head_dim);
        let [[_, q_width], [_, k_width], [_, v_width]] = [shape.q(), shape.k(), shape.v()];
        let longest = self.longest();
        let mut out = Vec::new();
        for (sequence, length) in self.lengths.iter().enumerate() {
            let first = (sequence + 1) * longest - length;
            for row in (sequence + 1) * longest - shape.seq..(sequence + 1) * longest {
                if row < first {
                    out.extend(vec![0.0; shape.heads * shape.v_head_dim]);
                    continue;
                }
                let first_seen = shape
                    .window
                    .map_or(0, |window| (row + 1).saturating_sub(window));
                let [k, v] = [(&k, k_width), (&v, v_width)].map(|(x, width)| {
                    let seen = first.max(first_seen) * width..(row + 1) * width;
                    &x[seen]
                });
                for head in 0..shape.heads {
                    let q = &q[row * q_width + head * dim..][..dim];
                    out.extend(self.attend(q, [k, v], head));
                }
            }
        }
        out
    }
}

/// Some columns of rows.
pub fn columns(rows: &Host, columns: std::ops::Range<usize>) -> Host {
    let values = rows.values();
    let kept = values.chunks(rows.dims[1]);
    let kept = kept.flat_map(|row| row[columns.clone()].to_vec());
    Host::new(rows.dtype, [rows.dims[0], columns.len()], kept)
}

impl Case for CachedAttention {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let before = self.longest() - self.shape.seq;
        let parts = [before, self.shape.seq];
        self.read(device, &parts[usize::from(before == 0)..])
    }

    fn expected(&self) -> Vec<Expected> {
        let [_, k, v] = self.qkv();
        let mut expected = vec![
            Expected::new("cached_attention", self.output(), Rule::Standard),
            Expected::new("store_in_cache: k", self.cached(&k), Rule::Exact),
        ];
        if !self.is_latent {
            let values = self.cached(&v);
            expected.push(Expected::new("store_in_cache: v", values, Rule::Exact));
        }
        expected
    }
}

/// Lengths, new tokens, heads, kv_heads, head_dim: one token; below, at and above a block; many blocks for each warp;
/// sequences of many lengths, some shorter than what is new; heads of one lane and of all, and of no whole packs.
const SHAPES: [(&[usize], usize, [usize; 3]); 11] = [
    (&[1], 1, [1, 1, 20]),
    (&[15, 16, 17], 1, [4, 2, 16]),
    (&[16], 16, [2, 2, 4]),
    (&[37, 5, 150], 1, [8, 2, 64]),
    (&[37, 5, 50], 37, [2, 1, 33]),
    (&[40, 1, 3], 7, [4, 1, 20]),
    (&[300], 2, [2, 1, 128]),
    (&[70, 65], 3, [2, 1, 256]),
    (&[33], 1, [3, 3, 8]),
    (&[20, 18], 20, [4, 2, 12]),
    (&[600], 1, [1, 1, 48]),
];

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let case = |(lengths, new, [heads, kv_heads, head_dim]): (&[usize], usize, [usize; 3])| {
        [(0.5, None), (3.0, None), (3.0, Some(1)), (1.0, Some(21))].map(|(range, window)| {
            Box::new(CachedAttention {
                dtype,
                lengths: lengths.to_vec(),
                shape: AttentionShape {
                    window,
                    ..AttentionShape::new([lengths.len(), new], [heads, kv_heads], head_dim)
                },
                is_latent: false,
                range,
                sinks: None,
            }) as Box<dyn Case>
        })
    };
    // Values narrower and wider than keys; another scale.
    let of_widths = |(head_dim, v_head_dim, scale): (usize, usize, Option<f32>)| {
        Box::new(CachedAttention {
            dtype,
            lengths: vec![37, 5, 20],
            shape: AttentionShape {
                v_head_dim,
                scale: scale.map(Positive::new),
                ..AttentionShape::new([3, 7], [4, 2], head_dim)
            },
            is_latent: false,
            range: 1.0,
            sinks: None,
        }) as Box<dyn Case>
    };
    let widths = [
        (20, 12, None),
        (24, 200, None),
        (48, 33, Some(0.3)),
        (64, 64, Some(0.4)),
        (300, 270, None),
        (301, 270, None),
    ];
    let usual = SHAPES.into_iter().flat_map(case);
    // One head of keys whose first columns are values: packs that both share, some of a lane, and several of a lane.
    let of_latents = |([kv, rotary], window): ([usize; 2], Option<usize>)| {
        Box::new(CachedAttention {
            dtype,
            lengths: vec![37, 5, 20],
            shape: AttentionShape {
                v_head_dim: kv,
                window,
                scale: Some(Positive::new(0.2)),
                ..AttentionShape::new([3, 7], [4, 1], kv + rotary)
            },
            is_latent: true,
            range: 1.0,
            sinks: None,
        }) as Box<dyn Case>
    };
    let latents = [[28, 8], [33, 3], [250, 6], [256, 8], [512, 64], [576, 64]];
    let latents = latents.map(|widths| (widths, None)).into_iter();
    let latents = latents.chain([([512, 64], Some(21))]).map(of_latents);
    let usual = usual.chain(widths.map(of_widths));
    let others = with_sinks(dtype).into_iter().chain(with_caps(dtype));
    usual.chain(latents).chain(others).collect()
}

/// Caps that scores are far below, reach, and are far beyond, with a window, and wide heads with a sink.
fn with_caps(dtype: DType) -> Vec<Box<dyn Case>> {
    let of = |cap, range, window, head_dim, sinks| {
        Box::new(CachedAttention {
            dtype,
            lengths: vec![37, 5, 20],
            shape: AttentionShape {
                window,
                cap: Some(Positive::new(cap)),
                ..AttentionShape::new([3, 7], [4, 2], head_dim)
            },
            is_latent: false,
            range,
            sinks,
        }) as Box<dyn Case>
    };
    vec![
        of(30.0, 1.0, None, 20, None),
        of(1.0, 2.0, Some(9), 20, None),
        of(0.5, 4.0, None, 300, Some(Sinks::EVERY[0])),
    ]
}

/// Sinks of every kind but so far above scores that the output vanishes; a query that sees itself alone, and parts of wide heads.
fn with_sinks(dtype: DType) -> Vec<Box<dyn Case>> {
    let of = |sinks, window, head_dim| {
        Box::new(CachedAttention {
            dtype,
            lengths: vec![37, 5, 20],
            shape: AttentionShape {
                window,
                ..AttentionShape::new([3, 7], [4, 2], head_dim)
            },
            is_latent: false,
            range: 1.0,
            sinks: Some(sinks),
        }) as Box<dyn Case>
    };
    let every = Sinks::EVERY.into_iter();
    let mut cases: Vec<_> = every
        .filter(|sinks| sinks.around < 80.0)
        .map(|sinks| of(sinks, None, 20))
        .collect();
    let [among, ..] = Sinks::EVERY;
    cases.extend([of(among, Some(1), 33), of(among, Some(9), 300)]);
    cases
}

/// A token has the same bits alone and in a batch, and whether what is before it was read with it or before.
#[test]
fn a_token_does_not_see_the_batch() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            let within = |lengths: &[usize], window| CachedAttention {
                dtype,
                lengths: lengths.to_vec(),
                shape: AttentionShape {
                    window,
                    ..AttentionShape::new([lengths.len(), 1], [4, 2], 20)
                },
                is_latent: false,
                range: 2.0,
                sinks: None,
            };
            let case = |lengths: &[usize]| within(lengths, None);
            let row = 4 * 20 * dtype.size_in_bytes();
            let last = |case: &CachedAttention, parts: &[usize], sequence: usize| {
                let out = case.read(&device, parts).unwrap().swap_remove(0);
                let each = out.bytes.len() / case.lengths.len();
                out.bytes[(sequence + 1) * each - row..(sequence + 1) * each].to_vec()
            };
            let alone = last(&case(&[53]), &[52, 1], 0);
            assert!(alone != last(&case(&[52]), &[51, 1], 0), "lengths differ");
            let narrow = |window, parts: &[usize]| last(&within(&[53], Some(window)), parts, 0);
            assert!(narrow(52, &[52, 1]) != alone, "a key is hidden");
            assert!(
                narrow(20, &[52, 1]) == narrow(20, &[17, 30, 6]),
                "{}",
                device.name
            );
            for (name, same) in [
                ("with a window of all", narrow(53, &[52, 1])),
                ("at once", last(&case(&[53]), &[53], 0)),
                ("in parts", last(&case(&[53]), &[17, 30, 6], 0)),
                ("one by one", last(&case(&[53]), &[1; 53], 0)),
                ("in a batch", last(&case(&[90, 53, 7]), &[89, 1], 1)),
                ("in a batch at once", last(&case(&[90, 53, 7]), &[90], 1)),
            ] {
                assert!(alone == same, "{}: {name}", device.name);
            }
        }
    }
}

#[test]
fn heads_wider_than_three_packs_of_a_warp() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            let case = CachedAttention {
                dtype,
                lengths: vec![19, 40],
                shape: AttentionShape::new([2, 1], [2, 1], 800),
                is_latent: false,
                range: 1.0,
                sinks: None,
            };
            match device.kernels.target() {
                kernels::Target::Cpu => {
                    let out = &run(&case, &device)[0];
                    let expected = case.expected().swap_remove(0);
                    expected.judge(out, kernels::Target::Cpu).unwrap();
                }
                kernels::Target::Cuda => {
                    let error = case.run(&device).unwrap_err();
                    assert_eq!(error.operation, "cached_attention");
                    assert!(error.message.contains("wider than 768"), "{error}");
                }
            }
        }
    }
}
