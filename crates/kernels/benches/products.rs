//! Products of bf16 by each set of instructions that the processor has, and of f32 by the library: milliseconds at the fastest.
//!
//! `cargo bench -p kernels --bench products [-- TOKENS [HIDDEN [VOCABULARY]]]`: by default 512 tokens, 896, 32,000; on as many
//! threads as `RAYON_NUM_THREADS` says.

use kernels::cpu::{Cpu, Instructions};
use kernels::{Init, Matmul};
use memory::{Buffer, Category, DType, In, Memory};
use std::time::Instant;

const ROUNDS: usize = 7;

fn main() {
    // cargo adds `--bench` to the arguments.
    let mut numbers = std::env::args().filter_map(|argument| argument.parse().ok());
    let [tokens, hidden, vocabulary] =
        [512, 896, 32_000].map(|usual| numbers.next().unwrap_or(usual));
    println!(
        "{} threads; ms, the fastest of {ROUNDS}, and TFLOP/s",
        rayon::current_num_threads()
    );
    print!("| product | m x k x n | f32 |");
    let here = Instructions::ALL.into_iter();
    let here: Vec<_> = here
        .filter(|instructions| instructions.are_here())
        .collect();
    here.iter()
        .for_each(|instructions| print!(" {instructions:?} |"));
    println!("\n|---|---|{}", "---:|".repeat(1 + here.len()));
    for (inputs, outputs) in [
        (hidden, hidden),
        (hidden, 4864),
        (4864, hidden),
        (hidden, vocabulary),
    ] {
        for (name, tokens) in [("y", 1), ("y", tokens), ("dx", tokens), ("dw", tokens)] {
            let [f32, bf16] = [DType::F32, DType::BF16]
                .map(|dtype| Linear::new(dtype, [tokens, inputs, outputs]));
            let sizes = match name {
                "y" => [tokens, inputs, outputs],
                "dx" => [tokens, outputs, inputs],
                _ => [outputs, tokens, inputs],
            };
            print!("| {name} | {} x {} x {} |", sizes[0], sizes[1], sizes[2]);
            f32.report(name, None);
            here.iter()
                .for_each(|instructions| bf16.report(name, Some(*instructions)));
            println!();
        }
    }
}

/// A linear layer's tensors: `x [tokens, inputs]`, `weight [outputs, inputs]`, `dy [tokens, outputs]`.
struct Linear {
    memory: Memory,
    dtype: DType,
    sizes: [usize; 3],
    x: Buffer,
    weight: Buffer,
    dy: Buffer,
}

impl Linear {
    fn new(dtype: DType, sizes: [usize; 3]) -> Linear {
        let memory = Memory::host();
        let [tokens, inputs, outputs] = sizes;
        let room = |dims: [usize; 2]| {
            let lease = memory.lease(Category::Temporary, "bench", dims, dtype);
            let mut room = lease.expect("there is no limit");
            match dtype {
                DType::F32 => room.view_mut().slice_mut::<f32>().fill(0.7),
                _ => room
                    .view_mut()
                    .slice_mut::<half::bf16>()
                    .fill(half::bf16::from_f32(0.7)),
            }
            room
        };
        let (x, weight, dy) = (
            room([tokens, inputs]),
            room([outputs, inputs]),
            room([tokens, outputs]),
        );
        Linear {
            memory,
            dtype,
            sizes,
            x,
            weight,
            dy,
        }
    }

    fn report(&self, name: &str, instructions: Option<Instructions>) {
        let kernels = Cpu::new(&self.memory, self.dtype).expect("there is no limit");
        let kernels = match instructions {
            Some(instructions) => kernels.multiplying_by(instructions),
            None => kernels,
        };
        let (a, b): (In, In) = match name {
            "y" => (self.x.view(), self.weight.view().t()),
            "dx" => (self.dy.view(), self.weight.view()),
            _ => (self.dy.view().t(), self.x.view()),
        };
        let dims = [a.dims()[0], b.dims()[1]];
        let lease = self
            .memory
            .lease(Category::Temporary, "out", dims, self.dtype);
        let mut out = lease.expect("there is no limit");
        let mut fastest = f64::INFINITY;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let product = Matmul {
                out: out.view_mut(),
                a,
                b,
                bias: None,
                init: Init::Overwrite,
            };
            kernels.run(product).expect("the tensors fit");
            fastest = fastest.min(start.elapsed().as_secs_f64());
        }
        let rate = 2e-12 * self.sizes.iter().product::<usize>() as f64 / fastest;
        print!(" {:.3} ({rate:.2}) |", fastest * 1e3);
    }
}
