//! Puts `memory/timeline.svg` into a page.

use super::view::SectionItem;

/// A frame with the picture as its own document, in which no script runs.
pub(super) fn frame(picture: &str) -> SectionItem {
    SectionItem::Frame {
        document: format!(
            "<style>:root{{color-scheme:light dark}}body{{margin:0}}svg{{display:block;width:100%;height:auto}}</style>{picture}"
        ),
        ratio: ratio(picture).unwrap_or(16.0 / 9.0),
    }
}

/// Width over height, from the `viewBox` of an SVG.
fn ratio(picture: &str) -> Option<f64> {
    let (_, rest) = picture.split_once("viewBox=\"")?;
    let (numbers, _) = rest.split_once('"')?;
    let numbers = numbers
        .split([' ', ','])
        .filter(|number| !number.is_empty());
    let numbers: Vec<f64> = numbers
        .map(|number| number.parse().ok())
        .collect::<Option<_>>()?;
    let [_, _, width, height] = numbers.try_into().ok()?;
    (width > 0.0 && height > 0.0).then_some(width / height)
}

#[cfg(test)]
mod tests {
    use super::ratio;

    #[test]
    fn the_shape_of_a_picture_is_read() {
        assert_eq!(ratio(r#"<svg viewBox="0 0 900 300"><g/></svg>"#), Some(3.0));
        assert_eq!(ratio(r#"<svg viewBox="0, 0, 2, 0">"#), None);
        assert_eq!(ratio("<svg>"), None);
    }
}
