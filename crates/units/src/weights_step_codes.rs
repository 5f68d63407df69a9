//! Weights that are kept as codes for a step: what the passes ask for.

use crate::Weights;
use crate::step_codes::StepCodes;
use kernels::{Kernels, Result};
use memory::{Cover, In, Memory, Out, OutOfMemory};

impl Weights {
    /// Leases room for codes of some matrices (FP8, e4m3), which are made at the first use in a step and kept until its end, where the
    /// matrices are: on the device, in pinned host memory, or this rank's shards. Later in the step, units come to the device as
    /// codes.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it does not fit.
    pub fn lease_step_codes(
        &mut self,
        memory: &Memory,
        matrices: &Cover,
    ) -> Result<(), OutOfMemory> {
        let arenas = (&self.resident, self.host());
        self.step_codes = Some(StepCodes::lease(memory, arenas, matrices)?);
        Ok(())
    }

    /// Called when the passes of a step are over: no later pass reads its codes.
    pub fn forget_step_codes(&mut self) {
        if let Some(codes) = &mut self.step_codes {
            codes.forget();
        }
    }

    /// Reads the codes of matrices that lie together, `[m, n]` e4m3. None unless they are kept, were made in this step, and are on the
    /// device. Their unit must be in use.
    pub fn step_codes(&self, entries: &[usize]) -> Option<In<'_>> {
        let (range, dims) = self.layout().joined(entries)?;
        let kept = self.step_codes.as_ref()?;
        let flat = match (&self.streamed, self.layout().unit_of(entries[0])) {
            (Some(streamed), Some(unit)) => streamed.units.get((unit, 0)).flat(&range),
            _ => kept.made(&range)?,
        };
        flat.dtype().is_fp8().then(|| flat.reshape(dims))
    }

    /// Matrices that lie together, and where the caller makes their codes, if both are kept on the device as a whole.
    pub fn step_codes_to_make(&mut self, entries: &[usize]) -> Option<(In<'_>, Out<'_>)> {
        let (range, dims) = self.layout().joined(entries)?;
        let kept = self.step_codes.as_mut();
        let codes = kept.filter(|_| self.streamed.is_none())?.room_for(&range)?;
        Some((self.resident.flat(range).reshape(dims), codes.reshape(dims)))
    }

    /// Keeps codes that were made of matrices that come and go, if none are kept yet. They must not be overwritten before
    /// [`Weights::wait_until_step_codes_are_kept`].
    ///
    /// # Errors
    /// `KernelError` if the device fails.
    pub fn keep_step_codes(&mut self, kernels: &Kernels, entries: &[usize], codes: In) -> Result {
        let joined = self.layout().joined(entries);
        match (&mut self.step_codes, joined) {
            (Some(kept), Some((range, _))) => kept.keep(kernels, &range, codes),
            _ => Ok(()),
        }
    }

    /// Makes the computation wait until the codes that were kept last are where they are kept.
    ///
    /// # Errors
    /// `KernelError` if the device fails.
    pub fn wait_until_step_codes_are_kept(&mut self, kernels: &Kernels) -> Result {
        let kept = self.step_codes.as_mut();
        kept.map_or(Ok(()), |kept| kept.wait_until_gone(kernels))
    }

    /// Name and bytes of the codes that are kept, if they lie there: in pinned host memory, or on the device.
    pub fn step_codes_arena(&self, on_host: bool) -> Option<(&'static str, u64)> {
        self.step_codes.as_ref()?.leased(on_host)
    }
}
