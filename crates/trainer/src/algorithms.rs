//! Finds, reads and writes the file of algorithms that `trainer tune` keeps for a GPU, and applies it to a run.

use crate::caches;
use crate::failure::{Failure, Result};
use kernels::cuda::{Algorithms, CudaDevice, Gemm, TunedProduct};
use kernels::{Target, workspace_bytes};
use settings::{HEURISTIC, Settings};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The file of algorithms for a GPU and its library, for all of a user's runs; none without a folder for caches.
pub(crate) fn kept_at(device: &CudaDevice) -> Option<PathBuf> {
    let gpu = caches::plain(&device.facts().name);
    let name = format!("{gpu}-{}.json", device.library().version);
    Some(caches::folder()?.join("algorithms").join(name))
}

/// Sets the algorithms of a device's products, once a device, and returns the run's choice for its records:
/// `heuristic`, or the file's name and a checksum of the algorithms that `products`, those of the run's steps, use.
///
/// # Errors
/// [`Failure::Algorithms`] if the settings name a file that is not one for this device. If the file is only the one
/// kept for the device, it is ignored with a warning.
pub(crate) fn use_algorithms(
    device: &CudaDevice,
    settings: &Settings,
    products: &[Gemm],
) -> Result<String> {
    let named = settings.hardware.algorithms.as_deref();
    let file = match named {
        Some(name) if name == Path::new(HEURISTIC) => None,
        Some(path) => Some(path.to_path_buf()),
        None => kept_at(device),
    };
    if device.algorithms().is_none() {
        let read = file.as_deref().map(|path| read(path, device));
        let algorithms = match (read.transpose(), &file) {
            (Ok(Some(Some(read))), _) => read,
            (Ok(Some(None)), Some(path)) if named.is_some() => return Err(not_there(path)),
            (Ok(_), _) => Algorithms::of(device),
            (Err(failure), _) if named.is_some() => return Err(failure),
            (Err(failure), _) => {
                tracing::warn!("{failure}; products take the heuristic's first choice");
                Algorithms::of(device)
            }
        };
        let used = device.use_algorithms(algorithms);
        used.map_err(|why| unfit(file.as_deref().unwrap_or(Path::new("")), why))?;
    }
    let workspace = workspace_bytes(Target::Cuda, settings.narrowest_dtype()) as usize;
    let checksum = checksum(device, products, workspace)?;
    Ok(match (checksum, file) {
        (Some(checksum), Some(file)) => {
            let name = file.file_name().unwrap_or(file.as_os_str());
            format!("{} {checksum:08x}", name.to_string_lossy())
        }
        _ => HEURISTIC.into(),
    })
}

/// A checksum of the algorithms that `products` use; none if they use none of the file.
fn checksum(device: &CudaDevice, products: &[Gemm], workspace_bytes: usize) -> Result<Option<u32>> {
    let Some(algorithms) = device
        .algorithms()
        .filter(|known| !known.products().is_empty())
    else {
        return Ok(None);
    };
    let taken = algorithms.of_products(products, workspace_bytes)?;
    let mut hash = crc32fast::Hasher::new();
    for product in &taken {
        let words = product.map_or([0; 8], TunedProduct::words);
        for word in words {
            hash.update(&word.to_le_bytes());
        }
    }
    let known = taken.iter().flatten().count();
    Ok((known > 0).then(|| hash.finalize()))
}

/// The algorithms in a file; none if the file does not exist.
///
/// # Errors
/// [`Failure::Algorithms`] if the file cannot be read, has no algorithms, or is for another GPU or library.
pub(crate) fn read(path: &Path, device: &CudaDevice) -> Result<Option<Algorithms>> {
    let text = match files::read_small_text(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unfit(path, error)),
    };
    let algorithms: Algorithms = serde_json::from_str(&text).map_err(|error| unfit(path, error))?;
    algorithms.check(device).map_err(|why| unfit(path, why))?;
    Ok(Some(algorithms))
}

fn unfit(path: &Path, why: impl ToString) -> Failure {
    Failure::Algorithms {
        path: path.into(),
        why: why.to_string(),
    }
}

fn not_there(path: &Path) -> Failure {
    unfit(path, "there is no such file")
}
