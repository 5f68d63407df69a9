//! Products of a group of four warps, which run behind the instructions that follow.
//!
//! Each warp needs only its own 16 rows of the left factor, so each runs by itself; `warp_group.rs` finds where they disagree.
//! A product is computed when it is asked for. Until its wait nobody sees that: its registers are not to be used, and what it reads
//! is not to be written.

use crate::arithmetic::canonical;
use crate::clock::PRODUCTS as LINE;
use crate::descriptor::{CHUNK, CHUNK_BYTES, Descriptor, K, accumulator, left};
use crate::error::{MistakeKind, Wrong, refuse};
use crate::executable::{Decoded, Executable, Opcodes, Outside};
use crate::operands::{PtxOperand, PtxOperands, by_lane};
use crate::products::WarpProducts;
use crate::registers::{Condition, File, LaneMask, Numbered, Register};
use crate::shadow::{AccessKind, Who};
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
        step(|warp| products(warp).commit())
    }),
    ("wgmma.fence.sync.aligned", |o| {
        o.exactly(0)?;
        step(|warp| products(warp).fence())
    }),
    ("wgmma.wait_group.sync.aligned", |o| {
        o.exactly(1)?;
        let newest = o.integer(0)?;
        if newest > PENDING_MAX {
            return Err(format!(
                "{newest} groups under way; {PENDING_MAX} are possible"
            ));
        }
        step(move |warp| finish(warp, newest as u32))
    }),
];

/// Rows of a warp.
const ROWS: usize = 16;

fn products(warp: &mut Warp) -> &mut WarpProducts {
    warp.products.as_mut().expect("the kernel has products")
}

/// Most groups that a wait leaves under way.
const PENDING_MAX: u64 = 7;

/// Waits for all committed groups except the `newest`: each lane knows that these have read shared memory, so each can free it.
fn finish(warp: &mut Warp, newest: u32) {
    let (line, over) = (LINE + warp.index, products(warp).wait(newest));
    for clock in warp.ahead.iter_mut().flatten().chain([&mut warp.clock]) {
        clock.seen.raise_line(line, over);
    }
}

/// An instruction of the group without operands that could differ.
fn step(run: impl Fn(&mut Warp) + Send + Sync + 'static) -> Decoded {
    Ok(Executable::together(None, move |warp, outside, _| {
        outside.groups.step(warp.index, outside.at, [0; 3])?;
        run(warp);
        Ok(())
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
            _ => return refuse(MistakeKind::Group, "some lanes add, and some do not"),
        };
        let right = alike(warp, self.right.descriptor)?;
        let left = self
            .left
            .map(|left| alike(warp, left.descriptor))
            .transpose()?;
        let operands = [left.unwrap_or(0), right, adds.into()];
        outside.groups.step(warp.index, outside.at, operands)?;
        self.check_registers(warp, adds)?;
        let left = match (self.left, left) {
            (Some(Factor { is_transposed, .. }), Some(bits)) => {
                let rows = warp.index % WARPS * ROWS..(warp.index % WARPS + 1) * ROWS;
                Tile {
                    bits,
                    rows,
                    is_transposed,
                }
                .load(warp, outside)?
            }
            _ => left_of_registers(warp, &self.left_registers),
        };
        let tile = Tile {
            bits: right,
            rows: 0..columns,
            is_transposed: self.right.is_transposed,
        };
        let right = tile.load(warp, outside)?;
        self.add(warp, adds, &left, &right);
        products(warp).begin(&self.sums, &self.left_registers);
        Ok(())
    }

    fn check_registers(&self, warp: &mut Warp, adds: bool) -> Result<(), Wrong> {
        products(warp).check(&self.sums, &self.left_registers)?;
        let sums: &[Numbered] = if adds { &self.sums } else { &[] };
        for registers in [sums, &self.left_registers] {
            if warp.registers.unwritten(registers, LaneMask::MAX).is_some() {
                let message = "a product of registers that a lane never wrote";
                return refuse(MistakeKind::Unwritten, message);
            }
        }
        Ok(())
    }

    /// Sums go over the depth in order, in f32, and then to what was there. A device may add and round otherwise.
    fn add(&self, warp: &mut Warp, adds: bool, left: &[Eight], right: &[Eight]) {
        let products = multiplied(left, right);
        for (index, sum) in self.sums.iter().enumerate() {
            let slot = Register::<f32>::new(sum.index);
            let before = warp.registers.read(slot);
            let after = by_lane(|lane| {
                let (row, column) = accumulator(lane, index);
                let product = products[column / CHUNK][row][column % CHUNK] * self.sign;
                canonical(if adds {
                    before[lane] + product
                } else {
                    product
                })
            });
            warp.registers.write(slot, LaneMask::MAX, after);
        }
        warp.registers.set_written(&self.sums, LaneMask::MAX);
    }
}

/// Eight rows of a factor: of each depth, their values.
type Eight = [[f32; CHUNK]; K];

/// For each eight columns, the products of a warp's rows with these.
fn multiplied(left: &[Eight], right: &[Eight]) -> Vec<[[f32; CHUNK]; ROWS]> {
    let of_row = |row: usize, right: &Eight| {
        let mut sums = [0.0; CHUNK];
        for (left, right) in left[row / CHUNK].iter().zip(right) {
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum += left[row % CHUNK] * right;
            }
        }
        sums
    };
    let columns = right.iter();
    columns
        .map(|right| std::array::from_fn(|row| of_row(row, right)))
        .collect()
}

