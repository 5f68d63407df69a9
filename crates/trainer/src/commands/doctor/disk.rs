//! Measures how fast a disk reads and writes, in the way that training uses it.

use super::rates::random_bytes;
use super::rows;
use crate::failure::{Failure, Result};
use kernels::cpu::Cpu;
use kernels::{BlockFile, KernelError, Kernels, Queue};
use memory::{Buffer, Category, DType, Memory, format_bytes};
use report::Table;
use scratch::ScratchFolder;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The rates of a folder's disk.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DiskRates {
    /// The folder.
    path: PathBuf,
    /// Bytes that may be written there.
    free_bytes: u64,
    /// What carries out reads and writes: `io_uring` or `threads`.
    engine: &'static str,
    /// Whether reads and writes bypass the page cache.
    direct: bool,
    /// Size of the file that was written and read.
    file_bytes: u64,
    /// Reads, in units of 10^9 bytes a second.
    read_gbps: f64,
    /// Writes.
    write_gbps: f64,
    /// The sum of both at a time, as updates read and write states: `hardware.disk_gbps`.
    disk_gbps: f64,
}

/// Bytes of one read or write.
const CHUNK_BYTES: usize = 64 << 20;

/// The largest size of the file.
const FILE_BYTES: u64 = 1 << 30;

/// The least time of each measurement, and the most time for filling the file.
const TIME: Duration = Duration::from_secs(2);

/// The file and the buffers of the measurement.
struct Bench {
    cpu: Kernels<Cpu>,
    file: Arc<dyn BlockFile>,
    incoming: Buffer,
    outgoing: Buffer,
    /// Chunks that have been written at least once: others are faster to read and slower to write.
    chunks: usize,
}

impl DiskRates {
    /// Measures a folder's disk for less than ten seconds, and removes the file.
    ///
    /// # Errors
    /// [`Failure`] if the folder cannot be used, or its disk fails or has no room.
    pub(super) fn measure(path: &Path) -> Result<DiskRates> {
        let folder = ScratchFolder::open(path)?;
        let free_bytes = folder.free_bytes()?;
        // Half of the free space is left to others.
        let chunks = (FILE_BYTES.min(free_bytes / 2) / CHUNK_BYTES as u64) as usize;
        if chunks == 0 {
            return Err(Failure::Usage(format!(
                "`{}` has {} free, which is too little to measure its disk",
                path.display(),
                format_bytes(free_bytes)
            )));
        }
        let file = folder.create("measured", (chunks * CHUNK_BYTES) as u64)?;
        let (engine, direct) = (file.engine().name(), file.is_direct());
        let mut bench = Bench::new(file)?;
        bench.fill(chunks)?;
        Ok(DiskRates {
            path: path.into(),
            free_bytes,
            engine,
            direct,
            file_bytes: (bench.chunks * CHUNK_BYTES) as u64,
            read_gbps: bench.rate(&[Queue::DiskRead])?,
            write_gbps: bench.rate(&[Queue::DiskWrite])?,
            disk_gbps: bench.rate(&[Queue::DiskRead, Queue::DiskWrite])?,
        })
    }

    pub(super) fn table(&self) -> Table {
        let way = match self.direct {
            true => "past the page cache",
            false => "through the page cache, which this file system has no way past",
        };
        let rate = |gbps: f64| Some(format!("{gbps:.2} GB/s"));
        let table = vec![
            ("free", Some(format_bytes(self.free_bytes))),
            ("engine", Some(format!("{}, {way}", self.engine))),
            ("reads", rate(self.read_gbps)),
            ("writes", rate(self.write_gbps)),
            ("both at once", rate(self.disk_gbps)),
            (
                "for plans",
                Some(format!("--set hardware.disk_gbps={:.2}", self.disk_gbps)),
            ),
        ];
        rows(&format!("disk of {}", self.path.display()), table)
    }
}

impl Bench {
    fn new(file: Arc<dyn BlockFile>) -> Result<Bench> {
        let memory = Memory::host();
        let cpu = Cpu::new(&memory, DType::F32)?;
        let pinned =
            |name| memory.lease_pinned(Category::Temporary, name, [CHUNK_BYTES], DType::U8);
        let (incoming, mut outgoing) = (pinned("incoming")?, pinned("outgoing")?);
        // Random data, because some disks store zeros and repetitions faster than states.
        cpu.upload(
            outgoing.view_mut(),
            &random_bytes(CHUNK_BYTES / 4, DType::F32),
        )?;
        Ok(Bench {
            cpu,
            file,
            incoming,
            outgoing,
            chunks: 0,
        })
    }

    /// Writes the file for the first time, or as much of it as the time allows.
    fn fill(&mut self, chunks: usize) -> Result<(), KernelError> {
        let start = Instant::now();
        while self.chunks == 0 || (self.chunks < chunks && start.elapsed() < TIME) {
            self.chunks += 1;
            self.copy(&[Queue::DiskWrite], self.chunks - 1..self.chunks)?;
        }
        Ok(())
    }

    /// Units of 10^9 bytes a second, while the queues read and write the file at the same time.
    fn rate(&mut self, queues: &[Queue]) -> Result<f64, KernelError> {
        let (start, mut rounds) = (Instant::now(), 0);
        while rounds == 0 || start.elapsed() < TIME {
            self.copy(queues, 0..self.chunks)?;
            rounds += 1;
        }
        let bytes = rounds * queues.len() * self.chunks * CHUNK_BYTES;
        Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
    }

    /// Copies chunks of the file in each of the queues. Reads go forward, writes backward.
    fn copy(
        &mut self,
        queues: &[Queue],
        chunks: std::ops::Range<usize>,
    ) -> Result<(), KernelError> {
        let offset = |chunk: usize| (chunk * CHUNK_BYTES) as u64;
        for (from_start, from_end) in chunks.clone().zip(chunks.rev()) {
            for queue in queues {
                let (cpu, file) = (&self.cpu, &self.file);
                // SAFETY: the buffers outlive the copies, are different ones, and are not used until all copies are
                // over. What reads leave in them does not matter.
                unsafe {
                    match queue {
                        Queue::DiskRead => {
                            let out = self.incoming.view_mut();
                            cpu.start_disk_read(out, file, offset(from_start))?;
                        }
                        _ => {
                            let x = self.outgoing.view();
                            cpu.start_disk_write(file, offset(from_end), x)?;
                        }
                    }
                }
            }
        }
        let cpu = &self.cpu;
        let finish = |queue: &Queue| cpu.finish(cpu.record(*queue)?);
        queues.iter().try_for_each(finish)
    }
}
