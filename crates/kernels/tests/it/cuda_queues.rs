//! In which of a device's queues the CUDA launch code starts its kernels: on a driver that runs none.

use kernels::cuda::{Cuda, Driver, Gemm, Launch, Workspace};
use kernels::{
    AdamW, DiskCopy, Exchange, Fill, Init, KernelError, MasterOperand, MomentOperand, Queue,
    Queues, Reading, SumInOrder,
};
use memory::{Buffer, Category, DType, In, Memory, Out};
use std::cell::RefCell;
use std::rc::Rc;

/// Notes the queue of every launch.
#[derive(Clone, Default)]
struct Notes(Rc<RefCell<Vec<Queue>>>);

impl Queues for Notes {}

impl Driver for Notes {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), KernelError> {
        self.0.borrow_mut().push(launch.queue);
        Ok(())
    }

    unsafe fn gemm(&self, _gemm: &Gemm, _workspace: Workspace) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn copy_to_device(&self, _to: *mut u8, _bytes: &[u8]) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn copy_to_host(&self, _bytes: &mut [u8], _from: *const u8) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn clear(&self, _to: *mut u8, _bytes: usize) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn start_copy(&self, _queue: Queue, _out: Out, _x: In) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn start_disk(&self, _copy: DiskCopy) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn start_exchange(&self, _exchange: Exchange) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn start_read(&self, _from: *const u8, bytes: usize) -> Result<Reading, KernelError> {
        Ok(Reading::done(vec![0; bytes]))
    }
}

#[test]
fn what_is_started_runs_beside_everything_else() {
    let (memory, notes) = (Memory::host(), Notes::default());
    let kernels = Cuda::new(notes.clone(), &memory, DType::F32).unwrap();
    let lease = |elements: usize, dtype| -> Buffer {
        let lease = memory.lease_persistent(Category::Temporary, "x", [elements], dtype);
        lease.unwrap()
    };
    let [mut parameters, mut first, mut second] = [(); 3].map(|()| lease(256, DType::F32));
    let (gradients, rates) = (lease(256, DType::F32), lease(3, DType::F32));
    let (clip, key) = (lease(2, DType::F32), lease(2, DType::U32));
    let mut update = |start: &dyn Fn(AdamW) -> Result<(), KernelError>| {
        let update = AdamW {
            parameters: parameters.view_mut(),
            master: MasterOperand::Parameters,
            first_moment: MomentOperand::Plain(first.view_mut()),
            second_moment: MomentOperand::Plain(second.view_mut()),
            gradients: gradients.view(),
            rates: rates.view(),
            clip: clip.view(),
            key: key.view(),
            first_index: 0,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
        };
        start(update).unwrap();
    };
    update(&|update| kernels.run(update));
    // SAFETY: nothing runs.
    update(&|update| unsafe { kernels.start(Queue::Update, update) });
    let (mut out, rows) = (lease(64, DType::F32), lease(256, DType::F32));
    let mut sum = |start: &dyn Fn(SumInOrder) -> Result<(), KernelError>| {
        let sum = SumInOrder {
            out: out.view_mut(),
            x: rows.view().reshape([4, 64]),
            init: Init::Overwrite,
        };
        start(sum).unwrap();
    };
    sum(&|sum| kernels.run(sum));
    // SAFETY: as above.
    sum(&|sum| unsafe { kernels.start(Queue::Update, sum) });
    let mut filled = lease(8, DType::F32);
    kernels
        .run(Fill {
            out: filled.view_mut(),
            value: 1.0,
        })
        .unwrap();
    let fill = Fill {
        out: filled.view_mut(),
        value: 1.0,
    };
    // SAFETY: as above.
    let refused = unsafe { kernels.start(Queue::Update, fill) }.unwrap_err();
    assert!(refused.to_string().contains("`update`"), "{refused}");
    let [here, beside] = [Queue::Compute, Queue::Update];
    let expected = [here, beside, here, beside, here];
    assert_eq!(*notes.0.borrow(), expected);
}
