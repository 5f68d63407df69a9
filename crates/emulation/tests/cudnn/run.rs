//! An attention on the stand-in's device: blocks for what a graph has in memory, and the pack that names them.

use crate::graphs::{Shape, uid, workspace_bytes};
use crate::library::{Descriptor, Session, Value, names::VARIANT_PACK};
use half::bf16;
use std::collections::BTreeMap;
use std::ffi::c_void;

pub struct Attention {
    pub session: Session,
    pub shape: Shape,
    /// Addresses by number, and bytes where they are the device's.
    pub blocks: BTreeMap<i64, (*mut c_void, usize)>,
    /// What is passed by value.
    scalars: Box<[f32; 3]>,
}

/// Numbers of a tensor that a graph reads: between -2 and 2, other ones for each seed.
pub fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32((state >> 16) as f32 / 16384.0 - 2.0).to_f32()
        })
        .collect()
}

impl Attention {
    pub fn new(shape: Shape) -> Attention {
        let rows = (shape.batch * shape.heads * shape.seq) as usize;
        let width = shape.head_dim as usize;
        let (of_queries, of_keys) = (
            rows * width,
            rows * width / (shape.heads / shape.kv_heads) as usize,
        );
        let mut scalars = Box::new([(width as f32).powf(-0.5), f32::NEG_INFINITY, 1.0]);
        let mut attention = Attention {
            session: Session::new(),
            shape,
            blocks: BTreeMap::new(),
            scalars: scalars.clone(),
        };
        for (number, scalar) in [uid::SCALE, uid::FILL, uid::ONE].into_iter().enumerate() {
            let address = (&raw mut attention.scalars[number]).cast();
            attention.blocks.insert(scalar, (address, 0));
            scalars[number] = 0.0;
        }
        for (number, bytes) in [
            (uid::Q, 2 * of_queries),
            (uid::K, 2 * of_keys),
            (uid::V, 2 * of_keys),
            (uid::O, 2 * of_queries),
            (uid::LSE, 4 * rows),
            (uid::D_O, 2 * of_queries),
            (uid::D_Q, 2 * of_queries),
            (uid::D_K, 2 * of_keys),
            (uid::D_V, 2 * of_keys),
            (uid::D_Q_SUMS, 4 * of_queries),
            (uid::ROW_SUMS, 4 * rows),
        ] {
            let address = attention.session.block(bytes);
            attention.blocks.insert(number, (address, bytes));
        }
        for read in [uid::Q, uid::K, uid::V, uid::D_O] {
            let count = attention.blocks[&read].1 / 2;
            attention.write(read, &numbers(read as u32, count));
        }
        attention
    }

    pub fn write(&self, uid: i64, values: &[f32]) {
        let (address, bytes) = self.blocks[&uid];
        let halves: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
        assert_eq!(2 * halves.len(), bytes);
        // SAFETY: a block of so many bytes, which nothing else looks at now.
        unsafe { std::ptr::copy_nonoverlapping(halves.as_ptr(), address.cast(), halves.len()) };
    }

    /// A tensor of bf16.
    pub fn read(&self, uid: i64) -> Vec<f32> {
        let (address, bytes) = self.blocks[&uid];
        // SAFETY: as above.
        let halves = unsafe { std::slice::from_raw_parts(address.cast::<bf16>(), bytes / 2) };
        halves.iter().map(|half| half.to_f32()).collect()
    }

    /// A tensor of f32.
    pub fn read_f32(&self, uid: i64) -> Vec<f32> {
        let (address, bytes) = self.blocks[&uid];
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(address.cast::<f32>(), bytes / 4) }.to_vec()
    }

    pub fn forward_uids(&self) -> Vec<i64> {
        vec![
            uid::Q,
            uid::K,
            uid::V,
            uid::O,
            uid::LSE,
            uid::SCALE,
            uid::FILL,
        ]
    }

    pub fn backward_uids(&self, is_direct: bool) -> Vec<i64> {
        let sums = if is_direct { None } else { Some(uid::D_Q_SUMS) };
        let gradients = [
            uid::D_O,
            uid::D_Q,
            uid::D_K,
            uid::D_V,
            uid::ROW_SUMS,
            uid::ONE,
        ];
        self.forward_uids()
            .into_iter()
            .chain(gradients)
            .chain(sums)
            .collect()
    }

    pub fn pack(&self, uids: &[i64], workspace: *mut c_void) -> Result<Descriptor, String> {
        let pointers: Vec<*mut c_void> = uids.iter().map(|uid| self.blocks[uid].0).collect();
        pack_of(uids, &pointers, workspace)
    }

    /// Executes a plan with all that these numbers name.
    pub fn execute(&self, plan: &Descriptor, uids: &[i64]) -> Result<(), String> {
        let workspace = self.session.block(workspace_bytes(plan).max(1));
        self.session.execute(plan, &self.pack(uids, workspace)?)
    }
}

pub fn pack_of(
    uids: &[i64],
    pointers: &[*mut c_void],
    workspace: *mut c_void,
) -> Result<Descriptor, String> {
    let pack = Descriptor::new(VARIANT_PACK)?;
    pack.set(1000, Value::Numbers(uids))?;
    pack.set(1001, Value::Pointers(pointers))?;
    pack.set(1003, Value::Pointers(&[workspace]))?;
    pack.finalize()?;
    Ok(pack)
}
