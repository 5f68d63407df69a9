//! The chunks of an update, and where their states lie.

use crate::form::{Form, holding};
use crate::segment::{Round, Segment, rounds};
use memory::{Cover, DType, Home, Homes, Layer, Layout, PARAMETER_PADDING, Rank};
use std::ops::Range;

/// Files are read and written in multiples of this many bytes.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// A part of an update whose states, gradients and weights are on the device together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Chunk {
    /// The unit that it is a part of.
    pub(crate) unit: usize,
    /// The round that this chunk updates.
    pub(crate) round: Round,
    /// This rank's ranges of the round, padding included. Empty if this rank has no piece of the round's tensors; it
    /// still takes part in the exchange.
    pub(crate) ranges: Vec<Range<usize>>,
    /// Its states that live elsewhere than on the device.
    pub(crate) away: Option<Away>,
    /// Bytes of the gradients that come to the device with it.
    pub(crate) gradient_bytes: usize,
}

/// Where a chunk's states are, if they live elsewhere than on the device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Away {
    /// Their bytes in the store.
    pub(crate) place: Range<usize>,
    /// The chunk's number among those whose states live elsewhere.
    pub(crate) ordinal: usize,
}

impl Chunk {
    /// Bytes of its states in a slot on the device.
    pub(crate) fn state_bytes(&self) -> usize {
        self.away.as_ref().map_or(0, |away| away.place.len())
    }

    /// Bytes of all that comes to the device.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.state_bytes() + self.gradient_bytes
    }

    /// Where `range` lies among the elements of the chunk's ranges.
    pub(crate) fn rows(&self, range: &Range<usize>) -> Range<usize> {
        let (before, own) = holding(&self.ranges, range);
        let first = before.iter().map(Range::len).sum::<usize>() + range.start - own.start;
        first..first + range.len()
    }
}

/// The chunks of a run.
pub(crate) struct Chunks {
    /// In the order of updates.
    pub(crate) all: Vec<Chunk>,
    /// Every unit with trained matrices, with the number of chunks up to its end.
    pub(crate) unit_ends: Vec<(usize, usize)>,
    /// The elements of all chunks, those of other ranks included.
    pub(crate) cover: Cover,
    /// The ranges of chunks whose states live elsewhere, each with its chunk's index, in the order of the layout.
    by_start: Vec<(Range<usize>, usize)>,
    /// The number of these chunks, and below it the bytes of their states.
    pub(crate) away: usize,
    pub(crate) away_bytes: usize,
}

impl Chunks {
    /// The chunks that a rank updates, of parameters whose gradients have this type.
    pub(crate) fn new(
        layout: &Layout,
        homes: &Homes,
        (form, gradients): (&Form, DType),
        rank: Rank,
    ) -> Chunks {
        let mut chunks = Chunks {
            all: Vec::new(),
            unit_ends: Vec::new(),
            cover: Cover::default(),
            by_start: Vec::new(),
            away: 0,
            away_bytes: 0,
        };
        let all_parts = homes.weights != Home::Device || homes.gradients != Home::Device;
        let gradient_size = match homes.gradients {
            Home::Pinned => gradients.size_in_bytes(),
            _ => 0,
        };
        let alignment = match homes.states {
            Home::Disk(_) => BLOCK_BYTES,
            _ => 1,
        };
        let own = layout.own_trained(rank);
        let mut updated = Vec::new();
        for (number, is_away) in units(layout, homes) {
            let unit = &layout.units()[number];
            if is_away || all_parts {
                updated.push(unit.trained.clone());
                let most = |block: Range<usize>| {
                    let states = if is_away { form.bytes(&block) } else { 0 };
                    let bytes = states + block.len() * gradient_size;
                    homes.chunk_bytes.checked_div(bytes)
                };
                let rounds = rounds(layout, form, (&unit.trained, &own), rank).into_iter();
                for round in rounds.flat_map(|round| cut(round, most)) {
                    let ranges = round.iter().map(|one| own.within(&one.range));
                    let ranges = ranges.flat_map(|cover| cover.ranges().to_vec());
                    let ranges: Vec<Range<usize>> = ranges.collect();
                    let states = is_away.then(|| form.chunk_bytes(&ranges));
                    let states = states.map(|bytes| bytes.next_multiple_of(alignment));
                    let elements: usize = ranges.iter().map(Range::len).sum();
                    let chunk = Chunk {
                        unit: number,
                        away: chunks.place(&ranges, states),
                        round,
                        ranges,
                        gradient_bytes: elements * gradient_size,
                    };
                    chunks.all.push(chunk);
                }
            }
            chunks.unit_ends.push((number, chunks.all.len()));
        }
        chunks.cover = Cover::joined(updated);
        chunks.by_start.sort_by_key(|(range, _)| range.start);
        chunks
    }

