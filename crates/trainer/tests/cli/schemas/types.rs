//! The types of the workspace, as their sources declare them.
//!
//! The crate `schemars` derives schemas too, but it would be six packages more in the first build, or a feature that builds
//! every crate a second time for tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use syn::parse::ParseStream;
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Expr, Fields, GenericArgument, Ident, Item, Lit, Meta, PathArguments, Token, Type,
    Visibility,
};

/// Crates whose types are written as JSON.
const CRATES: [&str; 7] = [
    "memory",
    "units",
    "model",
    "snapshots",
    "report",
    "planner",
    "trainer",
];

/// What a name stands for.
pub enum Declared {
    Struct(Struct),
    /// The names that the variants of an enum have in files.
    Names(Vec<String>),
    /// Another name for a type.
    Alias(Type),
    /// Its schema is not known, and why.
    Unknown(String),
}

pub struct Struct {
    pub about: String,
    /// The value of `kind`, where records of several kinds are told apart by it.
    pub kind: Option<String>,
    /// The name of the type's parameter.
    pub parameter: Option<String>,
    fields: Vec<Field>,
    /// The form that its file declares, if it does.
    pub version: Option<u32>,
}

pub struct Field {
    pub name: String,
    pub about: String,
    pub of: Type,
    /// It may be left out.
    is_skipped: bool,
    /// The struct whose fields stand in its place, and whether they may be left out.
    flat: Option<(String, bool)>,
}

/// All types by name. A public one goes before those of the same name that one file alone sees.
pub struct Types(BTreeMap<String, Vec<Found>>);

struct Found {
    file: PathBuf,
    is_public: bool,
    declared: Declared,
}

impl Types {
    pub fn read() -> Types {
        let mut types = Types(BTreeMap::new());
        for name in CRATES {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
            types.read_folder(&folder.join("src"));
        }
        types
    }

    fn read_folder(&mut self, folder: &Path) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                self.read_folder(&path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                self.read_file(&path);
            }
        }
    }

    fn read_file(&mut self, path: &Path) {
        let file = syn::parse_file(&std::fs::read_to_string(path).unwrap()).unwrap();
        let version = file.items.iter().find_map(version);
        for item in &file.items {
            for (name, declared) in declared(item, version) {
                self.0.entry(name).or_default().push(Found {
                    file: path.to_owned(),
                    is_public: is_public(item),
                    declared,
                });
            }
        }
    }

    pub fn get(&self, name: &str) -> &Declared {
        let all = self.0.get(name).map_or(&[][..], Vec::as_slice);
        let public: Vec<&Found> = all.iter().filter(|one| one.is_public).collect();
        let found: &Found = match (public.as_slice(), all) {
            ([one], _) => one,
            ([], [one]) => one,
            ([], []) => panic!("no schema is known for the type {name}"),
            _ => panic!("several types are called {name}"),
        };
        if let Declared::Unknown(why) = &found.declared {
            panic!("{name} in {}: {why}", found.file.display());
        }
        &found.declared
    }

    pub fn structure(&self, name: &str) -> &Struct {
        match self.get(name) {
            Declared::Struct(found) => found,
            _ => panic!("{name} is no struct"),
        }
    }

    /// The version that a struct's file declares, or the file of what is written in its place.
    pub fn version(&self, found: &Struct) -> Option<u32> {
        let flat = found.fields.iter().filter_map(|field| field.flat.as_ref());
        let mut of_flat = flat.map(|(of, _)| self.version(self.structure(of)));
        found
            .version
            .or_else(|| of_flat.find_map(|version| version))
    }

    /// The fields that a struct is written with, and whether each may be left out.
    pub fn fields<'a>(&'a self, found: &'a Struct) -> Vec<(&'a Field, bool)> {
        let mut all = Vec::new();
        for field in &found.fields {
            match &field.flat {
                None => all.push((field, field.is_skipped)),
                Some((of, is_optional)) => {
                    let within = self.fields(self.structure(of)).into_iter();
                    all.extend(within.map(|(field, may_lack)| (field, may_lack || *is_optional)));
                }
            }
        }
        all
    }
}

