//! Writes SVG: elements, coordinates in tenths of a pixel, and round steps for axes.

use std::fmt::Write;

/// A picture that is being written. Writing to a string cannot fail.
pub(crate) struct Svg(String);

impl Svg {
    /// Starts a picture as a file. Its style's selectors begin with its class, so it can also be part of a page.
    pub(crate) fn new(class: &str, size: (f64, f64), label: &str) -> Svg {
        let attributes = format!("xmlns=\"http://www.w3.org/2000/svg\" class=\"{class}\"");
        Svg::with(&attributes, size, label)
    }

    /// Starts a picture that is part of a page.
    pub(crate) fn in_page(size: (f64, f64), label: &str) -> Svg {
        Svg::with("class=\"plot\"", size, label)
    }

    fn with(attributes: &str, (width, height): (f64, f64), label: &str) -> Svg {
        Svg(format!(
            "<svg {attributes} viewBox=\"0 0 {width} {height}\" role=\"img\" \
             aria-label=\"{}\">",
            escaped(label)
        ))
    }

    /// Adds style and background to a picture that is a file.
    pub(crate) fn style(&mut self, style: &str, (width, height): (f64, f64)) {
        let paper = format!("<rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>");
        let _ = write!(self.0, "<style>{style}</style>{paper}");
    }

    /// Adds an element with its attributes, and with a title that is shown under the pointer.
    pub(crate) fn element(&mut self, name: &str, attributes: &str, title: Option<&str>) {
        let _ = match title {
            Some(title) => write!(
                self.0,
                "<{name} {attributes}><title>{}</title></{name}>",
                escaped(title)
            ),
            None => write!(self.0, "<{name} {attributes}/>"),
        };
    }

    /// Starts a group, which [`Svg::end`] ends.
    pub(crate) fn group(&mut self, attributes: &str) {
        let _ = write!(self.0, "<g {attributes}>");
    }

    /// Adds a text that the group shows under the pointer.
    pub(crate) fn title(&mut self, title: &str) {
        let _ = write!(self.0, "<title>{}</title>", escaped(title));
    }

    /// Ends a group.
    pub(crate) fn end(&mut self) {
        self.0.push_str("</g>");
    }

    /// Adds a text of a class that starts, ends or is centred at a place.
    pub(crate) fn text(&mut self, (x, y): (f64, f64), class: &str, anchor: &str, words: &str) {
        let words = escaped(words);
        let _ = write!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\" text-anchor=\"{anchor}\">{words}</text>"
        );
    }

    /// Adds a rectangle with a title.
    pub(crate) fn rect(
        &mut self,
        class: &str,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        title: &str,
    ) {
        let attributes = format!(
            "class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\""
        );
        self.element("rect", &attributes, Some(title));
    }

    /// Adds a line or an outline.
    pub(crate) fn path(&mut self, class: &str, path: &str) {
        self.element("path", &format!("class=\"{class}\" d=\"{path}\""), None);
    }

    /// Adds a circle.
    pub(crate) fn circle(&mut self, class: &str, (x, y): (f64, f64), radius: f64) {
        let attributes = format!("class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\"");
        self.element("circle", &attributes, None);
    }

    /// The finished picture.
    pub(crate) fn finish(self) -> String {
        self.0 + "</svg>\n"
    }
}

/// Text that is valid in an element and in an attribute.
pub(crate) fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('"', "&quot;")
}

/// Rounds to tenths of a pixel.
pub(crate) fn tenths(pixels: f64) -> f64 {
    (10.0 * pixels).round() / 10.0
}

/// The smallest step of 1, 2 or 5 times a power of ten that divides a range into at most `most` steps, and the decimals
/// of its multiples.
pub(crate) fn round_step(range: f64, most: f64) -> (f64, usize) {
    let power = 10_f64.powf((range / most).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    let step = steps.into_iter().find(|step| range / step <= most);
    let step = step.unwrap_or(range);
    (step, (-step.log10().floor()).max(0.0) as usize)
}
