//! Sums of rows, one row after the other: to the bit.

use crate::DTYPES;
use crate::case::{self, Case};
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, Tensor, computing};
use crate::host::Host;
use half::bf16;
use kernels::KernelError;
use memory::DType;

#[derive(Debug)]
struct SumInOrder {
    dtype: DType,
    rows: usize,
    width: usize,
    start: Start,
}

/// What stands in the first columns, a number for each row in turn: signs of zero, what overflows on the way and comes back,
/// infinities that cancel, and no number at all.
const SPECIAL: [[f32; 3]; 6] = [
    [-0.0, -0.0, -0.0],
    [f32::MAX, f32::MAX, f32::MIN],
    [f32::INFINITY, 1.0, f32::NEG_INFINITY],
    [f32::NEG_INFINITY, -1.0, 0.0],
    [1.0, f32::NAN, 1.0],
    [1e-40, -1e-40, 1e-40],
];

impl SumInOrder {
    /// The rows, and what they are added to.
    fn tensors(&self) -> [Host; 2] {
        let SumInOrder { rows, width, .. } = *self;
        let random = Host::random(DType::F32, [rows * width], 1.0, 1).values();
        let special = |index: usize| {
            let (row, column) = (index / width, index % width);
            let of_rows = SPECIAL.get(column).filter(|_| width > 1)?;
            Some(f64::from(of_rows[row % of_rows.len()]))
        };
        let x = random.into_iter().enumerate();
        let x = x.map(|(index, value)| special(index).unwrap_or(value));
        [
            Host::new(self.dtype, [rows, width], x),
            Host::random(self.dtype, [width], 1.0, 2),
        ]
    }

    /// The rows in this order, added by the rule.
    fn summed(&self, order: impl Iterator<Item = usize>) -> Vec<f64> {
        let [x, earlier] = self.tensors();
        let (x, earlier) = (x.values(), earlier.values());
        let rounded = |value: f32| match self.dtype {
            DType::BF16 => bf16::from_f32(value).to_f32(),
            _ => value,
        };
        let rows: Vec<&[f64]> = order
            .map(|row| &x[row * self.width..][..self.width])
            .collect();
        let start = (self.start == Start::Accumulate).then_some(earlier.as_slice());
        let sum = |column: usize| {
            let terms = start.into_iter().chain(rows.iter().copied());
            let sum = terms.map(|row| row[column] as f32);
            sum.reduce(|sum, term| rounded(sum + term)).unwrap()
        };
        (0..self.width)
            .map(|column| f64::from(sum(column)))
            .collect()
    }

    /// The sum, asked for in as many calls as there are cuts and one more.
    fn cut(&self, device: &Device, cuts: &[usize]) -> Result<Host, KernelError> {
        let [x, earlier] = self.tensors();
        let (x, mut out) = (device.put(&x), device.start(self.start, &earlier));
        let starts = std::iter::once(&0).chain(cuts);
        for (first, end) in starts.zip(cuts.iter().chain([&self.rows])) {
            let start = match first {
                0 => self.start,
                _ => Start::Accumulate,
            };
            self.add(device, &mut out, &x, *first..*end, start)?;
        }
        Ok(device.take(&out))
    }

    fn add(
        &self,
        device: &Device,
        out: &mut Tensor,
        x: &Tensor,
        rows: std::ops::Range<usize>,
        start: Start,
    ) -> Result<(), KernelError> {
        device.run(kernels::SumInOrder {
            out: out.view_mut(),
            x: x.view().rows(rows),
            init: start.init(x),
        })
    }
}

impl Case for SumInOrder {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        Ok(vec![self.cut(device, &[])?])
    }

    fn expected(&self) -> Vec<Expected> {
        let sum = self.summed(0..self.rows);
        vec![Expected::new("sum_in_order", sum, Rule::Exact)]
    }
}

