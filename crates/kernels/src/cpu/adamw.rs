//! AdamW on ranges, in every form of its states.
//!
//! A block of 256 elements is read from whatever form its states have into f32 that stay in the first-level cache,
//! updated, and written back. Arithmetic is f32 throughout.

use super::Shared;
use super::quantise::{Codec, Portable};
use super::simd::Real;
use crate::quantise::{BLOCK, Map, SIGNED, UNSIGNED};
use crate::random::random_run;
use crate::split::{join, round_stochastically, split};
use crate::{AdamW, MasterOperand, MomentOperand};
use half::bf16;
use memory::{DType, In, Out};
use rayon::prelude::*;

/// Elements that one task updates.
const CHUNK: usize = 64 * BLOCK;

/// The numbers of one update.
#[derive(Clone, Copy)]
struct Rates {
    gradient_scale: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    /// 1 - learning rate x weight decay.
    keep: f32,
    /// Learning rate / (1 - beta1^t).
    step_size: f32,
    /// 1 / sqrt(1 - beta2^t).
    root_scale: f32,
    /// Key of the step's random numbers.
    key: u64,
}

impl Rates {
    /// Reads the step's rates; none where the step is to be skipped.
    fn read(update: &AdamW) -> Option<Rates> {
        let gradient_scale = update.clip.slice::<f32>()[1];
        let (given, key) = (update.rates.slice::<f32>(), update.key.slice::<u32>());
        gradient_scale.is_finite().then(|| Rates {
            gradient_scale,
            beta1: update.beta1,
            beta2: update.beta2,
            eps: update.eps,
            keep: 1.0 - given[0] * update.weight_decay,
            step_size: given[0] * given[1],
            root_scale: given[2],
            key: u64::from(key[1]) << 32 | u64::from(key[0]),
        })
    }
}

/// A moment as pointers that tasks share.
#[derive(Clone, Copy)]
enum MomentAt {
    F32(Shared<f32>),
    Bf16(Shared<bf16>),
    Quantised(Shared<u8>, Shared<f32>),
}

/// The weights and their master.
#[derive(Clone, Copy)]
enum WeightsAt {
    F32(Shared<f32>),
    Master(Shared<bf16>, Shared<f32>),
    Split(Shared<bf16>, Shared<i16>),
    Rounded(Shared<bf16>),
}

#[derive(Clone, Copy)]
enum Gradients<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

/// Everything of an update, as tasks share it.
#[derive(Clone, Copy)]
struct Update<'a> {
    weights: WeightsAt,
    first: MomentAt,
    second: MomentAt,
    gradients: Gradients<'a>,
    first_index: u64,
    rates: Rates,
}

pub(super) fn adamw(update: AdamW) {
    let Some(rates) = Rates::read(&update) else {
        return;
    };
    let elements = update.parameters.elements();
    let shared = Update {
        weights: weights_at(update.parameters, update.master),
        first: moment_at(update.first_moment),
        second: moment_at(update.second_moment),
        gradients: gradients_of(update.gradients),
        first_index: update.first_index,
        rates,
    };
    (0..elements.div_ceil(CHUNK))
        .into_par_iter()
        .for_each(|chunk| {
            let start = chunk * CHUNK;
            update_chunk(&shared, start, CHUNK.min(elements - start));
        });
}

fn shared<T: memory::Element>(out: Out) -> Shared<T> {
    Shared(out.slice_mut::<T>().as_mut_ptr())
}

fn weights_at(parameters: Out, master: MasterOperand) -> WeightsAt {
    match (parameters.dtype(), master) {
        (DType::F32, _) => WeightsAt::F32(shared(parameters)),
        (_, MasterOperand::F32(master)) => WeightsAt::Master(shared(parameters), shared(master)),
        (_, MasterOperand::Remainder(rest)) => WeightsAt::Split(shared(parameters), shared(rest)),
        (_, MasterOperand::Parameters) => WeightsAt::Rounded(shared(parameters)),
    }
}

fn moment_at(moment: MomentOperand) -> MomentAt {
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

fn gradients_of(gradients: In) -> Gradients {
    match gradients.dtype() {
        DType::F32 => Gradients::F32(gradients.slice()),
        _ => Gradients::Bf16(gradients.slice()),
    }
}

/// The part of a tensor that belongs to a block.
///
/// # Safety
/// The block must lie in the tensor, and no other task may touch it.
#[inline(always)]
unsafe fn part<'a, T>(tensor: Shared<T>, start: usize, elements: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(tensor.at(start), elements) }
}

