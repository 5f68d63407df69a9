//! Tables for people.

use memory::{ByCategory, ByPhase, Category, Phase, format_bytes};
use serde::Serialize;

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A column: its head, its alignment, and what it says of an item.
pub type Column<'a, T> = (&'a str, Align, &'a dyn Fn(&T) -> String);

/// Rows of text in aligned columns.
#[derive(Serialize)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with columns of words, followed by columns of numbers.
    pub fn new(words: &[&str], numbers: &[&str]) -> Table {
        let words = words.iter().map(|name| (*name, Align::Left));
        let numbers = numbers.iter().map(|name| (*name, Align::Right));
        Table::of(&words.chain(numbers).collect::<Vec<_>>())
    }

    /// A table with these column heads.
    pub fn of(columns: &[(&str, Align)]) -> Table {
        Table {
            columns: columns
                .iter()
                .map(|(name, align)| ((*name).to_string(), *align))
                .collect(),
            rows: Vec::new(),
        }
    }

    /// A table with a row for each item.
    pub fn of_items<'a, T: 'a>(
        items: impl IntoIterator<Item = &'a T>,
        columns: &[Column<T>],
    ) -> Table {
        let heads = columns.iter().map(|(head, align, _)| (*head, *align));
        let mut table = Table::of(&heads.collect::<Vec<_>>());
        for item in items {
            table.row(columns.iter().map(|(.., cell)| cell(item)));
        }
        table
    }

    /// The table without columns that say nothing in any row.
    pub fn without_empty_columns(mut self) -> Table {
        for column in (0..self.columns.len()).rev() {
            if self.rows.iter().all(|row| row[column].is_empty()) {
                self.columns.remove(column);
                self.rows
                    .iter_mut()
                    .for_each(|row| drop(row.remove(column)));
            }
        }
        self
    }

    /// The table in Markdown.
    pub fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let escaped = |text: &String| text.replace('|', "\\|");
        let heads = self.columns.iter().map(|(name, _)| escaped(name)).collect();
        let rules = self.columns.iter().map(|(_, align)| match align {
            Align::Left => "---",
            Align::Right => "---:",
        });
        let rules: Vec<&str> = rules.collect();
        let rows = self
            .rows
            .iter()
            .map(|row| line(row.iter().map(escaped).collect()));
        let rule = format!("|{}|\n", rules.join("|"));
        [line(heads), rule].into_iter().chain(rows).collect()
    }

    /// Adds a row; missing cells are empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.columns.len(), String::new());
        self.rows.push(row);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let heads: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let widths: Vec<usize> = (0..heads.len())
            .map(|column| {
                let cells = self.rows.iter().map(|row| row[column].chars().count());
                cells
                    .chain([heads[column].chars().count()])
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        for row in [&heads].into_iter().chain(&self.rows) {
            let mut line = String::new();
            for ((cell, width), (_, align)) in row.iter().zip(&widths).zip(&self.columns) {
                let padded = match align {
                    Align::Left => format!("{cell:<width$}"),
                    Align::Right => format!("{cell:>width$}"),
                };
                line = if line.is_empty() {
                    format!("  {padded}")
                } else {
                    format!("{line}  {padded}")
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Memory by category and by phase, planned and, if there was a run, measured.
pub fn memory_table(
    planned: (&ByCategory, &ByPhase<u64>),
    measured: Option<(&ByCategory, &ByPhase<u64>)>,
) -> Table {
    let mut columns = vec![("memory", Align::Left), ("planned", Align::Right)];
    if measured.is_some() {
        columns.extend([("measured", Align::Right), ("difference", Align::Right)]);
    }
    let mut table = Table::of(&columns);
    let mut row = |name: String, planned: u64, measured: Option<u64>| {
        let mut cells = vec![name, format_bytes(planned)];
        if let Some(measured) = measured {
            cells.extend([
                format_bytes(measured),
                format!("{} B", i128::from(measured) - i128::from(planned)),
            ]);
        }
        table.row(cells);
    };
    row(
        "peak".into(),
        planned.0.total(),
        measured.map(|measured| measured.0.total()),
    );
    for category in Category::ALL {
        let name = format!("  {}", category.name());
        row(
            name,
            planned.0.get(category),
            measured.map(|measured| measured.0.get(category)),
        );
    }
    for phase in Phase::ALL {
        let measured = measured.map(|measured| measured.1.get(phase));
        if planned.1.get(phase) > 0 || measured.is_some_and(|bytes| bytes > 0) {
            row(
                format!("peak in {}", phase.name()),
                planned.1.get(phase),
                measured,
            );
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["name"], &["bytes"]);
        table.row(["gate", "1"]);
        table.row(["attention", "12345678"]);
        assert_eq!(
            table.to_string(),
            "  name          bytes\n  gate              1\n  attention  12345678\n"
        );
    }

    #[test]
    fn planned_and_measured_stand_side_by_side() {
        let planned = ByCategory {
            parameter: 1 << 20,
            ..ByCategory::default()
        };
        let measured = ByCategory {
            parameter: 1 << 20,
            temporary: 512,
            ..ByCategory::default()
        };
        let phases = ByPhase {
            forward: 1 << 20,
            ..ByPhase::default()
        };
        let text = memory_table((&planned, &phases), Some((&measured, &phases))).to_string();
        assert!(text.contains("temporary"), "{text}");
        assert!(text.lines().nth(1).unwrap().ends_with("512 B"), "{text}");
        assert!(
            text.lines()
                .last()
                .unwrap()
                .trim_start()
                .starts_with("peak in forward"),
            "{text}"
        );
    }
}
