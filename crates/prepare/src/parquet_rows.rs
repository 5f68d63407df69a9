//! Parquet: a document in each row, with the fields of JSONL as columns.

use crate::PrepareError;
use crate::Result;
use crate::item::{Content, Item};
use crate::record_room::RecordRoom;
use crate::records::{DOCUMENTS, Document, FIELDS, LISTS, Record};
use parquet::errors::ParquetError;
use parquet::file::reader::FileReader;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::Value;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

pub(crate) struct ParquetRows {
    file: Arc<str>,
    rows: RowIter<'static>,
    room: RecordRoom,
    /// Number of rows read.
    number: u64,
}

impl ParquetRows {
    pub(crate) fn open(path: &Path, file: Arc<str>, room: RecordRoom) -> Result<ParquetRows> {
        let opened = File::open(path).map_err(PrepareError::unreadable(&file))?;
        let bad = |reason: String| PrepareError::BadParquet {
            file: file.to_string(),
            reason,
        };
        // A row group whose rows are too long on average. Reading a row takes its memory before its size is known.
        let mut too_long = None;
        let rows = shielded(|| {
            let reader = SerializedFileReader::new(opened)?;
            let schema = reader.metadata().file_metadata().schema();
            let fields = schema.get_fields();
            let wanted = fields.iter().filter(|field| {
                let name = field.name();
                FIELDS.contains(&name)
            });
            let wanted: Vec<_> = wanted.cloned().collect();
            let only_beside = ["tools", "system", "input"];
            if wanted
                .iter()
                .all(|field| only_beside.contains(&field.name()))
            {
                let names: Vec<&str> = fields.iter().map(|field| field.name()).collect();
                let names = names.join(", ");
                return Err(ParquetError::General(format!(
                    "it has no column of {DOCUMENTS}; it has {names}"
                )));
            }
            too_long = reader.metadata().row_groups().iter().position(|group| {
                let mut columns = group.columns().iter();
                columns.any(|column| {
                    let bytes = column.uncompressed_size().max(0) / group.num_rows().max(1);
                    let name = &*column.column_path().parts()[0];
                    FIELDS.contains(&name) && !room.has(bytes as usize)
                })
            });
            let alone = Type::group_type_builder(schema.name()).with_fields(wanted);
            let alone = alone.build()?;
            RowIter::from_file_into(Box::new(reader)).project(Some(alone))
        });
        let rows = rows.map_err(bad)?;
        if let Some(group) = too_long {
            return Err(room.refuse(&file, format!("a row of row group {}", group + 1)));
        }
        Ok(ParquetRows {
            file,
            rows,
            room,
            number: 0,
        })
    }

    pub(crate) fn next(&mut self) -> Result<Option<Item>> {
        let row = shielded(|| self.rows.next().transpose());
        let row = row.map_err(|reason| PrepareError::BadParquet {
            file: self.file.to_string(),
            reason: format!("{reason} (after row {})", self.number),
        })?;
        self.number += 1;
        let number = self.number;
        let Some(document) = row.map(document) else {
            return Ok(None);
        };
        match self.room.has(document.bytes()) {
            true => Ok(Some(Item::whole(
                &self.file,
                Content::Row { number, document },
            ))),
            false => Err(self.room.refuse(&self.file, format!("row {number}"))),
        }
    }
}

/// The document of a row, as of a line of JSONL. Text columns that the document does not use may have any type.
fn document(row: Row) -> Document {
    let mut columns = serde_json::Map::new();
    for (name, field) in row.into_columns() {
        let value = match field {
            Field::Str(text) => Ok(Value::String(text)),
            field => json(&field),
        };
        let value = match value {
            Ok(value) => value,
            Err(reason) if LISTS.contains(&&name[..]) => {
                return Document::Neither(format!("its `{name}` {reason}"));
            }
            // Refused as not text, but only if the document uses it.
            Err(_) => Value::Bool(false),
        };
        columns.insert(name, value);
    }
    let record = serde_json::from_value::<Record>(Value::Object(columns));
    record
        .expect("a field of a record takes any value")
        .document()
}

/// A message's fields as JSON. Null fields are left out, because each row has a null for every field of other rows.
fn json(field: &Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => (*value).into(),
        Field::Int(value) => (*value).into(),
        Field::Long(value) => (*value).into(),
        Field::Double(value) => (*value).into(),
        Field::Str(text) => text.as_str().into(),
        Field::ListInternal(list) => list.elements().iter().map(json).collect::<Result<_, _>>()?,
        Field::Group(fields) => {
            let fields = fields
                .get_column_iter()
                .filter(|(_, field)| **field != Field::Null);
            let fields = fields.map(|(name, field)| Ok((name.clone(), json(field)?)));
            Value::Object(fields.collect::<Result<_, String>>()?)
        }
        _ => {
            return Err("holds more than texts, numbers and lists".into());
        }
    })
}

/// Calls the library and catches its panics, because it does not check all of a malformed file.
fn shielded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    let result = catch_unwind(AssertUnwindSafe(read));
    let result = result.unwrap_or_else(|_| Err(ParquetError::General("it is malformed".into())));
    result.map_err(|error| match error {
        ParquetError::General(reason) => reason,
        other => other.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_too_long_are_refused_unread() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../trainer/tests/golden/prepare/text.parquet"
        );
        let open = |most| ParquetRows::open(Path::new(path), "a".into(), RecordRoom::of(most));
        let refused = open(1)
            .err()
            .expect("a row has more than a byte")
            .to_string();
        assert!(refused.contains("a row of row group 1"), "{refused}");
        open(10_000).expect("no row has so many bytes");
    }
}
