//! Sequences in parts, on one rank or several (DeepSpeed-Ulysses, Jacobs et al. 2023): by token a part has some tokens of every sequence,
//! and in attention and the gated delta rule some heads of whole sequences. Stages around these carry tensors from one division to the other, for all parts
//! of a rank at once.

use super::qkv_tensors::{QkvTensors, views, views_mut};
use crate::stage::{Io, Stage};
use crate::{Activation, AttentionSpec, BatchShape, Extent, Label, Pass, Result, SharingRanks};
use kernels::operation::{Copy, Fill, SumInOrder};
use kernels::{Exchange, ExchangeBytes, Init, Kernels, Queue};
use memory::{Buffer, In, Out};
use std::ops::Range;
use std::rc::Rc;

const WRITTEN: &str =
    "pieces of heads are computed, and the places for others are free, before they are exchanged";
const CAME: &str = "pieces of heads have come before they are read";

pub(super) const EACH: &str = "each part has its own";
const ALIKE: &str = "all parts of a sequence want the same outputs";

/// Rows of a parameter's gradient that one part's heads add to, and how; all of it where there are no parts.
pub(super) fn gradient_of_heads<'a>(
    kernels: &Kernels,
    (gradient, init): (Out<'a>, Init<'static>),
    rows: Option<Range<usize>>,
) -> Result<(Out<'a>, Init<'static>)> {
    let Some(rows) = rows else {
        return Ok((gradient, init));
    };
    let gradient = gradient_of_parts(kernels, (gradient, init))?;
    Ok((gradient.rows(rows), Init::Accumulate))
}

/// A parameter's gradient that parts add to, each to rows of its own: a first contribution leaves the others 0.
pub(super) fn gradient_of_parts<'a>(
    kernels: &Kernels,
    (mut gradient, init): (Out<'a>, Init<'static>),
) -> Result<Out<'a>> {
    if matches!(init, Init::Overwrite) {
        let out = gradient.reborrow();
        kernels.run(Fill { out, value: 0.0 })?;
    }
    Ok(gradient)
}

/// Carries queries, keys and values from tokens to heads: q `[b s, heads d]` becomes `[b n s, heads d / n]` for each of `n` parts, which
/// have `s` tokens of each sequence.
pub(super) struct TokensToHeads {
    pub(super) ranks: SharingRanks,
    /// The attention of the whole block.
    pub(super) attention: AttentionSpec,
    /// Queries, keys and values.
    pub(super) inputs: &'static [Activation; 3],
}

/// Carries the output of attention, or of the gated delta rule, from heads to tokens: the inverse.
pub(super) struct HeadsToTokens {
    pub(super) ranks: SharingRanks,
    /// Width of the output of all heads together.
    pub(super) width: usize,
    /// The output by token.
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

    /// Queries, keys and values of one part's heads. They have the label of those by token.
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

    /// The widths of one part's queries, keys and values.
    fn own_widths(&self) -> [usize; 3] {
        self.ranks.attention(&self.attention).qkv_widths()
    }
}

impl HeadsToTokens {
    /// The output of one part's heads.
    pub(super) const O: Activation = Activation::new("o_heads", "d_o_heads", Label::ATTN_VALUE);

