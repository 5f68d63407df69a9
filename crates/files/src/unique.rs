//! JSON objects in which no name may occur twice.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
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
