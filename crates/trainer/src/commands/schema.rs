//! The `schema` command: prints the JSON Schema of what programs read.

use crate::failure::Result;
use crate::stdout::print;
use clap::Args;
use clap::builder::PossibleValuesParser;

macro_rules! schemas {
    ($($name:literal),+) => {
        [$(($name, include_str!(concat!("../../schemas/", $name, ".json")))),+]
    };
}

/// Schemas by name. A test holds them to the types that are written.
const SCHEMAS: [(&str, &str); 5] = schemas!["plan", "metrics", "bench", "check", "oom"];

/// Flags of `schema`.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// plan.json, a line of metrics.jsonl, bench --json, check --json, or oom.json
    #[arg(value_parser = PossibleValuesParser::new(SCHEMAS.map(|(name, _)| name)))]
    pub name: String,
}

/// Prints a schema.
///
/// # Errors
/// Those of standard output.
pub(crate) fn schema(args: &SchemaArgs) -> Result {
    let found = SCHEMAS.iter().find(|(name, _)| *name == args.name);
    let (_, schema) = found.expect("the command line takes these names alone");
    print(schema)
}
