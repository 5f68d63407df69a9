//! Heads that are turned in part, and keys and values made of one latent, with their gradients.

use crate::DTYPES;
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, computing};
use crate::host::Host;
use crate::oracle::{constant, gradients, values, variable};
use crate::rotary::{Angles, table};
use candle_core::{Result, Tensor};
use kernels::{ExpandKeys, ExpandKeysBackward, KernelError, Positions};
use memory::DType;

#[derive(Debug)]
struct Tail {
    dtype: DType,
    batch: usize,
    seq: usize,
    heads: usize,
    unturned: usize,
    turned: usize,
    are_neighbours: bool,
    /// Whether the tokens' positions are given, in no order.
    given: bool,
}

/// Positions of the table: more than a sequence has.
const TABLE: usize = 80;

impl Tail {
    fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    fn x(&self) -> Host {
        let width = self.heads * (self.unturned + self.turned);
        Host::random(self.dtype, [self.tokens(), width], 1.0, 1)
    }

    fn angles(&self) -> Angles {
        let places = (0..self.tokens()).map(|token| (token % self.seq) as f64);
        Angles {
            table: table(TABLE, self.turned),
            positions: match self.given {
                true => Host::random_ids(self.tokens(), TABLE, 3),
                false => Host::new(DType::I32, [self.tokens()], places),
            },
        }
    }

    /// Heads with the tail turned. Neighbours are put into halves, turned, and put back.
    fn turned(&self, x: &Tensor) -> Result<Tensor> {
        let (tokens, heads, half) = (self.tokens(), self.heads, self.turned / 2);
        let by_heads = x.reshape((tokens, heads, self.unturned + self.turned))?;
        let tail = by_heads
            .narrow(2, self.unturned, self.turned)?
            .contiguous()?;
        let halves = |x: &Tensor, dims: [usize; 2]| {
            if !self.are_neighbours {
                return Ok(x.clone());
            }
            let x = x.reshape((tokens, heads, dims[0], dims[1]))?;
            x.transpose(2, 3)?.contiguous()
        };
        let apart = halves(&tail, [half, 2])?.reshape((tokens, heads * self.turned))?;
        let apart = self.angles().turned(&apart, self.turned)?;
        let tail = halves(&apart, [2, half])?.reshape((tokens, heads, self.turned))?;
        match self.unturned {
            0 => tail.reshape(x.shape()),
            unturned => {
                let kept = by_heads.narrow(2, 0, unturned)?;
                Tensor::cat(&[kept, tail], 2)?.reshape(x.shape())
            }
        }
    }

    /// `x` turned, and `x` as an output gradient turned back.
    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let x = variable(&self.x())?;
        let turned = self.turned(&x)?;
        let mut found = gradients(&turned, &constant(&self.x())?, &[&x])?;
        Ok([values(&turned)?, found.remove(0)])
    }
}

impl Case for Tail {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let Angles { table, positions } = self.angles();
        let [table, given] = [table, positions].map(|host| device.put(&host));
        let positions = match self.given {
            true => Positions::Given(given.view()),
            false => Positions::Sequences(self.seq),
        };
        let turned = |inverse| {
            let mut x = device.put(&self.x());
            device.run(kernels::RotaryTail {
                x: x.view_mut(),
                head_dim: self.unturned + self.turned,
                table: table.view(),
                positions,
                are_neighbours: self.are_neighbours,
                inverse,
            })?;
            Ok(device.take(&x))
        };
        [false, true].into_iter().map(turned).collect()
    }

    fn expected(&self) -> Vec<Expected> {
        let [forward, inverse] = self.oracle().unwrap();
        vec![
            Expected::new("rotary_tail: forward", forward, Rule::Standard),
            Expected::new("rotary_tail: inverse", inverse, Rule::Standard),
        ]
    }
}

#[derive(Debug)]
struct Expanded {
    dtype: DType,
    tokens: usize,
    heads: usize,
    unturned: usize,
    turned: usize,
    value: usize,
}

impl Expanded {
    /// Of `kv`, of the shared columns, of keys and of values.
    fn dims(&self) -> [[usize; 2]; 4] {
        let Expanded {
            heads,
            unturned,
            turned,
            value,
            ..
        } = *self;
        let widths = [
            heads * (unturned + value),
            turned,
            heads * (unturned + turned),
            heads * value,
        ];
        widths.map(|width| [self.tokens, width])
    }

    fn tensors(&self) -> [Host; 4] {
        let mut seed = 0;
        self.dims().map(|dims| {
            seed += 1;
            Host::random(self.dtype, dims, 1.0, seed)
        })
    }

    /// Those of keys and values that are wanted.
    fn expand(
        &self,
        device: &Device,
        wanted: [bool; 2],
    ) -> std::result::Result<[Option<Host>; 2], KernelError> {
        let [kv, k_rotary, ..] = self.tensors().map(|host| device.put(&host));
        let [_, _, k_dims, v_dims] = self.dims();
        let mut k = wanted[0].then(|| device.room(self.dtype, k_dims));
        let mut v = wanted[1].then(|| device.room(self.dtype, v_dims));
        device.run(ExpandKeys {
            k: k.as_mut().map(|k| k.view_mut()),
            v: v.as_mut().map(|v| v.view_mut()),
            kv: kv.view(),
            k_rotary: k_rotary.view(),
            heads: self.heads,
        })?;
        Ok([k, v].map(|part| part.map(|part| device.take(&part))))
    }

