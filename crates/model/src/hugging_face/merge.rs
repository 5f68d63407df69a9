//! Adds adapters to their model's weights: W + scale B A.

use super::error::WeightsError;
use super::factors::AdapterFactors;
use super::turned::Turned;
use super::weights::ModelWeights;
use crate::parameters::{Parameter, Parameters};
use crate::stored::{FileTensor, Stored, Transposition};
use files::{Dtype, TensorSource, TensorSpec, narrow, widen};
use kernels::quantise::round_to_codes;
use memory::{Codes, DType};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::rc::Rc;

/// The factors of a model's adapters, in memory.
#[derive(Debug)]
pub struct AdapterWeights {
    /// By the name of the matrix that they are added to.
    deltas: HashMap<String, Delta>,
    /// The matrices under them that are stored as codes, each by the names of its tensors in files.
    coded: HashMap<String, Rc<Parameter>>,
}

/// `left [rows, rank] right [rank, columns]`: what is added to a matrix of files, or of each of several matrices that are one tensor
/// there.
#[derive(Debug)]
struct Delta {
    left: Vec<f32>,
    right: Vec<f32>,
    rank: usize,
    rows: usize,
    columns: usize,
}

impl AdapterWeights {
    /// Reads an adapter's folder. `parameters` are those of the model with its adapters.
    ///
    /// # Errors
    /// As [`AdapterFactors::read`].
    pub fn read(folder: &Path, parameters: &Parameters) -> Result<AdapterWeights, WeightsError> {
        let factors = AdapterFactors::read(folder, parameters)?.values;
        let mut factors: HashMap<String, Vec<f32>> = factors.into_iter().collect();
        let mut taken = |name: String| {
            let values = factors.remove(&name);
            values.expect("a module with an adapter has both factors")
        };
        let mut deltas = HashMap::new();
        for module in &parameters.modules {
            let Some(rank) = module.rank else {
                continue;
            };
            let [outputs, inputs] = module.shape;
            let a = taken(format!("{}.lora_A.weight", module.name));
            let mut b = taken(format!("{}.lora_B.weight", module.name));
            b.iter_mut().for_each(|value| *value *= module.scale);
            if module.experts.is_some() {
                let mut all = parameters.in_layout();
                let experts = all.find(|one| one.name == module.name);
                let experts = experts.expect("a module of experts is their parameter");
                deltas.extend(of_experts(experts, rank, [&a, &b]));
                continue;
            }
            let name = format!("{}.weight", module.name);
            let mut all = parameters.in_layout();
            let matrix = all.find(|one| one.name == name);
            let stored = matrix.expect("an adapter is on a matrix").stored;
            let delta = match stored {
                Stored::Transposed => Delta {
                    left: Turned::of_values(Transposition::of(1, rank, inputs), &a),
                    right: Turned::of_values(Transposition::of(1, outputs, rank), &b),
                    rank,
                    rows: inputs,
                    columns: outputs,
                },
                // Rows of what is added have the order of files.
                _ => Delta {
                    left: match stored.turned(&[outputs, rank]) {
                        Some(of) => Turned::of_values(of, &b),
                        None => b,
                    },
                    right: a,
                    rank,
                    rows: outputs,
                    columns: inputs,
                },
            };
            deltas.insert(name, delta);
        }
        let coded = parameters.in_layout().filter(|one| one.codes.is_some());
        let by_tensor = |one: &Parameter| {
            let parameter = Rc::new(one.clone());
            let tensors = one.file_tensors().into_iter();
            tensors.map(move |tensor| (tensor.name, parameter.clone()))
        };
        Ok(AdapterWeights {
            deltas,
            coded: coded.flat_map(by_tensor).collect(),
        })
    }

