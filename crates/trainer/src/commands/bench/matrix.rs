//! A matrix of strategies: what is compared, and how long each is measured.

use crate::failure::{Failure, Result};
use optim::OptimizerKind;
use serde::{Deserialize, Serialize};

/// A matrix, as its TOML file says it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct BenchMatrix {
    /// Preset or file that all strategies share; `--config`, `--init-from` and `--lora-from` go before it.
    pub(crate) config: Option<String>,
    /// Settings that all strategies share, as `--set` takes them; flags go before them.
    pub(crate) set: Vec<String>,
    /// Steps of a run that do not count.
    pub(crate) warmup: Option<usize>,
    /// Steps of a run that count; `--steps` goes before them.
    pub(crate) steps: Option<usize>,
    /// How often the whole matrix is run.
    pub(crate) rounds: Option<usize>,
    /// Whether `--plan-only` compares strategies on paper too: a step's time, what a GiB costs, which GPUs hold it, and the peaks of
    /// all ranks.
    pub(crate) paper: bool,
    /// Every combination of these is a strategy.
    matrix: Axes,
    /// The same again, for models that have other labels or other ranks.
    matrices: Vec<Axes>,
    /// Strategies beside those of the axes.
    strategy: Vec<BenchStrategy>,
}

/// What strategies differ in. An axis that is left out has the shared setting.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Axes {
    /// Presets or files: what is compared is compared within each.
    model: Vec<String>,
    /// Specifications for `--recompute`.
    recompute: Vec<String>,
    /// Optimizers, and forms of their states: words of [`OPTIMIZER`] and names of optimizers, joined by `+`.
    optimizer: Vec<String>,
    /// `none`, or what lives elsewhere: `optimizer`, `parameters` and `gradients` on the host, `disk:DIR` for the optimizer's
    /// states in that folder, and labels of activations, joined by `+`.
    offload: Vec<String>,
    /// Kinds of attention.
    attention: Vec<String>,
    /// When gradients have served their purpose: `step` or `backward`.
    release: Vec<String>,
    /// Sequences in a micro-batch.
    micro_batch: Vec<usize>,
    /// Tokens in a tile.
    tile_tokens: Vec<usize>,
    /// How many ranks train together. Several are planned, not measured.
    ranks: Vec<usize>,
    /// What they divide: the stages of ZeRO.
    zero: Vec<usize>,
}

/// A named list of settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BenchStrategy {
    /// What the table calls it.
    pub(crate) name: String,
    /// Its own preset or file; none: the one that all share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) config: Option<String>,
    /// How many ranks train together; none: what all share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ranks: Option<usize>,
    /// Its settings, as `--set` takes them.
    pub(crate) set: Vec<String>,
}

/// Words for forms of the optimizer's states, and what they set.
const OPTIMIZER: [(&str, &str); 8] = [
    ("f32", "optim.state_dtype=f32"),
    ("bf16", "optim.state_dtype=bf16"),
    ("8bit", "optim.state_dtype=8bit"),
    ("f32-master", "optim.master=f32"),
    ("bf16-split", "optim.master=bf16-split"),
    ("24bit-master", "optim.master=bf16+8"),
    ("no-master", "optim.master=none"),
    ("bf16-grad", "optim.grad_dtype=bf16"),
];

/// Matrices that are compiled in, by name.
const BUILT_IN: [(&str, &str); 8] = [
    (
        "quick",
        include_str!("../../../../../configs/bench/quick.toml"),
    ),
    (
        "full",
        include_str!("../../../../../configs/bench/full.toml"),
    ),
    ("cpu", include_str!("../../../../../configs/bench/cpu.toml")),
    ("moe", include_str!("../../../../../configs/bench/moe.toml")),
    (
        "elsewhere",
        include_str!("../../../../../configs/bench/elsewhere.toml"),
    ),
    (
        "h100",
        include_str!("../../../../../configs/bench/h100.toml"),
    ),
    (
        "study",
        include_str!("../../../../../configs/bench/study.toml"),
    ),
    (
        "h200",
        include_str!("../../../../../configs/bench/h200.toml"),
    ),
];

