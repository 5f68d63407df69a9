//! What the ranks of a run must have in common.

use super::preparing::Prepared;
use super::resuming::Resumed;
use crate::failure::{Failure, Result};
use crate::job::Job;
use memory::Home;
use settings::{Mark, Resume, RunOptions};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// What all ranks' command lines must ask for alike. Compared before any rank needs it of the others.
pub(super) fn asked_for(options: &RunOptions) -> BTreeMap<String, String> {
    let asked = [
        ("--resume", options.resume.is_some()),
        ("--resume auto", options.resume == Some(Resume::Auto)),
        ("--out", options.out.is_some()),
        ("--init-from", options.init_from.is_some()),
        ("--lora-from", options.lora_from.is_some()),
        ("--save-final", options.save_final.is_some()),
    ];
    let given = |is_given: bool| if is_given { "given" } else { "left out" };
    let asked = asked.map(|(flag, is_given)| (flag.into(), given(is_given).into()));
    asked.into()
}

/// A fingerprint of the weights in a folder: names and sizes of the files, and their first and last bytes.
fn weights_of(folder: &Path) -> Result<String> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Failure::file(folder))? {
        let path = entry.map_err(Failure::file(folder))?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            files.push(path);
        }
    }
    files.sort();
    let mut hash = crc32fast::Hasher::new();
    for path in &files {
        let read = ends_of(path).map_err(Failure::file(path))?;
        hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
        hash.update(&read);
    }
    Ok(format!("{} files, {:08x}", files.len(), hash.finalize()))
}

/// The size of a file, and up to 1 MiB from its beginning and from its end.
fn ends_of(path: &Path) -> std::io::Result<Vec<u8>> {
    const END_BYTES: u64 = 1 << 20;
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut read = bytes.to_le_bytes().to_vec();
    (&mut file).take(END_BYTES).read_to_end(&mut read)?;
    file.seek(SeekFrom::Start(bytes.saturating_sub(END_BYTES)))?;
    file.take(END_BYTES).read_to_end(&mut read)?;
    Ok(read)
}

impl Prepared {
    /// Names and values that must be equal on all ranks.
    ///
    /// # Errors
    /// If a value cannot be written in TOML.
    pub(super) fn facts(&self, job: &Job) -> Result<BTreeMap<String, String>> {
        let (config, options) = (&self.decided.config, &self.decided.options);
        let settings = &self.step.settings;
        // Paths of data may differ, because fingerprints tell whether the data is the same.
        let alike = config
            .values()?
            .into_iter()
            .filter(|(key, _)| !key.is(Mark::PerRank));
        let alike = alike.map(|(key, value)| (key.name.to_owned(), value.to_string()));
        let mut facts: BTreeMap<String, String> = alike.collect();
        let layout = settings.layout(&settings.architecture())?;
        let (elements, units) = (layout.elements(), layout.units().len());
        let goes_on = self.resumed.as_ref().map(Resumed::state);
        let others = [
            ("version", Some(env!("CARGO_PKG_VERSION").into())),
            ("the engine", job.engine()),
            ("the device", Some(self.device.target().name().into())),
            (
                "a layout of",
                Some(format!("{elements} elements in {units} units")),
            ),
            ("the data", Some(self.dataset.fingerprint())),
            (
                "algorithms of matrix products",
                self.plan.algorithms.clone(),
            ),
            (
                "optimizer states",
                Some(place(&settings.homes.states).into()),
            ),
            (
                "--init-from",
                options.init_from.as_deref().map(weights_of).transpose()?,
            ),
            (
                "--lora-from",
                options.lora_from.as_deref().map(weights_of).transpose()?,
            ),
            (
                "a checkpoint",
                goes_on.map(|state| format!("after step {}", state.step)),
            ),
        ];
        let others = others
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        facts.extend(others);
        Ok(facts)
    }
}

fn place(states: &Home) -> &'static str {
    match states {
        Home::Device => "on the device",
        Home::Pinned => "pinned",
        Home::Disk(_) => "on a disk",
        Home::Released => "released",
    }
}
