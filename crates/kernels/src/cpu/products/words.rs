//! Converts elements to words and lines of words, and back.

use super::tiles::{SIDE, Square};
use crate::cpu::simd::Real;
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A line of pairs of bf16: the first of each from the first place, in its lower half.
///
/// # Safety
/// Sixteen bf16 must lie at both places.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn pairs(places: [*const u16; 2]) -> [u32; SIDE] {
    // SAFETY: the caller's promise.
    let [low, high] = places.map(|place| unsafe { place.cast::<[u16; SIDE]>().read_unaligned() });
    let mut line = [0; SIDE];
    for index in 0..SIDE {
        line[index] = u32::from(low[index]) | u32::from(high[index]) << 16;
    }
    line
}

/// Even and odd places of 32 elements as f32, in a line of two squares.
///
/// # Safety
/// The elements and the squares must be live.
#[inline(always)]
pub(super) unsafe fn widen_along<T: Real>(row: *const T, squares: *mut Square, line: usize) {
    let mut lines = [[0; SIDE]; 2];
    if T::WIDEN && cfg!(target_endian = "little") {
        // The upper half of a word is the second of a pair; widened, a bf16 is the upper half of an f32.
        // SAFETY: the caller's promise.
        let words = unsafe { row.cast::<[u32; SIDE]>().read_unaligned() };
        for index in 0..SIDE {
            lines[0][index] = words[index] << 16;
            lines[1][index] = words[index] & 0xffff_0000;
        }
    } else {
        // SAFETY: the caller's promise.
        let row = unsafe { row.cast::<[[T; 2]; SIDE]>().read_unaligned() };
        for index in 0..SIDE {
            lines[0][index] = row[index][0].widen().to_bits();
            lines[1][index] = row[index][1].widen().to_bits();
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        (*squares)[line] = lines[0];
        (*squares.wrapping_add(1))[line] = lines[1];
    }
}

/// The line's place of the depth of 16 rows, as f32: even places fill the first square, odd ones the second.
///
/// # Safety
/// As for [`widen_along`], of every row.
#[inline(always)]
pub(super) unsafe fn widen_across<T: Real>(
    first: *const T,
    stride: usize,
    squares: *mut Square,
    line: usize,
) {
    let place = 2 * (line % SIDE) + line / SIDE;
    let rows = first.wrapping_add(place * stride).cast::<[T; SIDE]>();
    // SAFETY: the caller's promise.
    unsafe {
        let rows = rows.read_unaligned();
        let to = &mut (*squares.wrapping_add(line / SIDE))[line % SIDE];
        for index in 0..SIDE {
            to[index] = rows[index].widen().to_bits();
        }
    }
}

/// Transposes word by word.
///
/// # Safety
/// Both squares must be live.
#[inline(always)]
pub(super) unsafe fn transpose_words(to: *mut Square, from: *const Square) {
    for line in 0..SIDE {
        for word in 0..SIDE {
            // SAFETY: the caller's promise.
            unsafe { (*to)[word][line] = (*from)[line][word] };
        }
    }
}

/// Rounds sixteen f32 to bf16.
///
/// # Safety
/// Both must be live.
#[inline(always)]
pub(super) unsafe fn narrow_words(to: *mut [bf16; SIDE], sums: *const [f32; SIDE]) {
    // SAFETY: the caller's promise.
    unsafe { to.write((*sums).map(Real::narrow)) };
}

/// Transposes quarter by quarter: pairs of lines, fours, then halves of registers.
///
/// # Safety
/// Both squares must be live; the processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn transpose_avx2(to: *mut Square, from: *const Square) {
    for (row, column) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
        // SAFETY: the caller's promise.
        unsafe {
            let lines: [__m256; 8] = std::array::from_fn(|line| {
                _mm256_loadu_ps((*from)[row + line].as_ptr().wrapping_add(column).cast())
            });
            let [a, b, c, d, e, f, g, h] = lines;
            let pairs = [[a, b], [c, d], [e, f], [g, h]];
            let low = pairs.map(|[a, b]| _mm256_unpacklo_ps(a, b));
            let high = pairs.map(|[a, b]| _mm256_unpackhi_ps(a, b));
            // Column `c` of lines 0 to 3 in the lower half, column `c + 4` in the upper; then of lines 4 to 7.
            let four = |at: usize| {
                [
                    _mm256_shuffle_ps::<0x44>(low[at], low[at + 1]),
                    _mm256_shuffle_ps::<0xee>(low[at], low[at + 1]),
                    _mm256_shuffle_ps::<0x44>(high[at], high[at + 1]),
                    _mm256_shuffle_ps::<0xee>(high[at], high[at + 1]),
                ]
            };
            let (above, below) = (four(0), four(2));
            for at in 0..4 {
                let lower = _mm256_permute2f128_ps::<0x20>(above[at], below[at]);
                let upper = _mm256_permute2f128_ps::<0x31>(above[at], below[at]);
                let place =
                    |line: usize| (*to)[column + line].as_mut_ptr().wrapping_add(row).cast();
                _mm256_storeu_ps(place(at), lower);
                _mm256_storeu_ps(place(at + 4), upper);
            }
        }
    }
}

