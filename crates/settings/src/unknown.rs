//! Finds the known name that is nearest to a misspelt one.

/// The key that a misspelt one stands for. `flags` are names and the keys that they set. The candidates in order: the
/// key of the flag with this name (`optim.lr`: `--lr`); a key with the same last part as `word` in any section; the key
/// that takes the fewest edits. None if all are too different.
pub fn nearest_key<'a>(
    word: &str,
    keys: impl Iterator<Item = &'a str> + Clone,
    flags: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Option<&'a str> {
    let name = last(word);
    let same_name = keys.clone().filter(|key| last(key) == name);
    let of_flag = || {
        let mut flags = flags.into_iter();
        let (_, key) = flags.find(|(flag, _)| is_flag(flag, name))?;
        Some(key)
    };
    of_flag()
        .or_else(|| fewest_edits(word, same_name))
        .or_else(|| fewest_edits(word, keys).filter(|key| edits(word, key) <= most_edits(word)))
}

/// The most similar candidate. A common beginning counts most, so that an abbreviation finds the whole name. None if
/// all are too different.
pub fn nearest_name<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let likeness = |candidate: &str| strsim::jaro_winkler(word, candidate);
    let alike = candidates
        .into_iter()
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    alike.filter(|candidate| likeness(candidate) >= LEAST_LIKENESS)
}

/// The candidate with the part that takes the fewest edits to become the pattern without its wildcards.
pub(crate) fn nearest_containing<'a>(
    pattern: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let spelt: Vec<char> = pattern.chars().filter(|c| !"*?".contains(*c)).collect();
    let word: String = spelt.iter().collect();
    let fewest = |candidate: &str| {
        let all: Vec<char> = candidate.chars().collect();
        let parts = all.windows(spelt.len().clamp(1, all.len().max(1)));
        parts
            .map(|part| edits(&word, &part.iter().collect::<String>()))
            .min()
    };
    candidates
        .into_iter()
        .min_by_key(|candidate| fewest(candidate).unwrap_or(usize::MAX))
}

/// Names that are less similar than this are not suggested.
const LEAST_LIKENESS: f64 = 0.7;

/// The most edits between a word and a suggestion: the rule of `model::Label`'s hints.
fn most_edits(word: &str) -> usize {
    1 + word.len() / 3
}

fn fewest_edits<'a>(word: &str, keys: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    keys.min_by_key(|key| edits(word, key))
}

fn edits(word: &str, key: &str) -> usize {
    strsim::damerau_levenshtein(word, key)
}

/// Whether a key's last part is a flag's name, as `micro_batch` is that of `--micro-batch`.
fn is_flag(flag: &str, name: &str) -> bool {
    flag.trim_start_matches('-').replace('-', "_") == name
}

fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::{nearest_containing, nearest_key, nearest_name};

    #[test]
    fn the_nearest_key_is_found() {
        let keys = [
            "model.hidden",
            "model.layers",
            "train.seed",
            "data.seq",
            "optim.eps",
            "lr.peak",
            "recompute.layers",
        ];
        let flags = [("--lr", "lr.peak"), ("--micro-batch", "batch.micro")];
        let nearest = |word| nearest_key(word, keys.into_iter(), flags);
        for (word, key) in [
            ("model.hiden", "model.hidden"),
            ("optim.seed", "train.seed"),
            ("seq", "data.seq"),
            ("modle.layers", "model.layers"),
            ("recomputes.layers", "recompute.layers"),
            ("optim.lr", "lr.peak"),
            ("lr", "lr.peak"),
            ("train.micro_batch", "batch.micro"),
        ] {
            assert_eq!(nearest(word), Some(key), "{word}");
        }
        for word in ["nonsense", "x", "x.nonsense"] {
            assert_eq!(nearest(word), None, "{word}");
        }
    }

    #[test]
    fn an_abbreviated_name_finds_its_whole() {
        let names = ["tiny", "llama-15m", "qwen3-8b"];
        assert_eq!(nearest_name("lama", names), Some("llama-15m"));
        assert_eq!(nearest_name("qwen-8b", names), Some("qwen3-8b"));
        assert_eq!(nearest_name("tini", names), Some("tiny"));
        assert_eq!(nearest_name("nonsense", names), None);
        assert_eq!(nearest_name("x", []), None);
        let names = [
            "model.embed_tokens.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.norm.weight",
        ];
        let containing = |pattern| nearest_containing(pattern, names);
        assert_eq!(containing("*nrom*"), Some("model.norm.weight"));
        assert_eq!(
            containing("layers.0.*"),
            Some("model.layers.0.mlp.up_proj.weight")
        );
        assert_eq!(containing("*"), Some("model.embed_tokens.weight"));
    }
}
