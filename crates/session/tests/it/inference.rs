//! Evaluation and generation, held to training steps, to Hugging Face transformers, and to their plans.

use data::{MASKED, MicroBatch, StepBatch};
use kernels::Target;
use kernels::meta::FlopCounter;
use memory::Memory;
use model::{KvCache, ModelConfig};
use serde_json::Value;
use session::{
    Evaluation, Generated, Generation, Inference, PROMPT_CHUNK, Sampling, Session, SessionError,
    shape_of_a_micro_batch, shape_of_a_step,
};
use settings::{AutoOr, Config, Settings};
use std::path::{Path, PathBuf};

#[path = "../../../trainer/tests/golden/transformers/families.rs"]
mod families;
use families::FAMILIES;

const WINDOW: usize = 32;

fn folder(family: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../trainer/tests/golden/transformers");
    golden.join(family)
}

/// Settings for a family, with further ones.
fn settings(family: &str, set: &[&str]) -> Settings {
    let text = std::fs::read_to_string(folder(family).join("config.json")).unwrap();
    let mut config = Config {
        model: ModelConfig::from_hf(&text).unwrap(),
        ..Config::default()
    };
    config.data.seq = WINDOW;
    (
        config.batch.micro,
        config.batch.accum,
        config.memory.head_chunk,
    ) = (2, 2, AutoOr::Number(50));
    let set: Vec<String> = ["train.device=cpu", "train.dtype=f32"]
        .iter()
        .chain(set)
        .map(ToString::to_string)
        .collect();
    Settings::new(&config.with(&set).unwrap()).unwrap()
}

fn inference(family: &str) -> Inference {
    inference_with(family, &[])
}

fn inference_with(family: &str, set: &[&str]) -> Inference {
    let mut inference = Inference::on_cpu(&settings(family, set), &Memory::host()).unwrap();
    inference.incoming().import(&folder(family)).unwrap();
    inference
}

fn greedy(max_tokens: usize) -> Generation {
    Generation {
        max_tokens,
        window: WINDOW,
        ends: Vec::new(),
        sampling: Sampling::GREEDY,
        uses_cache: true,
    }
}

fn sampled(max_tokens: usize) -> Generation {
    let sampling = Sampling {
        temperature: 1.5,
        top_k: Some(40),
        top_p: 0.95,
        seed: 7,
    };
    Generation {
        sampling,
        ..greedy(max_tokens)
    }
}

fn generate(inference: &mut Inference, prompts: &[Vec<u32>], wanted: &Generation) -> Vec<Vec<u32>> {
    let mut told = vec![Vec::new(); prompts.len()];
    let made = inference
        .forward()
        .generate(prompts, wanted, |prompt, token| told[prompt].push(token));
    let tokens: Vec<Vec<u32>> = made.unwrap().into_iter().map(|made| made.tokens).collect();
    assert_eq!(told, tokens, "every token is told");
    tokens
}

