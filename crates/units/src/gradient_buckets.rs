//! The bundles of gradients that ranks add up, cut into buckets. One exchange sends and receives one bucket.

use memory::{Cover, Layout, Rank};
use std::cell::OnceCell;
use std::ops::Range;
use std::rc::Rc;

/// The bundles, in this order: of units, then of the vectors of each of this rank's virtual stages. Those vectors are added up apart,
/// since virtual stages are not at the same micro-batch.
pub(crate) struct GradientBuckets {
    layout: Rc<Layout>,
    rank: Rank,
    units: Vec<Cover>,
    /// Ranks divide the vectors of all stages together.
    all_vectors: Cover,
    vectors: Vec<Cover>,
    /// The most elements of a piece in a bucket.
    pub(crate) rows: usize,
    /// The buckets of each bundle, once they were asked for.
    of_bundles: Vec<OnceCell<Rc<[Bucket]>>>,
}

/// The elements of one exchange.
pub(crate) struct Bucket {
    /// Its elements of every rank's piece, by their places in that.
    rows: Range<usize>,
    /// Those of this rank's piece that are in the bundle.
    pub(crate) own: Vec<Range<usize>>,
    /// How many elements of other ranks' pieces are in the bundle.
    pub(crate) of_others: usize,
}

impl GradientBuckets {
    /// Buckets of at most `rows` elements of each rank's piece.
    pub(crate) fn new(layout: &Rc<Layout>, rank: Rank, rows: usize) -> GradientBuckets {
        let mut units = layout.bundles();
        let all_vectors = units.pop().unwrap_or_default();
        let vectors = layout.vectors_of_virtual_stages();
        let bundles = units.iter().chain([&all_vectors]);
        let largest = bundles.map(|bundle| bundle.elements() / rank.of).max();
        GradientBuckets {
            layout: layout.clone(),
            rank,
            rows: rows.min(largest.unwrap_or(0)),
            of_bundles: vec![OnceCell::new(); units.len() + vectors.len()],
            units,
            all_vectors,
            vectors,
        }
    }

    /// How many bundles there are.
    pub(crate) fn count(&self) -> usize {
        self.of_bundles.len()
    }

    /// The number of the first bundle of vectors.
    pub(crate) fn first_of_vectors(&self) -> usize {
        self.units.len()
    }

    /// Whether a bundle is a unit's.
    pub(crate) fn is_unit(&self, bundle: usize) -> bool {
        bundle < self.units.len()
    }

    /// The vectors of all stages.
    pub(crate) fn all_vectors(&self) -> &Cover {
        &self.all_vectors
    }

    /// The bundles that are divided among ranks: units', then all vectors.
    pub(crate) fn divided(&self) -> impl Iterator<Item = &Cover> {
        self.units.iter().chain([&self.all_vectors])
    }

    /// The buckets of a bundle. One that has nothing of it on any rank is left out.
    pub(crate) fn of(&self, bundle: usize) -> Rc<[Bucket]> {
        let buckets = || {
            let elements = self.whole(bundle).elements() / self.rank.of;
            let starts = (0..elements).step_by(self.rows.max(1));
            let buckets = starts.map(|start| {
                let rows = start..(start + self.rows).min(elements);
                Bucket {
                    own: self.piece(bundle, self.rank, &rows).ranges().to_vec(),
                    of_others: self.of_others(bundle, &rows),
                    rows,
                }
            });
            let has_some = |bucket: &Bucket| !bucket.own.is_empty() || bucket.of_others > 0;
            buckets.filter(has_some).collect()
        };
        self.of_bundles[bundle].get_or_init(buckets).clone()
    }

    /// The elements of a rank's piece that are in a bucket.
    pub(crate) fn of_rank(&self, bundle: usize, bucket: &Bucket, rank: Rank) -> Cover {
        self.piece(bundle, rank, &bucket.rows)
    }

    fn of_others(&self, bundle: usize, rows: &Range<usize>) -> usize {
        if self.is_unit(bundle) {
            return (self.rank.of - 1) * rows.len();
        }
        let others = Rank::all(self.rank.of).filter(|rank| *rank != self.rank);
        others
            .map(|rank| self.piece(bundle, rank, rows).elements())
            .sum()
    }

    fn whole(&self, bundle: usize) -> &Cover {
        self.units.get(bundle).unwrap_or(&self.all_vectors)
    }

    fn piece(&self, bundle: usize, rank: Rank, rows: &Range<usize>) -> Cover {
        let piece = self.layout.piece(self.whole(bundle), rank).lying_at(rows);
        match bundle.checked_sub(self.units.len()) {
            None => piece,
            Some(number) => self.vectors[number].within_all(&piece),
        }
    }
}
