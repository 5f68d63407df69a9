//! Products of a group of four warps, which run behind the instructions that follow.
//!
//! Each warp needs only its own 16 rows of the left factor, so each runs by itself; `warp_group.rs` finds where they disagree.
//! A product is computed when it is asked for. Until its wait nobody sees that: its registers are not to be used, and it
//! notes its reads of shared memory again at the wait.

use crate::arithmetic::canonical;
use crate::descriptor::{CHUNK, CHUNK_BYTES, Descriptor, K, accumulator, left};
use crate::error::{MistakeKind, Wrong};
use crate::executable::{Decoded, Executable, Opcodes, Outside};
use crate::operands::{PtxOperand, PtxOperands};
use crate::products::{Product, WarpProducts};
use crate::registers::{Condition, File, LANES, LaneMask, Numbered, Register};
use crate::shadow::Who;
use crate::warp::Warp;
use crate::warp_group::WARPS;
use std::ops::Range;

macro_rules! products {
    ($($n:literal)*) => {
        &[$((
            concat!("wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.bf16.bf16"),
            |o| multiply(o, $n),
        ),)*]
    };
}

pub(crate) const PRODUCTS: Opcodes = products!(
    8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152 160 168 176 184 192 200 208 216 224 232 240 248 256
);

pub(crate) const OPCODES: Opcodes = &[
    ("wgmma.commit_group.sync.aligned", |o| {
        o.exactly(0)?;
        step(|warp, _| {
            products(warp).commit();
            Ok(())
        })
    }),
    ("wgmma.fence.sync.aligned", |o| {
        o.exactly(0)?;
        step(|warp, _| {
            products(warp).fence();
            Ok(())
        })
    }),
    ("wgmma.wait_group.sync.aligned", |o| {
        o.exactly(1)?;
        let newest = o.integer(0)? as u32;
        step(move |warp, outside| finish(warp, outside, newest))
    }),
];

/// Rows of a warp.
const ROWS: usize = 16;

fn products(warp: &mut Warp) -> &mut WarpProducts {
    warp.products.as_mut().expect("the kernel has products")
}

/// Waits for all committed groups except the `newest`. They have read shared memory until now, and the warp knows it as one: so
/// one lane can free for all what they read.
fn finish(warp: &mut Warp, outside: &mut Outside, newest: u32) -> Result<(), Wrong> {
    for product in products(warp).take(newest) {
        let who = Who {
            block: outside.block,
            thread: warp.index * LANES,
            time: warp.time,
            met: warp.met,
            seen: &product.clock.seen,
        };
        for chunk in product.chunks {
            outside
                .shared
                .note_product(chunk, &who, &product.clock.fenced)?;
        }
    }
    warp.synchronise();
    Ok(())
}

/// An instruction of the group without operands that could differ.
fn step(
    run: impl Fn(&mut Warp, &mut Outside) -> Result<(), Wrong> + Send + Sync + 'static,
) -> Decoded {
    Ok(Executable::together(None, move |warp, outside, _| {
        outside.groups.step(warp.index, outside.at, [0; 3])?;
        run(warp, outside)
    }))
}

/// A factor in shared memory.
#[derive(Clone, Copy)]
struct Factor {
    descriptor: Register<u64>,
    is_transposed: bool,
}

/// A decoded product of 64 rows.
struct Multiply {
    sums: Vec<Numbered>,
    /// The left factor, if it is in shared memory; else its four registers.
    left: Option<Factor>,
    left_registers: Vec<Numbered>,
    right: Factor,
    /// Whether it adds to the sums.
    adds: Condition,
    sign: f32,
}

/// An integer that says whether a factor is transposed.
fn flag(o: &PtxOperands, index: usize) -> Result<bool, String> {
    match o.integer(index)? {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(format!("{other} says not whether it is transposed")),
    }
}

/// An integer by which a factor is multiplied.
fn sign(o: &PtxOperands, index: usize) -> Result<f32, String> {
    match o.integer(index)? as i64 {
        1 => Ok(1.0),
        -1 => Ok(-1.0),
        other => Err(format!("a factor is multiplied by 1 or -1, not {other}")),
    }
}

/// `{d}, a, b, p, 1, 1, ta, tb`, where `a` is a descriptor, or `{d}, {a}, b, p, 1, 1, tb`.
fn multiply(o: &mut PtxOperands, columns: usize) -> Decoded {
    let is_in_registers = matches!(o.operand(1)?, PtxOperand::Vector(_));
    o.exactly(if is_in_registers { 7 } else { 8 })?;
    // The warp's products watch these registers, so the instruction itself names none.
    o.target_places(0, columns / 2)?;
    let sums = std::mem::take(&mut o.written);
    let (mut left, mut left_registers) = (None, Vec::new());
    if is_in_registers {
        o.places(1, 4)?;
        left_registers = std::mem::take(&mut o.read);
    } else {
        left = Some(Factor {
            descriptor: o.source(1)?,
            is_transposed: flag(o, 6)?,
        });
    }
    let mut registers = sums.iter().chain(&left_registers);
    if is_in_registers && left_registers.len() != 4
        || !registers.all(|register| register.file == File::Words)
    {
        return Err("sums, and four factors in registers, are words".into());
    }
    let product = Multiply {
        sums,
        left,
        left_registers,
        right: Factor {
            descriptor: o.source(2)?,
            is_transposed: flag(o, o.list.len() - 1)?,
        },
        adds: o.condition(3)?,
        sign: sign(o, 4)? * sign(o, 5)?,
    };
    Ok(Executable::together(None, move |warp, outside, _| {
        product.run(warp, outside, columns)
    }))
}

