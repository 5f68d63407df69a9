//! Token files that are read as one: the shards of a folder, or a single file.

use crate::Result;
use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    DataError, FileKind, Format, Options, Packing, ShardIndex, Split,
    file::DataFile,
    listing::{ListedOrigin, Listing},
    llmc,
    tokens::{TokenFile, Width},
};

/// At least one file. All have the same width, and either all have an index, or none.
#[derive(Debug)]
pub(crate) struct TokenShards {
    /// The path that the user gave, or a text in its place.
    pub(crate) name: String,
    pub(crate) format: Format,
    pub(crate) files: Vec<TokenFile>,
    /// The text that the shards were made from, if `dataset.json` tells.
    pub(crate) origin: Option<ListedOrigin>,
}

impl TokenShards {
    pub(crate) fn builtin() -> Self {
        Self::one(Format::Text, TokenFile::text(DataFile::builtin()))
    }

    /// Opens a file, which is one shard; `format` is not `auto`.
    pub(crate) fn open_file(path: &Path, format: Format) -> Result<Self> {
        open_shard(path, format).map(|file| Self::one(format, file))
    }

    fn one(format: Format, file: TokenFile) -> Self {
        Self {
            name: file.file.name.clone(),
            format,
            files: vec![file],
            origin: None,
        }
    }

    /// Opens the shards of a folder, in the order of their names.
    pub(crate) fn open_folder(folder: &Path, options: &Options) -> Result<Self> {
        let name = folder.display().to_string();
        let format = match options.format {
            Format::Auto => Format::LlmC,
            Format::LlmC | Format::U16 => options.format,
            other => {
                return Err(DataError::Setting(format!(
                    "data.format is \"{other}\" but {name} is a folder, whose .bin files are read as \"llmc\" or \"u16\"; leave \
                     data.format at \"auto\", or set data.path to a file"
                )));
            }
        };
        let paths = shards_of(folder, options.split)?;
        let listing = Listing::open(folder, options.split)?;
        if let Some(listing) = &listing {
            listing.check_vocab(options.vocab)?;
            listing.check_names(&paths)?;
        }
        let mut files = Vec::new();
        for path in &paths {
            let file = open_shard(path, format)?;
            if let Some(listing) = &listing {
                listing.check_tokens(path, &file)?;
            }
            files.push(file);
        }
        let shards = Self {
            name,
            format,
            files,
            origin: listing.map(|listing| listing.origin),
        };
        shards.check_alike()?;
        Ok(shards)
    }

    /// Checks that all shards have the same width, and that either all have an index, or none.
    fn check_alike(&self) -> Result {
        let [first, others @ ..] = &self.files[..] else {
            return Err(DataError::Unusable(format!(
                "data folder {} holds no .bin shards to train on (those named validation* or *_val_* are for evaluation); set \
                 data.path to a folder that `trainer prepare` wrote, or to a file",
                self.name
            )));
        };
        if let Some(other) = others.iter().find(|other| other.width != first.width) {
            return Err(DataError::Unusable(format!(
                "data file {} has tokens of {} bytes, but {} has tokens of {}; keep shards that were made together in a folder of \
                 their own",
                other.file.name, other.width as usize, first.file.name, first.width as usize
            )));
        }
        let bare = self.files.iter().find(|file| file.index.is_none());
        let indexed = self.files.iter().find(|file| file.index.is_some());
        match (bare, indexed) {
            (Some(bare), Some(indexed)) => Err(DataError::Unusable(format!(
                "data file {} has no .idx beside it, but {} has; copy the folder again, or write the data again",
                bare.file.name, indexed.file.name
            ))),
            _ => Ok(()),
        }
    }

