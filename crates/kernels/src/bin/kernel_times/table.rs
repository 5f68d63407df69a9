//! The kernels that are timed, one a line.

use crate::models::ModelShapes;
use crate::operands::{CaseTensors, dims};
use kernels::quantise::BLOCK;
use kernels::*;
use memory::DType::{BF16, F8E4M3, F8E5M2, F32, F64, I32, U8};
use memory::GRAIN_ELEMENTS;

/// Builds an operation of a model; none where the model has no such.
pub type Build = for<'a> fn(&ModelShapes, &'a CaseTensors) -> Option<Operation<'a>>;

const ROUTING: Routing = Routing { choices: 0, score: RouterScore::Softmax, is_normed: true, factor: 1.0, groups: None };

fn some<'a>(operation: impl Into<Operation<'a>>) -> Option<Operation<'a>> {
    Some(operation.into())
}

/// None for a model with experts.
fn dense(m: &ModelShapes) -> Option<()> {
    m.experts.is_none().then_some(())
}

/// Tokens, and the inputs and outputs of the matrix that products are timed with.
fn linear(m: &ModelShapes) -> [usize; 3] {
    [m.tokens(), m.hidden, m.widest()]
}

/// Tokens, the rows of their choices, and gate and up.
fn experts(m: &ModelShapes) -> Option<([usize; 2], [usize; 3])> {
    let [_, choices] = m.experts?;
    Some(([m.tokens(), m.tokens() * choices], m.gate_up()))
}

/// A bias of experts, so wide, and the experts of the choices.
fn bias_of_experts<'a>(m: &ModelShapes, o: &'a CaseTensors, width: usize) -> Option<ExpertBias<'a>> {
    let [experts, _] = m.experts?;
    Some(ExpertBias { bias: o.input(BF16, [experts, width]), ids: o.grouped(m, 0)? })
}

fn turn<'a>(m: &ModelShapes, o: &'a CaseTensors) -> Option<Turn<'a>> {
    let seq = m.batch[1];
    let table = o.input(F32, [2, seq, m.head_dim / 2]);
    Some(Turn { head_dim: m.head_dim, table, q_table: None, positions: Positions::Sequences(seq) })
}

fn scales<'a>(o: &'a CaseTensors) -> [memory::In<'a>; 2] {
    [0, 1].map(|_| o.full(F32, [1], 1.0))
}

/// The layer of the gated delta rule that a model would have with a state for each head of queries.
fn delta(m: &ModelShapes) -> DeltaShape {
    let ([batch, seq], [value_heads, key_heads]) = (m.batch, m.heads);
    DeltaShape { batch, seq, key_heads, value_heads, key_dim: m.head_dim, value_dim: m.head_dim, state_interval: 1 }
}

/// The inputs of the rule in such a layer: `mixed`, `b`, `a`, `a_log`, `dt_bias`.
fn of_delta<'a>(shape: DeltaShape, o: &'a CaseTensors) -> [memory::In<'a>; 5] {
    let gates = [0, 1].map(|_| o.input(BF16, shape.gates()));
    let of_heads = [0, 1].map(|_| o.input(F32, [shape.value_heads]));
    [o.input(BF16, shape.mixed()), gates[0], gates[1], of_heads[0], of_heads[1]]
}

/// The factors of a variance of gate and up, and their shape.
fn factored<'a>(m: &ModelShapes, o: &'a CaseTensors) -> (VarianceOperand<'a>, MatricesShape) {
    let [matrices, rows, columns] = m.gate_up();
    let shape = MatricesShape { matrices, rows, columns };
    let [factors, columns] = [shape.all_rows(), shape.all_columns()].map(|count| o.full(F32, [count], 1.0));
    (VarianceOperand::Factors { factors, columns, first: 0, shape }, shape)
}

#[derive(Clone, Copy)]
enum States { F32, Bf16, EightBit }

/// An update of a block's parameters: of bf16 weights with a master and f32 states, or without one.
fn adamw<'a>(m: &ModelShapes, o: &'a CaseTensors, states: States) -> Option<Operation<'a>> {
    let n = m.block();
    let moment = || match states {
        States::F32 => MomentOperand::Plain(o.out(F32, [n])),
        States::Bf16 => MomentOperand::Plain(o.out(BF16, [n])),
        States::EightBit => MomentOperand::Quantised { codes: o.changed(U8, [n]), absmax: o.out(F32, [n.div_ceil(BLOCK)]) },
    };
    let (master, gradients) = match states {
        States::F32 => (MasterOperand::F32(o.changed(F32, [n])), F32),
        States::Bf16 | States::EightBit => (MasterOperand::Parameters, BF16),
    };
    some(AdamW {
        parameters: o.changed(BF16, [n]), master, first_moment: moment(), second_moment: moment(), gradients: o.input(gradients, [n]),
        rates: o.full(F32, [3], 1e-3), clip: o.full(F32, [2], 1.0), key: o.key(), first_index: 0, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1,
    })
}