/// One row to nine, and more than are loaded at a time; one element, less than a pack, whole packs, more than a block and
/// than a task.
fn all(dtype: DType) -> Vec<SumInOrder> {
    let mut cases = Vec::new();
    for rows in (1..=9).chain([17]) {
        for width in [1, 7, 64, 131, 4096, 16_390, 33_000] {
            for start in [Start::Overwrite, Start::Accumulate] {
                cases.push(SumInOrder {
                    dtype,
                    rows,
                    width,
                    start,
                });
            }
        }
    }
    cases
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let cases = all(dtype).into_iter();
    cases
        .map(|case| -> Box<dyn Case> { Box::new(case) })
        .collect()
}

/// Values to the sign of zero, but for which NaN.
fn bits(values: &[f64]) -> Vec<u64> {
    let bits = values.iter().map(|value| match value.is_nan() {
        true => f64::NAN.to_bits(),
        false => value.to_bits(),
    });
    bits.collect()
}

/// However rows come, one by one or several at a time, and wherever they are added: the same bits, which are not those of
/// another order.
#[test]
fn sums_have_the_same_bits_however_they_are_cut() {
    for dtype in DTYPES {
        let devices = computing(dtype);
        assert!(devices.len() > 1, "two implementations or more");
        for case in all(dtype) {
            let expected = bits(&case.summed(0..case.rows));
            if case.rows > 3 && case.width > 100 {
                let backwards = bits(&case.summed((0..case.rows).rev()));
                assert!(backwards != expected, "{case:?}: the order shows");
            }
            let every: Vec<usize> = (1..case.rows).collect();
            let once = (1..case.rows).map(|cut| vec![cut]);
            for cuts in once.chain([vec![], every.clone()]) {
                for device in &devices {
                    let got = bits(&case.cut(device, &cuts).unwrap().values());
                    assert!(
                        got == expected,
                        "{case:?} cut at {cuts:?} on {}",
                        device.name
                    );
                }
            }
        }
    }
}

/// Columns too may be added in whatever pieces: a bucket ends anywhere.
#[test]
fn sums_have_the_same_bits_in_pieces() {
    let case = |width| SumInOrder {
        dtype: DType::F32,
        rows: 5,
        width,
        start: Start::Overwrite,
    };
    let whole = case(1031);
    let [x, _] = whole.tensors();
    let expected = whole.summed(0..5);
    for device in computing(DType::F32) {
        for cut in [1, 8, 500, 1024] {
            let mut sums = Vec::new();
            for columns in [0..cut, cut..1031] {
                let values = x.values();
                let rows = values
                    .chunks(1031)
                    .flat_map(|row| row[columns.clone()].to_vec());
                let rows = device.put(&Host::new(DType::F32, [5, columns.len()], rows));
                let mut out = device.room(DType::F32, [columns.len()]);
                case(columns.len())
                    .add(&device, &mut out, &rows, 0..5, Start::Overwrite)
                    .unwrap();
                sums.extend(device.take(&out).values());
            }
            assert!(bits(&sums) == bits(&expected), "{cut} on {}", device.name);
        }
    }
}

#[test]
fn cases_are_accepted_in_the_queue_of_updates() {
    for device in computing(DType::F32) {
        let case = SumInOrder {
            dtype: DType::F32,
            rows: 3,
            width: 131,
            start: Start::Overwrite,
        };
        let [x, _] = case.tensors();
        let (x, mut out) = (device.put(&x), device.room(DType::F32, [131]));
        let sum = kernels::SumInOrder {
            out: out.view_mut(),
            x: x.view(),
            init: kernels::Init::Overwrite,
        };
        // SAFETY: both tensors live until the event is over.
        unsafe { device.kernels.start(kernels::Queue::Update, sum) }.unwrap();
        let summed = device.kernels.record(kernels::Queue::Update).unwrap();
        device.kernels.finish(summed).unwrap();
        assert_eq!(vec![device.take(&out)], case::run(&case, &device));
    }
}
