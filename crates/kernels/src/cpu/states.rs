//! Weights and moments in the optimizer's formats, read into f32 and written back one block at a time.

use super::quantise::{Codec, Portable};
use super::simd::Real;
use super::{Shared, part, shared};
use crate::quantise::{BLOCK, Map};
use crate::random::random_run;
use crate::split::{join, join_24_bits, round_stochastically, split, split_24_bits};
use crate::{MasterOperand, MomentOperand};
use half::bf16;
use memory::{DType, In, Out};
use rayon::prelude::*;

/// Elements that one task updates.
const CHUNK: usize = 64 * BLOCK;

/// An update of blocks of 256 elements, each independent of the others.
pub(super) trait ByBlock: Sync {
    /// Updates elements from `start` on, as many as the buffers have: a whole block, or the rest in the last one.
    fn update<C: Codec>(&self, start: usize, buffers: Buffers);
}

/// Buffers for the elements of a block, in f32, and for random numbers. Their contents are whatever was there.
pub(super) type Buffers<'a> = ([&'a mut [f32]; 4], &'a mut [u32]);

/// Updates all blocks of `elements` elements.
pub(super) fn in_blocks<U: ByBlock>(update: &U, elements: usize) {
    let chunks = (0..elements.div_ceil(CHUNK)).into_par_iter();
    chunks.for_each(|chunk| {
        let start = chunk * CHUNK;
        update_chunk(update, start, CHUNK.min(elements - start));
    });
}

/// Updates a chunk with the widest instructions of the processor. All instructions give the same bits.
fn update_chunk<U: ByBlock>(update: &U, start: usize, elements: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::quantise::Avx512;
        use super::simd::{has_avx2, has_avx512};

        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
        fn avx512<U: ByBlock>(update: &U, start: usize, elements: usize) {
            update_blocks::<Avx512, U>(update, start, elements);
        }

        #[target_feature(enable = "avx2")]
        fn avx2<U: ByBlock>(update: &U, start: usize, elements: usize) {
            update_blocks::<Portable, U>(update, start, elements);
        }

        if has_avx512() && std::arch::is_x86_feature_detected!("avx512vbmi") {
            // SAFETY: the processor has these features.
            return unsafe { avx512(update, start, elements) };
        }
        if has_avx2() {
            // SAFETY: the processor has this feature.
            return unsafe { avx2(update, start, elements) };
        }
    }
    update_blocks::<Portable, U>(update, start, elements);
}

#[inline(always)]
fn update_blocks<C: Codec, U: ByBlock>(update: &U, start: usize, elements: usize) {
    // Made once per chunk: clearing them for every block would take measurable time.
    let [one, two, three, four] = &mut [[0.0; BLOCK]; 4];
    let random = &mut [0; BLOCK];
    for first in (start..start + elements).step_by(BLOCK) {
        let own = ..BLOCK.min(start + elements - first);
        let values = [
            &mut one[own],
            &mut two[own],
            &mut three[own],
            &mut four[own],
        ];
        update.update::<C>(first, (values, &mut random[own]));
    }
}

/// Random numbers of a range of elements.
#[derive(Clone, Copy)]
pub(super) struct Random {
    key: u64,
    first_index: u64,
}

impl Random {
    pub(super) fn new(key: In, first_index: u64) -> Random {
        let key = key.slice::<u32>();
        Random {
            key: u64::from(key[1]) << 32 | u64::from(key[0]),
            first_index,
        }
    }

    /// Random numbers for rounding weights, from an element on.
    #[inline(always)]
    fn of_weights(self, start: usize, out: &mut [u32]) {
        random_run(!self.key, self.first_index + start as u64, out);
    }

    /// Random numbers for rounding moments.
    #[inline(always)]
    pub(super) fn of_moments(self, start: usize, out: &mut [u32]) {
        random_run(self.key, self.first_index + start as u64, out);
    }
}

/// A moment as pointers, which tasks share.
#[derive(Clone, Copy)]
pub(super) enum MomentAt {
    F32(Shared<f32>),
    Bf16(Shared<bf16>),
    Quantised(Shared<u8>, Shared<f32>),
}

/// The weights and their master.
#[derive(Clone, Copy)]
pub(super) enum WeightsAt {
    F32(Shared<f32>),
    Master(Shared<bf16>, Shared<f32>),
    Split(Shared<bf16>, Shared<i16>),
    Split24(Shared<bf16>, Shared<u8>),
    Rounded(Shared<bf16>),
}

/// Values to read.
#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

pub(super) fn weights_at(parameters: Out, master: MasterOperand) -> WeightsAt {
    match (parameters.dtype(), master) {
        (DType::F32, _) => WeightsAt::F32(shared(parameters)),
        (_, MasterOperand::F32(master)) => WeightsAt::Master(shared(parameters), shared(master)),
        (_, MasterOperand::Remainder(rest)) => WeightsAt::Split(shared(parameters), shared(rest)),
        (_, MasterOperand::RemainderByte(rest)) => {
            WeightsAt::Split24(shared(parameters), shared(rest))
        }
        (_, MasterOperand::Parameters) => WeightsAt::Rounded(shared(parameters)),
    }
}

