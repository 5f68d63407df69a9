//! Model folders that transformers wrote, and others made of them.

use files::{Disk, Dtype, TensorFiles, TensorSource, TensorSpec};
use half::bf16;
use memory::{DType, Layout};
use model::{
    Architecture, Attention, ModelConfig, ModelWeights, Origin, OutgoingWeights, ParameterPart,
    Parameters, WeightsError,
};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[path = "../../../../trainer/tests/golden/transformers/families.rs"]
mod families;
pub use families::FAMILIES;

pub fn golden(family: &str) -> PathBuf {
    let folder = "../trainer/tests/golden/transformers";
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(folder)
        .join(family)
}

/// A model's shape and what follows from it.
pub struct Shape {
    pub config: ModelConfig,
    pub parameters: Parameters,
    pub layout: Layout,
}

impl Shape {
    pub fn of(origin: &Origin) -> Shape {
        let config = ModelConfig::from_hf(origin.config().unwrap()).unwrap();
        let parameters = Architecture::of(&config, Attention::Eager)
            .parameters
            .clone();
        let layout = parameters.layout(|_, _| false);
        Shape {
            config,
            parameters,
            layout,
        }
    }

    /// An arena with a folder's weights.
    pub fn read(&self, folder: &Path) -> Vec<f32> {
        let mut arena = vec![0.0; self.layout.elements()];
        let weights = ModelWeights::open(folder, &self.parameters).unwrap();
        let set = |part: ParameterPart| -> Result<(), WeightsError> {
            let ParameterPart::Values(offset, values) = part else {
                unreachable!("the layout has no codes");
            };
            arena[offset..offset + values.len()].copy_from_slice(values);
            Ok(())
        };
        let all = self.layout.all();
        weights.read(&self.layout, &all, set).unwrap();
        arena
    }

    /// An arena's weights on their way into files.
    pub fn outgoing<'a>(&'a self, arena: &'a [f32], dtype: DType) -> impl TensorSource + 'a {
        let declared: Vec<_> = self.parameters.in_layout().collect();
        OutgoingWeights::new(&self.parameters, dtype, move |index, elements| {
            let values = &arena[self.layout.entries()[index].range()][elements];
            Ok(files::narrow(values, declared[index].dtype(dtype).into()))
        })
    }

    /// An arena's values in bf16, where they are not of a type of their own.
    pub fn rounded(&self, arena: &[f32]) -> Vec<f32> {
        let mut rounded: Vec<f32> = arena
            .iter()
            .map(|value| bf16::from_f32(*value).to_f32())
            .collect();
        let entries = self
            .layout
            .entries()
            .iter()
            .zip(self.parameters.in_layout());
        for (entry, _) in entries.filter(|(_, parameter)| parameter.dtype.is_some()) {
            rounded[entry.range()].copy_from_slice(&arena[entry.range()]);
        }
        rounded
    }
}

/// Tensors by name: type, shape, bytes.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub fn tensors(folder: &Path) -> Tensors {
    let files = TensorFiles::open_folder(folder, "model").unwrap();
    let owned = files.iter().map(|(name, tensor)| {
        let bytes = tensor.bytes.get(0..tensor.bytes.len()).unwrap();
        let tensor = (tensor.dtype, tensor.shape.to_vec(), bytes.into_owned());
        (name.to_string(), tensor)
    });
    owned.collect()
}

/// The weights of a golden folder, and a folder with its `config.json` and other weights.
pub fn changed(family: &str, change: impl FnOnce(&mut Tensors)) -> tempfile::TempDir {
    let mut weights = tensors(&golden(family));
    change(&mut weights);
    let folder = written(weights);
    std::fs::copy(
        golden(family).join("config.json"),
        folder.path().join("config.json"),
    )
    .unwrap();
    folder
}

/// A folder of these weights alone.
pub fn written(weights: Tensors) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = listed(&weights);
    files::write_tensors(&Disk, folder.path(), "model", &source, u64::MAX).unwrap();
    folder
}

/// Tensors on their way into a file.
pub fn listed(weights: &Tensors) -> impl TensorSource + use<> {
    let specs = weights.iter().map(|(name, (dtype, shape, _))| TensorSpec {
        name: name.clone(),
        dtype: *dtype,
        shape: shape.clone(),
    });
    let bytes = weights.values().map(|(_, _, bytes)| bytes.clone());
    Listed(specs.collect(), bytes.collect())
}

struct Listed(Vec<TensorSpec>, Vec<Vec<u8>>);

impl TensorSource for Listed {
    fn tensors(&self) -> &[TensorSpec] {
        &self.0
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&self.1[index])
    }
}
