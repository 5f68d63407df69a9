//! What every operation tells about itself: its name, what it refuses, and its least cost.

use super::check::{Check, Checked};
use super::declaration::Declaration;
use super::operand::Operand;

/// The contract of an operation: what its declaration says, and what else it refuses.
pub(crate) trait Contract: Declaration {
    /// Refuses numbers that no tensors could fit.
    fn numbers(&self, _check: &Check) -> Checked {
        Ok(())
    }

    /// Refuses tensors and numbers that do not fit together, or the device. Each tensor is as declared.
    fn conditions(&self, _check: &Check) -> Checked {
        Ok(())
    }

    /// Refuses operands that do not fit together or the device.
    fn check(&self, check: &Check) -> Checked {
        self.numbers(check)?;
        let mut compute = None;
        self.rows(&mut |row| row.check(check, &mut compute))?;
        self.conditions(check)
    }

    /// The tensors that it reads and writes, without scratch and single numbers.
    fn operands(&self) -> Vec<Operand<'_>> {
        self.declared_operands()
    }

    /// The operands that its declaration counts.
    fn declared_operands(&self) -> Vec<Operand<'_>> {
        let mut operands = Vec::new();
        let visited = self.rows(&mut |row| {
            operands.extend(row.operand());
            Ok(())
        });
        visited.expect("operations that do not fit have no cost");
        operands
    }

    /// Whether it may run beside the computation, in [`crate::Queue::Update`]: it shares no scratch with other operations.
    fn runs_beside(&self) -> bool {
        false
    }

    /// Multiplications of its matrix products, attention's without regard to causality.
    fn multiplications(&self) -> usize {
        0
    }

    /// Floating-point operations of its matrix products.
    fn flops(&self) -> u64 {
        2 * self.multiplications() as u64
    }

    /// The sizes that distinguish it from other calls of its name.
    fn sizes(&self) -> Vec<usize> {
        self.subject().to_vec()
    }

    /// Its least cost.
    fn cost(&self) -> Cost {
        Cost {
            flops: self.flops(),
            bytes: self.operands().iter().map(Operand::bytes).sum(),
        }
    }
}

/// The least that an operation takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations of matrix products, two per multiplication; for attention, those below the diagonal.
    /// FP8 counts half, because tensor cores run it at twice the rate of bf16.
    pub flops: u64,
    /// Bytes, each operand read or written once. Scratch is left out.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GateFunction, GatedActivation, Init, Matmul, Operation, OutputForm};
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
            let bias = None;
            Operation::from(Matmul {
                out,
                a,
                b,
                bias,
                init,
            })
            .cost()
        };
        let bytes = |times: u64| 2 * (15 + 35) + times * 4 * 21;
        let cost = |times| Cost {
            flops: 2 * 3 * 5 * 7,
            bytes: bytes(times),
        };
        assert_eq!(product(Init::Overwrite), cost(1));
        assert_eq!(product(Init::Accumulate), cost(2));
        let (gate_up, mut act) = (lease([3, 14], DType::F32), lease([3, 7], DType::F32));
        let swiglu = Operation::from(GatedActivation {
            act: act.view_mut(),
            gate_up: gate_up.view(),
            function: GateFunction::Silu,
            form: OutputForm::Values,
        });
        assert_eq!(swiglu.sizes(), [3, 7]);
        assert_eq!(swiglu.cost().bytes, 3 * 4 * 21);
    }
}
