//! Tensor cores: loads of 8 x 8 matrices, and products of fragments.

use crate::access::{addresses, check_alignment};
use crate::arithmetic::canonical;
use crate::executable::{Decoded, Executable, Opcodes};
use crate::operands::PtxOperands;
use crate::registers::{LANES, LaneMask};
use crate::shadow::AccessKind;

pub(crate) const OPCODES: Opcodes = &[
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", |o| {
        load_matrices(o, false)
    }),
    ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", |o| {
        load_matrices(o, true)
    }),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        multiply,
    ),
];

/// Matrices of a load, and their rows.
const MATRICES: usize = 4;
const ROWS: usize = 8;
/// Bytes of a row: eight elements of 16 bits.
const ROW_BYTES: usize = 16;

/// `{d0, d1, d2, d3}, [address]`: lane `8 m + r` has the address of row `r` of matrix `m`. Lane `l` gets two neighbours of
/// row `l / 4` of each matrix, or of its transpose.
fn load_matrices(o: &mut PtxOperands, is_transposed: bool) -> Decoded {
    o.exactly(2)?;
    let (targets, address) = (o.targets::<u32, MATRICES>(0)?, o.address(1)?);
    Ok(Executable::together(None, move |warp, outside, mask| {
        let addresses = addresses(address, &warp.registers, mask);
        outside.counts.count_shared(&addresses, mask, ROW_BYTES);
        let mut rows = [[0; ROW_BYTES]; LANES];
        for (lane, row) in rows.iter_mut().enumerate() {
            let who = outside.who(warp, lane);
            *row = check_alignment(addresses[lane], ROW_BYTES)
                .and_then(|()| {
                    outside
                        .shared
                        .load(addresses[lane], ROW_BYTES, AccessKind::Read, &who)
                })
                .map_err(|wrong| wrong.of_lane(lane))?;
        }
        for (target, matrix) in targets.iter().zip(rows.chunks_exact(ROWS)) {
            let element = |row: usize, column: usize| {
                let at = 2 * column;
                u32::from(u16::from_le_bytes([matrix[row][at], matrix[row][at + 1]]))
            };
            let pair = |lane: usize| {
                let (row, column) = (lane / 4, 2 * (lane % 4));
                match is_transposed {
                    false => element(row, column) | element(row, column + 1) << 16,
                    true => element(column, row) | element(column + 1, row) << 16,
                }
            };
            warp.registers
                .write(*target, LaneMask::MAX, crate::operands::by_lane(pair));
        }
        Ok(())
    }))
}

/// Sizes of a product.
const M: usize = 16;
const N: usize = 8;
const K: usize = 16;

/// `{d}, {a}, {b}, {c}`: `d [16, 8] = a [16, 16] b [16, 8] + c`. Lane `l` holds of `a` and of `c` rows `l / 4` and eight
/// later, of `b` column `l / 4`, and of each the columns, or of `b` the rows, `2 (l % 4)` and the next; in `a` and `b` also
/// those eight later. A sum is rounded once, where a device may round or truncate in between.
fn multiply(o: &mut PtxOperands) -> Decoded {
    o.exactly(4)?;
    let d = o.targets::<f32, 4>(0)?;
    let (a, b, c) = (
        o.sources::<u32, 4>(1)?,
        o.sources::<u32, 2>(2)?,
        o.sources::<f32, 4>(3)?,
    );
    Ok(Executable::together(None, move |warp, _, mask| {
        let registers = &mut warp.registers;
        let (a, b) = (a.map(|a| registers.read(a)), b.map(|b| registers.read(b)));
        let c = c.map(|c| registers.read(c));
        let (mut left, mut right) = ([[0f32; K]; M], [[0f32; K]; N]);
        for lane in 0..LANES {
            let (group, pair) = (lane / 4, 2 * (lane % 4));
            for half in 0..2 {
                let column = pair + half;
                for (index, a) in a.iter().enumerate() {
                    left[group + 8 * (index % 2)][column + 8 * (index / 2)] =
                        widened(a[lane], half);
                }
                for (index, b) in b.iter().enumerate() {
                    right[group][column + 8 * index] = widened(b[lane], half);
                }
            }
        }
        for (index, d) in d.iter().enumerate() {
            let sum = |lane: usize| {
                let (row, column) = (lane / 4 + 8 * (index / 2), 2 * (lane % 4) + index % 2);
                let products = left[row].iter().zip(&right[column]);
                let sum: f64 = products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                canonical((sum + f64::from(c[index][lane])) as f32)
            };
            registers.write(*d, mask, crate::operands::by_lane(sum));
        }
        Ok(())
    }))
}

/// One of the two bf16 of a register: the first is the lower half.
fn widened(pair: u32, half: usize) -> f32 {
    f32::from_bits(pair >> (16 * half) << 16)
}
