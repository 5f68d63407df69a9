//! JSON objects in which no name may occur twice.

use serde::de::value::MapAccessDeserializer;
use serde::de::{
    Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor,
};
use serde_json::Value;
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

/// Names and values in the order of the text. Of two equal names, serde's maps would silently keep the last; another
/// reader may keep the first.
pub(crate) struct Unique<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = Unique<V>;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique<V>, A::Error> {
                let (mut entries, mut seen) = (Vec::new(), Seen::default());
                while let Some(name) = map.next_key::<String>()? {
                    seen.first(&name)?;
                    entries.push((name, map.next_value()?));
                }
                Ok(Unique(entries))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

/// The names so far.
#[derive(Default)]
pub(crate) struct Seen(HashSet<String>);

impl Seen {
    pub(crate) fn first<E: Error>(&mut self, name: &str) -> Result<(), E> {
        match self.0.insert(name.to_owned()) {
            true => Ok(()),
            false => Err(E::custom(format_args!("`{name}` is there twice"))),
        }
    }
}

/// Reads JSON in which no object has a name twice, at any depth. Which of two values counts would be a guess.
///
/// # Errors
/// Not JSON, a name that is there twice, or not of this type.
pub fn unique_json<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    let UniqueValue(value) = serde_json::from_str(text)?;
    serde_json::from_value(value)
}

/// Any value, without objects that have a name twice.
struct UniqueValue(Value);

impl<'de> Deserialize<'de> for UniqueValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = UniqueValue;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("a JSON value")
            }

            fn visit_unit<E: Error>(self) -> Result<UniqueValue, E> {
                Ok(UniqueValue(Value::Null))
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<UniqueValue, E> {
                Ok(UniqueValue(value.into()))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<UniqueValue, E> {
                Ok(UniqueValue(value.into()))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<UniqueValue, E> {
                Ok(UniqueValue(value.into()))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<UniqueValue, E> {
                Ok(UniqueValue(value.into()))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<UniqueValue, E> {
                Ok(UniqueValue(text.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<UniqueValue, A::Error> {
                let mut list = Vec::new();
                while let Some(UniqueValue(item)) = items.next_element()? {
                    list.push(item);
                }
                Ok(UniqueValue(list.into()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<UniqueValue, A::Error> {
                let Unique(entries) = Unique::deserialize(MapAccessDeserializer::new(map))?;
                let entries = entries
                    .into_iter()
                    .map(|(name, UniqueValue(value))| (name, value));
                Ok(UniqueValue(Value::Object(entries.collect())))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

#[cfg(test)]
mod tests {
    use super::unique_json;
    use serde_json::Value;

    #[test]
    fn values_are_those_of_serde_and_names_that_are_there_twice_are_refused() {
        let text =
            r#"{"a": [1, -2, 2.5, true, null, "t"], "b": {"a": {}}, "z": 18446744073709551615}"#;
        let read: Value = unique_json(text).unwrap();
        assert_eq!(read, serde_json::from_str::<Value>(text).unwrap());
        for twice in [
            r#"{"a": 1, "a": 1}"#,
            r#"[{"b": {"a": 1, "c": 2, "a": 3}}]"#,
        ] {
            let message = unique_json::<Value>(twice).unwrap_err().to_string();
            assert!(
                message.contains("`a` is there twice at line 1"),
                "{message}"
            );
        }
        unique_json::<Value>("{\"a\": 1} x").unwrap_err();
    }
}
