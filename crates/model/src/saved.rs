//! The table of saved activations of one micro-batch, made once and used for every one.

use crate::stage::Activation;
use memory::{Buffer, Category};
use std::rc::Rc;

/// Live activations by layer. An entry is frozen while it is here: it is read through `Rc`s and written by nobody.
pub struct Saved {
    layers: Vec<[Option<Rc<Buffer>>; Activation::ALL.len()]>,
}

impl Saved {
    /// An empty table for `layers` blocks and the head's input after them.
    pub fn new(layers: usize) -> Saved {
        Saved {
            layers: (0..=layers)
                .map(|_| [const { None }; Activation::ALL.len()])
                .collect(),
        }
    }

    /// The activation, if it is live.
    pub fn get(&self, layer: usize, activation: Activation) -> Option<&Rc<Buffer>> {
        self.layers[layer][activation as usize].as_ref()
    }

    /// Files an activation.
    pub fn put(&mut self, layer: usize, activation: Activation, buffer: Buffer) {
        let previous = self.layers[layer][activation as usize].replace(Rc::new(buffer));
        assert!(
            previous.is_none(),
            "{} of layer {layer} was made twice",
            activation.name()
        );
    }

    /// Drops an activation.
    ///
    /// # Panics
    /// If somebody still reads it: its memory would not come back when the plan says so.
    pub fn release(&mut self, layer: usize, activation: Activation) {
        if let Some(buffer) = self.layers[layer][activation as usize].take() {
            let readers = Rc::strong_count(&buffer) - 1;
            assert_eq!(
                readers,
                0,
                "{} of layer {layer} is released while it is read",
                activation.name()
            );
        }
    }

    /// Takes an activation out, to be overwritten; it is a temporary from then on.
    ///
    /// # Panics
    /// If it is not here, or somebody still reads it.
    pub fn take(&mut self, layer: usize, activation: Activation) -> Buffer {
        let buffer = self.layers[layer][activation as usize].take();
        let mut buffer = buffer.and_then(Rc::into_inner).unwrap_or_else(|| {
            panic!(
                "{} of layer {layer} is taken when nobody else reads it",
                activation.name()
            )
        });
        buffer.recategorize(Category::Temporary);
        buffer
    }

    /// Drops everything: a pass ended early.
    pub fn clear(&mut self) {
        self.layers
            .iter_mut()
            .flatten()
            .for_each(|entry| *entry = None);
    }

    /// Whether nothing is live.
    pub fn is_empty(&self) -> bool {
        self.layers.iter().flatten().all(Option::is_none)
    }
}