    fn own_width(&self) -> usize {
        self.width / self.ranks.parts()
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

    fn joins_parts(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let parts = pass.each_part(|pass| self.packed(pass))?;
        let (mut rooms, mut made) = (Vec::new(), Vec::new());
        for (of_part, written) in parts {
            rooms.push(of_part);
            made.push(written);
        }
        let by_head = made.iter_mut().map(|written| {
            let written = written.iter_mut();
            written.map(|(_, out)| out.view_mut()).collect()
        });
        self.ranks.to_heads(pass, rooms, by_head.collect())?;
        let mut made = made.into_iter();
        pass.each_part(|pass| {
            for (activation, out) in made.next().expect(EACH) {
                pass.put(activation, Some(out));
            }
            Ok(())
        })?;
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let made = Self::made(&self.attention);
        let by_head = pass.each_part(|pass| Ok(made.map(|of| pass.gradient(of))))?;
        let views = by_head.iter().map(|of| of.iter().map(Buffer::view));
        let views = views.map(Iterator::collect).collect();
        let mut rooms = self.ranks.to_tokens(pass, views)?.into_iter();
        drop(by_head);
        pass.each_part(|pass| {
            let rooms = rooms.next().expect(EACH);
            let mut gradients = self.qkv().gradients(pass, pass.tokens())?;
            let by_token = views_mut(&mut gradients);
            for (out, room) in by_token.into_iter().zip(&rooms) {
                self.ranks.unpack(pass, out, room)?;
            }
            self.qkv().file_gradients(pass, gradients);
            Ok(())
        })?;
        Ok(())
    }
}

impl TokensToHeads {
    /// Packs what a part sends, and leases room for what its heads receive: for the same activations in every part.
    fn packed(&self, pass: &mut Pass) -> Result<(Vec<Buffer>, Vec<Written>)> {
        let inputs = self.qkv().pull(pass)?;
        let by_token = views(&inputs);
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
        Ok((rooms, made))
    }
}

impl Stage for HeadsToTokens {
    fn name(&self) -> &'static str {
        "heads_to_tokens"
    }

    fn io(&self) -> Io {
        let o = Extent::tokens(self.width);
        Io {
            reads: vec![Self::O],
            writes: vec![(self.output, o)],
            backward_reads: Vec::new(),
        }
    }

    fn joins_parts(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let parts = pass.each_part(|pass| Ok((pass.pull(Self::O)?, pass.output(self.output)?)))?;
        let (by_head, outputs): (Vec<Rc<Buffer>>, Vec<_>) = parts.into_iter().unzip();
        if outputs.iter().any(Option::is_none) {
            assert!(outputs.iter().all(Option::is_none), "{ALIKE}");
            return Ok(());
        }
        let views = by_head.iter().map(|o| vec![o.view()]).collect();
        let rooms = self.ranks.to_tokens(pass, views)?;
        let mut made = outputs.into_iter().flatten().zip(rooms);
        pass.each_part(|pass| {
            let (mut o, rooms) = made.next().expect(EACH);
            self.ranks.unpack(pass, o.view_mut(), &rooms[0])?;
            pass.put(self.output, Some(o));
            Ok(())
        })?;
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let rooms = pass.each_part(|pass| {
            let by_token = pass.gradient(self.output);
            Ok(vec![self.ranks.pack(
                pass,
                by_token.view(),
                self.own_width(),
            )?])
        })?;
        let tokens = self.ranks.parts() * pass.tokens();
        let mut by_head = pass.each_part(|pass| {
            pass.temporary(Self::O.gradient_name(), [tokens, self.own_width()])
        })?;
        let views = by_head.iter_mut().map(|d_o| vec![d_o.view_mut()]);
        self.ranks.to_heads(pass, rooms, views.collect())?;
        let mut by_head = by_head.into_iter();
        pass.each_part(|pass| {
            pass.file_gradient(Self::O, by_head.next().expect(EACH));
            Ok(())
        })?;
        Ok(())
    }
}

/// Between two parts goes one piece for each sequence, in the order of sequences. A tensor by token is packed before it is sent, and
/// arrives packed: the columns of each part's heads, one part after the other. Lists have a list of tensors for each of this rank's
/// parts.
impl SharingRanks {
    /// Fills tensors by heads, `[b n s, columns]`, from packed ones.
    pub(super) fn to_heads(
        self,
        pass: &Pass,
        packed: Vec<Vec<Buffer>>,
        by_head: Vec<Vec<Out>>,
    ) -> Result {
        let bytes = packed.iter().flatten().map(|room| room.view().bytes());
        let exchanged = self.exchange(pass, bytes.sum(), || {
            let packed = packed.iter().map(|of| of.iter().map(Buffer::view));
            let packed = packed.map(Iterator::collect).collect();
            Exchange {
                sends: self.sent(pass, packed, Division::Tokens),
                receives: self.received(pass, by_head, Division::Heads),
            }
        });
        exchanged.inspect_err(|_| std::mem::forget(packed))
    }

