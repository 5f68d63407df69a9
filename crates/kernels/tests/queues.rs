//! Copies beside the computation, on worker threads and under schedules.

use kernels::cpu::Cpu;
use kernels::scheduled::Scheduled;
use kernels::{AddBias, Fault, Fill, Kernels, Queue, Queues, Run, Traffic};
use memory::{Category, DType, Memory};

const SIZE: usize = 1 << 12;
const ROUNDS: usize = 40;

/// Sends numbers through a slot of device memory and back, each time one more, as offload does. Returns what came
/// back last: [`ROUNDS`], if nothing overtook anything.
fn round_trips(kernels: &dyn Kernels, memory: &Memory) -> Vec<f32> {
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
                bias: one.view(),
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

fn scheduled(seed: u64, ignored: Option<&'static str>) -> Vec<f32> {
    let memory = Memory::host();
    let cpu = Cpu::new(&memory, DType::F32).unwrap();
    round_trips(&Scheduled::new(cpu, seed, ignored), &memory)
}

#[test]
fn every_schedule_keeps_the_order_and_none_does_without_one_of_the_waits() {
    for seed in 0..20 {
        assert_eq!(scheduled(seed, None), [ROUNDS as f32; SIZE], "seed {seed}");
    }
    for reason in [
        "the slot is filled",
        "the slot is computed",
        "the state is back",
    ] {
        let is_wrong = |seed: &u64| scheduled(*seed, Some(reason)) != [ROUNDS as f32; SIZE];
        assert!(
            (0..20).any(|seed| is_wrong(&seed)),
            "nothing needs `{reason}`"
        );
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
    let refused = kernels.start_read(lease(17).unwrap().view()).unwrap_err();
    assert_eq!(refused.operation, "start_read");
    assert_eq!(kernels.traffic(), Traffic::default());
}
