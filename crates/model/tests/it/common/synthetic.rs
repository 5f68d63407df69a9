//! A model that nobody trains, with everything that blocks may have: four kinds of block under 14 labels, some with
//! queries, keys and values from a narrower tensor, values narrower than keys and a scale of their own, some with rows for each token and choice, tables of whole numbers, a
//! stage with a loss of its own, one that counts, a matrix that is f32 whatever the model computes in, and a buffer.

use kernels::Init;
use kernels::operation::{
    self, BiasDropoutAdd, CrossEntropy, EmbeddingBackward, GateFunction, GatedActivationBackward,
    OutputForm, Sum,
};
use memory::{DType, Layer};
use model::stages::{
    CoreAttention, Embedding, Head, MlpActivation, Norm, NormStage, Projection, Qkv,
    ResidualProjection,
};
use model::{
    Activation, Architecture, Attention, Block, Dimension, DropoutSite, Extent, Initial, Io, Label,
    Labels, Linear, ModelConfig, ModelError, ParameterId, Parameters, PartParameters, Pass,
    SharingRanks, Stage,
};

const LATENT: Label = Label::new("mla_latent");
const MOE: Label = Label::new("moe");
const ROUTER: Label = Label::new("moe_router").within("moe");
const DISPATCH: Label = Label::new("moe_dispatch").within("moe");
const EXPERT_ACT: Label = Label::new("moe_act").within("moe");
const SHARED: Label = Label::new("shared_experts");

/// The labels of all its blocks.
pub const LABELS: Labels = Labels::new(&[
    Label::BLOCK_INPUT,
    Label::LAYERNORM,
    LATENT,
    Label::QKV,
    Label::CORE_ATTN,
    Label::ATTN_VALUE,
    Label::ATTN_OUT,
    MOE,
    ROUTER,
    DISPATCH,
    EXPERT_ACT,
    SHARED,
    Label::MLP,
    Label::MLP_ACT,
]);

const H1: Activation = NormStage::H1;
const H2: Activation = NormStage::H2;
const X2: Activation = ResidualProjection::X2;
const C_Q: Activation = Activation::new("c_q", "d_c_q", LATENT);
const SCORES: Activation = Activation::new("scores", "d_scores", ROUTER);
const CHOSEN: Activation = Activation::new("chosen", "none", ROUTER);
const ROW_TOKEN: Activation = Activation::new("row_token", "none", ROUTER);
const EXPERT_IN: Activation = Activation::new("expert_in", "d_expert_in", DISPATCH);
const EXPERT_GATE_UP: Activation = Activation::new("expert_gate_up", "d_expert_gate_up", MOE);
const EXPERT_OUT: Activation = Activation::new("expert_act", "d_expert_act", EXPERT_ACT);
const SHARED_UP: Activation = Activation::new("shared_gate_up", "d_shared_gate_up", SHARED);
const SHARED_ACT: Activation = Activation::new("shared_act", "d_shared_act", SHARED);

/// Experts, and how many each token goes to.
const EXPERTS: usize = 3;
const CHOICES: usize = 2;

fn rows(width: usize) -> Extent {
    Extent::of(&[Dimension::TokensTimes(CHOICES), Dimension::Fixed(width)])
}

/// scores `[t, e]` = h2 W^T + correction (a buffer), all f32 whatever the model computes in, whose cross-entropy with what is
/// chosen is a loss; the tables of choices and rows, i32.
struct Router {
    linear: Linear,
    correction: ParameterId,
}

