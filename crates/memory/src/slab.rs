//! The deterministic allocator that places the leases of a step.

/// Places leases in one range of addresses: address-ordered best fit.
///
/// A lease goes into the smallest hole that is large enough, and of equal holes into the lowest. Only if there is none
/// does it go on top. The space above the top does not count as a hole, so placement does not depend on the capacity. A
/// plan without memory therefore gets the same addresses as the run. Adjacent free ranges merge; a hole at the top
/// lowers the top.
#[derive(Debug)]
pub struct Slab {
    /// Free ranges below the top, as (offset, bytes), ordered by offset. No two are adjacent.
    holes: Vec<(u64, u64)>,
    top: u64,
    high_water: u64,
    capacity: u64,
}

impl Slab {
    /// An empty slab of `capacity` bytes; `u64::MAX` means unlimited.
    pub fn new(capacity: u64) -> Slab {
        Slab {
            holes: Vec::with_capacity(256),
            top: 0,
            high_water: 0,
            capacity,
        }
    }

    /// Finds a place for `bytes`, a multiple of the granularity. None if neither a hole nor the top has room.
    pub fn place(&mut self, bytes: u64) -> Option<u64> {
        let fitting = self
            .holes
            .iter()
            .enumerate()
            .filter(|(_, hole)| hole.1 >= bytes);
        if let Some((index, &(offset, size))) = fitting.min_by_key(|(_, hole)| (hole.1, hole.0)) {
            if size == bytes {
                self.holes.remove(index);
            } else {
                self.holes[index] = (offset + bytes, size - bytes);
            }
            return Some(offset);
        }
        let offset = self.top;
        let top = offset
            .checked_add(bytes)
            .filter(|top| *top <= self.capacity)?;
        self.top = top;
        self.high_water = self.high_water.max(top);
        Some(offset)
    }

    /// Frees a range that was placed.
    pub fn free(&mut self, offset: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let index = self.holes.partition_point(|hole| hole.0 < offset);
        let (mut start, mut end) = (offset, offset + bytes);
        let mut merged = index..index;
        if let Some(&(next, size)) = self.holes.get(index)
            && next == end
        {
            end = next + size;
            merged.end += 1;
        }
        if let Some(&(previous, size)) = index
            .checked_sub(1)
            .and_then(|before| self.holes.get(before))
            && previous + size == start
        {
            start = previous;
            merged.start -= 1;
        }
        if end == self.top {
            self.top = start;
            self.holes.drain(merged);
        } else if merged.is_empty() {
            self.holes.insert(index, (start, end - start));
        } else {
            self.holes[merged.start] = (start, end - start);
            self.holes.drain(merged.start + 1..merged.end);
        }
    }

    /// Whether nothing is placed.
    pub fn is_empty(&self) -> bool {
        self.top == 0
    }

    /// The highest top so far: the bytes that a run must reserve.
    pub fn high_water(&self) -> u64 {
        self.high_water
    }

    /// Bytes that leases may use in all.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::Slab;
    use proptest::prelude::*;

    #[test]
    fn the_smallest_hole_that_fits_is_used_and_neighbours_merge() {
        let mut slab = Slab::new(u64::MAX);
        let offsets: Vec<u64> = [512, 256, 256, 256, 1024]
            .iter()
            .map(|bytes| slab.place(*bytes).unwrap())
            .collect();
        assert_eq!(offsets, [0, 512, 768, 1024, 1280]);
        slab.free(0, 512);
        slab.free(768, 256);
        assert_eq!(
            slab.place(256),
            Some(768),
            "the exact hole wins over the lower, larger one"
        );
        slab.free(512, 256);
        assert_eq!(slab.place(768), Some(0), "[0, 512) and [512, 768) merged");
        slab.free(1280, 1024);
        slab.free(1024, 256);
        assert_eq!(
            slab.place(2048),
            Some(1024),
            "a hole at the top lowers the top"
        );
        assert_eq!(slab.high_water(), 3072);
    }

    #[test]
    fn a_full_slab_refuses() {
        let mut slab = Slab::new(1024);
        assert_eq!(slab.place(1024), Some(0));
        assert_eq!(slab.place(256), None);
        slab.free(0, 1024);
        assert_eq!(slab.place(256), Some(0));
    }

    proptest! {
        /// Live ranges never overlap, all are freed at the end, and the capacity does not change placement.
        #[test]
        fn placements_are_disjoint_and_independent_of_capacity(
            operations in proptest::collection::vec((any::<bool>(), 0usize..8, 1u64..20), 1..200),
        ) {
            let mut unlimited = Slab::new(u64::MAX);
            let mut live: Vec<(u64, u64)> = Vec::new();
            let mut placed = Vec::new();
            for (free, index, granules) in &operations {
                if *free && !live.is_empty() {
                    let (offset, bytes) = live.remove(index % live.len());
                    unlimited.free(offset, bytes);
                } else {
                    let bytes = granules * 256;
                    let offset = unlimited.place(bytes).unwrap();
                    for (other, size) in &live {
                        prop_assert!(offset + bytes <= *other || other + size <= offset);
                    }
                    live.push((offset, bytes));
                    placed.push(offset);
                }
            }
            let mut exact = Slab::new(unlimited.high_water());
            let mut again: Vec<(u64, u64)> = Vec::new();
            let mut replaced = Vec::new();
            for (free, index, granules) in &operations {
                if *free && !again.is_empty() {
                    let (offset, bytes) = again.remove(index % again.len());
                    exact.free(offset, bytes);
                } else {
                    let offset = exact.place(granules * 256).unwrap();
                    again.push((offset, granules * 256));
                    replaced.push(offset);
                }
            }
            prop_assert_eq!(placed, replaced);
            for (offset, bytes) in again {
                exact.free(offset, bytes);
            }
            prop_assert!(exact.is_empty());
            prop_assert_eq!(exact.place(256), Some(0));
        }
    }
}
