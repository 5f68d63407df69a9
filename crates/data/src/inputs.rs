//! The inputs of a run: one path, or several with their shares.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// A file or folder, and its share of the samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// The file or folder.
    pub path: PathBuf,
    /// Its share of the samples, divided by the sum of all weights; `None`: as many as it has.
    pub weight: Option<f64>,
}

/// `data.path`: at least one input. Either all of several have a weight, or none has.
///
/// Written as a text, `PATH` or `PATH:WEIGHT`, or as a list of these.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct Inputs(Vec<Input>);

/// Why a text or list is not valid as inputs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum InputsError {
    /// An empty list.
    #[error(
        "data.path is an empty list; name a file or folder, or leave it out for the built-in text"
    )]
    None,
    /// A weight that is not above 0 or not finite.
    #[error("`{input}` has the weight {weight}; a weight is a number above 0")]
    Weight { input: String, weight: String },
    /// Only some inputs have weights.
    #[error(
        "`{with}` has a weight and `{without}` has none; write PATH:WEIGHT for every --data, or for none"
    )]
    SomeWeights { with: String, without: String },
    /// The sum of the weights is not finite.
    #[error("the weights of data.path have no finite sum; give smaller ones")]
    Sum,
}

/// The form in files.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    One(String),
    Several(Vec<String>),
}

impl FromStr for Input {
    type Err = InputsError;

    /// Reads `PATH` or `PATH:WEIGHT`. The part after the last colon is a weight if it is a number, unless a file has
    /// the whole name.
    fn from_str(text: &str) -> Result<Input, InputsError> {
        if Path::new(text).exists() {
            return Ok(Input::whole(text.into()));
        }
        let begins_a_number = |weight: &str| weight.starts_with(|c| "+-.0123456789".contains(c));
        let split = text.rsplit_once(':');
        let split = split.filter(|(path, weight)| !path.is_empty() && begins_a_number(weight));
        let weighted = split.and_then(|(path, weight)| Some((path, weight.parse::<f64>().ok()?)));
        match weighted {
            None => Ok(Input::whole(text.into())),
            Some((path, weight)) if weight.is_finite() && weight > 0.0 => Ok(Input {
                path: path.into(),
                weight: Some(weight),
            }),
            Some((_, weight)) => Err(InputsError::Weight {
                input: text.into(),
                weight: weight.to_string(),
            }),
        }
    }
}

impl Input {
    fn whole(path: PathBuf) -> Input {
        Input { path, weight: None }
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.weight {
            None => write!(f, "{}", self.path.display()),
            Some(weight) => write!(f, "{}:{weight}", self.path.display()),
        }
    }
}

impl Inputs {
    /// Reads inputs, one from each text.
    ///
    /// # Errors
    ///
    /// [`InputsError`] says which input is invalid.
    pub fn read(texts: &[String]) -> Result<Inputs, InputsError> {
        let inputs = texts.iter().map(|text| text.parse());
        let inputs = Inputs(inputs.collect::<Result<Vec<_>, _>>()?);
        let with = inputs.iter().find(|input| input.weight.is_some());
        let without = inputs.iter().find(|input| input.weight.is_none());
        match (with, without) {
            (None, None) => Err(InputsError::None),
            (Some(with), Some(without)) => Err(InputsError::SomeWeights {
                with: with.to_string(),
                without: without.to_string(),
            }),
            _ if !inputs.weights().sum::<f64>().is_finite() => Err(InputsError::Sum),
            _ => Ok(inputs),
        }
    }

    /// All inputs, at least one.
    pub fn iter(&self) -> impl Iterator<Item = &Input> {
        self.0.iter()
    }

    /// Their weights, of those that have one.
    pub fn weights(&self) -> impl Iterator<Item = f64> {
        self.iter().filter_map(|input| input.weight)
    }

    /// Their paths.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(|input| input.path.as_path())
    }

    /// The path, if there is only one.
    pub fn only(&self) -> Option<&Path> {
        match &self.0[..] {
            [one] => Some(&one.path),
            _ => None,
        }
    }

    /// Mutable paths.
    pub fn paths_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        self.0.iter_mut().map(|input| &mut input.path)
    }

    /// The same inputs without weights, so that each gives all that it has.
    pub fn unweighted(mut self) -> Inputs {
        self.0.iter_mut().for_each(|input| input.weight = None);
        self
    }
}

impl From<PathBuf> for Inputs {
    fn from(path: PathBuf) -> Inputs {
        Inputs(vec![Input::whole(path)])
    }
}

impl From<&str> for Inputs {
    fn from(path: &str) -> Inputs {
        PathBuf::from(path).into()
    }
}

impl TryFrom<Written> for Inputs {
    type Error = InputsError;

    fn try_from(written: Written) -> Result<Inputs, InputsError> {
        match written {
            Written::One(text) => Inputs::read(&[text]),
            Written::Several(texts) => Inputs::read(&texts),
        }
    }
}

impl From<Inputs> for Written {
    fn from(inputs: Inputs) -> Written {
        let mut texts: Vec<String> = inputs.iter().map(ToString::to_string).collect();
        match texts.len() {
            1 => Written::One(texts.remove(0)),
            _ => Written::Several(texts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(texts: &[&str]) -> Result<Inputs, InputsError> {
        let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
        Inputs::read(&texts)
    }

    #[test]
    fn what_follows_the_last_colon_is_a_weight_where_it_is_a_number() {
        let input = |text: &str| read(&[text]).unwrap().0.remove(0);
        for (text, path, weight) in [
            ("a", "a", None),
            ("a:0.3", "a", Some(0.3)),
            ("a:b:2", "a:b", Some(2.0)),
            ("s3:bucket", "s3:bucket", None),
            ("a:nan", "a:nan", None),
            (":1", ":1", None),
        ] {
            let found = input(text);
            assert_eq!(found.to_string(), text);
            assert_eq!((found.path, found.weight), (path.into(), weight), "{text}");
        }
    }

    #[test]
    fn a_file_whose_name_ends_in_a_number_is_meant_where_it_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("x:2"), "").unwrap();
        for (text, name, weight) in [
            (path("x:2"), path("x:2"), None),
            (path("x:2:3"), path("x:2"), Some(3.0)),
            (path("x:4"), path("x"), Some(4.0)),
        ] {
            let input: Input = text.parse().unwrap();
            assert_eq!((input.path, input.weight), (name.into(), weight), "{text}");
        }
    }

    #[test]
    fn weights_are_above_zero_and_of_all_or_none() {
        for text in ["a:0", "a:-1", "a:1e999"] {
            let error = read(&[text]).unwrap_err();
            assert!(matches!(error, InputsError::Weight { .. }), "{text}");
        }
        let error = read(&["a:1", "b"]).unwrap_err().to_string();
        assert!(error.contains("`a:1`") && error.contains("`b`"), "{error}");
        assert_eq!(read(&[]), Err(InputsError::None));
        assert_eq!(read(&["a:1e308", "b:1e308"]), Err(InputsError::Sum));
        assert!(read(&["a", "b"]).is_ok() && read(&["a:1", "b:2"]).is_ok());
    }
}
