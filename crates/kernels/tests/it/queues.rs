//! Copies beside the computation, on worker threads and under schedules.

use fakes::scheduled::Scheduled;
use kernels::cpu::Cpu;
use kernels::{AddBias, BlockFile, Fault, Fill, KernelError, Kernels, Queue, Traffic};
use memory::{Category, DType, Memory};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const SIZE: usize = 1 << 12;
const ROUNDS: usize = 40;

/// Sends numbers through a slot of device memory and back, each time one more, as offload does. Returns what came
/// back last: [`ROUNDS`], if nothing overtook anything.
fn round_trips(kernels: &Kernels, memory: &Memory) -> Vec<f32> {
    let lease = || memory.lease_persistent(Category::Temporary, "slot", [SIZE], DType::F32);
    let pinned = || memory.lease_pinned(Category::OptimizerState, "state", [SIZE], DType::F32);
    let (mut slot, mut one, mut host) = (lease().unwrap(), lease().unwrap(), pinned().unwrap());
    kernels
        .run(Fill {
            out: one.view_mut(),
            value: 1.0,
        })
        .unwrap();
    for _ in 0..ROUNDS {
        // SAFETY: slot and host live to the end, and events order what is done with them.
        unsafe { kernels.start_upload(slot.view_mut(), host.view()) }.unwrap();
        let here = kernels.record(Queue::Upload).unwrap();
        kernels
            .wait(Queue::Compute, here, "the slot is filled")
            .unwrap();
        let mut row = slot.view_mut().reshape([1, SIZE]);
        kernels
            .run(AddBias {
                out: row.reborrow(),
                bias: one.view().into(),
            })
            .unwrap();
        let computed = kernels.record(Queue::Compute).unwrap();
        kernels
            .wait(Queue::Download, computed, "the slot is computed")
            .unwrap();
        // SAFETY: as above.
        unsafe { kernels.start_download(host.view_mut(), slot.view()) }.unwrap();
        let back = kernels.record(Queue::Download).unwrap();
        kernels
            .wait(Queue::Upload, back, "the state is back")
            .unwrap();
    }
    for queue in Queue::ALL {
        kernels.finish(kernels.record(queue).unwrap()).unwrap();
    }
    host.view().slice::<f32>().to_vec()
}

#[test]
fn worker_threads_keep_the_order_that_events_ask_for() {
    let memory = Memory::host();
    let kernels = Cpu::new(&memory, DType::F32).unwrap();
    assert_eq!(round_trips(&kernels, &memory), [ROUNDS as f32; SIZE]);
    let bytes = (ROUNDS * SIZE * 4) as u64;
    let traffic = kernels.traffic();
    assert_eq!((traffic.h2d_bytes, traffic.d2h_bytes), (bytes, bytes));
}

/// The numbers that come back, and whether events ordered all work that touches the same bytes.
fn scheduled(seed: u64, ignored: Option<&'static str>) -> (Vec<f32>, bool) {
    let memory = Memory::host();
    let cpu = Cpu::new(&memory, DType::F32).unwrap();
    let kernels = Scheduled::new(cpu, seed, ignored);
    let waits = kernels.backend().waits();
    let came_back = round_trips(&kernels, &memory);
    (came_back, waits.unordered().is_empty())
}

#[test]
fn every_schedule_keeps_the_order_and_none_does_without_one_of_the_waits() {
    for seed in 0..20 {
        let (came_back, is_ordered) = scheduled(seed, None);
        assert_eq!(came_back, [ROUNDS as f32; SIZE], "seed {seed}");
        assert!(is_ordered);
    }
    for reason in [
        "the slot is filled",
        "the slot is computed",
        "the state is back",
    ] {
        // Bits need an unlucky schedule to come out wrong; that an event is missing shows in each.
        let runs = (0..20).map(|seed| scheduled(seed, Some(reason)));
        let runs: Vec<_> = runs.collect();
        let is_wrong = |(came_back, _): &(Vec<f32>, bool)| came_back != &[ROUNDS as f32; SIZE];
        assert!(runs.iter().any(is_wrong), "nothing needs `{reason}`");
        assert!(runs.iter().all(|(_, is_ordered)| !is_ordered), "{reason}");
    }
}

