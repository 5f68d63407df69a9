//! What is written is read again, here and by the safetensors crate.

use crate::source::Tensors;
use fakes::FullDisk;
use files::{
    Disk, Dtype, FilesError, TensorFiles, TensorSource, is_plain_name, read_header,
    tensor_file_bytes, write_tensors,
};
use safetensors::SafeTensors;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn tensors() -> Tensors {
    let tensors: [(&str, Dtype, &[usize]); 5] = [
        ("codes", Dtype::U8, &[3]),
        ("a.weight", Dtype::F32, &[2, 3]),
        ("b.weight", Dtype::BF16, &[4, 5]),
        ("scalar", Dtype::F32, &[]),
        ("empty", Dtype::I16, &[0, 7]),
    ];
    Tensors::new(&tensors)
}

fn assert_holds(files: &TensorFiles, tensors: &Tensors) {
    assert_eq!(files.iter().count(), tensors.tensors().len());
    for (index, spec) in tensors.tensors().iter().enumerate() {
        let found = files.get(&spec.name).unwrap();
        assert_eq!((found.dtype, found.shape), (spec.dtype, &spec.shape[..]));
        assert_eq!(
            found.bytes.get(0..found.bytes.len()).unwrap(),
            tensors.bytes(index),
            "{}",
            spec.name
        );
    }
}

#[test]
fn one_file_is_read_again_here_and_elsewhere() {
    let folder = tempdir().unwrap();
    let tensors = tensors();
    let written = write_tensors(&Disk, folder.path(), "model", &tensors, u64::MAX).unwrap();
    assert_eq!(written.len(), 1);
    let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
    assert_eq!(
        (written[0].bytes, written[0].crc32),
        (bytes.len() as u64, crc32fast::hash(&bytes))
    );

    let files = TensorFiles::open_folder(folder.path(), "model").unwrap();
    assert_holds(&files, &tensors);
    for entry in read_header(&bytes).unwrap().tensors {
        assert_eq!(
            entry.data.start % (entry.dtype.bitsize() / 8),
            0,
            "{} is not aligned",
            entry.name
        );
    }
    let (_, elsewhere) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = elsewhere.metadata().as_ref().unwrap();
    assert_eq!(metadata["format"], "pt");
    let elsewhere = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(
        elsewhere.tensor("b.weight").unwrap().data(),
        tensors.bytes(2)
    );
    assert_eq!(elsewhere.tensor("scalar").unwrap().shape(), [0usize; 0]);
}

/// The folders that the trainer's tests compare with.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../trainer/tests/golden");

#[test]
fn files_that_pytorch_wrote_are_read() {
    for (folder, stem) in [
        ("torch_llama_tiny", "model"),
        ("transformers/gpt2", "batches"),
        ("transformers/qwen3", "grads_step0"),
    ] {
        let folder = Path::new(GOLDEN).join(folder);
        let bytes = fs::read(folder.join(format!("{stem}.safetensors"))).unwrap();
        let elsewhere = SafeTensors::deserialize(&bytes).unwrap();
        let here = TensorFiles::open_folder(&folder, stem).unwrap();
        assert_eq!(here.iter().count(), elsewhere.len());
        for (name, tensor) in here.iter() {
            let expected = elsewhere.tensor(name).unwrap();
            let bytes = tensor.bytes.get(0..tensor.bytes.len()).unwrap();
            assert_eq!(
                (tensor.dtype, tensor.shape, &*bytes),
                (expected.dtype(), expected.shape(), expected.data())
            );
        }
    }
}

#[test]
fn shards_hold_at_most_what_they_may_and_come_with_an_index() {
    let folder = tempdir().unwrap();
    let tensors = tensors();
    let written = write_tensors(&Disk, folder.path(), "model", &tensors, 28).unwrap();
    let names: Vec<_> = written.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "model-00001-of-00003.safetensors", // codes and a.weight: 27 bytes
            "model-00002-of-00003.safetensors", // b.weight alone has more than 28
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json"
        ]
    );
    let index = fs::read_to_string(folder.path().join(names[3])).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], 3 + 24 + 40 + 4);
    assert_eq!(index["weight_map"]["b.weight"], names[1]);
    assert_holds(
        &TensorFiles::open_folder(folder.path(), "model").unwrap(),
        &tensors,
    );
}

