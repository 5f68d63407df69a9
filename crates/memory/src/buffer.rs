//! A leased tensor.

use crate::state::HeldLease;
use crate::view::Reach;
use crate::{Category, DType, Dims, In, Out};
use std::ops::Range;
use std::rc::Rc;

/// A leased, row-major tensor; dropping it gives the lease back.
///
/// It is written through `&mut` and read through `&`, so a tensor in an `Rc` is frozen.
pub struct Buffer {
    pointer: *mut u8,
    reach: Reach,
    dims: Dims,
    dtype: DType,
    hold: Hold,
}

/// What keeps the memory of a tensor leased.
enum Hold {
    /// The lease. Only the window that [`Windows`] lends shares it.
    Lease(Rc<HeldLease>),
    /// The tensor that these rows belong to. Nobody writes it while such rows exist.
    Frozen(Rc<Buffer>),
}

impl Buffer {
    pub(crate) fn new(held: HeldLease, pointer: *mut u8, dims: Dims, dtype: DType) -> Buffer {
        Buffer {
            pointer,
            reach: held.reach(),
            dims,
            dtype,
            hold: Hold::Lease(Rc::new(held)),
        }
    }

    /// Reads the tensor.
    pub fn view(&self) -> In<'_> {
        // SAFETY: the lease covers `dims` elements of `dtype`, and lives as long as the borrow. Either a tensor or its
        // window can be reached, never both. Rows of a frozen tensor are an exception, but nobody writes it.
        unsafe { In::new(self.pointer, self.reach, self.dtype, self.dims) }
    }

    /// Writes the tensor.
    ///
    /// # Panics
    /// If this buffer is rows of a frozen tensor.
    pub fn view_mut(&mut self) -> Out<'_> {
        assert!(
            matches!(self.hold, Hold::Lease(_)),
            "rows of a frozen tensor are only read"
        );
        // SAFETY: as in `view`, and the borrow is exclusive.
        unsafe { Out::new(self.pointer, self.reach, self.dtype, self.dims) }
    }

    /// Some rows of the first dimension as a tensor of its own, for reading. The whole tensor cannot be written any
    /// more.
    pub fn frozen_rows(self: &Rc<Buffer>, rows: Range<usize>) -> Rc<Buffer> {
        Rc::new(self.part(rows, Hold::Frozen(self.clone())))
    }

    fn part(&self, rows: Range<usize>, hold: Hold) -> Buffer {
        let rows = self.view().rows(rows);
        let dims = Dims::try_from(rows.dims());
        Buffer {
            pointer: rows.pointer().cast_mut(),
            reach: self.reach,
            dims: dims.expect("rows have as many dimensions as the whole"),
            dtype: self.dtype,
            hold,
        }
    }

    fn held(&self) -> &Rc<HeldLease> {
        match &self.hold {
            Hold::Lease(held) => held,
            Hold::Frozen(whole) => whole.held(),
        }
    }

    /// Shape, outermost dimension first.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Leased bytes, rounded to the granularity.
    pub fn bytes(&self) -> u64 {
        self.held().bytes()
    }

    /// Whether this is only a shape, without memory.
    pub fn is_shape(&self) -> bool {
        self.held().is_shape()
    }

    /// Changes the lease's category in every later report.
    pub fn recategorize(&mut self, category: Category) {
        self.held().recategorize(category);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:?} {:?})", self.dtype, self.dims)
    }
}

/// A tensor that lends one range of its rows at a time, to be read and written as a tensor of its own.
#[derive(Debug)]
pub struct Windows {
    /// Nobody reads or writes it while some of its rows are lent.
    whole: Buffer,
}

impl Windows {
    /// Makes windows of a tensor.
    ///
    /// # Panics
    /// If the tensor is rows of a frozen one, or some of its rows are lent.
    pub fn of(whole: Buffer) -> Windows {
        assert!(
            matches!(whole.hold, Hold::Lease(_)),
            "rows of a frozen tensor are only read"
        );
        let windows = Windows { whole };
        windows.assert_none_is_lent();
        windows
    }

    fn assert_none_is_lent(&self) {
        assert_eq!(
            Rc::strong_count(self.whole.held()),
            1,
            "rows of {:?} are lent already",
            self.whole
        );
    }

    /// Lends some rows of the first dimension until the returned buffer is dropped.
    ///
    /// # Panics
    /// If rows that were lent before have not been dropped.
    pub fn lend(&self, rows: Range<usize>) -> Buffer {
        self.assert_none_is_lent();
        let held = self.whole.held().clone();
        self.whole.part(rows, Hold::Lease(held))
    }

    /// Whether `rows` are the ones lent now.
    pub fn lent(&self, rows: &Buffer) -> bool {
        Rc::ptr_eq(self.whole.held(), rows.held())
    }

    /// Returns the tensor.
    ///
    /// # Panics
    /// If some of its rows are lent.
    pub fn into_whole(self) -> Buffer {
        self.assert_none_is_lent();
        self.whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    const ROWS: usize = 4;

    /// Rows of three elements each.
    fn lease(memory: &Memory) -> Buffer {
        let shape = [ROWS, 3];
        let buffer = memory.lease(Category::Temporary, "x", shape, DType::F32);
        buffer.unwrap()
    }

    fn is_refused<T>(attempt: impl FnOnce() -> T) -> bool {
        catch_unwind(AssertUnwindSafe(attempt)).is_err()
    }

    #[test]
    fn rows_are_lent_one_range_at_a_time_and_written_in_place() {
        let memory = Memory::host();
        let (windows, other) = (Windows::of(lease(&memory)), lease(&memory));
        for row in 0..ROWS {
            let mut window = windows.lend(row..row + 1);
            window.view_mut().slice_mut::<f32>().fill(row as f32);
            assert!(windows.lent(&window) && !windows.lent(&other));
            assert!(is_refused(|| windows.lend(0..1)), "another range");
        }
        let whole = windows.into_whole();
        let expected: Vec<f32> = (0..3 * ROWS).map(|at| (at / 3) as f32).collect();
        assert_eq!(whole.view().slice::<f32>(), expected);
        drop((whole, other));
        assert_eq!(memory.live_leases(), 0);
    }

    #[test]
    fn the_whole_is_there_again_when_nothing_is_lent() {
        let memory = Memory::host();
        let windows = Windows::of(lease(&memory));
        let window = windows.lend(1..3);
        assert!(is_refused(|| windows.into_whole()));
        assert!(
            !is_refused(|| Windows::of(window)),
            "it is the only one left"
        );
        assert_eq!(memory.live_leases(), 0);
    }

    #[test]
    fn rows_of_a_frozen_tensor_are_read_and_keep_it() {
        let memory = Memory::host();
        let mut whole = lease(&memory);
        whole.view_mut().slice_mut::<f32>()[3..6].fill(7.0);
        let whole = Rc::new(whole);
        let rows = whole.frozen_rows(1..2);
        assert!(Rc::into_inner(whole).is_none(), "the rows still read it");
        assert_eq!(rows.view().slice::<f32>(), [7.0; 3]);
        let mut rows = Rc::into_inner(rows).expect("nobody else has them");
        assert!(is_refused(|| {
            rows.view_mut();
        }));
        assert!(is_refused(|| Windows::of(rows)));
        assert_eq!(memory.live_leases(), 0);
    }
}
