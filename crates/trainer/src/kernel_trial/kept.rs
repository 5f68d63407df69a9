//! The file of verdicts: one for each GPU, driver and build, with a verdict for each widths.

use super::{ExpertWidths, Verdict};
use crate::caches;
use kernels::cuda::{DeviceFacts, images};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The sources of the kernels that are compared.
const SOURCES: &str = "grouped_matmul";

/// Says which driver the kernel has loaded, to the patch; CUDA's own number tells fewer apart.
const DRIVER: &str = "/proc/driver/nvidia/version";

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Verdicts {
    /// By [`ExpertWidths`] in words.
    experts: BTreeMap<String, Verdict>,
}

/// Where the verdicts for a GPU are kept; none without a folder for caches.
pub(crate) fn path(gpu: &DeviceFacts) -> Option<PathBuf> {
    let mut hash = crc32fast::Hasher::new();
    let driver = std::fs::read(DRIVER).unwrap_or_default();
    hash.update(&driver);
    hash.update(env!("TRAINER_COMMIT").as_bytes());
    images(SOURCES).for_each(|image| hash.update(image));
    let name = format!(
        "{}-{}-{}-{:08x}.json",
        caches::plain(&gpu.name),
        gpu.driver_version,
        env!("CARGO_PKG_VERSION"),
        hash.finalize()
    );
    Some(caches::folder()?.join("kernels").join(name))
}

/// The verdicts that are kept. A file that cannot be read has none: it is only a cache.
fn read(gpu: &DeviceFacts) -> Option<Verdicts> {
    let text = files::read_small_text(&path(gpu)?).ok()?;
    serde_json::from_str(&text).ok()
}

pub(super) fn find(gpu: &DeviceFacts, widths: ExpertWidths) -> Option<Verdict> {
    read(gpu)?.experts.remove(&widths.to_string())
}

/// Keeps a verdict. That this fails is said, and no more: the next run tries again.
pub(super) fn keep(gpu: &DeviceFacts, widths: ExpertWidths, verdict: &Verdict) {
    let mut kept = read(gpu).unwrap_or_default();
    kept.experts.insert(widths.to_string(), verdict.clone());
    if let Some(Err(failure)) = path(gpu).map(|path| caches::write(&path, &kept)) {
        tracing::warn!("{failure}: the verdict on kernels of experts is not kept");
    }
}
