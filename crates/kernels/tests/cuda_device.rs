//! Memory, copies, times and long sums of a CUDA device: the machine's own where it has a driver, or else the one that
//! stands in; with `CONFORMANCE_DEVICES=gpu`, as on a machine that verifies a GPU, none stands in.
#![cfg(feature = "cuda")]

use emulation::load_stand_in;
use kernels::cuda::{Cuda, CudaDevice, CudaDriver, PRODUCT_ELEMENTS_MAX};
use kernels::random::random_u32;
use kernels::{
    AddBias, BlockFile, Fault, Fill, Init, KernelError, Kernels, Matmul, Queue, Section,
};
use memory::{Blocks, Buffer, Category, DType, DeviceMarks, In, Memory, Out};
use std::io::{self, ErrorKind};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};

const MIB: usize = 1 << 20;

/// Tests run side by side in one process: none may look for a driver while another has loaded half of the stand-in.
static DRIVER: Once = Once::new();

/// The first GPU, with 32 MiB of its memory leased as a workspace.
fn open() -> (Rc<CudaDevice>, Memory, Kernels<Cuda<CudaDriver>>) {
    DRIVER.call_once(|| {
        // A process finds one driver, so it cannot be asked whether it has a device.
        let devices = ["/dev/nvidiactl", "/dev/dxg"].map(std::path::Path::new);
        let named = std::env::var("CONFORMANCE_DEVICES").unwrap_or_default();
        let is_named = named.split(',').any(|device| device == "gpu");
        if !is_named && !devices.iter().any(|device| device.exists()) {
            load_stand_in();
        }
    });
    let device = CudaDevice::open(0).unwrap();
    let memory = Memory::device(device.clone());
    let driver = CudaDriver::new(&device).unwrap();
    let kernels = Cuda::new(driver, &memory, DType::F32).unwrap();
    (device, memory, kernels)
}

fn marks(memory: &Memory) -> DeviceMarks {
    memory.step_memory().device.unwrap()
}

/// Copies go through a ring of 16 buffers of 1 MiB: sizes around one, and around all of them.
#[test]
fn what_is_uploaded_is_there_and_the_source_may_change() {
    let (_device, memory, kernels) = open();
    for bytes in [4, MIB - 4, MIB, MIB + 4, 16 * MIB, 33 * MIB + 4] {
        let lease = memory.lease(Category::Temporary, "x", [bytes / 4], DType::F32);
        let mut x = lease.unwrap();
        let numbers: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
        let mut source = numbers.clone();
        kernels.upload(x.view_mut(), &source).unwrap();
        source.fill(0);
        let mut back = vec![0; bytes];
        kernels.download(&mut back, x.view()).unwrap();
        assert!(back == numbers, "{bytes} bytes");
    }
}

#[test]
fn blocks_are_zero_whatever_was_there() {
    let (_device, memory, kernels) = open();
    for _ in 0..3 {
        let lease = memory.lease_persistent(Category::Parameter, "x", [3 * MIB], DType::F32);
        let mut x = lease.unwrap();
        let mut bytes = vec![1; 12 * MIB];
        kernels.download(&mut bytes, x.view()).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        kernels
            .run(Fill {
                out: x.view_mut(),
                value: f32::NAN,
            })
            .unwrap();
    }
}