/// Also where operations run later: by then nobody could be told.
#[test]
fn what_does_not_fit_is_refused_when_it_is_asked_for() {
    let memory = Memory::host();
    let kernels = Scheduled::new(Cpu::new(&memory, DType::F32).unwrap(), 0, None);
    let lease = |elements| memory.lease(Category::Temporary, "x", [elements], DType::F32);
    let (mut out, x) = (lease(8).unwrap(), lease(9).unwrap());
    let refused = kernels
        .run(kernels::Copy {
            out: out.view_mut(),
            x: x.view(),
        })
        .unwrap_err();
    assert_eq!((refused.operation, refused.fault), ("copy", Fault::Caller));
    let refused = kernels.upload(out.view_mut(), &[0; 31]).unwrap_err();
    assert_eq!(refused.operation, "upload");
    // SAFETY: nothing is started.
    let refused = unsafe { kernels.start_upload(out.view_mut(), x.view()) }.unwrap_err();
    assert_eq!(refused.operation, "start_upload");
    let refused = kernels
        .start_read(lease(kernels::READING_BYTES_MAX / 4 + 1).unwrap().view())
        .unwrap_err();
    assert_eq!(refused.operation, "start_read");
    assert_eq!(kernels.traffic(), Traffic::default());
}

/// A file in memory, one of whose reads and writes may fail.
#[derive(Debug)]
struct TestFile {
    bytes: Mutex<Vec<u8>>,
    operations: AtomicUsize,
    fails_at: usize,
}

impl TestFile {
    fn failing_at(fails_at: usize) -> Arc<TestFile> {
        Arc::new(TestFile {
            bytes: Mutex::new(vec![0; OFFSET as usize + SIZE * 4]),
            operations: AtomicUsize::new(0),
            fails_at,
        })
    }

