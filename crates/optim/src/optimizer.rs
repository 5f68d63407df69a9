//! The optimizer of a run: its states in any format and home, and the updates of a step.

use crate::form::Form;
use crate::numbers::Numbers;
use crate::resident::Resident;
use crate::round::{SCRATCH, room_bytes, update};
use crate::rule::Hyperparameters;
use crate::segment::{Round, rounds};
use crate::sources::States;
use crate::streamed::Streamed;
use crate::tensor_states::TensorStates;
use crate::update::{StepNumbers, UpdateQueue, WholeTensor};
use crate::{MasterFormat, MomentFormat};
use kernels::{Account, BlockFile, Kernels, NormAndClip, Queue, Result};
use memory::{
    Buffer, Category, DType, Homes, In, Layer, Layout, Memory, OutOfMemory, Phase, Rank, Unit,
    UpdateTime,
};
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
    update_time: UpdateTime,
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
        let form = Form::new(layout, recipe.formats, recipe.weights, groups);
        let rank = ranks.map_or(Rank::ALONE, Ranks::updating);
        let is_released = homes.update_time() == UpdateTime::Backward;
        let streamed = (homes.streams_updates() || is_released).then(|| {
            let formats = (&form, recipe.gradients);
            Streamed::lease(memory, layout, homes, formats, rank)
        });
        let streamed = streamed.transpose()?;
        let chunks = streamed.as_ref().map(|streamed| &streamed.chunks);
        let own = layout.own_trained(rank);
        let (mut resident, mut at_once) = (own.clone(), layout.trained());
        if let Some(chunks) = chunks {
            resident = resident.without(&chunks.away_cover());
            at_once = at_once.without(&chunks.cover);
        }
        let clips = chunks.filter(|_| is_released).map(|chunks| {
            let dims = [chunks.unit_ends.len(), 2];
            memory.lease_persistent(Category::OptimizerState, "clips", dims, DType::F32)
        });
        let rounds = rounds(layout, &form, (&at_once, &own), rank);
        Ok(Optimizer {
            memory: memory.clone(),
            room_bytes: room_bytes(&form, &rounds, rank),
            states: States {
                rank,
                tensor_states: TensorStates::lease(memory, &form)?,
                resident: Resident::lease(memory, &form, &resident)?,
                numbers: Numbers::lease(memory, &recipe.hyperparameters, &form.groups)?,
                form,
            },
            rounds,
            clips: clips.transpose()?,
            layout: layout.clone(),
            streamed,
            update_time: homes.update_time(),
            is_pending: false,
        })
    }

    /// Name and bytes of each arena of states on the device, for reports.
    pub fn arenas(&self) -> Vec<(&'static str, u64)> {
        let slots = self.streamed.iter().map(Streamed::slots_arena);
        let slots = slots.filter(|(_, bytes)| *bytes > 0);
        let of_tensors = self.states.tensor_states.arena();
        let arenas = self.states.resident.arenas().chain(of_tensors);
        arenas.chain(slots).collect()
    }

    /// Name and bytes of each arena of states in pinned host memory.
    pub fn host_arenas(&self) -> Vec<(&'static str, u64)> {
        let store = self.streamed.iter().flat_map(|streamed| &streamed.store);
        store.map(|store| store.arena()).collect()
    }

    /// Bytes of the file for the states; none if they are in memory.
    pub fn disk_bytes(&self) -> Option<u64> {
        self.streamed.as_ref()?.store.as_ref()?.disk_bytes()
    }

    /// Takes a file of [`Optimizer::disk_bytes`] zeros for the states, which are zero after a lease. Call it before
    /// anything else. Shapes need no file.
    pub fn use_file(&mut self, file: Arc<dyn BlockFile>) {
        let mut stores = self.streamed.iter_mut().flat_map(|all| &mut all.store);
        if let Some(store) = stores.next() {
            store.use_file(file);
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

    /// When weights are updated.
    pub fn update_time(&self) -> UpdateTime {
        self.update_time
    }

    /// Begins a step. If it updates weights in its backward pass, the numbers of the update go to the device now.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn begin_step(&mut self, kernels: &Kernels, numbers: StepNumbers) -> Result {
        if self.update_time != UpdateTime::Backward {
            return Ok(());
        }
        assert!(!self.is_pending, "the update before is pending");
        let _account = kernels.count_to(Account::Update);
        self.upload(kernels, numbers)?;
        self.prefetch(kernels)
    }

    /// Comes just before a part's first forward pass in a step, once the part's weights are on the device: updates them with the
    /// gradients of the step before, if [`UpdateTime::NextForward`] is the time of updates.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn before_forward(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &Gradients,
        part: Layer,
    ) -> Result {
        if self.update_time != UpdateTime::NextForward {
            return Ok(());
        }
        // Entered in the first step too, although nothing is pending, so that all steps have the same peaks.
        let _place = self.memory.enter(Phase::Optimizer, part);
        let _account = kernels.count_to_step_before(Account::Update);
        let is_updated = |unit: &Unit| unit.part == part && unit.trained.elements() > 0;
        match self.layout.units().iter().rposition(is_updated) {
            Some(last) => self.update_to(kernels, weights, gradients, Some(last)),
            None => Ok(()),
        }
    }

    /// Comes before the last micro-batch's backward pass: starts to bring what the update needs, as far as the slots have room.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn before_backward(&mut self, kernels: &Kernels) -> Result {
        let _account = kernels.count_to(Account::Update);
        match self.update_time {
            UpdateTime::Backward => Ok(()),
            UpdateTime::EndOfStep | UpdateTime::NextForward => self.prefetch(kernels),
        }
    }

    /// Comes once the gradients of a part's unit are complete, in the reverse order of the layout's units: enqueues the part's update, if
    /// [`UpdateTime::Backward`] is the time of updates. Gradients are not clipped then. If they or the step's `loss` (`[1]` f32) are not finite, the part stays as it is.
    /// Its weights must be on the device, where they and its gradients stay until the next part's update has been enqueued, which gives
    /// this update time to finish. Then the gradients are released.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails.
    pub fn after_backward(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &mut Gradients,
        part: Layer,
        loss: In,
    ) -> Result {
        if self.update_time != UpdateTime::Backward {
            return Ok(());
        }
        let (Some(streamed), Some(clips)) = (&mut self.streamed, &mut self.clips) else {
            unreachable!("gradients that are released are updated in chunks")
        };
        let _place = self.memory.enter(Phase::Optimizer, part);
        let _account = kernels.count_to(Account::Update);
        let unit = self.layout.unit_of_part(part);
        let unit = unit.expect("what has gradients of its own has a unit");
        let (before, row) = (streamed.under_way(), streamed.place_of(unit));
        self.is_pending = true;
        kernels.run(NormAndClip {
            out: clips.view_mut().rows(row..row + 1).reshape([2]),
            grains: gradients.unit_grains(unit),
            loss,
            max_norm: None,
        })?;
        streamed.begin_unit(kernels)?;
        let mut sources = self.states.sources(weights, gradients);
        sources.clip = clips.view().rows(row..row + 1).reshape([2]);
        streamed.update_to(kernels, sources, Some(unit))?;
        if let Some(before) = before {
            streamed.wait_for(kernels, Some(before))?;
            gradients.release(|unit| unit == before);
        }
        Ok(())
    }

    /// Ends a step whose losses add up to `loss` (`[1]` f32), and whose gradients are complete. Computes their norm and, unless parts are
    /// updated already, the clipping factor, and updates whatever lives on the device. If loss or gradients are not finite, weights and
    /// states stay as they are. What is left is pending: its gradients must not change until [`Optimizer::before_forward`] or
    /// [`Optimizer::finish`] has updated it.
    ///
    /// # Errors
    /// [`UnitError`] if the scratch of an update is refused, which has changed nothing then, or if the device or a disk fails.
    pub fn end_step(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &mut Gradients,
        loss: In,
        numbers: StepNumbers,
    ) -> Result<(), UnitError> {
        // Comes first, so that a refused lease has changed nothing.
        let (category, dims) = (Category::OptimizerState, [self.room_bytes]);
        let room =
            (self.room_bytes > 0).then(|| self.memory.lease(category, SCRATCH, dims, DType::U8));
        let mut room = room.transpose()?;
        let _account = kernels.count_to(Account::Update);
        let is_released = self.update_time == UpdateTime::Backward;
        if !is_released {
            assert!(!self.is_pending, "the update before is pending");
            self.upload(kernels, numbers)?;
        }
        let clip_norm = self.states.numbers.clip_norm;
        let max_norm = (!is_released && clip_norm.is_finite()).then_some(clip_norm as f32);
        self.update_at_once(kernels, weights, gradients, (loss, max_norm), room.as_mut())?;
        match &mut self.streamed {
            Some(streamed) if is_released => {
                streamed.wait_for(kernels, None)?;
                assert!(streamed.is_updated(), "all parts are updated");
                gradients.release(|_| true);
                self.is_pending = false;
            }
            Some(streamed) => {
                self.is_pending = true;
                streamed.begin(kernels, gradients)?;
            }
            None => {}
        }
        Ok(())
    }

    /// Makes all pending updates. Weights that live in pinned host memory come to the device for that, unit by unit.
    ///
    /// # Errors
    /// [`UnitError`] if the lease of a unit is refused, or the device, a disk or another rank fails. No unit is left on the device then.
    pub fn finish(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &Gradients,
    ) -> Result<(), UnitError> {
        let _account = kernels.count_to(Account::Update);
        let updated = self.update_units(kernels, weights, gradients);
        if updated.is_err() {
            weights.abandon(kernels)?;
        }
        updated
    }

    fn update_units(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &Gradients,
    ) -> Result<(), UnitError> {
        if self.is_pending && weights.is_on_host() {
            for unit in weights.begin_update().iter() {
                weights.use_unit(kernels, *unit)?;
                self.update_to(kernels, weights, gradients, Some(*unit))?;
                weights.gather_updated_unit(kernels, *unit)?;
                weights.look_ahead(kernels)?;
            }
            weights.end_pass(kernels)?;
        }
        Ok(self.update_to(kernels, weights, gradients, None)?)
    }

    fn upload(&mut self, kernels: &Kernels, numbers: StepNumbers) -> Result {
        let groups = &self.states.form.groups;
        self.states.numbers.upload(kernels, groups, numbers)
    }

    fn prefetch(&mut self, kernels: &Kernels) -> Result {
        let streamed = self.streamed.as_mut();
        streamed.map_or(Ok(()), |streamed| streamed.prefetch(kernels))
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
        let mut sources = self.states.sources(weights, gradients);
        // SAFETY: the queue of the computation asks for no promise.
        let queue = unsafe { UpdateQueue::new(kernels, Queue::Compute) };
        for round in &self.rounds {
            let room = room.as_mut().map(|room| room.view_mut());
            update(&queue, round, &mut sources, room)?;
        }
        Ok(())
    }

    /// Runs the pending updates of all units up to this one, or of all, in the order of the layout, before the computation goes on. Their
    /// weights must be on the device.
    fn update_to(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        gradients: &Gradients,
        unit: Option<usize>,
    ) -> Result {
        match &mut self.streamed {
            Some(streamed) if self.is_pending => {
                let sources = self.states.sources(weights, gradients);
                streamed.update_to(kernels, sources, unit)?;
                streamed.wait_for(kernels, unit)?;
                self.is_pending = !streamed.is_updated();
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