/// Used bytes are those of the blocks, reserved ones whole pages; both marks start again at what is there.
#[test]
fn marks_are_those_of_the_blocks() {
    let (device, memory, kernels) = open();
    let lease = |name, mebibytes: usize| {
        let elements = [mebibytes * MIB / 4];
        memory
            .lease_persistent(Category::Parameter, name, elements, DType::F32)
            .unwrap()
    };
    let of = |mebibytes: usize| (mebibytes * MIB) as u64;
    let kept = lease("kept", 4);
    let high = lease("high", 10);
    assert_eq!(marks(&memory).device_used_high_bytes, of(46));
    drop(high);
    memory.begin_step();
    assert_eq!(marks(&memory).device_used_high_bytes, of(36));
    assert_eq!(marks(&memory).driver_allocations, 0);

    let before = kernels.traffic();
    let mut x = lease("x", 2);
    kernels.upload(x.view_mut(), &vec![0; 2 * MIB]).unwrap();
    kernels.download(&mut vec![0; 2 * MIB], x.view()).unwrap();
    drop(x);
    let step = marks(&memory);
    assert_eq!(step.device_used_high_bytes, of(38));
    assert_eq!(step.driver_allocations, 1);
    let crossed = kernels.traffic().since(before);
    assert_eq!((crossed.h2d_bytes, crossed.d2h_bytes), (of(2), of(2)));
    let bytes = device.memory_bytes().unwrap();
    assert!(step.device_reserved_high_bytes >= bytes.held && bytes.held >= of(38));
    assert!(bytes.total >= bytes.free + bytes.held);
    drop(kept);
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_nothing_behind() {
    let (device, memory, _kernels) = open();
    let total = device.memory_bytes().unwrap().total;
    let elements = [total as usize / 4];
    let refused = memory.lease_persistent(Category::Parameter, "x", elements, DType::F32);
    let refused = refused.err().unwrap();
    assert_eq!(refused.device_bytes.unwrap().total, total);
    assert_eq!(refused.cause, memory::Cause::Capacity);
    memory
        .lease_persistent(Category::Parameter, "x", [MIB], DType::F32)
        .unwrap();
}

/// Times with the function that every driver has.
#[test]
fn stamps_tell_the_time_between_them() {
    let (device, memory, kernels) = open();
    let lease = memory.lease(Category::Temporary, "x", [MIB], DType::F32);
    let mut x = lease.unwrap();
    let stamp = || device.stamp().unwrap();
    let first = stamp();
    kernels
        .run(Fill {
            out: x.view_mut(),
            value: 1.0,
        })
        .unwrap();
    let [second, third] = [stamp(), stamp()];
    let between = |from, to| device.elapsed(from, to).unwrap();
    assert!(between(first, second).as_nanos() > 0);
    assert!(between(first, third) >= between(first, second));
}

#[test]
fn launches_are_timed_by_events_of_the_device() {
    let (device, memory, kernels) = open();
    let lease = memory.lease(Category::Temporary, "x", [MIB], DType::F32);
    let mut x = lease.unwrap();
    let fill = || {
        let (out, value) = (x.view_mut(), 1.0);
        kernels.run(Fill { out, value })
    };
    let time = device.timed(Queue::Compute, fill).unwrap();
    assert!(!time.is_zero());
    let refused = || Err(KernelError::device("work", "refused"));
    let error = device.timed(Queue::Compute, refused).unwrap_err();
    assert_eq!(error.operation, "work");
}

#[test]
fn all_kernels_can_be_loaded() {
    let (device, _memory, kernels) = open();
    device.load_kernels().unwrap();
    drop(kernels);
    device.load_kernels().unwrap();
}

/// A small matrix of long sums, which may be split over blocks. Sums of small whole numbers are exact in any order;
/// those of others have the same bits again.
#[test]
fn long_sums_are_right_and_the_same_again() {
    let (_device, memory, kernels) = open();
    let [m, k, n] = [40, 16384, 24];
    let product = |a: &[f32], b: &[f32]| {
        let tensor = |values: &[f32], dims: [usize; 2]| {
            // The upper half of an f32 is a bf16.
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|value| value.to_le_bytes()[2..].to_vec())
                .collect();
            let lease = memory.lease(Category::Temporary, "x", dims, DType::BF16);
            let mut tensor = lease.unwrap();
            kernels.upload(tensor.view_mut(), &bytes).unwrap();
            tensor
        };
        // Weight gradients: both operands lie transposed.
        let (a, b) = (tensor(a, [k, m]), tensor(b, [k, n]));
        let lease = memory.lease(Category::Temporary, "out", [m, n], DType::F32);
        let mut out = lease.unwrap();
        kernels
            .run(Matmul {
                out: out.view_mut(),
                a: a.view().t(),
                b: b.view(),
                bias: None,
                init: Init::Overwrite,
            })
            .unwrap();
        let mut bytes = vec![0; 4 * m * n];
        kernels.download(&mut bytes, out.view()).unwrap();
        bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect::<Vec<f32>>()
    };
    let numbers = |key: u64, count: usize, number: fn(u32) -> f32| -> Vec<f32> {
        (0..count as u64)
            .map(|index| number(random_u32(key, index)))
            .collect()
    };
    let whole = |bits: u32| (bits % 5) as f32 - 2.0;
    let (a, b) = (numbers(1, k * m, whole), numbers(2, k * n, whole));
    let out = product(&a, &b);
    for (row, column) in [(0, 0), (1, 7), (m - 1, n - 1)] {
        let sum: f32 = (0..k)
            .map(|depth| a[depth * m + row] * b[depth * n + column])
            .sum();
        assert_eq!(out[row * n + column], sum);
    }
    let any = |bits: u32| bits as i32 as f32 / (1u64 << 31) as f32;
    let (a, b) = (numbers(3, k * m, any), numbers(4, k * n, any));
    assert_eq!(product(&a, &b), product(&a, &b));
}

