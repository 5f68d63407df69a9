//! Queries, keys and values on their way between stages.

use crate::{Activation, Pass, Result};
use memory::{Buffer, In, Out};
use std::rc::Rc;

/// The activations of queries, keys and values, and their widths.
pub(super) struct QkvTensors(pub(super) &'static [Activation; 3], pub(super) [usize; 3]);

impl QkvTensors {
    pub(super) fn pull(&self, pass: &mut Pass) -> Result<[Rc<Buffer>; 3]> {
        let [q, k, v] = self.0;
        Ok([pass.pull(*q)?, pass.pull(*k)?, pass.pull(*v)?])
    }

    /// Leases the gradients of so many tokens.
    pub(super) fn gradients(&self, pass: &Pass, tokens: usize) -> Result<[Buffer; 3]> {
        let lease = |which: usize| {
            let name = self.0[which].gradient_name();
            pass.temporary(name, [tokens, self.1[which]])
        };
        Ok([lease(0)?, lease(1)?, lease(2)?])
    }

    pub(super) fn file_gradients(&self, pass: &mut Pass, gradients: [Buffer; 3]) {
        for (of, gradient) in self.0.iter().zip(gradients) {
            pass.file_gradient(*of, gradient);
        }
    }
}

/// Queries, keys and values to read.
pub(super) fn views(buffers: &[Rc<Buffer>; 3]) -> [In<'_>; 3] {
    buffers.each_ref().map(|buffer| buffer.view())
}

/// The same, to be written.
pub(super) fn views_mut(buffers: &mut [Buffer; 3]) -> [Out<'_>; 3] {
    buffers.each_mut().map(Buffer::view_mut)
}
