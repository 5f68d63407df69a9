//! The sizes at which kernels are tried: a run's own, within what a trial has time for.

use kernels::AttentionShape;
use settings::{Config, KernelFamily};
use std::fmt;

/// The most elements of a result that are looked at, and so about the most of an expert's rows times the widest of them.
pub(crate) const ELEMENTS_MAX: usize = 1 << 23;

/// The longest sequence in which attention is tried.
const SEQ_MAX: usize = 1 << 12;

/// The most elements of queries in a trial.
const QUERY_ELEMENTS_MAX: usize = 1 << 25;

/// A family of operations, and their sizes in a trial. On the command line a subcommand with flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Subcommand)]
pub(crate) enum Widths {
    /// Of flash attention
    Attention(AttentionWidths),
    /// Of products of experts
    Experts(ExpertWidths),
}

/// The heads with which a trial computes attention, and their sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub(crate) struct AttentionWidths {
    /// Query heads.
    #[arg(long)]
    heads: usize,
    /// Key-value heads.
    #[arg(long)]
    kv_heads: usize,
    /// Width of a head of queries and keys.
    #[arg(long)]
    qk_head_dim: usize,
    /// Width of a head of values.
    #[arg(long)]
    v_head_dim: usize,
    /// Tokens of the longest sequence.
    #[arg(long)]
    pub(crate) seq: usize,
    /// The most keys that a query sees in layers that have a window; 0: none has.
    #[arg(long)]
    pub(crate) window: usize,
    /// Probabilities are dropped.
    #[arg(long)]
    pub(crate) drops: bool,
}

/// The sizes of products of experts that a trial makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub(crate) struct ExpertWidths {
    /// Width of the residual stream.
    #[arg(long)]
    hidden: usize,
    /// Width of one expert.
    #[arg(long)]
    ffn: usize,
    /// Rank of adapters on experts; 0: there are none.
    #[arg(long)]
    rank: usize,
    /// The number of experts.
    #[arg(long)]
    pub(crate) experts: usize,
    /// Rows of the expert that has most.
    #[arg(long)]
    pub(crate) rows: usize,
}

impl Widths {
    /// Those of a run; none without experts.
    pub(crate) fn of(family: KernelFamily, config: &Config) -> Option<Widths> {
        match family {
            KernelFamily::Attention => Some(Widths::Attention(AttentionWidths::of(config))),
            KernelFamily::Experts => ExpertWidths::of(config).map(Widths::Experts),
        }
    }

    /// Small ones, for a machine without a run.
    pub(crate) fn standard(family: KernelFamily) -> Widths {
        match family {
            KernelFamily::Attention => Widths::Attention(AttentionWidths::STANDARD),
            KernelFamily::Experts => Widths::Experts(ExpertWidths::STANDARD),
        }
    }

    /// What they are of.
    pub(crate) fn family(&self) -> KernelFamily {
        match self {
            Widths::Attention(_) => KernelFamily::Attention,
            Widths::Experts(_) => KernelFamily::Experts,
        }
    }

    /// The subcommand of [`super::COMMAND`] with its flags.
    pub(super) fn arguments(&self) -> Vec<String> {
        let flags = match self {
            Widths::Attention(widths) => widths.flags(),
            Widths::Experts(widths) => widths.flags(),
        };
        [self.family().name().into()]
            .into_iter()
            .chain(flags)
            .collect()
    }
}

/// As the arguments that ask for such a trial.
impl fmt::Display for Widths {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.arguments().join(" "))
    }
}

impl AttentionWidths {
    /// Small ones, for a machine without a run.
    pub(crate) const STANDARD: AttentionWidths = AttentionWidths {
        heads: 4,
        kv_heads: 2,
        qk_head_dim: 64,
        v_head_dim: 64,
        seq: 200,
        window: 70,
        drops: true,
    };

    /// The heads of a run, and sequences as long as its own, up to what a trial has time for. A window hides keys of these too.
    fn of(config: &Config) -> AttentionWidths {
        let model = &config.model;
        let spec = model.attention(0);
        let of_token = spec.heads * spec.qk_head_dim.max(spec.v_head_dim);
        let most = (QUERY_ELEMENTS_MAX / of_token.max(1)).clamp(1, SEQ_MAX);
        // By powers of two: prompts of all lengths have few verdicts.
        let seq = config.data.seq.next_power_of_two().min(1 << most.ilog2());
        let window = model
            .sliding_window
            .filter(|window| *window < config.data.seq);
        AttentionWidths {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            qk_head_dim: spec.qk_head_dim,
            v_head_dim: spec.v_head_dim,
            seq,
            window: window.map_or(0, |window| window.min(seq.div_ceil(2))),
            drops: model.dropout > 0.0,
        }
    }

    /// Attention of `batch` sequences.
    pub(crate) fn shape(&self, [batch, seq]: [usize; 2], window: Option<usize>) -> AttentionShape {
        AttentionShape {
            batch,
            seq,
            heads: self.heads,
            kv_heads: self.kv_heads,
            qk_head_dim: self.qk_head_dim,
            v_head_dim: self.v_head_dim,
            window,
            scale: None,
            cap: None,
        }
    }

    fn flags(&self) -> Vec<String> {
        let AttentionWidths {
            heads,
            kv_heads,
            qk_head_dim,
            v_head_dim,
            seq,
            window,
            drops,
        } = self;
        let mut flags = vec![
            format!("--heads={heads}"),
            format!("--kv-heads={kv_heads}"),
            format!("--qk-head-dim={qk_head_dim}"),
            format!("--v-head-dim={v_head_dim}"),
            format!("--seq={seq}"),
            format!("--window={window}"),
        ];
        flags.extend(drops.then(|| "--drops".into()));
        flags
    }
}

impl ExpertWidths {
    /// Small ones, for a machine without a run.
    pub(crate) const STANDARD: ExpertWidths = ExpertWidths {
        hidden: 128,
        ffn: 64,
        rank: 0,
        experts: 5,
        rows: 130,
    };

    /// Those of a run in which no expert has more rows than a micro-batch has tokens; none without experts.
    fn of(config: &Config) -> Option<ExpertWidths> {
        let experts = config.model.experts.as_ref()?;
        let mut widths = ExpertWidths {
            hidden: config.model.hidden,
            ffn: experts.ffn,
            rank: config.lora.rank.unwrap_or(0),
            experts: experts.count,
            rows: 1,
        };
        let widest = widths.products().into_iter().flatten().max();
        // By powers of two: prompts of all lengths have few verdicts.
        let tokens = (config.batch.micro * config.data.seq).next_power_of_two();
        widths.rows = (ELEMENTS_MAX / widest.unwrap_or(1)).clamp(1, tokens);
        Some(widths)
    }

    /// Inputs and outputs of each product of a layer: gate and up together, down, and those of their adapters.
    pub(crate) fn products(&self) -> Vec<[usize; 2]> {
        let ExpertWidths {
            hidden, ffn, rank, ..
        } = *self;
        let mut products = vec![[hidden, 2 * ffn], [ffn, hidden]];
        if rank > 0 {
            products.extend([[hidden, rank], [rank, 2 * ffn], [ffn, rank], [rank, hidden]]);
        }
        products
    }

    fn flags(&self) -> Vec<String> {
        let ExpertWidths {
            hidden,
            ffn,
            rank,
            experts,
            rows,
        } = self;
        vec![
            format!("--hidden={hidden}"),
            format!("--ffn={ffn}"),
            format!("--rank={rank}"),
            format!("--experts={experts}"),
            format!("--rows={rows}"),
        ]
    }
}
