//! Patterns of parameter names.

use wildmatch::WildMatch;

/// Patterns of parameter names in Hugging Face's files: `*` stands for any characters, `?` for one.
#[derive(Clone, Debug, Default)]
pub struct NamePatterns(Vec<(String, WildMatch)>);

impl NamePatterns {
    /// These patterns.
    pub fn new(patterns: &[String]) -> NamePatterns {
        let patterns = patterns.iter();
        NamePatterns(
            patterns
                .map(|pattern| (pattern.clone(), WildMatch::new(pattern)))
                .collect(),
        )
    }

    /// Those whose text a function keeps.
    pub fn some(&self, keeps: impl Fn(&String) -> bool) -> NamePatterns {
        let kept = self.0.iter().filter(|(text, _)| keeps(text));
        NamePatterns(kept.cloned().collect())
    }

    /// Whether one of them fits a name.
    pub fn fit(&self, name: &str) -> bool {
        self.0.iter().any(|(_, pattern)| pattern.matches(name))
    }

    /// The patterns that fit none of some names.
    pub fn unfit<'a>(
        &self,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> impl Iterator<Item = &str> {
        let unfit = self
            .0
            .iter()
            .filter(move |(_, pattern)| !names.clone().any(|name| pattern.matches(name)));
        unfit.map(|(text, _)| text.as_str())
    }
}