pub(super) fn moment_at(moment: MomentOperand) -> MomentAt {
    match moment {
        MomentOperand::Plain(moment) if moment.dtype() == DType::F32 => {
            MomentAt::F32(shared(moment))
        }
        MomentOperand::Plain(moment) => MomentAt::Bf16(shared(moment)),
        MomentOperand::Quantised { codes, absmax } => {
            MomentAt::Quantised(shared(codes), shared(absmax))
        }
    }
}

impl<'a> Values<'a> {
    pub(super) fn of(x: In<'a>) -> Values<'a> {
        match x.dtype() {
            DType::F32 => Values::F32(x.slice()),
            _ => Values::Bf16(x.slice()),
        }
    }

    #[inline(always)]
    pub(super) fn read(self, start: usize, values: &mut [f32]) {
        match self {
            Values::F32(all) => values.copy_from_slice(&all[start..start + values.len()]),
            Values::Bf16(all) => widen(&all[start..start + values.len()], values),
        }
    }
}

/// Rounds values with 16 bits of each random number, from bit `shift` on.
#[inline(always)]
fn round(out: &mut [bf16], values: &[f32], random: &[u32], shift: u32) {
    for ((out, value), random) in out.iter_mut().zip(values).zip(random) {
        *out = round_stochastically(*value, (random >> shift) as u16);
    }
}

impl MomentAt {
    #[inline(always)]
    pub(super) fn read<C: Codec>(self, map: &'static Map, start: usize, values: &mut [f32]) {
        let elements = values.len();
        // SAFETY: the block is this task's, and lies in every tensor of the update, as its check has seen.
        unsafe {
            match self {
                MomentAt::F32(moment) => values.copy_from_slice(part(moment, start, elements)),
                MomentAt::Bf16(moment) => widen(part(moment, start, elements), values),
                MomentAt::Quantised(codes, absmax) => {
                    let absmax = *absmax.at(start / BLOCK);
                    C::dequantise(map, part(codes, start, elements), absmax, values);
                }
            }
        }
    }

    /// Uses `random` and `shift` for rounding to bf16.
    #[inline(always)]
    pub(super) fn write<C: Codec>(
        self,
        map: &'static Map,
        start: usize,
        values: &[f32],
        (random, shift): (&[u32], u32),
    ) {
        let elements = values.len();
        // SAFETY: as in `read`.
        unsafe {
            match self {
                MomentAt::F32(moment) => part(moment, start, elements).copy_from_slice(values),
                MomentAt::Bf16(moment) => {
                    round(part(moment, start, elements), values, random, shift);
                }
                MomentAt::Quantised(codes, absmax) => {
                    let codes = part(codes, start, elements);
                    *absmax.at(start / BLOCK) = C::quantise(map, values, codes);
                }
            }
        }
    }
}

impl WeightsAt {
    #[inline(always)]
    pub(super) fn read(self, start: usize, values: &mut [f32]) {
        let elements = values.len();
        // SAFETY: as in `MomentAt::read`.
        unsafe {
            match self {
                WeightsAt::F32(tensor) | WeightsAt::Master(_, tensor) => {
                    values.copy_from_slice(part(tensor, start, elements));
                }
                WeightsAt::Split(weights, remainders) => {
                    let remainders = part(remainders, start, elements);
                    let pairs = part(weights, start, elements).iter().zip(remainders);
                    for (value, (weight, remainder)) in values.iter_mut().zip(pairs) {
                        *value = join(*weight, *remainder);
                    }
                }
                WeightsAt::Split24(weights, remainders) => {
                    let remainders = part(remainders, start, elements);
                    let pairs = part(weights, start, elements).iter().zip(remainders);
                    for (value, (weight, remainder)) in values.iter_mut().zip(pairs) {
                        *value = join_24_bits(*weight, *remainder);
                    }
                }
                WeightsAt::Rounded(weights) => widen(part(weights, start, elements), values),
            }
        }
    }

    /// `room` is for random numbers.
    #[inline(always)]
    pub(super) fn write(self, start: usize, values: &[f32], random: Random, room: &mut [u32]) {
        let elements = values.len();
        // SAFETY: as in `MomentAt::read`.
        unsafe {
            match self {
                WeightsAt::F32(weights) => part(weights, start, elements).copy_from_slice(values),
                WeightsAt::Master(weights, master) => {
                    part(master, start, elements).copy_from_slice(values);
                    for (weight, value) in part(weights, start, elements).iter_mut().zip(values) {
                        *weight = split(*value).0;
                    }
                }
                WeightsAt::Split(weights, remainders) => {
                    let weights = part(weights, start, elements);
                    let pairs = weights.iter_mut().zip(part(remainders, start, elements));
                    for ((weight, remainder), value) in pairs.zip(values) {
                        (*weight, *remainder) = split(*value);
                    }
                }
                WeightsAt::Split24(weights, remainders) => {
                    let weights = part(weights, start, elements);
                    let pairs = weights.iter_mut().zip(part(remainders, start, elements));
                    for ((weight, remainder), value) in pairs.zip(values) {
                        (*weight, *remainder) = split_24_bits(*value);
                    }
                }
                WeightsAt::Rounded(weights) => {
                    random.of_weights(start, room);
                    round(part(weights, start, elements), values, room, 0);
                }
            }
        }
    }
}

#[inline(always)]
fn widen(x: &[bf16], values: &mut [f32]) {
    for (value, x) in values.iter_mut().zip(x) {
        *value = x.widen();
    }
}
