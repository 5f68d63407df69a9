//! Ranks that share sequences (DeepSpeed-Ulysses, Jacobs et al. 2023): by token each has a part of every sequence, and in attention
//! some heads of whole sequences. Two stages around attention carry tensors from one division to the other.

use super::qkv_tensors::QkvTensors;
use crate::stage::{Io, Stage};
use crate::{Activation, AttentionSpec, Extent, Label, ModelError, Pass, SharingRanks};
use kernels::operation::{Copy, SumInOrder};
use kernels::{Exchange, ExchangeBytes, Init, Queue};
use memory::{Buffer, In, Out};
use std::ops::Range;

const WRITTEN: &str =
    "pieces of heads are computed, and the places for others are free, before they are exchanged";
const CAME: &str = "pieces of heads have come before they are read";

/// Carries queries, keys and values from tokens to heads: q `[b s, heads d]` becomes `[b n s, heads d / n]` on each of `n` ranks, which
/// have `s` tokens of each sequence.
pub(super) struct TokensToHeads {
    pub(super) ranks: SharingRanks,
    /// The attention of the whole block.
    pub(super) attention: AttentionSpec,
    /// What has queries, keys and values: one activation or three.
    pub(super) inputs: &'static [Activation],
}

/// Carries attention's output from heads to tokens: the inverse.
pub(super) struct HeadsToTokens {
    pub(super) ranks: SharingRanks,
    /// The attention of the whole block.
    pub(super) attention: AttentionSpec,
    /// Attention's output, by token.
    pub(super) output: Activation,
}

impl TokensToHeads {
    const MADE: [Activation; 3] = TokensToHeads::labelled(Label::QKV);
    const OF_LATENTS: [Activation; 3] = TokensToHeads::labelled(Label::MLA_UP_PROJ);

    const fn labelled(label: Label) -> [Activation; 3] {
        [
            Activation::new("q_heads", "d_q_heads", label),
            Activation::new("k_heads", "d_k_heads", label),
            Activation::new("v_heads", "d_v_heads", label),
        ]
    }

    /// Queries, keys and values of this rank's heads. They have the label of those by token.
    pub(super) fn made(attention: &AttentionSpec) -> &'static [Activation; 3] {
        match attention.latent {
            None => &TokensToHeads::MADE,
            Some(_) => &TokensToHeads::OF_LATENTS,
        }
    }

    /// Queries, keys and values by token.
    fn qkv(&self) -> QkvTensors {
        QkvTensors(self.inputs, self.attention.qkv_widths())
    }

    /// The widths of queries, keys and values on this rank.
    fn own_widths(&self) -> [usize; 3] {
        self.ranks.attention(&self.attention).qkv_widths()
    }
}

impl HeadsToTokens {
    /// The output of this rank's heads.
    pub(super) const O: Activation = Activation::new("o_heads", "d_o_heads", Label::ATTN_VALUE);

    fn own_width(&self) -> usize {
        self.ranks.attention(&self.attention).o_width()
    }
}

impl Stage for TokensToHeads {
    fn name(&self) -> &'static str {
        "tokens_to_heads"
    }

    fn io(&self) -> Io {
        let extents = self.own_widths().map(|width| self.ranks.tokens(width));
        Io {
            reads: self.inputs.to_vec(),
            writes: Self::made(&self.attention)
                .iter()
                .copied()
                .zip(extents)
                .collect(),
            backward_reads: Vec::new(),
        }
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let inputs = self.qkv().pull(pass)?;
        let by_token = self.qkv().views(&inputs);
        let (mut rooms, mut made) = (Vec::new(), Vec::new());
        for ((activation, x), columns) in Self::made(&self.attention)
            .iter()
            .zip(by_token)
            .zip(self.own_widths())
        {
            if let Some(out) = pass.output(*activation)? {
                rooms.push(self.ranks.pack(pass, x, columns)?);
                made.push((*activation, out));
            }
        }
        let by_head = made.iter_mut().map(|(_, out)| out.view_mut());
        self.ranks.to_heads(pass, rooms, by_head.collect())?;
        for (activation, out) in made {
            pass.put(activation, Some(out));
        }
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let by_head = Self::made(&self.attention).map(|activation| pass.gradient(activation));
        let rooms = self
            .ranks
            .to_tokens(pass, by_head.iter().map(Buffer::view).collect())?;
        drop(by_head);
        let mut gradients = self.qkv().gradients(pass, pass.tokens())?;
        let by_token = self.qkv().views_mut(&mut gradients);
        for (out, room) in by_token.into_iter().zip(&rooms) {
            self.ranks.unpack(pass, out, room)?;
        }
        self.qkv().file_gradients(pass, gradients);
        Ok(())
    }
}

