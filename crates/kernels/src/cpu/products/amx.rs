//! AMX: eight tile registers of 16 rows of 64 bytes. One instruction multiplies two registers of bf16 and adds to a
//! third of f32.
//!
//! Written in assembly, because stable Rust has no intrinsics for it yet.

use super::tiles::{Job, Left, Right, SIDE, Square, Tiles};
use super::words::{narrow_avx512, pairs, transpose_avx512};
use crate::cpu::simd::Real;
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Whether the processor has AMX for bf16 and Linux lets this process use it. A process must request it once, because
/// the registers enlarge every thread's saved state.
pub(super) fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    /// Bits of `edx`, leaf 7: AMX-BF16 and AMX-TILE.
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        if __cpuid_count(7, 0).edx & BF16_AND_TILES != BF16_AND_TILES {
            return false;
        }
        // SAFETY: the call changes only this permission. A kernel without AMX support refuses it.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_arch_prctl,
                ARCH_REQ_XCOMP_PERM,
                XFEATURE_XTILEDATA,
            )
        };
        answer == 0
    })
}

/// Runs a job with the tile registers configured.
///
/// # Safety
/// The processor must have AMX and AVX-512, and [`is_permitted`] must have said so.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn run<J: Job>(job: J) {
    let configuration = Configuration::default();
    // SAFETY: the caller's promise; the registers are this thread's, and nothing else in the program uses them.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, readonly)) };
    job.run::<Amx>();
    // SAFETY: as above. Released registers need not be saved at a thread switch.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// The shapes of all registers: 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Default for Configuration {
    fn default() -> Configuration {
        let mut configuration = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        configuration.row_bytes[..8].fill(64);
        configuration.rows[..8].fill(16);
        configuration
    }
}

pub(super) struct Amx;

impl Tiles for Amx {
    const SQUARES: usize = 1;
    const READS_ROWS: bool = true;
    const THIN: usize = 0;

    #[inline(always)]
    unsafe fn along<T: Real>(row: *const T, squares: *mut Square, line: usize) {
        // SAFETY: the caller's promise: 32 bf16 are a line.
        unsafe { (*squares)[line] = row.cast::<[u32; 16]>().read_unaligned() };
    }

    #[inline(always)]
    unsafe fn across<T: Real>(first: *const T, stride: usize, squares: *mut Square, line: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let pair = [2 * line, 2 * line + 1].map(|place| first.wrapping_add(place * stride));
            (*squares)[line] = pairs(pair.map(|place| place.cast()));
        }
    }

    #[inline(always)]
    unsafe fn transpose(to: *mut Square, from: *const Square) {
        // SAFETY: the caller's promise.
        unsafe { transpose_avx512(to, from) };
    }

    #[inline(always)]
    unsafe fn narrow(to: *mut [bf16; SIDE], sums: *const [f32; SIDE]) {
        // SAFETY: the caller's promise.
        unsafe { narrow_avx512(to, sums) };
    }

    #[inline(always)]
    unsafe fn multiply(sums: *mut Square, left: Left, right: Right, blocks: usize, fresh: bool) {
        for panel in (0..right.panels).step_by(2) {
            let sums = sums.wrapping_add(2 * panel);
            let first = right.pointer.wrapping_add(panel * right.panel);
            // SAFETY: the caller's promise.
            unsafe {
                match right.panels - panel {
                    1 => one_panel(sums, left, first, blocks, fresh),
                    _ => {
                        let second = first.wrapping_add(right.panel);
                        two_panels(sums, left, [first, second], blocks, fresh);
                    }
                }
            }
        }
    }
}

/// Adds products to the sums of two panels. Registers 0 to 3 hold sums, 4 and 5 tiles of the left operand, 6 and 7 of
/// the right.
#[inline(always)]
unsafe fn two_panels(
    sums: *mut Square,
    left: Left,
    right: [*const Square; 2],
    blocks: usize,
    fresh: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        load_sums(sums, fresh);
        if fresh {
            asm!("tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        } else {
            asm!("tileloadd tmm2, [{sums} + {line}]", "tileloadd tmm3, [{sums} + {line} + 1024]",
                sums = in(reg) sums.wrapping_add(2), line = in(reg) 64usize, options(nostack, readonly));
        }
        asm!(
            "2:",
            "tileloadd tmm6, [{first} + {line}]",
            "tileloadd tmm4, [{above} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{second} + {line}]",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tileloadd tmm5, [{below} + {row}]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {above}, {block}",
            "add {below}, {block}",
            "add {first}, 1024",
            "add {second}, 1024",
            "dec {blocks}",
            "jnz 2b",
            above = inout(reg) left.pointer => _,
            below = inout(reg) left.pointer.wrapping_add(left.tile) => _,
            row = in(reg) left.row,
            block = in(reg) left.block,
            first = inout(reg) right[0] => _,
            second = inout(reg) right[1] => _,
            line = in(reg) 64usize,
            blocks = inout(reg) blocks => _,
            options(nostack, readonly)
        );
        asm!(
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 1024], tmm1",
            "tilestored [{sums} + {line} + 2048], tmm2",
            "tilestored [{sums} + {line} + 3072], tmm3",
            sums = in(reg) sums, line = in(reg) 64usize, options(nostack)
        );
    }
}

/// As [`two_panels`], for one panel.
#[inline(always)]
unsafe fn one_panel(
    sums: *mut Square,
    left: Left,
    right: *const Square,
    blocks: usize,
    fresh: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        load_sums(sums, fresh);
        asm!(
            "2:",
            "tileloadd tmm6, [{right} + {line}]",
            "tileloadd tmm4, [{above} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{below} + {row}]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "add {above}, {block}",
            "add {below}, {block}",
            "add {right}, 1024",
            "dec {blocks}",
            "jnz 2b",
            above = inout(reg) left.pointer => _,
            below = inout(reg) left.pointer.wrapping_add(left.tile) => _,
            row = in(reg) left.row,
            block = in(reg) left.block,
            right = inout(reg) right => _,
            line = in(reg) 64usize,
            blocks = inout(reg) blocks => _,
            options(nostack, readonly)
        );
        asm!(
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 1024], tmm1",
            sums = in(reg) sums, line = in(reg) 64usize, options(nostack)
        );
    }
}

/// Loads the sums of the first panel into registers 0 and 1.
#[inline(always)]
unsafe fn load_sums(sums: *mut Square, fresh: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if fresh {
            asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem));
        } else {
            asm!("tileloadd tmm0, [{sums} + {line}]", "tileloadd tmm1, [{sums} + {line} + 1024]",
                sums = in(reg) sums, line = in(reg) 64usize, options(nostack, readonly));
        }
    }
}
