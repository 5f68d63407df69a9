//! The algorithms that products use, as measured on a GPU and kept from run to run.
//!
//! An algorithm is 64 bytes whose meaning only the library knows, and keeps within a version. So a measurement is for
//! one GPU, by its name and compute capability, and for one version of cuBLASLt.

use super::CudaDevice;
use super::problem::Problem;
use super::rehearsal::distinct;
use crate::Result;
use crate::cuda::Gemm;
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use serde::{Deserialize, Serialize};

/// The version of the file's form. Algorithms of version 1 were timed on zeros, which run faster than data does.
const FORMAT: u32 = 2;

/// The algorithms measured on one kind of GPU with one version of cuBLASLt. Files hold it in serialised form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Algorithms {
    format: u32,
    gpu: String,
    capability: [i32; 2],
    library_version: usize,
    products: Vec<TunedProduct>,
}

/// A product, with its fastest algorithm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedProduct {
    pub(super) problem: Problem,
    pub(super) workspace_bytes: usize,
    pub(super) algorithm: Words,
    /// Whether parts of its sums may be rounded, since no algorithm avoids that.
    pub(super) is_rounded: bool,
    /// The algorithm's index among those that the heuristic named.
    pub(super) place: usize,
    /// The number of measured algorithms.
    pub(super) measured: usize,
    /// The time that it took.
    pub(super) microseconds: f64,
    /// The time that the heuristic's first choice took.
    pub(super) first_microseconds: f64,
}

/// The words of an algorithm, in hexadecimal in files because they are not numbers with a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "[String; 8]", into = "[String; 8]")]
pub(super) struct Words(pub(super) [u64; 8]);

impl From<Words> for [String; 8] {
    fn from(words: Words) -> [String; 8] {
        words.0.map(|word| format!("{word:016x}"))
    }
}

impl TryFrom<[String; 8]> for Words {
    type Error = String;

    fn try_from(texts: [String; 8]) -> Result<Words, String> {
        let mut words = [0; 8];
        for (word, text) in words.iter_mut().zip(&texts) {
            let read = u64::from_str_radix(text, 16).ok();
            let read = read.filter(|_| text.len() == 16);
            *word = read.ok_or_else(|| format!("`{text}` is not 16 hexadecimal digits"))?;
        }
        Ok(Words(words))
    }
}

/// The name of a data type.
pub(super) mod dtype_name {
    use memory::DType;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(in super::super) fn serialize<S: Serializer>(
        dtype: &DType,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(dtype.as_str())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<DType, D::Error> {
        let name = String::deserialize(deserializer)?;
        let unknown = || de::Error::custom(format!("no product is of type `{name}`"));
        let mut known = [DType::F32, DType::BF16, DType::F8E4M3, DType::F8E5M2].into_iter();
        known
            .find(|dtype| dtype.as_str() == name)
            .ok_or_else(unknown)
    }
}

impl TunedProduct {
    pub(super) fn algorithm(&self) -> cublasLtMatmulAlgo_t {
        cublasLtMatmulAlgo_t {
            data: self.algorithm.0,
        }
    }

    pub(super) fn is_rounded(&self) -> bool {
        self.is_rounded
    }

    fn is_for(&self, problem: &Problem, workspace_bytes: usize) -> bool {
        self.problem == *problem && self.workspace_bytes == workspace_bytes
    }

    /// m, k and n of a row-major product `[m, k] [k, n]`, and how many there are in a batch.
    pub fn sizes(&self) -> ([u64; 3], i32) {
        let Problem {
            left,
            left_transposed,
            d,
            batch,
            ..
        } = self.problem;
        let depth = match left_transposed {
            true => left.rows,
            false => left.columns,
        };
        ([d.columns, depth, d.rows], batch)
    }

    /// The types of its operands and of its result.
    pub fn types(&self) -> [&'static str; 2] {
        [self.problem.left.dtype, self.problem.d.dtype].map(|dtype| dtype.as_str())
    }

    /// Whether its sums may be kept in fewer bits than f32 has.
    pub fn fast_accumulation(&self) -> bool {
        self.problem.fast_accumulation
    }

    /// The algorithm, in words that only its version of the library understands.
    pub fn words(&self) -> [u64; 8] {
        self.algorithm.0
    }

    /// The algorithm's index among those that the heuristic names, and the number that were measured.
    pub fn place(&self) -> (usize, usize) {
        (self.place, self.measured)
    }

    /// Microseconds that the algorithm took, and that the heuristic's first choice took.
    pub fn microseconds(&self) -> [f64; 2] {
        [self.microseconds, self.first_microseconds]
    }
}

impl Algorithms {
    /// An empty list for a device and its version of the library.
    pub fn of(device: &CudaDevice) -> Algorithms {
        let (major, minor) = device.facts().capability;
        Algorithms {
            format: FORMAT,
            gpu: device.facts().name.clone(),
            capability: [major, minor],
            library_version: device.library().version,
            products: Vec::new(),
        }
    }

    /// Products that have an algorithm.
    pub fn products(&self) -> &[TunedProduct] {
        &self.products
    }

