//! Rows of a table, and their gradients added up where an id repeats.

use crate::DTYPES;
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, computing, gradient_starts};
use crate::host::Host;
use crate::oracle::{add, constant, gradients, values, variable};
use candle_core::{DType as CandleType, Result};
use kernels::{EmbeddingBackward, Init, KernelError};
use memory::DType;

#[derive(Clone, Copy, Debug)]
enum Ids {
    Random,
    /// All the same, the last one.
    Last,
}

#[derive(Debug)]
struct Embedding {
    dtype: DType,
    gradient: DType,
    tokens: usize,
    vocabulary: usize,
    hidden: usize,
    ids: Ids,
    start: Start,
}

impl Embedding {
    fn ids(&self) -> Host {
        match self.ids {
            Ids::Random => Host::random_ids(self.tokens, self.vocabulary, 1),
            Ids::Last => {
                let last = (self.vocabulary - 1) as f64;
                Host::new(DType::I32, [self.tokens], vec![last; self.tokens])
            }
        }
    }

    fn tensors(&self) -> [Host; 3] {
        let Embedding {
            dtype,
            gradient,
            tokens,
            vocabulary,
            hidden,
            ..
        } = *self;
        [
            Host::random(dtype, [vocabulary, hidden], 1.0, 2),
            Host::random(dtype, [tokens, hidden], 1.0, 3),
            Host::random(gradient, [vocabulary, hidden], 1.0, 4),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let [table, dout, earlier] = self.tensors();
        let (table, ids) = (
            variable(&table)?,
            constant(&self.ids())?.to_dtype(CandleType::U32)?,
        );
        let out = table.index_select(&ids, 0)?;
        let mut found = gradients(&out, &constant(&dout)?, &[&table])?;
        Ok([
            values(&out)?,
            add(found.remove(0), &self.start.values(&earlier)),
        ])
    }
}

impl Case for Embedding {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [table, dout, earlier] = self.tensors();
        let mut out = device.room(dout.dtype, dout.dims);
        let mut dtable = device.start(self.start, &earlier);
        let [table, dout, earlier, ids] =
            [table, dout, earlier, self.ids()].map(|host| device.put(&host));
        device.run(kernels::Embedding {
            out: out.view_mut(),
            table: table.view(),
            ids: ids.view(),
        })?;
        let init = self.start.init(&earlier);
        device.run(EmbeddingBackward {
            dtable: dtable.view_mut(),
            dout: dout.view(),
            ids: ids.view(),
            init,
        })?;
        Ok(vec![device.take(&out), device.take(&dtable)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [out, dtable] = self.oracle().unwrap();
        vec![
            Expected::new("embedding", out, Rule::Exact),
            Expected::new("embedding_backward", dtable, Rule::Standard),
        ]
    }
}

/// To the bit: of an id that repeats once, and of one that repeats as padding does.
#[test]
fn rows_of_an_id_are_added_one_after_the_other() {
    let [tokens, width] = [601, 136];
    let id = |token: usize| usize::from(token % 300 != 7);
    let ids = Host::new(
        DType::I32,
        [tokens],
        (0..tokens).map(|token| id(token) as f64),
    );
    for dtype in DTYPES {
        let dout = Host::random(dtype, [tokens, width], 1.0, 5);
        let mut sums = vec![0.0f32; 2 * width];
        for (index, value) in dout.values().into_iter().enumerate() {
            let [token, column] = [index / width, index % width];
            sums[id(token) * width + column] += value as f32;
        }
        let expected = Host::new(DType::F32, [2, width], sums.into_iter().map(f64::from));
        for device in computing(dtype) {
            let mut dtable = device.room(DType::F32, [2, width]);
            let [dout, ids] = [&dout, &ids].map(|host| device.put(host));
            let operation = EmbeddingBackward {
                dtable: dtable.view_mut(),
                dout: dout.view(),
                ids: ids.view(),
                init: Init::Overwrite,
            };
            device.run(operation).unwrap();
            assert!(device.take(&dtable) == expected, "{}", device.name);
        }
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let sizes = [
        (1, 131, 48),
        (37, 131, 48),
        (300, 131, 20),
        (150, 7, 288),
        (37, 1, 3),
        (90, 1000, 33),
        // More columns than a block of threads covers.
        (3, 7, 5000),
    ];
    for (tokens, vocabulary, hidden) in sizes {
        for ids in [Ids::Random, Ids::Last] {
            for (gradient, start) in gradient_starts() {
                cases.push(Box::new(Embedding {
                    dtype,
                    gradient,
                    tokens,
                    vocabulary,
                    hidden,
                    ids,
                    start,
                }));
            }
        }
    }
    cases
}
