//! The optimizer of a run: its states in any format and home, and the updates of a step.

use crate::form::Form;
use crate::numbers::{Hyperparameters, Numbers};
use crate::resident::Resident;
use crate::rule::{StepNumbers, UpdateQueue, WholeTensor};
use crate::segment::{Round, rounds};
use crate::sources::States;
use crate::streamed::Streamed;
use crate::tensor_states::TensorStates;
use crate::update::{SCRATCH, room_bytes, update};
use crate::{MasterFormat, MomentFormat};
use kernels::{BlockFile, Kernels, NormAndClip, Result};
use memory::{Buffer, Category, DType, Home, Homes, In, Layer, Layout, Memory, OutOfMemory, Rank};
use std::rc::Rc;
use std::sync::Arc;
use units::{Gradients, Ranks, UnitError, Weights};

/// What [`Optimizer::lease`] builds an optimizer from.
pub struct Recipe {
    /// The optimizer, and its numbers.
    pub hyperparameters: Hyperparameters,
    /// The matrices that are updated as a whole; empty if the optimizer has none.
    pub matrices: Vec<WholeTensor>,
    /// How moments are kept, and the exact values of bf16 weights.
    pub formats: (MomentFormat, MasterFormat),
    /// The type of the weights.
    pub weights: DType,
    /// The type of the gradients.
    pub gradients: DType,
}

/// The optimizer and its states.
///
/// Its methods for single parameters are in `parameter_states.rs`.
pub struct Optimizer {
    memory: Memory,
    pub(crate) layout: Rc<Layout>,
    pub(crate) states: States,
    /// The segments that are updated in the queue of the computation.
    rounds: Vec<Round>,
    /// The updates in chunks.
    pub(crate) streamed: Option<Streamed>,
    /// Bytes of scratch for updates in the queue of the computation. Leased at each update.
    room_bytes: usize,
    /// `[parts, 2]` f32, if gradients are released: the norm and the clipping factor of each part, in the order of
    /// updates.
    clips: Option<Buffer>,
    /// Whether some parameters still have to be updated with the gradients of the last step.
    is_pending: bool,
}

