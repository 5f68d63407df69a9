//! The line of a stack by which an allocation is known: the innermost one of the user's own code. Stacks of autograd's
//! thread have frames of C++ alone; there it is the autograd node, or else the operator.

use crate::tree::{PickleTree, PickleValue};
use std::collections::HashMap;

/// Frames of one stack that are looked at.
const FRAMES_MAX: usize = 512;

/// Whose code a frame is. Of a stack the innermost frame of the first of these counts; of operators the outermost, since
/// an operator calls others for its memory (`addmm` calls `empty`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    User,
    Package,
    PyTorch,
    /// The backward function of an operator, in C++.
    AutogradNode,
    /// An operator's entry in C++.
    Operator,
    Native,
    /// Code that every allocation passes: it records the stack, or allocates.
    Allocator,
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
            let is_outer = |of_best| of_best == Owner::Operator && *owner == Owner::Operator;
            if best.is_none_or(|(of_best, _)| *owner < of_best || is_outer(of_best)) {
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
    let (owner, place) = match owner(file) {
        Owner::Native => native(name),
        owner => (owner, format!("{} {name}", last_folders(file))),
    };
    // A line of 0 says that there is none. C++ frames mostly have none, and the name is what tells them apart.
    let line = line.filter(|line| *line > 0 && owner < Owner::AutogradNode);
    (
        owner,
        CodeLine {
            place: printable(&place),
            line,
        },
    )
}

/// What a function of C++ is, and what it is called: `SoftmaxBackward0` for
/// `torch::autograd::generated::SoftmaxBackward0::apply(...)`, `mul_Tensor` for `at::_ops::mul_Tensor::call(...)`.
fn native(name: &str) -> (Owner, String) {
    let plain = name.replace("(anonymous namespace)::", "");
    // Without its arguments.
    let function = plain.split('(').next().unwrap_or_default();
    let node = function.strip_suffix("::apply");
    if let Some(node) = node.and_then(|node| node.strip_prefix("torch::autograd::")) {
        let node = node.strip_prefix("generated::").unwrap_or(node);
        return (Owner::AutogradNode, node.into());
    }
    let call = function.strip_prefix("at::_ops::");
    let ends = ["::call", "::redispatch"];
    if let Some(operator) = call.and_then(|call| ends.iter().find_map(|end| call.strip_suffix(end)))
    {
        return (Owner::Operator, operator.into());
    }
    const OF_THE_ALLOCATOR: [&str; 7] = [
        "torch::unwind::",
        "torch::CapturedTraceback",
        "torch::gather",
        "CUDACachingAllocator",
        "c10::StorageImpl",
        "at::detail::empty_",
        "at::detail::_empty_",
    ];
    let is_allocator = |part: &&str| function.contains(*part);
    let owner = match function {
        "" | "??" => Owner::Allocator,
        _ if OF_THE_ALLOCATOR.iter().any(is_allocator) => Owner::Allocator,
        _ => Owner::Native,
    };
    (owner, name.into())
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

    /// Names as PyTorch's own symbols have them.
    #[test]
    fn functions_of_cpp_are_nodes_operators_or_the_allocators() {
        for (name, expected) in [
            (
                "torch::autograd::generated::SoftmaxBackward0::apply(std::vector<at::Tensor, std::allocator<at::Tensor> >&&)",
                (Owner::AutogradNode, "SoftmaxBackward0"),
            ),
            (
                "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)",
                (Owner::AutogradNode, "AccumulateGrad"),
            ),
            (
                "torch::autograd::CppNode<(anonymous namespace)::RoiAlign>::apply(std::vector<at::Tensor>&&)",
                (Owner::AutogradNode, "CppNode<RoiAlign>"),
            ),
            (
                "at::_ops::mul_Tensor::redispatch(c10::DispatchKeySet, at::Tensor const&, at::Tensor const&)",
                (Owner::Operator, "mul_Tensor"),
            ),
            ("at::_ops::addmm::call", (Owner::Operator, "addmm")),
            (
                "torch::autograd::Node::operator()(std::vector<at::Tensor>&&)",
                (
                    Owner::Native,
                    "torch::autograd::Node::operator()(std::vector<at::Tensor>&&)",
                ),
            ),
            (
                "c10d::ProcessGroupNCCL::initNCCLComm(at::Device&)",
                (
                    Owner::Native,
                    "c10d::ProcessGroupNCCL::initNCCLComm(at::Device&)",
                ),
            ),
            (
                "torch::unwind::unwind()",
                (Owner::Allocator, "torch::unwind::unwind()"),
            ),
            (
                "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long)",
                (
                    Owner::Allocator,
                    "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long)",
                ),
            ),
            ("??", (Owner::Allocator, "??")),
        ] {
            let (owner, place) = native(name);
            assert_eq!((owner, &place[..]), expected, "{name}");
        }
    }
}