impl Stage for Router {
    fn name(&self) -> &'static str {
        "moe_router"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![H2],
            writes: vec![
                (
                    SCORES,
                    Extent::of_f32(&[Dimension::Tokens, Dimension::Fixed(EXPERTS)]),
                ),
                (CHOSEN, Extent::of_i32(&[Dimension::Tokens])),
                (
                    ROW_TOKEN,
                    Extent::of_i32(&[Dimension::TokensTimes(CHOICES)]),
                ),
            ],
            backward_reads: [vec![SCORES, CHOSEN], self.linear.backward_reads(H2)].concat(),
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        let linear = self.linear.parameters().into_iter();
        linear.chain([self.correction]).collect()
    }

    fn has_loss(&self) -> bool {
        true
    }

    fn statistics(&self) -> Option<usize> {
        Some(1)
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let h2 = pass.pull(H2)?;
        let mut scores = pass.output(SCORES)?;
        if let Some(scores) = &mut scores {
            self.linear.forward(pass, scores.view_mut(), h2.view())?;
            pass.kernels().run(BiasDropoutAdd {
                out: scores.view_mut(),
                bias: Some(pass.parameter(self.correction)),
                dropout: None,
                first: 0,
                scale: 1.0,
                residual: None,
            })?;
        }
        pass.put(SCORES, scores);
        let tokens = pass.tokens();
        let chosen = (0..tokens).map(|token| (token % EXPERTS) as i32);
        let row_token = (0..CHOICES * tokens).map(|row| (row / CHOICES) as i32);
        let tables: [(_, Vec<i32>); 2] =
            [(CHOSEN, chosen.collect()), (ROW_TOKEN, row_token.collect())];
        for (of, numbers) in tables {
            let mut table = pass.output(of)?;
            if let Some(table) = &mut table {
                let bytes = bytemuck::cast_slice(&numbers);
                pass.kernels().upload(table.view_mut(), bytes)?;
            }
            pass.put(of, table);
        }
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let mut scores = pass.take(SCORES)?;
        let chosen = pass.pull(CHOSEN)?;
        let mut losses = pass.temporary_f32("router_losses", [pass.tokens()])?;
        pass.kernels().run(CrossEntropy {
            losses: losses.view_mut(),
            logits: scores.view_mut(),
            targets: chosen.view(),
            scale: Some(pass.gradient_scale()),
            cap: None,
        })?;
        pass.add_loss(losses.view())?;
        let kernels = pass.kernels();
        let (out, init) = pass.accumulate_statistics();
        let x = losses.view();
        kernels.run(Sum { out, x, init })?;
        self.linear.backward(pass, H2, scores.view())
    }
}

/// expert_in `[t k, h]` = the rows of h2 that the table names.
struct Dispatch(usize);

impl Stage for Dispatch {
    fn name(&self) -> &'static str {
        "moe_dispatch"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![H2, ROW_TOKEN],
            writes: vec![(EXPERT_IN, rows(self.0))],
            backward_reads: vec![ROW_TOKEN],
        }
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let (h2, ids) = (pass.pull(H2)?, pass.pull(ROW_TOKEN)?);
        let mut out = pass.output(EXPERT_IN)?;
        if let Some(out) = &mut out {
            pass.kernels().run(operation::Embedding {
                out: out.view_mut(),
                table: h2.view(),
                ids: ids.view(),
            })?;
        }
        pass.put(EXPERT_IN, out);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dout = pass.gradient(EXPERT_IN);
        let ids = pass.pull(ROW_TOKEN)?;
        let (mut dh2, init) = pass.gradient_to_add(H2)?;
        pass.kernels().run(EmbeddingBackward {
            dtable: dh2.view_mut(),
            dout: dout.view(),
            ids: ids.view(),
            init,
        })?;
        pass.file_gradient(H2, dh2);
        Ok(())
    }
}

/// output = input W^T, a row for each token and choice.
struct Rows {
    input: Activation,
    output: Activation,
    linear: Linear,
}

impl Stage for Rows {
    fn name(&self) -> &'static str {
        "moe_up"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![self.input],
            writes: vec![(self.output, rows(self.linear.outputs()))],
            backward_reads: self.linear.backward_reads(self.input),
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        self.linear.parameters()
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let x = pass.pull(self.input)?;
        let mut out = pass.output(self.output)?;
        if let Some(out) = &mut out {
            self.linear.forward(pass, out.view_mut(), x.view())?;
        }
        pass.put(self.output, out);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dy = pass.gradient(self.output);
        self.linear.backward(pass, self.input, dy.view())
    }
}

/// output = silu(gate) up, of rows or of tokens.
struct Gated {
    name: &'static str,
    input: Activation,
    output: Activation,
    extent: Extent,
}

