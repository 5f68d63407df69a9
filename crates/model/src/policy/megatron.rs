//! Megatron-LM's recompute flags, with the meaning that they have there.

use super::spec::SpecError;
use crate::Labels;
use crate::label::names;

/// The values of `--recompute-granularity`, `--recompute-modules`, `--recompute-method` and `--recompute-num-layers`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MegatronFlags {
    /// `none`, `selective` or `full`.
    pub granularity: Option<String>,
    /// Modules of selective recompute; absent: `core_attn`; empty: nothing is recomputed.
    pub modules: Option<Vec<String>>,
    /// `uniform` or `block`.
    pub method: Option<String>,
    /// Layers in a chunk of `uniform`, or recomputed layers of `block`.
    pub num_layers: Option<String>,
}

impl MegatronFlags {
    /// The specification that means the same; none if no flag is given.
    ///
    /// # Errors
    /// [`SpecError::Megatron`] for combinations that Megatron refuses too, with what to write instead. The number
    /// of layers and the modules are checked with the specification.
    pub fn spec(&self) -> Result<Option<String>, SpecError> {
        if *self == MegatronFlags::default() {
            return Ok(None);
        }
        let spec = match self.granularity.as_deref() {
            None => refuse(
                "needs --recompute-granularity selective or full beside it",
                self.first_flag(),
            ),
            Some("none") => self.nothing_beside("none").map(|()| "none".into()),
            Some("selective") => self.selective(),
            Some("full") => self.full(),
            Some("auto") => self.nothing_beside("auto").map(|()| "auto".into()),
            Some(other) => {
                let what = format!("--recompute-granularity {other}");
                refuse("is unknown; use none, selective, full or auto", &what)
            }
        };
        spec.map(Some)
    }

    fn first_flag(&self) -> &'static str {
        match (&self.modules, &self.method) {
            (Some(_), _) => "--recompute-modules",
            (None, Some(_)) => "--recompute-method",
            (None, None) => "--recompute-num-layers",
        }
    }

    fn nothing_beside(&self, granularity: &str) -> Result<(), SpecError> {
        let alone = MegatronFlags {
            granularity: self.granularity.clone(),
            ..MegatronFlags::default()
        };
        if *self == alone {
            return Ok(());
        }
        refuse(
            &format!("contradicts --recompute-granularity {granularity}; leave one of them out"),
            self.first_flag(),
        )
    }

    fn selective(&self) -> Result<String, SpecError> {
        if self.method.is_some() || self.num_layers.is_some() {
            let without_modules = MegatronFlags {
                modules: None,
                ..self.clone()
            };
            return refuse(
                "is for --recompute-granularity full; selective recompute takes --recompute-modules and applies to all \
                 layers",
                without_modules.first_flag(),
            );
        }
        Ok(match &self.modules {
            None => "core_attn".into(),
            Some(modules) if modules.iter().all(|module| module.trim().is_empty()) => "none".into(),
            Some(modules) => modules.join(","),
        })
    }

    fn full(&self) -> Result<String, SpecError> {
        if self.modules.is_some() {
            return refuse(
                &format!(
                    "is for --recompute-granularity selective; full recomputes whole layers (modules: {})",
                    names(Labels::of_all(|labels| labels.named().collect()).into_iter())
                ),
                "--recompute-modules",
            );
        }
        let method = match self.method.as_deref() {
            Some(method @ ("uniform" | "block")) => method,
            Some(other) => {
                return refuse(
                    "is unknown; use uniform or block",
                    &format!("--recompute-method {other}"),
                );
            }
            None => {
                return refuse(
                    "needs --recompute-method uniform or block beside it; --recompute full is the short form of uniform \
                     with 1 layer",
                    "--recompute-granularity full",
                );
            }
        };
        match &self.num_layers {
            Some(count) => Ok(format!("full:{method}:{count}")),
            None => refuse(
                "needs --recompute-num-layers beside it",
                &format!("--recompute-method {method}"),
            ),
        }
    }
}

fn refuse<T>(why: &str, flag: &str) -> Result<T, SpecError> {
    Err(SpecError::Megatron(format!("{flag} {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(
        granularity: &str,
        modules: Option<&[&str]>,
        method: &str,
        num_layers: &str,
    ) -> MegatronFlags {
        let given = |text: &str| (!text.is_empty()).then(|| text.to_string());
        MegatronFlags {
            granularity: given(granularity),
            modules: modules
                .map(|modules| modules.iter().map(|module| module.to_string()).collect()),
            method: given(method),
            num_layers: given(num_layers),
        }
    }

    #[test]
    fn flags_mean_what_they_mean_in_megatron() {
        let cases = [
            (flags("", None, "", ""), None),
            (flags("none", None, "", ""), Some("none")),
            (flags("auto", None, "", ""), Some("auto")),
            (flags("selective", None, "", ""), Some("core_attn")),
            (flags("selective", Some(&[]), "", ""), Some("none")),
            (
                flags("selective", Some(&["mlp", "layernorm"]), "", ""),
                Some("mlp,layernorm"),
            ),
            (flags("full", None, "uniform", "4"), Some("full:uniform:4")),
            (flags("full", None, "block", "2"), Some("full:block:2")),
        ];
        for (flags, expected) in cases {
            assert_eq!(flags.spec().unwrap().as_deref(), expected);
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let cases = [
            (
                flags("", Some(&["mlp"]), "", ""),
                "--recompute-modules needs --recompute-granularity",
            ),
            (flags("", None, "", "3"), "--recompute-num-layers needs"),
            (
                flags("partial", None, "", ""),
                "use none, selective, full or auto",
            ),
            (
                flags("selective", None, "uniform", ""),
                "--recompute-method is for",
            ),
            (
                flags("selective", Some(&["mlp"]), "", "2"),
                "--recompute-num-layers is for",
            ),
            (flags("full", None, "", ""), "needs --recompute-method"),
            (
                flags("full", None, "uniform", ""),
                "needs --recompute-num-layers",
            ),
            (flags("full", None, "rows", "1"), "use uniform or block"),
            (
                flags("full", Some(&["mlp"]), "uniform", "1"),
                "--recompute-modules is for",
            ),
            (
                flags("none", Some(&["mlp"]), "", ""),
                "contradicts --recompute-granularity none",
            ),
        ];
        for (flags, expected) in cases {
            let message = flags.spec().unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
