//! JSON Schemas of what the program writes for other programs: made of the types, and told apart by version.

mod types;

use crate::workplace::Workplace;
use serde_json::{Map, Value, json};
use std::path::Path;
use syn::{GenericArgument, PathArguments, Type};
use types::{Declared, Struct, Types};

/// What is described: the schema's file, what it is of, and the types that it may be.
const SCHEMAS: [(&str, &str, &[&str]); 5] = [
    (
        "plan",
        "plan.json, and what `trainer plan --json` prints",
        &["PlanOf"],
    ),
    (
        "metrics",
        "a line of metrics.jsonl",
        &[
            "RunRecord",
            "StepRecord",
            "EvalRecord",
            "SampleRecord",
            "CheckpointRecord",
            "ResumeRecord",
            "RanksRecord",
            "EndRecord",
        ],
    ),
    (
        "bench",
        "what `trainer bench --json` prints",
        &["BenchReport"],
    ),
    (
        "check",
        "what `trainer check --json` prints",
        &["Comparison"],
    ),
    ("oom", "oom.json", &["OomReport"]),
];

/// Makes schemas of types.
struct Describing<'a> {
    types: &'a Types,
    definitions: Map<String, Value>,
}

impl Describing<'_> {
    /// The schema of a type. `argument` is what its own parameter stands for.
    fn of(&mut self, of: &Type, argument: Option<&Value>) -> Value {
        let path = match of {
            Type::Reference(reference) => return self.of(&reference.elem, argument),
            Type::Slice(slice) => return array(self.of(&slice.elem, argument)),
            Type::Path(path) => path.path.segments.last().unwrap(),
            _ => panic!("no schema is known for a type of this kind"),
        };
        let arguments = match &path.arguments {
            PathArguments::AngleBracketed(all) => all.args.iter().collect(),
            _ => Vec::new(),
        };
        let mut of_arguments: Vec<Value> = Vec::new();
        for one in arguments {
            if let GenericArgument::Type(one) = one {
                of_arguments.push(self.of(one, argument));
            }
        }
        let name = path.ident.to_string();
        match (name.as_str(), of_arguments.as_slice(), argument) {
            ("bool", ..) => json!({"type": "boolean"}),
            ("u8" | "u32" | "u64" | "usize", ..) => json!({"type": "integer", "minimum": 0}),
            ("i64", ..) => json!({"type": "integer"}),
            // A number that is not finite is written as null.
            ("f32" | "f64", ..) => json!({"type": ["number", "null"]}),
            ("str" | "String" | "PathBuf", ..) => json!({"type": "string"}),
            ("Vec" | "BTreeSet", [of], _) => array(of.clone()),
            ("Option", [of], _) => or_null(of.clone()),
            ("BTreeMap", [_, of], _) => json!({"type": "object", "additionalProperties": of}),
            // These have a `Serialize` of their own.
            ("Layer", ..) => json!({"type": ["integer", "null"], "minimum": 0}),
            ("ReplayCounts", ..) => {
                json!({"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}})
            }
            ("Zero", ..) => json!({"enum": units::Zero::ALL.map(units::Zero::stage)}),
            ("T", _, Some(argument)) => argument.clone(),
            (_, of, _) => self.declared(&name, of.first()),
        }
    }

    fn declared(&mut self, name: &str, argument: Option<&Value>) -> Value {
        let types = self.types;
        match types.get(name) {
            Declared::Alias(of) => self.of(of, None),
            Declared::Names(names) => json!({"enum": names}),
            Declared::Unknown(why) => unreachable!("{name} was refused: {why}"),
            Declared::Struct(found) if found.parameter.is_some() => self.object(found, argument),
            Declared::Struct(found) => {
                if !self.definitions.contains_key(name) {
                    let described = self.object(found, None);
                    self.definitions.insert(name.to_owned(), described);
                }
                json!({"$ref": format!("#/$defs/{name}")})
            }
        }
    }

    fn object(&mut self, found: &Struct, argument: Option<&Value>) -> Value {
        let (mut properties, mut required) = (Map::new(), Vec::new());
        if let Some(kind) = &found.kind {
            properties.insert("kind".into(), json!({"const": kind}));
            required.push("kind".to_owned());
        }
        let types = self.types;
        for (field, may_lack) in types.fields(found) {
            let mut described = match (field.name.as_str(), types.version(found)) {
                ("schema_version", Some(version)) => json!({"const": version}),
                _ => self.of(&field.of, argument),
            };
            if !field.about.is_empty() {
                described["description"] = Value::from(field.about.as_str());
            }
            properties.insert(field.name.clone(), described);
            if !may_lack {
                required.push(field.name.clone());
            }
        }
        json!({
            "description": found.about,
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    }
}

fn array(of: Value) -> Value {
    json!({"type": "array", "items": of})
}

fn or_null(mut of: Value) -> Value {
    match &of["type"] {
        Value::String(name) => {
            of["type"] = json!([name, "null"]);
            of
        }
        Value::Array(_) => of,
        _ => json!({"anyOf": [of, {"type": "null"}]}),
    }
}

/// The schema of what may be any of these types. The first one's file declares its version.
fn schema(types: &Types, title: &str, names: &[&str]) -> Value {
    let mut describing = Describing {
        types,
        definitions: Map::new(),
    };
    let any: Vec<Value> = names
        .iter()
        .map(|name| describing.declared(name, None))
        .collect();
    let version = types.version(types.structure(names[0]));
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "version": version.expect("the file declares it"),
    });
    match any.as_slice() {
        [only] => schema["$ref"] = only["$ref"].clone(),
        several => schema["anyOf"] = json!(several),
    }
    schema["$defs"] = Value::from(describing.definitions);
    schema
}

/// A schema without words for people: two that are equal so describe the same.
fn without_words(schema: &Value) -> Value {
    match schema {
        // The fields of a type may be called so too.
        Value::Object(fields) => {
            let kept = fields
                .iter()
                .filter(|(name, value)| *name != "description" || !value.is_string());
            kept.map(|(name, value)| (name.clone(), without_words(value)))
                .collect()
        }
        Value::Array(items) => items.iter().map(without_words).collect(),
        other => other.clone(),
    }
}

/// Whether a schema may take the place of the one that was there: what it describes is the same, or its version is newer.
fn may_replace(was: &Value, is: &Value) -> bool {
    without_words(was) == without_words(is) || was["version"].as_u64() < is["version"].as_u64()
}

#[test]
fn schemas_are_those_of_the_types() {
    let (place, types) = (Workplace::new(), Types::read());
    for (name, title, names) in SCHEMAS {
        let described = schema(&types, title, names);
        let file = format!("schemas/{name}.json");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(&file);
        let text = format!("{described:#}\n");
        let committed = std::fs::read_to_string(&path).unwrap_or("{}".into());
        if committed != text {
            let was: Value = serde_json::from_str(&committed).unwrap();
            assert!(
                may_replace(&was, &described),
                "{file}: fields of {names:?} have changed: raise SCHEMA_VERSION beside {}, then write the file anew with \
                 BLESS_SCHEMAS=1",
                names[0]
            );
            assert!(
                std::env::var_os("BLESS_SCHEMAS").is_some(),
                "{file} is not that of the types: BLESS_SCHEMAS=1 writes it anew"
            );
            std::fs::write(&path, &text).unwrap();
            continue;
        }
        let printed = place.trainer(&format!("schema {name}")).succeeds().stdout;
        assert!(printed == committed, "the binary has another {file}");
    }
}

/// What is said about a field may change; its name, its type and whether it may be left out may not.
#[test]
fn a_changed_field_takes_a_newer_version() {
    let was = schema(&Types::read(), "oom.json", &["OomReport"]);
    let changed = |pointer: &str, value: Value| {
        let mut changed = was.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        changed
    };
    let field = "/$defs/OomReport/properties/space";
    assert_ne!(was.pointer(field).unwrap()["description"], "words");
    assert!(may_replace(
        &was,
        &changed(&format!("{field}/description"), "words".into())
    ));
    let of_another_type = changed(field, json!({"type": "string"}));
    assert!(!may_replace(&was, &of_another_type));
    assert!(!may_replace(
        &was,
        &changed("/$defs/OomReport/required/0", "space".into())
    ));
    let mut newer = of_another_type.clone();
    newer["version"] = json!(was["version"].as_u64().unwrap() + 1);
    assert!(may_replace(&was, &newer) && !may_replace(&newer, &was));
}