    fn next(&self) -> io::Result<()> {
        match self.operations.fetch_add(1, Ordering::SeqCst) == self.fails_at {
            true => Err(ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }
}

impl BlockFile for TestFile {
    fn path(&self) -> &Path {
        Path::new("/a disk/state")
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.next()?;
        bytes.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..bytes.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.next()?;
        self.bytes.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

const OFFSET: u64 = 512;

const NEVER: usize = usize::MAX;

const DISK_REASONS: [&str; 5] = [
    "the bytes are read",
    "the slot is filled",
    "the slot is computed",
    "the slot is back",
    "the file is written",
];

/// Sends the numbers of a file through staging buffers and the device and back, each time one more. Both buffers are free
/// again when a round's numbers are written, for which the next one waits.
fn disk_round_trips(
    kernels: &Kernels,
    memory: &Memory,
    file: &Arc<TestFile>,
) -> Result<(), KernelError> {
    let file: Arc<dyn BlockFile> = file.clone();
    let [read, filled, computed, back, written] = DISK_REASONS;
    let lease = || memory.lease_persistent(Category::Temporary, "slot", [SIZE], DType::F32);
    let pinned = || memory.lease_pinned(Category::OptimizerState, "staging", [SIZE], DType::F32);
    let (mut slot, mut one) = (lease().unwrap(), lease().unwrap());
    let (mut incoming, mut outgoing) = (pinned().unwrap(), pinned().unwrap());
    let after = |queue, event, reason| kernels.wait(queue, kernels.record(event)?, reason);
    kernels.run(Fill {
        out: one.view_mut(),
        value: 1.0,
    })?;
    for _ in 0..ROUNDS {
        // SAFETY: memory lives to the end, and events order what is done with it.
        unsafe { kernels.start_disk_read(incoming.view_mut(), &file, OFFSET) }?;
        after(Queue::Upload, Queue::DiskRead, read)?;
        // SAFETY: as above.
        unsafe { kernels.start_upload(slot.view_mut(), incoming.view()) }?;
        after(Queue::Compute, Queue::Upload, filled)?;
        kernels.run(AddBias {
            out: slot.view_mut().reshape([1, SIZE]),
            bias: one.view().into(),
        })?;
        after(Queue::Download, Queue::Compute, computed)?;
        // SAFETY: as above.
        unsafe { kernels.start_download(outgoing.view_mut(), slot.view()) }?;
        after(Queue::DiskWrite, Queue::Download, back)?;
        // SAFETY: as above.
        unsafe { kernels.start_disk_write(&file, OFFSET, outgoing.view()) }?;
        after(Queue::DiskRead, Queue::DiskWrite, written)?;
    }
    for queue in Queue::ALL {
        kernels.finish(kernels.record(queue)?)?;
    }
    Ok(())
}

fn numbers_of(file: &TestFile) -> Vec<f32> {
    let bytes = file.bytes.lock().unwrap();
    let numbers = bytes[OFFSET as usize..].chunks_exact(4);
    numbers
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

#[test]
fn disk_queues_keep_the_order_that_events_ask_for() {
    let memory = Memory::host();
    let kernels = Cpu::new(&memory, DType::F32).unwrap();
    let file = TestFile::failing_at(NEVER);
    disk_round_trips(&kernels, &memory, &file).unwrap();
    assert_eq!(numbers_of(&file), [ROUNDS as f32; SIZE]);
    let bytes = (ROUNDS * SIZE * 4) as u64;
    let expected = Traffic {
        h2d_bytes: bytes,
        d2h_bytes: bytes,
        sent_bytes: 0,
        disk_read_bytes: bytes,
        disk_written_bytes: bytes,
    };
    assert_eq!(kernels.traffic(), expected);
}

#[test]
fn every_schedule_of_disk_queues_keeps_the_order_and_none_does_without_one_of_the_waits() {
    let ends_wrong = |seed, ignored| {
        let memory = Memory::host();
        let cpu = Cpu::new(&memory, DType::F32).unwrap();
        let kernels = Scheduled::new(cpu, seed, ignored);
        let file = TestFile::failing_at(NEVER);
        disk_round_trips(&kernels, &memory, &file).unwrap();
        numbers_of(&file) != [ROUNDS as f32; SIZE]
    };
    for seed in 0..20 {
        assert!(!ends_wrong(seed, None), "seed {seed}");
    }
    for reason in DISK_REASONS {
        let found = (0..20).any(|seed| ends_wrong(seed, Some(reason)));
        assert!(found, "nothing needs `{reason}`");
    }
}

/// Whichever read or write fails: everything that is asked for later is refused by its name, and nobody waits for ever.
#[test]
fn a_file_that_fails_is_told_by_every_later_call() {
    for fails_at in [0, 1, 2, 2 * ROUNDS - 1] {
        let memory = Memory::host();
        let cpu = || Cpu::new(&memory, DType::F32).unwrap();
        let devices: [Box<Kernels>; 3] = [
            Box::new(cpu()),
            Box::new(Scheduled::new(cpu(), 1, None)),
            Box::new(Scheduled::new(cpu(), 2, None)),
        ];
        for kernels in devices {
            let file = TestFile::failing_at(fails_at);
            let failed = disk_round_trips(&*kernels, &memory, &file).unwrap_err();
            assert_eq!(failed.fault, Fault::Disk);
            let text = failed.to_string();
            let verb = ["cannot read", "cannot write"][fails_at % 2];
            for part in [
                verb,
                "16384 bytes at 512 of /a disk/state",
                "no storage space",
            ] {
                assert!(text.contains(part), "{text}");
            }
            let operations = file.operations.load(Ordering::SeqCst);
            assert_eq!(operations, fails_at + 1, "nothing is read or written later");
            for queue in Queue::ALL {
                assert_eq!(kernels.record(queue).unwrap_err(), failed);
            }
            let past = kernels::Event::PAST;
            assert_eq!(kernels.finish(past).unwrap_err(), failed);
            let waited = kernels.wait(Queue::Compute, past, "nothing");
            assert_eq!(waited.unwrap_err(), failed);
            let mut x = memory
                .lease(Category::Temporary, "x", [4], DType::F32)
                .unwrap();
            let mut host = memory
                .lease_pinned(Category::Temporary, "x", [4], DType::F32)
                .unwrap();
            assert_eq!(
                kernels.download(&mut [0; 16], x.view()).unwrap_err(),
                failed
            );
            // SAFETY: nothing is started.
            let started = unsafe { kernels.start_upload(x.view_mut(), host.view()) };
            assert_eq!(started.unwrap_err(), failed);
            let file: Arc<dyn BlockFile> = file;
            // SAFETY: as above.
            let started = unsafe { kernels.start_disk_read(host.view_mut(), &file, 0) };
            assert_eq!(started.unwrap_err(), failed);
        }
    }
}
