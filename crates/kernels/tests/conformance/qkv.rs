//! Queries, keys and values taken apart and joined again: turned, for tokens in sequences and at positions of their own, or
//! as they are.

use crate::DTYPES;
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor, computing};
use crate::host::Host;
use crate::largest::with_largest;
use crate::oracle::{constant, gradients, values, variable};
use crate::rotary::{Angles, table};
use candle_core::Result;
use kernels::{JoinQkv, KernelError, Positions, SplitQkv, Turn};
use memory::DType;

/// How queries and keys are turned.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Turned {
    Not,
    InSequences,
    AtPositions,
    /// At positions, queries by a table of their own.
    Apart,
}

#[derive(Debug)]
struct Qkv {
    dtype: DType,
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Columns of a head that are turned, where any are.
    turned_columns: usize,
    v_head_dim: usize,
    turned: Turned,
}

/// Positions of the table: more than a sequence has.
const TABLE: usize = 80;

/// What a turn reads.
struct Given {
    table: Tensor,
    q_table: Tensor,
    positions: Tensor,
}

impl Qkv {
    fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    /// Of queries, keys and values.
    fn widths(&self) -> [usize; 3] {
        let [q, k] = [self.heads, self.kv_heads].map(|heads| heads * self.head_dim);
        [q, k, self.kv_heads * self.v_head_dim]
    }

    fn joined(&self) -> Host {
        let dims = [self.tokens(), self.widths().iter().sum()];
        Host::random(self.dtype, dims, 1.0, 1)
    }

    fn gradients(&self) -> [Host; 3] {
        let mut seed = 1;
        self.widths().map(|width| {
            seed += 1;
            Host::random(self.dtype, [self.tokens(), width], 1.0, seed)
        })
    }

    fn angles(&self) -> Angles {
        let places = (0..self.tokens()).map(|token| (token % self.seq) as f64);
        Angles {
            table: table(TABLE, self.turned_columns),
            positions: match self.turned {
                Turned::AtPositions | Turned::Apart => Host::random_ids(self.tokens(), TABLE, 3),
                _ => Host::new(DType::I32, [self.tokens()], places),
            },
        }
    }

    /// Those of queries: with a table of their own, the lengths of turned pairs grow with the position.
    fn q_angles(&self) -> Angles {
        let mut angles = self.angles();
        if self.turned == Turned::Apart {
            let half = self.turned_columns / 2;
            let values = angles.table.values().into_iter().enumerate();
            let longer = values.map(|(place, value)| {
                let position = place / half % TABLE;
                value * (1.0 + position as f64 / TABLE as f64)
            });
            angles.table = Host::new(DType::F32, angles.table.dims, longer);
        }
        angles
    }

    fn given(&self, device: &Device) -> Given {
        let Angles { table, positions } = self.angles();
        Given {
            table: device.put(&table),
            q_table: device.put(&self.q_angles().table),
            positions: device.put(&positions),
        }
    }

    fn turn<'a>(&self, given: &'a Given) -> Option<Turn<'a>> {
        let positions = match self.turned {
            Turned::Not => return None,
            Turned::InSequences => Positions::Sequences(self.seq),
            Turned::AtPositions | Turned::Apart => Positions::Given(given.positions.view()),
        };
        Some(Turn {
            head_dim: self.head_dim,
            table: given.table.view(),
            q_table: (self.turned == Turned::Apart).then(|| given.q_table.view()),
            positions,
        })
    }

    /// Those of queries, keys and values that are wanted.
    fn split(
        &self,
        device: &Device,
        wanted: [bool; 3],
    ) -> std::result::Result<[Option<Host>; 3], KernelError> {
        let (given, qkv) = (self.given(device), device.put(&self.joined()));
        let mut parts: Vec<Option<Tensor>> = wanted
            .into_iter()
            .zip(self.widths())
            .map(|(wanted, width)| wanted.then(|| device.room(self.dtype, [self.tokens(), width])))
            .collect();
        let [q, k, v] = &mut parts[..] else {
            unreachable!("three were made")
        };
        let [q, k, v] = [q, k, v].map(|part| part.as_mut().map(|part| part.view_mut()));
        device.run(SplitQkv {
            q,
            k,
            v,
            qkv: qkv.view(),
            kv_widths: [self.widths()[1], self.widths()[2]],
            turn: self.turn(&given),
        })?;
        let mut parts = parts.into_iter();
        Ok([(); 3].map(|()| parts.next().flatten().map(|part| device.take(&part))))
    }

    /// Queries, keys, values, and the joined gradient.
    fn oracle(&self) -> Result<[Vec<f64>; 4]> {
        let qkv = variable(&self.joined())?;
        let [q_width, k_width, v_width] = self.widths();
        let turned = |x: candle_core::Tensor, angles: Angles| match self.turned {
            Turned::Not => Ok(x),
            _ => angles.turned(&x, self.head_dim),
        };
        let q = turned(qkv.narrow(1, 0, q_width)?, self.q_angles())?;
        let k = turned(qkv.narrow(1, q_width, k_width)?, self.angles())?;
        let v = qkv.narrow(1, q_width + k_width, v_width)?;
        let apart = candle_core::Tensor::cat(&[&q, &k, &v], 1)?;
        let [dq, dk, dv] = self.gradients();
        let dapart = [constant(&dq)?, constant(&dk)?, constant(&dv)?];
        let dapart = candle_core::Tensor::cat(&dapart, 1)?;
        let joined = gradients(&apart, &dapart, &[&qkv])?.remove(0);
        Ok([values(&q)?, values(&k)?, values(&v)?, joined])
    }
}

