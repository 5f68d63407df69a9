//! The factors of a folder of adapters, in memory, on their way into another folder or into their model.

use super::adapter::{ADAPTER_STEM, import_adapter};
use super::error::WeightsError;
use super::outgoing::OutgoingWeights;
use crate::parameters::Parameters;
use files::{Dtype, TensorSource, Tensors, narrow};
use memory::DType;
use std::path::Path;

/// The factors of a model's adapters.
#[derive(Debug)]
pub struct AdapterFactors {
    /// Under PEFT's names.
    parameters: Parameters,
    /// Each factor's name in the model and its elements, in the order of the layout.
    pub(super) values: Vec<(String, Vec<f32>)>,
    /// The type that fits all of them: bf16 if the folder has all in it, else f32.
    pub dtype: DType,
}

impl AdapterFactors {
    /// Reads an adapter's folder, which one process wrote or several ranks. `parameters` are those of the model with its
    /// adapters.
    ///
    /// # Errors
    /// [`WeightsError`] that names the tensor, also where it has values that are not finite.
    pub fn read(folder: &Path, parameters: &Parameters) -> Result<AdapterFactors, WeightsError> {
        let layout = parameters.layout(|_, _| false);
        let own = parameters.factors();
        let entries = parameters.in_layout().zip(layout.entries());
        let entries = entries.filter(|(parameter, _)| parameter.is_factor);
        let (places, mut values): (Vec<_>, Vec<_>) = entries
            .map(|(parameter, entry)| (entry.range(), (parameter.name.clone(), Vec::new())))
            .unzip();
        import_adapter(
            folder,
            parameters,
            &layout,
            &layout.all(),
            |place, chunk| {
                let index = places.partition_point(|range| range.end <= place);
                values[index].1.extend_from_slice(chunk);
                match chunk.iter().all(|value| value.is_finite()) {
                    true => Ok(()),
                    false => Err(WeightsError::Tensor {
                        path: folder.into(),
                        name: own
                            .in_layout()
                            .nth(index)
                            .expect("it was read")
                            .name
                            .clone(),
                        problem: "has values that are not finite, so the adapter is not sound"
                            .into(),
                    }),
                }
            },
        )?;
        let tensors = Tensors::open_folder(folder, ADAPTER_STEM).map_err(WeightsError::Read)?;
        let is_narrow = |name: &&str| {
            tensors
                .get(name)
                .is_some_and(|one| one.dtype == Dtype::BF16)
        };
        let dtype = match tensors.names().iter().all(is_narrow) {
            true => DType::BF16,
            false => DType::F32,
        };
        Ok(AdapterFactors {
            parameters: own,
            values,
            dtype,
        })
    }

    /// The same factors, to be written as PEFT writes them ([`write_adapter`](super::write_adapter)).
    pub fn outgoing(&self, dtype: DType) -> impl TensorSource {
        let stored: Dtype = dtype.into();
        OutgoingWeights::new(&self.parameters, dtype, move |index, elements| {
            let values = &self.values[index].1[elements];
            Ok(narrow(values, stored).into_owned().into())
        })
    }
}