/// Transposes by shuffles: pairs of lines, fours, then quarters of registers.
///
/// # Safety
/// Both squares must be live; the processor must have AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn transpose_avx512(to: *mut Square, from: *const Square) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut lines: [__m512i; SIDE] =
            std::array::from_fn(|line| _mm512_loadu_si512((*from)[line].as_ptr().cast()));
        let mut other = lines;
        for pair in 0..8 {
            let [a, b] = [lines[2 * pair], lines[2 * pair + 1]];
            other[2 * pair] = _mm512_unpacklo_epi32(a, b);
            other[2 * pair + 1] = _mm512_unpackhi_epi32(a, b);
        }
        for four in 0..4 {
            let at = 4 * four;
            lines[at] = _mm512_unpacklo_epi64(other[at], other[at + 2]);
            lines[at + 1] = _mm512_unpackhi_epi64(other[at], other[at + 2]);
            lines[at + 2] = _mm512_unpacklo_epi64(other[at + 1], other[at + 3]);
            lines[at + 3] = _mm512_unpackhi_epi64(other[at + 1], other[at + 3]);
        }
        // Line `c` of four `f` now has, in quarter `q`, lines 4f to 4f + 3 of column 4q + c.
        for column in 0..4 {
            let [a, b, c, d] = [0, 4, 8, 12].map(|four| lines[four + column]);
            let [low, high] = [
                _mm512_shuffle_i32x4::<0x44>(a, b),
                _mm512_shuffle_i32x4::<0x44>(c, d),
            ];
            other[column] = _mm512_shuffle_i32x4::<0x88>(low, high);
            other[column + 4] = _mm512_shuffle_i32x4::<0xdd>(low, high);
            let [low, high] = [
                _mm512_shuffle_i32x4::<0xee>(a, b),
                _mm512_shuffle_i32x4::<0xee>(c, d),
            ];
            other[column + 8] = _mm512_shuffle_i32x4::<0x88>(low, high);
            other[column + 12] = _mm512_shuffle_i32x4::<0xdd>(low, high);
        }
        for (line, words) in other.into_iter().enumerate() {
            _mm512_storeu_si512((*to)[line].as_mut_ptr().cast(), words);
        }
    }
}

/// Rounds sixteen f32 to bf16, as [`Real::narrow`] does.
///
/// # Safety
/// Both must be live; the processor must have AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn narrow_avx512(to: *mut [bf16; SIDE], sums: *const [f32; SIDE]) {
    // SAFETY: the caller's promise.
    unsafe {
        let sums = _mm512_loadu_ps(sums.cast());
        let bits = _mm512_castps_si512(sums);
        let upper = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let rounded = _mm512_srli_epi32::<16>(rounded);
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums, sums);
        let words = _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(words));
    }
}