impl Multiply {
    fn run(&self, warp: &mut Warp, outside: &mut Outside, columns: usize) -> Result<(), Wrong> {
        let adds = match self.adds.lanes(&warp.registers) {
            0 => false,
            LaneMask::MAX => true,
            _ => {
                return Err(Wrong::new(
                    MistakeKind::Group,
                    "some lanes add, and some do not",
                ));
            }
        };
        let right = alike(warp, self.right.descriptor)?;
        let left = self
            .left
            .map(|left| alike(warp, left.descriptor))
            .transpose()?;
        let operands = [left.unwrap_or(0), right, adds.into()];
        outside.groups.step(warp.index, outside.at, operands)?;
        self.check_registers(warp, adds)?;
        let mut chunks = Vec::new();
        let left = match (self.left, left) {
            (Some(Factor { is_transposed, .. }), Some(bits)) => {
                let rows = warp.index % WARPS * ROWS..(warp.index % WARPS + 1) * ROWS;
                Tile {
                    bits,
                    rows,
                    is_transposed,
                }
                .load(warp, outside, &mut chunks)?
            }
            _ => left_of_registers(warp, &self.left_registers),
        };
        let tile = Tile {
            bits: right,
            rows: 0..columns,
            is_transposed: self.right.is_transposed,
        };
        let right = tile.load(warp, outside, &mut chunks)?;
        self.add(warp, adds, &left, &right);
        let product = Product {
            sums: self.sums.as_slice().into(),
            left: self.left_registers.as_slice().into(),
            chunks,
            clock: warp.clock.clone(),
            group: None,
        };
        products(warp).begin(product);
        Ok(())
    }

    fn check_registers(&self, warp: &mut Warp, adds: bool) -> Result<(), Wrong> {
        products(warp).check(&self.sums, &self.left_registers)?;
        let sums: &[Numbered] = if adds { &self.sums } else { &[] };
        for registers in [sums, &self.left_registers] {
            if warp.registers.unwritten(registers, LaneMask::MAX).is_some() {
                let message = "a product of registers that a lane never wrote";
                return Err(Wrong::new(MistakeKind::Unwritten, message));
            }
        }
        Ok(())
    }

    /// Sums go over the depth in order, in f32, and then to what was there. A device may add and round otherwise.
    fn add(&self, warp: &mut Warp, adds: bool, left: &[[f32; K]], right: &[[f32; K]]) {
        for (index, sum) in self.sums.iter().enumerate() {
            let slot = Register::<f32>::new(sum.index);
            for lane in 0..LANES {
                let (row, column) = accumulator(lane, index);
                let terms = left[row].iter().zip(&right[column]);
                let product = terms.fold(0.0, |sum, (a, b)| sum + a * b) * self.sign;
                let before = warp.registers.get(slot, lane);
                let after = if adds { before + product } else { product };
                warp.registers.set(slot, lane, canonical(after));
            }
        }
        warp.registers.set_written(&self.sums, LaneMask::MAX);
    }
}

/// The value of a descriptor, which all lanes must have.
fn alike(warp: &Warp, slot: Register<u64>) -> Result<u64, Wrong> {
    let values = warp.registers.read(slot);
    match values.iter().all(|value| *value == values[0]) {
        true => Ok(values[0]),
        false => Err(Wrong::new(
            MistakeKind::Group,
            "lanes of a warp have different descriptors",
        )),
    }
}

fn widened(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// A warp's rows of a left factor in registers.
fn left_of_registers(warp: &Warp, registers: &[Numbered]) -> Vec<[f32; K]> {
    let mut rows = vec![[0.0; K]; ROWS];
    for (index, register) in registers.iter().enumerate() {
        for lane in 0..LANES {
            let pair = warp
                .registers
                .get(Register::<u32>::new(register.index), lane);
            let (row, k) = left(lane, index);
            rows[row][k] = widened(pair as u16);
            rows[row][k + 1] = widened((pair >> 16) as u16);
        }
    }
    rows
}

/// Rows of a factor in shared memory: columns, of the right one.
struct Tile {
    bits: u64,
    rows: Range<usize>,
    is_transposed: bool,
}

impl Tile {
    /// Reads the rows, and adds the chunks that these are to others.
    fn load(
        &self,
        warp: &Warp,
        outside: &mut Outside,
        chunks: &mut Vec<u64>,
    ) -> Result<Vec<[f32; K]>, Wrong> {
        let descriptor = Descriptor::new(self.bits);
        let descriptor =
            descriptor.map_err(|message| Wrong::new(MistakeKind::Meaningless, message))?;
        let who = Who {
            block: outside.block,
            thread: warp.index * LANES,
            time: warp.time,
            met: warp.met,
            seen: &warp.clock.seen,
        };
        let mut read = |address| {
            chunks.push(address);
            let shared = &mut *outside.shared;
            shared.note_product(address, &who, &warp.clock.fenced)?;
            let bytes = shared.peek(address, CHUNK_BYTES as usize)?;
            Ok(std::array::from_fn(|index| {
                widened(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]))
            }))
        };
        let mut rows = vec![[0.0; K]; self.rows.len()];
        if !self.is_transposed {
            for (values, row) in rows.iter_mut().zip(self.rows.clone()) {
                for (half, values) in values.chunks_exact_mut(CHUNK).enumerate() {
                    let chunk: [f32; CHUNK] = read(descriptor.along_k(row, half))?;
                    values.copy_from_slice(&chunk);
                }
            }
            return Ok(rows);
        }
        for (rows, chunk) in rows.chunks_exact_mut(CHUNK).zip(self.rows.start / CHUNK..) {
            for k in 0..K {
                let values = read(descriptor.along_rows(chunk, k))?;
                rows.iter_mut()
                    .zip(values)
                    .for_each(|(row, value)| row[k] = value);
            }
        }
        Ok(rows)
    }
}
