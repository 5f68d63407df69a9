//! Exchanges on a CUDA device, for which one stands in that is this process's own memory.

use crate::exchanges::step::{ENDS, SEEN, SIZE, Step, lease, on_ranks, rounds, sent_bytes};
use crate::exchanges::{assert_refused, step};
use collectives::{Alone, DeviceGroup, Group, GroupError, Incoming, Outgoing};
use emulation::load_stand_in;
use fakes::Threads;
use kernels::cuda::{Cuda, CudaDevice, CudaDriver};
use kernels::{Exchange, Fault, Fill, Kernels, Queue};
use memory::{DType, Memory};
use std::ffi::c_void;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

/// How often an event is looked at before it has come.
const LATE: usize = 3;

/// The first GPU, as a rank of a group.
fn open(group: Arc<dyn Group>) -> (Memory, Kernels<Cuda<CudaDriver>>) {
    static STAND_IN: Once = Once::new();
    STAND_IN.call_once(|| {
        // SAFETY: nothing but the stand-in reads it, which is not loaded yet.
        unsafe { std::env::set_var("STAND_IN_LATE_EVENTS", LATE.to_string()) };
        load_stand_in();
    });
    let device = CudaDevice::open(0).unwrap();
    let memory = Memory::device(device.clone());
    let driver = CudaDriver::in_group(&device, group).unwrap();
    let kernels = Cuda::new(driver, &memory, DType::F32).unwrap();
    (memory, kernels)
}

/// Threads that move what is called device memory here, as NCCL does: what fails is told when somebody asks.
struct OnDevice {
    group: Arc<dyn Group>,
    /// How often somebody has asked, and from which time on all is lost.
    asked: AtomicUsize,
    fails_at: AtomicUsize,
    timeout: Mutex<Duration>,
    is_given_up: AtomicBool,
}

impl OnDevice {
    fn new(group: Arc<dyn Group>) -> OnDevice {
        OnDevice {
            group,
            asked: AtomicUsize::new(0),
            fails_at: AtomicUsize::new(usize::MAX),
            timeout: Mutex::new(Duration::from_secs(60)),
            is_given_up: AtomicBool::new(false),
        }
    }
}

impl Group for OnDevice {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn engine(&self) -> String {
        self.group.engine()
    }

    unsafe fn exchange(&self, _: &[Outgoing], _: &[Incoming]) -> Result<(), GroupError> {
        Err(GroupError::Failed("this is device memory".into()))
    }

    fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        self.group.share(bytes)
    }

    fn sent_bytes(&self) -> u64 {
        self.group.sent_bytes()
    }

    fn abort(&self, code: i32) {
        self.group.abort(code);
    }

    fn on_device(&self) -> Option<&dyn DeviceGroup> {
        Some(self)
    }
}

impl DeviceGroup for OnDevice {
    unsafe fn enqueue(
        &self,
        stream: *mut c_void,
        sends: &[Outgoing],
        receives: &[Incoming],
    ) -> Result<(), GroupError> {
        assert!(!stream.is_null(), "nothing orders what is on no stream");
        // SAFETY: the caller's promise; the stand-in has done everything that was asked for before.
        unsafe { self.group.exchange(sends, receives) }
    }

    fn check(&self) -> Result<(), GroupError> {
        match self.asked.fetch_add(1, Ordering::SeqCst) < self.fails_at.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(GroupError::Failed("rank 2 does not answer".into())),
        }
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock().unwrap()
    }

    fn give_up(&self) {
        self.is_given_up.store(true, Ordering::SeqCst);
    }

    fn device_bytes(&self) -> u64 {
        0
    }
}

#[test]
fn ranks_exchange_device_memory() {
    on_ranks(Threads::group(ENDS.len()), |group| {
        let rank = group.rank();
        let group = Arc::new(OnDevice::new(group));
        let (memory, kernels) = open(group.clone());
        assert_eq!(rounds(&kernels, &memory, rank).unwrap(), [SEEN; SIZE]);
        let sent = kernels.traffic().sent_bytes;
        assert_eq!([sent, group.sent_bytes()], [sent_bytes(rank); 2], "{rank}");
    });
}

