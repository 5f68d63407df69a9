//! The pieces in which an update goes over what is not on the device: which there are, and where their states lie.

use crate::disk::BLOCK_BYTES;
use crate::form::Form;
use crate::segment::{Segment, segments};
use memory::{Cover, DType, Layer, Layout, PARAMETER_PADDING};
use std::ops::Range;
use units::GradientsHome;

/// What an update needs of the matrices that is not on the device, and in what pieces it comes.
#[derive(Clone, Debug, PartialEq)]
pub struct Offload {
    /// All parts of the model that have trained matrices ([`Layout::units`]) in the order in which they are updated, and whether the
    /// states of these are elsewhere. Those of vectors, which are small, stay on the device.
    pub parts: Vec<(Layer, bool)>,
    /// Where these are.
    pub states: StatesPlace,
    /// Where gradients of matrices live: those in host memory come with the chunks.
    pub gradients: GradientsHome,
    /// Their type.
    pub gradient_dtype: DType,
    /// Whether weights of matrices live in host memory: a part's are on the device when it is updated.
    pub streams_weights: bool,
    /// Most bytes of a chunk on the device: of all states and gradients of a range that come with it.
    pub chunk_bytes: usize,
    /// Chunks that are on the device at a time.
    pub slots: usize,
}

impl Offload {
    /// Whether parts are updated one by one even where their states are on the device.
    fn all_parts(&self) -> bool {
        self.streams_weights || self.gradients != GradientsHome::Device
    }

    /// The bytes of the gradients of a range that come with it.
    fn gradient_bytes(&self, range: &Range<usize>) -> usize {
        match self.gradients {
            GradientsHome::Host => range.len() * self.gradient_dtype.size_in_bytes(),
            GradientsHome::Device | GradientsHome::Released | GradientsHome::Reduced(_) => 0,
        }
    }
}

/// Where states are that are not on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatesPlace {
    /// In pinned host memory.
    Pinned,
    /// In a file: [`crate::Optimizer::use_file`].
    Disk,
}

impl StatesPlace {
    /// What chunks start at multiples of.
    fn alignment(self) -> usize {
        match self {
            StatesPlace::Pinned => 1,
            StatesPlace::Disk => BLOCK_BYTES,
        }
    }
}

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
    /// Those of the elements that are updated here.
    pub(crate) fn new(layout: &Layout, offload: &Offload, form: &Form, updated: &Cover) -> Chunks {
        let mut chunks = Chunks {
            all: Vec::new(),
            part_ends: Vec::new(),
            by_start: Vec::new(),
            away: 0,
            away_bytes: 0,
        };
        for (part, is_away) in &offload.parts {
            if *is_away || offload.all_parts() {
                let unit = layout.unit_of_part(*part).map(|unit| &layout.units()[unit]);
                let cover = unit.map_or(Cover::new([]), |unit| unit.cover.within_all(updated));
                for segment in segments(layout, form, &cover) {
                    for segment in cut(segment, offload, form, *is_away) {
                        chunks.push(*part, segment, *is_away, offload, form);
                    }
                }
            }
            chunks.part_ends.push((*part, chunks.all.len()));
        }
        let is_away = |index: &usize| chunks.all[*index].away.is_some();
        chunks.by_start = (0..chunks.all.len()).filter(is_away).collect();
        let start = |index: &usize| chunks.all[*index].segment.range.start;
        chunks.by_start.sort_by_key(start);
        chunks
    }

    fn push(
        &mut self,
        part: Layer,
        segment: Segment,
        is_away: bool,
        offload: &Offload,
        form: &Form,
    ) {
        let bytes = form.chunk_bytes(&segment.range);
        let away = (is_away && bytes > 0).then(|| {
            let start = self.away_bytes;
            self.away_bytes += bytes.next_multiple_of(offload.states.alignment());
            self.away += 1;
            Away {
                place: start..self.away_bytes,
                ordinal: self.away - 1,
            }
        });
        let gradient_bytes = offload.gradient_bytes(&segment.range);
        self.all.push(Chunk {
            part,
            segment,
            away,
            gradient_bytes,
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

/// Pieces of a segment, of about equal size and of at most as many elements as the offload allows; of a matrix that is updated as
/// a whole, one.
fn cut(
    segment: Segment,
    offload: &Offload,
    form: &Form,
    is_away: bool,
) -> impl Iterator<Item = Segment> + use<> {
    let Segment {
        range,
        number,
        decays,
        group,
        matrix,
        grains,
    } = segment;
    let block = range.start..range.start + PARAMETER_PADDING;
    let states = match is_away {
        true => form.bytes(&block),
        false => 0,
    };
    let block_bytes = states + offload.gradient_bytes(&block);
    let most = match offload.chunk_bytes.checked_div(block_bytes) {
        Some(blocks) if matrix.is_none() => blocks.max(1) * PARAMETER_PADDING,
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
        matrix: matrix.clone(),
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

    fn chunks(offload: &Offload, moments: MomentFormat) -> Chunks {
        let layout = layout();
        let groups = Hyperparameters::default().groups(&layout, &[]);
        let form = Form::new(&layout, (moments, MasterFormat::None), DType::BF16, groups);
        Chunks::new(&layout, offload, &form, &layout.all())
    }

    fn offload(states: StatesPlace, first: bool) -> Offload {
        Offload {
            parts: vec![(Layer::Block(0), first), (Layer::Block(1), true)],
            states,
            gradients: GradientsHome::Device,
            gradient_dtype: DType::F32,
            streams_weights: false,
            chunk_bytes: 2 * 2048,
            slots: 2,
        }
    }

    fn ranges(chunks: &Chunks) -> Vec<Range<usize>> {
        let all = chunks.all.iter();
        all.map(|chunk| chunk.segment.range.clone()).collect()
    }

    #[test]
    fn pieces_are_of_about_equal_size() {
        let all = chunks(&offload(StatesPlace::Pinned, true), MomentFormat::F32);
        assert_eq!(ranges(&all), [0..256, 256..768, 768..1280, 1280..1536]);
        assert_eq!(all.part_ends, [(Layer::Block(0), 1), (Layer::Block(1), 4)]);
        assert_eq!((all.away, all.away_bytes), (4, 6 * 2048));
    }

    #[test]
    fn what_comes_beside_states_makes_chunks_smaller() {
        let gradients = Offload {
            gradients: GradientsHome::Host,
            ..offload(StatesPlace::Pinned, false)
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
        let all = chunks(&offload(StatesPlace::Disk, true), MomentFormat::Quantised);
        assert_eq!(all.all.len(), 2);
        let places = all
            .all
            .iter()
            .map(|chunk| chunk.away.as_ref().unwrap().place.clone());
        assert!(places.eq([0..4096, 4096..8192]));
    }

    #[test]
    fn pieces_of_a_range_are_found_in_any_order_of_updates() {
        let mut backward = offload(StatesPlace::Pinned, true);
        backward.parts.reverse();
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
