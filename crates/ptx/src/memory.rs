//! Memory in allocations whose every access is checked: bounds, alignment, what was written, and races.

use crate::error::{MistakeKind, Wrong};
use crate::shadow::{AccessKind, Shadow, Who};

/// Most bytes of an access.
pub(crate) const ACCESS_BYTES_MAX: usize = 16;

/// Address of the first allocation, and the least gap between two.
const GLOBAL_BASE: u64 = 0x10_0000_0000;
const GAP_BYTES: u64 = 4096;
const GLOBAL_ALIGNMENT: u64 = 512;

/// An allocation, a shared array or a variable of a module.
pub(crate) struct Region {
    /// The first address.
    start: u64,
    /// The multiple of 16 at or below it, with which `bytes` begins: so an access lies within 16 bytes of `written`.
    base: u64,
    name: String,
    bytes: Vec<u8>,
    /// A bit for each byte that has been written; 16 bytes an element.
    written: Vec<u16>,
    shadow: Shadow,
}

/// The bits of `bytes` bytes at `offset` within one element of `written`.
fn bits(offset: usize, bytes: usize) -> u16 {
    (((1u32 << bytes) - 1) << (offset % 16)) as u16
}

impl Region {
    fn end(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    fn is_written(&self, offset: usize, bytes: usize) -> bool {
        let bits = bits(offset, bytes);
        self.written[offset / 16] & bits == bits
    }

    fn set_written(&mut self, offset: usize, bytes: usize, is_written: bool) {
        let mut at = offset;
        while at < offset + bytes {
            let now = (16 - at % 16).min(offset + bytes - at);
            match is_written {
                true => self.written[at / 16] |= bits(at, now),
                false => self.written[at / 16] &= !bits(at, now),
            }
            at += now;
        }
    }

    /// The value of an access.
    #[inline]
    fn value(&self, offset: usize, bytes: usize) -> Result<[u8; ACCESS_BYTES_MAX], Wrong> {
        if !self.is_written(offset, bytes) {
            let what = self.describe(self.base + offset as u64, bytes);
            let message = format!("never written: {what}");
            return Err(Wrong::new(MistakeKind::Uninitialised, message));
        }
        let mut value = [0; ACCESS_BYTES_MAX];
        value[..bytes].copy_from_slice(&self.bytes[offset..offset + bytes]);
        Ok(value)
    }

    #[inline]
    fn set(&mut self, offset: usize, value: &[u8]) {
        self.bytes[offset..offset + value.len()].copy_from_slice(value);
        self.written[offset / 16] |= bits(offset, value.len());
    }

    #[inline]
    fn note(
        &mut self,
        offset: usize,
        bytes: usize,
        touch: AccessKind,
        launch: u64,
        who: &Who,
    ) -> Result<(), Wrong> {
        let noted = self.shadow.note(offset, bytes, touch, launch, who);
        noted.map_err(|(kind, other)| {
            let what = self.describe(self.base + offset as u64, bytes);
            let (name, lacking) = match kind {
                MistakeKind::Unfenced => ("no fence", "no fence.proxy.async was between"),
                _ => ("a race", "nothing orders the two"),
            };
            let message = format!("{name}: {touch:?} of {what}, though {other} and {lacking}");
            Wrong::new(kind, message)
        })
    }

    /// Says which bytes of the region these are.
    fn describe(&self, address: u64, bytes: usize) -> String {
        let offset = address.wrapping_sub(self.start) as i64;
        let (name, size) = (&self.name, self.end() - self.start);
        format!("{bytes} bytes at {address:#x}, byte {offset} of `{name}` ({size} bytes)")
    }
}

/// Regions of one address space, in the order of their addresses.
#[derive(Default)]
pub(crate) struct AddressSpace {
    regions: Vec<Region>,
    /// Where the last access was.
    recent: usize,
    /// Accesses of one launch, or of one block, are judged together.
    launch: u64,
}

impl AddressSpace {
    /// Adds a region behind the others.
    pub(crate) fn add(&mut self, start: u64, name: &str, bytes: usize) {
        let base = start / 16 * 16;
        let bytes = (start - base) as usize + bytes;
        self.regions.push(Region {
            start,
            base,
            name: name.into(),
            bytes: vec![0; bytes],
            written: vec![0; bytes.div_ceil(16)],
            shadow: Shadow::new(bytes),
        });
    }

