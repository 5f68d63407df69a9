//! How many tokens a chunk of the output head has: `memory.head_chunk`.

use super::schema::AUTO;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// Tokens in a chunk of the output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadChunk {
    /// To be chosen from what chunks cost, before a run is planned.
    Auto,
    /// So many.
    Tokens(usize),
}

impl HeadChunk {
    /// What `auto` stands for where nothing was chosen: on the processor, and where no chunk is known to fit.
    pub const DEFAULT_TOKENS: usize = 512;

    /// The tokens of a chunk; [`HeadChunk::DEFAULT_TOKENS`] as long as nothing was chosen.
    pub fn tokens(self) -> usize {
        match self {
            HeadChunk::Auto => HeadChunk::DEFAULT_TOKENS,
            HeadChunk::Tokens(tokens) => tokens,
        }
    }
}

impl Serialize for HeadChunk {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            HeadChunk::Auto => serializer.serialize_str(AUTO),
            HeadChunk::Tokens(tokens) => serializer.serialize_u64(*tokens as u64),
        }
    }
}

impl<'de> Deserialize<'de> for HeadChunk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = HeadChunk;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{AUTO}, or a whole number of at least 1")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<HeadChunk, E> {
                match text {
                    AUTO => Ok(HeadChunk::Auto),
                    other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
                }
            }

            fn visit_u64<E: de::Error>(self, tokens: u64) -> Result<HeadChunk, E> {
                match usize::try_from(tokens) {
                    Ok(tokens) if tokens > 0 => Ok(HeadChunk::Tokens(tokens)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(tokens), &self)),
                }
            }

            fn visit_i64<E: de::Error>(self, tokens: i64) -> Result<HeadChunk, E> {
                match u64::try_from(tokens) {
                    Ok(tokens) => self.visit_u64(tokens),
                    Err(_) => Err(E::invalid_value(de::Unexpected::Signed(tokens), &self)),
                }
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
