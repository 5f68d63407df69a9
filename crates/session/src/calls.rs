//! Lists what a step asks a GPU to compute, without a GPU: for the rehearsal before the first step, and for estimates.

use crate::shapes::shape_of_a_step;
use crate::{Result, Session};
use kernels::cuda::{Call, Cuda, Gemm, KernelKind, Listed, Listing};
use memory::Home;
use settings::{PerFamily, Settings};
use std::cell::RefCell;
use std::rc::Rc;

/// The calls of a step, in order.
#[derive(Debug)]
pub struct StepCalls {
    /// The calls up to the end of each micro-batch's backward pass, of at most [`crate::MICRO_BATCHES_MAX`]: all after the first compute
    /// the same. In a pipeline, of all.
    pub micro_batches: Vec<Vec<Listed>>,
    /// The calls after them: the norm of the gradients, and the update.
    pub update: Vec<Listed>,
}

/// Lists everything that a step asks a GPU to compute, by kernels of some kinds. Nothing is computed or allocated.
///
/// # Errors
/// [`SessionError::Config`](crate::SessionError::Config) if no session can be made from the settings.
pub fn calls_of_a_step(settings: &Settings, kinds: PerFamily<KernelKind>) -> Result<StepCalls> {
    let (mut session, listing) = listed(settings, kinds)?;
    let micro_batches: Rc<RefCell<Vec<_>>> = Rc::default();
    let (made, calls) = (micro_batches.clone(), listing.clone());
    session.on_micro_batch(move |_, _| made.borrow_mut().push(calls.take()));
    session.step(&shape_of_a_step(settings, settings.seq))?;
    Ok(StepCalls {
        micro_batches: micro_batches.take(),
        update: listing.take(),
    })
}

/// The calls of NVIDIA's libraries in a step and in the work between steps, in order.
#[derive(Clone, Debug, Default)]
pub struct LibraryCalls {
    /// Matrix products, computed by cuBLASLt, with those of the step first.
    pub products: Vec<Gemm>,
    /// How many of them belong to the step.
    of_step: usize,
}

impl LibraryCalls {
    /// The products of training. Those of the work between steps do not count, because they change no bits of training,
    /// and may differ when a run is resumed.
    pub fn products_of_step(&self) -> &[Gemm] {
        &self.products[..self.of_step]
    }
}

/// Lists the library calls of a step and of the work between steps. Nothing is computed or allocated.
///
/// # Errors
/// As [`calls_of_a_step`].
pub fn library_calls(settings: &Settings) -> Result<LibraryCalls> {
    let (mut session, listing) = listed(settings, PerFamily::SM80)?;
    let product = |listed: Listed| match listed.call {
        Call::Product(gemm) => Some(gemm),
        Call::Launch { .. } | Call::Clear(_) => None,
    };
    session.step(&shape_of_a_step(settings, settings.seq))?;
    let mut products: Vec<Gemm> = listing.take().into_iter().filter_map(product).collect();
    let of_step = products.len();
    session.between_steps_on_shapes()?;
    products.extend(listing.take().into_iter().filter_map(product));
    Ok(LibraryCalls { products, of_step })
}

