//! Writes `report.html`: a page about one run, or two beside each other, which needs no network.
//!
//! `run_files.rs` reads the files that a run directory has. `single.rs` and `comparison.rs` make the parts of a page
//! from them, and `recorded.rs` those of a memory snapshot. A template, which escapes everything, makes HTML from these parts, or they become text.

mod chart;
mod comparison;
mod configuration;
mod ending;
mod error;
mod figures;
mod history;
mod ranks;
mod recorded;
mod records;
mod run_files;
mod single;
mod timeline;
mod view;

#[cfg(test)]
pub(crate) use chart::FRAME as PAGE_FRAME;
pub use error::PageError;
pub use recorded::{RESERVED_ROWS, SNAPSHOT_SUBTITLE, SnapshotPage, of_snapshot};
use run_files::RunFiles;
use serde_json::Value;
use std::path::{Path, PathBuf};
use view::Page;

/// The page's name in a run directory.
const NAME: &str = "report.html";

/// Writes the page of a run to a file, or into its directory, with what the run would need with other settings; returns
/// the path. `others` plans these for a configuration and the run's plan; its fields `strategies` and `effects` are
/// used.
///
/// # Errors
/// [`PageError`].
pub fn write(
    run_dir: &Path,
    file: Option<&Path>,
    others: impl FnOnce(&str, &Value) -> Option<Value>,
) -> Result<PathBuf, PageError> {
    let mut run = RunFiles::read(run_dir)?;
    // The plans of older runs have these fields.
    let lacks_others = run.plan.is_object() && run.plan["strategies"].is_null();
    let planned = lacks_others.then(|| others(&run.config_text, &run.plan));
    if let Some(mut planned) = planned.flatten() {
        for name in ["strategies", "effects"] {
            run.plan[name] = planned[name].take();
        }
    }
    put(&single::page(&run), file.unwrap_or(&run_dir.join(NAME)))
}

/// Writes the page that compares two runs to a file, or to `report-vs-A.html` in B; returns the path.
///
/// # Errors
/// [`PageError`].
pub fn write_comparison(a: &Path, b: &Path, file: Option<&Path>) -> Result<PathBuf, PageError> {
    let (a, b) = (RunFiles::read(a)?, RunFiles::read(b)?);
    let default = b.folder.join(format!("report-vs-{}.html", a.name()));
    put(&comparison::page(&a, &b), file.unwrap_or(&default))
}

/// The end of a run, and its memory in tables, as text.
///
/// # Errors
/// [`PageError`].
pub fn text(run_dir: &Path) -> Result<String, PageError> {
    Ok(single::page(&RunFiles::read(run_dir)?).text())
}

/// The differences between two runs in tables, as text.
///
/// # Errors
/// [`PageError`].
pub fn text_of_comparison(a: &Path, b: &Path) -> Result<String, PageError> {
    Ok(comparison::page(&RunFiles::read(a)?, &RunFiles::read(b)?).text())
}

fn put(page: &Page, file: &Path) -> Result<PathBuf, PageError> {
    std::fs::write(file, html(page)?).map_err(|source| PageError::Write {
        path: file.into(),
        source,
    })?;
    Ok(file.into())
}

fn html(page: &Page) -> Result<String, minijinja::Error> {
    let mut templates = minijinja::Environment::new();
    // Templates that end in .html are escaped; style and script are our own.
    templates.add_template("page.html", include_str!("page.html"))?;
    templates.add_template("style.css", include_str!("style.css"))?;
    templates.add_template("script.js", include_str!("script.js"))?;
    templates
        .get_template("page.html")?
        .render(minijinja::value::Serde(page))
}

#[cfg(test)]
mod tests {
    use super::*;
    use view::{Section, SectionItem};

    /// Folders, tensors and models can have any names.
    #[test]
    fn everything_is_escaped() {
        let evil = "\"><script>alert('x')</script>";
        let mut table = crate::Table::new(&[evil], &[]);
        table.row([evil]);
        let line = chart::Line {
            name: evil.into(),
            values: vec![(1.0, Some(1.0))],
            look: chart::Look::Evaluations(0),
        };
        let sample = serde_json::json!({ "step": evil, "prompt": evil, "text": evil });
        let charts = chart::curves(evil, 1, false, &[line], &[])
            .into_iter()
            .collect();
        let page = Page {
            title: evil.into(),
            about: evil.into(),
            endings: Vec::new(),
            facts: vec![view::Fact {
                name: "fact",
                value: evil.into(),
                note: evil.into(),
            }],
            parts: vec![Section::new(
                "Section",
                vec![
                    SectionItem::Table(table),
                    SectionItem::Samples(vec![records::Sample::read(&sample)]),
                    SectionItem::Charts(charts),
                    SectionItem::File("config.toml", evil.into()),
                    timeline::frame(evil),
                ],
            )],
        };
        let html = html(&page).unwrap();
        assert_eq!(html.matches("<script>").count(), 1, "the page's own");
        assert!(html.matches("&lt;script&gt;").count() >= 12, "{html}");
        assert!(html.contains("Section") && !html.contains("http:") && !html.contains("https:"));
    }
}
