//! The tensors of an operation, leased and filled when it is first built, and the same when it is built again.

use crate::models::ModelShapes;
use kernels::cuda::{Cuda, CudaDriver};
use kernels::random::random_u32;
use kernels::{KernelError, Kernels, Result};
use memory::DType::{BF16, F8E4M3, F8E5M2, F32, F64, I32, U8, U32};
use memory::{Buffer, Category, DType, Dims, In, Memory, Out};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

pub type CudaKernels = Kernels<Cuda<CudaDriver>>;

/// 4 times a prime, so that rows of a matrix are not alike.
const PERIOD: usize = 4 * 65_521;

pub struct CaseTensors {
    memory: Memory,
    /// Fills what is leased; none where nothing is computed.
    gpu: Option<Rc<CudaKernels>>,
    leased: RefCell<Vec<Buffer>>,
    next: Cell<usize>,
    failure: RefCell<Option<KernelError>>,
}

impl CaseTensors {
    pub fn new(memory: &Memory, gpu: Option<Rc<CudaKernels>>) -> CaseTensors {
        CaseTensors {
            memory: memory.clone(),
            gpu,
            leased: RefCell::default(),
            next: Cell::default(),
            failure: RefCell::default(),
        }
    }

    /// Starts again with the first tensor: the same requests in the same order get the same tensors.
    ///
    /// # Errors
    /// [`KernelError`] if something could not be filled.
    pub fn rewind(&mut self) -> Result {
        self.next.set(0);
        self.failure.take().map_or(Ok(()), Err)
    }

    fn lease(
        &self,
        dtype: DType,
        dims: impl Into<Dims>,
        fill: impl FnOnce() -> Vec<u8>,
    ) -> Out<'_> {
        let at = self.next.replace(self.next.get() + 1);
        let mut leased = self.leased.borrow_mut();
        if at == leased.len() {
            let lease = self
                .memory
                .lease_persistent(Category::Temporary, "operand", dims, dtype);
            let mut buffer = lease.expect("there was room, and nothing else leases");
            let pattern = self.gpu.as_ref().map(|_| fill()).unwrap_or_default();
            if let (Some(gpu), false) = (&self.gpu, pattern.is_empty()) {
                let filled = gpu.fill_with(buffer.view_mut(), &pattern);
                self.failure.replace(self.failure.take().or(filled.err()));
            }
            leased.push(buffer);
        }
        // SAFETY: a buffer goes with `self`, and is handed out once before `rewind`, which waits for all views to be gone.
        unsafe { leased[at].view_mut().outliving() }
    }

    /// Zeros, to be written.
    pub fn out(&self, dtype: DType, dims: impl Into<Dims>) -> Out<'_> {
        self.lease(dtype, dims, Vec::new)
    }

    /// Random numbers from -1 to 1, or codes of which none is a NaN, to be read and written.
    pub fn changed(&self, dtype: DType, dims: impl Into<Dims>) -> Out<'_> {
        self.lease(dtype, dims, || random(dtype))
    }

    /// Random numbers, to be read.
    pub fn input(&self, dtype: DType, dims: impl Into<Dims>) -> In<'_> {
        self.changed(dtype, dims).into_in()
    }

    /// One number, f32 or f64, everywhere.
    pub fn full(&self, dtype: DType, dims: impl Into<Dims>, value: f64) -> In<'_> {
        let pattern = || match dtype {
            F64 => value.to_le_bytes().into(),
            F32 => (value as f32).to_le_bytes().into(),
            other => unreachable!("{other:?} is filled with random numbers alone"),
        };
        self.lease(dtype, dims, pattern).into_in()
    }

    /// Random numbers below `end`.
    pub fn ids(&self, dims: impl Into<Dims>, end: usize) -> In<'_> {
        let ids = (0..PERIOD as u64).map(|at| (random_u32(1, at) as usize % end) as i32);
        self.lease(I32, dims, || ids.flat_map(i32::to_le_bytes).collect())
            .into_in()
    }

    pub fn key(&self) -> In<'_> {
        self.out(U32, [2]).into_in()
    }

    /// Queries, keys and values.
    pub fn qkv(&self, model: &ModelShapes) -> [In<'_>; 3] {
        model
            .qkv_widths()
            .map(|width| self.input(BF16, [model.tokens(), width]))
    }

    /// One of the tables of `GroupByExpert`. `place` counts them: ids, offsets, row_token, row_slot, slot_row.
    pub fn grouped(&self, model: &ModelShapes, place: usize) -> Option<In<'_>> {
        let (tokens, [experts, choices]) = (model.tokens(), model.experts?);
        let rows = tokens * choices;
        let by_token: Dims = [tokens, choices].into();
        let dims: [Dims; 5] = [
            by_token,
            [experts + 1].into(),
            [rows].into(),
            [rows].into(),
            by_token,
        ];
        let bytes = || {
            grouped(tokens, [experts, choices])[place]
                .iter()
                .flat_map(|number| number.to_le_bytes())
                .collect()
        };
        Some(self.lease(I32, dims[place], bytes).into_in())
    }
}

/// The shape of a tensor, for another like it.
pub fn dims(x: &In) -> Dims {
    Dims::try_from(x.dims()).expect("a view has the dimensions of a tensor")
}

fn random(dtype: DType) -> Vec<u8> {
    let bits = (0..PERIOD as u64).map(|at| random_u32(0, at));
    let unit = |bits: u32| bits as i32 as f32 / (1u64 << 31) as f32;
    match dtype {
        // The upper half of an f32 is a bf16.
        BF16 => bits
            .flat_map(|bits| [2, 3].map(|byte| unit(bits).to_le_bytes()[byte]))
            .collect(),
        F32 => bits.flat_map(|bits| unit(bits).to_le_bytes()).collect(),
        // Without the upper bit of the exponent.
        F8E4M3 | F8E5M2 => bits.map(|bits| bits as u8 & 0xbf).collect(),
        U8 => bits.map(|bits| bits as u8).collect(),
        other => unreachable!("no operand holds random {other:?}"),
    }
}

/// Each token goes to other experts, by chance.
fn grouped(tokens: usize, [experts, choices]: [usize; 2]) -> [Vec<i32>; 5] {
    let chosen = |token: usize| {
        let [first, step] = [2, 3].map(|key| random_u32(key, token as u64) as usize % experts);
        // An odd step meets each of a power of two of experts once.
        let mut ids: Vec<usize> = (0..choices)
            .map(|choice| (first + choice * (step | 1)) % experts)
            .collect();
        ids.sort_unstable();
        ids
    };
    let ids: Vec<usize> = (0..tokens).flat_map(chosen).collect();
    let mut slots: Vec<usize> = (0..ids.len()).collect();
    slots.sort_by_key(|slot| ids[*slot]);
    let offsets = (0..=experts)
        .map(|expert| slots.partition_point(|slot| ids[*slot] < expert))
        .collect();
    let mut rows = vec![0; slots.len()];
    slots
        .iter()
        .enumerate()
        .for_each(|(row, slot)| rows[*slot] = row);
    let tokens = slots.iter().map(|slot| slot / choices).collect();
    [ids, offsets, tokens, slots, rows]
        .map(|table: Vec<usize>| table.into_iter().map(|number| number as i32).collect())
}
