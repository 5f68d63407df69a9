//! The file of verdicts: one for each GPU, driver and build, with a verdict for each widths.

use super::{Verdict, Widths};
use crate::caches;
use kernels::cuda::{DeviceFacts, images};
use settings::{KernelFamily, PerFamily};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

/// What names of the sources of kernels that are compared begin with.
const SOURCES: [&str; 2] = ["flash_", "grouped_matmul"];

/// Tells builds apart by what they are made of.
fn build(hash: &mut crc32fast::Hasher) {
    let images = SOURCES.into_iter().flat_map(images);
    images.for_each(|image| hash.update(image));
    hash.update(env!("TRAINER_COMMIT").as_bytes());
    if env!("TRAINER_COMMIT").ends_with(|last: char| last.is_ascii_hexdigit()) {
        // A commit as it is has one launch code, in whatever program.
        return;
    }
    // Else the launch code is another wherever the program is: that changes its length or its time.
    let program = crate::program::image().and_then(std::fs::metadata);
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

/// By [`Widths`] in words.
type Verdicts = PerFamily<BTreeMap<String, Verdict>>;

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

pub(super) fn find(gpu: &DeviceFacts, widths: Widths) -> Option<Verdict> {
    read(gpu)?[widths.family()].remove(&widths.to_string())
}

/// What is kept against kernels of a family, with the widths that they were tried at.
pub(crate) fn all_against(gpu: &DeviceFacts, family: KernelFamily) -> Vec<String> {
    let kept = read(gpu).unwrap_or_default();
    let against = kept[family].iter().filter_map(|(widths, verdict)| {
        let reason = verdict.against()?;
        Some(format!("{widths}: they {reason}"))
    });
    against.collect()
}

/// Keeps a verdict, unless one against the kernels is kept, which another rank's GPU of the same name may have found. That this fails is
/// said, and no more: the next run tries again.
pub(super) fn keep(gpu: &DeviceFacts, widths: Widths, verdict: &Verdict) {
    let mut kept = read(gpu).unwrap_or_default();
    let family = widths.family();
    let of_widths = kept[family].entry(widths.to_string());
    let kept_verdict = of_widths.or_insert(Verdict::Passed);
    if *kept_verdict == Verdict::Passed {
        *kept_verdict = verdict.clone();
    }
    if let Some(Err(failure)) = path(gpu).map(|path| caches::write(&path, &kept)) {
        let name = family.name();
        tracing::warn!("{failure}: the verdict on kernels of {name} is not kept");
    }
}
