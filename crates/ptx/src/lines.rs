//! Where instructions come from in the CUDA sources, by the text of a second compilation, with line information.

use std::collections::HashMap;

/// For each line of a text with an instruction, its place in the sources.
pub struct SourceLines(HashMap<u32, String>);

/// A line of a text, and the `.loc` before it.
struct Line<'t> {
    number: u32,
    text: &'t str,
    place: &'t str,
}

impl SourceLines {
    /// Reads the places from the text with line information.
    ///
    /// # Errors
    /// If its instructions are not those of the text without.
    pub fn new(text: &str, with_lines: &str) -> Result<SourceLines, String> {
        let files: HashMap<&str, &str> = with_lines.lines().filter_map(file).collect();
        let (plain, located) = (lines(text), lines(with_lines));
        if plain.len() != located.len() {
            let (found, wanted) = (located.len(), plain.len());
            return Err(format!(
                "with line information there are {found} lines in place of {wanted}"
            ));
        }
        let place = |(plain, located): (&Line, &Line)| match plain.text == located.text {
            true => Ok((plain.number, described(located.place, &files))),
            false => Err(format!(
                "line {} is `{}`, and with line information `{}`",
                plain.number, plain.text, located.text
            )),
        };
        let places = plain.iter().zip(&located).map(place);
        Ok(SourceLines(places.collect::<Result<_, _>>()?))
    }

    /// The file and line of a line of the text without line information: `pack.cuh:120, inlined at rms_norm.cu:31`; none before
    /// a kernel's first place.
    pub fn of(&self, line: u32) -> Option<&str> {
        let place = self.0.get(&line).map(String::as_str);
        place.filter(|place| !place.is_empty())
    }
}

/// `.file 2 "/path/of/pack.cuh"`: the number and the name.
fn file(line: &str) -> Option<(&str, &str)> {
    let (number, path) = line.trim().strip_prefix(".file")?.trim().split_once(' ')?;
    Some((number, path.trim_matches('"').rsplit('/').next()?))
}

/// What is left of a text without comments, empty lines and line information.
fn lines(text: &str) -> Vec<Line<'_>> {
    let (mut lines, mut place) = (Vec::new(), "");
    for (index, line) in text.trim_end_matches('\0').lines().enumerate() {
        let text = line.split("//").next().unwrap_or_default().trim();
        match text.split_whitespace().next() {
            None | Some(".file") => {}
            Some(".loc") => place = text,
            // Debugging information, the last thing of the text.
            Some(".section") => break,
            Some(_) => {
                if text.contains(".entry") {
                    // The place before it is another kernel's.
                    place = "";
                }
                lines.push(Line {
                    number: index as u32 + 1,
                    text,
                    place,
                });
            }
        }
    }
    lines
}

/// `.loc 3 120 9, function_name $L__info_string26, inlined_at 1 31 5` as a file's name and line, and those of the call.
fn described(place: &str, files: &HashMap<&str, &str>) -> String {
    let at = |words: &str| {
        let mut words = words.split_whitespace();
        let file = files.get(words.next()?)?;
        Some(format!("{file}:{}", words.next()?))
    };
    let own = place.strip_prefix(".loc").and_then(at).unwrap_or_default();
    let call = place.split("inlined_at").nth(1).and_then(at);
    match call {
        Some(call) => format!("{own}, inlined at {call}"),
        None => own,
    }
}

#[cfg(test)]
mod tests {
    use super::SourceLines;

    const PLAIN: &str =
        "// made by hand\n.entry none()\n{\n\tadd.s32 %r1, %r2, 1;\n\n\tret;\n}\n\0";

    #[test]
    fn instructions_have_the_place_of_the_loc_before_them() {
        let located = ".entry none()\n{\n.loc 1 7 0\n.loc\t2 120 9, function_name $L__info_string26, inlined_at 1 8 5\n\
            \tadd.s32 %r1, %r2, 1; // an addition\n\t.loc 1 9 1\n\tret;\n}\n\t.file\t1 \"/a/b.cu\"\n\t.file\t2 \"/a/c.cuh\"\n\
            .section .debug_str\n{\n.b8 0\n}\n";
        let lines = SourceLines::new(PLAIN, located).unwrap();
        assert_eq!(lines.of(4), Some("c.cuh:120, inlined at b.cu:8"));
        assert_eq!(lines.of(6), Some("b.cu:9"));
        assert_eq!(lines.of(5), None);
    }

    #[test]
    fn other_instructions_are_refused() {
        let refused = |text: &str| SourceLines::new(PLAIN, text).err().unwrap();
        let other = refused(".entry none()\n{\nadd.s32 %r1, %r2, 2;\nret;\n}\n");
        assert!(
            other.starts_with("line 4 is `add.s32 %r1, %r2, 1;`"),
            "{other}"
        );
        let fewer = refused(".entry none()\n{\nret;\n}\n");
        assert_eq!(
            fewer,
            "with line information there are 4 lines in place of 5"
        );
    }
}
