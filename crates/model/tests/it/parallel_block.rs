//! A block of another kind, put together through the public interface alone: attention and feed-forward in parallel
//! from one norm, `x + attention(norm(x)) + feed_forward(norm(x))`, with a stage of its own that adds both.

use crate::common::harness::{Outcome, Run, VOCAB, assert_agrees};
use memory::Layer;
use model::stages::{
    Attention, CoreAttention, Embedding, Head, MlpActivation, Norm, NormStage, Projection, Qkv,
};
use model::{
    Activation, Architecture, Block, DropoutSite, Extent, Io, Label, Labels, Linear, ModelConfig,
    ModelError, OffloadLabels, ParameterId, Parameters, PartParameters, Pass, Policy, SharingRanks,
    Stage,
};

const H: Activation = Activation::new("h", "d_h", Label::LAYERNORM);
const RSTD: Activation = Activation::new("rstd", "d_rstd", Label::LAYERNORM);

const LAYERS: usize = 4;

fn config() -> ModelConfig {
    let text = r#"{"hidden": 20, "layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 6, "ffn": 22, "vocab": 31}"#;
    serde_json::from_str(text).unwrap()
}

/// Layers differ: each has a feed-forward width of its own.
fn ffn(layer: usize) -> usize {
    config().ffn + layer
}

/// next x = x + o W_o + act W_down.
struct ParallelOutput {
    width: usize,
    attention: Linear,
    feed_forward: Linear,
}

impl Stage for ParallelOutput {
    fn name(&self) -> &'static str {
        "parallel_out"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![Activation::X, CoreAttention::O, MlpActivation::ACT],
            writes: vec![(Activation::NEXT_X, Extent::tokens(self.width))],
            backward_reads: vec![CoreAttention::O, MlpActivation::ACT],
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        [self.attention.parameters(), self.feed_forward.parameters()].concat()
    }

    fn flops_per_token(&self, _seq: usize) -> u64 {
        self.attention.flops_per_token() + self.feed_forward.flops_per_token()
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let [x, o, act] =
            [Activation::X, CoreAttention::O, MlpActivation::ACT].map(|of| pass.pull(of));
        let (x, o, act) = (x?, o?, act?);
        let mut out = pass.output(Activation::NEXT_X)?;
        if let Some(out) = &mut out {
            let (attention, feed_forward) = (&self.attention, &self.feed_forward);
            attention.product(pass, out.view_mut(), o.view(), kernels::Init::Add(x.view()))?;
            let sum = kernels::Init::Accumulate;
            feed_forward.product(pass, out.view_mut(), act.view(), sum)?;
        }
        pass.put(Activation::NEXT_X, out);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dy = pass.gradient(Activation::NEXT_X);
        let branches = [
            (CoreAttention::O, &self.attention),
            (MlpActivation::ACT, &self.feed_forward),
        ];
        for (of, linear) in branches {
            let x = pass.pull(of)?;
            linear.add_gradient(pass, dy.view(), x.view())?;
            pass.release(of, x);
            let (mut dx, init) = pass.gradient_to_add(of)?;
            linear.input_gradient(pass, dx.view_mut(), init, (dy.view(), None))?;
            pass.file_gradient(of, dx);
        }
        pass.file_gradient(Activation::X, dy);
        Ok(())
    }
}

fn block(config: &ModelConfig, kind: Attention, layer: usize, own: &mut PartParameters) -> Block {
    let (hidden, ffn) = (config.hidden, ffn(layer));
    let norm = Norm::rms(own, "input_layernorm", hidden, config.norm_eps);
    let qkv = [
        ("self_attn.q_proj", config.q_width()),
        ("self_attn.k_proj", config.kv_width()),
        ("self_attn.v_proj", config.kv_width()),
    ];
    let qkv = Linear::declare_together(own, qkv, hidden, false);
    let gate_up = ["mlp.gate_proj", "mlp.up_proj"].map(|name| (name, ffn));
    let gate_up = Linear::declare_together(own, gate_up, hidden, false);
    let mut linear = |name: &str, shape| Linear::declare(own, name, shape, false);
    let stages: [Box<dyn Stage>; 6] = [
        Box::new(NormStage {
            name: "norm",
            norm,
            input: Activation::X,
            output: H,
            statistics: vec![RSTD],
        }),
        Box::new(Qkv {
            input: H,
            linear: qkv,
            kv_widths: [config.kv_width(); 2],
            head_dim: config.head_dim,
            norms: None,
            rotary: config.attention(0).rotary,
            has_gate: false,
        }),
        Box::new(CoreAttention {
            kind,
            attention: config.attention(0),
            sinks: None,
            dropout: DropoutSite {
                site: 0,
                rate: 0.25,
            },
            latents: None,
            ranks: SharingRanks::ALONE,
        }),
        Box::new(Projection {
            in_f32: false,
            name: "mlp_up",
            input: H,
            output: MlpActivation::GATE_UP,
            linear: gate_up,
        }),
        Box::new(MlpActivation {
            read_by: None,
            made_by: None,
            gate: Some(kernels::operation::GateFunction::Silu),
            width: ffn,
        }),
        Box::new(ParallelOutput {
            width: hidden,
            attention: linear("self_attn.o_proj", [hidden, config.q_width()]),
            feed_forward: linear("mlp.down_proj", [hidden, ffn]),
        }),
    ];
    Block::new(hidden, stages)
}

