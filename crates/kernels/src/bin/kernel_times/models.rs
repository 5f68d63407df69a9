//! The models whose shapes are timed.

use kernels::AttentionShape;

/// A model, and the micro-batch that it is trained with.
#[derive(Clone, Copy)]
pub struct ModelShapes {
    pub name: &'static str,
    /// Sequences, and tokens in each.
    pub batch: [usize; 2],
    pub hidden: usize,
    /// Heads of queries, and of keys and values.
    pub heads: [usize; 2],
    pub head_dim: usize,
    /// The width of the feed-forward layer, or of one expert.
    pub ffn: usize,
    /// Experts, and how many of them a token is sent to.
    pub experts: Option<[usize; 2]>,
    pub vocab: usize,
}

/// The last two are there for their experts.
#[rustfmt::skip]
pub const MODELS: [ModelShapes; 6] = [
    ModelShapes { name: "qwen2.5-1.5b", batch: [32, 1024], hidden: 1536, heads: [12, 2], head_dim: 128, ffn: 8960, experts: None, vocab: 151_936 },
    ModelShapes { name: "llama-3.2-1b", batch: [1, 4096], hidden: 2048, heads: [32, 8], head_dim: 64, ffn: 8192, experts: None, vocab: 128_256 },
    ModelShapes { name: "llama-3-8b", batch: [1, 8192], hidden: 4096, heads: [32, 8], head_dim: 128, ffn: 14_336, experts: None, vocab: 128_256 },
    ModelShapes { name: "qwen3-30b-a3b", batch: [2, 4096], hidden: 2048, heads: [32, 4], head_dim: 128, ffn: 768, experts: Some([128, 8]), vocab: 151_936 },
    ModelShapes { name: "olmoe-1b-7b", batch: [2, 4096], hidden: 2048, heads: [16, 16], head_dim: 128, ffn: 1024, experts: Some([64, 8]), vocab: 50_304 },
    ModelShapes { name: "mixtral-8x7b", batch: [1, 4096], hidden: 4096, heads: [32, 8], head_dim: 128, ffn: 14_336, experts: Some([8, 2]), vocab: 32_000 },
];

impl ModelShapes {
    /// One that an emulation computes in milliseconds, with heads of the same width.
    pub fn tiny(self) -> ModelShapes {
        ModelShapes {
            batch: [1, 32],
            hidden: 64,
            heads: [2, 1],
            ffn: 64,
            experts: self.experts.map(|_| [8, 2]),
            vocab: 256,
            ..self
        }
    }

    pub fn tokens(&self) -> usize {
        self.batch[0] * self.batch[1]
    }

    /// Columns of all queries, of all keys, and of all values.
    pub fn qkv_widths(&self) -> [usize; 3] {
        let [heads, kv_heads] = self.heads;
        [heads, kv_heads, kv_heads].map(|heads| heads * self.head_dim)
    }

    pub fn attention(&self) -> AttentionShape {
        AttentionShape::new(self.batch, self.heads, self.head_dim)
    }

    /// Outputs of the largest matrix that every token goes through: gate and up, or of a model of experts queries, keys and values.
    pub fn widest(&self) -> usize {
        match self.experts {
            None => 2 * self.ffn,
            Some(_) => self.qkv_widths().iter().sum(),
        }
    }

    /// Matrices of gate and up: how many, and their outputs and inputs.
    pub fn gate_up(&self) -> [usize; 3] {
        let [experts, _] = self.experts.unwrap_or([1, 1]);
        [experts, 2 * self.ffn, self.hidden]
    }

    /// Parameters of a block's matrices.
    pub fn block(&self) -> usize {
        let [queries, keys, values] = self.qkv_widths();
        let attention = self.hidden * (2 * queries + keys + values);
        attention + self.gate_up().iter().product::<usize>() * 3 / 2
    }
}
