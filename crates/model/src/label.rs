//! Labels, by which policies name groups of activations. Each architecture declares its own.

/// The name of a group of activations in policies. It is Megatron's module name where there is one.
#[derive(Clone, Copy, Debug)]
pub struct Label {
    name: &'static str,
    within: Option<&'static str>,
    is_named: bool,
    is_residual_stream: bool,
    /// A hash of the name, so that comparing two is cheap: a plan of a large model compares millions.
    id: u64,
}

impl PartialEq for Label {
    fn eq(&self, other: &Label) -> bool {
        self.id == other.id
    }
}

impl Eq for Label {}

impl Label {
    /// The block's input. Only `full:uniform:N` drops it. Every architecture has this label.
    pub const BLOCK_INPUT: Label = Label::new("block_input")
        .of_residual_stream()
        .dropped_by_full_alone();
    /// Outputs and statistics of both norms.
    pub const LAYERNORM: Label = Label::new("layernorm");
    /// What norms behind attention and the feed-forward layer normalise.
    pub const NORM_INPUT: Label = Label::new("norm_input");
    /// Queries, keys and values.
    pub const QKV: Label = Label::new("qkv");
    /// Attention probabilities; with flash attention the log-sum-exp.
    pub const CORE_ATTN: Label = Label::new("core_attn");
    /// Attention's output, the input of its projection. Only `full` drops it.
    pub const ATTN_VALUE: Label = Label::new("attn_value").dropped_by_full_alone();
    /// The input of the output projection behind a gate: the gated norm of delta layers, and attention's output times the sigmoid of
    /// its gate.
    pub const GDN_NORM_OUT: Label = Label::new("gdn_norm_out");
    /// The residual stream between attention and feed-forward.
    pub const ATTN_OUT: Label = Label::new("attn_out").of_residual_stream();
    /// What the feed-forward layer's first products write, and the output of its activation function.
    pub const MLP: Label = Label::new("mlp");
    /// Only the output of the activation function.
    pub const MLP_ACT: Label = Label::new("mlp_act").within("mlp");

    /// Everything of a mixture of experts; of its own it has what the experts' first products write.
    pub const MOE: Label = Label::new("moe");
    /// Logits of routers, and the weights that follow from them.
    pub const MOE_ROUTER: Label = Label::new("moe_router").within("moe");
    /// The chosen experts, and the tables that group rows by expert. Only `full` drops them.
    pub const MOE_TABLES: Label = Label::new("moe_tables").dropped_by_full_alone();
    /// Nothing: experts read the rows of their tokens where the norm left them. Commands may go on naming it.
    pub const MOE_DISPATCH: Label = Label::new("moe_dispatch").within("moe");
    /// The output of the experts' activation function.
    pub const MOE_ACT: Label = Label::new("moe_act").within("moe");
    /// What the shared experts' first products write, and the output of their activation function.
    pub const SHARED_EXPERTS: Label = Label::new("shared_experts").within("moe");
    /// The latents of latent attention, before and after their norms.
    pub const MLA_LATENT: Label = Label::new("mla_latent");
    /// The products of low rank of adapters' inputs and first factors.
    pub const LORA: Label = Label::new("lora");
    /// Queries, keys and values of latent attention.
    pub const MLA_UP_PROJ: Label = Label::new("mla_up_proj");

    /// A label that a comma list of `--recompute` may name.
    pub const fn new(name: &'static str) -> Label {
        Label {
            name,
            within: None,
            is_named: true,
            is_residual_stream: false,
            id: fnv(name),
        }
    }

    /// The same label within a larger group: naming the group names this label too.
    pub const fn within(self, group: &'static str) -> Label {
        Label {
            within: Some(group),
            ..self
        }
    }

    /// The same label, which a comma list of `--recompute` may not name.
    pub const fn dropped_by_full_alone(self) -> Label {
        Label {
            is_named: false,
            ..self
        }
    }

    /// The same label, for the residual stream. It exists for whole micro-batches even where stages run on tiles.
    pub const fn of_residual_stream(self) -> Label {
        Label {
            is_residual_stream: true,
            ..self
        }
    }

    /// The name in reports and settings.
    pub fn name(self) -> &'static str {
        self.name
    }

    pub(crate) fn is_residual_stream(self) -> bool {
        self.is_residual_stream
    }
}

/// The labels of blocks of which some have experts, with those of what attention reads and of what follows it, and last that of adapters.
macro_rules! with_experts {
    ([$($projected:ident),+] [$($gated:ident)?]) => {
        &[
            Label::BLOCK_INPUT,
            Label::LAYERNORM,
            $(Label::$projected,)+
            Label::CORE_ATTN,
            Label::ATTN_VALUE,
            $(Label::$gated,)?
            Label::ATTN_OUT,
            Label::MLP,
            Label::MLP_ACT,
            Label::MOE,
            Label::MOE_ROUTER,
            Label::MOE_TABLES,
            Label::MOE_DISPATCH,
            Label::MOE_ACT,
            Label::SHARED_EXPERTS,
            Label::LORA,
        ]
    };
}

