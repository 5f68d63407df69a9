//! The files to read: those given, and those in the folders given, in the order of their names.

use crate::PrepareError;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A file, or standard input.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    /// None: standard input.
    pub(crate) path: Option<PathBuf>,
    pub(crate) kind: Kind,
    pub(crate) bytes: u64,
}

/// What documents are in it, by the end of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One document.
    Text,
    /// A document a line.
    JsonLines,
    /// A document a row.
    Parquet,
    /// Standard input, whose first line tells.
    Unnamed,
}

impl Input {
    /// The name for messages.
    pub(crate) fn name(&self) -> String {
        let path = self.path.as_ref();
        path.map_or("standard input".into(), |path| path.display().to_string())
    }

    /// Its contents, decompressed; `read` counts the bytes of the file.
    pub(crate) fn open(&self, read: &Arc<AtomicU64>) -> io::Result<Box<dyn BufRead>> {
        let counted = |file: Box<dyn Read>| Counted {
            file,
            read: Arc::clone(read),
        };
        let Some(path) = &self.path else {
            return Ok(Box::new(BufReader::new(counted(Box::new(io::stdin())))));
        };
        let file = counted(Box::new(File::open(path)?));
        Ok(match path.extension().and_then(|end| end.to_str()) {
            Some("gz") => Box::new(BufReader::new(flate2::read::MultiGzDecoder::new(file))),
            Some("zst") => Box::new(BufReader::new(zstd::Decoder::new(file)?)),
            _ => Box::new(BufReader::with_capacity(1 << 20, file)),
        })
    }
}

impl Kind {
    fn of(path: &Path) -> Kind {
        let compressed = matches!(
            path.extension().and_then(|end| end.to_str()),
            Some("gz" | "zst")
        );
        let inner = if compressed {
            Path::new(path.file_stem().unwrap_or_default())
        } else {
            path
        };
        match inner.extension().and_then(|end| end.to_str()) {
            Some("jsonl" | "ndjson" | "json") => Kind::JsonLines,
            Some("parquet") if !compressed => Kind::Parquet,
            _ => Kind::Text,
        }
    }
}

struct Counted {
    file: Box<dyn Read>,
    read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bytes = self.file.read(into)?;
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

/// All files of `paths`, `-` being standard input. Of folders, hidden files are left out, and links to folders.
pub(crate) fn find(paths: &[PathBuf]) -> Result<Vec<Input>, PrepareError> {
    let mut inputs = Vec::new();
    for path in paths {
        if path == Path::new("-") {
            let (kind, bytes) = (Kind::Unnamed, 0);
            inputs.push(Input {
                path: None,
                kind,
                bytes,
            });
        } else if !path.exists() {
            return Err(PrepareError::Missing { path: path.clone() });
        } else {
            add(path, &mut inputs)?;
        }
    }
    Ok(inputs)
}

fn add(path: &Path, inputs: &mut Vec<Input>) -> Result<(), PrepareError> {
    let unreadable = |error| PrepareError::unreadable(&path.display().to_string())(error);
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_dir() {
        inputs.push(Input {
            path: Some(path.into()),
            kind: Kind::of(path),
            bytes: metadata.len(),
        });
        return Ok(());
    }
    let entries = fs::read_dir(path).map_err(unreadable)?;
    let entries: io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut entries = entries.map_err(unreadable)?;
    entries.sort();
    for entry in entries {
        let hidden = entry
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        // It may lead back here.
        let link_to_folder = entry.is_symlink() && entry.is_dir();
        if !hidden && !link_to_folder {
            add(&entry, inputs)?;
        }
    }
    Ok(())
}
