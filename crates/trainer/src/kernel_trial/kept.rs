//! The file of verdicts: one for each GPU, driver and build, with a verdict for each widths.

use super::{ExpertWidths, Verdict};
use crate::caches;
use kernels::cuda::{DeviceFacts, images};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

/// The sources of the kernels that are compared.
const SOURCES: &str = "grouped_matmul";

/// Tells builds apart by what they are made of.
fn build(hash: &mut crc32fast::Hasher) {
    images(SOURCES).for_each(|image| hash.update(image));
    hash.update(env!("TRAINER_COMMIT").as_bytes());
    // The launch code is another wherever the program is: that changes its length or its time.
    let program = std::env::current_exe().and_then(std::fs::metadata);
    let written = program
        .as_ref()
        .ok()
        .and_then(|program| program.modified().ok());
    let time = written.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let length = program.map_or(0, |program| program.len());
    hash.update(&length.to_le_bytes());
    hash.update(&time.map_or(0, |time| time.as_nanos()).to_le_bytes());
}

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
    build(&mut hash);
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

/// What is kept against kernels, with the widths that they were tried at.
pub(crate) fn all_against(gpu: &DeviceFacts) -> Vec<String> {
    let kept = read(gpu).unwrap_or_default().experts.into_iter();
    kept.filter_map(|(widths, verdict)| Some(format!("{widths}: they {}", verdict.against()?)))
        .collect()
}

/// Keeps a verdict, unless one against the kernels is kept, which another rank's GPU of the same name may have found. That this fails is
/// said, and no more: the next run tries again.
pub(super) fn keep(gpu: &DeviceFacts, widths: ExpertWidths, verdict: &Verdict) {
    let mut kept = read(gpu).unwrap_or_default();
    let kept_verdict = kept
        .experts
        .entry(widths.to_string())
        .or_insert(Verdict::Passed);
    if *kept_verdict == Verdict::Passed {
        *kept_verdict = verdict.clone();
    }
    if let Some(Err(failure)) = path(gpu).map(|path| caches::write(&path, &kept)) {
        tracing::warn!("{failure}: the verdict on kernels of experts is not kept");
    }
}
