//! Bandwidth of one AdamW update, in every form of its states, beside a multi-threaded copy measured in the same rounds.
//!
//! `cargo bench -p kernels --bench adamw [-- ELEMENTS] [-- WORD]`; a Markdown table on stdout, of the forms that WORD is
//! part of.

use half::bf16;
use kernels::cpu::Cpu;
use kernels::quantise::{BLOCK, SIGNED, UNSIGNED};
use kernels::random::random_u32;
use kernels::{AdamW, Kernels, MasterOperand, MomentOperand};
use memory::{DType, Element, In, Memory, Out};
use rayon::prelude::*;
use std::time::Instant;

const ROUNDS: usize = 7;

/// Far beyond any cache.
const ELEMENTS: usize = 32 << 20;

#[derive(Clone, Copy, PartialEq)]
enum Weights {
    F32,
    Master,
    Split,
    Split24,
    Rounded,
}

#[derive(Clone, Copy)]
struct Form {
    moments: DType,
    weights: Weights,
    gradients: DType,
}

impl Form {
    fn all() -> Vec<Form> {
        use Weights::{F32, Master, Rounded, Split, Split24};
        let of = |moments, weights, gradients| Form {
            moments,
            weights,
            gradients,
        };
        let mut forms = vec![];
        for moments in [DType::F32, DType::BF16, DType::U8] {
            forms.push(of(moments, F32, DType::F32));
            forms.push(of(moments, Master, DType::F32));
            forms.push(of(moments, Split, DType::BF16));
            forms.push(of(moments, Split24, DType::BF16));
            forms.push(of(moments, Rounded, DType::BF16));
        }
        forms
    }

    fn name(&self) -> String {
        let moments = match self.moments {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            _ => "8bit",
        };
        let weights = match self.weights {
            Weights::F32 => "f32 weights",
            Weights::Master => "bf16 weights, f32 master",
            Weights::Split => "bf16 weights, remainder",
            Weights::Split24 => "bf16 weights, a byte of a remainder",
            Weights::Rounded => "bf16 weights, no master",
        };
        let gradients = if self.gradients == DType::F32 {
            "f32"
        } else {
            "bf16"
        };
        format!("{moments} moments, {weights}, {gradients} gradients")
    }

    /// Bytes read and written, an element.
    fn bytes(&self) -> f64 {
        let moment = match self.moments {
            DType::U8 => 1.0 + 4.0 / BLOCK as f64,
            dtype => dtype.size_in_bytes() as f64,
        };
        let weights = match self.weights {
            Weights::F32 => 8.0,
            Weights::Master => 8.0 + 2.0,
            Weights::Split => 2.0 * (2.0 + 2.0),
            Weights::Split24 => 2.0 * (2.0 + 1.0),
            Weights::Rounded => 2.0 * 2.0,
        };
        4.0 * moment + weights + self.gradients.size_in_bytes() as f64
    }
}

/// Everything that the forms use, each its part.
struct Room {
    cpu: Kernels<Cpu>,
    f32_weights: Vec<f32>,
    bf16_weights: Vec<bf16>,
    remainders: Vec<i16>,
    remainder_bytes: Vec<u8>,
    f32_moments: [Vec<f32>; 2],
    bf16_moments: [Vec<bf16>; 2],
    codes: [Vec<u8>; 2],
    absmax: [Vec<f32>; 2],
    f32_gradients: Vec<f32>,
    bf16_gradients: Vec<bf16>,
}

impl Room {
    /// Weights of one, and random gradients.
    fn new(n: usize) -> Room {
        let gradient = |index: usize| {
            let random = random_u32(7, index as u64);
            (random as f32 / u32::MAX as f32 - 0.5) * 1e-2
        };
        let f32_gradients: Vec<f32> = (0..n).into_par_iter().map(gradient).collect();
        Room {
            cpu: Cpu::new(&Memory::host(), DType::F32).expect("no limit is set"),
            f32_weights: vec![1.0; n],
            bf16_weights: vec![bf16::ONE; n],
            remainders: vec![0; n],
            remainder_bytes: vec![0; n],
            f32_moments: [vec![0.0; n], vec![0.0; n]],
            bf16_moments: [vec![bf16::ZERO; n], vec![bf16::ZERO; n]],
            codes: [vec![SIGNED.zero; n], vec![UNSIGNED.zero; n]],
            absmax: [vec![0.0; n / BLOCK], vec![0.0; n / BLOCK]],
            bf16_gradients: f32_gradients.iter().map(|x| bf16::from_f32(*x)).collect(),
            f32_gradients,
        }
    }

