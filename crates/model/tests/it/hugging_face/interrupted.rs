//! A model whose writing was cut off is whole or is none.

use crate::hugging_face::folders::{Shape, golden, tensors};
use fakes::{FullDisk, Kept, PowerCut};
use files::{Disk, TensorFiles};
use memory::DType;
use model::{Origin, write_model};
use std::path::Path;

const SHARDS: u64 = 30_000;

#[test]
fn what_a_power_cut_leaves_is_a_model_or_has_no_config() {
    let origin = Origin::read(&golden("llama")).unwrap();
    let shape = Shape::of(&origin);
    let arena = shape.read(&golden("llama"));
    let (weights, files) = (
        shape.outgoing(&arena, DType::F32),
        origin.files(&shape.config, 19, DType::F32),
    );
    let expected = tensors(&golden("llama"));
    let (mut whole, mut none) = (0, 0);
    for operations in 0.. {
        let disk = PowerCut::after(operations);
        let written = write_model(&disk, Path::new("/"), &files, &weights, SHARDS);
        for kept in [Kept::Durable, Kept::Names, Kept::Torn, Kept::All] {
            let folder = tempfile::tempdir().unwrap();
            disk.materialise(kept, folder.path()).unwrap();
            if folder.path().join("config.json").exists() {
                assert_eq!(
                    Origin::read(folder.path()).unwrap(),
                    origin,
                    "{operations} {kept:?}"
                );
                assert!(tensors(folder.path()) == expected, "{operations} {kept:?}");
                whole += 1;
            } else {
                assert!(written.is_err(), "{operations} {kept:?}");
                none += 1;
            }
            // Under their own names there are no torn files either.
            if TensorFiles::open_folder(folder.path(), "model").is_ok() {
                assert!(tensors(folder.path()) == expected, "{operations} {kept:?}");
            }
        }
        if written.is_ok() {
            break;
        }
    }
    assert!(whole > 4 && none > 40, "{whole} {none}");
}

#[test]
fn a_full_disk_leaves_nothing() {
    let origin = Origin::read(&golden("llama")).unwrap();
    let shape = Shape::of(&origin);
    let arena = shape.read(&golden("llama"));
    let files = origin.files(&shape.config, 19, DType::F32);
    for bytes in [0, 20_000, 45_000, 51_500] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("notes"), "").unwrap();
        let weights = shape.outgoing(&arena, DType::F32);
        let disk = FullDisk::new(Disk, bytes);
        let refused = write_model(&disk, folder.path(), &files, &weights, SHARDS).unwrap_err();
        assert!(refused.to_string().contains(".unfinished"), "{refused}");
        let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{bytes}: {names:?}");
    }
}
