//! Which states a run keeps of its parameters, and how those of a range lie one after the other.

use crate::moment::Moment;
use crate::rule::ParameterGroup;
use crate::{MasterFormat, MomentFormat};
use kernels::quantise::BLOCK;
use kernels::{MasterOperand, MomentOperand};
use memory::{Cover, DType, GRANULARITY_BYTES, Layout, Out, Types};
use std::ops::Range;

/// One state: its name, its type, and how many parameters share one of its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StateTensor {
    pub(crate) kind: &'static str,
    pub(crate) dtype: DType,
    sharing: usize,
}

impl StateTensor {
    const fn new(kind: &'static str, dtype: DType, sharing: usize) -> StateTensor {
        StateTensor {
            kind,
            dtype,
            sharing,
        }
    }

    /// The number of elements for `parameters` parameters.
    pub(crate) fn elements(&self, parameters: usize) -> usize {
        parameters.div_ceil(self.sharing)
    }

    /// The elements of a range of parameters that begins with a block.
    pub(crate) fn rows(&self, parameters: &Range<usize>) -> Range<usize> {
        parameters.start / self.sharing..self.elements(parameters.end)
    }

    /// The bytes for `parameters` parameters.
    pub(crate) fn bytes(&self, parameters: usize) -> usize {
        self.elements(parameters) * self.dtype.size_in_bytes()
    }

    /// The same, padded so that the next tensor is aligned: kernels need 16 bytes, and leases of device memory have
    /// that alignment too.
    fn placed_bytes(&self, parameters: usize) -> usize {
        let granule = GRANULARITY_BYTES as usize;
        self.bytes(parameters).next_multiple_of(granule)
    }
}

/// The exact f32 weights of bf16 parameters.
pub(crate) const MASTER: StateTensor = StateTensor::new("master", DType::F32, 1);
/// The bits of the exact weights that bf16 weights do not have.
pub(crate) const REMAINDER: StateTensor = StateTensor::new("remainder", DType::I16, 1);
/// Those of them that a master of 24 bits has.
pub(crate) const REMAINDER_BYTE: StateTensor = StateTensor::new("remainder", DType::U8, 1);

/// The states of a run.
pub(crate) struct Form {
    /// The groups of parameters, one per rule.
    pub(crate) groups: Vec<ParameterGroup>,
    /// The types that parameters are stored in.
    pub(crate) types: Types,
    /// The master weights of bf16 parameters, if they have any.
    master: Option<StateTensor>,
    /// The type of moments that are not quantised.
    plain: DType,
    /// The elements of the layout whose moments are quantised. One call updates a range that is either inside or
    /// outside of it.
    pub(crate) quantised: Range<usize>,
}

/// Views of all states of one range.
pub(crate) struct StateViews<'a> {
    pub(crate) master: MasterOperand<'a>,
    /// In the order of the rule's moments.
    pub(crate) moments: Vec<MomentOperand<'a>>,
}

impl Form {
    pub(crate) fn new(
        layout: &Layout,
        (moments, master): (MomentFormat, MasterFormat),
        weights: DType,
        groups: Vec<ParameterGroup>,
    ) -> Form {
        Form {
            groups,
            types: layout.types(weights),
            master: match master {
                MasterFormat::None => None,
                MasterFormat::F32 => Some(MASTER),
                MasterFormat::Remainder => Some(REMAINDER),
                MasterFormat::RemainderByte => Some(REMAINDER_BYTE),
            },
            plain: match moments {
                MomentFormat::Bf16 => DType::BF16,
                MomentFormat::F32 | MomentFormat::Quantised => DType::F32,
            },
            quantised: match moments {
                MomentFormat::Quantised => layout.quantisable(),
                MomentFormat::F32 | MomentFormat::Bf16 => 0..0,
            },
        }
    }