    /// A place in the store for the states of the next chunk, which has these ranges; none if it has none there.
    fn place(&mut self, ranges: &[Range<usize>], state_bytes: Option<usize>) -> Option<Away> {
        let state_bytes = state_bytes.filter(|bytes| *bytes > 0)?;
        let number = self.all.len();
        let held = ranges.iter().map(|range| (range.clone(), number));
        self.by_start.extend(held);
        let away = Away {
            place: self.away_bytes..self.away_bytes + state_bytes,
            ordinal: self.away,
        };
        self.away_bytes += state_bytes;
        self.away += 1;
        Some(away)
    }

    /// The elements whose states live elsewhere than on the device.
    pub(crate) fn away_cover(&self) -> Cover {
        Cover::new(self.by_start.iter().map(|(range, _)| range.clone()))
    }

    /// The chunks whose states live elsewhere and that hold some of a range, each with the part that it holds.
    pub(crate) fn holding(
        &self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (&Chunk, Range<usize>)> {
        let Range { start, end } = *range;
        let first = self.by_start.partition_point(|(own, _)| own.end <= start);
        let held = self.by_start[first..].iter();
        held.take_while(move |(own, _)| own.start < end)
            .map(move |(own, number)| (&self.all[*number], own.start.max(start)..own.end.min(end)))
    }
}

/// The units with trained matrices, in the order of updates, each with whether its states live elsewhere.
fn units(layout: &Layout, homes: &Homes) -> Vec<(usize, bool)> {
    let units = layout.units().iter();
    let blocks = units.clone().filter_map(|unit| unit.part.block());
    let blocks = blocks.max().map_or(0, |last| last + 1);
    let away = (homes.fraction * blocks as f64).ceil() as usize;
    let first_away = blocks - away.min(blocks);
    let is_of_fraction = |part| match part {
        Layer::Embedding => homes.fraction >= 1.0,
        Layer::Block(block) => block >= first_away,
        _ => away > 0,
    };
    let is_away = |part| homes.states != Home::Device && is_of_fraction(part);
    let units = units.enumerate().map(|(number, unit)| {
        let is_trained = unit.trained.elements() > 0;
        is_trained.then(|| (number, is_away(unit.part)))
    });
    let mut units: Vec<(usize, bool)> = units.flatten().collect();
    if homes.gradients == Home::Released {
        units.reverse();
    }
    units
}

/// Cuts a segment into parts of about equal size. `most` gives the largest number of quantised blocks of a part; a part
/// has at least one block. None means no limit. Whole tensors, and rounds of several segments, are not cut.
fn cut(round: Round, most: impl Fn(Range<usize>) -> Option<usize>) -> Vec<Round> {
    let [segment] = &round[..] else {
        return vec![round];
    };
    let Range { start, end } = segment.range;
    let most = match most(start..start + PARAMETER_PADDING) {
        Some(blocks) if segment.whole.is_none() => blocks.max(1) * PARAMETER_PADDING,
        _ => end - start,
    };
    let parts = (end - start).div_ceil(most);
    let size = (end - start).div_ceil(parts);
    let size = size.next_multiple_of(PARAMETER_PADDING);
    let starts = (start..end).step_by(size);
    let part = |start: usize| Segment {
        range: start..(start + size).min(end),
        ..segment.clone()
    };
    starts.map(|start| vec![part(start)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hyperparameters, MasterFormat, MomentFormat, OptimizerKind, WholeTensor};
    use memory::LayoutBuilder;
    use std::slice;

    /// A part with one matrix, and a part with two, of which the first matrix is precise.
    fn layout() -> Layout {
        let mut builder = LayoutBuilder::default();
        for (block, name, rows) in [(0, "embed", 1), (1, "first", 3), (1, "second", 2)] {
            builder.add(Layer::Block(block), name, &[rows, 256]);
        }
        builder.add(Layer::Block(1), "norm", &[256]);
        builder.build_precise(|name, _| name == "embed")
    }

    fn chunks(homes: &Homes, moments: MomentFormat) -> Chunks {
        let layout = layout();
        let groups = Hyperparameters::default().groups(&layout, &[]);
        let form = Form::new(&layout, (moments, MasterFormat::None), DType::BF16, groups);
        Chunks::new(&layout, homes, (&form, DType::F32), Rank::ALONE)
    }

    fn homes(states: Home, fraction: f64) -> Homes {
        Homes {
            states,
            fraction,
            chunk_bytes: 2 * 2048,
            ..Homes::default()
        }
    }

    fn ranges(chunks: &Chunks) -> Vec<Range<usize>> {
        let all = chunks.all.iter();
        all.flat_map(|chunk| chunk.ranges.clone()).collect()
    }

    #[test]
    fn chunks_are_of_about_equal_size() {
        let all = chunks(&homes(Home::Pinned, 1.0), MomentFormat::F32);
        assert_eq!(ranges(&all), [0..256, 256..768, 768..1280, 1280..1536]);
        assert_eq!(all.unit_ends, [(0, 1), (1, 4)]);
        assert_eq!((all.away, all.away_bytes), (4, 6 * 2048));
    }

    #[test]
    fn what_comes_beside_states_makes_chunks_smaller() {
        let gradients = Homes {
            gradients: Home::Pinned,
            ..homes(Home::Pinned, 0.5)
        };
        let all = chunks(&gradients, MomentFormat::F32);
        let blocks = (0..6).map(|block| block * 256..(block + 1) * 256);
        assert!(ranges(&all).into_iter().eq(blocks));
        assert_eq!(all.all[1].slot_bytes(), 2048 + 1024);
        assert_eq!(all.all[0].away, None);
        assert_eq!(all.all[0].slot_bytes(), 1024);
        assert_eq!((all.away, all.away_cover().elements()), (5, 1280));
        assert_eq!(all.cover.elements(), 1536);
    }

    #[test]
    fn chunks_on_a_disk_begin_where_blocks_do() {
        let all = chunks(
            &homes(Home::Disk("states".into()), 1.0),
            MomentFormat::Quantised,
        );
        assert_eq!(all.all.len(), 2);
        let places = all
            .all
            .iter()
            .map(|chunk| chunk.away.as_ref().unwrap().place.clone());
        assert!(places.eq([0..4096, 4096..8192]));
    }

    #[test]
    fn chunks_that_hold_a_range_are_found_in_any_order_of_updates() {
        let backward = Homes {
            gradients: Home::Released,
            ..homes(Home::Pinned, 1.0)
        };
        let all = chunks(&backward, MomentFormat::F32);
        let held = all.holding(&(100..900));
        let held: Vec<_> = held.map(|(chunk, range)| (chunk.unit, range)).collect();
        let [first, second] = [0, 1];
        assert_eq!(
            held,
            [(first, 100..256), (second, 256..768), (second, 768..900)]
        );
        assert_eq!(all.holding(&(1536..1700)).count(), 0);
    }

    /// Ranks update whole matrices together, so every rank has the same rounds, even if it has no piece of some.
    #[test]
    fn ranks_have_chunks_of_the_same_rounds() {
        let mut builder = LayoutBuilder::default();
        for (block, name, rows) in [
            (0, "large", 40),
            (0, "wide", 30),
            (0, "small", 2),
            (1, "other", 8),
        ] {
            builder.add(Layer::Block(block), name, &[rows, 256]);
        }
        let layout = builder.for_ranks(Some(2)).build();
        let entries = layout.entries().iter().enumerate();
        let hidden: Vec<WholeTensor> = entries.map(WholeTensor::of_entry).collect();
        let muon = Hyperparameters {
            kind: OptimizerKind::Muon,
            ..Hyperparameters::default()
        };
        let formats = (MomentFormat::F32, MasterFormat::Remainder);
        let form = Form::new(&layout, formats, DType::BF16, muon.groups(&layout, &hidden));
        let homes = homes(Home::Pinned, 1.0);
        let of = |rank| Chunks::new(&layout, &homes, (&form, DType::F32), rank);
        let ranks: Vec<Chunks> = Rank::all(2).map(of).collect();
        let rounds = |chunks: &Chunks| -> Vec<Round> {
            chunks.all.iter().map(|chunk| chunk.round.clone()).collect()
        };
        let sizes: Vec<usize> = rounds(&ranks[0]).iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 1, 1]);
        assert_eq!(rounds(&ranks[0]), rounds(&ranks[1]));
        // The first rank has the large matrix and the beginning of the wide one, but nothing of the small one.
        let ranges = |rank: usize, chunk: usize| &ranks[rank].all[chunk].ranges[..];
        let [large, wide] = [0..40 * 256, 40 * 256..48 * 256];
        assert_eq!(ranges(0, 0), [large.clone(), wide.clone()]);
        assert_eq!(ranges(1, 0), slice::from_ref(&(48 * 256..70 * 256)));
        assert_eq!([ranges(0, 1).len(), ranges(1, 1).len()], [0, 1]);
        assert_eq!(ranks[0].all[1].away, None);
        let chunk = &ranks[0].all[0];
        assert_eq!(chunk.rows(&wide), wide);
        let places = form.places(&chunk.ranges, &wide);
        let first = form.chunk_bytes(slice::from_ref(&large));
        assert_eq!(places[0].1, first..first + 2 * wide.len());
        let both = large.start..wide.end;
        let found = ranks[0].holding(&both);
        assert!(found.map(|(_, range)| range).eq([large, wide]));
        let covers = Cover::joined(ranks.iter().map(Chunks::away_cover));
        let tails = Cover::new(layout.tails().iter().cloned());
        assert_eq!(covers, layout.trained().without(&tails));
    }
}
