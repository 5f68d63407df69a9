//! Codes of the matrices that are multiplied in FP8, from their first use in a step to its end. They lie where the weights do: on the
//! device, in pinned host memory, or a shard on each rank. From its second use on, a unit comes as codes.

use kernels::operation::Copy;
use kernels::{Account, Event, Kernels, Queue, Result};
use memory::{Arena, ArenaLease, ArenaPlace, Category, Cover, DType, In, Memory, Out, OutOfMemory};
use std::ops::Range;

const MADE: &str = "codes are made before they go to the host";
/// The arena's name.
const NAME: &str = "fp8_weights";
const GONE: &str = "codes have gone to the host before their memory is used again";

/// The codes that this rank keeps.
pub(crate) struct StepCodes {
    /// The codes of this rank's part of the matrices. Its types are e4m3 for the matrices, and for all else those of the weights, so
    /// that a unit is leased in the same types.
    arena: Arena,
    is_on_host: bool,
    matrices: Cover,
    /// The matrices whose codes are this step's.
    made: Cover,
    /// When the last codes have gone to the host.
    gone: Option<Event>,
}

impl StepCodes {
    /// Leases room for the codes of some matrices, as far as the arenas hold these: in host memory if `host` holds them.
    ///
    /// # Errors
    /// [`OutOfMemory`] if they do not fit.
    pub(crate) fn lease(
        memory: &Memory,
        (resident, host): (&Arena, Option<&Arena>),
        matrices: &Cover,
    ) -> Result<StepCodes, OutOfMemory> {
        let (of, place) = match host {
            Some(host) => (host, ArenaPlace::Host),
            None => (resident, ArenaPlace::Device),
        };
        let lease = ArenaLease::new(place, Category::Parameter, NAME);
        let types = of.types().with(matrices, DType::F8E4M3);
        let held = matrices.within_all(of.held());
        Ok(StepCodes {
            arena: Arena::lease(memory, lease, of.layout(), types, held)?,
            is_on_host: host.is_some(),
            matrices: matrices.clone(),
            made: Cover::default(),
            gone: None,
        })
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Name and bytes of what lives across steps, if it lies there: in pinned host memory, or on the device.
    pub(crate) fn leased(&self, on_host: bool) -> Option<(&'static str, u64)> {
        (self.is_on_host == on_host).then_some((NAME, self.arena.bytes()))
    }

    /// Called when the passes of a step are over.
    pub(crate) fn forget(&mut self) {
        self.made = Cover::default();
    }

    /// The codes of a range of matrices that lie on the device as a whole; none if they are not this step's.
    pub(crate) fn made(&self, range: &Range<usize>) -> Option<In<'_>> {
        self.made.rows(range)?;
        Some(self.arena.flat(range.clone()))
    }

    /// Where the caller makes the codes of a range of matrices that lie on the device as a whole; none if they are not kept.
    pub(crate) fn room_for(&mut self, range: &Range<usize>) -> Option<Out<'_>> {
        self.matrices.rows(range)?;
        self.set_made(range);
        Some(self.arena.flat_mut(range.clone()))
    }

    /// Whether a unit has matrices whose codes are kept, and those of all of them are this step's.
    pub(crate) fn has_unit(&self, unit: &Cover) -> bool {
        let kept = self.matrices.within_all(unit);
        kept.elements() > 0 && kept.without(&self.made).elements() == 0
    }

    /// The elements of a unit that come as codes, and those that come as they are stored.
    pub(crate) fn split(&self, unit: &Cover) -> [Cover; 2] {
        [
            unit.within_all(&self.matrices),
            unit.without(&self.matrices),
        ]
    }

    fn set_made(&mut self, range: &Range<usize>) {
        let range = Cover::new([range.clone()]).without(&self.made);
        self.made = Cover::joined([std::mem::take(&mut self.made), range]);
    }

    /// Keeps what this rank has of the codes of a range, unless they are kept already or not to be. They must not be overwritten before
    /// [`StepCodes::wait_until_gone`].
    pub(crate) fn keep(&mut self, kernels: &Kernels, range: &Range<usize>, codes: In) -> Result {
        if self.matrices.rows(range).is_none() || self.made.rows(range).is_some() {
            return Ok(());
        }
        if self.is_on_host {
            kernels.wait(Queue::Download, kernels.record(Queue::Compute)?, MADE)?;
        }
        let _account = kernels.count_to(Account::Weights);
        let codes = codes.cast(DType::U8);
        for part in self.arena.held().within(range).ranges().to_vec() {
            let x = codes.rows(part.start - range.start..part.end - range.start);
            let out = self.arena.raw_mut(&part);
            if !self.is_on_host {
                kernels.run(copy_of_bytes(out, x))?;
                continue;
            }
            // SAFETY: the caller keeps the codes until the computation waits for `gone`. Uploads that read the host's memory wait
            // for the computation after that, and those before have come, since the computation used what they brought.
            unsafe { kernels.start_download(out, x) }?;
        }
        if self.is_on_host {
            self.gone = Some(kernels.record(Queue::Download)?);
        }
        self.set_made(range);
        Ok(())
    }

    /// Makes the computation wait until the codes that were kept last have gone to the host.
    pub(crate) fn wait_until_gone(&mut self, kernels: &Kernels) -> Result {
        let gone = self.gone.take();
        gone.map_or(Ok(()), |gone| kernels.wait(Queue::Compute, gone, GONE))
    }
}

/// Copies bytes as f32: every piece of a matrix is a multiple of four bytes.
pub(crate) fn copy_of_bytes<'a>(out: Out<'a>, x: In<'a>) -> Copy<'a> {
    Copy {
        out: out.cast(DType::F32),
        x: x.cast(DType::F32),
    }
}
