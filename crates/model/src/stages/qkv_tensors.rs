//! Queries, keys and values on their way between stages.

use crate::{Activation, ModelError, Pass};
use memory::{Buffer, In, Out};
use std::rc::Rc;

/// The activations that have queries, keys and values, one of all or one of each, and the widths of the three.
pub(super) struct QkvTensors(pub(super) &'static [Activation], pub(super) [usize; 3]);

impl QkvTensors {
    pub(super) fn pull(&self, pass: &mut Pass) -> Result<Vec<Rc<Buffer>>, ModelError> {
        let pulled = self.0.iter().map(|of| pass.pull(*of));
        pulled.collect()
    }

    /// Queries, keys and values, of one buffer or three.
    pub(super) fn views<'x>(&self, buffers: &'x [Rc<Buffer>]) -> [In<'x>; 3] {
        match buffers {
            [packed] => packed.view().split_columns(self.1),
            [q, k, v] => [q.view(), k.view(), v.view()],
            _ => unreachable!("they are one activation or three"),
        }
    }

    /// The same, to be written.
    pub(super) fn views_mut<'x>(&self, buffers: &'x mut [Buffer]) -> [Out<'x>; 3] {
        match buffers {
            [packed] => packed.view_mut().split_columns(self.1),
            [q, k, v] => [q.view_mut(), k.view_mut(), v.view_mut()],
            _ => unreachable!("they are one activation or three"),
        }
    }

    /// Leases the gradients of so many tokens.
    pub(super) fn gradients(&self, pass: &Pass, tokens: usize) -> Result<Vec<Buffer>, ModelError> {
        let widths = match self.0 {
            [_] => vec![self.1.iter().sum()],
            _ => self.1.to_vec(),
        };
        let of = self.0.iter().zip(widths);
        of.map(|(of, width)| pass.temporary(of.gradient_name(), [tokens, width]))
            .collect()
    }

    pub(super) fn file_gradients(&self, pass: &mut Pass, gradients: Vec<Buffer>) {
        for (of, gradient) in self.0.iter().zip(gradients) {
            pass.file_gradient(*of, gradient);
        }
    }
}
