//! The table of saved activations of one micro-batch, made once and used for every one.

use crate::model::Model;
use crate::offload::{Arriving, HostPlaces, Leaving};
use crate::policy::Policy;
use crate::stage::Activation;
use memory::{Buffer, Category, Memory, OutOfMemory};
use std::rc::Rc;

/// Activations by layer. A live one is frozen while it is here: it is read through `Rc`s and written by nobody.
pub struct Saved {
    layers: Vec<[Entry; Activation::ALL.len()]>,
    pub(crate) host: HostPlaces,
}

/// Where an activation is.
#[derive(Default)]
pub(crate) enum Entry {
    /// Not made yet, dropped, or released.
    #[default]
    Absent,
    /// In device memory.
    Live(Rc<Buffer>),
    /// In device memory, while it is copied to the host.
    Leaving(Leaving),
    /// On the host.
    Away,
    /// Device memory into which it is copied from the host.
    Arriving(Arriving),
}

impl Saved {
    /// An empty table for the blocks of a model and the head's input after them, with pinned host memory for what the
    /// policy offloads of a micro-batch of `rows` sequences of `seq` tokens.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host's memory is refused.
    pub fn lease(
        memory: &Memory,
        model: &Model,
        policy: &Policy,
        (rows, seq): (usize, usize),
    ) -> Result<Saved, OutOfMemory> {
        let no_entries = || [const { Entry::Absent }; Activation::ALL.len()];
        Ok(Saved {
            layers: (0..=policy.layers()).map(|_| no_entries()).collect(),
            host: HostPlaces::lease(memory, model, policy, (rows, seq))?,
        })
    }

    pub(crate) fn entry(&mut self, layer: usize, activation: Activation) -> &mut Entry {
        &mut self.layers[layer][activation as usize]
    }

    /// Everything of a block.
    pub(crate) fn block(&mut self, layer: usize) -> &mut [Entry] {
        &mut self.layers[layer]
    }

    /// Whether the activation is neither in device memory nor on the host.
    pub fn is_absent(&self, layer: usize, activation: Activation) -> bool {
        matches!(self.layers[layer][activation as usize], Entry::Absent)
    }

    /// Whether the activation is on the host alone.
    pub(crate) fn is_away(&self, layer: usize, activation: Activation) -> bool {
        matches!(self.layers[layer][activation as usize], Entry::Away)
    }

    /// The activation, if it is live.
    pub fn get(&self, layer: usize, activation: Activation) -> Option<&Rc<Buffer>> {
        match &self.layers[layer][activation as usize] {
            Entry::Live(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// Files an activation.
    pub fn put(&mut self, layer: usize, activation: Activation, buffer: Buffer) {
        let entry = self.entry(layer, activation);
        let previous = std::mem::replace(entry, Entry::Live(Rc::new(buffer)));
        assert!(
            matches!(previous, Entry::Absent),
            "{} of layer {layer} was made twice",
            activation.name()
        );
    }

    /// Drops an activation.
    ///
    /// # Panics
    /// If somebody still reads or copies it: its memory would not come back when the plan says so.
    pub fn release(&mut self, layer: usize, activation: Activation) {
        if !self.is_absent(layer, activation) {
            drop(self.take_unread(layer, activation));
        }
    }

    /// Takes an activation out, to be overwritten; it is a temporary from then on.
    ///
    /// # Panics
    /// As [`Saved::release`], and if it is not here.
    pub fn take(&mut self, layer: usize, activation: Activation) -> Buffer {
        let mut buffer = self.take_unread(layer, activation);
        buffer.recategorize(Category::Temporary);
        buffer
    }

    /// Takes a live activation out.
    pub(crate) fn take_unread(&mut self, layer: usize, activation: Activation) -> Buffer {
        let live = match std::mem::take(self.entry(layer, activation)) {
            Entry::Live(buffer) => Rc::into_inner(buffer),
            _ => None,
        };
        live.unwrap_or_else(|| {
            let name = activation.name();
            panic!("{name} of layer {layer} leaves the table when it is live and nobody reads it")
        })
    }

    /// Drops everything, when no copy is under way.
    pub(crate) fn clear(&mut self) {
        let entries = self.layers.iter_mut().flatten();
        entries.for_each(|entry| *entry = Entry::Absent);
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        let mut entries = self.layers.iter().flatten();
        entries.all(|entry| matches!(entry, Entry::Absent))
    }
}
