//! Rows of a table by the places of tokens, and their gradients summed over the sequences.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, gradient_starts};
use crate::host::Host;
use crate::oracle::add;
use kernels::KernelError;
use kernels::operation::{AddPositions, AddPositionsBackward};
use memory::DType;

#[derive(Debug)]
struct Positions {
    dtype: DType,
    gradient: DType,
    sequences: usize,
    seq: usize,
    positions: usize,
    hidden: usize,
    start: Start,
}

impl Positions {
    /// `x`, the table, the gradient of the sum, and what the table's gradient is added to.
    fn tensors(&self) -> [Host; 4] {
        let rows = [self.sequences * self.seq, self.hidden];
        let table = [self.positions, self.hidden];
        [
            Host::random(self.dtype, rows, 1.0, 1),
            Host::random(self.dtype, table, 1.0, 2),
            Host::random(self.dtype, rows, 1.0, 3),
            Host::random(self.gradient, table, 1.0, 4),
        ]
    }
}

impl Case for Positions {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [x, table, dx, earlier] = self.tensors();
        let mut dtable = device.start(self.start, &earlier);
        let [mut x, table, dx, earlier] = [x, table, dx, earlier].map(|host| device.put(&host));
        device.kernels.run(AddPositions {
            x: x.view_mut(),
            table: table.view(),
            seq: self.seq,
        })?;
        device.kernels.run(AddPositionsBackward {
            dtable: dtable.view_mut(),
            dx: dx.view(),
            seq: self.seq,
            init: self.start.init(&earlier),
        })?;
        Ok(vec![device.take(&x), device.take(&dtable)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [x, table, dx, earlier] = self.tensors();
        let per_sequence = self.seq * self.hidden;
        let [table, dx] = [table.values(), dx.values()];
        let places = table[..per_sequence].iter().copied().cycle();
        let x = x.values().into_iter().zip(places).map(|(x, row)| x + row);
        let mut dtable = self.start.values(&earlier);
        for sequence in dx.chunks(per_sequence) {
            let sums = add(dtable[..per_sequence].to_vec(), sequence);
            dtable[..per_sequence].copy_from_slice(&sums);
        }
        vec![
            Expected::new("add_positions", x.collect(), Rule::Standard),
            Expected::new("add_positions_backward", dtable, Rule::Standard),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let sizes = [
        (1, 1, 1, 1),
        (1, 37, 37, 48),
        (3, 37, 64, 131),
        (7, 150, 1024, 20),
        (300, 5, 6, 288),
        // More columns than are summed at a time, and than a block of threads covers.
        (2, 3, 4, 20_000),
    ];
    for (sequences, seq, positions, hidden) in sizes {
        for (gradient, start) in gradient_starts() {
            cases.push(Box::new(Positions {
                dtype,
                gradient,
                sequences,
                seq,
                positions,
                hidden,
                start,
            }));
        }
    }
    cases
}