/// In one file, in shards with an index, and where a tensor alone is larger than a shard.
#[test]
fn files_are_as_large_as_was_said_before() {
    let tensors = tensors();
    for (max_shard_bytes, files) in [(u64::MAX, 1), (30, 4), (1, 6)] {
        let folder = tempdir().unwrap();
        let written = write_tensors(&Disk, folder.path(), "x", &tensors, max_shard_bytes).unwrap();
        assert_eq!(written.len(), files);
        let bytes: u64 = written.iter().map(|file| file.bytes).sum();
        let said = tensor_file_bytes(tensors.tensors(), "x", max_shard_bytes);
        assert_eq!(said, bytes, "{max_shard_bytes}");
    }
}

#[test]
fn the_same_tensors_give_the_same_bytes() {
    let [first, second] = [(); 2].map(|()| {
        let folder = tempdir().unwrap();
        write_tensors(&Disk, folder.path(), "x", &tensors(), 30).unwrap()
    });
    assert_eq!(first, second);
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused() {
    let folder = tempdir().unwrap();
    write_tensors(&Disk, folder.path(), "model", &tensors(), 28).unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    let whole = fs::read_to_string(&path).unwrap();
    let cases = [
        (
            "\"codes\"",
            "\"other\"",
            "`other` is not in `model-00001-of-00003.safetensors`",
        ),
        (
            "    \"codes\": \"model-00001-of-00003.safetensors\",\n",
            "",
            "does not say that `codes` is in",
        ),
        ("\"codes\"", "\"a.weight\"", "`a.weight` is there twice"),
        (
            "model-00002",
            "../model-00002",
            "is not the name of a file beside it",
        ),
        (
            "model-00002",
            "model-00009",
            "model-00009-of-00003.safetensors",
        ),
        ("weight_map", "weights", "weight_map"),
    ];
    for (from, to, expected) in cases {
        assert!(whole.contains(from), "{from}");
        fs::write(&path, whole.replacen(from, to, 1)).unwrap();
        let error = TensorFiles::open_folder(folder.path(), "model")
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    fs::remove_file(&path).unwrap();
    let error = TensorFiles::open_folder(folder.path(), "model").unwrap_err();
    assert!(matches!(error, FilesError::NoTensors { .. }), "{error}");
}

#[test]
fn a_source_that_breaks_its_word_is_refused() {
    let folder = tempdir().unwrap();
    let mut tensors = tensors();
    tensors.shorten(2);
    let error = write_tensors(&Disk, folder.path(), "model", &tensors, u64::MAX).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`b.weight` has 40 bytes, but its source wrote 39"
    );
}

#[test]
fn a_full_disk_is_told_from_other_failures() {
    let folder = tempdir().unwrap();
    let write = |room| {
        write_tensors(
            &FullDisk::new(Disk, room),
            folder.path(),
            "model",
            &tensors(),
            u64::MAX,
        )
    };
    let size = write(u64::MAX).unwrap()[0].bytes;
    write(size).unwrap();
    for room in 0..size {
        assert!(
            write(room).unwrap_err().is_full(),
            "room for {room} of {size} bytes"
        );
    }
    let elsewhere = folder.path().join("missing");
    let error = write_tensors(&Disk, &elsewhere, "model", &tensors(), u64::MAX).unwrap_err();
    assert!(
        !error.is_full() && error.to_string().contains("missing"),
        "{error}"
    );
}

#[test]
fn only_names_of_files_beside_are_plain() {
    assert!(
        ["a", "model-00001-of-00002.safetensors", ".hidden", "..."]
            .into_iter()
            .all(is_plain_name)
    );
    assert!(
        ![
            "", ".", "..", "/", "/a", "a/", "a/b", "../a", "a/..", "a\\b", "./a", "a\0"
        ]
        .into_iter()
        .any(is_plain_name)
    );
}
