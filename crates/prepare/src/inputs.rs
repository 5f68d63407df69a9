//! Finds the files to read: the given files, and those in the given folders, in the order of their names.

use crate::PrepareError;
use crate::Result;
use data::FileKind;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A file, or standard input.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    /// `None`: standard input.
    pub(crate) path: Option<PathBuf>,
    pub(crate) bytes: u64,
}

impl Input {
    /// The name for messages.
    pub(crate) fn name(&self) -> String {
        let path = self.path.as_ref();
        path.map_or("standard input".into(), |path| path.display().to_string())
    }

    /// The decompressed contents, and whether the file was not compressed. `read` counts the bytes of the file.
    pub(crate) fn open(&self, read: &Arc<AtomicU64>) -> io::Result<(Box<dyn BufRead>, bool)> {
        let file: Box<dyn Read> = match &self.path {
            None => Box::new(io::stdin()),
            Some(path) => Box::new(File::open(path)?),
        };
        let mut file = Counted {
            file,
            read: Arc::clone(read),
        };
        let mut head = Vec::new();
        file.by_ref().take(4).read_to_end(&mut head)?;
        let kind = FileKind::of(&head);
        let file = Cursor::new(head).chain(file);
        Ok(match kind {
            FileKind::Gzip => {
                let unpacked = flate2::read::MultiGzDecoder::new(file);
                (Box::new(BufReader::new(unpacked)), false)
            }
            FileKind::Zstd => (Box::new(BufReader::new(zstd::Decoder::new(file)?)), false),
            _ => (Box::new(BufReader::with_capacity(1 << 20, file)), true),
        })
    }
}

/// Whether a file is JSON by its name, compressed or not.
pub(crate) fn is_named_json(path: &Path) -> bool {
    let stem = Path::new(path.file_stem().unwrap_or_default());
    let ending = |path: &Path| {
        let end = path.extension()?;
        Some(end.to_string_lossy().into_owned())
    };
    let own = match ending(path).as_deref() {
        Some("gz" | "zst") => ending(stem),
        _ => ending(path),
    };
    matches!(own.as_deref(), Some("jsonl" | "ndjson" | "json"))
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

/// All files of `paths`, with `-` for standard input. In folders, hidden files and links to folders are left out.
pub(crate) fn find(paths: &[PathBuf]) -> Result<Vec<Input>> {
    let mut inputs = Vec::new();
    for path in paths {
        if path == Path::new("-") {
            let bytes = 0;
            inputs.push(Input { path: None, bytes });
        } else if !path.exists() {
            let path = path.clone();
            let given = path
                .to_str()
                .and_then(|text| text.parse::<data::Input>().ok());
            return Err(match given.and_then(|given| given.weight) {
                Some(_) => PrepareError::Weight { path },
                None => PrepareError::Missing { path },
            });
        } else {
            add(path, &mut inputs)?;
        }
    }
    Ok(inputs)
}

fn add(path: &Path, inputs: &mut Vec<Input>) -> Result {
    let unreadable = |error| PrepareError::unreadable(&path.display().to_string())(error);
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_dir() {
        inputs.push(Input {
            path: Some(path.into()),
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
        // It may link back to this folder.
        let link_to_folder = entry.is_symlink() && entry.is_dir();
        if !hidden && !link_to_folder {
            add(&entry, inputs)?;
        }
    }
    Ok(())
}
