//! Headers with false claims.

use crate::source::Tensors;
use files::{Disk, Dtype, TensorFiles, read_header, write_tensors};
use proptest::prelude::*;
use std::fs;
use tempfile::tempdir;

/// A file with this header and so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn tensor(offsets: &str, shape: &str) -> String {
    format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#)
}

#[test]
fn lies_are_named() {
    let of = |a: &str, b: &str| format!(r#"{{"a":{a},"b":{b}}}"#);
    let (first, second) = (tensor("[0,8]", "[2]"), tensor("[8,16]", "[2]"));
    assert_eq!(
        read_header(&file(&of(&first, &second), 16))
            .unwrap()
            .tensors
            .len(),
        2
    );
    let max = usize::MAX;
    let cases = [
        (vec![1, 2, 3], "shorter than the 8 bytes"),
        (vec![0xff; 8], "none is longer than"),
        (
            1000u64.to_le_bytes().to_vec(),
            "its header should be 1000 bytes, but 0 follow",
        ),
        (file("[]", 0), "its header cannot be read"),
        (file(&of(&first, &second), 17), "its tensors end at byte"),
        (
            file(&of(&first, &second), 15),
            "`b` should be at bytes 8 to 16 of the 15",
        ),
        (
            file(&of(&first, &tensor("[4,12]", "[2]")), 12),
            "`b` begins at byte",
        ),
        (
            file(&of(&first, &tensor("[12,20]", "[2]")), 20),
            "`b` begins at byte",
        ),
        (file(&of(&first, &first), 8), "`b` begins at byte"),
        (
            file(&of(&first, &tensor("[8,16]", "[3]")), 16),
            "`b` (F32 [3]) needs 12 bytes, but has 8",
        ),
        (
            file(&of(&first, &tensor("[16,8]", "[2]")), 16),
            "`b` should be at bytes 16 to 8",
        ),
        (
            file(
                &of(&first, &tensor("[8,16]", &format!("[{max},{max}]"))),
                16,
            ),
            "has no size in whole bytes",
        ),
        (
            file(&of(&tensor(&format!("[0,{max}]"), "[2]"), &second), 16),
            "`a` should be at bytes 0 to",
        ),
        (
            file(&format!(r#"{{"a":{first},"a":{second}}}"#), 16),
            "`a` is there twice",
        ),
        (
            file(&of(&first, &second.replace("F32", "F4")), 16),
            "`b` (F4 [2]) needs 1 bytes",
        ),
        (file(&of(&first, &second.replace("F32", "F33")), 16), "F33"),
        (file(&of(&first, &second.replace("[2]", "[-2]")), 16), "-2"),
        (
            file(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0),
            "`a` is there twice",
        ),
    ];
    for (bytes, expected) in cases {
        let error = read_header(&bytes).unwrap_err();
        assert!(error.contains(expected), "{error}, not {expected}");
    }
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = tempdir().unwrap();
    let refusal = |stem| TensorFiles::open_folder(folder.path(), stem).unwrap_err();
    fs::create_dir(folder.path().join("folder.safetensors")).unwrap();
    let error = refusal("folder").to_string();
    assert!(error.ends_with("it is not a file"), "{error}");
    fs::write(folder.path().join("empty.safetensors"), b"").unwrap();
    let error = refusal("empty").to_string();
    assert!(
        error.contains("empty.safetensors` is not a whole safetensors file"),
        "{error}"
    );
}

/// Whatever a header claims, accepted tensors lie within the file and cover it.
fn assert_inside(bytes: &[u8]) {
    if let Ok(header) = read_header(bytes) {
        let mut end = None;
        for tensor in &header.tensors {
            let elements: usize = tensor.shape.iter().product();
            assert_eq!(
                bytes[tensor.data.clone()].len() * 8,
                elements * tensor.dtype.bitsize()
            );
            assert!(end.is_none_or(|end| end == tensor.data.start));
            end = Some(tensor.data.end);
        }
        assert!(end.is_none_or(|end| end == bytes.len()));
    }
}

/// Numbers whose sums or products overflow, and some that fit.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..20u64,
        Just(u64::MAX),
        Just(1 << 61),
        Just((1 << 62) + 1),
        any::<u64>()
    ]
}

proptest! {
    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        assert_inside(&bytes);
    }

    #[test]
    fn any_text_as_a_header(text in "[\\[\\]{}:,\"a0-9_.eFIBU-]{0,120}", data in 0..40usize) {
        assert_inside(&file(&text, data));
    }

    #[test]
    fn any_numbers(
        tensors in proptest::collection::vec((number(), number(), proptest::collection::vec(number(), 0..4)), 0..4),
        data in 0..40usize,
    ) {
        let entries = tensors.iter().enumerate().map(|(name, (start, end, shape))| {
            format!("\"{name}\":{}", tensor(&format!("[{start},{end}]"), &format!("{shape:?}")))
        });
        assert_inside(&file(&format!("{{{}}}", entries.collect::<Vec<_>>().join(",")), data));
    }

    #[test]
    fn a_file_with_one_byte_changed_or_cut_off(at in 0..400usize, to in any::<u8>()) {
        let folder = tempdir().unwrap();
        let tensors = Tensors::new(&[("a", Dtype::F32, &[3, 2]), ("b", Dtype::BF16, &[5]), ("c", Dtype::U8, &[1])]);
        let name = &write_tensors(&Disk, folder.path(), "x", &tensors, u64::MAX).unwrap()[0].name;
        let mut bytes = fs::read(folder.path().join(name)).unwrap();
        let at = at % bytes.len();
        prop_assert!(read_header(&bytes[..at]).is_err());
        bytes[at] = to;
        assert_inside(&bytes);
    }
}