impl Stage for Gated {
    fn name(&self) -> &'static str {
        self.name
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![self.input],
            writes: vec![(self.output, self.extent)],
            backward_reads: vec![self.input],
        }
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let gate_up = pass.pull(self.input)?;
        let mut act = pass.output(self.output)?;
        if let Some(act) = &mut act {
            pass.kernels().run(operation::GatedActivation {
                act: act.view_mut(),
                gate_up: gate_up.view(),
                function: GateFunction::Silu,
                form: OutputForm::Values,
            })?;
        }
        pass.put(self.output, act);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dact = pass.gradient(self.output);
        let mut gate_up = pass.take(self.input)?;
        pass.kernels().run(GatedActivationBackward {
            gate_up: gate_up.view_mut(),
            dact: dact.view(),
            function: GateFunction::Silu,
            largest: None,
        })?;
        pass.file_gradient(self.input, gate_up);
        Ok(())
    }
}

/// next x = x2 + the projections of some branches, whose rows of a token lie side by side.
struct Combine {
    width: usize,
    branches: Vec<(Activation, Linear)>,
}

impl Stage for Combine {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn io(&self) -> Io {
        let inputs = self.branches.iter().map(|(of, _)| *of);
        let backward = self.branches.iter();
        Io {
            reads: [X2].into_iter().chain(inputs).collect(),
            writes: vec![(Activation::NEXT_X, Extent::tokens(self.width))],
            backward_reads: backward
                .flat_map(|(of, linear)| linear.backward_reads(*of))
                .collect(),
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        let linears = self.branches.iter().map(|(_, linear)| linear);
        linears.flat_map(Linear::parameters).collect()
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let x2 = pass.pull(X2)?;
        let inputs = self.branches.iter().map(|(of, _)| pass.pull(*of));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let mut out = pass.output(Activation::NEXT_X)?;
        if let Some(out) = &mut out {
            let mut init = Init::Add(x2.view());
            for (x, (_, linear)) in inputs.iter().zip(&self.branches) {
                let x = x.view().reshape([pass.tokens(), linear.inputs]);
                linear.product(pass, out.view_mut(), x, init)?;
                init = Init::Accumulate;
            }
        }
        pass.put(Activation::NEXT_X, out);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dy = pass.gradient(Activation::NEXT_X);
        for (of, linear) in &self.branches {
            let side_by_side = [pass.tokens(), linear.inputs];
            for of in linear.backward_reads(*of) {
                let x = pass.pull(of)?;
                linear.add_gradient(pass, dy.view(), x.view().reshape(side_by_side))?;
                pass.release(of, x);
            }
            let (mut dx, init) = pass.gradient_to_add(*of)?;
            let out = dx.view_mut().reshape(side_by_side);
            linear.input_gradient(pass, out, init, (dy.view(), None))?;
            pass.file_gradient(*of, dx);
        }
        pass.file_gradient(X2, dy);
        Ok(())
    }
}

/// Every second layer has latents, narrower values and another scale, every second pair of layers experts, and every fourth layer a shared expert too.
fn block(
    config: &ModelConfig,
    kind: Attention,
    layer: usize,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let (hidden, ffn) = (config.hidden, config.ffn);
    let (has_latent, has_experts) = (layer % 2 == 1, layer % 4 >= 2);
    let norm = |own: &mut PartParameters, name, [input, output, rstd]: [Activation; 3], of| {
        Box::new(NormStage {
            name,
            norm: Norm::rms(own, of, hidden, config.norm_eps),
            input,
            output,
            statistics: vec![rstd],
        })
    };
    let of_attention = [Activation::X, H1, NormStage::RSTD1];
    let mut stages: Vec<Box<dyn Stage>> =
        vec![norm(own, "attn_norm", of_attention, "input_layernorm")];
    let (input, width) = match has_latent {
        true => (C_Q, hidden / 2),
        false => (H1, hidden),
    };
    if has_latent {
        stages.push(Box::new(Projection {
            in_f32: false,
            name: "mla_down",
            input: H1,
            output: C_Q,
            linear: Linear::declare(own, "q_a_proj", [width, hidden], false),
        }));
    }
    let mut attention = config.attention(0);
    if has_latent {
        attention.v_head_dim /= 2;
        attention.scale = Some(0.5);
    }
    let [k_width, v_width] = attention.kv_widths();
    let o_width = attention.o_width();
    let widths = [attention.q_width(), k_width, v_width];
    let parts = ["q_proj", "k_proj", "v_proj"].into_iter().zip(widths);
    stages.push(Box::new(Qkv {
        input,
        linear: Linear::declare_together(own, parts, width, false),
        kv_widths: [k_width, v_width],
        head_dim: attention.qk_head_dim,
        norms: None,
        rotary: config.attention(0).rotary,
        has_gate: false,
    }));
    stages.push(Box::new(CoreAttention {
        kind,
        attention,
        sinks: None,
        dropout: DropoutSite::NONE,
        latents: None,
        ranks: SharingRanks::ALONE,
    }));
    stages.push(Box::new(ResidualProjection {
        name: "attn_out",
        input: CoreAttention::O,
        residual: Activation::X,
        output: X2,
        linear: Linear::declare(own, "o_proj", [hidden, o_width], false),
        multiplier: 1.0,
        dropout: DropoutSite::NONE,
    }));
    let of_feed_forward = [X2, H2, NormStage::RSTD2];
    stages.push(norm(own, "mlp_norm", of_feed_forward, "post_norm"));
    let mut branches = Vec::new();
    if has_experts {
        stages.push(Box::new(Router {
            linear: Linear::declare(
                &mut own.in_type(DType::F32),
                "gate",
                [EXPERTS, hidden],
                false,
            ),
            correction: own.buffer("gate.correction", &[EXPERTS], Initial::Normal),
        }));
        stages.push(Box::new(Dispatch(hidden)));
        stages.push(Box::new(Rows {
            input: EXPERT_IN,
            output: EXPERT_GATE_UP,
            linear: Linear::declare(own, "experts_up", [2 * ffn, hidden], false),
        }));
        stages.push(Box::new(Gated {
            name: "moe_act",
            input: EXPERT_GATE_UP,
            output: EXPERT_OUT,
            extent: rows(ffn),
        }));
        let down = Linear::declare(own, "experts_down", [hidden, CHOICES * ffn], false);
        branches.push((EXPERT_OUT, down));
    }
    if !has_experts || has_latent {
        let (up, act) = match has_experts {
            true => (SHARED_UP, SHARED_ACT),
            false => (MlpActivation::GATE_UP, MlpActivation::ACT),
        };
        stages.push(Box::new(Projection {
            in_f32: false,
            name: "mlp_up",
            input: H2,
            output: up,
            linear: Linear::declare(own, "up_proj", [2 * ffn, hidden], false),
        }));
        stages.push(Box::new(Gated {
            name: "mlp_act",
            input: up,
            output: act,
            extent: Extent::tokens(ffn),
        }));
        branches.push((act, Linear::declare(own, "down_proj", [hidden, ffn], false)));
    }
    stages.push(Box::new(Combine {
        width: hidden,
        branches,
    }));
    stages
}

/// The model of a shape.
pub fn architecture(
    config: &ModelConfig,
    kind: Attention,
    mut parameters: Parameters,
) -> Architecture {
    let (hidden, matrix) = (config.hidden, [config.vocab, config.hidden]);
    let mut first = parameters.of_part(Layer::Embedding, "");
    let embedding = Box::new(Embedding::declare(&mut first, "embed_tokens", matrix));
    let blocks = (0..config.layers).map(|layer| {
        let prefix = format!("layers.{layer}.");
        let mut own = parameters.of_part(Layer::Block(layer), prefix);
        Block::new(hidden, block(config, kind, layer, &mut own))
    });
    let blocks = blocks.collect();
    let mut last = parameters.of_part(Layer::Head, "");
    let head = Head {
        norm: Norm::rms(&mut last, "norm", hidden, config.norm_eps),
        linear: Linear::declare(&mut last, "lm_head", matrix, false),
        logit_multiplier: 1.0,
        cap: None,
    };
    let rotary = config.attention(0).rotary;
    Architecture::new(LABELS, parameters, embedding, blocks, head).with_rotary(rotary)
}
