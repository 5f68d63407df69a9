//! Attention with and without stored probabilities, forward and backward: milliseconds at the fastest.
//!
//! `cargo bench -p kernels --bench attention [-- BATCH [KV_HEADS [HEAD_DIM]]]`: by default one sequence, and 8
//! key-value heads of 64 for the 8 query heads. f32, on as many threads as `RAYON_NUM_THREADS` says.
//! `benches/peers/sdpa.py` does the same in PyTorch.

use kernels::cpu::Cpu;
use kernels::{
    Attention, AttentionBackward, AttentionShape, FlashAttention, FlashAttentionBackward,
    FlashOptions, Init, Kernels, Target,
};
use memory::{Buffer, Category, DType, Memory};
use std::time::Instant;

const SEQUENCES: [usize; 4] = [256, 512, 1024, 2048];

fn main() {
    // cargo adds `--bench` to the arguments.
    let mut numbers = std::env::args().filter_map(|argument| argument.parse().ok());
    let [batch, kv_heads, head_dim] = [1, 8, 64].map(|usual| numbers.next().unwrap_or(usual));
    println!(
        "{batch} x seq, 8 heads of {head_dim} on {kv_heads}, f32, {} threads; ms, the fastest of several",
        rayon::current_num_threads()
    );
    println!(
        "| seq | eager forward | flash forward | ratio | eager backward | flash backward | ratio | both, ratio |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|");
    for seq in SEQUENCES {
        let shape = AttentionShape::new([batch, seq], [8, kv_heads], head_dim);
        let mut bench = Bench::new(shape);
        let [eager, flash] = bench.fastest();
        let ratios = [0, 1].map(|pass| eager[pass] / flash[pass]);
        let both = (eager[0] + eager[1]) / (flash[0] + flash[1]);
        println!(
            "| {seq} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {both:.2} |",
            eager[0], flash[0], ratios[0], eager[1], flash[1], ratios[1]
        );
    }
}

/// Everything that both ways read and write.
struct Bench {
    kernels: Kernels<Cpu>,
    shape: AttentionShape,
    /// q, k, v, dout.
    inputs: [Buffer; 4],
    /// dq, dk, dv.
    gradients: [Buffer; 3],
    out: Buffer,
    probs: Buffer,
    lse: Buffer,
    /// Scratch of the eager operations, then of the others.
    scratch: [Buffer; 4],
}

impl Bench {
    fn new(shape: AttentionShape) -> Bench {
        let memory = Memory::host();
        let room = |dims: &[usize]| {
            let dims = memory::Dims::try_from(dims).expect("few dimensions");
            memory
                .lease(Category::Temporary, "bench", dims, DType::F32)
                .expect("there is no limit")
        };
        let (like_q, like_k) = (|| room(&shape.q()), || room(&shape.k()));
        let (cpu, f32) = (Target::Cpu, DType::F32);
        let scratch = [
            Attention::scratch_elements(cpu, shape, f32, true),
            AttentionBackward::scratch_elements(cpu, shape, f32, false),
            FlashAttention::scratch_elements(cpu, shape, f32),
            FlashAttentionBackward::scratch_elements(cpu, shape, f32),
        ];
        let mut inputs = [like_q(), like_k(), like_k(), like_q()];
        for (seed, input) in (0..).zip(&mut inputs) {
            fill(input.view_mut().slice_mut(), seed);
        }
        Bench {
            kernels: Cpu::new(&memory, DType::F32).expect("f32 needs no workspace"),
            shape,
            inputs,
            gradients: [like_q(), like_k(), like_k()],
            out: like_q(),
            probs: room(&shape.probs()),
            lse: room(&[shape.batch, shape.heads, shape.seq]),
            scratch: scratch.map(|elements| room(&[elements])),
        }
    }

    /// Milliseconds of forward and backward, eager and flash, taken in turn.
    fn fastest(&mut self) -> [[f64; 2]; 2] {
        let mut fastest = [[f64::INFINITY; 2]; 2];
        let rounds = (16 * 1024 / self.shape.seq / self.shape.batch).max(5);
        for _ in 0..rounds {
            let passes: [[fn(&mut Bench); 2]; 2] = [
                [Bench::eager_forward, Bench::eager_backward],
                [Bench::flash_forward, Bench::flash_backward],
            ];
            for (fastest, passes) in fastest.iter_mut().zip(passes) {
                for (fastest, pass) in fastest.iter_mut().zip(passes) {
                    let start = Instant::now();
                    pass(self);
                    *fastest = fastest.min(start.elapsed().as_secs_f64() * 1e3);
                }
            }
        }
        fastest
    }

    fn eager_forward(&mut self) {
        let [q, k, v, _] = self.inputs.each_ref().map(|input| input.view());
        let (out, probs) = (self.out.view_mut(), self.probs.view_mut());
        let scratch = self.scratch[0].view_mut();
        let called = self.kernels.run(Attention {
            out: Some(out),
            probs: Some(probs),
            lse: None,
            scratch,
            q,
            k,
            v,
            sinks: None,
            shape: self.shape,
            dropout: None,
        });
        called.expect("the tensors fit");
    }

    fn eager_backward(&mut self) {
        let [q, k, v, dout] = self.inputs.each_ref().map(|input| input.view());
        let [dq, dk, dv] = self
            .gradients
            .each_mut()
            .map(|gradient| gradient.view_mut());
        let (probs, scratch) = (self.probs.view(), self.scratch[1].view_mut());
        let called = self.kernels.run(AttentionBackward {
            dq,
            dk,
            dv,
            dsinks: None,
            dsinks_init: Init::Overwrite,
            scratch,
            dout,
            probs,
            lse: None,
            q,
            k,
            v,
            sinks: None,
            shape: self.shape,
            dropout: None,
        });
        called.expect("the tensors fit");
    }

    fn flash_forward(&mut self) {
        let [q, k, v, _] = self.inputs.each_ref().map(|input| input.view());
        let (out, lse) = (self.out.view_mut(), self.lse.view_mut());
        let (scratch, options) = (self.scratch[2].view_mut(), FlashOptions::default());
        let called = self.kernels.run(FlashAttention {
            out: Some(out),
            lse: Some(lse),
            scratch,
            q,
            k,
            v,
            sinks: None,
            shape: self.shape,
            options,
        });
        called.expect("the tensors fit");
    }

    fn flash_backward(&mut self) {
        let [q, k, v, dout] = self.inputs.each_ref().map(|input| input.view());
        let [dq, dk, dv] = self
            .gradients
            .each_mut()
            .map(|gradient| gradient.view_mut());
        let (out, lse) = (self.out.view(), self.lse.view());
        let (scratch, options) = (self.scratch[3].view_mut(), FlashOptions::default());
        let called = self.kernels.run(FlashAttentionBackward {
            dq,
            dk,
            dv,
            dsinks: None,
            dsinks_init: Init::Overwrite,
            scratch,
            dout,
            out,
            lse,
            q,
            k,
            v,
            sinks: None,
            shape: self.shape,
            options,
        });
        called.expect("the tensors fit");
    }
}

/// Numbers between -1 and 1.
fn fill(values: &mut [f32], seed: u64) {
    for (index, value) in (0..).zip(values) {
        *value = kernels::random::random_u32(seed, index) as f32 / (1u32 << 31) as f32 - 1.0;
    }
}