    /// The moments of a range of one group.
    pub(crate) fn moments(&self, range: &Range<usize>) -> &'static [Moment] {
        let mut groups = self.groups.iter();
        let group = groups.find(|group| group.cover.rows(range).is_some());
        group.map_or(&[], |group| group.rule.moments())
    }

    fn is_quantised(&self, range: &Range<usize>) -> bool {
        self.quantised.start <= range.start && range.end <= self.quantised.end
    }

    /// The master state of a range whose parameters have one type. None for f32 parameters, which are exact.
    pub(crate) fn master(&self, range: &Range<usize>) -> Option<StateTensor> {
        let is_exact = self.types.of(range.start) == DType::F32;
        self.master.filter(|_| !is_exact)
    }

    /// Whether the exact weights of a range are rounded to 24 bits, since its masters have no more. Frozen parameters have
    /// no master.
    pub(crate) fn rounds_masters(&self, range: &Range<usize>) -> bool {
        let mut groups = self.groups.iter();
        self.master(range) == Some(REMAINDER_BYTE)
            && groups.any(|group| group.cover.within(range).elements() > 0)
    }

    /// The master state of a cover's parameters, and the elements that have one: those not stored in f32.
    pub(crate) fn masters(&self, cover: &Cover) -> Option<(StateTensor, Cover)> {
        let runs = self.types.runs(cover).into_iter();
        let inexact = runs.filter(|(_, dtype)| *dtype != DType::F32);
        Some((self.master?, Cover::new(inexact.map(|(run, _)| run))))
    }

    /// The states of one moment, in order.
    pub(crate) fn moment(&self, moment: &Moment, is_quantised: bool) -> Vec<StateTensor> {
        match is_quantised {
            true => vec![
                StateTensor::new(moment.codes, DType::U8, 1),
                StateTensor::new(moment.absmax, DType::F32, BLOCK),
            ],
            false => vec![StateTensor::new(moment.plain, self.plain, 1)],
        }
    }

    /// The states, in order, of a range of one group that is quantised wholly or not at all.
    pub(crate) fn tensors(&self, range: &Range<usize>) -> Vec<StateTensor> {
        let is_quantised = self.is_quantised(range);
        let moments = self.moments(range).iter();
        let moments = moments.flat_map(|moment| self.moment(moment, is_quantised));
        self.master(range).into_iter().chain(moments).collect()
    }

    /// Views of these states for a range, in order.
    pub(crate) fn views<'a>(
        &self,
        range: &Range<usize>,
        tensors: impl IntoIterator<Item = Out<'a>>,
    ) -> StateViews<'a> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("there is a view of every state");
        let master = match self.master(range) {
            None => MasterOperand::Parameters,
            Some(MASTER) => MasterOperand::F32(next()),
            Some(REMAINDER) => MasterOperand::Remainder(next()),
            Some(_) => MasterOperand::RemainderByte(next()),
        };
        let moment = |_: &Moment| match self.is_quantised(range) {
            true => MomentOperand::Quantised {
                codes: next(),
                absmax: next(),
            },
            false => MomentOperand::Plain(next()),
        };
        StateViews {
            master,
            moments: self.moments(range).iter().map(moment).collect(),
        }
    }

    /// The bytes of all states of a range.
    pub(crate) fn bytes(&self, range: &Range<usize>) -> usize {
        let tensors = self.tensors(range).into_iter();
        tensors.map(|tensor| tensor.bytes(range.len())).sum()
    }

    /// The bytes of a chunk: all states of its ranges, one after the other.
    pub(crate) fn chunk_bytes(&self, chunk: &[Range<usize>]) -> usize {
        let tensors = chunk.iter().flat_map(|range| {
            let tensors = self.tensors(range).into_iter();
            tensors.map(|tensor| tensor.placed_bytes(range.len()))
        });
        tensors.sum()
    }

    /// Where the states of `parameters` lie in a chunk's bytes. The parameters are within one of the chunk's ranges,
    /// and begin with a block.
    pub(crate) fn places(
        &self,
        chunk: &[Range<usize>],
        range: &Range<usize>,
    ) -> Vec<(StateTensor, Range<usize>)> {
        let (before, own) = holding(chunk, range);
        let parameters = range.start - own.start..range.end - own.start;
        let mut start = self.chunk_bytes(before);
        let place = |tensor: StateTensor| {
            let first = start;
            start += tensor.placed_bytes(own.len());
            let (rows, size) = (tensor.rows(&parameters), tensor.dtype.size_in_bytes());
            (tensor, first + rows.start * size..first + rows.end * size)
        };
        self.tensors(own).into_iter().map(place).collect()
    }

    /// Views of the states of `parameters` in the chunk's bytes (u8).
    pub(crate) fn carve<'a>(
        &self,
        chunk: &[Range<usize>],
        range: &Range<usize>,
        bytes: Out<'a>,
    ) -> StateViews<'a> {
        let places = self.places(chunk, range).into_iter();
        let (tensors, places): (Vec<_>, Vec<_>) = places.unzip();
        let views = tensors.into_iter().zip(bytes.disjoint_rows(&places));
        self.views(range, views.map(|(tensor, view)| view.cast(tensor.dtype)))
    }
}

