//! Products of a matrix's rows with one another: every layout and mix of types, below and above bands and strips.

use crate::DTYPES;
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::layout::{COLUMNS, Layout, PLAIN, TRANSPOSED, TRANSPOSED_COLUMNS};
use crate::oracle::{constant, values};
use kernels::{KernelError, Target};
use memory::DType;

#[derive(Debug)]
pub struct Gram {
    /// n, k.
    pub sizes: [usize; 2],
    /// Types of `out` and `x`.
    pub dtypes: [DType; 2],
    pub layout: Layout,
    pub seed: u64,
}

/// A square matrix less its transpose.
fn asymmetry(x: &Host) -> Host {
    let (values, rows) = (x.values(), x.dims.as_slice()[0]);
    let entry = |at: usize| values[at] - values[at % rows * rows + at / rows];
    Host::new(x.dtype, x.dims, (0..values.len()).map(entry))
}

impl Gram {
    fn stored(&self) -> Host {
        self.layout.stored(self.dtypes[1], self.sizes, self.seed)
    }
}

impl Case for Gram {
    /// The result, and how far it is from symmetric.
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [rows, _] = self.sizes;
        let x = device.put(&self.stored());
        let mut out = device.room(self.dtypes[0], [rows, rows]);
        device.run(kernels::Gram {
            out: out.view_mut(),
            x: self.layout.view(x.view()),
        })?;
        let out = device.take(&out);
        let off = asymmetry(&out);
        Ok(vec![out, off])
    }

    fn expected(&self) -> Vec<Expected> {
        let x = constant(&self.stored()).unwrap();
        let x = self.layout.view_of_oracle(&x).unwrap();
        let gram = x.matmul(&x.t().unwrap()).unwrap();
        let gram = values(&gram).unwrap();
        let largest = gram.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let symmetric = Expected::new("gram: asymmetry", vec![0.0; gram.len()], Rule::Exact);
        let off = match self.dtypes[0] {
            // A bf16 may be two ulps off on either side.
            DType::BF16 => Rule::Chained,
            _ => Rule::Standard,
        };
        vec![
            Expected::new("gram", gram, Rule::Standard),
            symmetric
                .with_terms(largest)
                .with_exception(Target::Cuda, off),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    // An entry, part of a tile, tiles and a rest, two bands; more panels than are packed at a time, bands of more than 48 rows, and
    // a depth whose panels do not all fit into the workspace.
    let sizes = [
        [1, 5],
        [7, 300],
        [40, 24],
        [65, 1],
        [96, 64],
        [301, 77],
        [530, 40],
        [1600, 20],
        [70, 24_000],
    ];
    let layouts = [PLAIN, TRANSPOSED, COLUMNS, TRANSPOSED_COLUMNS];
    let mut dtypes = vec![[dtype; 2]];
    if dtype == DType::BF16 {
        dtypes = DTYPES.map(|out| DTYPES.map(|x| [out, x])).concat();
    }
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (seed, sizes) in (5000..).zip(sizes) {
        // Mixes take long where a GPU is emulated.
        let is_large = sizes[0] * sizes[0] * sizes[1] > 1 << 22;
        for (index, layout) in layouts.into_iter().enumerate() {
            for dtypes in dtypes.iter().copied() {
                if !is_large || index < 2 && dtypes[0] == dtypes[1] {
                    cases.push(Box::new(Gram {
                        sizes,
                        dtypes,
                        layout,
                        seed,
                    }));
                }
            }
        }
    }
    cases
}
