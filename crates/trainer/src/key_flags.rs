//! The flags for keys of the configuration, generated from the rows of the keys.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use settings::keys::KEYS;
use settings::kind::Kind;
use settings::load::Override;
use settings::{Flag, FlagArgument, Key};

/// Flags that stand for keys. Their values are read and checked as those of `--set` are.
#[derive(Clone, Debug, Default)]
pub struct KeyFlags {
    /// The values that the flags set.
    pub overrides: Vec<Override>,
}

/// The keys that have a flag.
fn rows() -> impl Iterator<Item = (&'static Key, Flag)> {
    KEYS.iter().filter_map(|key| Some((key, key.flag?)))
}

fn argument(key: &Key, flag: Flag) -> Arg {
    let argument = Arg::new(flag.name)
        .long(flag.name.trim_start_matches('-'))
        .visible_aliases(flag.alias.map(|alias| alias.trim_start_matches('-')))
        .help(key.help())
        .hide(flag.heading.is_none())
        .help_heading(flag.heading);
    match flag.argument {
        FlagArgument::None { .. } => argument.action(ArgAction::SetTrue),
        FlagArgument::Toggle => argument
            .value_name("true|false")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true"),
        FlagArgument::Value(name) if key.kind == Kind::Inputs => {
            argument.value_name(name).action(ArgAction::Append)
        }
        FlagArgument::Value(name) => argument
            .value_name(name)
            .allow_negative_numbers(matches!(key.kind, Kind::Whole(_) | Kind::Real(_)))
            .allow_hyphen_values(matches!(key.kind, Kind::Size | Kind::SizeOrAuto)),
    }
}

impl Args for KeyFlags {
    fn augment_args(command: Command) -> Command {
        command.args(rows().map(|(key, flag)| argument(key, flag)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KeyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let read = |(key, flag): (&Key, Flag)| match flag.argument {
            FlagArgument::Value(_) if key.kind == Kind::Inputs => {
                let texts = matches.get_many::<String>(flag.name)?.cloned();
                let texts: Vec<String> = texts.collect();
                Some(Override::from_flags(flag.name, key.name, &texts))
            }
            FlagArgument::Value(_) => {
                let text = matches.get_one::<String>(flag.name)?;
                Some(Override::from_flag(flag.name, key.name, text))
            }
            FlagArgument::Toggle => {
                let text = matches.get_one::<String>(flag.name)?;
                Some(Override {
                    place: format!("{}={text}", flag.name),
                    ..Override::from_flag(flag.name, key.name, text)
                })
            }
            FlagArgument::None { sets, .. } => {
                let is_given = matches.get_flag(flag.name);
                is_given.then(|| Override::from_switch(flag.name, key.name, sets))
            }
        };
        let overrides = rows().filter_map(read).collect();
        Ok(KeyFlags { overrides })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
