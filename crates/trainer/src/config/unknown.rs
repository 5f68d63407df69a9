//! The nearest known name of a misspelt one.

/// The candidate that takes the fewest edits to reach; a dotted key whose last part is right counts
/// as near, whatever its section. The first of equals wins.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .min_by_key(|candidate| distance(word, candidate))
}

/// The candidate that looks most alike, a common beginning counting most: an abbreviated name finds
/// its whole.
pub fn nearest_name<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    candidates.into_iter().max_by(|a, b| {
        let likeness = |candidate| strsim::jaro_winkler(word, candidate);
        likeness(a).total_cmp(&likeness(b))
    })
}

/// Edits between two names; 2 at most for dotted keys that differ in their section only.
fn distance(word: &str, candidate: &str) -> usize {
    let edits = strsim::damerau_levenshtein(word, candidate);
    let same_last = candidate.contains('.') && last(word) == last(candidate);
    if same_last { edits.min(2) } else { edits }
}

fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::{nearest, nearest_name};

    #[test]
    fn the_nearest_name_is_found() {
        let keys = ["model.hidden", "model.heads", "train.seed", "data.seq"];
        assert_eq!(nearest("model.hiden", keys), Some("model.hidden"));
        assert_eq!(nearest("modle.heads", keys), Some("model.heads"));
        assert_eq!(nearest("optim.seed", keys), Some("train.seed"));
        assert_eq!(nearest("seq", keys), Some("data.seq"));
        assert_eq!(nearest("x", []), None);
    }

    #[test]
    fn an_abbreviated_name_finds_its_whole() {
        let names = ["tiny", "llama-15m", "qwen3-8b"];
        assert_eq!(nearest_name("lama", names), Some("llama-15m"));
        assert_eq!(nearest_name("qwen-8b", names), Some("qwen3-8b"));
        assert_eq!(nearest_name("tini", names), Some("tiny"));
        assert_eq!(nearest_name("x", []), None);
    }
}