    /// Frees the document starts, which only cutting rows needs.
    pub(crate) fn forget_documents(&mut self) {
        for index in self.files.iter_mut().filter_map(|file| file.index.as_mut()) {
            index.documents = Vec::new();
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.files.iter().map(|file| file.tokens).sum()
    }

    /// Bytes of text of all tokens, if that is known.
    pub(crate) fn text_bytes(&self) -> Option<u64> {
        if self.files[0].width == Width::U8 {
            return Some(self.tokens() as u64);
        }
        let bytes = self
            .files
            .iter()
            .map(|file| Some(file.index.as_ref()?.text_bytes));
        bytes.sum()
    }

    /// Refuses to pack by documents if nothing says where they begin.
    pub(crate) fn check_documents(&self, packing: Packing) -> Result {
        if self.files[0].index.is_some() {
            return Ok(());
        }
        let reason = match self.format {
            Format::LlmC => "has no .idx to say where documents begin",
            _ => "is of a format that does not say where documents begin",
        };
        Err(DataError::NoDocuments {
            file: self.name.clone(),
            packing: packing.name(),
            reason,
        })
    }

    /// Refuses texts where pairs are wanted, and pairs, of which one text is not to be learnt, where texts are.
    pub(crate) fn check_pairs(&self, wanted: bool) -> Result {
        let origin = self.origin.as_ref();
        let wrong = match (wanted, origin.is_some_and(|origin| origin.preferences)) {
            (true, false) => {
                "has no pairs of a chosen and a rejected text; name a folder that `trainer prepare` wrote of records with \
                 `chosen` and `rejected`"
            }
            (false, true) => {
                "has pairs of a chosen and a rejected text, of which the latter is not to be learnt; train on it with --objective dpo"
            }
            _ => return Ok(()),
        };
        Err(DataError::Unusable(format!("data {} {wrong}", self.name)))
    }

    /// The beginning of a line for people: the kind of tokens, and how many.
    pub(crate) fn describe(&self) -> String {
        let kind = match (self.format, self.files[0].width) {
            (Format::LlmC, Width::U32) => "llm.c u32 tokens",
            (Format::LlmC, _) => "llm.c u16 tokens",
            (Format::U16, _) => "u16 tokens",
            _ => "bytes of text",
        };
        let tokens = self.tokens();
        match self.files.len() {
            1 => format!("{}: {tokens} {kind}", self.name),
            shards => format!("{}: {tokens} {kind} in {shards} shards", self.name),
        }
    }
}

/// Opens a token file, and its index if there is one. Only llm.c's files can have an index.
fn open_shard(path: &Path, format: Format) -> Result<TokenFile> {
    let file = DataFile::open(path)?;
    match format {
        Format::U16 => TokenFile::bare_u16(file),
        Format::LlmC => {
            // For any other kind, the error about the missing header is enough.
            let kind = FileKind::of(&file);
            if kind != FileKind::Text && kind.can_be_prepared() {
                return Err(no_text(file, kind));
            }
            let shard = llmc::open(file)?;
            let index = ShardIndex::path(path);
            if index.exists() {
                shard.with_index(&index)
            } else {
                Ok(shard)
            }
        }
        _ => match FileKind::of_file(path, &file) {
            FileKind::Text => Ok(TokenFile::text(file)),
            kind => Err(no_text(file, kind)),
        },
    }
}

fn no_text(file: DataFile, kind: FileKind) -> DataError {
    DataError::NotText {
        file: file.name,
        kind,
    }
}

/// The paths of the shards of a split, in the order of their names.
pub(crate) fn shards_of(folder: &Path, split: Split) -> Result<Vec<PathBuf>> {
    let mut names = bin_files(folder).map_err(|reason| DataError::Unreadable {
        file: folder.display().to_string(),
        reason,
    })?;
    names.sort_unstable();
    let (validation, train): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| {
        let name = name.to_string_lossy();
        name.starts_with("validation") || name.contains("_val_")
    });
    let chosen = match split {
        Split::Validation | Split::HeldOut if !validation.is_empty() => validation,
        Split::HeldOut => {
            return Err(DataError::Setting(format!(
                "{} has no validation part to evaluate on; name other data with --eval-data, or prepare it with --validation",
                folder.display()
            )));
        }
        _ => train,
    };
    Ok(chosen.iter().map(|name| folder.join(name)).collect())
}

fn bin_files(folder: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if Path::new(&name).extension().is_some_and(|end| end == "bin") {
            names.push(name);
        }
    }
    Ok(names)
}
