//! The checksums of a shard's blocks, computed while it is written, and compared when a block is first read.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use crc32fast::Hasher;

use crate::{DataError, Result, ShardIndex, file::DataFile};

/// The checksums of a shard that is being written in pieces, with its header last.
#[derive(Debug)]
pub(crate) struct BlockChecksums {
    blocks: Vec<Hasher>,
    held: usize, // bytes of the last block, those of the header among them
}

impl BlockChecksums {
    /// For a file that begins with a header of `bytes` bytes, which must fit in a block.
    pub(crate) fn after_header(bytes: usize) -> Self {
        Self {
            blocks: vec![Hasher::new()],
            held: bytes,
        }
    }

    /// Adds the next bytes of the shard's file.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.held == ShardIndex::BLOCK_BYTES {
                self.blocks.push(Hasher::new());
                self.held = 0;
            }
            let taken = bytes.len().min(ShardIndex::BLOCK_BYTES - self.held);
            let (block, rest) = bytes.split_at(taken);
            let last = self.blocks.last_mut().expect("there is a first block");
            last.update(block);
            self.held += taken;
            bytes = rest;
        }
    }

    /// The checksum of each block.
    pub(crate) fn finish(mut self, header: &[u8]) -> Vec<u32> {
        let mut first = Hasher::new();
        first.update(header);
        first.combine(&self.blocks[0]);
        self.blocks[0] = first;
        self.blocks.into_iter().map(Hasher::finalize).collect()
    }
}

/// The checksums of a file for reading, and which of its blocks have been compared.
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

    /// Compares the blocks that contain `bytes`, which is not empty, unless they were compared before.
    pub(crate) fn check(&self, file: &DataFile, bytes: Range<usize>) -> Result {
        let size = ShardIndex::BLOCK_BYTES;
        for block in bytes.start / size..=(bytes.end - 1) / size {
            if self.whole[block].load(Ordering::Relaxed) {
                continue;
            }
            let offset = block * size;
            let held = &file[offset..file.len().min(offset + size)];
            let found = crc32fast::hash(held);
            if found != self.checksums[block] {
                return Err(DataError::Unusable(format!(
                    "data file {} is corrupt: the {} bytes at offset {offset} have checksum {found:08x}, but {:08x} was written; \
                     copy or write it again",
                    file.name,
                    held.len(),
                    self.checksums[block]
                )));
            }
            self.whole[block].store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}
