//! What `data.packing = "auto"` stands for.

use std::path::{Path, PathBuf};

use crate::{Format, Inputs, Options, Packing, ShardIndex, shards::shards_of, source::format_of};

impl Options {
    /// The packing, and why `auto` stands for it where it is asked for. Data that cannot be read is concatenated: opening it
    /// reports the error.
    pub fn decided_packing(&self) -> (Packing, String) {
        if self.packing != Packing::Auto {
            return (self.packing, "it is asked for".into());
        }
        if self.pairs {
            let reason = "each text of a pair is a row of its own";
            return (Packing::Pad, reason.into());
        }
        let mut has_masks = false;
        for path in self.path.iter().flat_map(Inputs::paths) {
            let Some(masks) = self.masks(path) else {
                let reason = format!("{} does not say where documents begin", path.display());
                return (Packing::Concatenate, reason);
            };
            has_masks |= masks;
        }
        match has_masks {
            true => (
                Packing::FirstFit,
                "only some tokens of the documents are learnt, such as answers, and none of them should follow from another \
                 document"
                    .into(),
            ),
            false if self.path.is_none() => {
                (Packing::Concatenate, "the built-in text is one document".into())
            }
            false => (Packing::Concatenate, "all tokens of the documents are learnt".into()),
        }
    }

    /// Whether every input has an index, which says where documents begin.
    pub fn has_documents(&self) -> bool {
        let mut paths = self.path.iter().flat_map(Inputs::paths);
        self.path.is_some() && paths.all(|path| self.masks(path).is_some())
    }

    /// Whether the indices of an input mask tokens; none if it has no index.
    fn masks(&self, path: &Path) -> Option<bool> {
        let shards = self.shards(path);
        let masks: Option<Vec<bool>> = shards
            .iter()
            .map(|shard| ShardIndex::masks(shard))
            .collect();
        Some(masks.filter(|masks| !masks.is_empty())?.contains(&true))
    }

    /// The shards of an input that may have an index.
    fn shards(&self, path: &Path) -> Vec<PathBuf> {
        let format = match self.format {
            Format::Auto if path.is_dir() => Format::LlmC,
            Format::Auto => format_of(path).unwrap_or(Format::Text),
            format => format,
        };
        match format {
            Format::LlmC if path.is_dir() => shards_of(path, self.split).unwrap_or_default(),
            Format::LlmC => vec![path.into()],
            _ => Vec::new(),
        }
    }
}