impl Case for Qkv {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let parts = self.split(device, [true; 3])?;
        let given = self.given(device);
        let [q, k, v] = self.gradients().map(|gradient| device.put(&gradient));
        let mut joined = device.room(self.dtype, self.joined().dims);
        let joined = with_largest(device, |largest| {
            device.run(JoinQkv {
                qkv: joined.view_mut(),
                q: q.view(),
                k: k.view(),
                v: v.view(),
                turn: self.turn(&given),
                largest,
            })?;
            Ok(device.take(&joined))
        })?;
        let parts = parts.into_iter().flatten();
        Ok(parts.chain([joined]).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let [q, k, v, joined] = self.oracle().unwrap();
        let rule = || match self.turned {
            Turned::Not => Rule::Exact,
            _ => Rule::Standard,
        };
        vec![
            Expected::new("split_qkv: q", q, rule()),
            Expected::new("split_qkv: k", k, rule()),
            Expected::new("split_qkv: v", v, Rule::Exact),
            Expected::new("join_qkv", joined, rule()),
        ]
    }
}

fn all(dtype: DType) -> Vec<Qkv> {
    let sizes = [
        (1, 1, 1, 1, [2, 2], 2),
        (2, 37, 3, 1, [20, 20], 20),
        (1, 37, 6, 2, [48, 48], 48),
        (2, 65, 8, 8, [64, 64], 64),
        (3, 5, 14, 2, [64, 64], 64),
        (1, 3, 2, 1, [128, 128], 128),
        (2, 37, 6, 2, [20, 20], 7),
        (1, 37, 4, 2, [16, 16], 64),
        (2, 37, 3, 1, [23, 10], 7),
        (1, 37, 6, 2, [48, 36], 48),
        (1, 5, 4, 2, [128, 64], 128),
    ];
    let turns = [
        Turned::Not,
        Turned::InSequences,
        Turned::AtPositions,
        Turned::Apart,
    ];
    let sizes = sizes.into_iter();
    sizes
        .flat_map(|sizes| turns.map(|turned| (sizes, turned)))
        .map(
            |((batch, seq, heads, kv_heads, [head_dim, turned_columns], v_head_dim), turned)| Qkv {
                dtype,
                batch,
                seq,
                heads,
                kv_heads,
                head_dim,
                turned_columns,
                v_head_dim,
                turned,
            },
        )
        .collect()
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let cases = all(dtype).into_iter();
    cases.map(|case| Box::new(case) as Box<dyn Case>).collect()
}

/// A replay makes some of them again.
#[test]
fn leaving_parts_out_changes_no_bit_of_the_others() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            for case in all(dtype) {
                let whole = case.split(&device, [true; 3]).unwrap();
                for combination in 0..8 {
                    let wanted = [1, 2, 4].map(|bit| combination & bit != 0);
                    let some = case.split(&device, wanted).unwrap();
                    for (index, part) in some.iter().enumerate() {
                        let expected = whole[index].as_ref().filter(|_| wanted[index]);
                        assert!(
                            part.as_ref() == expected,
                            "{}: {wanted:?} of {case:?}",
                            device.name
                        );
                    }
                }
            }
        }
    }
}