/// A product and its gradients, cut: on a GPU where its output has more than 2^31 elements (16 GB in f32), on the library that
/// stands in at fewer. All sums are of small whole numbers, which are exact in any order.
#[test]
fn beyond_int32() {
    let (device, memory, kernels) = open();
    let is_emulated = device.facts().name == "Stand-in GPU";
    let (elements_max, [tokens, outputs, inputs]) = match is_emulated {
        true => (1 << 14, [384, 64, 16]),
        false => (PRODUCT_ELEMENTS_MAX, [65_536, 37_888, 256]),
    };
    assert!(tokens * outputs > elements_max);
    let kernels = kernels.cutting_products(elements_max);
    // Each output is plus or minus one of the inputs.
    let input = |token, index| (random_u32(1, (token * inputs + index) as u64) % 3) as f32 - 1.0;
    let sign = |output| if output / inputs % 2 == 0 { 1.0 } else { -1.0 };
    let weight = |output, index| {
        if output % inputs == index {
            sign(output)
        } else {
            0.0
        }
    };
    let product = |out: Out, a: In, b: In| {
        let (bias, init) = (None, Init::Overwrite);
        kernels
            .run(Matmul {
                out,
                a,
                b,
                bias,
                init,
            })
            .unwrap();
    };
    for dtype in [DType::BF16, DType::F32] {
        let size = dtype.size_in_bytes();
        let room = |dims: [usize; 2]| memory.lease(Category::Temporary, "x", dims, dtype).unwrap();
        let tensor = |rows: usize, value: &dyn Fn(usize, usize) -> f32| {
            let all = (0..rows).flat_map(|row| (0..inputs).map(move |index| (row, index)));
            // The upper half of an f32 is a bf16.
            let bytes: Vec<u8> = all
                .flat_map(|(row, index)| value(row, index).to_le_bytes()[4 - size..].to_vec())
                .collect();
            let mut tensor = room([rows, inputs]);
            kernels.upload(tensor.view_mut(), &bytes).unwrap();
            tensor
        };
        let rows = |of: &Buffer, row: usize| -> Vec<f32> {
            let view = of.view().rows(row..row + 1);
            let mut bytes = vec![0; view.bytes()];
            kernels.download(&mut bytes, view).unwrap();
            let number = |bytes: &[u8]| {
                let mut whole = [0; 4];
                whole[4 - size..].copy_from_slice(bytes);
                f32::from_le_bytes(whole)
            };
            bytes.chunks_exact(size).map(number).collect()
        };
        let (x, w) = (tensor(tokens, &input), tensor(outputs, &weight));
        let [mut y, mut dx] = [outputs, inputs].map(|width| room([tokens, width]));
        let dw = memory.lease(Category::Temporary, "dw", [outputs, inputs], DType::F32);
        let mut dw = dw.unwrap();
        product(y.view_mut(), x.view(), w.view().t());
        product(dx.view_mut(), y.view(), w.view());
        product(dw.view_mut(), y.view().t(), x.view());
        let border = elements_max / outputs;
        for token in [0, border - 1, border, border + 1, tokens - 1] {
            let of_y = (0..outputs).map(|output| sign(output) * input(token, output % inputs));
            assert!(rows(&y, token).into_iter().eq(of_y), "{dtype:?}, {token}");
            let repeated = (outputs / inputs) as f32;
            let of_dx = (0..inputs).map(|index| repeated * input(token, index));
            assert!(rows(&dx, token).into_iter().eq(of_dx), "{dtype:?}, {token}");
        }
        let mut bytes = vec![0; dw.bytes() as usize];
        kernels.download(&mut bytes, dw.view()).unwrap();
        for output in [0, inputs + 1, outputs - 1] {
            let of_dw = (0..inputs).map(|index| -> f32 {
                let terms =
                    (0..tokens).map(|token| input(token, output % inputs) * input(token, index));
                sign(output) * terms.sum::<f32>()
            });
            let row = bytes.chunks_exact(4 * inputs).nth(output).unwrap();
            let row = row
                .chunks_exact(4)
                .map(|number| f32::from_le_bytes(number.try_into().unwrap()));
            assert!(row.eq(of_dw), "{dtype:?}, {output}");
        }
    }
}

