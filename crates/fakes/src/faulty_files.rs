//! Files that fail, for tests of what a run does then.

use kernels::BlockFile;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a read or write fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// Nothing is copied.
    Error(ErrorKind),
    /// Half of it is.
    Short,
}

/// Reads and writes of files, counted together, one of which fails. Clones count together.
#[derive(Clone, Debug)]
pub struct Faults {
    operations: Arc<AtomicU64>,
    fails_at: u64,
    fault: DiskFault,
}

impl Faults {
    /// The read or write after `fails_at` others fails, and all after it do not.
    pub fn new(fails_at: u64, fault: DiskFault) -> Faults {
        Faults {
            operations: Arc::default(),
            fails_at,
            fault,
        }
    }

    /// Reads and writes so far.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// A file whose reads and writes are among those that are counted.
    pub fn on(&self, file: Arc<dyn BlockFile>) -> Arc<dyn BlockFile> {
        Arc::new(FaultyFile {
            file,
            faults: self.clone(),
        })
    }

    /// What this operation does instead of its work.
    fn next(&self) -> Option<DiskFault> {
        let operation = self.operations.fetch_add(1, Ordering::Relaxed);
        (operation == self.fails_at).then_some(self.fault)
    }
}

#[derive(Debug)]
struct FaultyFile {
    file: Arc<dyn BlockFile>,
    faults: Faults,
}

impl BlockFile for FaultyFile {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self.faults.next() {
            None => self.file.read_at(offset, bytes),
            Some(DiskFault::Error(kind)) => Err(kind.into()),
            Some(DiskFault::Short) => {
                let half = bytes.len() / 2;
                self.file.read_at(offset, &mut bytes[..half])?;
                Err(ErrorKind::UnexpectedEof.into())
            }
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self.faults.next() {
            None => self.file.write_at(offset, bytes),
            Some(DiskFault::Error(kind)) => Err(kind.into()),
            Some(DiskFault::Short) => {
                self.file.write_at(offset, &bytes[..bytes.len() / 2])?;
                Err(ErrorKind::WriteZero.into())
            }
        }
    }
}
