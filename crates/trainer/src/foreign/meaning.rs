//! The meaning that another trainer's name has here.

/// A name of another trainer's, and what is written here instead.
pub(crate) struct Foreign {
    /// Its names, with dashes for underscores and without the leading ones. `a.b` is the key `b` of the section `a`; `a.*` is
    /// every key of that section, `a-*` every name of one section that begins so.
    pub(crate) names: &'static [&'static str],
    /// Ours, or what to do, or why there is nothing to do.
    pub(crate) ours: &'static str,
    /// How its value is used.
    pub(crate) meaning: Meaning,
}

/// How the value of a foreign key is used.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Meaning {
    /// It is the value of this key of ours.
    Key(&'static str),
    /// Each of these values, in small letters, with dashes, and with `|` between those that mean the same, sets keys of ours:
    /// `key=value`, with spaces between. A `~` before them says that ours is near theirs and not the same.
    Words(&'static [(&'static str, &'static str)]),
    /// It names a key that is true: `mixed_precision: bf16` is `bf16: true`.
    Named,
    /// It needs arithmetic, or other keys.
    Of(ForeignPart),
    /// It is given beside the configuration, and changes no plan.
    Beside,
    /// Nothing here does it.
    NotBuilt,
    /// Here there is nothing to be set.
    Needless,
}

/// Keys whose values are not simply ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForeignPart {
    /// Sequences of a step over all ranks.
    GlobalBatch,
    /// Steps, or -1 where epochs say how long a run is.
    Steps,
    /// A rate, where ours is a fraction of the peak.
    MinLr,
    /// A share of the steps.
    WarmupShare,
    /// A number of steps for this key of ours, or a share of all of them where it is below 1.
    StepCount(&'static str),
    /// A norm, 0 for none.
    Clip,
    /// Both betas.
    Betas,
    /// Megatron's four flags together say one specification.
    Recompute,
    /// The name of a model.
    Model,
    /// What `--init-from` reads with the rest of a `config.json`.
    Family,
    /// One rate for all kinds of dropout.
    Dropout,
    /// Positions that are learned.
    Positions,
    /// How often a layer has experts.
    DenseLayers,
    /// Blocks of each virtual stage of a pipeline, where there are several stages.
    Stages,
    /// Names of layers with adapters, or `true` for all linear ones.
    Targets,
    /// A file of DeepSpeed's, or a way of FSDP.
    Division,
    /// FSDP or another way to use several devices, of which other keys may say more.
    Distribution,
    /// Ranks among which everything is divided, -1 for all.
    Shard,
    /// Processes of a launcher.
    Devices,
    /// Ranks of a group that has all weights, where 1 is all ranks.
    ShardGroup,
    /// Elements, where ours is in bytes.
    Bucket,
    /// Minutes, where ours are seconds.
    Minutes,
    /// Whether documents are packed into rows.
    Packing,
    /// The same of evaluations.
    EvalPacking,
    /// Modules of axolotl's.
    Plugins,
}

/// The settings that a value makes, by a table of words.
pub(super) fn sets_of(words: &[(&str, &'static str)], value: &str) -> Option<&'static str> {
    let value = plain(value);
    let is_it = |(names, _): &&(&str, &str)| names.split('|').any(|name| name == value);
    words.iter().find(is_it).map(|(_, sets)| *sets)
}

/// Settings that are near what a word means, and not the same.
pub(super) fn near(sets: &str) -> Option<&str> {
    sets.strip_prefix('~')
}

pub(super) const fn foreign(
    names: &'static [&'static str],
    ours: &'static str,
    meaning: Meaning,
) -> Foreign {
    Foreign {
        names,
        ours,
        meaning,
    }
}

pub(super) const fn beside(names: &'static [&'static str], ours: &'static str) -> Foreign {
    foreign(names, ours, Meaning::Beside)
}

pub(super) const fn not_built(names: &'static [&'static str], instead: &'static str) -> Foreign {
    foreign(names, instead, Meaning::NotBuilt)
}

pub(super) const fn needless(names: &'static [&'static str], why: &'static str) -> Foreign {
    foreign(names, why, Meaning::Needless)
}

impl Foreign {
    /// Whether one of its names is this one, in the form of [`plain`].
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.names.contains(&name)
    }

    /// Whether one of its names ends in `*` and begins as this one does.
    pub(super) fn covers(&self, name: &str) -> bool {
        let mut beginnings = self.names.iter().filter_map(|one| one.strip_suffix('*'));
        beginnings.any(|one| {
            let rest = name.strip_prefix(one);
            rest.is_some_and(|rest| one.ends_with('.') || !rest.contains('.'))
        })
    }
}

/// A name or a word in the form in which the table has it: small letters, dashes for underscores, no numbers of a list's items.
pub(super) fn plain(name: &str) -> String {
    let name = name.to_lowercase().replace(['_', ' '], "-");
    let mut depth = 0;
    let mut kept = |letter: char| {
        depth += i32::from(letter == '[') - i32::from(letter == ']');
        depth == 0 && letter != ']'
    };
    name.chars().filter(|letter| kept(*letter)).collect()
}
