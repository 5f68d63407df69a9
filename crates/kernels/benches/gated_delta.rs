//! The gated delta rule, forward and backward: milliseconds at the fastest.
//!
//! `cargo bench -p kernels --bench gated_delta [-- SEQ [KEY_HEADS [VALUE_HEADS [HEAD_DIM]]]]`: by default a sequence of 4,096 tokens with
//! the heads of Qwen3-Next. f32, on as many threads as `RAYON_NUM_THREADS` says. `benches/peers/gated_delta.py` does the same in PyTorch.

use kernels::cpu::Cpu;
use kernels::random::random_u32;
use kernels::{DeltaShape, GatedDelta, GatedDeltaBackward, Init, Kernels, Target};
use memory::{Buffer, Category, DType, Dims, Memory};
use std::time::Instant;

fn main() {
    // cargo adds `--bench` to the arguments.
    let mut numbers = std::env::args().filter_map(|argument| argument.parse().ok());
    let usual = [4096, 16, 32, 128];
    let [seq, key_heads, value_heads, head_dim] =
        usual.map(|usual| numbers.next().unwrap_or(usual));
    let mut bench = Bench::new(DeltaShape {
        batch: 1,
        seq,
        key_heads,
        value_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        state_interval: 1,
    });
    let mut fastest = [f64::INFINITY; 2];
    for _ in 0..5 {
        let passes: [fn(&mut Bench); 2] = [Bench::forward, Bench::backward];
        for (fastest, pass) in fastest.iter_mut().zip(passes) {
            let start = Instant::now();
            pass(&mut bench);
            *fastest = fastest.min(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    println!(
        "{seq} tokens, {key_heads} key heads, {value_heads} value heads of {head_dim}, f32, {} threads: {:.0} ms forward, {:.0} ms backward",
        rayon::current_num_threads(),
        fastest[0],
        fastest[1]
    );
}

/// Everything that both passes read and write.
struct Bench {
    kernels: Kernels<Cpu>,
    shape: DeltaShape,
    /// Queries, keys and values, and their gradient.
    mixed: [Buffer; 2],
    /// `b`, `a`, and their gradients.
    gates: [Buffer; 4],
    /// `a_log`, `dt_bias`, and their gradients.
    of_heads: [Buffer; 4],
    /// The output, and its gradient.
    out: [Buffer; 2],
    states: Buffer,
    /// Scratch of both passes.
    scratch: [Buffer; 2],
}

impl Bench {
    fn new(shape: DeltaShape) -> Bench {
        let memory = Memory::host();
        let room = |dims: &[usize], seed: u64| {
            let dims = Dims::try_from(dims).expect("few dimensions");
            let leased = memory.lease(Category::Temporary, "bench", dims, DType::F32);
            let mut room = leased.expect("there is no limit");
            for (index, value) in (0..).zip(room.view_mut().slice_mut::<f32>()) {
                *value = random_u32(seed, index) as f32 / (1u32 << 31) as f32 - 1.0;
            }
            room
        };
        let scratch = [
            GatedDelta::scratch_elements(Target::Cpu, shape),
            GatedDeltaBackward::scratch_elements(Target::Cpu, shape),
        ];
        Bench {
            kernels: Cpu::new(&memory, DType::F32).expect("f32 needs no workspace"),
            shape,
            mixed: [0, 1].map(|seed| room(&shape.mixed(), seed)),
            gates: [2, 3, 4, 5].map(|seed| room(&shape.gates(), seed)),
            of_heads: [6, 7, 8, 9].map(|seed| room(&[shape.value_heads], seed)),
            out: [10, 11].map(|seed| room(&shape.values(), seed)),
            states: room(&shape.states(), 12),
            scratch: scratch.map(|elements| room(&[elements], 13)),
        }
    }

    fn forward(&mut self) {
        let called = self.kernels.run(GatedDelta {
            out: Some(self.out[0].view_mut()),
            states: Some(self.states.view_mut()),
            scratch: self.scratch[0].view_mut(),
            mixed: self.mixed[0].view(),
            b: self.gates[0].view(),
            a: self.gates[1].view(),
            a_log: self.of_heads[0].view(),
            dt_bias: self.of_heads[1].view(),
            shape: self.shape,
            documents: None,
        });
        called.expect("the tensors fit");
    }

    fn backward(&mut self) {
        let [mixed, dmixed] = &mut self.mixed;
        let [b, a, db, da] = &mut self.gates;
        let [a_log, dt_bias, da_log, ddt_bias] = &mut self.of_heads;
        let called = self.kernels.run(GatedDeltaBackward {
            dmixed: dmixed.view_mut(),
            db: db.view_mut(),
            da: da.view_mut(),
            da_log: da_log.view_mut(),
            da_log_init: Init::Overwrite,
            ddt_bias: ddt_bias.view_mut(),
            ddt_bias_init: Init::Overwrite,
            scratch: self.scratch[1].view_mut(),
            dout: self.out[1].view(),
            states: self.states.view(),
            mixed: mixed.view(),
            b: b.view(),
            a: a.view(),
            a_log: a_log.view(),
            dt_bias: dt_bias.view(),
            shape: self.shape,
            documents: None,
        });
        called.expect("the tensors fit");
    }
}