    /// The weights of a model with these factors multiplied out and added, in one type. Sums are made in f32, and rounded
    /// once. Where training stored a matrix as codes, their values are used: the folder's own codes, or codes made here from
    /// weights rounded to `coded_from`.
    pub fn merged_with<'a>(
        &'a self,
        base: &'a ModelWeights<'a>,
        dtype: DType,
        coded_from: DType,
    ) -> impl TensorSource + 'a {
        Merged {
            plain: base.converted(dtype),
            exact: base.converted(DType::F32),
            adapter: self,
            coded_from,
            codes_of: |name: &str| base.codes_of(name),
            made: RefCell::default(),
        }
    }
}

/// The products that are added to the tensors of experts in files, by the tensors' names, from factors `a [experts, rank, inputs]` and
/// `b [experts, outputs, rank]`.
fn of_experts(experts: &Parameter, rank: usize, [a, b]: [&[f32]; 2]) -> Vec<(String, Delta)> {
    let &[count, outputs, inputs] = &experts.shape[..] else {
        unreachable!("experts are declared with three sizes");
    };
    if let Some(turned) = experts.turned() {
        // A tensor `[experts, inputs, outputs]` adds A' B', with outputs in the order of files.
        let of_b = Transposition {
            columns: [1, rank, 1],
            ..turned
        };
        let of_a = Transposition::of(count, rank, inputs);
        let delta = Delta {
            left: Turned::of_values(of_a, a),
            right: Turned::of_values(of_b, b),
            rank,
            rows: inputs,
            columns: outputs,
        };
        return vec![(experts.name.clone(), delta)];
    }
    let delta = |tensor: FileTensor| {
        let row = tensor.first / inputs;
        let expert = row / outputs;
        let delta = Delta {
            left: b[row * rank..(row + tensor.shape[0]) * rank].to_vec(),
            right: a[expert * rank * inputs..(expert + 1) * rank * inputs].to_vec(),
            rank,
            rows: tensor.shape[0],
            columns: inputs,
        };
        (tensor.name, delta)
    };
    experts.file_tensors().into_iter().map(delta).collect()
}

struct Merged<'a, P, E, C> {
    plain: P,
    exact: E,
    adapter: &'a AdapterWeights,
    coded_from: DType,
    /// How the files have a matrix as codes, if they do.
    codes_of: C,
    /// The last matrix that was made of codes, since files may have it in several tensors.
    made: RefCell<Option<DecodedMatrix>>,
}

/// The values of a matrix that training stored as codes, in the order in which files store it.
struct DecodedMatrix {
    parameter: Rc<Parameter>,
    values: Vec<f32>,
}

impl<P: TensorSource, E: TensorSource, C: Fn(&str) -> Option<Codes>> Merged<'_, P, E, C> {
    /// Writes a tensor of the model under the adapters as f32. Of a matrix that training stored as codes, these are the codes' values
    /// before products round them to the compute type.
    fn write_exact(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        let name = &self.plain.tensors()[index].name;
        let has_own = |one: &Parameter| one.codes == (self.codes_of)(name);
        let coded = self.adapter.coded.get(name);
        let Some(parameter) = coded.filter(|one| !has_own(one)) else {
            return self.exact.write_to(index, out);
        };
        let mut made = self.made.borrow_mut();
        let last = made.take();
        let is_it = |made: &DecodedMatrix| Rc::ptr_eq(&made.parameter, parameter);
        let last = last
            .filter(is_it)
            .map_or_else(|| self.make(parameter), Ok)?;
        let mut tensors = parameter.file_tensors().into_iter();
        let tensor = tensors.find(|tensor| tensor.name == *name);
        let tensor = tensor.expect("a matrix is found by the names of its tensors");
        let elements: usize = tensor.shape.iter().product();
        let own = &last.values[tensor.first..tensor.first + elements];
        out.write_all(&narrow(own, Dtype::F32))?;
        *made = Some(last);
        Ok(())
    }

    /// Makes codes of a whole matrix, and their values.
    fn make(&self, parameter: &Rc<Parameter>) -> io::Result<DecodedMatrix> {
        let tensors = parameter.file_tensors();
        let mut specs = self.plain.tensors().iter();
        let first = specs.position(|spec| spec.name == tensors[0].name);
        let first = first.expect("a merged model has all tensors");
        let (mut bytes, mut exact) = (Vec::new(), Vec::new());
        let mut values = Vec::new();
        let room = values.try_reserve_exact(parameter.elements());
        room.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // Files list a matrix's tensors one after another.
        for index in first..first + tensors.len() {
            bytes.clear();
            self.exact.write_to(index, &mut bytes)?;
            exact.clear();
            widen(Dtype::F32, &bytes, &mut exact);
            let stored = narrow(&exact, self.coded_from.into());
            widen(self.coded_from.into(), &stored, &mut values);
        }
        let codes = parameter.codes.expect("it is stored as codes");
        match parameter.turned() {
            Some(of) => {
                let mut used = Turned::of_values(of.reversed(), &values);
                round_to_codes(codes, &mut used);
                values = Turned::of_values(of, &used);
            }
            None => round_to_codes(codes, &mut values),
        }
        Ok(DecodedMatrix {
            parameter: parameter.clone(),
            values,
        })
    }
}