/// Rounds values by 16 bits of each random number, those from `shift` on.
#[inline(always)]
fn round(out: &mut [bf16], values: &[f32], random: &[u32], shift: u32) {
    for ((out, value), random) in out.iter_mut().zip(values).zip(random) {
        *out = round_stochastically(*value, (random >> shift) as u16);
    }
}

impl MomentAt {
    #[inline(always)]
    fn read<C: Codec>(self, map: &'static Map, start: usize, values: &mut [f32]) {
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

    /// `random` and `shift` are what bf16 are rounded with.
    #[inline(always)]
    fn write<C: Codec>(
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
    fn read(self, start: usize, values: &mut [f32]) {
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
                WeightsAt::Rounded(weights) => widen(part(weights, start, elements), values),
            }
        }
    }

    /// `random` is room for random numbers.
    #[inline(always)]
    fn write(self, start: usize, values: &[f32], update: &Update, random: &mut [u32]) {
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
                WeightsAt::Rounded(weights) => {
                    let index = update.first_index + start as u64;
                    random_run(!update.rates.key, index, random);
                    round(part(weights, start, elements), values, random, 0);
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

/// Updates a chunk with the widest instructions that the processor has: the bits are the same with any.
fn update_chunk(update: &Update, start: usize, elements: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::quantise::Avx512;
        use super::simd::{has_avx2, has_avx512};

        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
        fn avx512(update: &Update, start: usize, elements: usize) {
            update_blocks::<Avx512>(update, start, elements);
        }

        #[target_feature(enable = "avx2")]
        fn avx2(update: &Update, start: usize, elements: usize) {
            update_blocks::<Portable>(update, start, elements);
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
    update_blocks::<Portable>(update, start, elements);
}

#[inline(always)]
fn update_blocks<C: Codec>(update: &Update, start: usize, elements: usize) {
    let mut block = Block::default();
    for first in (start..start + elements).step_by(BLOCK) {
        update_block::<C>(
            update,
            first,
            BLOCK.min(start + elements - first),
            &mut block,
        );
    }
}

/// A block in f32, and random numbers for it. Made once a chunk: clearing it for every block would show.
struct Block {
    weights: [f32; BLOCK],
    first: [f32; BLOCK],
    second: [f32; BLOCK],
    gradients: [f32; BLOCK],
    random: [u32; BLOCK],
}

impl Default for Block {
    fn default() -> Block {
        Block {
            weights: [0.0; BLOCK],
            first: [0.0; BLOCK],
            second: [0.0; BLOCK],
            gradients: [0.0; BLOCK],
            random: [0; BLOCK],
        }
    }
}

#[inline(always)]
fn update_block<C: Codec>(update: &Update, start: usize, elements: usize, block: &mut Block) {
    let (weights, gradients) = (
        &mut block.weights[..elements],
        &mut block.gradients[..elements],
    );
    let (first, second) = (&mut block.first[..elements], &mut block.second[..elements]);
    let random = &mut block.random[..elements];
    update.weights.read(start, weights);
    update.first.read::<C>(&SIGNED, start, first);
    update.second.read::<C>(&UNSIGNED, start, second);
    match update.gradients {
        Gradients::F32(all) => gradients.copy_from_slice(&all[start..start + elements]),
        Gradients::Bf16(all) => widen(&all[start..start + elements], gradients),
    }
    step(weights, first, second, gradients, &update.rates);
    update.weights.write(start, weights, update, random);
    if let MomentAt::Bf16(_) = update.first {
        let index = update.first_index + start as u64;
        random_run(update.rates.key, index, random);
    }
    update.first.write::<C>(&SIGNED, start, first, (random, 0));
    update
        .second
        .write::<C>(&UNSIGNED, start, second, (random, 16));
}

#[inline(always)]
fn step(
    weights: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    gradients: &[f32],
    rates: &Rates,
) {
    let states = first.iter_mut().zip(second).zip(gradients);
    for (weight, ((m, v), gradient)) in weights.iter_mut().zip(states) {
        let gradient = gradient * rates.gradient_scale;
        *m = rates.beta1 * *m + (1.0 - rates.beta1) * gradient;
        *v = rates.beta2 * *v + (1.0 - rates.beta2) * gradient * gradient;
        let root = v.sqrt() * rates.root_scale + rates.eps;
        *weight = *weight * rates.keep - rates.step_size * *m / root;
    }
}