impl Stage for HeadsToTokens {
    fn name(&self) -> &'static str {
        "heads_to_tokens"
    }

    fn io(&self) -> Io {
        let o = Extent::tokens(self.attention.o_width());
        Io {
            reads: vec![Self::O],
            writes: vec![(self.output, o)],
            backward_reads: Vec::new(),
        }
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let by_head = pass.pull(Self::O)?;
        let mut o = pass.output(self.output)?;
        if let Some(o) = &mut o {
            let rooms = self.ranks.to_tokens(pass, vec![by_head.view()])?;
            self.ranks.unpack(pass, o.view_mut(), &rooms[0])?;
        }
        pass.put(self.output, o);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let by_token = pass.gradient(self.output);
        let rooms = vec![self.ranks.pack(pass, by_token.view(), self.own_width())?];
        drop(by_token);
        let tokens = self.ranks.rank.of * pass.tokens();
        let mut by_head = pass.temporary(Self::O.gradient_name(), [tokens, self.own_width()])?;
        self.ranks.to_heads(pass, rooms, vec![by_head.view_mut()])?;
        pass.file_gradient(Self::O, by_head);
        Ok(())
    }
}

/// What goes between two ranks is one piece for each sequence, in the order of sequences. A tensor by token is packed before it is
/// sent, and arrives packed: the columns of each rank's heads, one rank after the other.
impl SharingRanks {
    /// Fills tensors by heads, `[b n s, columns]`, from packed ones.
    fn to_heads(
        self,
        pass: &Pass,
        packed: Vec<Buffer>,
        by_head: Vec<Out>,
    ) -> Result<(), ModelError> {
        let (of_tokens, of_heads) = self.pieces(pass);
        let bytes = packed.iter().map(|room| room.view().bytes()).sum();
        let exchanged = self.exchange(pass, bytes, || {
            let sends = packed.iter().flat_map(|room| take(room.view(), &of_tokens));
            let receives = by_head.into_iter().flat_map(|out| take_mut(out, &of_heads));
            Exchange {
                sends: sends.collect(),
                receives: receives.collect(),
            }
        });
        exchanged.inspect_err(|_| std::mem::forget(packed))
    }

    /// Packed tensors by token, from tensors by heads.
    fn to_tokens(self, pass: &Pass, by_head: Vec<In>) -> Result<Vec<Buffer>, ModelError> {
        let rooms = by_head.iter().map(|x| self.room(pass, x.dims()[1]));
        let mut rooms = rooms.collect::<Result<Vec<_>, ModelError>>()?;
        let (of_tokens, of_heads) = self.pieces(pass);
        let bytes = by_head.iter().map(In::bytes).sum();
        let exchanged = self.exchange(pass, bytes, || {
            let receives = rooms.iter_mut().map(Buffer::view_mut);
            let receives = receives.flat_map(|room| take_mut(room, &of_tokens));
            Exchange {
                sends: by_head.iter().flat_map(|x| take(*x, &of_heads)).collect(),
                receives: receives.collect(),
            }
        });
        match exchanged {
            Ok(()) => Ok(rooms),
            Err(error) => {
                std::mem::forget(rooms);
                Err(error)
            }
        }
    }

    /// Copies the columns of each rank's heads, one rank after the other.
    fn pack(self, pass: &Pass, x: In, columns: usize) -> Result<Buffer, ModelError> {
        let tokens = pass.tokens();
        let copies = self.copies(x.dims()[1], columns);
        let mut room = self.room(pass, columns)?;
        let of_rank = |rank| rank * tokens..(rank + 1) * tokens;
        let rows: Vec<_> = (0..self.rank.of).map(of_rank).collect();
        let parts = room.view_mut().disjoint_rows(&rows).into_iter();
        for (rank, out) in parts.enumerate() {
            let first = rank / copies * columns;
            let x = x.columns(first..first + columns);
            pass.kernels().run(Copy { out, x })?;
        }
        Ok(room)
    }

