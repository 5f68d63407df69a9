//! Vectors side by side, as biases of layers that are computed as one.

use super::check::Checked;
use super::declaration::{Field, HasShape, Visit, size};
use super::operand::OperandRule;
use std::array;
use std::iter::Flatten;
use std::ops::Range;

/// One to three vectors whose elements belong to a matrix's columns: the first vector's to the first columns, the next one's to
/// those behind. They may lie apart, as those of queries, keys and values do where padding separates them.
pub struct ByColumns<T> {
    pub(crate) first: T,
    others: [Option<T>; 2],
}

impl<T> ByColumns<T> {
    /// Puts vectors together, in the order of their columns. Returns `None` if there is no vector.
    ///
    /// # Panics
    /// If there are more than three.
    pub fn of(vectors: impl IntoIterator<Item = T>) -> Option<ByColumns<T>> {
        let mut vectors = vectors.into_iter().fuse();
        let all = ByColumns {
            first: vectors.next()?,
            others: [vectors.next(), vectors.next()],
        };
        assert!(vectors.next().is_none(), "kernels take three vectors");
        Some(all)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        [&self.first]
            .into_iter()
            .chain(self.others.iter().flatten())
    }

    /// The columns of each; a vector that is not there has none, behind the others.
    pub(crate) fn columns(&self) -> [Range<usize>; 3]
    where
        T: HasShape,
    {
        let mut end = 0;
        [
            Some(&self.first),
            self.others[0].as_ref(),
            self.others[1].as_ref(),
        ]
        .map(|vector| {
            let first = end;
            end += size(vector, 0);
            first..end
        })
    }
}

impl<T> From<T> for ByColumns<T> {
    fn from(first: T) -> ByColumns<T> {
        let others = [None, None];
        ByColumns { first, others }
    }
}

impl<T> IntoIterator for ByColumns<T> {
    type Item = T;
    type IntoIter = Flatten<array::IntoIter<Option<T>, 3>>;

    fn into_iter(self) -> Self::IntoIter {
        let [second, third] = self.others;
        [Some(self.first), second, third].into_iter().flatten()
    }
}

impl<T: Field + HasShape> Field for ByColumns<T> {
    /// The last vector has all columns that the others leave.
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let mut left = rule.dims()[0];
        let mut vectors = self.iter().zip(["", "[1]", "[2]"]).peekable();
        while let Some((vector, part)) = vectors.next() {
            let own = size(Some(vector), 0).min(left);
            let width = if vectors.peek().is_some() { own } else { left };
            vector.visit(rule.part(part).shaped([width]), &mut *visit)?;
            left -= width;
        }
        Ok(())
    }
}
