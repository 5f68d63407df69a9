//! What an operation takes at least: the operations of its products, and the bytes of what it reads and writes.

use crate::{Init, Master, Moment, Operation};
use memory::{In, Out};

/// The least that an operation takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations of matrix products, two for each multiplication; of attention, those below the diagonal.
    pub flops: u64,
    /// Bytes, each operand read or written once. Scratch is left out.
    pub bytes: u64,
}

impl Operation<'_> {
    /// What it takes at least.
    pub fn cost(&self) -> Cost {
        let flops = 2 * self.multiplications() as u64;
        let flops = match self.attention_seq() {
            Some(seq) => flops * (seq as u64 + 1) / (2 * seq as u64),
            None => flops,
        };
        let mut bytes = Bytes(0);
        bytes.add(self);
        Cost {
            flops,
            bytes: bytes.0,
        }
    }

    /// Multiplications of its matrix products, attention's without regard to causality.
    pub(crate) fn multiplications(&self) -> usize {
        let (products, shape) = match self {
            Operation::Matmul(product) => {
                return product.out.elements() * product.a.dims()[1];
            }
            Operation::Attention(pass) => (1 + usize::from(pass.out.is_some()), pass.shape),
            Operation::AttentionBackward(pass) => (4, pass.shape),
            Operation::FlashAttention(pass) => (1 + usize::from(pass.out.is_some()), pass.shape),
            // Those of `attention_backward`, and the scores once more.
            Operation::FlashAttentionBackward(pass) => (5, pass.shape),
            _ => return 0,
        };
        products * shape.batch * shape.heads * shape.seq * shape.seq * shape.head_dim
    }

    fn attention_seq(&self) -> Option<usize> {
        match self {
            Operation::Attention(pass) => Some(pass.shape.seq),
            Operation::AttentionBackward(pass) => Some(pass.shape.seq),
            Operation::FlashAttention(pass) => Some(pass.shape.seq),
            Operation::FlashAttentionBackward(pass) => Some(pass.shape.seq),
            _ => None,
        }
    }

    /// The sizes that tell it from others of its name: of a product m, k, n; else of its first operand that is there.
    pub fn sizes(&self) -> Vec<usize> {
        let dims: &[usize] = match self {
            Operation::Matmul(op) => {
                return vec![op.a.dims()[0], op.a.dims()[1], op.b.dims()[1]];
            }
            Operation::Fill(op) => op.out.dims(),
            Operation::Copy(op) => op.out.dims(),
            Operation::AddBias(op) => op.out.dims(),
            Operation::BiasBackward(op) => op.dy.dims(),
            Operation::Embedding(op) => op.out.dims(),
            Operation::EmbeddingBackward(op) => op.dout.dims(),
            Operation::RmsNorm(op) => op.x.dims(),
            Operation::RmsNormBackward(op) => op.x.dims(),
            Operation::Rotary(op) => op.x.dims(),
            Operation::Attention(op) => op.q.dims(),
            Operation::AttentionBackward(op) => op.q.dims(),
            Operation::FlashAttention(op) => op.q.dims(),
            Operation::FlashAttentionBackward(op) => op.q.dims(),
            Operation::Swiglu(op) => op.act.dims(),
            Operation::SwigluBackward(op) => op.gate.dims(),
            Operation::CrossEntropy(op) => op.logits.dims(),
            Operation::Sum(op) => op.x.dims(),
            Operation::NormAndClip(op) => op.x.dims(),
            Operation::AdamW(op) => op.parameters.dims(),
        };
        dims.to_vec()
    }
}

/// A sum of bytes.
struct Bytes(u64);

impl Bytes {
    fn reads(&mut self, operands: &[&In]) {
        let bytes = |x: &&In| (x.elements() * x.dtype().size_in_bytes()) as u64;
        self.0 += operands.iter().map(bytes).sum::<u64>();
    }

    fn writes(&mut self, operands: &[&Out]) {
        let bytes = |x: &&Out| (x.elements() * x.dtype().size_in_bytes()) as u64;
        self.0 += operands.iter().map(bytes).sum::<u64>();
    }

    fn changes(&mut self, operands: &[&Out]) {
        self.writes(operands);
        self.writes(operands);
    }

    fn rows_change(&mut self, table: &Out, rows: usize) {
        let [all, width] = [table.dims()[0], table.dims()[1]];
        self.0 += (2 * rows.min(all) * width * table.dtype().size_in_bytes()) as u64;
    }

    fn may_write(&mut self, operands: &[&Option<Out>]) {
        operands
            .iter()
            .for_each(|operand| self.writes(&operand.iter().collect::<Vec<_>>()));
    }

    /// A result, and what it is added to.
    fn sets(&mut self, out: &Out, init: &Init) {
        match init {
            Init::Overwrite => self.writes(&[out]),
            Init::Accumulate | Init::Add(_) => self.changes(&[out]),
        }
    }

    fn moment(&mut self, moment: &Moment) {
        match moment {
            Moment::Plain(values) => self.changes(&[values]),
            Moment::Quantised { codes, absmax } => self.changes(&[codes, absmax]),
        }
    }