    /// The inverse. If several ranks have the same columns, they are added up in the order of ranks.
    fn unpack(self, pass: &Pass, mut out: Out, room: &Buffer) -> Result<(), ModelError> {
        let (tokens, columns) = (pass.tokens(), room.dims()[1]);
        let copies = self.copies(out.dims()[1], columns);
        let mut sum = match copies {
            1 => None,
            _ => Some(pass.temporary("summed_heads", [tokens, columns])?),
        };
        for part in 0..self.rank.of / copies {
            let rows = part * copies * tokens..(part + 1) * copies * tokens;
            let mut x = room.view().rows(rows);
            if let Some(sum) = &mut sum {
                let elements = tokens * columns;
                pass.kernels().run(SumInOrder {
                    out: sum.view_mut().reshape([elements]),
                    x: x.reshape([copies, elements]),
                    init: Init::Overwrite,
                })?;
                x = sum.view();
            }
            let out = out.reborrow();
            let out = out.columns(part * columns..(part + 1) * columns);
            pass.kernels().run(Copy { out, x })?;
        }
        Ok(())
    }

    /// How many neighbouring ranks have the same `columns` of `width`.
    fn copies(self, width: usize, columns: usize) -> usize {
        self.rank.of * columns / width
    }

    /// Room for this rank's tokens with the columns of each rank.
    fn room(self, pass: &Pass, columns: usize) -> Result<Buffer, ModelError> {
        pass.temporary("exchanged_heads", [self.rank.of * pass.tokens(), columns])
    }

    /// The pieces of a packed tensor by token, and those of a tensor by heads: the rank that each goes to or comes from, and its rows.
    fn pieces(self, pass: &Pass) -> (Vec<Piece>, Vec<Piece>) {
        let shape = pass.batch().shape;
        let pieces = |rank: &dyn Fn(usize) -> usize| -> Vec<Piece> {
            let piece = |at: usize| (self.first + rank(at), at * shape.seq..(at + 1) * shape.seq);
            (0..self.rank.of * shape.rows).map(piece).collect()
        };
        (
            pieces(&|at| at / shape.rows),
            pieces(&|at| at % self.rank.of),
        )
    }

    /// Exchanges the pieces of tensors that have so many bytes, this rank's own included. The exchange waits for the computation so
    /// far, and the computation then waits for the exchange. If it fails, data of others may still arrive: the caller leaks what it
    /// leased, which keeps the slab with all pieces.
    fn exchange<'a>(
        self,
        pass: &Pass,
        all: usize,
        list: impl FnOnce() -> Exchange<'a> + 'a,
    ) -> Result<(), ModelError> {
        let kernels = pass.kernels();
        let others = all / self.rank.of * (self.rank.of - 1);
        let bytes = ExchangeBytes::both_ways(others).among(self.rank.of);
        kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, WRITTEN)?;
        // SAFETY: the computation waits for the exchange before it reads, writes or gives back any of the pieces, and callers keep
        // them if it fails.
        unsafe { kernels.start_exchange_of(bytes, Box::new(list)) }?;
        Ok(kernels.wait(Queue::Compute, kernels.record(Queue::Collective)?, CAME)?)
    }
}

/// A rank, and rows.
type Piece = (usize, Range<usize>);

fn take<'a>(x: In<'a>, pieces: &[Piece]) -> Vec<(usize, In<'a>)> {
    let pieces = pieces.iter();
    pieces
        .map(|(rank, rows)| (*rank, x.rows(rows.clone())))
        .collect()
}

fn take_mut<'a>(out: Out<'a>, pieces: &[Piece]) -> Vec<(usize, Out<'a>)> {
    let (ranks, rows): (Vec<usize>, Vec<Range<usize>>) = pieces.iter().cloned().unzip();
    ranks.into_iter().zip(out.disjoint_rows(&rows)).collect()
}