    /// Forgets who accessed what.
    pub(crate) fn begin_launch(&mut self) {
        self.launch += 1;
    }

    /// Forgets who accessed what, and that anything was written.
    pub(crate) fn begin_block(&mut self) {
        self.begin_launch();
        for region in &mut self.regions {
            region.written.fill(0);
        }
    }

    fn holder(&self, address: u64, bytes: usize) -> Option<usize> {
        let holds = |index: &usize| {
            let region = &self.regions[*index];
            region.start <= address && address.saturating_add(bytes as u64) <= region.end()
        };
        if !self.regions.is_empty() && holds(&self.recent) {
            return Some(self.recent);
        }
        let after = self
            .regions
            .partition_point(|region| region.start <= address);
        after.checked_sub(1).filter(holds)
    }

    /// The region of an access, and where in it the access lies.
    #[inline]
    fn locate(&mut self, address: u64, bytes: usize) -> Result<(&mut Region, usize), Wrong> {
        let Some(index) = self.holder(address, bytes) else {
            return Err(self.outside(address, bytes));
        };
        self.recent = index;
        let region = &mut self.regions[index];
        let offset = (address - region.base) as usize;
        Ok((region, offset))
    }

    fn outside(&self, address: u64, bytes: usize) -> Wrong {
        let distance =
            |region: &&Region| (region.start.abs_diff(address)).min(region.end().abs_diff(address));
        let message = match self.regions.iter().min_by_key(distance) {
            Some(nearest) => format!("out of bounds: {}", nearest.describe(address, bytes)),
            None => format!("out of bounds: {bytes} bytes at {address:#x}; there is nothing"),
        };
        Wrong::new(MistakeKind::OutOfBounds, message)
    }

    /// Reads bytes for a thread.
    #[inline]
    pub(crate) fn load(
        &mut self,
        address: u64,
        bytes: usize,
        touch: AccessKind,
        who: &Who,
    ) -> Result<[u8; ACCESS_BYTES_MAX], Wrong> {
        let launch = self.launch;
        let (region, offset) = self.locate(address, bytes)?;
        let value = region.value(offset, bytes)?;
        region.note(offset, bytes, touch, launch, who)?;
        Ok(value)
    }

    /// Reads memory without a race check: what only one thread can reach, and what a copy reads that was noted before.
    pub(crate) fn peek(&self, address: u64, bytes: usize) -> Result<[u8; ACCESS_BYTES_MAX], Wrong> {
        let index = self.holder(address, bytes);
        let region = &self.regions[index.ok_or_else(|| self.outside(address, bytes))?];
        region.value((address - region.base) as usize, bytes)
    }

    /// Writes bytes for a thread.
    #[inline]
    pub(crate) fn store(&mut self, address: u64, value: &[u8], who: &Who) -> Result<(), Wrong> {
        let launch = self.launch;
        let (region, offset) = self.locate(address, value.len())?;
        region.note(offset, value.len(), AccessKind::Write, launch, who)?;
        region.set(offset, value);
        Ok(())
    }

    /// Writes memory without a race check: what only one thread can reach, and what a copy writes that was noted before.
    pub(crate) fn poke(&mut self, address: u64, value: &[u8]) -> Result<(), Wrong> {
        let (region, offset) = self.locate(address, value.len())?;
        region.set(offset, value);
        Ok(())
    }

    /// Notes an access without making it.
    pub(crate) fn note(
        &mut self,
        address: u64,
        bytes: usize,
        touch: AccessKind,
        who: &Who,
    ) -> Result<(), Wrong> {
        let launch = self.launch;
        let (region, offset) = self.locate(address, bytes)?;
        region.note(offset, bytes, touch, launch, who)
    }

    /// Marks these bytes as unwritten.
    pub(crate) fn forget(&mut self, address: u64, bytes: usize) -> Result<(), Wrong> {
        let (region, offset) = self.locate(address, bytes)?;
        region.set_written(offset, bytes, false);
        Ok(())
    }

