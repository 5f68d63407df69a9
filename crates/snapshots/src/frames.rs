//! The line of a stack by which an allocation is known: the innermost one of the user's own code.

use crate::tree::{PickleTree, PickleValue};
use std::collections::HashMap;

/// Frames of one stack that are looked at.
const FRAMES_MAX: usize = 512;

/// Whose code a frame is. Of a stack the first frame of the first of these counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    User,
    Package,
    PyTorch,
    Native,
}

/// A file and a function, and the line in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct CodeLine {
    pub(crate) place: String,
    pub(crate) line: Option<u32>,
}

/// The lines of stacks. Snapshots share frames, so each is looked at once.
#[derive(Default)]
pub(crate) struct CodeLines {
    of_frame: HashMap<PickleKey, (Owner, CodeLine)>,
}

/// The number of a dictionary.
type PickleKey = u32;

impl CodeLines {
    /// The line for a stack, innermost frame first; none for an empty stack.
    pub(crate) fn of_stack(&mut self, tree: &PickleTree, frames: PickleValue) -> Option<CodeLine> {
        let mut best: Option<(Owner, PickleKey)> = None;
        for frame in tree.list(frames)?.iter().take(FRAMES_MAX) {
            let PickleValue::Dict(number) = *frame else {
                continue;
            };
            let known = self.of_frame.entry(number);
            let (owner, _) = known.or_insert_with(|| look(tree, *frame));
            if best.is_none_or(|(of_best, _)| *owner < of_best) {
                best = Some((*owner, number));
            }
            if *owner == Owner::User {
                break;
            }
        }
        best.map(|(_, number)| self.of_frame[&number].1.clone())
    }
}

fn look(tree: &PickleTree, frame: PickleValue) -> (Owner, CodeLine) {
    let file = tree.text_field(frame, "filename").unwrap_or("");
    let name = tree.text_field(frame, "name").unwrap_or("");
    let line = tree
        .int_field(frame, "line")
        .and_then(|line| line.try_into().ok());
    let owner = owner(file);
    let place = match owner {
        Owner::Native => name.into(),
        _ => format!("{} {name}", last_folders(file)),
    };
    // A line of 0 says that there is none.
    let line = line.filter(|line| *line > 0 && owner != Owner::Native);
    (
        owner,
        CodeLine {
            place: printable(&place),
            line,
        },
    )
}

fn owner(file: &str) -> Owner {
    let ends = |ends: &[&str]| ends.iter().any(|end| file.ends_with(end));
    let has = |parts: &[&str]| parts.iter().any(|part| file.contains(part));
    // Lines like `<string>` are code that was made at run time; inductor writes its own into files.
    match file {
        "" | "??" => Owner::Native,
        _ if ends(&[
            ".cpp", ".cc", ".c", ".cu", ".cuh", ".h", ".hpp", ".so", ".S",
        ]) =>
        {
            Owner::Native
        }
        _ if is_of_pytorch(file) || file.starts_with('<') || has(&["torchinductor_"]) => {
            Owner::PyTorch
        }
        _ if has(&["site-packages/", "dist-packages/", "/lib/python3"]) => Owner::Package,
        _ => Owner::User,
    }
}

/// Whether a file is PyTorch's own: in an installed package, or in a checkout of its sources.
fn is_of_pytorch(file: &str) -> bool {
    const PARTS: [&str; 12] = [
        "nn/",
        "autograd/",
        "utils/",
        "optim/",
        "cuda/",
        "distributed/",
        "amp/",
        "func/",
        "fx/",
        "_",
        "profiler/",
        "functional.py",
    ];
    let (folders, rest) = match file.rsplit_once("/torch/") {
        Some((folders, rest)) => (folders, rest),
        None => ("", file.strip_prefix("torch/").unwrap_or("")),
    };
    folders.ends_with("-packages") || PARTS.iter().any(|part| rest.starts_with(part))
}

/// The file with the folder that it is in, since checkouts lie in different places.
fn last_folders(file: &str) -> &str {
    let mut slashes = file.rmatch_indices('/');
    let at = slashes.nth(1).map_or(0, |(at, _)| at + 1);
    &file[at..]
}

/// Without control characters, which a terminal would obey.
pub(crate) fn printable(text: &str) -> String {
    let letters = text.chars().take(200);
    letters
        .map(|letter| if letter.is_control() { '?' } else { letter })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_code_is_told_from_libraries() {
        for (file, whose) in [
            ("/home/me/project/model.py", Owner::User),
            ("model.py", Owner::User),
            ("/home/me/torch/train.py", Owner::User),
            ("forward, layer 3", Owner::User),
            (
                "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py",
                Owner::PyTorch,
            ),
            ("/opt/pytorch/torch/nn/functional.py", Owner::PyTorch),
            ("torch/_tensor.py", Owner::PyTorch),
            ("/tmp/torchinductor_me/ab/cab.py", Owner::PyTorch),
            ("<eval_with_key>.3", Owner::PyTorch),
            (
                "/env/lib/python3.11/site-packages/transformers/trainer.py",
                Owner::Package,
            ),
            ("/usr/lib/python3.11/threading.py", Owner::Package),
            ("../aten/src/ATen/EmptyTensor.cpp", Owner::Native),
            ("??", Owner::Native),
        ] {
            assert_eq!(owner(file), whose, "{file}");
        }
        assert_eq!(last_folders("/a/b/c.py"), "b/c.py");
        assert_eq!(last_folders("c.py"), "c.py");
    }
}
