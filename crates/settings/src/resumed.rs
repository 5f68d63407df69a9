//! Finds changes of a resumed run that make it compute something else than before.

use super::key::Mark;
use super::schema::Config;
use crate::Result;
use optim::ScheduleKind;
use toml::Value;
use units::Reduce;

/// A key, or a name for several, whose change alters what is computed.
#[derive(Clone, Debug, PartialEq)]
pub struct ResumedChange {
    /// The key.
    pub key: &'static str,
    /// The value before, as TOML.
    pub before: String,
    /// The value now.
    pub now: String,
}

impl std::fmt::Display for ResumedChange {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}: {} before, {} now", self.key, self.before, self.now)
    }
}

impl Config {
    /// The keys by which a run computes something else than one with the configuration `before`. With ranks, which both
    /// must have joined, the number of micro-batches of all ranks counts, and how their gradients are added up.
    ///
    /// # Errors
    /// If a value cannot be written in TOML.
    pub fn changes_since(&self, before: &Config) -> Result<Vec<ResumedChange>> {
        let show = |value: Option<Value>| value.map_or("not set".into(), |value| value.to_string());
        let decided = self.differences(before)?.into_iter();
        let decided =
            decided.filter(|(key, ..)| !key.is(Mark::KeepsBits) && !key.is(Mark::ComparedApart));
        let decided = decided.map(|(key, now, before)| ResumedChange {
            key: key.name,
            before: show(before),
            now: show(now),
        });
        let apart = self.compared_apart(before).into_iter();
        let apart = apart.filter(|change| change.before != change.now);
        Ok(apart.chain(decided).collect())
    }

    /// Changes in keys that are compared together.
    fn compared_apart(&self, before: &Config) -> Vec<ResumedChange> {
        let has_ranks = self.rank.is_some() || before.rank.is_some();
        let change = |key, of: &dyn Fn(&Config) -> String| ResumedChange {
            key,
            before: of(before),
            now: of(self),
        };
        let has_parts = self.parts().max(before.parts()) > 1;
        let shares = self.parallel.context.max(before.parallel.context) > 1;
        let micro_batches = match has_ranks {
            true if self.parallel.pipeline.max(before.parallel.pipeline) > 1 => {
                "ranks / parallel.pipeline / parallel.context x batch.accum"
            }
            true if shares => "ranks / parallel.context x batch.accum",
            true => "ranks x batch.accum",
            false => "batch.accum",
        };
        let mut compared = vec![
            change(micro_batches, &|run| run.micro_batches().to_string()),
            change("collectives.reduce", &Config::sums),
        ];
        if has_parts {
            compared.push(change("parallel.context_parts", &|run| {
                run.parts().to_string()
            }));
        }
        if self.lr.depends_on_steps() || before.lr.depends_on_steps() {
            compared.push(change("train.steps", &|run| run.train.steps.to_string()));
        }
        compared
    }

    /// How gradients of micro-batches are added up, in words.
    fn sums(&self) -> String {
        match self.ranks() {
            None => "a process alone, which adds them up in place".into(),
            Some(ranks) if ranks.reduce == Reduce::Step => {
                format!("step, of {} ranks", ranks.rank.of)
            }
            Some(_) => "micro-batch, over ranks".into(),
        }
    }
}

