//! Rows of a table by the places of tokens or by positions that are given, and their gradients summed.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, gradient_starts};
use crate::host::Host;
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
    /// Whether the tokens' positions are given, in no order.
    given: bool,
    start: Start,
}

impl Positions {
    /// Each token's row of the table.
    fn places(&self) -> Host {
        let tokens = self.sequences * self.seq;
        match self.given {
            true => Host::random_ids(tokens, self.positions, 5),
            false => {
                let places = (0..tokens).map(|token| (token % self.seq) as f64);
                Host::new(DType::I32, [tokens], places)
            }
        }
    }

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
        let given = device.put(&self.places());
        let positions = match self.given {
            true => kernels::Positions::Given(given.view()),
            false => kernels::Positions::Sequences(self.seq),
        };
        device.run(AddPositions {
            x: x.view_mut(),
            table: table.view(),
            positions,
        })?;
        device.run(AddPositionsBackward {
            dtable: dtable.view_mut(),
            dx: dx.view(),
            positions,
            init: self.start.init(&earlier),
        })?;
        Ok(vec![device.take(&x), device.take(&dtable)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [x, table, dx, earlier] = self.tensors();
        let [table, dx, mut x] = [table.values(), dx.values(), x.values()];
        let mut dtable = self.start.values(&earlier);
        for (token, place) in self.places().values().into_iter().enumerate() {
            let rows = [token, place as usize].map(|row| row * self.hidden);
            for column in 0..self.hidden {
                let [of_token, of_place] = rows.map(|row| row + column);
                x[of_token] += table[of_place];
                dtable[of_place] += dx[of_token];
            }
        }
        vec![
            Expected::new("add_positions", x, Rule::Standard),
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
    let placed = sizes.map(|sizes| (sizes, false));
    let given = [((2, 37, 64, 131), true), ((7, 150, 90, 20), true)];
    for ((sequences, seq, positions, hidden), given) in placed.into_iter().chain(given) {
        for (gradient, start) in gradient_starts() {
            cases.push(Box::new(Positions {
                dtype,
                gradient,
                sequences,
                seq,
                positions,
                hidden,
                given,
                start,
            }));
        }
    }
    cases
}
