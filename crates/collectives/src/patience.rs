//! How long ranks wait for each other, and what messages call them.

use crate::GroupError;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a rank waits for others, and how messages name them. Clones share the deadline.
#[derive(Clone)]
pub struct Patience {
    timeout_ms: Arc<AtomicU64>,
    name: Arc<dyn Fn(usize) -> String + Send + Sync>,
}

impl Patience {
    /// Waits so long, for ranks that are called by their numbers.
    pub fn new(timeout: Duration) -> Patience {
        Patience {
            timeout_ms: Arc::new(AtomicU64::new(timeout.as_millis() as u64)),
            name: Arc::new(|rank| rank.to_string()),
        }
    }

    /// The same, where the rank of each number has another name, which follows the word "rank".
    #[must_use]
    pub fn naming(self, name: impl Fn(usize) -> String + Send + Sync + 'static) -> Patience {
        Patience {
            name: Arc::new(name),
            ..self
        }
    }

    /// How long a wait may take.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    /// Lets waits that begin from now on take at least so long.
    pub fn raise_to(&self, timeout: Duration) {
        let timeout_ms = timeout.as_millis() as u64;
        self.timeout_ms.fetch_max(timeout_ms, Ordering::Relaxed);
    }

    /// The name of a rank.
    pub fn name(&self, rank: usize) -> String {
        (self.name)(rank)
    }

    /// The error of a rank whose wait for the ranks `missing` timed out. There is at least one, and some may repeat.
    pub fn late(
        &self,
        rank: usize,
        what: &str,
        missing: impl IntoIterator<Item = usize>,
    ) -> GroupError {
        let missing = BTreeSet::from_iter(missing);
        let names: Vec<String> = missing.iter().map(|rank| self.name(*rank)).collect();
        let ranks = if names.len() == 1 { "rank" } else { "ranks" };
        GroupError::Late(format!(
            "{ranks} {} did not answer rank {} in {} s, in {what}: stuck or gone, or slower than collectives.timeout_s",
            names.join(", "),
            self.name(rank),
            self.timeout().as_secs_f64()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_only_grow_for_all_clones() {
        let patience = Patience::new(Duration::from_secs(2));
        let named = patience.clone().naming(|rank| format!("{rank} (of two)"));
        patience.raise_to(Duration::from_millis(2500));
        named.raise_to(Duration::from_secs(1));
        let late = |patience: &Patience| patience.late(0, "a share", [2, 1, 2]).to_string();
        assert!(
            late(&patience).starts_with("ranks 1, 2 did not answer rank 0 in 2.5 s, in a share")
        );
        assert!(
            late(&named).starts_with(
                "ranks 1 (of two), 2 (of two) did not answer rank 0 (of two) in 2.5 s"
            )
        );
    }
}
