//! Tensors in pieces, by any number of writers.

use files::{
    Disk, Dtype, PIECE_INDEX, PieceFiles, PieceIndex, PieceSource, PieceSpec, Tensors,
    WrittenPieces, write_file, write_pieces,
};
use proptest::prelude::*;
use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use tempfile::tempdir;

/// Elements of two tensors, `a` and `b`, which count on.
#[derive(Default)]
struct Writer {
    specs: Vec<PieceSpec>,
}

const ELEMENTS: usize = 60;

fn value(name: &str, element: usize) -> u16 {
    (element * 3 + usize::from(name == "b") * 1000) as u16
}

fn bytes(name: &str, elements: Range<usize>) -> Vec<u8> {
    elements
        .flat_map(|element| value(name, element).to_le_bytes())
        .collect()
}

impl Writer {
    fn with(mut self, name: &str, elements: Range<usize>) -> Writer {
        if !elements.is_empty() {
            self.specs.push(PieceSpec {
                stem: if name == "a" { "model" } else { "optimizer" }.into(),
                name: name.into(),
                dtype: Dtype::I16,
                shape: vec![ELEMENTS / 6, 6],
                elements,
            });
        }
        self
    }

    fn write(&self, folder: &Path, number: usize) -> WrittenPieces {
        write_pieces(&Disk, folder, &format!("part-{number}"), self).unwrap()
    }
}

impl PieceSource for Writer {
    fn pieces(&self) -> &[PieceSpec] {
        &self.specs
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        let spec = &self.specs[index];
        out.write_all(&bytes(&spec.name, spec.elements.clone()))
    }
}

fn index(folder: &Path, parts: &[WrittenPieces]) {
    let index = PieceIndex::of(folder, parts).unwrap();
    write_file(&Disk, folder, PIECE_INDEX, index.text().as_bytes()).unwrap();
}

/// Ranges between sorted cuts.
fn ranges(cuts: &[usize]) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (ELEMENTS + 1)).collect();
    cuts.extend([0, ELEMENTS]);
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Pieces of any number of writers read back the same for any other, element by element.
    #[test]
    fn any_writers_and_any_readers(
        written in proptest::collection::vec(0usize..1000, 0..5),
        read in proptest::collection::vec(0usize..1000, 0..5),
    ) {
        let folder = tempdir().unwrap();
        let parts: Vec<_> = ranges(&written)
            .into_iter()
            .enumerate()
            .map(|(number, range)| {
                let writer = Writer::default().with("a", range.clone()).with("b", range);
                writer.write(folder.path(), number)
            })
            .collect();
        index(folder.path(), &parts);
        for (stem, name) in [("model", "a"), ("optimizer", "b")] {
            let files = Tensors::open_folder(folder.path(), stem).unwrap();
            prop_assert_eq!(files.names(), [name]);
            let tensor = files.get(name).unwrap();
            prop_assert_eq!((tensor.dtype, tensor.shape), (Dtype::I16, &[ELEMENTS / 6, 6][..]));
            for range in ranges(&read) {
                let got = tensor.bytes.get(range.start * 2..range.end * 2).unwrap();
                prop_assert_eq!(&*got, &bytes(name, range));
            }
        }
    }
}

#[test]
fn what_is_missing_or_there_twice_is_no_tensor() {
    let folder = tempdir().unwrap();
    let refusal = |pieces: &[Range<usize>]| {
        let parts: Vec<_> = pieces
            .iter()
            .enumerate()
            .map(|(number, range)| {
                Writer::default()
                    .with("a", range.clone())
                    .write(folder.path(), number)
            })
            .collect();
        PieceIndex::of(folder.path(), &parts)
            .unwrap_err()
            .to_string()
    };
    assert!(refusal(&[0..20, 30..60]).contains("should begin at 20"));
    assert!(refusal(&[0..20, 10..60]).contains("should begin at 20"));
    assert!(refusal(&[0..20, 20..50]).contains("end at element 50"));
    assert!(refusal(&[1..30, 30..60]).contains("should begin at 0"));
}

/// An index that was changed, or belongs to other files, is refused; the error names what does not fit.
#[test]
fn an_index_that_does_not_fit_is_refused() {
    let folder = tempdir().unwrap();
    let opened = || PieceFiles::open_folder(folder.path(), "model");
    assert!(opened().unwrap().is_none());
    let parts = [0..20, 20..60].map(|range| Writer::default().with("a", range));
    let parts: Vec<_> = parts
        .iter()
        .enumerate()
        .map(|(number, part)| part.write(folder.path(), number))
        .collect();
    index(folder.path(), &parts);
    assert!(opened().unwrap().is_some());
    let path = folder.path().join(PIECE_INDEX);
    let text = fs::read_to_string(&path).unwrap();
    for (from, to, reason) in [
        (
            "part-1.safetensors",
            "../part-1.safetensors",
            "not the name of a file",
        ),
        (
            "part-1.safetensors",
            "part-0.safetensors",
            "no elements 20 to 60",
        ),
        (",20,60", ",21,60", "should begin at 20"),
        ("I16", "U8", "no elements 0 to 20"),
        ("[10,6]", "[11,6]", "end at element 60"),
        ("[10,6]", "[4611686018427387904,6]", "end at element 60"),
        ("\"model\"", "\"other\"", "has no `model`"),
        ("{", "", "cannot be read"),
    ] {
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{from}");
        fs::write(&path, changed).unwrap();
        let error = opened().unwrap_err().to_string();
        assert!(error.contains(reason), "{from} to {to}: {error}");
    }
    fs::write(&path, text.replace("part-1", "part-7")).unwrap();
    assert!(opened().unwrap_err().to_string().contains("part-7"));
}