    fn update(&mut self, form: Form) {
        let n = self.f32_weights.len();
        let f32_weights = Out::of_slice(&mut self.f32_weights, [n]);
        let bf16_weights = Out::of_slice(&mut self.bf16_weights, [n]);
        let remainders = Out::of_slice(&mut self.remainders, [n]);
        let bytes = Out::of_slice(&mut self.remainder_bytes, [n]);
        let (parameters, master) = match form.weights {
            Weights::F32 => (f32_weights, MasterOperand::Parameters),
            Weights::Master => (bf16_weights, MasterOperand::F32(f32_weights)),
            Weights::Split => (bf16_weights, MasterOperand::Remainder(remainders)),
            Weights::Split24 => (bf16_weights, MasterOperand::RemainderByte(bytes)),
            Weights::Rounded => (bf16_weights, MasterOperand::Parameters),
        };
        let [first, second] = &mut self.codes;
        let [first_absmax, second_absmax] = &mut self.absmax;
        let [f32_first, f32_second] = &mut self.f32_moments;
        let [bf16_first, bf16_second] = &mut self.bf16_moments;
        let (first_moment, second_moment) = match form.moments {
            DType::F32 => (plain(f32_first), plain(f32_second)),
            DType::BF16 => (plain(bf16_first), plain(bf16_second)),
            _ => (
                quantised(first, first_absmax),
                quantised(second, second_absmax),
            ),
        };
        let gradients = match form.gradients {
            DType::F32 => In::of_slice(&self.f32_gradients, [n]),
            _ => In::of_slice(&self.bf16_gradients, [n]),
        };
        let update = AdamW {
            parameters,
            master,
            first_moment,
            second_moment,
            gradients,
            rates: In::of_slice(&[1e-3f32, 1.0, 1.0], [3]),
            clip: In::of_slice(&[1.0f32, 1.0], [2]),
            key: In::of_slice(&[1u32, 2], [2]),
            first_index: 0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
        };
        self.cpu.run(update).expect("everything fits");
    }
}

fn plain<T: Element>(values: &mut [T]) -> MomentOperand<'_> {
    let n = values.len();
    MomentOperand::Plain(Out::of_slice(values, [n]))
}

fn quantised<'a>(codes: &'a mut [u8], absmax: &'a mut [f32]) -> MomentOperand<'a> {
    let (n, blocks) = (codes.len(), absmax.len());
    MomentOperand::Quantised {
        codes: Out::of_slice(codes, [n]),
        absmax: Out::of_slice(absmax, [blocks]),
    }
}

/// Seconds of a copy of `bytes` by all threads.
fn copy(from: &[u8], to: &mut [u8]) -> f64 {
    const PIECE: usize = 1 << 20;
    let start = Instant::now();
    to.par_chunks_mut(PIECE)
        .zip(from.par_chunks(PIECE))
        .for_each(|(to, from)| to.copy_from_slice(from));
    start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    let elements = arguments.iter().find_map(|argument| argument.parse().ok());
    let word = arguments
        .iter()
        .find(|argument| argument.parse::<usize>().is_err());
    let n = elements.unwrap_or(ELEMENTS).next_multiple_of(BLOCK);
    let mut room = Room::new(n);
    let (from, mut to) = (vec![1u8; 4 * n], vec![2u8; 4 * n]);
    let mut forms = Form::all();
    forms.retain(|form| word.is_none_or(|word| form.name().contains(word)));
    let mut copies = vec![];
    let mut ratios = vec![vec![]; forms.len()];
    let mut rates = vec![vec![]; forms.len()];
    for _ in 0..ROUNDS {
        for (index, form) in forms.iter().enumerate() {
            let copied = 2.0 * from.len() as f64 / copy(&from, &mut to) / 1e9;
            let start = Instant::now();
            room.update(*form);
            let moved = form.bytes() * n as f64 / start.elapsed().as_secs_f64() / 1e9;
            copies.push(copied);
            rates[index].push(moved);
            ratios[index].push(moved / copied);
        }
    }
    println!(
        "{n} elements, {} threads, copy {:.1} GB/s (read and written)\n",
        rayon::current_num_threads(),
        median(copies)
    );
    println!("| form | bytes an element | GB/s | of the copy |");
    println!("|---|---:|---:|---:|");
    for (index, form) in forms.iter().enumerate() {
        println!(
            "| {} | {:.2} | {:.1} | {:.0} % |",
            form.name(),
            form.bytes(),
            median(rates[index].clone()),
            100.0 * median(ratios[index].clone()),
        );
    }
}
