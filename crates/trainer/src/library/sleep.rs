//! A trainer that gives the device's memory back between steps, and takes it again.

use super::Trainer;
use super::session_place::SessionPlace;
use crate::failure::{Failure, Result};
use crate::train::restore;
use checkpoint::Checkpoint;
use memory::{Layer, Phase};
use planner::{HostNeed, HostRoom};
use serde::Serialize;
use session::Session;

/// What is kept while a trainer sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepLevel {
    /// All that the next steps depend on, in host memory: with a GPU, in pinned memory.
    Keep,
    /// Nothing: the last checkpoint has it all, and is loaded when the trainer wakes.
    Drop,
}

/// What a trainer that fell asleep gave back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Handed {
    /// Bytes of device memory given back.
    pub given_back_bytes: u64,
    /// Bytes kept in host memory, with those that were there before.
    pub kept_on_host_bytes: u64,
    /// Bytes of device memory that this trainer still holds; on a GPU by the driver's count, without its context and kernels.
    pub held_bytes: u64,
    /// Bytes used on the whole GPU by all processes; none on the CPU.
    pub device_used_bytes: Option<u64>,
}

impl Trainer {
    /// Gives back all of the device's memory until [`Trainer::wake`], for other programs on the same GPU. What remains there
    /// is the process's context with its kernels. The gradients of the last step are lost.
    ///
    /// ```
    /// # use trainer::{SleepLevel, Trainer, configuration};
    /// let mut trainer = Trainer::new(configuration("tiny", &["train.device=cpu"])?)?;
    /// let handed = trainer.sleep(SleepLevel::Keep)?;
    /// assert_eq!(handed.given_back_bytes, trainer.plan().reserved_bytes);
    /// trainer.wake()?;
    /// # Ok::<(), trainer::Failure>(())
    /// ```
    ///
    /// # Errors
    /// [`Failure::HostMemory`] or [`Failure::OutOfMemory`] if host memory is short, and [`Failure::Usage`] if it sleeps already,
    /// has optimizer states on a disk, or would lose what no checkpoint has. It stays awake then. [`Failure::Device`] if the device fails.
    pub fn sleep(&mut self, level: SleepLevel) -> Result<Handed> {
        self.enter()?;
        let session = self.session.awake_mut()?;
        let memory = session.memory().clone();
        let before = memory.live_bytes() + self.plan.slab_bytes;
        let place = match level {
            SleepLevel::Keep => {
                if !self.config.memory.force {
                    HostRoom::ask().check(HostNeed::Pinned(memory.bytes_to_park()))?;
                }
                SessionPlace::Host(session.fall_asleep()?)
            }
            SleepLevel::Drop => {
                let folder = self.saved.clone().ok_or_else(not_saved)?;
                // All of it must be there before the trainer forgets it.
                SessionPlace::Checkpoint(Checkpoint::open(&folder)?.path)
            }
        };
        // The session ends here, and with it every lease.
        self.session = place;
        let live = memory.live_bytes();
        // The slab goes with the last clone of the memory.
        drop(memory);
        let device = &self.opening.device;
        device.give_back_free_memory()?;
        let bytes = device.gpu_bytes()?;
        let held_bytes = bytes.map_or(live, |bytes| bytes.held);
        Ok(Handed {
            given_back_bytes: before.saturating_sub(held_bytes),
            // What was pinned is parked as its leases ended.
            kept_on_host_bytes: match &self.session {
                SessionPlace::Host(kept) => kept.bytes(),
                _ => 0,
            },
            held_bytes,
            device_used_bytes: bytes.map(|bytes| bytes.total - bytes.free),
        })
    }

    /// Takes the device's memory again, as much as is planned, and goes on where it fell asleep: the next steps have the bits and
    /// the memory that they would have had. Without effect if it is awake.
    ///
    /// # Errors
    /// [`Failure::OutOfMemory`] if others use the memory, and [`Failure::Checkpoint`] if that is damaged. Then everything is kept and it still
    /// sleeps, so that this can be called again.
    pub fn wake(&mut self) -> Result {
        if let SessionPlace::Device(_) = self.session {
            return Ok(());
        }
        self.enter()?;
        let woken = self.opened_again();
        if woken.is_err() {
            // The failure to tell of is that of waking.
            let _ = self.opening.device.give_back_free_memory();
        }
        let mut session = woken?;
        let stop = self.stop.clone();
        session.stop_when(move || stop());
        self.session = SessionPlace::Device(Box::new(session));
        Ok(())
    }

    fn opened_again(&self) -> Result<Session> {
        let memory = self.opening.memory();
        let open = || {
            let session = self.opening.session(&memory)?;
            memory.reserve_slab(self.plan.slab_bytes)?;
            Ok(session)
        };
        match &self.session {
            SessionPlace::Device(_) => unreachable!("it is asleep"),
            SessionPlace::Host(kept) => kept.wake(&memory, open),
            SessionPlace::Checkpoint(folder) => {
                let checkpoint = Checkpoint::open(folder)?;
                let mut session = open()?;
                let _place = memory.enter(Phase::Load, Layer::Whole);
                restore(&checkpoint, &mut session, &self.config, self.base.as_ref())?;
                Ok(session)
            }
        }
    }
}

fn not_saved() -> Failure {
    Failure::Usage(
        "no checkpoint has this trainer's last step, and a sleep that keeps nothing would lose it; save a checkpoint first, or keep it in host \
         memory"
            .into(),
    )
}