fn architecture(kind: Attention) -> Architecture {
    let config = config();
    let (hidden, matrix) = (config.hidden, [config.vocab, config.hidden]);
    let mut parameters = Parameters::default();
    let mut first = parameters.of_part(Layer::Embedding, "model.");
    let embedding = Embedding::declare(&mut first, "embed_tokens.weight", matrix);
    let blocks = (0..LAYERS).map(|layer| {
        let prefix = format!("model.layers.{layer}.");
        let mut own = parameters.of_part(Layer::Block(layer), prefix);
        block(&config, kind, layer, &mut own)
    });
    let blocks = blocks.collect();
    let mut last = parameters.of_part(Layer::Head, "");
    let head = Head {
        norm: Norm::rms(&mut last, "model.norm", hidden, config.norm_eps),
        linear: Linear::declare(&mut last, "lm_head", matrix, false),
        logit_multiplier: 1.0,
        cap: None,
    };
    let rotary = config.attention(0).rotary;
    let embedding = Box::new(embedding);
    Architecture::new(Labels::DENSE, parameters, embedding, blocks, head).with_rotary(rotary)
}

const KINDS: [Attention; 2] = [Attention::Eager, Attention::Flash];

#[test]
fn it_agrees_with_autograd() {
    for kind in KINDS {
        let mut run = Run::on_cpu(architecture(kind), &Policy::keep_all(LAYERS));
        run.pass(1, false);
        assert_agrees(&run, &config(), true);
    }
}

/// Trains on the processor as planned on shapes.
fn run_of(architecture: impl Fn() -> Architecture, policy: &Policy) -> Outcome {
    let planned = Run::on_shapes(architecture(), policy).train(2);
    let made = Run::on_cpu(architecture(), policy).train(5);
    assert_eq!(made.peak_bytes, planned.peak_bytes, "{policy:?}");
    assert_eq!(made.replayed, planned.replayed, "{policy:?}");
    made
}

#[test]
fn it_trains_as_planned_with_the_same_bits_under_every_policy() {
    assert_eq!(VOCAB, config().vocab);
    for kind in KINDS {
        let keeps = run_of(|| architecture(kind), &Policy::keep_all(LAYERS));
        let losses: Vec<f32> = keeps
            .losses
            .iter()
            .map(|bits| f32::from_bits(*bits))
            .collect();
        assert!(losses.iter().all(|loss| loss.is_finite()) && losses[0] != losses[4]);
        assert_eq!(keeps.replayed.total(), 0);
        let specs = [
            "layernorm",
            "qkv",
            "core_attn",
            "mlp",
            "mlp_act",
            "full",
            "full:uniform:2",
        ];
        for spec in specs {
            let policy = Policy::parse(spec, LAYERS).unwrap();
            let made = run_of(|| architecture(kind), &policy);
            assert!(made.replayed.total() > 0, "{kind:?} {spec}");
            assert_eq!(
                (&made.losses, &made.weights),
                (&keeps.losses, &keeps.weights),
                "{spec}"
            );
        }
        for labels in ["block_input", "layernorm,qkv", "attn_value,mlp"] {
            let labels = OffloadLabels::parse(labels).unwrap();
            let policy = Policy::keep_all(LAYERS).offload(&labels).unwrap();
            let made = run_of(|| architecture(kind), &policy);
            assert!(
                made.traffic.d2h_bytes > keeps.traffic.d2h_bytes,
                "{kind:?} {labels}"
            );
            assert_eq!(
                (&made.losses, &made.weights),
                (&keeps.losses, &keeps.weights),
                "{labels}"
            );
        }
    }
}

/// What the norm makes leaves its tiles, because feed-forward reads it after attention; gate, up and act do not.
#[test]
fn it_runs_in_tiles() {
    for kind in KINDS {
        let in_tiles = || architecture(kind).in_tiles(Some(5));
        let mut run = Run::on_cpu(in_tiles(), &Policy::keep_all(LAYERS));
        run.pass(1, false);
        assert_agrees(&run, &config(), true);
        let keeps = run_of(in_tiles, &Policy::keep_all(LAYERS));
        for spec in ["layernorm", "qkv", "core_attn", "full", "full:uniform:2"] {
            let made = run_of(in_tiles, &Policy::parse(spec, LAYERS).unwrap());
            assert!(made.replayed.total() > keeps.replayed.total(), "{spec}");
            let bits = |run: &Outcome| (run.losses.clone(), run.weights.clone());
            assert_eq!(bits(&made), bits(&keeps), "{kind:?} {spec}");
        }
        let activations = run.model.architecture().blocks[0].activations();
        let names: Vec<&str> = activations
            .map(|(activation, _)| activation.name())
            .collect();
        assert!(names.contains(&"h") && !names.contains(&"rstd") && !names.contains(&"gate_up"));
    }
}

#[test]
fn full_recompute_needs_less() {
    let peak = |spec| {
        let policy = Policy::parse(spec, LAYERS).unwrap();
        Run::on_shapes(architecture(Attention::Eager), &policy)
            .train(1)
            .peak_bytes
    };
    assert!(peak("full") < peak("mlp") && peak("mlp") < peak("none"));
}
