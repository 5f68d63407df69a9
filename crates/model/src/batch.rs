//! The tokens of a micro-batch on the device.

use crate::{BatchShape, DropoutKeys, DropoutSite, Randomness, Result};
use kernels::{Kernels, Positions};
use memory::{Buffer, Category, DType, Dims, In, Memory, Rank};

/// Token ids and targets of a micro-batch, in device memory.
pub struct Batch {
    /// Its sequences.
    pub shape: BatchShape,
    /// `[rows seq]` i32, each within the vocabulary.
    pub input_ids: Tokens,
    /// `[rows seq]` i32; negative where the loss leaves a token out.
    pub targets: Tokens,
    /// `[rows, s]` i32 where documents are packed: for each token of whole sequences, the position in its sequence at which its document
    /// begins.
    pub documents: Option<Buffer>,
    /// `[rows]` i32: how many tokens each sequence begins with that are not padding, which the losses of routers leave out;
    /// none: no token is padding.
    pub lengths: Option<Buffer>,
    /// `[rows seq]` i32: each token's position, if that is not its place in its sequence.
    pub positions: Option<Buffer>,
    /// The keys of dropout's random numbers; none: nothing is dropped.
    pub dropout: Option<DropoutKeys>,
}

/// Tokens on the device.
pub enum Tokens {
    /// Uploaded into a lease.
    Sent(Buffer),
    /// In another library's memory. The lease that they would be uploaded into is held as well.
    Lent(In<'static>, Buffer),
}

impl Tokens {
    /// Their values.
    pub fn view(&self) -> In<'_> {
        match self {
            Tokens::Sent(buffer) => buffer.view(),
            Tokens::Lent(tokens, _) => *tokens,
        }
    }
}

impl Batch {
    /// Whole sequences from their first position on, without padding or dropout.
    fn plain(shape: BatchShape, [input_ids, targets]: [Tokens; 2]) -> Batch {
        Batch {
            shape,
            input_ids,
            targets,
            documents: None,
            lengths: None,
            positions: None,
            dropout: None,
        }
    }

    /// Leases and uploads a micro-batch.
    ///
    /// # Errors
    /// `ModelError` if memory is refused or a slice does not have `shape`'s number of tokens.
    pub fn upload(
        memory: &Memory,
        kernels: &Kernels,
        shape: BatchShape,
        input_ids: &[i32],
        targets: &[i32],
    ) -> Result<Batch> {
        let tokens = [shape.tokens()];
        let input_ids = send(memory, kernels, "input_ids", tokens, input_ids)?;
        let targets = send(memory, kernels, "targets", tokens, targets)?;
        Ok(Batch::plain(shape, [input_ids, targets].map(Tokens::Sent)))
    }