fn reference(family: &str) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let text = std::fs::read_to_string(folder(family).join("greedy.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let lists = |key: &str| serde_json::from_value(json[key].clone()).unwrap();
    (lists("prompts"), lists("continuations"))
}

#[test]
fn greedy_text_is_transformers_with_a_cache_and_without() {
    for family in FAMILIES {
        let (prompts, expected) = reference(family);
        let mut inference = inference(family);
        for uses_cache in [true, false] {
            let wanted = Generation {
                uses_cache,
                ..greedy(expected[0].len())
            };
            let made = generate(&mut inference, &prompts, &wanted);
            assert_eq!(made, expected, "{family}, cache: {uses_cache}");
        }
    }
}

/// A text that goes on behind all that is cached, one that leaves it, and one of which nothing was drawn before. States of the gated
/// delta rule cannot go back.
#[test]
fn a_text_that_goes_on_is_one_that_is_read_whole() {
    for family in ["llama", "qwen3_5", "qwen3_next"] {
        let (prompts, _) = reference(family);
        let first = &prompts[2];
        let mut inference = inference(family);
        let mut text = inference.forward().cached_text(WINDOW).unwrap();
        let mut go_on = |prompt: &[u32], max_tokens: usize| {
            let wanted = greedy(max_tokens);
            let [whole] = &generate(&mut inference, &[prompt.to_vec()], &wanted)[..] else {
                panic!("there is one prompt");
            };
            let made = inference
                .forward()
                .continue_text(&mut text, (0, prompt), &wanted, |_| ());
            let made = made.unwrap().tokens;
            assert_eq!(&made, whole, "{family} after {prompt:?}");
            [prompt, &made, &[3, 1]].concat()
        };
        let longer = go_on(first, 3);
        go_on(&longer, 3);
        let left = [&longer[..7], &[5, 2]].concat();
        let longer = go_on(&left, 0);
        go_on(&longer, 3);
    }
}

#[test]
fn tiles_of_tokens_change_no_token() {
    let without_experts = |family: &&str| settings(family, &[]).model.experts.is_none();
    for family in FAMILIES.into_iter().filter(without_experts) {
        let (prompts, expected) = reference(family);
        let mut inference = inference_with(family, &["memory.tile_tokens=3"]);
        for uses_cache in [true, false] {
            let wanted = Generation {
                uses_cache,
                ..greedy(expected[0].len())
            };
            let made = generate(&mut inference, &prompts, &wanted);
            assert_eq!(made, expected, "{family}, cache: {uses_cache}");
        }
    }
}

/// Drawn tokens too, for which more than the likeliest logit has to be right.
#[test]
fn a_cache_and_a_batch_change_no_token() {
    for family in FAMILIES {
        let (prompts, greedy_tokens) = reference(family);
        let (mut inference, wanted) = (inference(family), sampled(13));
        let together = generate(&mut inference, &prompts, &wanted);
        assert_ne!(together, greedy_tokens, "{family}: draws are no maxima");
        let without = Generation {
            uses_cache: false,
            ..wanted.clone()
        };
        assert_eq!(
            together,
            generate(&mut inference, &prompts, &without),
            "{family}"
        );
        // Alone, the first prompt has the number that it has together.
        let alone = generate(&mut inference, &prompts[..1], &wanted);
        assert_eq!(alone[0], together[0], "{family}");
        let greedy = greedy(13);
        let together = generate(&mut inference, &prompts, &greedy);
        for (prompt, together) in prompts.iter().zip(together) {
            let alone = generate(&mut inference, std::slice::from_ref(prompt), &greedy);
            assert_eq!(alone[0], together, "{family}");
        }
    }
}

/// The blocks of the cache that its chunks fill hold what one pass over the whole would see.
#[test]
fn a_long_prompt_is_read_in_chunks() {
    let prompt: Vec<u32> = (0..2 * PROMPT_CHUNK + 30)
        .map(|at| (at * at % 53) as u32)
        .collect();
    let seq = prompt.len() + 4;
    let settings = settings("llama3", &[&format!("data.seq={seq}")]);
    let mut inference = Inference::on_cpu(&settings, &Memory::host()).unwrap();
    inference.incoming().import(&folder("llama3")).unwrap();
    let made = [true, false].map(|uses_cache| {
        let wanted = Generation {
            uses_cache,
            window: seq,
            ..sampled(4)
        };
        generate(&mut inference, std::slice::from_ref(&prompt), &wanted)
    });
    assert_eq!(made[0], made[1]);
}

#[test]
fn sequences_end_at_their_ends_and_at_the_window() {
    let (prompts, expected) = reference("llama");
    let mut inference = inference("llama");
    let wanted = Generation {
        ends: vec![expected[0][4]],
        ..greedy(100)
    };
    let made = inference
        .forward()
        .generate(&prompts, &wanted, |_, _| ())
        .unwrap();
    let ended = Generated {
        tokens: expected[0][..4].to_vec(),
        is_ended: true,
    };
    assert_eq!(made[0], ended);
    for (prompt, made) in prompts.iter().zip(&made) {
        assert!(made.is_ended || prompt.len() + made.tokens.len() == WINDOW);
    }
    assert!(made.iter().any(|made| !made.is_ended));
}

#[test]
fn generation_needs_what_it_needs_on_shapes() {
    let prompts: Vec<Vec<u32>> = [3, 20, 1].map(|tokens| vec![5; tokens]).to_vec();
    for family in FAMILIES {
        let settings = settings(family, &[]);
        let held = [true, false].map(|uses_cache| {
            let wanted = Generation {
                uses_cache,
                // Texts outgrow the short factors of LongRoPE, at 12 tokens.
                ..sampled(11)
            };
            let shapes = Memory::shapes();
            let mut planned = Inference::on_shapes(&settings, &shapes, Target::Cpu).unwrap();
            let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
            planned.forward().rehearse(&lengths, &wanted).unwrap();
            let (plan, memory) = (shapes.step_memory(), Memory::host());
            let mut measured = Inference::on_cpu(&settings, &memory).unwrap();
            measured.incoming().import(&folder(family)).unwrap();
            memory.set_poison(true);
            memory.reserve_slab(plan.slab_bytes).unwrap();
            memory.set_limit(Some(plan.peak.bytes));
            let before = memory.live_leases();
            measured
                .forward()
                .generate(&prompts, &wanted, |_, _| ())
                .unwrap();
            assert_eq!(memory.live_leases(), before, "{family}");
            let peak = memory.step_memory().peak;
            assert_eq!(peak, plan.peak, "{family}");
            peak.by_category.activation
        });
        let model = &settings.model;
        let of_layer = match &model.latent {
            None => 2 * model.kv_heads * model.head_dim,
            Some(latent) => latent.kv + latent.rotary_dim,
        };
        let with_state = (0..model.layers).filter(|layer| model.has_delta(*layer));
        let with_state = with_state.count();
        let of_sequence = model.delta.as_ref().map_or([0; 2], |delta| {
            let keys = delta.key_heads * delta.key_head_dim;
            let values = delta.value_heads * delta.value_head_dim;
            let rows = (delta.conv_width - 1) * (2 * keys + values);
            [delta.key_head_dim * values, rows]
        });
        let of_tokens = (model.layers - with_state) * of_layer * WINDOW;
        let [state, rows] = of_sequence.map(|elements| with_state * elements);
        let leases = [of_tokens, state, rows].map(|elements| 3 * elements * 4);
        let formula: usize = leases.map(|bytes| bytes.next_multiple_of(256)).iter().sum();
        let shape = settings.architecture().cache_shape();
        let cache = KvCache::bytes(&shape, settings.dtype, &[WINDOW; 3]);
        assert_eq!(cache, formula as u64, "{family}");
        assert_eq!(held[0] - held[1], cache, "{family}");
        // Routers have places for their counts.
        assert_eq!(held[1] > 0, model.experts.is_some(), "{family}");
    }
}

fn micro_batch(settings: &Settings, rows: usize, seed: usize) -> MicroBatch {
    let vocab = settings.model.vocab;
    let token = |at: usize| ((at * at + seed * 31 + at / 7) % vocab) as i32;
    let tokens = rows * settings.seq;
    MicroBatch {
        input_ids: (0..tokens).map(token).collect(),
        targets: (0..tokens)
            .map(|at| {
                if at % 5 == seed % 5 {
                    MASKED
                } else {
                    token(at + 1)
                }
            })
            .collect(),
        ..shape_of_a_micro_batch(settings, rows, settings.seq)
    }
}

/// A training session of a family, with its weights.
fn session(family: &str, set: &[&str]) -> Session {
    let memory = Memory::host();
    let mut session = Session::on_cpu(settings(family, set), &memory).unwrap();
    session.incoming().import(&folder(family)).unwrap();
    session
}

fn one(micro: &MicroBatch) -> [Result<MicroBatch, SessionError>; 1] {
    [Ok(micro.clone())]
}

/// The same micro-batch, by a session that trains and by a model without states: the loss of a step of it.
#[test]
fn evaluation_has_the_loss_of_a_step() {
    for family in FAMILIES {
        for attention in ["eager", "flash"] {
            let set = [&*format!("attention.backend={attention}"), "batch.accum=1"];
            let settings = settings(family, &set);
            let micro = micro_batch(&settings, settings.micro_batch, 3);
            let mut trained = session(family, &set);
            let before: Evaluation = trained.forward().unwrap().evaluate(one(&micro)).unwrap();
            let step = StepBatch::from_iter([micro.clone()]);
            let loss = trained.step(&step).unwrap().loss;
            assert_eq!(before.loss() as f32, loss, "{family} {attention}");
            assert_eq!(before.targets, micro.target_count());
            let mut inference = Inference::on_cpu(&settings, &Memory::host()).unwrap();
            inference.incoming().import(&folder(family)).unwrap();
            let alone: Evaluation = inference.forward().evaluate(one(&micro)).unwrap();
            assert_eq!(alone.loss_sum, before.loss_sum, "{family} {attention}");
            let after: Evaluation = trained.forward().unwrap().evaluate(one(&micro)).unwrap();
            assert!(
                after.loss_sum < before.loss_sum,
                "the step has learned something"
            );
        }
    }
}

#[test]
fn an_evaluation_adds_up_its_micro_batches() {
    let settings = settings("qwen3", &[]);
    let micro = [2, 2, 1].map(|rows| micro_batch(&settings, rows, rows));
    let mut inference = inference("qwen3");
    let mut sum_of = |micro: &[MicroBatch]| -> Evaluation {
        let micro = micro.iter().cloned().map(Ok::<_, SessionError>);
        inference.forward().evaluate(micro).unwrap()
    };
    let all = sum_of(&micro);
    let each: Vec<Evaluation> = micro
        .iter()
        .map(|micro| sum_of(std::slice::from_ref(micro)))
        .collect();
    assert_eq!(
        all.loss_sum,
        each.iter().map(|one| one.loss_sum).sum::<f64>()
    );
    assert_eq!(
        all.targets,
        each.iter().map(|one| one.targets).sum::<usize>()
    );
    assert!((all.perplexity().ln() - all.loss()).abs() < 1e-12);
    let bits = all.bits_per_byte(4.0);
    assert!((bits * 4.0 * std::f64::consts::LN_2 - all.loss()).abs() < 1e-12);
}

/// Whatever waits when an evaluation comes: activations that would be offloaded, states that are updated in the next
/// forward pass, dropout.
const WAYS: [&[&str]; 4] = [
    &[],
    &["recompute.spec=full", "attention.backend=flash"],
    &["offload.activations=core_attn,mlp"],
    &["offload.optimizer=pinned", "offload.window=\"forward\""],
];

/// Losses and memory of four steps, with something else after each.
fn steps(family: &str, set: &[&str], between: impl Fn(&mut Session)) -> Vec<String> {
    let mut session = session(family, set);
    let settings = settings(family, set);
    let mut lines = Vec::new();
    for step in 0..4 {
        let micro = (0..settings.accum)
            .map(|at| micro_batch(&settings, settings.micro_batch, 2 * step + at));
        session.start_step(&StepBatch::from_iter(micro)).unwrap();
        let mut finished = session.take_finished();
        between(&mut session);
        finished = finished.or(session.take_finished());
        if let Some(done) = finished {
            let (loss, norm) = (done.loss.to_bits(), done.grad_norm.to_bits());
            let (peak, phases) = (done.memory.peak, done.memory.phase_peaks);
            let traffic = done.traffic;
            lines.push(format!(
                "{} {loss} {norm} {peak:?} {phases:?} {traffic:?}",
                done.step
            ));
        }
    }
    if let Some(last) = session.finish_step().unwrap() {
        lines.push(format!("{} {}", last.step, last.loss.to_bits()));
    }
    let weights = (0..3).flat_map(|index| session.parameter(index).unwrap());
    lines.push(format!(
        "{:?}",
        weights.map(f32::to_bits).collect::<Vec<_>>()
    ));
    lines
}

#[test]
fn between_steps_nothing_changes_training() {
    for (family, dropout) in [("llama3", "model.dropout=0"), ("gpt2", "model.dropout=0.2")] {
        for way in WAYS {
            let way = &[way, &[dropout]].concat();
            let held_out = micro_batch(&settings(family, way), 2, 99);
            let alone = steps(family, way, |session| {
                // Nothing but what an evaluation waits for, so that outcomes come at the same time.
                let mut forward = session.forward().unwrap();
                forward
                    .evaluate(std::iter::empty::<Result<_, SessionError>>())
                    .unwrap();
            });
            let beside = steps(family, way, |session| {
                let mut forward = session.forward().unwrap();
                forward.evaluate(one(&held_out)).unwrap();
                forward
                    .generate(&[vec![1, 2, 3]], &sampled(6), |_, _| ())
                    .unwrap();
            });
            assert_eq!(alone, beside, "{family} {way:?}");
            let plain = steps(family, way, |_| ());
            let losses = |lines: &[String]| -> Vec<String> {
                let words = |line: &String| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
                lines.iter().map(words).collect()
            };
            assert_eq!(losses(&plain), losses(&beside), "{family} {way:?}");
        }
    }
}

/// Of a training session too, an evaluation needs what it needs on shapes, and less than the step.
#[test]
fn evaluation_needs_what_it_needs_on_shapes() {
    for family in FAMILIES {
        for rows in [1, 2] {
            let (settings, shapes) = (settings(family, &[]), Memory::shapes());
            let flops = FlopCounter::default();
            let planned = Session::on_shapes(settings.clone(), &shapes, Target::Cpu, flops);
            let mut planned = planned.unwrap();
            let step = planned
                .step(&shape_of_a_step(&settings, settings.seq))
                .unwrap()
                .memory;
            let micro = micro_batch(&settings, rows, 5);
            let plan: Evaluation = planned.forward().unwrap().evaluate(one(&micro)).unwrap();
            let mut measured = session(family, &[]);
            let evaluation: Evaluation = measured.forward().unwrap().evaluate(one(&micro)).unwrap();
            assert_eq!(evaluation.peak_bytes, plan.peak_bytes, "{family}");
            assert!(plan.peak_bytes < step.peak.bytes, "{family}");
            let without_states = Inference::on_shapes(&settings, &Memory::shapes(), Target::Cpu);
            let mut without_states = without_states.unwrap();
            let smaller: Evaluation = without_states.forward().evaluate(one(&micro)).unwrap();
            assert!(smaller.peak_bytes < plan.peak_bytes, "{family}");
        }
    }
}
