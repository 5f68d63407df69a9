//! A stage is held to what it declares: it pulls all of that, and nothing else.

use crate::common::harness::{Run, VOCAB};
use memory::Layer;
use model::stages::{Embedding, Head, Norm};
use model::{
    Activation, Architecture, Block, Extent, Io, Label, Labels, Linear, ModelError, ParameterId,
    Parameters, Pass, Policy, Stage,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

const WIDTH: usize = 8;
const Y: Activation = Activation::new("y", "d_y", Label::ATTN_OUT);

/// next x = a copy of x, with other declarations than what it does.
#[derive(Clone, Copy)]
struct Copied {
    declares: &'static [Activation],
    pulls: &'static [Activation],
    backward_declares: &'static [Activation],
    backward_pulls: &'static [Activation],
    declared_parameters: Option<ParameterId>,
    used_parameters: Option<ParameterId>,
}

const HONEST: Copied = Copied {
    declares: &[Activation::X],
    pulls: &[Activation::X],
    backward_declares: &[],
    backward_pulls: &[],
    declared_parameters: None,
    used_parameters: None,
};

impl Stage for Copied {
    fn name(&self) -> &'static str {
        "copied"
    }

    fn io(&self) -> Io {
        Io {
            reads: self.declares.to_vec(),
            writes: vec![
                (Y, Extent::tokens(WIDTH)),
                (Activation::NEXT_X, Extent::tokens(WIDTH)),
            ],
            backward_reads: self.backward_declares.to_vec(),
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        self.declared_parameters.iter().copied().collect()
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        for activation in self.pulls {
            pass.pull(*activation)?;
        }
        if let Some(parameter) = self.used_parameters {
            let _ = pass.parameter(parameter);
        }
        for output in [Y, Activation::NEXT_X] {
            let mut out = pass.output(output)?;
            if let Some(out) = &mut out {
                let value = 0.5;
                pass.kernels().run(kernels::operation::Fill {
                    out: out.view_mut(),
                    value,
                })?;
            }
            pass.put(output, out);
        }
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        for activation in self.backward_pulls {
            pass.pull(*activation)?;
        }
        let dx = pass.gradient(Activation::NEXT_X);
        pass.file_gradient(Activation::X, dx);
        Ok(())
    }
}

/// A model of one such stage, which may use the embedding's matrix.
fn architecture(make: impl Fn(ParameterId) -> Copied) -> Architecture {
    let mut parameters = Parameters::default();
    let mut all = parameters.of_part(Layer::Embedding, "");
    let embedding = Embedding::declare(&mut all, "embedding", [VOCAB, WIDTH]);
    let head = Head {
        norm: Norm::rms(&mut all, "norm", WIDTH, 1e-5),
        linear: Linear::declare(&mut all, "head", [VOCAB, WIDTH], false),
        logit_multiplier: 1.0,
        cap: None,
    };
    let stages: [Box<dyn Stage>; 1] = [Box::new(make(embedding.tokens))];
    let blocks = vec![Block::new(WIDTH, stages)];
    Architecture::new(Labels::DENSE, parameters, Box::new(embedding), blocks, head)
}

/// What a run of a stage panics with; nothing if it is well.
fn complaint(make: impl Fn(ParameterId) -> Copied) -> Option<String> {
    let run = || Run::on_cpu(architecture(make), &Policy::keep_all(1)).train(1);
    let panic = catch_unwind(AssertUnwindSafe(run)).err()?;
    Some(*panic.downcast::<String>().expect("it says what is wrong"))
}

#[test]
fn stages_pull_what_they_declare() {
    let other = &[Activation::X, Y];
    let x = &[Activation::X];
    let pulls_undeclared = Copied {
        declares: &[],
        ..HONEST
    };
    let never_pulls = Copied {
        pulls: &[],
        ..HONEST
    };
    let backward_undeclared = Copied {
        backward_declares: x,
        backward_pulls: other,
        ..HONEST
    };
    let backward_never = Copied {
        backward_declares: other,
        backward_pulls: x,
        ..HONEST
    };
    assert_eq!(complaint(|_| HONEST), None);
    for (stage, expected) in [
        (
            pulls_undeclared,
            "copied pulls x, which it does not declare",
        ),
        (
            never_pulls,
            "copied declares that it reads x, and never pulls it",
        ),
        (
            backward_undeclared,
            "copied pulls y, which it does not declare",
        ),
        (
            backward_never,
            "copied declares that it reads y, and never pulls it",
        ),
    ] {
        assert_eq!(complaint(|_| stage).as_deref(), Some(expected));
    }
}

#[test]
fn stages_use_the_parameters_that_they_declare() {
    let both = |id| Copied {
        declared_parameters: Some(id),
        used_parameters: Some(id),
        ..HONEST
    };
    let undeclared = |id| Copied {
        used_parameters: Some(id),
        ..HONEST
    };
    assert_eq!(complaint(both), None);
    let expected = "copied uses a parameter that it does not declare";
    assert_eq!(complaint(undeclared).as_deref(), Some(expected));
}
