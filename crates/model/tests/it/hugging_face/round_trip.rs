//! In and out again, to the bit.

use crate::hugging_face::folders::{FAMILIES, Shape, golden, tensors};
use files::{Disk, TensorSource};
use memory::DType;
use model::{ModelWeights, Origin, write_model};
use serde_json::{Map, Value};
use std::path::Path;

/// Small enough for several shards of every model.
const SMALL_SHARDS: u64 = 8_000;

fn write(
    shape: &Shape,
    origin: &Origin,
    weights: &dyn TensorSource,
    dtype: DType,
    shards: u64,
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let files = origin.files(&shape.config, 19, dtype);
    write_model(&Disk, folder.path(), &files, weights, shards).unwrap();
    let is_sharded = folder.path().join("model.safetensors.index.json").exists();
    assert_eq!(is_sharded, shards == SMALL_SHARDS);
    assert!(!folder.path().join(".unfinished").exists());
    folder
}

fn config(folder: &Path) -> Map<String, Value> {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// The families in plain numbers: what is read of codes is written as values, so files differ.
fn plain_families() -> impl Iterator<Item = &'static str> {
    FAMILIES
        .into_iter()
        .filter(|family| !family.ends_with("mxfp4"))
}

#[test]
fn every_family_in_f32_and_bf16_sharded_and_not() {
    for family in plain_families() {
        let origin = Origin::read(&golden(family)).unwrap();
        let (shape, original) = (Shape::of(&origin), config(&golden(family)));
        let arena = shape.read(&golden(family));
        let rounded = shape.rounded(&arena);
        assert_ne!(arena, rounded, "rounding shows");
        for shards in [u64::MAX, SMALL_SHARDS] {
            let folder = write(
                &shape,
                &origin,
                &shape.outgoing(&arena, DType::F32),
                DType::F32,
                shards,
            );
            assert!(
                tensors(folder.path()) == tensors(&golden(family)),
                "{family}"
            );
            assert!(shape.read(folder.path()) == arena, "{family}");
            assert_eq!(config(folder.path()), original, "{family}");

            let folder = write(
                &shape,
                &origin,
                &shape.outgoing(&arena, DType::BF16),
                DType::BF16,
                shards,
            );
            assert!(shape.read(folder.path()) == rounded, "{family}");
            let mut expected = original.clone();
            expected["dtype"] = "bfloat16".into();
            assert_eq!(config(folder.path()), expected, "{family}");
            assert_eq!(
                Shape::of(&Origin::read(folder.path()).unwrap()).config,
                shape.config
            );
        }
    }
}

/// From file to file, as from files to an arena and back.
#[test]
fn conversion_between_types_is_that_of_arenas() {
    for family in plain_families() {
        let origin = Origin::read(&golden(family)).unwrap();
        let shape = Shape::of(&origin);
        let arena = shape.read(&golden(family));
        let weights = ModelWeights::open(&golden(family), &shape.parameters).unwrap();
        assert_eq!(weights.dtype(), DType::F32);
        let narrow = write(
            &shape,
            &origin,
            &weights.converted(DType::BF16),
            DType::BF16,
            SMALL_SHARDS,
        );
        let expected = write(
            &shape,
            &origin,
            &shape.outgoing(&arena, DType::BF16),
            DType::BF16,
            u64::MAX,
        );
        assert!(
            tensors(narrow.path()) == tensors(expected.path()),
            "{family}"
        );

        let narrow_weights = ModelWeights::open(narrow.path(), &shape.parameters).unwrap();
        assert_eq!(narrow_weights.dtype(), DType::BF16);
        let wide = write(
            &shape,
            &origin,
            &narrow_weights.converted(DType::F32),
            DType::F32,
            u64::MAX,
        );
        assert!(
            shape.read(wide.path()) == shape.read(narrow.path()),
            "{family}"
        );
        assert_eq!(config(wide.path()), config(&golden(family)), "{family}");
    }
}