/// The range of a chunk that contains another range, and the ranges before it.
pub(crate) fn holding<'a>(
    chunk: &'a [Range<usize>],
    range: &Range<usize>,
) -> (&'a [Range<usize>], &'a Range<usize>) {
    let holds = |own: &Range<usize>| own.start <= range.start && range.end <= own.end;
    let number = chunk.iter().position(holds);
    let number = number.expect("a chunk has what is updated with it");
    (&chunk[..number], &chunk[number])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hyperparameters;
    use memory::{Layer, LayoutBuilder};
    use std::slice;

    fn form(formats: (MomentFormat, MasterFormat)) -> Form {
        let mut builder = LayoutBuilder::default();
        builder.add(Layer::Whole, "large", &[100, 100]);
        builder.add(Layer::Whole, "small", &[10, 10]);
        let layout = builder.build_precise(|name, _| name == "small");
        let groups = Hyperparameters::default().groups(&layout, &[]);
        Form::new(&layout, formats, DType::BF16, groups)
    }

    #[test]
    fn states_of_a_chunk_lie_one_behind_the_other() {
        let form = form((MomentFormat::Quantised, MasterFormat::Remainder));
        let chunk = slice::from_ref(&(256..256 + 700));
        assert_eq!(form.quantised, 256..10_496);
        let places = form.places(chunk, &(512..956));
        let named = places
            .iter()
            .map(|(tensor, place)| (tensor.kind, place.clone()));
        let expected = [
            ("remainder", 512..1400),
            ("first_moment.codes", 1536 + 256..1536 + 700),
            ("first_moment.absmax", 2304 + 4..2304 + 12),
            ("second_moment.codes", 2560 + 256..2560 + 700),
            ("second_moment.absmax", 3328 + 4..3328 + 12),
        ];
        assert!(named.eq(expected), "{places:?}");
        assert_eq!(form.chunk_bytes(chunk), 3584);
        let mut bytes: Vec<u8> = vec![0; 3584];
        bytes[1536 + 256] = 7;
        let mut views = form.carve(chunk, &(512..956), Out::of_slice(&mut bytes, [3584]));
        let MomentOperand::Quantised { codes, absmax } = views.moments.swap_remove(0) else {
            panic!("the range is quantised")
        };
        assert_eq!((codes.elements(), absmax.elements()), (444, 2));
        assert_eq!(codes.slice_mut::<u8>()[0], 7);
    }

    #[test]
    fn a_form_has_nothing_that_is_not_asked_for() {
        let kinds = |formats, range: Range<usize>| -> Vec<&str> {
            let tensors = form(formats).tensors(&range).into_iter();
            tensors.map(|tensor| tensor.kind).collect()
        };
        let plain = ["first_moment", "second_moment"];
        assert_eq!(
            kinds((MomentFormat::Bf16, MasterFormat::None), 0..512),
            plain
        );
        assert_eq!(
            kinds((MomentFormat::Quantised, MasterFormat::None), 0..256),
            plain
        );
        let expected = ["master", "first_moment", "second_moment"];
        assert_eq!(
            kinds((MomentFormat::F32, MasterFormat::F32), 0..512),
            expected
        );
    }
}
