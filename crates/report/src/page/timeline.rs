//! Puts a timeline's SVG into a page.

use super::view::SectionItem;
use crate::svg::tenths;

/// A frame with the picture as its own document, in which no script runs.
pub(super) fn frame(picture: &str) -> SectionItem {
    let (width, height) = size(picture).unwrap_or((16.0, 9.0));
    SectionItem::Frame {
        document: format!(
            "<style>:root{{color-scheme:light dark}}body{{margin:0}}svg{{display:block;width:100%;height:auto}}\
             .paper{{fill:none!important}}</style>{picture}"
        ),
        ratio: width / height,
        points: serde_json::to_string(&points(picture, width)).unwrap_or_default(),
        plot: plot(picture, height),
    }
}

/// Width and height, from the `viewBox` of an SVG.
fn size(picture: &str) -> Option<(f64, f64)> {
    let (_, rest) = picture.split_once("viewBox=\"")?;
    let (numbers, _) = rest.split_once('"')?;
    let numbers = numbers
        .split([' ', ','])
        .filter(|number| !number.is_empty());
    let numbers: Vec<f64> = numbers
        .map(|number| number.parse().ok())
        .collect::<Option<_>>()?;
    let [_, _, width, height] = numbers.try_into().ok()?;
    (width > 0.0 && height > 0.0).then_some((width, height))
}

/// The columns that show a text under the pointer.
fn columns(picture: &str) -> impl Iterator<Item = &str> {
    picture.split("<rect class=\"hover\" ").skip(1)
}

fn number(column: &str, name: &str) -> Option<f64> {
    let (_, rest) = column.split_once(&format!("{name}=\""))?;
    rest.split_once('"')?.0.parse().ok()
}

/// The middles of the columns in percent of the width, and their texts.
fn points(picture: &str, width: f64) -> Vec<(f64, String)> {
    let point = |column| {
        let (_, title) = str::split_once(column, "<title>")?;
        let (title, _) = title.split_once("</title>")?;
        let middle = number(column, "x")? + number(column, "width")? / 2.0;
        Some((tenths(100.0 * middle / width), unescaped(title)))
    };
    columns(picture).filter_map(point).collect()
}

/// How far the columns are from the top and from the bottom, in percent of the height.
fn plot(picture: &str, height: f64) -> (f64, f64) {
    let column = columns(picture).next();
    let place = column.and_then(|column| Some((number(column, " y")?, number(column, " height")?)));
    let percent = |pixels: f64| tenths(100.0 * pixels / height);
    place.map_or((0.0, 0.0), |(top, high)| {
        (percent(top), percent(height - top - high))
    })
}

/// The text that was escaped, on one line.
fn unescaped(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&quot;", "\"");
    text.replace("&amp;", "&").replace('\n', " · ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_of_a_picture_is_read() {
        assert_eq!(
            size(r#"<svg viewBox="0 0 900 300"><g/></svg>"#),
            Some((900.0, 300.0))
        );
        assert_eq!(size(r#"<svg viewBox="0, 0, 2, 0">"#), None);
        assert_eq!(size("<svg>"), None);
    }

    /// What the picture shows under the pointer, the page shows for the keyboard too.
    #[test]
    fn what_columns_show_is_read() {
        let mut svg = crate::svg::Svg::new("memory-timeline", (200.0, 100.0), "live");
        svg.rect("quiet", (0.0, 0.0), (2.0, 9.0), "no column");
        svg.rect("hover", (99.0, 20.0), (2.0, 9.0), "a < \"b\" &amp;\n2 B");
        let shown = "a < \"b\" &amp; · 2 B".to_string();
        let picture = svg.finish();
        assert_eq!(points(&picture, 200.0), [(50.0, shown)]);
        assert_eq!(plot(&picture, 100.0), (20.0, 71.0));
    }
}
