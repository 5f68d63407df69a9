//! Groups of experts, whose matrices come to the device, and whose gradients leave it, a group at a time.

use crate::parameters::ParameterId;
use crate::{Pass, Result};
use kernels::Init;
use memory::{In, Out};
use std::ops::Range;
use units::OpenUnit;

/// Neighbouring experts of a layer: all, or those of one unit.
pub(crate) struct ExpertGroup {
    /// None: their matrices are part of their block's unit.
    pub(crate) unit: Option<usize>,
    pub(crate) experts: Range<usize>,
}

impl Pass<'_> {
    /// The groups of a parameter of so many experts, in order.
    pub(crate) fn groups_of(&self, of: ParameterId, experts: usize) -> Vec<ExpertGroup> {
        let units = self.model.layout().units_of(self.model.index(of));
        if units.len() <= 1 {
            return vec![ExpertGroup {
                unit: None,
                experts: 0..experts,
            }];
        }
        let (first, each) = (units.start, experts / units.len());
        let group = |unit: usize| ExpertGroup {
            unit: Some(unit),
            experts: (unit - first) * each..(unit - first + 1) * each,
        };
        units.map(group).collect()
    }

    /// The matrices of a group, `[experts, outputs, inputs]`, whose unit is in use.
    pub(crate) fn group(&self, of: ParameterId, unit: usize) -> In<'_> {
        self.work.weights.group(self.model.index(of), unit)
    }

    /// Where to write the next contribution to the gradient of a trained parameter's group, and what to add it to.
    pub(crate) fn accumulate_group(
        &mut self,
        of: ParameterId,
        unit: Option<usize>,
    ) -> (Out<'_>, Init<'static>) {
        match unit {
            None => self.accumulate(of).expect("it is trained"),
            Some(unit) => {
                let parameter = self.model.index(of);
                let gradients = &mut *self.work.purpose.training().gradients;
                gradients.accumulate_group(parameter, unit)
            }
        }
    }

    /// Closes the gradients of a group, to which the micro-batch adds nothing more.
    pub(crate) fn close_group(&mut self, open: Option<OpenUnit>) -> Result {
        let kernels = self.work.kernels;
        let training = self.work.purpose.training();
        let of = (true, training.is_last_micro_batch);
        match open {
            Some(open) => Ok(training.gradients.close(kernels, open, of)?),
            None => Ok(()),
        }
    }
}
