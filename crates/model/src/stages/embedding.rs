//! The embedding, which comes before the first block.

use crate::parameters::{ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::{Activation, DropoutSite, Extent, Pass, Result};
use kernels::operation::{
    self, AddPositions, AddPositionsBackward, BiasDropoutAdd, EmbeddingBackward,
};
use memory::{Buffer, DType, Out};

/// x `[b s, h]` = dropout(multiplier (rows of a matrix for the tokens + rows of another for their positions, if they are learned)).
pub struct Embedding {
    /// The matrix of the tokens, for a head that is tied to it.
    pub tokens: ParameterId,
    width: usize,
    positions: Option<ParameterId>,
    multiplier: f32,
    /// The rows are multiplied by sqrt(width), rounded to the type that is computed in, as transformers does for Gemma.
    is_scaled: bool,
    dropout: DropoutSite,
}

impl Embedding {
    /// Declares the matrix `name [vocab, width]`.
    pub fn declare(parameters: &mut PartParameters, name: &str, shape: [usize; 2]) -> Embedding {
        Embedding {
            tokens: parameters.matrix(name, shape),
            width: shape[1],
            positions: None,
            multiplier: 1.0,
            is_scaled: false,
            dropout: DropoutSite::NONE,
        }
    }

    /// The same, whose rows are multiplied by a number.
    pub fn multiplied(self, multiplier: f32) -> Embedding {
        Embedding { multiplier, ..self }
    }

    /// The same, whose rows are multiplied by sqrt(width) if `is_scaled`.
    pub fn scaled(self, is_scaled: bool) -> Embedding {
        Embedding { is_scaled, ..self }
    }

    /// What rows of this type are multiplied by.
    fn factor(&self, dtype: DType) -> f32 {
        let root = (self.width as f64).sqrt();
        let scale = match (self.is_scaled, dtype) {
            (false, _) => 1.0,
            (true, DType::BF16) => half::bf16::from_f64(root).to_f32(),
            (true, _) => root as f32,
        };
        self.multiplier * scale
    }

    /// Declares the matrix `name [positions, width]` beside it.
    pub fn with_positions(
        self,
        parameters: &mut PartParameters,
        name: &str,
        positions: usize,
        dropout: DropoutSite,
    ) -> Embedding {
        Embedding {
            positions: Some(parameters.matrix(name, [positions, self.width])),
            dropout,
            ..self
        }
    }

    fn fill(&self, pass: &Pass, x: &mut Buffer) -> Result {
        let (kernels, batch) = (pass.kernels(), pass.batch());
        kernels.run(operation::Embedding {
            out: x.view_mut(),
            table: pass.parameter(self.tokens),
            ids: batch.input_ids.view(),
        })?;
        if let Some(positions) = self.positions {
            kernels.run(AddPositions {
                x: x.view_mut(),
                table: pass.parameter(positions),
                positions: batch.positions(),
            })?;
        }
        self.scale(pass, x.view_mut())
    }

    /// Multiplies by the embedding's factor and drops, in place: the sum, or its gradient.
    fn scale(&self, pass: &Pass, out: Out) -> Result {
        let dropout = pass.dropout(self.dropout);
        let scale = self.factor(out.dtype());
        if scale != 1.0 || dropout.is_some() {
            pass.kernels().run(BiasDropoutAdd {
                out,
                bias: None,
                dropout,
                first: 0,
                scale,
                residual: None,
            })?;
        }
        Ok(())
    }
}

impl Stage for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn io(&self) -> Io {
        Io {
            writes: vec![(Activation::NEXT_X, Extent::tokens(self.width))],
            ..Io::default()
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        [self.tokens].into_iter().chain(self.positions).collect()
    }

    fn dropout(&self) -> Vec<DropoutSite> {
        vec![self.dropout]
    }

    fn reads_matrices_backward(&self) -> bool {
        false
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let mut x = pass.output(Activation::NEXT_X)?;
        if let Some(x) = &mut x {
            self.fill(pass, x)?;
        }
        pass.put(Activation::NEXT_X, x);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let mut dx = pass.gradient(Activation::NEXT_X);
        self.scale(pass, dx.view_mut())?;
        let (kernels, batch) = (pass.kernels(), pass.batch());
        if let Some((dtable, init)) = pass.accumulate(self.tokens) {
            kernels.run(EmbeddingBackward {
                dtable,
                dout: dx.view(),
                ids: batch.input_ids.view(),
                init,
            })?;
        }
        if let Some((dtable, init)) = self.positions.and_then(|of| pass.accumulate(of)) {
            kernels.run(AddPositionsBackward {
                dtable,
                dx: dx.view(),
                positions: batch.positions(),
                init,
            })?;
        }
        Ok(())
    }
}
