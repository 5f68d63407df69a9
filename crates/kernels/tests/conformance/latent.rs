//! Latent attention: the rotary embedding of the last columns of heads, and keys and values from one latent a token.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use kernels::{ExpandKeys, ExpandKeysBackward, KernelError, Positions, RotaryTail};
use memory::DType;

/// Heads turned forth and back.
#[derive(Debug)]
struct Turned {
    dtype: DType,
    tokens: usize,
    heads: usize,
    head_dim: usize,
    half: usize,
    are_neighbours: bool,
    /// Positions are given, not those of sequences.
    is_given: bool,
    inverse: bool,
}

impl Turned {
    const POSITIONS: usize = 9;

    fn x(&self) -> Host {
        Host::random(
            self.dtype,
            [self.tokens, self.heads * self.head_dim],
            1.0,
            1,
        )
    }

    fn table(&self) -> Host {
        Host::random(DType::F32, [2, Turned::POSITIONS, self.half], 1.0, 2)
    }

    fn position(&self, token: usize) -> usize {
        match self.is_given {
            true => (5 * token + 2) % Turned::POSITIONS,
            false => token % self.seq(),
        }
    }

    fn seq(&self) -> usize {
        (1..=Turned::POSITIONS)
            .rev()
            .find(|seq| self.tokens.is_multiple_of(*seq))
            .unwrap()
    }
}

impl Case for Turned {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let (mut x, table) = (device.put(&self.x()), device.put(&self.table()));
        let given = (0..self.tokens).map(|token| self.position(token) as f64);
        let given = device.put(&Host::new(DType::I32, [self.tokens], given));
        device.kernels.run(RotaryTail {
            x: x.view_mut(),
            head_dim: self.head_dim,
            table: table.view(),
            positions: match self.is_given {
                true => Positions::Given(given.view()),
                false => Positions::Sequences(self.seq()),
            },
            are_neighbours: self.are_neighbours,
            inverse: self.inverse,
        })?;
        Ok(vec![device.take(&x)])
    }

    fn expected(&self) -> Vec<Expected> {
        let (mut x, table) = (self.x().values(), self.table().values());
        let sines = Turned::POSITIONS * self.half;
        let sign = if self.inverse { -1.0 } else { 1.0 };
        for (number, head) in x.chunks_mut(self.head_dim).enumerate() {
            let angles = self.position(number / self.heads) * self.half;
            let tail = &mut head[self.head_dim - 2 * self.half..];
            for at in 0..self.half {
                let [low, high] = match self.are_neighbours {
                    true => [2 * at, 2 * at + 1],
                    false => [at, at + self.half],
                };
                let (cosine, sine) = (table[angles + at], sign * table[sines + angles + at]);
                let (a, b) = (tail[low], tail[high]);
                tail[low] = a * cosine - b * sine;
                tail[high] = b * cosine + a * sine;
            }
        }
        vec![Expected::new("rotary_tail", x, Rule::Standard)]
    }
}

/// Keys and values made, and their gradients brought back.
#[derive(Debug)]
struct Expanded {
    dtype: DType,
    tokens: usize,
    heads: usize,
    own: usize,
    turned: usize,
    value: usize,
}

impl Expanded {
    fn random(&self, width: usize, seed: u64) -> Host {
        Host::random(self.dtype, [self.tokens, width], 1.0, seed)
    }

    fn widths(&self) -> [usize; 4] {
        let [k, v] = [self.own + self.turned, self.value];
        [
            self.heads * k,
            self.heads * v,
            self.heads * (self.own + v),
            self.turned,
        ]
    }

    /// What is made of, and the gradients of what is made.
    fn tensors(&self) -> [Host; 4] {
        let [k, v, kv, rotary] = self.widths();
        [(kv, 1), (rotary, 2), (k, 3), (v, 4)].map(|(width, seed)| self.random(width, seed))
    }
}

impl Case for Expanded {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [kv, k_rotary, dk, dv] = self.tensors().map(|host| device.put(&host));
        let rooms = self
            .widths()
            .map(|width| device.room(self.dtype, [self.tokens, width]));
        let [mut k, mut v, mut dkv, mut dk_rotary] = rooms;
        device.kernels.run(ExpandKeys {
            k: Some(k.view_mut()),
            v: None,
            kv: kv.view(),
            k_rotary: k_rotary.view(),
            heads: self.heads,
        })?;
        device.kernels.run(ExpandKeys {
            k: None,
            v: Some(v.view_mut()),
            kv: kv.view(),
            k_rotary: k_rotary.view(),
            heads: self.heads,
        })?;
        device.kernels.run(ExpandKeysBackward {
            dkv: dkv.view_mut(),
            dk_rotary: dk_rotary.view_mut(),
            dk: dk.view(),
            dv: dv.view(),
            heads: self.heads,
        })?;
        Ok([&k, &v, &dkv, &dk_rotary]
            .map(|tensor| device.take(tensor))
            .into())
    }

    fn expected(&self) -> Vec<Expected> {
        let [kv, k_rotary, dk, dv] = self.tensors().map(|host| host.values());
        let Expanded {
            heads,
            own,
            turned,
            value,
            ..
        } = *self;
        let of_heads = |values: &[f64], width: usize, columns: std::ops::Range<usize>| {
            let heads = values
                .chunks(width)
                .map(|head| head[columns.clone()].to_vec());
            heads.collect::<Vec<_>>()
        };
        let shared = |head: usize| &k_rotary[head / heads * turned..][..turned];
        let k = of_heads(&kv, own + value, 0..own).into_iter().enumerate();
        let k = k
            .flat_map(|(head, own)| [&own, shared(head)].concat())
            .collect();
        let v = of_heads(&kv, own + value, own..own + value).concat();
        let dk_own = of_heads(&dk, own + turned, 0..own).into_iter();
        let dkv = dk_own
            .zip(dv.chunks(value))
            .flat_map(|(own, value)| [&own, value].concat());
        let dkv = dkv.collect();
        let parts = of_heads(&dk, own + turned, own..own + turned);
        let sums = parts.chunks(heads).flat_map(|heads| {
            (0..turned).map(|column| heads.iter().map(|head| head[column]).sum::<f64>())
        });
        vec![
            Expected::new("k", k, Rule::Exact),
            Expected::new("v", v, Rule::Exact),
            Expected::new("dkv", dkv, Rule::Exact),
            Expected::new("dk_rotary", sums.collect(), Rule::Standard),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (tokens, heads, head_dim, half) in [
        (1, 1, 2, 1),
        (14, 3, 20, 4),
        (27, 16, 24, 8),
        (3, 1, 64, 32),
    ] {
        for flags in 0..8 {
            let [are_neighbours, is_given, inverse] = [1, 2, 4].map(|bit| flags & bit != 0);
            cases.push(Box::new(Turned {
                dtype,
                tokens,
                heads,
                head_dim,
                half,
                are_neighbours,
                is_given,
                inverse,
            }));
        }
    }
    for (tokens, heads, own, turned, value) in [
        (1, 1, 1, 2, 1),
        (7, 3, 12, 8, 13),
        (5, 16, 128, 64, 128),
        (33, 5, 4, 6, 20),
    ] {
        cases.push(Box::new(Expanded {
            dtype,
            tokens,
            heads,
            own,
            turned,
            value,
        }));
    }
    cases
}