/// A slow file in memory, one of whose reads and writes may fail.
#[derive(Debug)]
struct SlowFile {
    bytes: Mutex<Vec<u8>>,
    operations: AtomicUsize,
    fails_at: usize,
}

impl SlowFile {
    fn next(&self) -> io::Result<()> {
        std::thread::sleep(std::time::Duration::from_millis(1));
        match self.operations.fetch_add(1, Ordering::SeqCst) == self.fails_at {
            true => Err(ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }
}

impl BlockFile for SlowFile {
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

const STATES: usize = 1 << 16;

const ROUNDS: usize = 50;

/// Sends the numbers of a file to the device and back, each time one more. The processor never waits before the end, so
/// it is far ahead of the disk.
fn disk_round_trips(
    kernels: &Kernels,
    memory: &Memory,
    file: &Arc<dyn BlockFile>,
) -> Result<(), KernelError> {
    let lease = || memory.lease_persistent(Category::Temporary, "slot", [STATES], DType::F32);
    let pinned = || memory.lease_pinned(Category::OptimizerState, "staging", [STATES], DType::F32);
    let (mut slot, mut one) = (lease().unwrap(), lease().unwrap());
    let (mut incoming, mut outgoing) = (pinned().unwrap(), pinned().unwrap());
    let after = |queue, event| kernels.wait(queue, kernels.record(event)?, "the one before");
    kernels.run(Fill {
        out: one.view_mut(),
        value: 1.0,
    })?;
    for _ in 0..ROUNDS {
        // SAFETY: memory lives to the end, and events order what is done with it.
        unsafe { kernels.start_disk_read(incoming.view_mut(), file, 512) }?;
        after(Queue::Upload, Queue::DiskRead)?;
        // SAFETY: as above.
        unsafe { kernels.start_upload(slot.view_mut(), incoming.view()) }?;
        after(Queue::Compute, Queue::Upload)?;
        kernels.run(AddBias {
            out: slot.view_mut().reshape([1, STATES]),
            bias: one.view().into(),
        })?;
        after(Queue::Download, Queue::Compute)?;
        // SAFETY: as above.
        unsafe { kernels.start_download(outgoing.view_mut(), slot.view()) }?;
        after(Queue::DiskWrite, Queue::Download)?;
        // SAFETY: as above.
        unsafe { kernels.start_disk_write(file, 512, outgoing.view()) }?;
        after(Queue::DiskRead, Queue::DiskWrite)?;
    }
    for queue in Queue::ALL {
        kernels.finish(kernels.record(queue)?)?;
    }
    Ok(())
}

#[test]
fn streams_and_the_disk_wait_for_one_another() {
    for fails_at in [usize::MAX, 0, 7, 2 * ROUNDS - 1] {
        let (_device, memory, kernels) = open();
        let slow = Arc::new(SlowFile {
            bytes: Mutex::new(vec![0; 512 + STATES * 4]),
            operations: AtomicUsize::new(0),
            fails_at,
        });
        let file: Arc<dyn BlockFile> = slow.clone();
        let outcome = disk_round_trips(&kernels, &memory, &file);
        if fails_at < 2 * ROUNDS {
            let failed = outcome.unwrap_err();
            assert_eq!(failed.fault, Fault::Disk);
            assert!(failed.message.contains("/a disk/state"), "{failed}");
            let operations = slow.operations.load(Ordering::SeqCst);
            assert_eq!(operations, fails_at + 1, "nothing is read or written later");
            for queue in Queue::ALL {
                assert_eq!(kernels.record(queue).unwrap_err(), failed);
            }
            let x = memory
                .lease(Category::Temporary, "x", [4], DType::F32)
                .unwrap();
            assert_eq!(
                kernels.download(&mut [0; 16], x.view()).unwrap_err(),
                failed
            );
            continue;
        }
        outcome.unwrap();
        let bytes = slow.bytes.lock().unwrap();
        let all = bytes[512..].chunks_exact(4);
        let right = (ROUNDS as f32).to_le_bytes();
        assert!(all.into_iter().all(|number| number == right));
    }
}

const WIDTH: usize = 1000;

/// What comes to the device, is added to, and goes back.
struct Round {
    device: Rc<CudaDevice>,
    memory: Memory,
    kernels: Kernels<Cuda<CudaDriver>>,
    x: Buffer,
    /// Another of its size, for the same round elsewhere.
    other: Buffer,
    ones: Buffer,
    comes: Buffer,
    goes: Buffer,
}

impl Round {
    fn new() -> Round {
        let (device, memory, kernels) = open();
        let lease = |name| memory.lease_persistent(Category::Temporary, name, [WIDTH], DType::F32);
        let pinned = |name| memory.lease_pinned(Category::Input, name, [WIDTH], DType::F32);
        let mut ones = lease("ones").unwrap();
        let fill = Fill {
            out: ones.view_mut(),
            value: 1.0,
        };
        kernels.run(fill).unwrap();
        Round {
            x: lease("x").unwrap(),
            other: lease("other").unwrap(),
            comes: pinned("comes").unwrap(),
            goes: pinned("goes").unwrap(),
            ones,
            device,
            memory,
            kernels,
        }
    }

    /// Adds one to what is in pinned memory, by three queues.
    fn ask(&mut self, elsewhere: bool) -> Result<(), KernelError> {
        let kernels = &self.kernels;
        let after = |queue, event| kernels.wait(queue, kernels.record(event)?, "the one before");
        let x = match elsewhere {
            false => &mut self.x,
            true => &mut self.other,
        };
        after(Queue::Upload, Queue::Compute)?;
        // SAFETY: everything lives to the end, and events order what is done with it.
        unsafe { kernels.start_upload(x.view_mut(), self.comes.view()) }?;
        after(Queue::Compute, Queue::Upload)?;
        kernels.run(AddBias {
            out: x.view_mut().reshape([1, WIDTH]),
            bias: self.ones.view().into(),
        })?;
        after(Queue::Download, Queue::Compute)?;
        // SAFETY: as above.
        unsafe { kernels.start_download(self.goes.view_mut(), x.view()) }
    }

    /// Waits for a queue, and takes what went to pinned memory.
    fn take(&mut self) -> f32 {
        let event = self.kernels.record(Queue::Download).unwrap();
        self.kernels.finish(event).unwrap();
        let went = self.goes.view_mut().slice_mut::<f32>();
        let first = went[0];
        assert!(went.iter().all(|value| *value == first), "{went:?}");
        went.fill(f32::NAN);
        first
    }

    fn give(&mut self, value: f32) {
        self.comes.view_mut().slice_mut::<f32>().fill(value);
    }
}

/// Three times a graph, once elsewhere, and again where it was: what comes out is what was asked for. Within a section no
/// stamp is put, and nothing is done before it ends.
#[test]
fn a_section_does_what_its_calls_do_wherever_they_are() {
    let mut round = Round::new();
    let section = Section([1, WIDTH, 0]);
    for (number, elsewhere) in [false, false, false, true, false, false]
        .into_iter()
        .enumerate()
    {
        round.give(number as f32);
        let before = round.kernels.traffic();
        round.kernels.begin_section(section).unwrap();
        round.ask(elsewhere).unwrap();
        assert_eq!(round.device.stamp().is_none(), !elsewhere, "{number}");
        round.kernels.end_section(true).unwrap();
        assert_eq!(round.take(), number as f32 + 1.0);
        let crossed = round.kernels.traffic().since(before);
        let bytes = 4 * WIDTH as u64;
        assert_eq!((crossed.h2d_bytes, crossed.d2h_bytes), (bytes, bytes));
        assert!(round.device.stamp().is_some());
    }
    assert_eq!(round.kernels.section_refusal(), None);
}

/// A caller who waits within a section, or breaks it off, finds done what was asked for.
#[test]
fn a_section_that_is_waited_for_or_broken_off_is_carried_out() {
    let mut round = Round::new();
    for (number, is_known) in [false, true].into_iter().enumerate() {
        let waited_for = Section([2, number, 0]);
        let broken_off = Section([3, number, 0]);
        let kinds = [waited_for, broken_off];
        for section in kinds.into_iter().filter(|_| is_known) {
            round.give(7.0);
            round.kernels.begin_section(section).unwrap();
            round.ask(false).unwrap();
            round.kernels.end_section(true).unwrap();
            assert_eq!(round.take(), 8.0);
        }
        round.give(20.0);
        round.kernels.begin_section(waited_for).unwrap();
        round.ask(false).unwrap();
        assert_eq!(round.take(), 21.0);
        round.give(30.0);
        round.ask(false).unwrap();
        round.kernels.end_section(true).unwrap();
        assert_eq!(round.take(), 31.0);

        round.give(40.0);
        round.kernels.begin_section(broken_off).unwrap();
        round.ask(false).unwrap();
        round.kernels.end_section(false).unwrap();
        assert_eq!(round.take(), 41.0);
    }
}

/// It may go before a section and after it, and in one whose calls are made as they come.
#[test]
fn no_block_of_memory_goes_while_calls_are_kept_back() {
    let mut round = Round::new();
    let memory = round.memory.clone();
    let goes = || {
        let lease = memory.lease_persistent(Category::Temporary, "goes", [WIDTH], DType::F32);
        std::panic::catch_unwind(AssertUnwindSafe(|| drop(lease.unwrap())))
    };
    goes().unwrap();
    round.give(7.0);
    round.kernels.begin_section(Section([4, 0, 0])).unwrap();
    round.ask(false).unwrap();
    let panic = goes().unwrap_err();
    let message = panic.downcast_ref::<&str>().unwrap();
    assert!(message.contains("goes within a section"), "{message}");
    assert_eq!(round.take(), 8.0);
    goes().unwrap();
    round.kernels.end_section(true).unwrap();
    goes().unwrap();
}