impl super::LrConfig {
    /// Whether the learning rate of a step depends on the number of steps.
    fn depends_on_steps(&self) -> bool {
        match self.schedule {
            ScheduleKind::Constant => false,
            ScheduleKind::Linear | ScheduleKind::Cosine => self.decay_steps.is_none(),
            ScheduleKind::Wsd => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Rank;

    fn changes(set: &[&str]) -> Vec<&'static str> {
        let before = Config::default();
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        let now = before.with(&set).unwrap();
        let changes = now.changes_since(&before).unwrap();
        changes.iter().map(|change| change.key).collect()
    }

    #[test]
    fn what_never_changes_a_bit_may_change() {
        let harmless = [
            "recompute.spec=full",
            "offload.optimizer=/scratch",
            "offload.parameters=pinned",
            "offload.gradients=pinned",
            "train.threads=3",
            "data.prefetch=9",
            "train.steps=5000",
            "eval.every=5",
            "checkpoint.every=7",
            "log.every=3",
        ];
        assert_eq!(changes(&harmless), [""; 0]);
    }

    /// A different number of ranks computes the same if the micro-batches of all ranks are the same.
    #[test]
    fn ranks_count_by_the_micro_batches_of_all() {
        let config = |size: Option<usize>, set: &[&str]| {
            let mut config = Config::default();
            if let Some(size) = size {
                config
                    .join(Rank {
                        number: 0,
                        of: size,
                    })
                    .unwrap();
            }
            let set: Vec<String> = set.iter().map(ToString::to_string).collect();
            config.with(&set).unwrap()
        };
        let changes = |before: &Config, now: &Config| -> Vec<&str> {
            let changes = now.changes_since(before).unwrap();
            changes.iter().map(|change| change.key).collect()
        };
        let four = config(Some(4), &["batch.accum=1", "collectives.zero=1"]);
        let two = config(Some(2), &["batch.accum=2", "collectives.zero=3"]);
        let one = config(None, &["batch.accum=4", "collectives.zero=0"]);
        assert_eq!(changes(&four, &two), [""; 0]);
        assert_eq!(changes(&two, &one), [""; 0]);
        let fewer = config(Some(2), &["batch.accum=1"]);
        assert_eq!(changes(&four, &fewer), ["ranks x batch.accum"]);
        // A single process adds gradients up in place, while a rank that reduces once a step first adds up its own.
        let alone = config(None, &["batch.accum=4"]);
        assert_eq!(changes(&four, &alone), ["collectives.reduce"]);
        let once = |size, accum: &str| {
            let accum = format!("batch.accum={accum}");
            config(Some(size), &[&accum, "collectives.reduce=step"])
        };
        assert_eq!(changes(&four, &once(4, "1")), ["collectives.reduce"]);
        assert_eq!(
            changes(&once(2, "2"), &once(4, "1")),
            ["collectives.reduce"]
        );
    }

    /// Equal parts have the same bits on any number of ranks that divides them.
    #[test]
    fn parts_of_sequences_count_and_not_how_many_ranks_share_them() {
        let config = |ranks: Option<usize>, set: &[&str]| {
            let set: Vec<String> = set.iter().map(ToString::to_string).collect();
            let mut config = Config::default();
            if let Some(of) = ranks {
                config.join(Rank { number: 0, of }).unwrap();
            }
            config.with(&set).unwrap()
        };
        let changes = |before: &Config, now: &Config| -> Vec<String> {
            let changes = now.changes_since(before).unwrap();
            changes.iter().map(ToString::to_string).collect()
        };
        let four = "parallel.context_parts=4";
        let on_one = config(None, &[four]);
        let on_two = config(Some(2), &[four, "parallel.context=2"]);
        let unsaid = config(Some(4), &["parallel.context=4"]);
        assert_eq!(changes(&on_two, &on_one), [""; 0]);
        assert_eq!(changes(&unsaid, &on_one), [""; 0]);
        assert_eq!(changes(&on_two, &unsaid), [""; 0]);
        let whole = config(Some(1), &["collectives.zero=1"]);
        let change = "parallel.context_parts: 4 before, 1 now";
        assert_eq!(changes(&on_two, &whole), [change]);
    }

    #[test]
    fn what_does_is_named() {
        let set = ["lr.peak=1", "memory.head_chunk=64", "batch.accum=2"];
        let named = ["batch.accum", "lr.peak", "memory.head_chunk"];
        assert_eq!(changes(&set), named);
        // Tiles change the order of sums. With release, non-finite values are not known before the first update.
        let set = ["memory.tile_tokens=64", "optim.release=backward"];
        let without_clipping = [&set[..], &["optim.clip_norm=inf"]].concat();
        let named = ["optim.clip_norm", "optim.release", "memory.tile_tokens"];
        assert_eq!(changes(&without_clipping), named);
        // The number of steps matters if the rate falls towards the last one.
        let wsd = ["train.steps=5000", "lr.schedule=wsd"];
        assert_eq!(changes(&wsd), ["train.steps", "lr.schedule"]);
    }
}
