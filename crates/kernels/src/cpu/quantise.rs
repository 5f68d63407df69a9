//! Quantising and dequantising a block, with AVX-512 where the processor has it: the same bits either way.
//!
//! A map's entries lie on straight lines, one per decade, so a value's code is nearly the value of a line. The value's
//! binary exponent tells which line. The values of codes are looked up byte by byte, 64 codes at a time, since a
//! register holds 64 bytes but only 16 floats. Both are several times faster than gathers.

use crate::quantise::Map;

/// How blocks are quantised and dequantised. Every implementation gives the same bits.
pub(super) trait Codec {
    /// As [`Map::quantise`].
    fn quantise(map: &'static Map, values: &[f32], codes: &mut [u8]) -> f32;

    /// As [`Map::dequantise`].
    fn dequantise(map: &'static Map, codes: &[u8], absmax: f32, values: &mut [f32]);
}

/// The map's own functions, for any processor.
pub(super) struct Portable;

impl Codec for Portable {
    #[inline(always)]
    fn quantise(map: &'static Map, values: &[f32], codes: &mut [u8]) -> f32 {
        map.quantise(values, codes)
    }

    #[inline(always)]
    fn dequantise(map: &'static Map, codes: &[u8], absmax: f32, values: &mut [f32]) {
        map.dequantise(codes, absmax, values);
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::Codec;
    use crate::quantise::{Map, SIGNED, UNSIGNED, stored_absmax};
    use std::arch::x86_64::*;

    const LANES: usize = 16;

    /// Codes that are looked up at a time.
    const CODES: usize = 4 * LANES;

    /// Registers of 16 lanes; only called where the processor has AVX-512 F, BW, DQ, VL and VBMI.
    pub struct Avx512;

    impl Codec for Avx512 {
        #[inline(always)]
        fn quantise(map: &'static Map, values: &[f32], codes: &mut [u8]) -> f32 {
            let (chunks, values_tail) = values.as_chunks::<CODES>();
            let (codes_chunks, codes_tail) = codes.as_chunks_mut::<CODES>();
            // SAFETY: the processor has AVX-512, and every load and store covers one chunk, or 16 values of one.
            unsafe {
                let mut largest = _mm512_setzero_ps();
                for values in chunks.as_flattened().as_chunks::<LANES>().0 {
                    let values = _mm512_loadu_ps(values.as_ptr());
                    largest = _mm512_max_ps(largest, _mm512_abs_ps(values));
                }
                let tail = values_tail.iter().map(|value| value.abs());
                let absmax = stored_absmax(tail.fold(_mm512_reduce_max_ps(largest), f32::max));
                let inverse = if absmax > 0.0 { 1.0 / absmax } else { 0.0 };
                for (values, codes) in chunks.iter().zip(codes_chunks) {
                    let scale = _mm512_set1_ps(inverse);
                    let (a, a_doubt) = nearest(map, &values[..LANES], scale);
                    let (b, b_doubt) = nearest(map, &values[LANES..2 * LANES], scale);
                    let (c, c_doubt) = nearest(map, &values[2 * LANES..3 * LANES], scale);
                    let (d, d_doubt) = nearest(map, &values[3 * LANES..], scale);
                    // Packing works within quarters of a register, so the exchange restores the order of codes.
                    let (low, high) = (_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
                    let packed =
                        _mm512_permutexvar_epi32(quarters(), _mm512_packus_epi16(low, high));
                    _mm512_storeu_si512(codes.as_mut_ptr().cast(), packed);
                    let doubtful = [a_doubt, b_doubt, c_doubt, d_doubt];
                    if doubtful != [0; 4] {
                        search(map, values, inverse, codes, doubtful);
                    }
                }
                for (value, code) in values_tail.iter().zip(codes_tail) {
                    *code = map.code(*value, inverse);
                }
                absmax
            }
        }

        #[inline(always)]
        fn dequantise(map: &'static Map, codes: &[u8], absmax: f32, values: &mut [f32]) {
            let planes = if map.zero == 0 {
                &UNSIGNED_PLANES
            } else {
                &SIGNED_PLANES
            };
            let (chunks, codes_tail) = codes.as_chunks::<CODES>();
            let (values_chunks, values_tail) = values.as_chunks_mut::<CODES>();
            // SAFETY: the processor has AVX-512, and every load and store covers one chunk, or 16 values of one.
            unsafe {
                let scale = _mm512_set1_ps(absmax);
                for (codes, values) in chunks.iter().zip(values_chunks) {
                    let found = planes.lookup(_mm512_loadu_si512(codes.as_ptr().cast()));
                    for (values, found) in values.as_chunks_mut::<LANES>().0.iter_mut().zip(found) {
                        let scaled = _mm512_mul_ps(_mm512_castsi512_ps(found), scale);
                        _mm512_storeu_ps(values.as_mut_ptr(), scaled);
                    }
                }
            }
            map.dequantise(codes_tail, absmax, values_tail);
        }
    }

    /// A map's values as four tables of bytes, the lowest byte of each value first.
    struct Planes([[u8; 256]; 4]);

    static SIGNED_PLANES: Planes = Planes::new(&SIGNED);
    static UNSIGNED_PLANES: Planes = Planes::new(&UNSIGNED);

    impl Planes {
        const fn new(map: &Map) -> Planes {
            let mut planes = [[0; 256]; 4];
            let mut code = 0;
            while code < 256 {
                let bytes = map.values[code].to_le_bytes();
                let mut plane = 0;
                while plane < 4 {
                    planes[plane][code] = bytes[plane];
                    plane += 1;
                }
                code += 1;
            }
            Planes(planes)
        }

        /// The bits of the values of 64 codes, in their order.
        #[inline(always)]
        unsafe fn lookup(&self, codes: __m512i) -> [__m512i; 4] {
            // SAFETY: the caller sees to AVX-512 with VBMI.
            unsafe {
                // Interleaving works within quarters of a register: the exchange puts its results in order.
                let codes = _mm512_permutexvar_epi32(quarters(), codes);
                // Plain lines: a closure in `map` is not inlined here, and then has no AVX-512.
                let low = interleave(
                    lookup_bytes(&self.0[0], codes),
                    lookup_bytes(&self.0[1], codes),
                );
                let high = interleave(
                    lookup_bytes(&self.0[2], codes),
                    lookup_bytes(&self.0[3], codes),
                );
                [
                    _mm512_unpacklo_epi16(low[0], high[0]),
                    _mm512_unpackhi_epi16(low[0], high[0]),
                    _mm512_unpacklo_epi16(low[1], high[1]),
                    _mm512_unpackhi_epi16(low[1], high[1]),
                ]
            }
        }
    }

    /// The order that exchanges the quarters of a register with the words in them.
    #[inline(always)]
    unsafe fn quarters() -> __m512i {
        // SAFETY: the caller sees to AVX-512.
        unsafe { _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15) }
    }

    /// 256 bytes, by 64 indices.
    #[inline(always)]
    unsafe fn lookup_bytes(table: &[u8; 256], index: __m512i) -> __m512i {
        // SAFETY: the table has four registers of bytes; the caller sees to AVX-512 with VBMI.
        unsafe {
            let quarter = |at: usize| _mm512_loadu_si512(table.as_ptr().add(64 * at).cast());
            let low = _mm512_permutex2var_epi8(quarter(0), index, quarter(1));
            let high = _mm512_permutex2var_epi8(quarter(2), index, quarter(3));
            _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high)
        }
    }

    /// The bytes of two registers in turn: the lower and the upper half of each quarter.
    #[inline(always)]
    unsafe fn interleave(a: __m512i, b: __m512i) -> [__m512i; 2] {
        // SAFETY: the caller sees to AVX-512 BW.
        unsafe { [_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)] }
    }

    /// The lines of a map's magnitudes, by pairs of binary exponents: within one pair the codes of magnitudes up to
    /// `bound` lie on one line and the others on the next. The code counts from the map's zero.
    struct Lines {
        bound: [f32; LANES],
        slope: [[f32; LANES]; 2],
        offset: [[f32; LANES]; 2],
        /// The last code of the lower line, and a half.
        last: [f32; LANES],
    }

    /// The first exponent of the first pair of [`Lines`]: all smaller magnitudes share it.
    const FIRST_EXPONENT: i32 = -22;

    /// 16 entries of a table.
    #[inline(always)]
    unsafe fn lookup(table: &[f32; LANES], index: __m512i) -> __m512 {
        // SAFETY: the table fills a register; the caller sees to AVX-512.
        unsafe { _mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_ptr())) }
    }

    static SIGNED_LINES: Lines = Lines::new(&SIGNED, 0);
    static UNSIGNED_LINES: Lines = Lines::new(&UNSIGNED, 1);

    impl Lines {
        /// Decade `i` of a map has `2^(i + extra)` entries.
        const fn new(map: &Map, extra: u32) -> Lines {
            let mut lines = Lines {
                bound: [f32::INFINITY; LANES],
                slope: [[0.0; LANES]; 2],
                offset: [[0.0; LANES]; 2],
                last: [0.0; LANES],
            };
            let mut piece = 0;
            let mut slot = 0;
            while slot < LANES {
                let end = power(2.0, 2 * slot as i32 + FIRST_EXPONENT + 2);
                lines.set(slot, 0, piece, extra);
                let last = last_code(piece, extra);
                lines.last[slot] = last as f32 + 0.5;
                // There is no piece after the last.
                if piece < 8 {
                    let bound = map.thresholds[map.zero as usize + last];
                    if (bound as f64) < end {
                        lines.bound[slot] = bound;
                        piece += 1;
                        lines.set(slot, 1, piece, extra);
                    }
                }
                slot += 1;
            }
            lines
        }

        /// Piece 0 is zero, pieces 1 to 7 are the decades, piece 8 is one.
        const fn set(&mut self, slot: usize, side: usize, piece: usize, extra: u32) {
            let entries = (1usize << (piece.saturating_sub(1) as u32 + extra)) as f64;
            let first = (last_code(piece, extra) + 1) as f64 - entries;
            let (slope, offset) = match piece {
                0 => (0.0, 0.5),
                8 => (0.0, last_code(8, extra) as f64 + 0.5),
                // Between 0.1 and 1 times the power of ten: first + entries (x / power - 0.1) / 0.9.
                _ => {
                    let slope = entries / (0.9 * power(10.0, piece as i32 - 7));
                    (slope, first - entries / 9.0)
                }
            };
            self.slope[side][slot] = slope as f32;
            self.offset[side][slot] = offset as f32;
        }
    }

    /// The last code of a piece, counted from the map's zero.
    const fn last_code(piece: usize, extra: u32) -> usize {
        let all = (1usize << (7 + extra)) - (1usize << extra);
        match piece {
            0 => 0,
            8 => all + 1,
            _ => (1usize << (piece as u32 + extra)) - (1usize << extra),
        }
    }

    const fn power(base: f64, exponent: i32) -> f64 {
        let mut result = 1.0;
        let mut count = exponent.unsigned_abs();
        while count > 0 {
            result *= base;
            count -= 1;
        }
        if exponent < 0 { 1.0 / result } else { result }
    }

    /// If a line's value is this close to an integer, rounding errors could change the code; the search decides
    /// instead.
    const NEAR_INTEGER: f32 = 2.5e-4;

    /// [`Map::code`] of 16 values, and the lanes that may be off by one.
    #[inline(always)]
    unsafe fn nearest(map: &'static Map, values: &[f32], inverse: __m512) -> (__m512i, u16) {
        let lines = if map.zero == 0 {
            &UNSIGNED_LINES
        } else {
            &SIGNED_LINES
        };
        debug_assert_eq!(values.len(), LANES);
        // SAFETY: the load covers the values; the caller sees to AVX-512.
        unsafe {
            let values = _mm512_loadu_ps(values.as_ptr());
            let x = _mm512_abs_ps(_mm512_mul_ps(values, inverse));
            let first = _mm512_set1_epi32((127 + FIRST_EXPONENT) << 23);
            let beyond = _mm512_sub_epi32(_mm512_castps_si512(x), first);
            let slot = _mm512_max_epi32(_mm512_srai_epi32::<24>(beyond), _mm512_setzero_si512());
            let upper = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, lookup(&lines.bound, slot));
            let of = |table: &[[f32; LANES]; 2]| {
                _mm512_mask_blend_ps(upper, lookup(&table[0], slot), lookup(&table[1], slot))
            };
            let line = _mm512_add_ps(_mm512_mul_ps(x, of(&lines.slope)), of(&lines.offset));
            let line = _mm512_mask_min_ps(line, !upper, line, lookup(&lines.last, slot));
            let code = _mm512_cvttps_epi32(line);
            let fraction = _mm512_sub_ps(line, _mm512_cvtepi32_ps(code));
            let centred = _mm512_abs_ps(_mm512_sub_ps(fraction, _mm512_set1_ps(0.5)));
            let far = _mm512_set1_ps(0.5 - NEAR_INTEGER);
            let doubtful = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(centred, far);
            let code = if map.zero == 0 {
                code
            } else {
                with_sign(code, values)
            };
            (code, doubtful)
        }
    }

    /// Adds signs to the codes of magnitudes: values below zero get codes below the map's zero.
    #[inline(always)]
    unsafe fn with_sign(code: __m512i, values: __m512) -> __m512i {
        // SAFETY: as for `lookup`.
        unsafe {
            let zero = _mm512_set1_epi32(127);
            let negative = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(values, _mm512_setzero_ps());
            let magnitude = _mm512_max_epi32(code, _mm512_set1_epi32(1));
            let magnitude = _mm512_min_epi32(magnitude, zero);
            let positive = _mm512_add_epi32(zero, code);
            _mm512_mask_sub_epi32(positive, negative, zero, magnitude)
        }
    }

    /// Searches for the codes of doubtful lanes. Works in memory, so that no register has to be saved if there are
    /// none.
    #[cold]
    #[inline(never)]
    fn search(
        map: &Map,
        values: &[f32; CODES],
        inverse: f32,
        codes: &mut [u8; CODES],
        doubtful: [u16; 4],
    ) {
        for (lane, (code, value)) in codes.iter_mut().zip(values).enumerate() {
            if doubtful[lane / LANES] >> (lane % LANES) & 1 == 1 {
                *code = map.code(*value, inverse);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantise::{BLOCK, SIGNED, UNSIGNED};
    use crate::random::random_u32;

    /// Every threshold and its neighbours, every power of two and of ten, and random values, in blocks whose largest
    /// magnitude is 1.
    fn values(map: &Map) -> Vec<f32> {
        let mut values = vec![];
        let mut around = |x: f32| values.extend([x.next_down(), x, x.next_up()]);
        map.thresholds[..255].iter().for_each(|x| around(*x));
        map.values.iter().for_each(|x| around(*x));
        (0..60).for_each(|power| around(0.5f32.powi(power)));
        (0..12).for_each(|power| around(0.1f32.powi(power)));
        for index in 0..200_000 {
            let random = random_u32(1, index) as f32 / u32::MAX as f32;
            let size = random_u32(2, index) as f32 / u32::MAX as f32 * 22.0;
            values.push(random * 0.5f32.powf(size));
        }
        if map.zero > 0 {
            let negative: Vec<f32> = values.iter().map(|x| -x).collect();
            values.extend(negative);
        }
        values.retain(|x| x.abs() <= 1.0 && (map.zero > 0 || *x >= 0.0));
        values
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx512_gives_the_same_codes_and_values() {
        if !std::arch::is_x86_feature_detected!("avx512vbmi") {
            return;
        }
        for map in [&SIGNED, &UNSIGNED] {
            for scale in [1.0f32, 3.7e-9] {
                for block in values(map).chunks(BLOCK - 1) {
                    let mut block = block.to_vec();
                    block.push(1.0);
                    block.iter_mut().for_each(|x| *x *= scale);
                    let [mut ours, mut theirs] = [vec![0; block.len()], vec![0; block.len()]];
                    let absmax = Avx512::quantise(map, &block, &mut ours);
                    assert_eq!(absmax, Portable::quantise(map, &block, &mut theirs));
                    for ((x, ours), theirs) in block.iter().zip(&ours).zip(&theirs) {
                        assert_eq!(ours, theirs, "{x:e} of {absmax:e}");
                    }
                    let [mut a, mut b] = [vec![0.0; block.len()], vec![0.0; block.len()]];
                    Avx512::dequantise(map, &ours, absmax, &mut a);
                    Portable::dequantise(map, &ours, absmax, &mut b);
                    assert_eq!(a, b);
                }
            }
        }
    }
}
