//! A key of the configuration: one row for its value, default, explanation and flag.

use super::kind::Kind;
use super::need::Need;
use model::{Label, Labels};

/// A key of the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Section and name, dotted.
    pub name: &'static str,
    /// What its value must be.
    pub kind: Kind,
    /// Its default.
    pub default: KeyDefault,
    /// The flag that stands for it.
    pub flag: Option<Flag>,
    marks: &'static [Mark],
    /// The settings without which the key has no effect.
    pub(crate) needs: [Option<Need>; 2],
    about: &'static str,
    /// What only the reference says.
    details: &'static str,
}

/// A property of a key, which its row states in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// No value changes a bit of what a run computes: a resumed run may have another one.
    KeepsBits,
    /// Not compared by value when a run is resumed, but by what it leads to, such as micro-batches over all ranks.
    ComparedApart,
    /// Ranks may have values of their own: what a machine has, and where it keeps things.
    PerRank,
}

/// The default of a key.
#[derive(Clone, Copy, Debug)]
pub enum KeyDefault {
    /// This value, as TOML.
    Value(&'static str),
    /// None: the key may be absent.
    Absent {
        /// A value for the reference, as TOML.
        example: &'static str,
        /// What holds without one; may be empty.
        instead: &'static str,
    },
}

/// The flag that stands for a key.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// The flag, with its dashes.
    pub name: &'static str,
    /// A shorter name, with its dashes.
    pub alias: Option<&'static str>,
    /// What it takes.
    pub argument: FlagArgument,
    /// Where help lists it; none: it does not.
    pub heading: Option<&'static str>,
}

/// What a flag takes.
#[derive(Clone, Copy, Debug)]
pub enum FlagArgument {
    /// A value, under this name in help.
    Value(&'static str),
    /// `true` or `false` behind a `=`; nothing is `true`.
    Toggle,
    /// Nothing.
    None {
        /// What the flag sets its key to.
        sets: bool,
        /// What it does.
        about: &'static str,
    },
}

/// A key that always has a value.
pub(crate) const fn key(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    about: &'static str,
) -> Key {
    Key {
        name,
        kind,
        default: KeyDefault::Value(default),
        flag: None,
        marks: &[],
        needs: [None; 2],
        about,
        details: "",
    }
}

/// A key that may be absent, with an example and what holds then.
pub(crate) const fn optional(
    name: &'static str,
    kind: Kind,
    (example, instead): (&'static str, &'static str),
    about: &'static str,
) -> Key {
    Key {
        default: KeyDefault::Absent { example, instead },
        ..key(name, kind, "", about)
    }
}

impl Key {
    /// Adds sentences for the reference alone.
    pub(crate) const fn details(self, details: &'static str) -> Key {
        Key { details, ..self }
    }

    /// Adds what is said in a word each.
    pub(crate) const fn marks(self, marks: &'static [Mark]) -> Key {
        Key { marks, ..self }
    }

    /// Whether a word is said of it.
    pub fn is(&self, mark: Mark) -> bool {
        self.marks.contains(&mark)
    }

    /// Names a setting without which the key has no effect. A row may name two.
    pub(crate) const fn needs(self, need: Need) -> Key {
        let needs = match self.needs {
            [None, _] => [Some(need), None],
            [first, _] => [first, Some(need)],
        };
        Key { needs, ..self }
    }

    /// Adds a flag that takes a value.
    pub(crate) const fn flag(
        self,
        name: &'static str,
        value: &'static str,
        heading: &'static str,
    ) -> Key {
        let argument = FlagArgument::Value(value);
        self.with(name, argument, Some(heading))
    }

    /// Adds a shorter name of its flag.
    pub(crate) const fn alias(self, alias: &'static str) -> Key {
        let Some(flag) = self.flag else {
            panic!("a key has a flag before a shorter name of it");
        };
        let alias = Some(alias);
        let flag = Some(Flag { alias, ..flag });
        Key { flag, ..self }
    }

    /// Adds a flag that takes no value.
    pub(crate) const fn switch(
        self,
        name: &'static str,
        (sets, about): (bool, &'static str),
        heading: Option<&'static str>,
    ) -> Key {
        self.with(name, FlagArgument::None { sets, about }, heading)
    }

    /// Adds a flag that turns a key on, or with `=false` off.
    pub(crate) const fn toggle(self, name: &'static str, heading: &'static str) -> Key {
        self.with(name, FlagArgument::Toggle, Some(heading))
    }

    const fn with(
        self,
        name: &'static str,
        argument: FlagArgument,
        heading: Option<&'static str>,
    ) -> Key {
        let flag = Some(Flag {
            name,
            alias: None,
            argument,
            heading,
        });
        Key { flag, ..self }
    }

    /// What the flag does, for help.
    pub fn help(&self) -> String {
        match (self.flag.map(|flag| flag.argument), self.default) {
            (Some(FlagArgument::None { about, .. }), _) => about.to_owned(),
            (Some(FlagArgument::Toggle), KeyDefault::Value(default)) => {
                format!("{} [default: {default}]", self.about())
            }
            (_, KeyDefault::Absent { instead, .. }) if !instead.is_empty() => {
                format!("{} [default: {instead}]", self.about())
            }
            _ => self.about(),
        }
    }

    /// What the key does, for the reference.
    pub(crate) fn explanation(&self) -> String {
        let mut sentences = self.about();
        if let Some(flag) = self.flag {
            sentences += &format!(" ({})", flag.name);
        }
        sentences += ".";
        if let Kind::Choice(names) = self.kind {
            sentences += &format!(" One of {}.", names.join(", "));
        }
        if let KeyDefault::Absent { instead, .. } = self.default
            && !instead.is_empty()
        {
            sentences += &format!(" Absent: {instead}.");
        }
        if !self.details.is_empty() {
            sentences += &format!(" {}", self.details);
        }
        for mark in self.marks {
            sentences += match mark {
                Mark::KeepsBits => " A resumed run may change it.",
                Mark::ComparedApart => {
                    " A resumed run may change it as long as what follows from it stays the same."
                }
                Mark::PerRank => " Ranks may differ in it.",
            };
        }
        sentences
    }

    /// `about` with the labels that it names by `{NAMED}` and `{ALL}`.
    fn about(&self) -> String {
        let list = |labels: Vec<Label>| {
            let names: Vec<&str> = labels.into_iter().map(Label::name).collect();
            names.join(", ")
        };
        let named = |labels: Labels| labels.named().collect();
        let [named, all] = [
            Labels::of_all(named),
            Labels::of_all(|labels| labels.iter().collect()),
        ];
        let about = self.about.replace("{NAMED}", &list(named));
        about.replace("{ALL}", &list(all))
    }
}
