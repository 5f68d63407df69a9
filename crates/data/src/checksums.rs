//! The checksums of a shard's blocks: made while it is written, compared when a block is first read.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use crc32fast::Hasher;

use crate::{DataError, ShardIndex, file::DataFile};

/// The checksums of a shard that is written piece by piece.
///
/// ```
/// let mut checksums = data::BlockChecksums::default();
/// checksums.update(b"header");
/// checksums.update(b"tokens");
/// assert_eq!(checksums.finish().len(), 1);
/// ```
#[derive(Debug, Clone, Default)]
pub struct BlockChecksums {
    whole: Vec<u32>,
    last: Hasher,
    held: usize, // bytes in `last`, below a block
}

impl BlockChecksums {
    /// Takes the next bytes of the shard's file.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let taken = bytes.len().min(ShardIndex::BLOCK_BYTES - self.held);
            let (block, rest) = bytes.split_at(taken);
            self.last.update(block);
            self.held += taken;
            bytes = rest;
            if self.held == ShardIndex::BLOCK_BYTES {
                self.whole.push(std::mem::take(&mut self.last).finalize());
                self.held = 0;
            }
        }
    }

    /// The checksum of each block.
    pub fn finish(mut self) -> Vec<u32> {
        if self.held > 0 {
            self.whole.push(self.last.finalize());
        }
        self.whole
    }
}

/// The checksums of a file that is read, and which of its blocks were found whole.
#[derive(Debug)]
pub(crate) struct Verified {
    checksums: Vec<u32>,
    whole: Vec<AtomicBool>,
}

impl Verified {
    pub(crate) fn new(checksums: Vec<u32>) -> Self {
        Self {
            whole: checksums.iter().map(|_| AtomicBool::new(false)).collect(),
            checksums,
        }
    }

    /// Compares the blocks that `bytes`, which is not empty, lies in, unless that was done before.
    pub(crate) fn check(&self, file: &DataFile, bytes: Range<usize>) -> Result<(), DataError> {
        let size = ShardIndex::BLOCK_BYTES;
        for block in bytes.start / size..=(bytes.end - 1) / size {
            if self.whole[block].load(Ordering::Relaxed) {
                continue;
            }
            let offset = block * size;
            let held = &file[offset..file.len().min(offset + size)];
            let found = crc32fast::hash(held);
            if found != self.checksums[block] {
                return Err(DataError::Corrupt {
                    file: file.name.clone(),
                    offset,
                    bytes: held.len(),
                    expected: self.checksums[block],
                    found,
                });
            }
            self.whole[block].store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}