pub const TABLE: &[(&str, Build)] = &[
    ("flash_attention", |m, o| {
        let ([q, k, v], shape) = (o.qkv(m), m.attention());
        some(FlashAttention {
            out: Some(o.out(BF16, dims(&q))), lse: Some(o.out(F32, [m.batch[0], m.heads[0], m.batch[1]])),
            scratch: o.out(F32, [FlashAttention::scratch_elements(Target::Cuda, shape, BF16)]), q, k, v, sinks: None, shape, options: FlashOptions::default(),
        })
    }),
    ("flash_attention_backward", |m, o| {
        let ([q, k, v], shape) = (o.qkv(m), m.attention());
        let [dq, dk, dv] = [q, k, v].map(|x| o.out(BF16, dims(&x)));
        some(FlashAttentionBackward {
            dq, dk, dv, dsinks: None, dsinks_init: Init::Overwrite, scratch: o.out(F32, [FlashAttentionBackward::scratch_elements(Target::Cuda, shape, BF16)]),
            dout: o.input(BF16, dims(&q)), out: o.input(BF16, dims(&q)), q, k, v, sinks: None, shape, options: FlashOptions::default(),
            // About that of scores near zero.
            lse: o.full(F32, [m.batch[0], m.heads[0], m.batch[1]], (m.batch[1] as f64 / 2.0).ln()),
        })
    }),
    ("grouped_matmul", |m, o| {
        let ([t, r], [e, n, k]) = experts(m)?;
        let rows = ExpertRows { x: o.input(BF16, [t, k]), row_token: o.grouped(m, 2) };
        some(GroupedMatmul { out: o.out(BF16, [r, n]), scratch: o.out(F32, [0]), rows, weights: o.input(BF16, [e, n, k]), by_columns: false, offsets: o.grouped(m, 1)?, of_experts: e })
    }),
    ("grouped_matmul.data", |m, o| {
        let ([_, r], [e, n, k]) = experts(m)?;
        let rows = ExpertRows::in_order(o.input(BF16, [r, n]));
        some(GroupedMatmul { out: o.out(BF16, [r, k]), scratch: o.out(F32, [0]), rows, weights: o.input(BF16, [e, n, k]), by_columns: true, offsets: o.grouped(m, 1)?, of_experts: e })
    }),
    ("grouped_gradient", |m, o| {
        let ([t, r], [e, n, k]) = experts(m)?;
        let rows = ExpertRows { x: o.input(BF16, [t, k]), row_token: o.grouped(m, 2) };
        some(GroupedGradient {
            out: o.changed(F32, [e, n, k]), scratch: o.out(F32, [0]), dy: ExpertRows::in_order(o.input(BF16, [r, n])), rows,
            offsets: o.grouped(m, 1)?, of_experts: e, init: Init::Accumulate,
        })
    }),
    ("gated_delta", |m, o| {
        let shape = delta(m);
        let [mixed, b, a, a_log, dt_bias] = of_delta(shape, o);
        some(GatedDelta {
            out: Some(o.out(BF16, shape.values())), states: Some(o.out(F32, shape.states())), scratch: o.out(F32, [GatedDelta::scratch_elements(Target::Cuda, shape)]),
            mixed, b, a, a_log, dt_bias, shape, documents: None,
        })
    }),
    ("gated_delta_backward", |m, o| {
        let shape = delta(m);
        let [mixed, b, a, a_log, dt_bias] = of_delta(shape, o);
        let [db, da] = [0, 1].map(|_| o.out(BF16, shape.gates()));
        let [da_log, ddt_bias] = [0, 1].map(|_| o.changed(F32, [shape.value_heads]));
        some(GatedDeltaBackward {
            dmixed: o.out(BF16, shape.mixed()), db, da, da_log, da_log_init: Init::Accumulate, ddt_bias, ddt_bias_init: Init::Accumulate,
            scratch: o.out(F32, [GatedDeltaBackward::scratch_elements(Target::Cuda, shape)]),
            dout: o.input(BF16, shape.values()), states: o.input(F32, shape.states()), mixed, b, a, a_log, dt_bias, shape, documents: None,
        })
    }),
    ("short_convolution", |m, o| {
        let x = o.input(BF16, delta(m).mixed());
        some(ShortConvolution { out: o.out(BF16, dims(&x)), x, weight: o.input(BF16, [x.dims()[1], 4]), seq: m.batch[1], documents: None })
    }),
    ("short_convolution_backward", |m, o| {
        let x = o.input(BF16, delta(m).mixed());
        let taps = [x.dims()[1], 4];
        some(ShortConvolutionBackward {
            dx: o.out(BF16, dims(&x)), dweight: o.changed(F32, taps), init: Init::Accumulate, dout: o.input(BF16, dims(&x)), x, weight: o.input(BF16, taps), seq: m.batch[1], documents: None,
        })
    }),
    ("gated_norm", |m, o| {
        let [x, z] = [0, 1].map(|_| o.input(BF16, delta(m).values()));
        some(GatedNorm { y: Some(o.out(BF16, dims(&x))), rstd: Some(o.out(F32, delta(m).gates())), x, z, weight: o.input(BF16, [m.head_dim]), eps: 1e-6 })
    }),
    ("gated_norm_backward", |m, o| {
        let [x, z, dy] = [0, 1, 2].map(|_| o.input(BF16, delta(m).values()));
        let [dx, dz] = [0, 1].map(|_| o.out(BF16, dims(&x)));
        some(GatedNormBackward { dx, dz, dweight: o.changed(F32, [m.head_dim]), init: Init::Accumulate, dy, x, z, weight: o.input(BF16, [m.head_dim]), rstd: o.full(F32, delta(m).gates(), 1.7) })
    }),
    // A token for each of 32 sequences.
    ("cached_delta", |m, o| {
        let shape = DeltaShape { batch: 32, seq: 1, ..delta(m) };
        let [mixed, b, a, a_log, dt_bias] = of_delta(shape, o);
        let states = o.changed(F32, [shape.batch, shape.value_heads, shape.key_dim, shape.value_dim]);
        some(CachedDelta { out: o.out(BF16, shape.values()), states, mixed, b, a, a_log, dt_bias, lengths: o.ids([shape.batch], 4096), shape })
    }),
    ("cached_convolution", |m, o| {
        let x = o.input(BF16, DeltaShape { batch: 32, seq: 1, ..delta(m) }.mixed());
        let [batch, width] = [0, 1].map(|dim| x.dims()[dim]);
        some(CachedConvolution { out: o.out(BF16, dims(&x)), before: o.changed(BF16, [batch, 3, width]), x, weight: o.input(BF16, [width, 4]), lengths: o.ids([batch], 4096) })
    }),
    ("sigmoid_gate", |m, o| {
        let [x, gate] = [0, 1].map(|_| o.input(BF16, [m.tokens(), m.qkv_widths()[0]]));
        some(SigmoidGate { out: o.out(BF16, dims(&x)), x, gate })
    }),
    ("sigmoid_gate_backward", |m, o| {
        let [x, gate, dout] = [0, 1, 2].map(|_| o.input(BF16, [m.tokens(), m.qkv_widths()[0]]));
        let [dx, dgate] = [0, 1].map(|_| o.out(BF16, dims(&x)));
        some(SigmoidGateBackward { dx, dgate, dout, x, gate })
    }),
    ("matmul", |m, o| {
        let [t, k, n] = linear(m);
        some(Matmul { out: o.out(BF16, [t, n]), a: o.input(BF16, [t, k]), b: o.input(BF16, [n, k]).t(), bias: None, init: Init::Overwrite })
    }),
    ("matmul.data", |m, o| {
        let [t, k, n] = linear(m);
        some(Matmul { out: o.out(BF16, [t, k]), a: o.input(BF16, [t, n]), b: o.input(BF16, [n, k]), bias: None, init: Init::Overwrite })
    }),
    ("matmul.weights", |m, o| {
        let [t, k, n] = linear(m);
        some(Matmul { out: o.changed(F32, [n, k]), a: o.input(BF16, [t, n]).t(), b: o.input(BF16, [t, k]), bias: None, init: Init::Accumulate })
    }),
    ("scaled_mm", |m, o| {
        let [t, k, n] = linear(m);
        let (a, b) = (o.input(F8E4M3, [t, k]), o.input(F8E4M3, [n, k]));
        some(ScaledMatmul { out: o.out(BF16, [t, n]), a, b, scales: scales(o), bias: None, init: Init::Overwrite, fast_accumulation: false })
    }),
    ("scaled_mm.fast", |m, o| {
        let [t, k, n] = linear(m);
        let (a, b) = (o.input(F8E4M3, [t, k]), o.input(F8E4M3, [n, k]));
        some(ScaledMatmul { out: o.out(BF16, [t, n]), a, b, scales: scales(o), bias: None, init: Init::Overwrite, fast_accumulation: true })
    }),
    ("scaled_mm.data", |m, o| {
        let [t, k, n] = linear(m);
        let (a, b) = (o.input(F8E5M2, [t, n]), o.input(F8E4M3, [k, n]));
        some(ScaledMatmul { out: o.out(BF16, [t, k]), a, b, scales: scales(o), bias: None, init: Init::Overwrite, fast_accumulation: false })
    }),
    ("scaled_mm.weights", |m, o| {
        let [t, k, n] = linear(m);
        let (a, b) = (o.input(F8E5M2, [n, t]), o.input(F8E4M3, [k, t]));
        some(ScaledMatmul { out: o.changed(F32, [n, k]), a, b, scales: scales(o), bias: None, init: Init::Accumulate, fast_accumulation: false })
    }),
    ("abs_max", |m, o| some(AbsMax { out: o.out(F32, [1]), x: o.input(BF16, [m.tokens(), m.widest()]) })),
    ("quantise", |m, o| {
        let x = o.input(BF16, [m.tokens(), m.widest()]);
        some(Quantise { codes: o.out(F8E4M3, dims(&x)), scale: o.out(F32, [1]), underflows: None, x, largest: o.full(F32, [1], 1.0) })
    }),
    ("quantise_transposed", |m, o| {
        let x = o.input(BF16, [m.tokens(), m.widest()]);
        some(QuantiseTransposed { codes: o.out(F8E4M3, [x.dims()[1], x.dims()[0]]), scale: o.out(F32, [1]), x, largest: o.full(F32, [1], 1.0) })
    }),
    ("transpose_codes", |m, o| {
        let x = o.input(F8E4M3, [m.tokens(), m.widest()]);
        some(TransposeCodes { out: o.out(F8E4M3, [x.dims()[1], x.dims()[0]]), x })
    }),
    ("rms_norm", |m, o| {
        let x = o.input(BF16, [m.tokens(), m.hidden]);
        some(RmsNorm { y: Some(o.out(BF16, dims(&x))), rstd: Some(o.out(F32, [m.tokens()])), form: OutputForm::Values, x, weight: o.input(BF16, [m.hidden]), plus_one: false, eps: 1e-6 })
    }),
    ("rms_norm_backward", |m, o| {
        let x = o.input(BF16, [m.tokens(), m.hidden]);
        some(RmsNormBackward {
            dx: o.changed(BF16, dims(&x)), dx_init: Init::Accumulate, dweight: o.changed(F32, [m.hidden]), dweight_init: Init::Accumulate,
            dy: o.input(BF16, dims(&x)), x, weight: o.input(BF16, [m.hidden]), plus_one: false, rstd: o.full(F32, [m.tokens()], 1.7),
        })
    }),
    ("split_qkv", |m, o| {
        let [q, k, v] = m.qkv_widths().map(|width| Some(o.out(BF16, [m.tokens(), width])));
        let [queries, keys, values] = m.qkv_widths();
        some(SplitQkv { q, k, v, qkv: o.input(BF16, [m.tokens(), queries + keys + values]), kv_widths: [keys, values], turn: turn(m, o) })
    }),
    ("join_qkv", |m, o| {
        let [q, k, v] = o.qkv(m);
        some(JoinQkv { qkv: o.out(BF16, [m.tokens(), m.qkv_widths().iter().sum()]), q, k, v, turn: turn(m, o), largest: None })
    }),
    ("swiglu", |m, o| {
        dense(m)?;
        some(GatedActivation { act: o.out(BF16, [m.tokens(), m.ffn]), gate_up: o.input(BF16, [m.tokens(), 2 * m.ffn]), function: GateFunction::Silu, form: OutputForm::Values })
    }),
    ("geglu", |m, o| {
        dense(m)?;
        some(GatedActivation { act: o.out(BF16, [m.tokens(), m.ffn]), gate_up: o.input(BF16, [m.tokens(), 2 * m.ffn]), function: GateFunction::GeluTanh, form: OutputForm::Values })
    }),
    ("swiglu_backward", |m, o| {
        dense(m)?;
        some(GatedActivationBackward { gate_up: o.changed(BF16, [m.tokens(), 2 * m.ffn]), dact: o.input(BF16, [m.tokens(), m.ffn]), function: GateFunction::Silu, largest: None })
    }),
    ("weighed_swiglu", |m, o| {
        let ([_, r], _) = experts(m)?;
        some(WeighedGatedActivation { act: o.out(BF16, [r, m.ffn]), gate_up: o.input(BF16, [r, 2 * m.ffn]), function: GateFunction::Silu, weights: o.input(F32, [r]), row_slot: o.grouped(m, 3), bias: None })
    }),
    ("weighed_swiglu_backward", |m, o| {
        let ([_, r], _) = experts(m)?;
        some(WeighedGatedActivationBackward {
            gate_up: o.changed(BF16, [r, 2 * m.ffn]), function: GateFunction::Silu, dweights: o.out(F32, [r]), dweights_init: Init::Overwrite, dact: o.input(BF16, [r, m.ffn]), weights: o.input(F32, [r]), row_slot: o.grouped(m, 3), bias: None,
        })
    }),
    ("sum_rows", |m, o| {
        let ([t, r], _) = experts(m)?;
        some(SumRows { out: o.out(BF16, [t, m.hidden]), rows: o.input(BF16, [r, m.hidden]), slot_row: o.grouped(m, 4)?, bias: None, init: Init::Overwrite })
    }),
    ("sum_rows.biased", |m, o| {
        let ([t, r], _) = experts(m)?;
        let bias = WeighedBias { of: bias_of_experts(m, o, m.hidden)?, weights: o.input(F32, [r]) };
        some(SumRows { out: o.out(BF16, [t, m.hidden]), rows: o.input(BF16, [r, m.hidden]), slot_row: o.grouped(m, 4)?, bias: Some(bias), init: Init::Overwrite })
    }),
    ("weighed_swiglu.biased", |m, o| {
        let ([_, r], _) = experts(m)?;
        let (function, bias) = (GateFunction::ClampedSwish { alpha: 1.702, limit: 7.0 }, bias_of_experts(m, o, 2 * m.ffn));
        some(WeighedGatedActivation { act: o.out(BF16, [r, m.ffn]), gate_up: o.input(BF16, [r, 2 * m.ffn]), function, weights: o.input(F32, [r]), row_slot: o.grouped(m, 3), bias })
    }),
    ("expert_bias_gradient", |m, o| {
        let ([_, r], [e, n, _]) = experts(m)?;
        let dy = ExpertRows::in_order(o.input(BF16, [r, n]));
        some(ExpertBiasGradient { out: o.changed(F32, [e, n]), dy, weights: None, offsets: o.grouped(m, 1)?, init: Init::Accumulate })
    }),
    ("expert_bias_dweights", |m, o| {
        let ([t, r], _) = experts(m)?;
        some(ExpertBiasDweights { dweights: o.out(F32, [t, r / t]), dy: o.input(BF16, [t, m.hidden]), bias: bias_of_experts(m, o, m.hidden)? })
    }),
    ("route", |m, o| {
        let (t, [e, choices]) = (m.tokens(), m.experts?);
        some(Route {
            ids: Some(o.out(I32, [t, choices])), weights: Some(o.out(F32, [t, choices])), scores: Some(o.out(F32, [t, e])),
            logits: o.input(F32, [t, e]), bias: None, lengths: None, routing: Routing { choices, ..ROUTING },
        })
    }),
    ("route_backward", |m, o| {
        let (t, [e, choices]) = (m.tokens(), m.experts?);
        some(RouteBackward {
            dlogits: o.out(F32, [t, e]), dweights: o.input(F32, [t, choices]), logits: o.input(F32, [t, e]), ids: o.grouped(m, 0)?,
            routing: Routing { choices, ..ROUTING }, balance: None, z_loss: None, lengths: None,
        })
    }),
    ("group_by_expert", |m, o| {
        let (t, [experts, choices]) = (m.tokens(), m.experts?);
        let table = |rows| Some(o.out(I32, [rows]));
        some(GroupByExpert {
            offsets: table(experts + 1), row_token: table(t * choices), row_slot: table(t * choices),
            slot_row: Some(o.out(I32, [t, choices])), ids: o.grouped(m, 0)?, experts,
        })
    }),
    // So many tokens at a time go through the head.
    ("cross_entropy", |m, o| {
        let t = m.tokens().min(4096);
        some(CrossEntropy { losses: o.out(F32, [t]), logits: o.changed(BF16, [t, m.vocab]), targets: o.ids([t], m.vocab), scale: None, cap: None })
    }),
    ("cross_entropy.capped", |m, o| {
        let t = m.tokens().min(4096);
        some(CrossEntropy { losses: o.out(F32, [t]), logits: o.changed(BF16, [t, m.vocab]), targets: o.ids([t], m.vocab), scale: None, cap: Some(30.0) })
    }),
    ("adamw", |m, o| adamw(m, o, States::F32)),
    ("adamw.bf16", |m, o| adamw(m, o, States::Bf16)),
    ("adamw.8bit", |m, o| adamw(m, o, States::EightBit)),
    ("variance_sums", |m, o| {
        let (_, shape) = factored(m, o);
        some(VarianceSums {
            sums: o.out(F64, [shape.sums()]), gradients: o.input(BF16, [shape.elements()]), clip: o.full(F32, [2], 1.0), scale: o.full(F64, [1], 1.0), first: 0, shape,
        })
    }),
    ("update_squares", |m, o| {
        let (variance, shape) = factored(m, o);
        let n = shape.elements();
        some(UpdateSquares {
            squares: o.out(F64, [n.div_ceil(BLOCK)]), gradients: o.input(BF16, [n]), variance, rates: o.full(F32, [3], 1e-3), clip: o.full(F32, [2], 1.0), eps: 1e-30,
        })
    }),
    ("adafactor_step", |m, o| {
        let (variance, shape) = factored(m, o);
        let n = shape.elements();
        some(AdafactorStep {
            parameters: o.changed(BF16, [n]), master: MasterOperand::Parameters, gradients: o.input(BF16, [n]), variance, rate: o.full(F32, [1], 1e-3),
            rates: o.full(F32, [3], 1e-3), clip: o.full(F32, [2], 1.0), key: o.key(), first_index: 0, eps: 1e-30, weight_decay: 0.0,
        })
    }),
    ("gram", |m, o| some(Gram { out: o.out(BF16, [m.hidden, m.hidden]), x: o.input(BF16, [m.hidden, m.widest()]) })),
    ("momentum", |m, o| {
        let n = m.block();
        some(Momentum {
            out: o.out(BF16, [n]), momentum: MomentOperand::Plain(o.changed(F32, [n])), gradients: o.input(F32, [n]), clip: o.full(F32, [2], 1.0),
            key: o.key(), first_index: 0, decay: 0.95, nesterov: true,
        })
    }),
    ("dequantise_nf4", |m, o| {
        let n = m.hidden * m.widest();
        some(DequantiseNf4 {
            out: o.out(BF16, [m.widest(), m.hidden]), codes: o.input(U8, [n / 2]), absmax_codes: o.input(U8, [n / 64]),
            absmax: o.input(F32, [(n / 64).div_ceil(BLOCK)]), offset: o.full(F32, [1], 0.1),
        })
    }),
    ("embedding", |m, o| {
        let t = m.tokens();
        some(Embedding { out: o.out(BF16, [t, m.hidden]), table: o.input(BF16, [m.vocab, m.hidden]), ids: o.ids([t], m.vocab) })
    }),
    ("embedding_backward", |m, o| {
        let t = m.tokens();
        some(EmbeddingBackward { dtable: o.changed(F32, [m.vocab, m.hidden]), dout: o.input(BF16, [t, m.hidden]), ids: o.ids([t], m.vocab), init: Init::Accumulate })
    }),
    ("norm_grains", |m, o| some(NormGrains { grains: o.out(F64, [m.block().div_ceil(GRAIN_ELEMENTS)]), x: o.input(F32, [m.block()]) })),
    ("copy", |m, o| some(Copy { out: o.out(BF16, [m.tokens(), m.widest()]), x: o.input(BF16, [m.tokens(), m.widest()]) })),
    ("copy.to_f32", |m, o| some(Copy { out: o.out(F32, [m.tokens(), m.widest()]), x: o.input(BF16, [m.tokens(), m.widest()]) })),
];