/// The value of a descriptor, which all lanes must have.
fn alike(warp: &Warp, slot: Register<u64>) -> Result<u64, Wrong> {
    let values = warp.registers.read(slot);
    match values.iter().all(|value| *value == values[0]) {
        true => Ok(values[0]),
        false => refuse(
            MistakeKind::Group,
            "lanes of a warp have different descriptors",
        ),
    }
}

fn widened(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// A warp's rows of a left factor in registers.
fn left_of_registers(warp: &Warp, registers: &[Numbered]) -> Vec<Eight> {
    let mut rows = vec![[[0.0; CHUNK]; K]; ROWS / CHUNK];
    for (index, register) in registers.iter().enumerate() {
        let pairs = warp.registers.read(Register::<u32>::new(register.index));
        for (lane, pair) in pairs.into_iter().enumerate() {
            let (row, k) = left(lane, index);
            let eight = &mut rows[row / CHUNK];
            eight[k][row % CHUNK] = widened(pair as u16);
            eight[k + 1][row % CHUNK] = widened((pair >> 16) as u16);
        }
    }
    rows
}

/// Rows of a factor in shared memory: columns, of the right one. Both ends are multiples of eight.
struct Tile {
    bits: u64,
    rows: Range<usize>,
    is_transposed: bool,
}

impl Tile {
    fn load(&self, warp: &Warp, outside: &mut Outside) -> Result<Vec<Eight>, Wrong> {
        let descriptor = Descriptor::new(self.bits);
        let descriptor =
            descriptor.map_err(|message| Wrong::new(MistakeKind::Meaningless, message))?;
        let time = warp.products.as_ref().map_or(0, WarpProducts::time);
        let who = Who::product(outside.block, warp.index, time, &warp.clock);
        let mut read = |address| -> Result<[f32; CHUNK], Wrong> {
            let bytes = CHUNK_BYTES as usize;
            let bytes = outside
                .shared
                .load(address, bytes, AccessKind::Product, &who)?;
            Ok(std::array::from_fn(|index| {
                widened(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]))
            }))
        };
        let mut eights = vec![[[0.0; CHUNK]; K]; self.rows.len() / CHUNK];
        for (eight, chunk) in eights.iter_mut().zip(self.rows.start / CHUNK..) {
            if self.is_transposed {
                for (k, values) in eight.iter_mut().enumerate() {
                    *values = read(descriptor.along_rows(chunk, k))?;
                }
                continue;
            }
            for (row, half) in (0..CHUNK).flat_map(|row| [(row, 0), (row, 1)]) {
                let values = read(descriptor.along_k(CHUNK * chunk + row, half))?;
                for (k, value) in values.into_iter().enumerate() {
                    eight[CHUNK * half + k][row] = value;
                }
            }
        }
        Ok(eights)
    }
}
