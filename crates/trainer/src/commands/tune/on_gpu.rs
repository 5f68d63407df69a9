//! The part of `tune` that needs a GPU.

use crate::algorithms::{kept_at, read};
use crate::caches;
use crate::device::explained;
use crate::failure::{Failure, Result};
use kernels::cuda::{Algorithms, Cuda, CudaDevice, CudaDriver, TunedProduct};
use memory::Memory;
use model::Fp8Products;
use report::Table;
use serde::Serialize;
use session::library_calls;
use settings::{Resolved, Settings};
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;

/// The algorithms that were chosen for the products of a run: the output of `tune --json`.
#[derive(Debug, Serialize)]
pub(super) struct Tuned {
    /// The GPU's name.
    gpu: String,
    /// The version of cuBLASLt.
    library_version: usize,
    /// The file that keeps the choice, together with those of other runs.
    file: PathBuf,
    /// The products of the run, in the order of a step.
    products: Vec<TunedRow>,
}

/// A product with the fastest of its algorithms.
#[derive(Debug, Serialize)]
struct TunedRow {
    /// m, k, n of `[m, k] [k, n]`.
    sizes: [u64; 3],
    /// Number of products in a batch.
    batch: i32,
    /// The type of the operands.
    dtype: &'static str,
    /// The type of the result.
    out_dtype: &'static str,
    /// Whether it is a product in FP8 with `fp8.fast_accumulation`.
    fast_accumulation: bool,
    /// Algorithms that were timed.
    measured: usize,
    /// The number of the chosen one, from 0 in the order of the library's heuristic.
    taken: usize,
    /// Its time.
    microseconds: f64,
    /// The time of the heuristic's first algorithm.
    first_microseconds: f64,
}

impl From<&TunedProduct> for TunedRow {
    fn from(product: &TunedProduct) -> TunedRow {
        let (sizes, batch) = product.sizes();
        let [dtype, out_dtype] = product.types();
        let (taken, measured) = product.place();
        let [microseconds, first_microseconds] = product.microseconds();
        TunedRow {
            sizes,
            batch,
            dtype,
            out_dtype,
            fast_accumulation: product.fast_accumulation(),
            measured,
            taken,
            microseconds,
            first_microseconds,
        }
    }
}

/// Times the algorithms of a run's products, and keeps the fastest.
pub(super) fn tune(
    device: &Rc<CudaDevice>,
    resolved: &Resolved,
    settings: &Settings,
) -> Result<Tuned> {
    // The file is checked first, so that minutes of timing are not lost.
    let (file, mut kept) = match &resolved.options.out {
        Some(file) => (file.clone(), read(file, device)?),
        None => kept_by_default(device)?,
    };
    let products = timed(device, settings)?;
    let rows = products.iter().map(TunedRow::from).collect();
    let kept = kept.get_or_insert_with(|| Algorithms::of(device));
    kept.merge(products);
    caches::write(&file, kept)?;
    Ok(Tuned {
        gpu: device.facts().name.clone(),
        library_version: device.library().version,
        file,
        products: rows,
    })
}

/// Every product of a run with its fastest algorithm; those in FP8 with either setting of fast accumulation.
fn timed(device: &Rc<CudaDevice>, settings: &Settings) -> Result<Vec<TunedProduct>> {
    let mut products = library_calls(settings)?.products;
    if let Some(fp8) = &settings.fp8 {
        let other = Settings {
            fp8: Some(Fp8Products {
                fast_accumulation: !fp8.fast_accumulation,
                ..fp8.clone()
            }),
            ..settings.clone()
        };
        products.extend(library_calls(&other)?.products);
    }
    let memory = Memory::device(device.clone());
    let driver = CudaDriver::new(device)?;
    let cuda = Cuda::new(driver, &memory, settings.narrowest_dtype())?;
    let tuned = cuda.tune(&products);
    tuned.map_err(|error| explained(error, device, &memory))
}

/// The file of this GPU and library, with its contents. An unusable file is replaced, because it is only a cache.
fn kept_by_default(device: &CudaDevice) -> Result<(PathBuf, Option<Algorithms>)> {
    let Some(file) = kept_at(device) else {
        return Err(Failure::Usage(
            "there is no folder for caches to keep algorithms in: set HOME or XDG_CACHE_HOME, or name a file with --out".into(),
        ));
    };
    let kept = read(&file, device).unwrap_or_else(|failure| {
        tracing::warn!("{failure}; it is replaced");
        None
    });
    Ok((file, kept))
}

impl fmt::Display for Tuned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(
            &["product", "types"],
            &["algorithms", "taken", "us", "heuristic's us"],
        );
        for row in &self.products {
            let [m, k, n] = row.sizes;
            let batch = match row.batch {
                1 => String::new(),
                batch => format!("{batch} of "),
            };
            let sums = match row.fast_accumulation {
                true => ", fast accumulation",
                false => "",
            };
            table.row([
                format!("{batch}{m} x {k} x {n}"),
                format!("{} to {}{sums}", row.dtype, row.out_dtype),
                row.measured.to_string(),
                row.taken.to_string(),
                format!("{:.1}", row.microseconds),
                format!("{:.1}", row.first_microseconds),
            ]);
        }
        let other = self.products.iter().filter(|row| row.taken > 0).count();
        writeln!(
            f,
            "algorithms of {} products on {}, with cuBLASLt {}; {other} are others than the heuristic's first\n",
            self.products.len(),
            self.gpu,
            self.library_version
        )?;
        writeln!(f, "{table}\n{} has them", self.file.display())
    }
}