impl<P: TensorSource, E: TensorSource, C: Fn(&str) -> Option<Codes>> TensorSource
    for Merged<'_, P, E, C>
{
    fn tensors(&self) -> &[TensorSpec] {
        self.plain.tensors()
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        let spec = &self.plain.tensors()[index];
        let dtype = spec.dtype;
        let is_coded = self.adapter.coded.contains_key(&spec.name);
        match self.adapter.deltas.get(&spec.name) {
            None if is_coded => self.write_exact(index, &mut Narrowing { dtype, out }),
            None => self.plain.write_to(index, out),
            Some(delta) => self.write_exact(
                index,
                &mut Adding {
                    name: &spec.name,
                    delta,
                    next: 0,
                    dtype,
                    out,
                },
            ),
        }
    }
}

/// Takes the bytes of f32, whole numbers at a time, and writes them in another type.
struct Narrowing<'a> {
    dtype: Dtype,
    out: &'a mut dyn Write,
}

impl Write for Narrowing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut values = Vec::with_capacity(bytes.len() / 4);
        widen(Dtype::F32, bytes, &mut values);
        self.out.write_all(&narrow(&values, self.dtype))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Takes the bytes of a matrix in f32, whole numbers at a time, and writes its sum with a product.
struct Adding<'a> {
    /// The matrix.
    name: &'a str,
    delta: &'a Delta,
    /// The place of the next element.
    next: usize,
    dtype: Dtype,
    out: &'a mut dyn Write,
}

impl Write for Adding<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut values = Vec::with_capacity(bytes.len() / 4);
        widen(Dtype::F32, bytes, &mut values);
        let Delta {
            left,
            right,
            rank,
            rows,
            columns,
        } = self.delta;
        let mut done = 0;
        while done < values.len() {
            let (row, column) = (self.next / columns, self.next % columns);
            let right = &right[row / rows * rank * columns..];
            let count = (columns - column).min(values.len() - done);
            let mut sums = vec![0f32; count];
            for (of_rank, factor) in left[row * rank..(row + 1) * rank].iter().enumerate() {
                let first = of_rank * columns + column;
                let terms = sums.iter_mut().zip(&right[first..first + count]);
                terms.for_each(|(sum, term)| *sum += factor * term);
            }
            let pairs = values[done..done + count].iter_mut().zip(sums);
            pairs.for_each(|(value, sum)| *value += sum);
            (done, self.next) = (done + count, self.next + count);
        }
        if !values.iter().all(|value| value.is_finite()) {
            return Err(io::Error::other(format!(
                "with what its adapter adds, `{}` has values that are not finite",
                self.name
            )));
        }
        self.out.write_all(&narrow(&values, self.dtype))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