/// The labels of each kind of model. The last one is there if the model has adapters.
const DENSE: &[Label] = &[
    Label::BLOCK_INPUT,
    Label::LAYERNORM,
    Label::QKV,
    Label::CORE_ATTN,
    Label::ATTN_VALUE,
    Label::ATTN_OUT,
    Label::MLP,
    Label::MLP_ACT,
    Label::LORA,
];
const NORMS_BEHIND: &[Label] = &[
    Label::BLOCK_INPUT,
    Label::LAYERNORM,
    Label::QKV,
    Label::CORE_ATTN,
    Label::ATTN_VALUE,
    Label::NORM_INPUT,
    Label::ATTN_OUT,
    Label::MLP,
    Label::MLP_ACT,
    Label::LORA,
];
const DELTA: &[Label] = &[
    Label::BLOCK_INPUT,
    Label::LAYERNORM,
    Label::QKV,
    Label::CORE_ATTN,
    Label::ATTN_VALUE,
    Label::GDN_NORM_OUT,
    Label::ATTN_OUT,
    Label::MLP,
    Label::MLP_ACT,
    Label::LORA,
];
const EXPERTS: &[Label] = with_experts!([QKV] []);
const LATENT: &[Label] = with_experts!([MLA_LATENT, MLA_UP_PROJ] []);
const DELTA_EXPERTS: &[Label] = with_experts!([QKV][GDN_NORM_OUT]);
const TABLES: [&[Label]; 6] = [DENSE, NORMS_BEHIND, DELTA, EXPERTS, LATENT, DELTA_EXPERTS];

/// The labels of an architecture, in forward order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Labels(&'static [Label]);

impl Labels {
    /// The most labels that an architecture may have.
    pub const MAX: usize = 32;

    /// The labels of blocks with attention and a dense feed-forward layer.
    pub const DENSE: Labels = Labels::without_lora(DENSE);

    /// The same, with norms behind them.
    pub const NORMS_BEHIND: Labels = Labels::without_lora(NORMS_BEHIND);

    /// The labels of models of which some layers have the gated delta rule, or whose attention has a gate.
    pub const DELTA: Labels = Labels::without_lora(DELTA);

    /// The same, where some layers have experts.
    pub const DELTA_EXPERTS: Labels = Labels::without_lora(DELTA_EXPERTS);

    /// The labels of models of which some layers have experts.
    pub const EXPERTS: Labels = Labels::without_lora(EXPERTS);

    /// The labels of models with latent attention, of which some layers have experts.
    pub const LATENT: Labels = Labels::without_lora(LATENT);

    /// A table of labels.
    ///
    /// # Panics
    /// If they are more than [`Labels::MAX`].
    pub const fn new(labels: &'static [Label]) -> Labels {
        assert!(labels.len() <= Labels::MAX, "too many labels");
        Labels(labels)
    }

    /// A table without its last label, that of adapters.
    const fn without_lora(labels: &'static [Label]) -> Labels {
        match labels.split_last() {
            Some((_, others)) => Labels::new(others),
            None => Labels::new(labels),
        }
    }

    /// The same labels, and that of adapters.
    ///
    /// # Panics
    /// If these are no labels of a family.
    pub fn with_lora(self) -> Labels {
        let mut tables = TABLES.into_iter();
        let table = tables.find(|table| Labels::without_lora(table) == self);
        Labels::new(table.expect("a family has a table with the label of adapters too"))
    }

    /// All of them.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Label> {
        self.0.iter().copied()
    }

    /// Those that a comma list of `--recompute` may name.
    pub fn named(self) -> impl Iterator<Item = Label> {
        self.iter().filter(|label| label.is_named)
    }

    /// What `choose` takes of the labels of every family, each once.
    pub fn of_all(choose: impl Fn(Labels) -> Vec<Label>) -> Vec<Label> {
        let mut all: Vec<Label> = Vec::new();
        let tables = TABLES.into_iter();
        for label in tables.map(Labels::new).flat_map(choose) {
            if !all.contains(&label) {
                all.push(label);
            }
        }
        all
    }

    /// The label with a name.
    pub fn find(self, name: &str) -> Option<Label> {
        self.iter().find(|label| label.name == name)
    }

    /// The labels that naming a label covers: itself, and those within it.
    pub fn covered(self, label: Label) -> impl Iterator<Item = Label> {
        self.iter().filter(move |inner| self.covers(label, *inner))
    }

    fn covers(self, label: Label, inner: Label) -> bool {
        let group = |inner: &Label| inner.within.and_then(|group| self.find(group));
        std::iter::successors(Some(inner), group).any(|around| around == label)
    }

    /// The group that a label lies directly within, if there is one.
    pub(crate) fn around(self, label: Label) -> Option<Label> {
        label.within.and_then(|group| self.find(group))
    }

    /// The number of a label in the table.
    ///
    /// # Panics
    /// If the architecture did not declare it.
    pub(crate) fn place(self, label: Label) -> usize {
        let place = self.0.iter().position(|other| *other == label);
        place.unwrap_or_else(|| panic!("the architecture does not declare `{}`", label.name))
    }
}

/// The 64-bit FNV-1a hash (Fowler, Noll, Vo).
pub(crate) const fn fnv(text: &str) -> u64 {
    let (bytes, mut hash, mut at) = (text.as_bytes(), 0xcbf2_9ce4_8422_2325_u64, 0);
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    hash
}

/// The names of labels, for messages.
pub(crate) fn names(labels: impl Iterator<Item = Label>) -> String {
    let names: Vec<&str> = labels.map(Label::name).collect();
    names.join(", ")
}

/// A clause that asks whether the user meant the nearest of some labels; empty if none is near.
pub(crate) fn hint(name: &str, labels: impl Iterator<Item = Label>) -> String {
    let distance = |label: &Label| strsim::damerau_levenshtein(label.name, name);
    let near = labels
        .min_by_key(distance)
        .filter(|label| distance(label) <= 1 + name.len() / 3);
    near.map_or(String::new(), |label| {
        format!("; did you mean `{}`?", label.name)
    })
}