    fn add(&mut self, operation: &Operation) {
        match operation {
            Operation::Fill(op) => self.writes(&[&op.out]),
            Operation::Copy(op) => {
                self.writes(&[&op.out]);
                self.reads(&[&op.x]);
            }
            Operation::Matmul(op) => {
                self.sets(&op.out, &op.init);
                self.reads(&[&op.a, &op.b]);
            }
            Operation::AddBias(op) => {
                self.changes(&[&op.out]);
                self.reads(&[&op.bias]);
            }
            Operation::BiasBackward(op) => {
                self.sets(&op.out, &op.init);
                self.reads(&[&op.dy]);
            }
            Operation::Embedding(op) => {
                // A row of the table is read for each that is written.
                self.changes(&[&op.out]);
                self.reads(&[&op.ids]);
            }
            Operation::EmbeddingBackward(op) => {
                match op.init {
                    Init::Overwrite => self.writes(&[&op.dtable]),
                    // Rows that no token names stay as they are, so only as many as there are tokens are touched.
                    _ => self.rows_change(&op.dtable, op.ids.elements()),
                }
                self.reads(&[&op.dout, &op.ids]);
            }
            Operation::RmsNorm(op) => {
                self.may_write(&[&op.y, &op.rstd]);
                self.reads(&[&op.x, &op.weight]);
            }
            Operation::RmsNormBackward(op) => {
                self.sets(&op.dx, &op.dx_init);
                self.sets(&op.dweight, &op.dweight_init);
                self.reads(&[&op.dy, &op.x, &op.weight, &op.rstd]);
            }
            Operation::Rotary(op) => {
                self.changes(&[&op.x]);
                self.reads(&[&op.table]);
            }
            Operation::Swiglu(op) => {
                self.writes(&[&op.act]);
                self.reads(&[&op.gate, &op.up]);
            }
            Operation::SwigluBackward(op) => {
                self.changes(&[&op.gate, &op.up]);
                self.reads(&[&op.dact]);
            }
            Operation::CrossEntropy(op) => {
                self.writes(&[&op.losses]);
                self.changes(&[&op.logits]);
                self.reads(&[&op.targets]);
            }
            Operation::Sum(op) => self.reads(&[&op.x]),
            Operation::NormAndClip(op) => self.reads(&[&op.x]),
            Operation::Attention(op) => {
                self.may_write(&[&op.out, &op.probs]);
                self.reads(&[&op.q, &op.k, &op.v]);
            }
            Operation::AttentionBackward(op) => {
                self.writes(&[&op.dq, &op.dk, &op.dv]);
                self.reads(&[&op.dout, &op.probs, &op.q, &op.k, &op.v]);
            }
            Operation::FlashAttention(op) => {
                self.may_write(&[&op.out, &op.lse]);
                self.reads(&[&op.q, &op.k, &op.v]);
            }
            Operation::FlashAttentionBackward(op) => {
                self.writes(&[&op.dq, &op.dk, &op.dv]);
                self.reads(&[&op.dout, &op.out, &op.lse, &op.q, &op.k, &op.v]);
            }
            Operation::AdamW(op) => {
                match &op.master {
                    Master::Parameters => self.changes(&[&op.parameters]),
                    Master::F32(master) => {
                        self.writes(&[&op.parameters]);
                        self.changes(&[master]);
                    }
                    Master::Remainder(remainder) => self.changes(&[&op.parameters, remainder]),
                }
                self.moment(&op.first_moment);
                self.moment(&op.second_moment);
                self.reads(&[&op.gradients]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::{Matmul, Swiglu};
    use memory::{Category, DType, Memory};

    #[test]
    fn operands_count_once_and_results_twice_where_they_are_added_to() {
        let memory = Memory::shapes();
        let lease = |dims: [usize; 2], dtype| {
            let lease = memory.lease(Category::Temporary, "x", dims, dtype);
            lease.unwrap()
        };
        let (a, b) = (lease([3, 5], DType::BF16), lease([5, 7], DType::BF16));
        let mut out = lease([3, 7], DType::F32);
        let mut product = |init| {
            let (out, a, b) = (out.view_mut(), a.view(), b.view());
            Operation::from(Matmul { out, a, b, init }).cost()
        };
        let bytes = |times: u64| 2 * (15 + 35) + times * 4 * 21;
        let cost = |times| Cost {
            flops: 2 * 3 * 5 * 7,
            bytes: bytes(times),
        };
        assert_eq!(product(Init::Overwrite), cost(1));
        assert_eq!(product(Init::Accumulate), cost(2));
        let (gate, mut act) = (lease([3, 7], DType::F32), lease([3, 7], DType::F32));
        let swiglu = Operation::from(Swiglu {
            act: act.view_mut(),
            gate: gate.view(),
            up: gate.view(),
        });
        assert_eq!(swiglu.sizes(), [3, 7]);
        assert_eq!(swiglu.cost().bytes, 3 * 4 * 21);
    }
}