    /// Merges later measurements on the same GPU with the same library.
    pub fn merge(&mut self, later: Vec<TunedProduct>) {
        for product in later {
            let is_same =
                |one: &TunedProduct| one.is_for(&product.problem, product.workspace_bytes);
            match self.products.iter_mut().find(|one| is_same(one)) {
                Some(earlier) => *earlier = product,
                None => self.products.push(product),
            }
        }
    }

    /// Whether the algorithms are for a device and its version of the library.
    ///
    /// # Errors
    /// Says what they are for instead.
    pub fn check(&self, device: &CudaDevice) -> Result<(), String> {
        let Algorithms {
            format,
            gpu,
            capability,
            library_version,
            ..
        } = Algorithms::of(device);
        if self.format != format {
            let why = match self.format {
                1 => ", which was timed on zeros, and not on data",
                _ => "",
            };
            return Err(format!(
                "they are kept in form {}{why}, and this program reads form {format}",
                self.format
            ));
        }
        if (&self.gpu, self.capability) != (&gpu, capability) {
            let [[major, minor], [own_major, own_minor]] = [self.capability, capability];
            return Err(format!(
                "they were measured on {} ({major}.{minor}), and this is {gpu} ({own_major}.{own_minor})",
                self.gpu
            ));
        }
        if self.library_version != library_version {
            return Err(format!(
                "they are those of cuBLASLt {}, and cuBLASLt {library_version} was loaded",
                self.library_version
            ));
        }
        Ok(())
    }

    /// The algorithms that products use with a workspace, in order, once per problem; none for a problem without one.
    ///
    /// # Errors
    /// As products.
    pub fn of_products(
        &self,
        products: &[Gemm],
        workspace_bytes: usize,
    ) -> Result<Vec<Option<&TunedProduct>>> {
        let known = |gemm: &Gemm| {
            let (problem, _) = Problem::new(gemm)?;
            Ok(self.find(&problem, workspace_bytes))
        };
        distinct(products)?.iter().map(known).collect()
    }

    /// The algorithm for a problem. Called once per problem.
    pub(super) fn find(&self, problem: &Problem, workspace_bytes: usize) -> Option<&TunedProduct> {
        let mut products = self.products.iter();
        products.find(|product| product.is_for(problem, workspace_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Matrix;
    use memory::DType;

    fn product(columns: usize, word: u64) -> TunedProduct {
        let data = [0f32; 64];
        let matrix = |row_stride| Matrix {
            pointer: data.as_ptr().cast(),
            dtype: DType::F32,
            row_stride,
            column_stride: 1,
            batch_stride: 0,
        };
        let gemm = Gemm {
            sizes: [2, 3, columns],
            batch: 1,
            alpha: 1.0,
            a: matrix(3),
            b: matrix(columns),
            init: None,
            bias: None,
            out: matrix(columns),
            scales: None,
            fast_accumulation: false,
        };
        TunedProduct {
            problem: Problem::new(&gemm).unwrap().0,
            workspace_bytes: 1 << 20,
            algorithm: Words([word; 8]),
            is_rounded: false,
            place: 1,
            measured: 4,
            microseconds: 0.1,
            first_microseconds: 0.3,
        }
    }

    fn algorithms() -> Algorithms {
        Algorithms {
            format: FORMAT,
            gpu: "a GPU".into(),
            capability: [9, 0],
            library_version: 120_904,
            products: vec![product(4, u64::MAX), product(5, 0x12)],
        }
    }

    #[test]
    fn what_is_kept_is_read_back_to_the_bit() {
        let text = serde_json::to_string_pretty(&algorithms()).unwrap();
        assert!(text.contains("\"ffffffffffffffff\"") && text.contains("\"dtype\": \"f32\""));
        assert_eq!(
            serde_json::from_str::<Algorithms>(&text).unwrap(),
            algorithms()
        );
        for (part, other) in [
            ("\"0000000000000012\"", "\"12\""),
            ("\"0000000000000012\"", "\"000000000000001z\""),
            ("\"f32\"", "\"f64\""),
            ("\"batch\"", "\"batches\""),
        ] {
            let other = text.replacen(part, other, 1);
            assert!(
                serde_json::from_str::<Algorithms>(&other).is_err(),
                "{other}"
            );
        }
    }

    #[test]
    fn what_was_measured_later_takes_the_place_of_the_same_product() {
        let mut merged = algorithms();
        merged.merge(vec![product(5, 0x34), product(6, 0x56)]);
        let words: Vec<u64> = merged
            .products()
            .iter()
            .map(|one| one.algorithm.0[0])
            .collect();
        assert_eq!(words, [u64::MAX, 0x34, 0x56]);
        let asked = product(5, 0);
        let found = |bytes| {
            merged
                .find(&asked.problem, bytes)
                .map(|one| one.algorithm.0[7])
        };
        assert_eq!((found(1 << 20), found(1 << 21)), (Some(0x34), None));
        assert_eq!(asked.sizes(), ([2, 3, 5], 1));
    }
}