impl BenchMatrix {
    /// Finds a matrix that is compiled in, else reads the file of that path.
    ///
    /// # Errors
    /// Neither exists, or the text is no matrix.
    pub(crate) fn open(name: &str) -> Result<BenchMatrix> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            return BenchMatrix::parse(name, text);
        }
        let text = files::read_small_text(name.as_ref()).map_err(|error| {
            let names = BUILT_IN.map(|(name, _)| name).join(", ");
            Failure::Usage(format!(
                "--matrix {name} is none of {names}, and cannot be read as a file: {error}"
            ))
        })?;
        BenchMatrix::parse(name, &text)
    }

    fn parse(name: &str, text: &str) -> Result<BenchMatrix> {
        let wrong = |error: toml::de::Error| {
            let message = error.to_string().trim_end().replace('\n', "\n  ");
            Failure::Usage(format!("{name} is no matrix of strategies: {message}"))
        };
        let matrix: BenchMatrix = toml::from_str(text).map_err(wrong)?;
        if matrix.strategies()?.is_empty() {
            return Err(Failure::Usage(format!(
                "{name} has no strategies: [matrix] takes recompute, optimizer, offload, attention, release, micro_batch, \
                 tile_tokens, ranks and zero; [[strategy]] takes name, ranks and set"
            )));
        }
        Ok(matrix)
    }

    /// Every strategy once, in the order of the file; the first is the baseline.
    ///
    /// # Errors
    /// A word that stands for no form of the optimizer's states, or a name that two strategies have.
    pub(crate) fn strategies(&self) -> Result<Vec<BenchStrategy>> {
        let mut all = self.matrix.combinations()?;
        for axes in &self.matrices {
            all.extend(axes.combinations()?);
        }
        all.extend(self.strategy.iter().cloned());
        for (index, strategy) in all.iter().enumerate() {
            if all[..index].iter().any(|other| other.name == strategy.name) {
                return Err(Failure::Usage(format!(
                    "two strategies of the matrix are called `{}`; give one another name",
                    strategy.name
                )));
            }
        }
        Ok(all)
    }
}

impl Axes {
    /// All combinations; the last axis changes fastest.
    fn combinations(&self) -> Result<Vec<BenchStrategy>> {
        let of = |values: &[String], set: fn(&str) -> Result<Vec<String>>| {
            let values = values.iter().map(|value| Ok((value.clone(), set(value)?)));
            values.collect::<Result<Vec<_>>>()
        };
        let sizes = |word: &str, key: &str, sizes: &[usize]| {
            let sizes = sizes.iter();
            let sizes = sizes.map(|size| (format!("{word} {size}"), vec![format!("{key}={size}")]));
            sizes.collect()
        };
        let axes = [
            of(&self.recompute, |spec| {
                Ok(vec![format!("recompute.spec={spec}")])
            })?,
            of(&self.optimizer, optimizer)?,
            of(&self.offload, |places| Ok(offload(places)))?,
            of(&self.attention, |kind| {
                Ok(vec![format!("attention.backend={kind}")])
            })?,
            of(&self.release, |when| {
                Ok(vec![format!("optim.release={when}")])
            })?,
            sizes("micro", "batch.micro", &self.micro_batch),
            sizes("tiles", "memory.tile_tokens", &self.tile_tokens),
            sizes("zero", "collectives.zero", &self.zero),
        ];
        let axes: Vec<_> = axes.into_iter().filter(|axis| !axis.is_empty()).collect();
        if axes.is_empty() && self.model.is_empty() && self.ranks.is_empty() {
            return Ok(Vec::new());
        }
        let mut all = vec![(Vec::new(), Vec::new())];
        for axis in &axes {
            // What never changes needs no mention, unless nothing does.
            let is_named = axis.len() > 1 || axes.iter().all(|axis| axis.len() == 1);
            let extended = all
                .iter()
                .flat_map(|(names, set): &(Vec<String>, Vec<String>)| {
                    axis.iter().map(move |(name, more)| {
                        let mut names = names.clone();
                        names.extend(is_named.then(|| name.clone()));
                        (names, [&set[..], more].concat())
                    })
                });
            all = extended.collect();
        }
        let names_ranks = self.ranks.len() > 1 || (axes.is_empty() && self.model.is_empty());
        let mut strategies = Vec::new();
        for model in or_shared(&self.model) {
            for ranks in or_shared(&self.ranks) {
                let of_ranks = ranks.filter(|_| names_ranks);
                let of_ranks = of_ranks.map(|ranks| format!("ranks {ranks}"));
                let first: Vec<String> = model.cloned().into_iter().chain(of_ranks).collect();
                strategies.extend(all.iter().map(|(names, set)| BenchStrategy {
                    name: [&first[..], names].concat().join(" / "),
                    config: model.cloned(),
                    ranks: ranks.copied(),
                    set: set.clone(),
                }));
            }
        }
        Ok(strategies)
    }
}