/// Where the host waits for an event that does not come, it ends when the group says why.
#[test]
fn waiting_ends_when_a_group_has_failed() {
    let group: Arc<dyn Group> = Arc::new(Alone);
    let group = Arc::new(OnDevice::new(group));
    let (memory, kernels) = open(group.clone());
    let mut x = lease(&memory, SIZE);
    let (out, value) = (x.view_mut(), 1.0);
    kernels.run(Fill { out, value }).unwrap();
    let event = kernels.record(Queue::Compute).unwrap();
    let before = group.asked.load(Ordering::SeqCst);
    kernels.finish(event).unwrap();
    let asked = group.asked.load(Ordering::SeqCst) - before;
    assert_eq!(
        asked,
        LATE + 1,
        "each time that the event had not come, and at the end"
    );
    // From the second time that the event has not come.
    let failing = |group: &OnDevice| {
        let asked = group.asked.load(Ordering::SeqCst);
        group.fails_at.store(asked + 2, Ordering::SeqCst);
    };
    let late = |group: &OnDevice| *group.timeout.lock().unwrap() = Duration::ZERO;
    type Begin<'a> = &'a dyn Fn(&OnDevice);
    let cases: [(Begin, &str); 2] = [
        (&failing, "rank 2 does not answer"),
        (&late, "rank 0 has waited 0 s"),
    ];
    for (begin, says) in cases {
        for downloads in [false, true] {
            let group = Arc::new(OnDevice::new(Arc::new(Alone)));
            let (memory, kernels) = open(group.clone());
            let mut step = Step::new(&kernels, &memory, 0);
            begin(&group);
            let failed = match downloads {
                false => kernels.finish(kernels.record(Queue::Compute).unwrap()),
                true => kernels.download(&mut [0; SIZE * 4], step.numbers.view()),
            };
            let failed = failed.unwrap_err();
            assert_eq!(
                (failed.operation, failed.fault),
                ("exchange", Fault::Collective)
            );
            assert!(failed.message.contains(says), "{failed}");
            assert_refused(&kernels, &mut step, &failed);
            let is_given_up = group.is_given_up.load(Ordering::SeqCst);
            assert_eq!(is_given_up, group.timeout().is_zero());
        }
    }
}

/// Where the device does nothing any more the host stops after some launches, is told why when its patience ends, and can end:
/// in a process of its own, since a process has one driver.
#[test]
fn work_that_never_ends_is_told() {
    const ENDLESS: &str = "STAND_IN_ENDLESS_LAUNCH";
    if std::env::var_os(ENDLESS).is_none() {
        let test = "exchanges::cuda_device::work_that_never_ends_is_told";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env(ENDLESS, "5")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{output:?}"
        );
        return;
    }
    load_stand_in();
    let device = CudaDevice::open(0).unwrap();
    let memory = Memory::device(device.clone());
    let driver = CudaDriver::new(&device).unwrap();
    let kernels = Cuda::new(driver, &memory, DType::F32).unwrap();
    let mut x = lease(&memory, SIZE);
    device.patience().set(Duration::ZERO);
    let mut fill = || {
        let (out, value) = (x.view_mut(), 1.0);
        kernels.run(Fill { out, value })
    };
    let told = (0..2000).find_map(|_| fill().err()).unwrap();
    assert!(told.message.contains("a kernel that never ends"), "{told}");
    assert_eq!(kernels.record(Queue::Upload).unwrap_err(), told);
}

/// What a rank sends itself needs no library.
#[test]
fn a_group_of_one_copies_device_memory() {
    let (memory, kernels) = open(Arc::new(Alone));
    let (mut x, mut out) = (step::lease(&memory, 12), step::lease(&memory, 12));
    let (filled, value) = (x.view_mut(), 2.5);
    kernels.run(Fill { out: filled, value }).unwrap();
    let (first, second) = out.view_mut().split_at(5);
    let exchange = Exchange {
        sends: vec![(0, x.view().rows(0..5)), (0, x.view().rows(5..12))],
        receives: vec![(0, first), (0, second)],
    };
    // SAFETY: both live until the download, which the computation's queue makes wait for the copies.
    unsafe { kernels.start_exchange(exchange) }.unwrap();
    let copied = kernels.record(Queue::Collective).unwrap();
    kernels.wait(Queue::Compute, copied, "the copies").unwrap();
    let mut bytes = [0; 48];
    kernels.download(&mut bytes, out.view()).unwrap();
    assert!(
        bytes
            .chunks_exact(4)
            .all(|number| number == 2.5f32.to_ne_bytes())
    );
    assert_eq!(kernels.traffic().sent_bytes, 0);
}

/// Ranks that only reach each other's host memory cannot train on GPUs.
#[test]
fn an_engine_for_host_memory_alone_is_refused() {
    let (memory, kernels) = open(Threads::group(2).remove(0));
    let x = lease(&memory, 12);
    let exchange = Exchange {
        sends: vec![(1, x.view())],
        receives: Vec::new(),
    };
    // SAFETY: nothing is started.
    let refused = unsafe { kernels.start_exchange(exchange) }.unwrap_err();
    assert_eq!(refused.fault, Fault::Caller);
    assert!(
        refused.message.contains("threads moves no device memory"),
        "{refused}"
    );
}
