//! Keeps a session in host memory while the device's memory is given back.

use crate::Result;
use crate::error::SessionError;
use crate::session::Session;
use kernels::Queue;
use memory::{Layer, Memory, Parked, Phase};

/// A session's memory across steps, copied to the host, and how many steps were made.
#[derive(Clone)]
pub struct Asleep {
    parked: Parked,
    progress: (usize, usize),
}

impl Session {
    /// Finishes the step before, and copies to pinned host memory what lives across steps on the device, but not gradients,
    /// which the next step overwrites. Drop the session next, and with it what it holds of the device. Blocks that are in
    /// pinned host memory stay there, without being copied.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if the host refuses the copies, [`SessionError::StatesOnDisk`], and as
    /// [`Session::finish_step`]. The session can go on then.
    pub fn fall_asleep(&mut self) -> Result<Asleep> {
        if self.disk_bytes().is_some() {
            return Err(SessionError::StatesOnDisk);
        }
        self.finish_step()?;
        let _place = self.memory.enter(Phase::Load, Layer::Whole);
        let kernels = &*self.kernels;
        let copied = unsafe {
            // SAFETY: the session is borrowed, and the work that it asked for is done.
            self.memory
                .park::<SessionError>(|bytes, held| Ok(kernels.download(bytes, held)?))
        };
        Ok(Asleep {
            parked: copied?,
            progress: self.progress(),
        })
    }
}

impl Asleep {
    /// Bytes in host memory.
    pub fn bytes(&self) -> u64 {
        self.parked.bytes()
    }

    /// The session as it was, but for its gradients, in a memory in which nothing is leased. `open` makes a session with the same
    /// settings and kernels as before. What it had in pinned host memory it has again at once; the rest is copied to it afterwards. Then nothing
    /// is kept here.
    ///
    /// # Errors
    /// Those of `open`, and if the device fails. Everything is kept then, so that it can be tried again.
    pub fn wake<E: From<SessionError>>(
        &self,
        memory: &Memory,
        open: impl FnOnce() -> Result<Session, E>,
    ) -> Result<Session, E> {
        memory.unpark(&self.parked);
        let mut session = open()?;
        session.fill(&self.parked)?;
        session.set_progress(self.progress);
        Ok(session)
    }
}

impl Session {
    fn fill(&mut self, parked: &Parked) -> Result {
        let kernels = &*self.kernels;
        // SAFETY: the session is borrowed, and has not asked for work that uses what it leased.
        unsafe {
            self.memory
                .fill_from_parked(parked, |out, bytes| kernels.upload(out, bytes))
        }?;
        kernels.finish(kernels.record(Queue::Compute)?)?;
        self.memory.end_parking(parked);
        Ok(())
    }
}
