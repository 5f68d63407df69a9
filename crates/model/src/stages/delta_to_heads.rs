//! The gated delta rule where sequences have parts: its inputs go from tokens to heads.

use super::DeltaColumns;
use super::sharing::EACH;
use crate::stage::{Io, Stage};
use crate::{Activation, DeltaConfig, Label, Pass, Result, SharingRanks};
use memory::Buffer;
use std::ops::Range;

/// Carries what the projections wrote, but for z, from tokens to heads: `[b s, c + 2 value_heads]` becomes `[b n s, (c + 2 value_heads) / n]`
/// for each of `n` parts, which have `s` tokens of each sequence.
pub(super) struct DeltaToHeads {
    pub(super) ranks: SharingRanks,
    /// The rule of the whole block.
    pub(super) delta: DeltaConfig,
}

impl DeltaToHeads {
    /// Queries, keys and values, b and a of one part's heads.
    pub(super) const IN: Activation = Activation::new("gdn_in_heads", "d_gdn_in_heads", Label::QKV);

    /// The columns of queries, keys, values, b and a.
    fn tensors(&self) -> Vec<Range<usize>> {
        let columns = DeltaColumns::of(&self.delta);
        let [keys, _, values] = self.delta.qkv_widths();
        let (b, heads) = (columns.mixed + columns.values, columns.heads);
        let starts = [
            (0, keys),
            (keys, keys),
            (2 * keys, values),
            (b, heads),
            (b + heads, heads),
        ];
        let range = |(start, width)| start..start + width;
        starts.map(range).into()
    }

    fn own_columns(&self) -> usize {
        self.ranks.columns_beside(&self.tensors())
    }
}

impl Stage for DeltaToHeads {
    fn name(&self) -> &'static str {
        "delta_to_heads"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![DeltaColumns::IN],
            writes: vec![(Self::IN, self.ranks.tokens(self.own_columns()))],
            backward_reads: Vec::new(),
        }
    }

    fn joins_parts(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let tensors = self.tensors();
        let parts = pass.each_part(|pass| {
            let x = pass.pull(DeltaColumns::IN)?;
            let Some(out) = pass.output(Self::IN)? else {
                return Ok(None);
            };
            let room = self.ranks.pack_beside(pass, x.view(), &tensors)?;
            Ok(Some((vec![room], out)))
        })?;
        let (rooms, mut made): (Vec<_>, Vec<Buffer>) = parts.into_iter().flatten().unzip();
        if made.is_empty() {
            return Ok(());
        }
        let by_head = made.iter_mut().map(|out| vec![out.view_mut()]).collect();
        self.ranks.to_heads(pass, rooms, by_head)?;
        let mut made = made.into_iter();
        pass.each_part(|pass| {
            pass.put(Self::IN, Some(made.next().expect(EACH)));
            Ok(())
        })?;
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let tensors = self.tensors();
        let by_head = pass.each_part(|pass| Ok(pass.gradient(Self::IN)))?;
        let views = by_head.iter().map(|of| vec![of.view()]).collect();
        let mut rooms = self.ranks.to_tokens(pass, views)?.into_iter();
        drop(by_head);
        pass.each_part(|pass| {
            let rooms = rooms.next().expect(EACH);
            let (mut dx, _) = pass.gradient_to_add(DeltaColumns::IN)?;
            let of = (&rooms[0], &tensors[..]);
            self.ranks.unpack_beside(pass, dx.view_mut(), of)?;
            pass.file_gradient(DeltaColumns::IN, dx);
            Ok(())
        })?;
        Ok(())
    }
}