/// The values of an axis; without any, what all strategies share.
fn or_shared<T>(values: &[T]) -> impl Iterator<Item = Option<&T>> {
    let shared = values.is_empty().then_some(None);
    values.iter().map(Some).chain(shared)
}

fn optimizer(words: &str) -> Result<Vec<String>> {
    let setting = |word: &str| {
        let found = OPTIMIZER.iter().find(|(name, _)| *name == word);
        let kind = || {
            let is_one = OptimizerKind::NAMES.contains(&word);
            is_one.then(|| format!("optim.kind={word}"))
        };
        let found = found.map(|(_, set)| (*set).to_string()).or_else(kind);
        found.ok_or_else(|| {
            let forms = OPTIMIZER.iter().map(|(name, _)| *name);
            let known: Vec<&str> = forms.chain(OptimizerKind::NAMES.iter().copied()).collect();
            let known = known.join(", ");
            Failure::Usage(format!(
                "`{word}` is no optimizer and no form of its states; words are {known}, joined by + (adamw8bit is adamw+8bit)"
            ))
        })
    };
    words.split('+').map(setting).collect()
}

fn offload(places: &str) -> Vec<String> {
    if places == "none" {
        let keys = ["optimizer", "parameters", "gradients", "activations"];
        return keys.map(|key| format!("offload.{key}=none")).into();
    }
    let (mut set, mut labels) = (Vec::new(), Vec::new());
    for place in places.split('+') {
        match (place, place.strip_prefix("disk:")) {
            ("optimizer" | "parameters" | "gradients", _) => {
                set.push(format!("offload.{place}=pinned"));
            }
            (_, Some(folder)) => set.push(format!("offload.optimizer={folder}")),
            _ => labels.push(place),
        }
    }
    if !labels.is_empty() {
        set.push(format!("offload.activations={}", labels.join(",")));
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_multiply_and_name_what_changes() {
        let text = "[matrix]\nrecompute = ['none', 'full']\noptimizer = ['8bit+bf16-split']\nmicro_batch = [1, 4]\n\
                    tile_tokens = [64]\n[[strategy]]\nname = 'short'\nset = ['data.seq=8']";
        let strategies = BenchMatrix::parse("x", text).unwrap().strategies().unwrap();
        let names: Vec<&str> = strategies.iter().map(|one| one.name.as_str()).collect();
        let expected = [
            "none / micro 1",
            "none / micro 4",
            "full / micro 1",
            "full / micro 4",
            "short",
        ];
        assert_eq!(names, expected);
        let set = [
            "recompute.spec=full",
            "optim.state_dtype=8bit",
            "optim.master=bf16-split",
            "batch.micro=1",
            "memory.tile_tokens=64",
        ];
        assert_eq!(strategies[2].set, set);
    }

    #[test]
    fn every_model_has_every_strategy() {
        let text = "[matrix]\nmodel = ['gpt2', 'tiny']\nrecompute = ['none', 'full']";
        let strategies = BenchMatrix::parse("x", text).unwrap().strategies().unwrap();
        assert_eq!(strategies[3].name, "tiny / full");
        assert_eq!(strategies[3].config.as_deref(), Some("tiny"));
        assert_eq!(strategies.len(), 4);
    }

    #[test]
    fn further_matrices_have_axes_of_their_own() {
        let text = "[[matrices]]\nmodel = ['tiny']\nranks = [2]\nrecompute = ['none', 'full']\n[[matrices]]\nmodel = ['gpt2']\n\
                    recompute = ['none']";
        let strategies = BenchMatrix::parse("x", text).unwrap().strategies().unwrap();
        let named: Vec<_> = strategies
            .iter()
            .map(|one| (one.name.as_str(), one.ranks))
            .collect();
        let expected = [
            ("tiny / none", Some(2)),
            ("tiny / full", Some(2)),
            ("gpt2 / none", None),
        ];
        assert_eq!(named, expected);
    }

    #[test]
    fn ranks_multiply_with_what_they_divide() {
        let text = "[matrix]\nranks = [1, 8]\nzero = [0, 3]";
        let strategies = BenchMatrix::parse("x", text).unwrap().strategies().unwrap();
        let named: Vec<_> = strategies
            .iter()
            .map(|one| (one.name.as_str(), one.ranks, one.set[0].as_str()))
            .collect();
        let (none, all) = ("collectives.zero=0", "collectives.zero=3");
        let expected = [
            ("ranks 1 / zero 0", Some(1), none),
            ("ranks 1 / zero 3", Some(1), all),
            ("ranks 8 / zero 0", Some(8), none),
            ("ranks 8 / zero 3", Some(8), all),
        ];
        assert_eq!(named, expected);
        let text = "[matrix]\nranks = [4]\nrecompute = ['none', 'full']";
        let strategies = BenchMatrix::parse("x", text).unwrap().strategies().unwrap();
        assert_eq!(
            (strategies[1].name.as_str(), strategies[1].ranks),
            ("full", Some(4))
        );
    }

    #[test]
    fn what_waits_on_the_host_is_split_into_states_and_labels() {
        assert_eq!(offload("optimizer"), ["offload.optimizer=pinned"]);
        assert_eq!(offload("qkv+mlp"), ["offload.activations=qkv,mlp"]);
        assert_eq!(offload("optimizer+qkv").len(), 2);
        assert_eq!(offload("none")[3], "offload.activations=none");
        let all = [
            "offload.optimizer=/scratch",
            "offload.parameters=pinned",
            "offload.gradients=pinned",
            "offload.activations=qkv,mlp",
        ];
        assert_eq!(offload("disk:/scratch+qkv+parameters+gradients+mlp"), all);
    }

    #[test]
    fn every_matrix_of_ours_is_one() {
        for (name, _) in BUILT_IN {
            let strategies = BenchMatrix::open(name).unwrap().strategies().unwrap();
            assert!(strategies.len() >= 3, "{name}");
        }
        // Published shapes and the study are compared on paper where there is no GPU.
        let on_paper = BUILT_IN
            .iter()
            .filter(|(name, _)| BenchMatrix::open(name).unwrap().paper);
        let names: Vec<&str> = on_paper.map(|(name, _)| *name).collect();
        assert_eq!(names, ["h100", "study", "h200"]);
    }

    #[test]
    fn what_is_no_matrix_is_refused() {
        for (text, word) in [
            ("", "has no strategies"),
            ("[matrix]\nrecompute = 3", "recompute = 3"),
            ("[matrix]\nrecomputed = ['none']", "recomputed"),
            ("[matrix]\noptimizer = ['9bit']", "`9bit` is no optimizer"),
            (
                "[matrix]\nrecompute = ['none', 'none']",
                "are called `none`",
            ),
        ] {
            let refused = BenchMatrix::parse("x", text).unwrap_err().to_string();
            assert!(refused.contains(word), "{text}: {refused}");
        }
        let refused = BenchMatrix::open("no-such").unwrap_err().to_string();
        assert!(refused.contains("quick, full"), "{refused}");
    }
}