    /// Keys, values, and the gradients of what they are made of.
    fn oracle(&self) -> Result<[Vec<f64>; 4]> {
        let Expanded {
            tokens,
            heads,
            unturned,
            turned,
            value,
            ..
        } = *self;
        let [kv, k_rotary, dk, dv] = self.tensors();
        let (kv, k_rotary) = (variable(&kv)?, variable(&k_rotary)?);
        let by_heads = kv.reshape((tokens, heads, unturned + value))?;
        let shared = k_rotary.reshape((tokens, 1, turned))?;
        let shared = shared.broadcast_as((tokens, heads, turned))?;
        let k = Tensor::cat(&[by_heads.narrow(2, 0, unturned)?, shared], 2)?;
        let v = by_heads.narrow(2, unturned, value)?.contiguous()?;
        let k = k.reshape((tokens, heads * (unturned + turned)))?;
        let v = v.reshape((tokens, heads * value))?;
        let out = Tensor::cat(&[&k, &v], 1)?;
        let dout = Tensor::cat(&[constant(&dk)?, constant(&dv)?], 1)?;
        let mut found = gradients(&out, &dout, &[&kv, &k_rotary])?;
        let dk_rotary = found.remove(1);
        Ok([values(&k)?, values(&v)?, found.remove(0), dk_rotary])
    }
}

impl Case for Expanded {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let parts = self.expand(device, [true; 2])?;
        let [kv, k_rotary, dk, dv] = self.tensors();
        let mut dkv = device.room(self.dtype, kv.dims);
        let mut dk_rotary = device.room(self.dtype, k_rotary.dims);
        let [dk, dv] = [dk, dv].map(|host| device.put(&host));
        device.run(ExpandKeysBackward {
            dkv: dkv.view_mut(),
            dk_rotary: dk_rotary.view_mut(),
            dk: dk.view(),
            dv: dv.view(),
            heads: self.heads,
        })?;
        let gradients = [&dkv, &dk_rotary].map(|tensor| device.take(tensor));
        Ok(parts.into_iter().flatten().chain(gradients).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let [k, v, dkv, dk_rotary] = self.oracle().unwrap();
        vec![
            Expected::new("expand_keys: k", k, Rule::Exact),
            Expected::new("expand_keys: v", v, Rule::Exact),
            Expected::new("expand_keys_backward: dkv", dkv, Rule::Exact),
            Expected::new("expand_keys_backward: dk_rotary", dk_rotary, Rule::Standard),
        ]
    }
}

fn tails(dtype: DType) -> Vec<Tail> {
    let sizes = [
        [1, 1, 1, 0, 2],
        [2, 37, 1, 0, 64],
        [2, 37, 3, 20, 10],
        [1, 37, 5, 24, 16],
        [2, 20, 4, 128, 64],
        [3, 5, 16, 16, 32],
    ];
    let ways =
        [false, true].map(|are_neighbours| [false, true].map(|given| (are_neighbours, given)));
    let ways = ways.as_flattened();
    let tail = |[batch, seq, heads, unturned, turned]: [usize; 5], are_neighbours, given| Tail {
        dtype,
        batch,
        seq,
        heads,
        unturned,
        turned,
        are_neighbours,
        given,
    };
    sizes
        .into_iter()
        .flat_map(|sizes| ways.iter().map(move |way| tail(sizes, way.0, way.1)))
        .collect()
}

fn expanded(dtype: DType) -> Vec<Expanded> {
    let sizes = [
        [1, 1, 1, 1, 1],
        [37, 3, 20, 10, 7],
        [65, 4, 128, 64, 128],
        [9, 16, 32, 16, 24],
        [5, 2, 9, 64, 40],
    ];
    let case = |[tokens, heads, unturned, turned, value]: [usize; 5]| Expanded {
        dtype,
        tokens,
        heads,
        unturned,
        turned,
        value,
    };
    sizes.map(case).into()
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for case in tails(dtype) {
        cases.push(Box::new(case));
    }
    for case in expanded(dtype) {
        cases.push(Box::new(case));
    }
    cases
}

/// A replay makes some of them again.
#[test]
fn keys_or_values_alone_have_the_same_bits() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            for case in expanded(dtype) {
                let [k, v] = case.expand(&device, [true; 2]).unwrap();
                let [k_alone, none] = case.expand(&device, [true, false]).unwrap();
                assert!(k_alone == k && none.is_none(), "{}: {case:?}", device.name);
                let [none, v_alone] = case.expand(&device, [false, true]).unwrap();
                assert!(v_alone == v && none.is_none(), "{}: {case:?}", device.name);
            }
        }
    }
}
