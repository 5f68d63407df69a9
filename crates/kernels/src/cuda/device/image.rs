//! The build script's output of a source for one kind of GPU, and what its header says.

use miniz_oxide::inflate::{decompress_to_vec_zlib, decompress_to_vec_zlib_with_limit};
use std::fmt;

/// Bytes in which the header of an image lies.
const HEAD_BYTES: usize = 1024;

/// `e_machine` of machine code for GPUs.
const EM_CUDA: u8 = 190;

/// Machine code or PTX, compressed.
pub(super) struct Image(pub(super) &'static [u8]);

/// The kind of an image. If a GPU runs two, the greater one is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Code {
    /// Compiled by the driver when it is loaded.
    Ptx {
        /// The compute capability whose instructions it has.
        capability: (i32, i32),
        /// The version of the language: 8.8 as `(8, 8)`.
        version: (i32, i32),
    },
    /// An ELF file for a GPU.
    MachineCode {
        /// The compute capability that it was made for.
        capability: (i32, i32),
    },
}

impl Image {
    /// What it is.
    pub(super) fn code(&self) -> Code {
        let head = match decompress_to_vec_zlib_with_limit(self.0, HEAD_BYTES) {
            Ok(whole) => whole,
            // The header may be cut off at the end of the buffer.
            Err(ended) => ended.output,
        };
        let code = machine_code(&head).or_else(|| ptx(&String::from_utf8_lossy(&head)));
        code.expect("the build script embeds machine code and PTX")
    }

    /// In the form that the driver needs: machine code has its size in it, and PTX ends in a zero.
    pub(super) fn bytes(&self) -> Vec<u8> {
        decompress_to_vec_zlib(self.0).expect("the build script compressed it")
    }
}

impl Code {
    /// Whether a GPU runs it. Machine code runs on the same major compute capability, with the same or a later minor
    /// one. PTX runs on all later ones.
    pub(super) fn runs_on(self, gpu: (i32, i32)) -> bool {
        match self {
            Code::Ptx { capability, .. } => capability <= gpu,
            Code::MachineCode { capability } => capability.0 == gpu.0 && capability <= gpu,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Code::Ptx {
                capability: (major, minor),
                version: (version, revision),
            } => write!(f, "compute_{major}{minor} ptx {version}.{revision}"),
            Code::MachineCode {
                capability: (major, minor),
            } => write!(f, "sm_{major}{minor}"),
        }
    }
}

/// Machine code by its ELF header. CUDA's ABI 7 has the compute capability in the lowest byte of the flags; ABI 8, which
/// NVRTC 12.9 writes for Blackwell and 13.0 for all, in the byte above. `sm_90a` counts as `sm_90`, from which
/// 13.0 does not tell it apart.
fn machine_code(head: &[u8]) -> Option<Code> {
    let (magic, machine) = (head.get(..4)?, head.get(18)?);
    if (magic, *machine) != (b"\x7fELF", EM_CUDA) {
        return None;
    }
    let flags = head.get(48..52)?;
    let number = match head.get(8)? {
        7 => flags[0],
        8 => flags[1],
        _ => return None,
    };
    Some(Code::MachineCode {
        capability: capability(i32::from(number)),
    })
}

/// PTX by its directives `.version 8.8` and `.target sm_80`.
fn ptx(head: &str) -> Option<Code> {
    let directive = |name: &str| {
        let mut lines = head.lines();
        lines.find_map(|line| line.strip_prefix(name))
    };
    let (version, revision) = directive(".version ")?.trim().split_once('.')?;
    let target = directive(".target sm_")?.trim();
    Some(Code::Ptx {
        capability: capability(target.parse().ok()?),
        version: (version.parse().ok()?, revision.parse().ok()?),
    })
}

/// 100 as 10.0.
fn capability(number: i32) -> (i32, i32) {
    (number / 10, number % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header of an ELF file with what tells about the GPU.
    fn elf(abi: u8, flags: u32) -> Vec<u8> {
        let mut head = vec![0; 64];
        head[..4].copy_from_slice(b"\x7fELF");
        (head[8], head[18]) = (abi, EM_CUDA);
        head[48..52].copy_from_slice(&flags.to_le_bytes());
        head
    }

    /// Flags as NVRTC 12.9 and 13.0 write them.
    #[test]
    fn machine_code_is_known_by_either_abi() {
        for (abi, flags, name) in [
            (7, 0x0050_0550, "sm_80"),
            (7, 0x005a_0d5a, "sm_90"),
            (8, 0x0600_6402, "sm_100"),
            (8, 0x0600_7802, "sm_120"),
            (8, 0x0600_5004, "sm_80"),
        ] {
            let code = machine_code(&elf(abi, flags)).unwrap();
            assert_eq!(code.to_string(), name);
        }
        let mut other = elf(7, 0x0050_0550);
        other[18] = 62;
        assert_eq!(machine_code(&other), None, "a processor's");
        assert_eq!(machine_code(&elf(9, 0x0050_0550)), None, "a later ABI");
    }

    #[test]
    fn ptx_is_known_by_its_directives() {
        let text = "//\n// Generated\n\n.version 8.8\n.target sm_80\n.address_size 64\n";
        assert_eq!(ptx(text).unwrap().to_string(), "compute_80 ptx 8.8");
        assert_eq!(ptx("int main() {}"), None);
    }

    #[test]
    fn a_gpu_takes_the_latest_machine_code_of_its_kind_and_else_ptx() {
        let machine_code = |capability| Code::MachineCode { capability };
        let codes = [
            machine_code((8, 0)),
            machine_code((8, 9)),
            machine_code((9, 0)),
            Code::Ptx {
                capability: (8, 0),
                version: (8, 8),
            },
        ];
        let taken = |gpu| {
            let fitting = codes.iter().filter(|code| code.runs_on(gpu));
            fitting.max().map(Code::to_string)
        };
        for (gpu, name) in [
            ((8, 0), "sm_80"),
            ((8, 6), "sm_80"),
            ((8, 9), "sm_89"),
            ((9, 0), "sm_90"),
            ((11, 0), "compute_80 ptx 8.8"),
        ] {
            assert_eq!(taken(gpu).as_deref(), Some(name), "{gpu:?}");
        }
        assert_eq!(taken((7, 5)), None);
    }
}