impl Optimizer {
    /// Leases the states of what this rank updates, zeroed: moments, and the master states of bf16 weights. When the
    /// optimizer is dropped, chunks may still be on their way, so drop the kernels first.
    ///
    /// # Errors
    /// [`OutOfMemory`] if they do not fit.
    pub fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        recipe: &Recipe,
        homes: &Homes,
        ranks: Option<&Ranks>,
    ) -> Result<Optimizer, OutOfMemory> {
        let groups = recipe.hyperparameters.groups(layout, &recipe.matrices);
        let form = Rc::new(Form::new(layout, recipe.formats, recipe.weights, groups));
        let rank = ranks.map_or(Rank::ALONE, Ranks::updating);
        let is_released = homes.gradients == Home::Released;
        let streamed = (homes.streams_updates() || is_released).then(|| {
            let formats = (&form, recipe.gradients);
            Streamed::lease(memory, layout, homes, formats, rank)
        });
        let streamed = streamed.transpose()?;
        let chunks = streamed.as_ref().map(Streamed::chunks);
        let (mut resident, mut at_once) = (layout.own_trained(rank), layout.trained());
        if let Some(chunks) = chunks {
            resident = resident.without(&chunks.away_cover());
            at_once = at_once.without(&chunks.cover);
        }
        let released = chunks.filter(|_| is_released);
        let clips = released.map(|chunks| {
            let (category, dims) = (Category::OptimizerState, [chunks.part_ends.len(), 2]);
            memory.lease_persistent(category, "clips", dims, DType::F32)
        });
        let rounds = rounds(layout, &form, &at_once, rank);
        let rooms = rounds.iter().map(|round| room_bytes(&form, round, rank));
        Ok(Optimizer {
            memory: memory.clone(),
            room_bytes: rooms.max().unwrap_or(0),
            states: States {
                rank,
                tensor_states: TensorStates::lease(memory, &form)?,
                resident: Resident::lease(memory, &form, &resident)?,
                numbers: Numbers::lease(memory, &recipe.hyperparameters, &form)?,
                form,
            },
            rounds,
            clips: clips.transpose()?,
            layout: layout.clone(),
            streamed,
            is_pending: false,
        })
    }

    /// Name and bytes of each arena of states on the device, for reports.
    pub fn arenas(&self) -> Vec<(&'static str, u64)> {
        let slots = self.streamed.iter().map(Streamed::slot_bytes);
        let slots = slots.filter(|bytes| *bytes > 0);
        let slots = slots.map(|bytes| ("offload_slots", bytes));
        let of_tensors = self.states.tensor_states.arena();
        let arenas = self.states.resident.arenas().chain(of_tensors);
        arenas.chain(slots).collect()
    }

    /// Name and bytes of each arena of states in pinned host memory.
    pub fn host_arenas(&self) -> Vec<(&'static str, u64)> {
        let store = self.streamed.as_ref().and_then(Streamed::store);
        store.map(|store| store.arena()).into_iter().collect()
    }

    /// Bytes of the file for the states; none if they are in memory.
    pub fn disk_bytes(&self) -> Option<u64> {
        self.streamed.as_ref()?.store()?.disk_bytes()
    }

    /// Takes a file of [`Optimizer::disk_bytes`] zeros for the states, which are zero after a lease. Call it before
    /// anything else. Shapes need no file.
    pub fn use_file(&mut self, file: Arc<dyn BlockFile>) {
        if let Some(streamed) = &mut self.streamed {
            streamed.use_file(file);
        }
    }

    /// Norm of the last step's gradients before clipping, and the clipping factor, `[2]` f32.
    pub fn norm_and_clip(&self) -> In<'_> {
        self.states.numbers.clip.view()
    }

    /// Whether some parameters still have to be updated with the gradients of the last step.
    pub fn is_pending(&self) -> bool {
        self.is_pending
    }

    /// Starts to bring what the next update needs, as far as the slots have room.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn prefetch(&mut self, kernels: &Kernels) -> Result {
        let streamed = self.streamed.as_mut();
        streamed.map_or(Ok(()), |streamed| streamed.prefetch(kernels))
    }

    /// Begins an update with the gradients of a step whose losses add up to `loss` (`[1]` f32). Computes the norm and
    /// the clipping factor, and updates whatever lives on the device. If loss or gradients are not finite, weights and
    /// states stay as they are. Updates in chunks are pending: their gradients must not change until
    /// [`Optimizer::update_part`] or [`Optimizer::finish`] has updated them.
    ///
    /// # Errors
    /// [`UnitError`] if the scratch of an update is refused, or the device or a disk fails.
    pub fn begin(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &mut Gradients,
        loss: In,
        numbers: StepNumbers,
    ) -> Result<(), UnitError> {
        assert!(!self.is_pending, "the update before is pending");
        let mut room = self.lease_room()?;
        self.states
            .numbers
            .upload(kernels, &self.states.form, numbers)?;
        let clip_norm = self.states.numbers.clip_norm();
        let max_norm = clip_norm.is_finite().then_some(clip_norm as f32);
        self.update_at_once(kernels, weights, gradients, (loss, max_norm), room.as_mut())?;
        if let Some(streamed) = &mut self.streamed {
            self.is_pending = true;
            streamed.begin(kernels, gradients)?;
        }
        Ok(())
    }

    /// Leases scratch for updates in the queue of the computation, if they need any. It comes first in an update, so
    /// that a refused lease has changed nothing.
    fn lease_room(&self) -> Result<Option<Buffer>, OutOfMemory> {
        let (category, dims) = (Category::OptimizerState, [self.room_bytes]);
        let needs_room = self.room_bytes > 0;
        let room = needs_room.then(|| self.memory.lease(category, SCRATCH, dims, DType::U8));
        room.transpose()
    }

    /// Computes the norm and the clipping factor of all gradients, and updates what is updated in the queue of the
    /// computation.
    fn update_at_once(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &mut Gradients,
        (loss, max_norm): (In, Option<f32>),
        mut room: Option<&mut Buffer>,
    ) -> Result {
        gradients.sum_grains(kernels)?;
        kernels.run(NormAndClip {
            out: self.states.numbers.clip.view_mut(),
            grains: gradients.grains(),
            loss,
            max_norm,
        })?;
        let (mut sources, tensor_states) = self.states.sources(weights, gradients, None);
        let queue = UpdateQueue::in_computation(kernels);
        for round in &self.rounds {
            let room = room.as_mut().map(|room| room.view_mut());
            update(&queue, round, &mut sources, tensor_states, room)?;
        }
        Ok(())
    }

    /// Runs the pending updates of all parts up to this one, in the order of the layout's units, before the computation
    /// goes on. Does nothing if none is pending. The part's weights must be on the device. [`Layer::Whole`] stands for
    /// all parts and needs the weights of all.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn update_part(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &Gradients,
        part: Layer,
    ) -> Result {
        match &mut self.streamed {
            Some(streamed) if self.is_pending => {
                let sources = self.states.sources(weights, gradients, None);
                streamed.update_part(kernels, sources, part)?;
                streamed.wait_for(kernels, part)?;
                self.is_pending = !streamed.is_updated();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Runs all pending updates.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn finish(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &Gradients,
    ) -> Result {
        self.update_part(kernels, weights, gradients, Layer::Whole)
    }
}

/// Updates of gradients that are released part by part. A step calls [`Optimizer::begin_released`], then
/// [`Optimizer::update_released`] for each part, then [`Optimizer::end_released`].
impl Optimizer {
    /// Begins an update that runs during the backward pass.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn begin_released(&mut self, kernels: &Kernels, numbers: StepNumbers) -> Result {
        assert!(!self.is_pending, "the update before is pending");
        self.states
            .numbers
            .upload(kernels, &self.states.form, numbers)?;
        self.prefetch(kernels)
    }

    /// Enqueues the update of a part, whose gradients have been enqueued in the computation. Parts come in the reverse
    /// order of the layout's units. Gradients are not clipped. If they or the step's `loss` (`[1]` f32) are not finite,
    /// the part stays as it is. The part's weights must be on the device. They and its gradients must stay there until
    /// the next part's update has been enqueued, which gives this update time to finish. Then the gradients are
    /// released.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn update_released(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &mut Gradients,
        part: Layer,
        loss: In,
    ) -> Result {
        let (Some(streamed), Some(clips)) = (&mut self.streamed, &mut self.clips) else {
            unreachable!("gradients that are released are updated in chunks")
        };
        let (before, row) = (streamed.under_way(), streamed.number_of(part));
        self.is_pending = true;
        kernels.run(NormAndClip {
            out: clips.view_mut().rows(row..row + 1).reshape([2]),
            grains: gradients.unit_grains(part),
            loss,
            max_norm: None,
        })?;
        streamed.begin_part(kernels)?;
        let clip = clips.view().rows(row..row + 1).reshape([2]);
        let sources = self.states.sources(weights, gradients, Some(clip));
        streamed.update_part(kernels, sources, part)?;
        if let Some(before) = before {
            streamed.wait_for(kernels, before)?;
            gradients.release(before);
        }
        Ok(())
    }

    /// Ends an update after all its parts: updates the vectors, and computes the norm of all gradients.
    ///
    /// # Errors
    /// As [`Optimizer::begin`].
    pub fn end_released(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &mut Gradients,
        loss: In,
    ) -> Result<(), UnitError> {
        let mut room = self.lease_room()?;
        self.update_at_once(kernels, weights, gradients, (loss, None), room.as_mut())?;
        if let Some(streamed) = &mut self.streamed {
            streamed.wait_for(kernels, Layer::Whole)?;
            assert!(streamed.is_updated(), "all parts are updated");
        }
        gradients.release(Layer::Whole);
        self.is_pending = false;
        Ok(())
    }
}