    /// Packed tensors by token, from tensors by heads.
    pub(super) fn to_tokens(self, pass: &Pass, by_head: Vec<Vec<In>>) -> Result<Vec<Vec<Buffer>>> {
        let room = |x: &In| self.room(pass, x.dims()[1]);
        let rooms = by_head.iter().map(|of| of.iter().map(room).collect());
        let mut rooms = rooms.collect::<Result<Vec<Vec<Buffer>>>>()?;
        let bytes = by_head.iter().flatten().map(In::bytes).sum();
        let exchanged = self.exchange(pass, bytes, || {
            let receives = rooms.iter_mut().map(|of| of.iter_mut());
            let receives = receives.map(|of| of.map(Buffer::view_mut).collect());
            let receives = receives.collect();
            Exchange {
                sends: self.sent(pass, by_head, Division::Heads),
                receives: self.received(pass, receives, Division::Tokens),
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

    /// Copies the columns of each part's heads, one part after the other.
    fn pack(self, pass: &Pass, x: In, columns: usize) -> Result<Buffer> {
        let copies = self.copies(x.dims()[1], columns);
        let mut room = self.room(pass, columns)?;
        let parts = room.view_mut().disjoint_rows(&self.rows_of_parts(pass));
        let parts = parts.into_iter();
        for (part, out) in parts.enumerate() {
            let first = part / copies * columns;
            let x = x.columns(first..first + columns);
            pass.kernels().run(Copy { out, x })?;
        }
        Ok(room)
    }

    /// The inverse. If several parts have the same columns, they are added up in the order of parts.
    fn unpack(self, pass: &Pass, mut out: Out, room: &Buffer) -> Result {
        let (tokens, columns) = (pass.tokens(), room.dims()[1]);
        let copies = self.copies(out.dims()[1], columns);
        let mut sum = match copies {
            1 => None,
            _ => Some(pass.temporary("summed_heads", [tokens, columns])?),
        };
        for part in 0..self.parts() / copies {
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

    /// Copies the columns of each part's heads of several tensors, which stand at these columns of one, side by side: those of each
    /// part, one part after the other.
    pub(super) fn pack_beside(
        self,
        pass: &Pass,
        x: In,
        tensors: &[Range<usize>],
    ) -> Result<Buffer> {
        let mut room = self.room(pass, self.columns_beside(tensors))?;
        let parts = room.view_mut().disjoint_rows(&self.rows_of_parts(pass));
        for (part, mut out) in parts.into_iter().enumerate() {
            for (whole, own) in self.places_beside(part, tensors) {
                let out = out.reborrow().columns(own);
                let x = x.columns(whole);
                pass.kernels().run(Copy { out, x })?;
            }
        }
        Ok(room)
    }

    /// The inverse; columns between the tensors stay as they are.
    pub(super) fn unpack_beside(
        self,
        pass: &Pass,
        mut out: Out,
        (room, tensors): (&Buffer, &[Range<usize>]),
    ) -> Result {
        for (part, rows) in self.rows_of_parts(pass).into_iter().enumerate() {
            let x = room.view().rows(rows);
            for (whole, own) in self.places_beside(part, tensors) {
                let out = out.reborrow().columns(whole);
                let x = x.columns(own);
                pass.kernels().run(Copy { out, x })?;
            }
        }
        Ok(())
    }

    /// Columns of one part's heads of several tensors.
    pub(super) fn columns_beside(self, tensors: &[Range<usize>]) -> usize {
        let widths = tensors.iter().map(|tensor| tensor.len() / self.parts());
        widths.sum()
    }

    /// The columns of a part's heads of each tensor, and where they stand among the part's own.
    pub(super) fn places_beside(
        self,
        part: usize,
        tensors: &[Range<usize>],
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let parts = self.parts();
        tensors.iter().scan(0, move |next, tensor| {
            let width = tensor.len() / parts;
            let (whole, own) = (tensor.start + part * width, *next);
            *next += width;
            Some((whole..whole + width, own..own + width))
        })
    }

    /// The rows of each part's tokens in a packed tensor.
    fn rows_of_parts(self, pass: &Pass) -> Vec<Range<usize>> {
        let tokens = pass.tokens();
        let of_part = |part| part * tokens..(part + 1) * tokens;
        (0..self.parts()).map(of_part).collect()
    }

    /// How many neighbouring parts have the same `columns` of `width`.
    fn copies(self, width: usize, columns: usize) -> usize {
        self.parts() * columns / width
    }

    /// Room for a part's tokens with the columns of each part.
    fn room(self, pass: &Pass, columns: usize) -> Result<Buffer> {
        pass.temporary("exchanged_heads", [self.parts() * pass.tokens(), columns])
    }

    /// The pieces that this rank sends, each with the rank that it goes to.
    fn sent<'a>(
        self,
        pass: &Pass,
        tensors: Vec<Vec<In<'a>>>,
        division: Division,
    ) -> Vec<(usize, In<'a>)> {
        let mut pieces = Vec::new();
        for (part, of_part) in tensors.into_iter().enumerate() {
            for (tensor, x) in of_part.into_iter().enumerate() {
                pieces.extend(
                    self.pieces(pass, division).map(|(other, row, rows)| {
                        ((tensor, part, other, row), other, x.rows(rows))
                    }),
                );
            }
        }
        self.in_order(pieces)
    }

    /// The pieces that this rank receives, each with the rank that it comes from.
    fn received<'a>(
        self,
        pass: &Pass,
        tensors: Vec<Vec<Out<'a>>>,
        division: Division,
    ) -> Vec<(usize, Out<'a>)> {
        let mut pieces = Vec::new();
        for (part, of_part) in tensors.into_iter().enumerate() {
            for (tensor, out) in of_part.into_iter().enumerate() {
                let places: Vec<_> = self.pieces(pass, division).collect();
                let rows: Vec<_> = places.iter().map(|(.., rows)| rows.clone()).collect();
                let outs = out.disjoint_rows(&rows).into_iter();
                pieces.extend(
                    outs.zip(places)
                        .map(|(out, (other, row, _))| ((tensor, other, part, row), other, out)),
                );
            }
        }
        self.in_order(pieces)
    }

    /// Puts pieces in the order of tensors, of the parts that send, of those that receive, and of sequences: both ranks of a pair
    /// list what goes between them in this order.
    fn in_order<T>(self, mut pieces: Vec<(Order, usize, T)>) -> Vec<(usize, T)> {
        pieces.sort_by_key(|(order, ..)| *order);
        let pieces = pieces.into_iter();
        let rank = |part: usize| self.first + part / self.parts_each;
        pieces.map(|(_, part, piece)| (rank(part), piece)).collect()
    }

    /// The pieces of a tensor: the part that each goes to or comes from, its sequence, and its rows.
    fn pieces(
        self,
        pass: &Pass,
        division: Division,
    ) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
        let BatchShape { rows, seq } = pass.batch().shape;
        let parts = self.parts();
        (0..parts * rows).map(move |at| {
            let (part, row) = match division {
                Division::Tokens => (at / rows, at % rows),
                Division::Heads => (at % parts, at / parts),
            };
            (part, row, at * seq..(at + 1) * seq)
        })
    }

    /// Exchanges the pieces of tensors that have so many bytes, this rank's own included. The exchange waits for the computation so
    /// far, and the computation then waits for the exchange. If it fails, data of others may still arrive: the caller leaks what it
    /// leased, which keeps the slab with all pieces.
    fn exchange<'a>(
        self,
        pass: &Pass,
        all: usize,
        list: impl FnOnce() -> Exchange<'a> + 'a,
    ) -> Result {
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

/// How a tensor is divided among parts.
#[derive(Clone, Copy)]
enum Division {
    /// It is packed: a part's tokens, with the columns of each part, one part after the other.
    Tokens,
    /// It has all tokens of each sequence, in the order of parts, with one part's columns.
    Heads,
}

/// An activation by heads, for one part's heads.
type Written = (Activation, Buffer);

/// Tensor, part that sends, part that receives, sequence.
type Order = (usize, usize, usize, usize);
