//! The parts of a page in order, which become HTML or text.

use super::chart::Chart;
use super::records::Sample;
use crate::Table;
use serde::Serialize;

/// A page about one run, or two.
#[derive(Serialize)]
pub(super) struct Page {
    pub(super) title: String,
    /// A line below the title.
    pub(super) about: String,
    /// How each run ended, with the run's name.
    pub(super) endings: Vec<(String, Ending)>,
    /// Key figures, at the top.
    pub(super) facts: Vec<Fact>,
    pub(super) parts: Vec<Section>,
}

/// How a run ended, in a sentence or two.
#[derive(Serialize)]
pub(super) struct Ending {
    /// `good`, `bad` or `open`.
    pub(super) mood: &'static str,
    /// A few words.
    pub(super) headline: &'static str,
    /// The details.
    pub(super) detail: String,
}

/// A key figure.
#[derive(Serialize)]
pub(super) struct Fact {
    pub(super) name: &'static str,
    pub(super) value: String,
    /// A small text below it.
    pub(super) note: String,
}

/// A section with a heading.
#[derive(Serialize)]
pub(super) struct Section {
    pub(super) title: &'static str,
    pub(super) items: Vec<SectionItem>,
    /// Whether the text form has it too.
    #[serde(skip)]
    pub(super) in_text: bool,
}

/// An item of a section.
#[derive(Serialize)]
#[serde(tag = "kind", content = "body", rename_all = "snake_case")]
pub(super) enum SectionItem {
    /// A sentence.
    Say(String),
    Table(Table),
    Samples(Vec<Sample>),
    /// Pictures, side by side if there is room.
    Charts(Vec<Chart>),
    Bars(Vec<Bar>),
    /// A folded file: its name and text.
    File(&'static str, String),
    /// A picture that a run wrote, in its own frame, so that nothing in it can run or reach the page.
    Frame {
        document: String,
        /// Width over height.
        ratio: f64,
        /// JSON of what was live at moments: how far from the left they are, in percent, and texts.
        points: String,
        /// Where its plot begins and ends, in percent from the top and from the bottom.
        plot: (f64, f64),
    },
}

/// A bar of bytes by category.
#[derive(Serialize)]
pub(super) struct Bar {
    pub(super) name: &'static str,
    pub(super) total: String,
    pub(super) pieces: Vec<BarPiece>,
}

/// A category's part of a bar.
#[derive(Serialize)]
pub(super) struct BarPiece {
    pub(super) category: &'static str,
    pub(super) percent: f64,
    pub(super) bytes: String,
}

impl Section {
    /// A section of a page and of its text.
    pub(super) fn new(title: &'static str, items: Vec<SectionItem>) -> Section {
        Section {
            title,
            items,
            in_text: true,
        }
    }

    /// A section that the text form leaves out.
    pub(super) fn not_in_text(title: &'static str, items: Vec<SectionItem>) -> Section {
        Section {
            in_text: false,
            ..Section::new(title, items)
        }
    }
}

impl Page {
    /// The page as text: its sentences and tables.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        for (name, ending) in &self.endings {
            let name = if name.is_empty() {
                String::new()
            } else {
                format!("{name}: ")
            };
            text += &format!("{name}{}. {}\n", ending.headline, ending.detail);
        }
        for part in self.parts.iter().filter(|part| part.in_text) {
            text += &format!("\n{}\n", part.title);
            for item in &part.items {
                match item {
                    SectionItem::Say(sentence) => text += &format!("  {sentence}\n"),
                    SectionItem::Table(table) => text += &table.to_string(),
                    SectionItem::Samples(samples) => {
                        let lines = samples.iter();
                        text.extend(lines.map(|sample| format!("  {}\n", sample.line())));
                    }
                    _ => {}
                }
            }
        }
        text
    }
}