/// The form of what a file's types are written as, where an item says it.
fn version(item: &Item) -> Option<u32> {
    match item {
        Item::Const(constant) if constant.ident.to_string().ends_with("SCHEMA_VERSION") => {
            match &*constant.expr {
                Expr::Lit(literal) => number(&literal.lit),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Whether other files may name a type. Macros declare public ones.
fn is_public(item: &Item) -> bool {
    let visibility = match item {
        Item::Struct(found) => &found.vis,
        Item::Enum(found) => &found.vis,
        Item::Type(found) => &found.vis,
        _ => return true,
    };
    !matches!(visibility, Visibility::Inherited)
}

fn number(literal: &Lit) -> Option<u32> {
    match literal {
        Lit::Int(number) => number.base10_parse().ok(),
        _ => None,
    }
}

fn declared(item: &Item, version: Option<u32>) -> Vec<(String, Declared)> {
    match item {
        Item::Struct(found) => {
            let declared = structure(found, version).map(Declared::Struct);
            vec![(
                found.ident.to_string(),
                declared.unwrap_or_else(Declared::Unknown),
            )]
        }
        Item::Enum(found) => {
            let declared = names(found).map(Declared::Names);
            vec![(
                found.ident.to_string(),
                declared.unwrap_or_else(Declared::Unknown),
            )]
        }
        Item::Type(found) => vec![(found.ident.to_string(), Declared::Alias(*found.ty.clone()))],
        Item::Macro(found) => match found
            .mac
            .path
            .segments
            .last()
            .unwrap()
            .ident
            .to_string()
            .as_str()
        {
            "choices" => found.mac.parse_body_with(choices).unwrap(),
            "each" => found.mac.parse_body_with(each).unwrap(),
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}

fn structure(found: &syn::ItemStruct, version: Option<u32>) -> Result<Struct, String> {
    let Fields::Named(named) = &found.fields else {
        return Err("its fields have no names".into());
    };
    let of_type = serde(&found.attrs)?;
    let fields: Result<Vec<_>, String> = named.named.iter().map(field).collect();
    let mut parameters = found.generics.type_params();
    Ok(Struct {
        about: about(&found.attrs),
        kind: value(&of_type, "tag").and(value(&of_type, "rename")),
        parameter: parameters.next().map(|one| one.ident.to_string()),
        fields: fields?.into_iter().flatten().collect(),
        version,
    })
}

fn names(found: &syn::ItemEnum) -> Result<Vec<String>, String> {
    let case = value(&serde(&found.attrs)?, "rename_all");
    let name = |variant: &syn::Variant| {
        let written = variant.ident.to_string();
        match (&variant.fields, case.as_deref()) {
            (Fields::Unit, Some("lowercase")) => Ok(written.to_lowercase()),
            (Fields::Unit, Some("snake_case")) => Ok(snake_case(&written)),
            _ => Err("its values are more than words in lower case".into()),
        }
    };
    found.variants.iter().map(name).collect()
}

/// What the macro `choices!` declares: an enum whose variants stand beside their names.
fn choices(input: ParseStream) -> syn::Result<Vec<(String, Declared)>> {
    Attribute::parse_outer(input)?;
    let name: Ident = input.parse()?;
    let names = variants(input)?.into_iter().map(|(_, name)| name).collect();
    Ok(vec![(name.to_string(), Declared::Names(names))])
}

/// What the macro `each!` declares: an enum, and a struct with a value for each of its variants.
fn each(input: ParseStream) -> syn::Result<Vec<(String, Declared)>> {
    Attribute::parse_outer(input)?;
    let names: Ident = input.parse()?;
    input.parse::<Token![,]>()?;
    let of_values = Attribute::parse_outer(input)?;
    let values: Ident = input.parse()?;
    let variants = variants(input)?;
    let field = |(about, name): &(String, String)| Field {
        name: name.clone(),
        about: about.clone(),
        of: syn::parse_str("T").unwrap(),
        is_skipped: false,
        flat: None,
    };
    let declared = Struct {
        about: about(&of_values),
        kind: None,
        parameter: Some("T".into()),
        fields: variants.iter().map(field).collect(),
        version: None,
    };
    let all = variants.into_iter().map(|(_, name)| name).collect();
    Ok(vec![
        (names.to_string(), Declared::Names(all)),
        (values.to_string(), Declared::Struct(declared)),
    ])
}

/// Variants in braces, each with its documentation and the name that it has in files.
fn variants(input: ParseStream) -> syn::Result<Vec<(String, String)>> {
    let content;
    syn::braced!(content in input);
    let variants = Punctuated::<syn::Variant, Token![,]>::parse_terminated(&content)?;
    let named = variants.iter().map(|variant| {
        let (_, name) = variant
            .discriminant
            .as_ref()
            .expect("a name stands beside a variant");
        let name = match name {
            Expr::Lit(name) => text(&name.lit).unwrap(),
            Expr::Path(name) => name.path.get_ident().unwrap().to_string(),
            _ => panic!("a variant's name is a word"),
        };
        (about(&variant.attrs), name)
    });
    Ok(named.collect())
}

/// A field; none if it is never written.
fn field(field: &syn::Field) -> Result<Option<Field>, String> {
    let of_field = serde(&field.attrs)?;
    Ok((!has(&of_field, "skip")).then(|| Field {
        name: field.ident.as_ref().unwrap().to_string(),
        about: about(&field.attrs),
        of: field.ty.clone(),
        is_skipped: has(&of_field, "skip_serializing_if"),
        flat: has(&of_field, "flatten").then(|| inner(&field.ty)),
    }))
}

/// The name of a type, and whether it is that of an option.
fn inner(of: &Type) -> (String, bool) {
    if let Type::Reference(of) = of {
        return inner(&of.elem);
    }
    let Type::Path(path) = of else {
        panic!("only structs stand in another's place");
    };
    let last = path.path.segments.last().unwrap();
    match &last.arguments {
        PathArguments::AngleBracketed(all) if last.ident == "Option" => match &all.args[0] {
            GenericArgument::Type(of) => (inner(of).0, true),
            _ => panic!("an option is of a type"),
        },
        _ => (last.ident.to_string(), false),
    }
}

/// What serde is told of a type or a field. What this file does not know may change what is written, and is an error.
fn serde(attributes: &[Attribute]) -> Result<Vec<Meta>, String> {
    const KNOWN: [&str; 8] = [
        "default",
        "deny_unknown_fields",
        "flatten",
        "rename",
        "rename_all",
        "skip",
        "skip_serializing_if",
        "tag",
    ];
    let mut all = Vec::new();
    for attribute in attributes.iter().filter(|one| one.path().is_ident("serde")) {
        let list = attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
        all.extend(list.unwrap());
    }
    let unknown = all
        .iter()
        .map(|one| one.path().get_ident().unwrap().to_string());
    match unknown
        .into_iter()
        .find(|name| !KNOWN.contains(&name.as_str()))
    {
        Some(name) => Err(format!("what serde's `{name}` writes is not known")),
        None => Ok(all),
    }
}

fn has(all: &[Meta], name: &str) -> bool {
    all.iter().any(|one| one.path().is_ident(name))
}

fn value(all: &[Meta], name: &str) -> Option<String> {
    let found = all.iter().find(|one| one.path().is_ident(name))?;
    match &found.require_name_value().ok()?.value {
        Expr::Lit(literal) => text(&literal.lit),
        _ => None,
    }
}

fn text(literal: &Lit) -> Option<String> {
    match literal {
        Lit::Str(text) => Some(text.value()),
        _ => None,
    }
}

/// The documentation, in one line.
fn about(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter(|one| one.path().is_ident("doc"));
    let lines = lines.filter_map(|one| match &one.meta.require_name_value().ok()?.value {
        Expr::Lit(line) => text(&line.lit),
        _ => None,
    });
    let lines: Vec<String> = lines
        .map(|line| line.trim().replace("[`", "`").replace("`]", "`"))
        .collect();
    lines.join(" ").trim().to_owned()
}

fn snake_case(name: &str) -> String {
    let mut written = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !written.is_empty() {
            written.push('_');
        }
        written.extend(letter.to_lowercase());
    }
    written
}