/// A session that lists its calls, from its first step on.
fn listed(settings: &Settings, kinds: PerFamily<KernelKind>) -> Result<(Session, Listing)> {
    let memory = Listing::memory();
    let listing = Listing::of_rank(settings.rank_of_all().number, &memory);
    let mut settings = settings.clone();
    // No call depends on the home of states, and no file should be made for this.
    if let Home::Disk(_) = settings.homes.states {
        settings.homes.states = Home::Pinned;
    }
    let kernels = Cuda::new(listing.clone(), &memory, settings.narrowest_dtype())?
        .with_attention_by(kinds.attention)
        .with_experts_by(kinds.experts);
    let session = Session::on_kernels(settings, &memory, Box::new(kernels))?;
    listing.take();
    Ok((session, listing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Phase;
    use settings::Config;
    use std::collections::HashSet;

    /// The sizes of products, with whether each is added to something.
    fn sizes(gemms: &[Gemm]) -> HashSet<([usize; 3], bool)> {
        let of = |gemm: &Gemm| (gemm.sizes, gemm.init.is_some());
        gemms.iter().map(of).collect()
    }

    /// Gate and up are one product: forward by the tokens, backward for the input's and the weight's gradient. The same
    /// holds for the products after them. In the second micro-batch, weight gradients are added to those of the first.
    #[test]
    fn all_products_of_a_linear_layer_are_listed() {
        let mut config = Config::default();
        (config.model.hidden, config.model.ffn) = (64, 176);
        config.batch.accum = 3;
        let settings = Settings::new(&config).unwrap();
        let gemms = library_calls(&settings).unwrap().products;
        let tokens = settings.micro_batch * settings.seq;
        let listed = sizes(&gemms);
        for expected in [
            ([tokens, 64, 352], false),
            ([tokens, 176, 64], true),
            ([352, tokens, 64], false),
            ([352, tokens, 64], true),
        ] {
            assert!(listed.contains(&expected), "{expected:?} of {listed:?}");
        }
        let once = Settings {
            accum: 1,
            ..settings
        };
        let of_one = library_calls(&once).unwrap().products;
        assert_eq!(gemms.len(), 2 * of_one.len());
        assert!(!sizes(&of_one).contains(&([352, tokens, 64], true)));
    }

    fn calls_of(accum: usize) -> StepCalls {
        let mut config = Config::default();
        config.batch.accum = accum;
        calls_of_a_step(&Settings::new(&config).unwrap(), PerFamily::SM80).unwrap()
    }

    #[test]
    fn calls_are_told_apart_by_micro_batch_and_update() {
        let StepCalls {
            micro_batches,
            update,
        } = calls_of(5);
        let [first, later] = &micro_batches[..] else {
            panic!("{} micro-batches", micro_batches.len());
        };
        // The first micro-batch clears the gradient of the embedding table; otherwise all compute the same.
        let clears = |call: &&Listed| matches!(call.call, Call::Clear(_));
        let cleared = [first, later, &update].map(|calls| calls.iter().filter(clears).count());
        assert_eq!(cleared, [1, 0, 0]);
        assert_eq!(first.len(), later.len() + 1);
        let updates = |call: &&Listed| call.operation == "adamw";
        assert!(!first.iter().chain(later).any(|call| updates(&call)));
        let last = update.iter().rfind(updates).expect("an update");
        assert_eq!(last.place.phase, Phase::Optimizer);
    }

    #[test]
    fn an_operation_costs_what_it_takes_with_the_first_of_its_calls() {
        let calls = calls_of(1).micro_batches.swap_remove(0);
        for listed in &calls {
            match listed.call {
                Call::Product(gemm) if listed.operation == "matmul" => {
                    let product: usize = gemm.sizes.iter().product();
                    assert_eq!(listed.cost.flops, 2 * product as u64);
                }
                Call::Launch { kernel, .. } if listed.operation == "rms_norm_backward" => {
                    assert_eq!(listed.cost.bytes == 0, kernel.source == "columns");
                }
                _ => {}
            }
        }
        let costs_nothing = |listed: &Listed| listed.cost == Default::default();
        assert!(calls.iter().any(costs_nothing));
    }

    /// How many kernels of a block have such names, in each micro-batch of a step in FP8.
    fn launches_in_fp8(is_counted: fn(&str) -> bool, more: &[&str]) -> Vec<usize> {
        let set = ["train.dtype=bf16", "fp8.recipe=tensor", "batch.accum=3"];
        let set = set.iter().chain(more).map(ToString::to_string);
        let config = Config::default().with(&set.collect::<Vec<_>>()).unwrap();
        let blocks = config.model.layers;
        let calls = calls_of_a_step(&Settings::new(&config).unwrap(), PerFamily::SM80).unwrap();
        let is_counted = |listed: &&Listed| matches!(listed.call, Call::Launch { kernel, .. } if is_counted(kernel.name));
        let count = |calls: &Vec<Listed>| calls.iter().filter(is_counted).count() / blocks;
        calls.micro_batches.iter().map(count).collect()
    }

    const GPT2: [&str; 7] = [
        "model.norm=layer",
        "model.activation=gelu_tanh",
        "model.positions=learned",
        "model.max_positions=1024",
        "model.biases=true",
        "model.tie_embeddings=true",
        "model.kv_heads=4",
    ];

    /// Products in FP8 search for the largest magnitude of a weight once a step, and of inputs and gradients once a micro-batch. Nothing
    /// searches for those of what norms and the activation function make, of the latter's gradient, or of the joined gradients of queries, keys
    /// and values: their kernels find them.
    #[test]
    fn each_output_form_in_fp8_is_searched_for_once() {
        let searches = |more: &[&str]| -> Vec<usize> {
            launches_in_fp8(|name| name.starts_with("abs_max_of_part_"), more)
        };
        // Four weights; the input of attention's output projection; the gradients of the second and the fourth layer.
        let expected = [4 + 1 + 2, 1 + 2];
        for more in [
            &[][..],
            &["fp8.save=false"],
            &["fp8.weights=step"],
            &["recompute.spec=full"],
            &GPT2,
        ] {
            assert_eq!(searches(more), expected, "{more:?}");
        }
    }

    /// A replay knows the scales of what both norms and the activation function make, so their kernels write its codes. No pass over values
    /// does.
    #[test]
    fn a_replay_makes_codes_of_fp8_at_once() {
        let codes = |more: &[&str]| launches_in_fp8(|name| name.contains("_codes_"), more);
        let passes = |more: &[&str]| launches_in_fp8(|name| name.starts_with("quantise_"), more);
        for model in [&[][..], &GPT2] {
            let [kept, replayed] =
                ["none", "layernorm,mlp_act"].map(|of| format!("recompute.spec={of}"));
            let [kept, replayed] = [&kept, &replayed].map(|spec| [model, &[spec]].concat());
            assert_eq!([codes(&kept), codes(&replayed)], [[0, 0], [3, 3]]);
            assert_eq!(passes(&kept), passes(&replayed));
        }
    }

    /// Fast accumulation is for forward products in FP8 alone: of each micro-batch, one a layer.
    #[test]
    fn forward_products_in_fp8_may_accumulate_fast() {
        let fast = |more: &[&str]| {
            let set = ["train.dtype=bf16", "fp8.recipe=tensor", "batch.accum=2"];
            let set = set.iter().chain(more).map(ToString::to_string);
            let config = Config::default().with(&set.collect::<Vec<_>>()).unwrap();
            let products = library_calls(&Settings::new(&config).unwrap()).unwrap();
            let mut fast: Vec<Gemm> = products.products;
            fast.retain(|gemm| gemm.fast_accumulation);
            assert!(fast.iter().all(|gemm| gemm.scales.is_some()));
            fast.len() / config.model.layers
        };
        assert_eq!(fast(&[]), 0);
        assert_eq!(fast(&["fp8.fast_accumulation=true"]), 2 * 4);
        let replayed = ["fp8.fast_accumulation=true", "recompute.spec=full"];
        assert_eq!(fast(&replayed), 2 * (4 + 3));
    }

    /// The work between steps is listed for the rehearsal, but does not change the name of the step's products.
    #[test]
    fn products_of_the_step_are_those_of_a_run_with_nothing_between_steps() {
        let mut config = Config::default();
        (config.eval.every, config.eval.micro_batch) = (Some(1), Some(1));
        let evaluating = library_calls(&Settings::new(&config).unwrap()).unwrap();
        config.eval.every = None;
        let alone = library_calls(&Settings::new(&config).unwrap()).unwrap();
        let all_of = |gemms: &[Gemm]| format!("{gemms:?}");
        assert!(evaluating.products.len() > alone.products.len());
        assert_eq!(
            all_of(evaluating.products_of_step()),
            all_of(&alone.products)
        );
    }
}
