//! The pieces in which an update goes over what is not on the device: which there are, and where their states lie.

use crate::disk::BLOCK_BYTES;
use crate::form::Form;
use crate::segment::{Segment, segments};
use memory::{Cover, DType, Home, Homes, Layer, Layout, PARAMETER_PADDING, Unit};
use std::ops::Range;

/// One piece.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Chunk {
    pub(crate) part: Layer,
    pub(crate) segment: Segment,
    /// States that are not on the device.
    pub(crate) away: Option<Away>,
    /// Bytes of the gradients that come with it.
    pub(crate) gradient_bytes: usize,
}

/// Where the states of a chunk are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Away {
    /// Bytes of the store.
    pub(crate) place: Range<usize>,
    /// Its number among the chunks whose states are not on the device.
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
}

/// The pieces of a run.
pub(crate) struct Chunks {
    /// In the order of updates.
    pub(crate) all: Vec<Chunk>,
    /// Every part, with the number of chunks up to its end.
    pub(crate) part_ends: Vec<(Layer, usize)>,
    /// Those with states that are not on the device, in the order of the layout.
    by_start: Vec<usize>,
    /// How many these are, and the bytes of their states.
    pub(crate) away: usize,
    pub(crate) away_bytes: usize,
}

impl Chunks {
    /// Those of the elements that are updated here, of parameters with gradients of this type.
    pub(crate) fn new(
        layout: &Layout,
        homes: &Homes,
        (form, gradients): (&Form, DType),
        updated: &Cover,
    ) -> Chunks {
        let mut chunks = Chunks {
            all: Vec::new(),
            part_ends: Vec::new(),
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
        for (unit, is_away) in parts(layout, homes) {
            if is_away || all_parts {
                for segment in segments(layout, form, &unit.cover.within_all(updated)) {
                    let block = segment.range.start..segment.range.start + PARAMETER_PADDING;
                    let states = if is_away { form.bytes(&block) } else { 0 };
                    let block_bytes = states + block.len() * gradient_size;
                    for segment in cut(segment, homes.chunk_bytes.checked_div(block_bytes)) {
                        let away_bytes = is_away.then(|| {
                            let bytes = form.chunk_bytes(&segment.range);
                            bytes.next_multiple_of(alignment)
                        });
                        chunks.push(unit.part, segment, away_bytes, gradient_size);
                    }
                }
            }
            chunks.part_ends.push((unit.part, chunks.all.len()));
        }
        let is_away = |index: &usize| chunks.all[*index].away.is_some();
        chunks.by_start = (0..chunks.all.len()).filter(is_away).collect();
        let start = |index: &usize| chunks.all[*index].segment.range.start;
        chunks.by_start.sort_by_key(start);
        chunks
    }

    /// Adds one, with so many bytes of the store if its states are not on the device.
    fn push(
        &mut self,
        part: Layer,
        segment: Segment,
        away_bytes: Option<usize>,
        gradient_size: usize,
    ) {
        let away = away_bytes.filter(|bytes| *bytes > 0).map(|bytes| {
            let start = self.away_bytes;
            self.away_bytes += bytes;
            self.away += 1;
            Away {
                place: start..self.away_bytes,
                ordinal: self.away - 1,
            }
        });
        self.all.push(Chunk {
            part,
            gradient_bytes: segment.range.len() * gradient_size,
            segment,
            away,
        });
    }

    /// The chunk that comes at some place, counted over all updates.
    pub(crate) fn at(&self, number: usize) -> &Chunk {
        &self.all[number % self.all.len()]
    }

    /// Its number among those with states that are not on the device, counted over all updates.
    pub(crate) fn turn(&self, number: usize) -> usize {
        let ordinal = self.at(number).away.as_ref().map_or(0, |away| away.ordinal);
        number / self.all.len() * self.away + ordinal
    }

    /// Whether it is the first of its part that has this in common with it.
    pub(crate) fn begins_run<T: PartialEq>(&self, number: usize, of: impl Fn(&Chunk) -> T) -> bool {
        let index = number % self.all.len();
        let of = |index: usize| (self.all[index].part, of(&self.all[index]));
        index == 0 || of(index - 1) != of(index)
    }

    /// The elements whose states are not on the device.
    pub(crate) fn away_cover(&self) -> Cover {
        let away = self.all.iter().filter(|chunk| chunk.away.is_some());
        Cover::new(away.map(|chunk| chunk.segment.range.clone()))
    }

    /// All elements that are updated in chunks.
    pub(crate) fn cover(&self) -> Cover {
        Cover::new(self.all.iter().map(|chunk| chunk.segment.range.clone()))
    }

    /// The chunks with states that are not on the device that hold some of a range, each with what it holds.
    pub(crate) fn pieces(
        &self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (&Chunk, Range<usize>)> {
        let ends_before = |index: &usize| self.all[*index].segment.range.end <= range.start;
        let first = self.by_start.partition_point(ends_before);
        let chunks = self.by_start[first..].iter().map(|index| &self.all[*index]);
        let end = range.end;
        let start = range.start;
        chunks
            .take_while(move |chunk| chunk.segment.range.start < end)
            .map(move |chunk| {
                let own = &chunk.segment.range;
                (chunk, own.start.max(start)..own.end.min(end))
            })
    }
}

/// The units of which something is trained, in the order in which they are updated, and whether their states are not on the
/// device.
fn parts<'a>(layout: &'a Layout, homes: &Homes) -> Vec<(&'a Unit, bool)> {
    let units = layout.units().iter();
    let blocks = units.clone().filter_map(|unit| match unit.part {
        Layer::Block(block) => Some(block + 1),
        _ => None,
    });
    let blocks = blocks.max().unwrap_or(0);
    let away = (homes.fraction * blocks as f64).ceil() as usize;
    let first_away = blocks - away.min(blocks);
    let is_of_fraction = |part| match part {
        Layer::Embedding => homes.fraction >= 1.0,
        Layer::Block(block) => block >= first_away,
        _ => away > 0,
    };
    let trained = units.filter(|unit| unit.trained.elements() > 0);
    let is_away = |part| homes.states != Home::Device && is_of_fraction(part);
    let mut parts: Vec<_> = trained.map(|unit| (unit, is_away(unit.part))).collect();
    if homes.gradients == Home::Released {
        parts.reverse();
    }
    parts
}

/// Pieces of a segment, of about equal size and of at most so many blocks, if that is given, but of one at least; of a matrix
/// that is updated as a whole, one.
fn cut(segment: Segment, blocks: Option<usize>) -> impl Iterator<Item = Segment> {
    let Segment {
        range,
        number,
        decays,
        group,
        whole,
        grains,
    } = segment;
    let most = match blocks {
        Some(blocks) if whole.is_none() => blocks.max(1) * PARAMETER_PADDING,
        _ => range.len(),
    };
    let pieces = range.len().div_ceil(most);
    let size = range.len().div_ceil(pieces);
    let size = size.next_multiple_of(PARAMETER_PADDING);
    range.clone().step_by(size).map(move |start| Segment {
        range: start..(start + size).min(range.end),
        number: number + start - range.start,
        decays,
        group,
        whole: whole.clone(),
        grains: grains.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hyperparameters, MasterFormat, MomentFormat};
    use memory::LayoutBuilder;

    /// One part of three matrices, the first of which is precise.
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
        Chunks::new(&layout, homes, (&form, DType::F32), &layout.all())
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
        all.map(|chunk| chunk.segment.range.clone()).collect()
    }

    #[test]
    fn pieces_are_of_about_equal_size() {
        let all = chunks(&homes(Home::Pinned, 1.0), MomentFormat::F32);
        assert_eq!(ranges(&all), [0..256, 256..768, 768..1280, 1280..1536]);
        assert_eq!(all.part_ends, [(Layer::Block(0), 1), (Layer::Block(1), 4)]);
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
        assert_eq!(all.cover().elements(), 1536);
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
    fn pieces_of_a_range_are_found_in_any_order_of_updates() {
        let backward = Homes {
            gradients: Home::Released,
            ..homes(Home::Pinned, 1.0)
        };
        let all = chunks(&backward, MomentFormat::F32);
        let pieces = all.pieces(&(100..900));
        let pieces: Vec<_> = pieces.map(|(chunk, piece)| (chunk.part, piece)).collect();
        let [first, second] = [Layer::Block(0), Layer::Block(1)];
        assert_eq!(
            pieces,
            [(first, 100..256), (second, 256..768), (second, 768..900)]
        );
        assert_eq!(all.pieces(&(1536..1700)).count(), 0);
    }
}