    /// A micro-batch whose tokens, `[rows seq]` i32, another library has on the device. Room for them is leased all the
    /// same, so that a step's memory does not depend on where its tokens come from.
    ///
    /// # Errors
    /// `ModelError` if memory is refused.
    pub fn lent(
        memory: &Memory,
        shape: BatchShape,
        input_ids: In<'static>,
        targets: In<'static>,
    ) -> Result<Batch> {
        let lent = |name, tokens: In<'static>| -> Result<Tokens> {
            assert_eq!(
                (tokens.dims(), tokens.dtype()),
                (&[shape.tokens()][..], DType::I32),
                "tokens that are lent are those of the micro-batch"
            );
            let room = memory.lease(Category::Input, name, [shape.tokens()], DType::I32)?;
            Ok(Tokens::Lent(tokens, room))
        };
        let tokens = [lent("input_ids", input_ids)?, lent("targets", targets)?];
        Ok(Batch::plain(shape, tokens))
    }

    /// Leases and uploads tokens with the given positions and without targets.
    ///
    /// # Errors
    /// As [`Batch::upload`].
    pub fn without_targets(
        memory: &Memory,
        kernels: &Kernels,
        shape: BatchShape,
        input_ids: &[i32],
        positions: &[i32],
    ) -> Result<Batch> {
        let tokens = [shape.tokens()];
        let input_ids = send(memory, kernels, "input_ids", tokens, input_ids)?;
        let targets = memory.lease(Category::Input, "targets", [0], DType::I32)?;
        let positions = send(memory, kernels, "positions", tokens, positions)?;
        Ok(Batch {
            positions: Some(positions),
            ..Batch::plain(shape, [input_ids, targets].map(Tokens::Sent))
        })
    }

    /// Packs documents into the sequences: a token sees only its own document, and its position counts from there.
    /// `starts` has, for each token of the whole sequences, the position in its sequence at which its document begins; of each
    /// sequence these tokens are one of several equal parts.
    ///
    /// # Errors
    /// As [`Batch::upload`].
    pub fn with_documents(
        self,
        memory: &Memory,
        kernels: &Kernels,
        starts: &[i32],
        part: Rank,
    ) -> Result<Batch> {
        let BatchShape { rows, seq } = self.shape;
        let documents = send(memory, kernels, "documents", [rows, part.of * seq], starts)?;
        let starts = starts.chunks(seq).skip(part.number).step_by(part.of);
        let first = (part.number * seq) as i32;
        let positions =
            starts.flat_map(|starts| (first..).zip(starts).map(|(at, start)| at - start));
        let positions: Vec<i32> = positions.collect();
        let positions = send(memory, kernels, "positions", [rows * seq], &positions)?;
        Ok(Batch {
            documents: Some(documents),
            positions: Some(positions),
            ..self
        })
    }

    /// Begins each sequence at a position, `first`, since other ranks have the tokens before it.
    ///
    /// # Errors
    /// As [`Batch::upload`].
    pub fn from_position(self, memory: &Memory, kernels: &Kernels, first: usize) -> Result<Batch> {
        let BatchShape { rows, seq } = self.shape;
        let places = first as i32..(first + seq) as i32;
        let positions: Vec<i32> = (0..rows).flat_map(|_| places.clone()).collect();
        let positions = send(memory, kernels, "positions", [rows * seq], &positions)?;
        Ok(Batch {
            positions: Some(positions),
            ..self
        })
    }

    /// Ends sequences with padding: `lengths` has, for each, how many tokens come before it.
    ///
    /// # Errors
    /// As [`Batch::upload`].
    ///
    /// # Panics
    /// If a sequence is shorter than its length.
    pub fn with_lengths(
        self,
        memory: &Memory,
        kernels: &Kernels,
        lengths: &[i32],
    ) -> Result<Batch> {
        let all = 0..=self.shape.seq as i32;
        assert!(
            lengths.iter().all(|length| all.contains(length)),
            "a sequence has at most {} tokens, and lengths are {lengths:?}",
            self.shape.seq
        );
        let lengths = send(memory, kernels, "lengths", [self.shape.rows], lengths)?;
        Ok(Batch {
            lengths: Some(lengths),
            ..self
        })
    }

    /// Adds keys of dropout for the sites of a model ([`crate::Architecture::dropout_sites`]), as training has them.
    ///
    /// # Errors
    /// As [`Batch::upload`].
    pub fn with_dropout(
        self,
        memory: &Memory,
        kernels: &Kernels,
        sites: &[(usize, DropoutSite)],
        randomness: Randomness,
    ) -> Result<Batch> {
        Ok(Batch {
            dropout: DropoutKeys::upload(memory, kernels, sites, randomness)?,
            ..self
        })
    }

    /// The positions of its tokens.
    pub fn positions(&self) -> Positions<'_> {
        match &self.positions {
            Some(positions) => Positions::Given(positions.view()),
            None => Positions::Sequences(self.shape.seq),
        }
    }

    /// Where sequences have padding, how many tokens come before it.
    pub fn lengths(&self) -> Option<In<'_>> {
        self.lengths.as_ref().map(Buffer::view)
    }
}

pub(crate) fn send(
    memory: &Memory,
    kernels: &Kernels,
    name: &'static str,
    shape: impl Into<Dims>,
    data: &[i32],
) -> Result<Buffer> {
    let mut buffer = memory.lease(Category::Input, name, shape, DType::I32)?;
    kernels.upload(buffer.view_mut(), bytemuck::cast_slice(data))?;
    Ok(buffer)
}
