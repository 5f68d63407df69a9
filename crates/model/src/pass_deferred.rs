//! How passes defer gradients of matrices, and how these are added later.

use crate::deferred_gradients::{DeferredGradients, DeferredProduct};
use crate::linear::weight_gradient;
use crate::{LayerActivation, Model, ParameterId, Pass, Purpose, Result, Training};
use kernels::Kernels;
use memory::{Buffer, Layer, Memory, Phase};
use std::ops::Range;
use std::rc::Rc;
use units::Gradients;

impl Pass<'_> {
    /// Whether the gradients of matrices of the block whose stage runs are deferred.
    pub(crate) fn defers_gradients(&self) -> bool {
        self.defers_gradients_of(self.running.at.layer)
    }

    pub(crate) fn defers_gradients_of(&self, layer: usize) -> bool {
        match &self.work.purpose {
            Purpose::Training(training) => {
                let block = &self.model.architecture().blocks[layer];
                training.deferred.is_some() && block.can_defer_gradients()
            }
            Purpose::Inference(_) | Purpose::Reference => false,
        }
    }

    /// How many deferred gradients are computed from an activation.
    pub(crate) fn deferred_readers(&self, at: LayerActivation) -> usize {
        let Purpose::Training(Training {
            deferred: Some(deferred),
            ..
        }) = &self.work.purpose
        else {
            return 0;
        };
        let Some(held) = self.work.saved.get(at) else {
            return 0;
        };
        let products = deferred.products.iter();
        products
            .filter(|product| Rc::ptr_eq(&product.x, held))
            .count()
    }

    /// Defers the gradient of some weights, which lie together.
    pub(crate) fn defer_gradient(
        &mut self,
        weights: &[ParameterId],
        columns: Range<usize>,
        (dy, x): (Rc<Buffer>, Rc<Buffer>),
    ) {
        let layer = self.running.at.layer;
        let of_block = self.model.unit_of_part(Layer::Block(layer));
        assert_eq!(self.unit_of(weights), of_block, "only blocks defer");
        assert_eq!(self.part(), 0, "a stage of a pipeline has one part");
        let product = DeferredProduct {
            layer,
            weights: self.indices(weights),
            columns,
            dy,
            x,
        };
        let deferred = self.work.purpose.training().deferred.as_mut();
        let deferred = deferred.expect("a pass that defers gradients has a place for them");
        deferred.products.push(product);
    }
}

impl Model {
    /// Adds the gradients that one micro-batch's backward pass has deferred. They are complete if this is the step's last micro-batch.
    ///
    /// # Errors
    /// `ModelError` if a lease is refused or the device fails. Units of gradients may be open then ([`Gradients::abandon`]).
    pub fn add_deferred_gradients(
        &self,
        (memory, kernels): (&Memory, &Kernels),
        gradients: &mut Gradients,
        deferred: DeferredGradients,
        is_last_micro_batch: bool,
    ) -> Result {
        let mut products = deferred.products.into_iter().peekable();
        while let Some(layer) = products.peek().map(|product| product.layer) {
            let part = Layer::Block(layer);
            let _place = memory.enter(Phase::Backward, part);
            let unit = self.unit_of_part(part);
            let unit = unit.expect("a block with matrices has a unit");
            let open = gradients.open_deferred(kernels, unit)?;
            while let Some(product) = products.next_if(|product| product.layer == layer) {
                let dweight = gradients.accumulate_joined(&product.weights);
                let dweight = dweight.expect("these weights lie together");
                let dy = product.dy.view().columns(product.columns.clone());
                weight_gradient(kernels, dweight, dy, product.x.view())?;
            }
            gradients.close(kernels, open, (true, is_last_micro_batch))?;
        }
        Ok(gradients.end_pass(kernels, is_last_micro_batch)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelError;
    use crate::test_model::TestModel;
    use std::cell::Cell;

    /// The bits of all gradients after a backward pass that defers those of matrices, or computes them.
    fn gradients(recompute: &str, defers: bool) -> Vec<u32> {
        let mut fixture = TestModel::new(recompute);
        let live = fixture.memory.live_leases();
        let mut deferred = defers.then(DeferredGradients::default);
        let mut replayed = fixture.model.no_replays();
        let made = fixture.train_deferring(&|| false, deferred.as_mut(), |model, work| {
            model.forward_backward(work, &mut replayed)
        });
        made.unwrap();
        if let Some(deferred) = deferred {
            assert!(
                fixture.memory.live_leases() > live,
                "what is deferred is kept"
            );
            let products = deferred.products.iter();
            let weights: usize = products.map(|product| product.weights.len()).sum();
            assert_eq!(fixture.gradients.missing().len(), weights);
            let on = (&fixture.memory, &*fixture.kernels);
            let (model, gradients) = (&fixture.model, &mut fixture.gradients);
            model
                .add_deferred_gradients(on, gradients, deferred, true)
                .unwrap();
        }
        assert_eq!(fixture.memory.live_leases(), live);
        assert_eq!(fixture.gradients.missing(), [""; 0]);
        let entries = 0..fixture.gradients.layout().entries().len();
        let bits = entries.flat_map(|entry| {
            let values = fixture.gradients.view(entry).slice::<f32>().to_vec();
            values.into_iter().map(f32::to_bits)
        });
        bits.collect()
    }

    #[test]
    fn deferred_gradients_have_the_same_bits() {
        for recompute in ["none", "full"] {
            assert_eq!(gradients(recompute, true), gradients(recompute, false));
        }
    }

    #[test]
    fn a_pass_that_is_broken_off_keeps_nothing() {
        let mut fixture = TestModel::new("none");
        let live = fixture.memory.live_leases();
        let mut deferred = DeferredGradients::default();
        let mut replayed = fixture.model.no_replays();
        // Stops in the backward pass of the first block, after the last one has deferred its own.
        let asked = Cell::new(0);
        let is_stopped = || asked.replace(asked.get() + 1) == 5;
        let made = fixture.train_deferring(&is_stopped, Some(&mut deferred), |model, work| {
            model.forward_backward(work, &mut replayed)
        });
        assert!(matches!(made, Err(ModelError::Stopped)));
        assert!(!deferred.products.is_empty());
        drop(deferred);
        assert_eq!(fixture.memory.live_leases(), live);
    }
}