    /// These bytes, marked as written.
    pub(crate) fn bytes_mut(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], Wrong> {
        let (region, offset) = self.locate(address, bytes)?;
        region.set_written(offset, bytes, true);
        Ok(&mut region.bytes[offset..offset + bytes])
    }
}

/// A device's global memory: allocations at made-up addresses, far from each other. What nobody wrote is not to be read.
#[derive(Default)]
pub struct GlobalMemory {
    pub(crate) space: AddressSpace,
}

impl GlobalMemory {
    /// Nothing is allocated.
    pub fn new() -> GlobalMemory {
        GlobalMemory::default()
    }

    /// Allocates bytes that nobody wrote, and gives their address, a multiple of 512. Errors call them by `name`.
    pub fn allocate(&mut self, name: &str, bytes: usize) -> u64 {
        let last = self.space.regions.last();
        let base = last.map_or(GLOBAL_BASE, |last| {
            (last.end() + GAP_BYTES).next_multiple_of(GLOBAL_ALIGNMENT)
        });
        self.space.add(base, name, bytes);
        base
    }

    /// Allocates bytes with these contents.
    pub fn allocate_with(&mut self, name: &str, bytes: &[u8]) -> u64 {
        let address = self.allocate(name, bytes.len());
        self.write(address, bytes)
            .expect("it has just been allocated");
        address
    }

    /// Takes an allocation back.
    ///
    /// # Errors
    /// If none starts at this address.
    pub fn free(&mut self, address: u64) -> Result<(), String> {
        let regions = &mut self.space.regions;
        let index = regions.iter().position(|region| region.start == address);
        let index = index.ok_or_else(|| format!("no allocation starts at {address:#x}"))?;
        regions.remove(index);
        self.space.recent = 0;
        Ok(())
    }

    /// Writes bytes from the host.
    ///
    /// # Errors
    /// If they are not within one allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        let place = self.space.bytes_mut(address, bytes.len());
        place.map_err(|wrong| wrong.message)?.copy_from_slice(bytes);
        Ok(())
    }

    /// Reads bytes to the host, written or not.
    ///
    /// # Errors
    /// If they are not within one allocation.
    pub fn read(&mut self, address: u64, bytes: usize) -> Result<&[u8], String> {
        let located = self.space.locate(address, bytes);
        let (region, offset) = located.map_err(|wrong| wrong.message)?;
        Ok(&region.bytes[offset..offset + bytes])
    }

    /// The number of written bytes before the first unwritten one.
    ///
    /// # Errors
    /// If they are not within one allocation.
    pub fn written(&mut self, address: u64, bytes: usize) -> Result<usize, String> {
        let located = self.space.locate(address, bytes);
        let (region, offset) = located.map_err(|wrong| wrong.message)?;
        Ok((0..bytes)
            .find(|byte| !region.is_written(offset + byte, 1))
            .unwrap_or(bytes))
    }

    /// Where the processor finds bytes of an allocation, as long as that is not taken back.
    pub(crate) fn pointer(&mut self, address: u64, bytes: usize) -> Result<*mut u8, String> {
        let located = self.space.locate(address, bytes);
        let (region, offset) = located.map_err(|wrong| wrong.message)?;
        Ok(region.bytes[offset..].as_mut_ptr())
    }

    /// From now on these bytes are written, by whoever had their pointer.
    pub(crate) fn set_written(&mut self, address: u64, bytes: usize) -> Result<(), String> {
        let written = self.space.bytes_mut(address, bytes);
        written.map(drop).map_err(|wrong| wrong.message)
    }

    /// From now on nobody has written these bytes, which hold `value`.
    ///
    /// # Errors
    /// If they are not within one allocation.
    pub fn forget(&mut self, address: u64, bytes: usize, value: u8) -> Result<(), String> {
        let place = self.space.bytes_mut(address, bytes);
        place.map_err(|wrong| wrong.message)?.fill(value);
        self.space
            .forget(address, bytes)
            .map_err(|wrong| wrong.message)
    }
}
