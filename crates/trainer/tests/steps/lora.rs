//! Adapters: the model under them never changes, and nothing of its size is leased for training it.

use crate::common::elsewhere::run;
use crate::common::experts::models;
use crate::common::{assert_as_planned, config, parameters, plan, session, variants};
use files::PieceSource;
use kernels::Target;
use kernels::meta::FlopCounter;
use memory::{Category, Codes, Cover, DType, Home, Homes, Layout, Lease, Memory, MemoryChange};
use model::Quantisation;
use session::Session;
use settings::{BaseType, Config, Settings};
use std::rc::Rc;

const STEPS: usize = 3;

/// A dense model, GPT-2, one with experts, one with latent attention too, and one whose experts have adapters.
const LLAMA: &str = "q/k/v bias";
const GPT2: &str = "GPT-2";
const QWEN_MOE: &str = "Qwen2-MoE";
const DEEPSEEK: &str = "DeepSeek-V3";
const EXPERTS: &str = "experts of Qwen2-MoE";

fn adapted(model: &str, dtype: DType, mode: &str) -> Config {
    let mut all = variants(2).into_iter().chain(models());
    let of_experts = model.strip_prefix("experts of ");
    let name = of_experts.unwrap_or(model);
    let (_, model) = all.find(|(own, _)| *own == name).unwrap();
    let mut config = config(model, dtype, mode);
    config.lora.rank = Some(3);
    config.lora.alpha = Some(5.0);
    config.lora.dropout = 0.1;
    config.lora.b_lr_ratio = 4.0;
    config.lora.rank_pattern = [("k_proj".into(), 2)].into();
    if of_experts.is_some() {
        let experts = ["experts.gate_up_proj", "mlp.experts.down_proj"];
        config.lora.targets.extend(experts.map(String::from));
        config.lora.dropout = 0.0;
        let of_down = ("experts.down_proj".into(), 2);
        config.lora.rank_pattern.extend([of_down]);
    }
    config
}

/// Gives experts as many inputs as MXFP4 takes.
fn in_whole_blocks(config: &mut Config) {
    config.model.hidden = 64;
    config.model.experts.as_mut().unwrap().ffn = 32;
}

#[test]
fn factors_alone_change_and_are_saved() {
    for model in [LLAMA, GPT2, DEEPSEEK, EXPERTS] {
        let settings = Settings::new(&adapted(model, DType::BF16, "none")).unwrap();
        let mut session = session(&settings);
        let before = parameters(&session);
        run(&mut session, &settings, 0..STEPS, |_| {});
        let entries = session.model().layout().entries().iter();
        for (index, (entry, values)) in entries.zip(before).enumerate() {
            let is_changed = session.parameter(index).unwrap() != values;
            assert_eq!(is_changed, entry.name.contains(".lora_"), "{}", entry.name);
        }
        let state = session.state();
        let mut saved = state.pieces().iter().peekable();
        assert!(saved.peek().is_some());
        assert!(saved.all(|piece| piece.name.contains(".lora_")), "{model}");
    }
}

/// A model that is stored as codes trains as one that has their values, to the bit and as planned; the codes never change.
#[test]
fn codes_train_as_the_values_that_they_stand_for() {
    for (base, model, dtype) in [
        (BaseType::Nf4, LLAMA, DType::F32),
        (BaseType::Nf4, GPT2, DType::BF16),
        (BaseType::Nf4, EXPERTS, DType::F32),
        (BaseType::EightBit, GPT2, DType::F32),
        (BaseType::EightBit, LLAMA, DType::BF16),
        (BaseType::EightBit, QWEN_MOE, DType::BF16),
        (BaseType::Nf4, DEEPSEEK, DType::BF16),
        (BaseType::Mxfp4, EXPERTS, DType::BF16),
        (BaseType::Mxfp4, DEEPSEEK, DType::F32),
    ] {
        let name = format!("{base} {model} {dtype:?}");
        let of = |base| {
            let mut config = adapted(model, dtype, "none");
            config.lora.base_dtype = base;
            if name.starts_with("mxfp4") {
                in_whole_blocks(&mut config);
            }
            Settings::new(&config).unwrap()
        };
        let went = |session: &mut Session, settings: &Settings| {
            let planned = plan(settings);
            let bits = run(session, settings, 0..STEPS, |outcome| {
                assert_as_planned(&name, &planned, outcome);
            });
            (bits, planned)
        };
        let plain = of(None);
        let mut with_values = session(&plain);
        let coded = of(Some(base));
        let mut with_codes = session(&coded);
        let values = parameters(&with_codes);
        let fresh = parameters(&with_values);
        let entries = with_codes.model().layout().entries().to_vec();
        for ((entry, values), fresh) in entries.iter().zip(&values).zip(&fresh) {
            assert_eq!(
                entry.codes.is_some(),
                values != fresh,
                "{name} {}",
                entry.name
            );
            with_values
                .incoming()
                .set_values(entry.offset, values)
                .unwrap();
        }
        let (expected, plan_of_values) = went(&mut with_values, &plain);
        let (found, planned) = went(&mut with_codes, &coded);
        assert!(found == expected, "{name}");
        assert!(
            planned.persistent_bytes < plan_of_values.persistent_bytes,
            "{name}"
        );
        for (entry, (now, before)) in entries
            .iter()
            .zip(parameters(&with_codes).iter().zip(&values))
        {
            assert_eq!(
                entry.name.contains(".lora_"),
                now != before,
                "{name} {}",
                entry.name
            );
        }
    }
}

/// Weights of a frozen model in pinned memory take what they take on the device, come as they are stored, and never go back.
#[test]
fn a_frozen_model_streams_at_its_stored_size() {
    let of = |base, weights| {
        let mut config = adapted(LLAMA, DType::BF16, "none");
        config.lora.base_dtype = base;
        let homes = Homes {
            weights,
            ..Homes::default()
        };
        let settings = Settings::new(&config).unwrap();
        Settings { homes, ..settings }
    };
    let planned = |base| {
        let settings = of(base, Home::Pinned);
        let session = session(&settings);
        let layout = session.model().layout();
        let (types, matrices) = (layout.types(DType::BF16), layout.matrices());
        let bytes = |cover: &Cover| types.bytes(&cover.within(&matrices)) as u64;
        let (streamed, resident) = (plan(&settings), plan(&of(base, Home::Device)));
        assert_eq!(
            streamed.host_pinned_bytes,
            memory::round_up(bytes(&layout.all()))
        );
        let went_back = streamed.d2h_bytes - resident.d2h_bytes;
        assert_eq!(went_back, bytes(&layout.trained()), "{base:?}");
        assert!(streamed.peak_bytes < resident.peak_bytes, "{base:?}");
        streamed
    };
    let plain = planned(None);
    for base in [BaseType::Nf4, BaseType::EightBit] {
        let coded = planned(Some(base));
        assert!(coded.host_pinned_bytes < plain.host_pinned_bytes, "{base}");
        assert!(coded.h2d_bytes < plain.h2d_bytes, "{base}");
    }
}

/// The layout of a model, and all leases of a step on shapes.
fn leases(settings: &Settings) -> (Rc<Layout>, Vec<Lease>) {
    let memory = Memory::shapes();
    memory.keep_history(|| 0.0);
    let (target, flops) = (Target::Cuda, FlopCounter::default());
    let mut session = Session::on_shapes(settings.clone(), &memory, target, flops).unwrap();
    session
        .step(&crate::common::step_batch(settings, 0))
        .unwrap();
    let layout = session.model().layout().clone();
    let events = memory.history().unwrap().events.into_iter();
    let leases = events.filter_map(|event| match event.change {
        MemoryChange::Take { lease, .. } => Some(lease),
        _ => None,
    });
    (layout, leases.collect())
}

/// Adapters on experts: activations and temporaries are smaller than what they add to one matrix of all experts would be, and so
/// than its gradient.
#[test]
fn no_lease_is_as_large_as_a_delta_of_experts() {
    let mut config = adapted(EXPERTS, DType::BF16, "none");
    config.data.seq = 21;
    let (layout, leases) = leases(&Settings::new(&config).unwrap());
    let experts = layout.entries().iter();
    let experts = experts.filter(|entry| entry.name.ends_with("mlp.experts.gate_up_proj"));
    let delta = experts
        .map(|entry| 2 * entry.elements() as u64)
        .min()
        .unwrap();
    // The workspace of products has one size for all models.
    let made = |lease: &&Lease| {
        [Category::Activation, Category::Temporary].contains(&lease.category)
            && lease.name != "kernel_workspace"
    };
    let made: Vec<&Lease> = leases.iter().filter(made).collect();
    for name in [
        "lora_mlp_experts_gate_up_proj",
        "lora_factor",
        "expert_lora",
    ] {
        assert!(made.iter().any(|lease| lease.name == name), "{name}");
    }
    for lease in made {
        assert!(lease.bytes < delta, "{lease:?} {delta}");
    }
}

/// A step of a model in bf16: nothing but factors has gradients or states, no product of factors exists, and no input is
/// copied to f32.
#[test]
fn no_lease_is_as_large_as_what_is_frozen() {
    let mut config = adapted(LLAMA, DType::BF16, "none");
    config.lora.dropout = 0.0;
    let settings = Settings::new(&config).unwrap();
    let (layout, leases) = leases(&settings);
    let trained = layout.trained().elements() as u64;
    let granularity = 512;
    let states = |category| {
        let own = leases
            .iter()
            .filter(move |lease| lease.category == category);
        own.map(|lease| lease.bytes).max().unwrap()
    };
    assert!(states(Category::Gradient) <= 4 * trained + granularity);
    assert!(states(Category::OptimizerState) <= 4 * trained + granularity);
    let tokens = (settings.micro_batch * settings.seq) as u64;
    let of_lora: Vec<_> = leases
        .iter()
        .filter(|lease| lease.name.contains("lora"))
        .collect();
    assert!(
        of_lora
            .iter()
            .any(|lease| lease.category == Category::Activation)
    );
    let narrowest = settings.model.hidden as u64;
    for lease in of_lora {
        assert!(lease.bytes < 2 * tokens * narrowest, "{lease:?}");
    }
    // In f32 are statistics, and losses and logits of a chunk of the head.
    let model = &settings.model;
    for width in [model.hidden, model.ffn, 2 * model.ffn] {
        let copy = 4 * tokens * width as u64;
        let fits = |bytes: u64| (copy..copy + granularity).contains(&bytes);
        let copies = leases.iter().filter(|lease| fits(lease.bytes));
        let names: Vec<&str> = copies.map(|lease| lease.name).collect();
        assert!(
            names
                .iter()
                .all(|name| ["gate_up", "d_gate_up"].contains(name)),
            "{names:?}"
        );
    }
}

/// Experts alone are stored in MXFP4, in blocks of their inputs.
#[test]
fn mxfp4_is_for_experts_in_whole_blocks() {
    let refused = |model: &str, change: &dyn Fn(&mut Config), words: &[&str]| {
        let mut config = adapted(model, DType::BF16, "none");
        config.lora.base_dtype = Some(BaseType::Mxfp4);
        change(&mut config);
        let settings = Settings::new(&config).unwrap();
        let layout = settings.layout(&settings.architecture());
        let error = layout.unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{error}");
        }
    };
    let whole: &dyn Fn(&mut Config) = &in_whole_blocks;
    refused(LLAMA, &|_| {}, &["mxfp4", "has none", "nf4 or 8bit"]);
    refused(
        EXPERTS,
        &|_| {},
        &["gate_up_proj", "52 inputs", "nf4 or 8bit"],
    );
    refused(
        EXPERTS,
        &|config| {
            whole(config);
            config.model.experts.as_mut().unwrap().ffn = 36;
        },
        &["down_proj", "36 inputs"],
    );
    // A folder of other codes.
    let folder = Quantisation {
        codes: Codes::Mxfp4,
        plain: Vec::new(),
    };
    let mut config = adapted(EXPERTS, DType::BF16, "none");
    whole(&mut config);
    config.lora.base_dtype = Some(BaseType::Nf4);
    let error = config
        .lora
        .adopt_codes(&folder, true)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("--base-dtype nf4") && error.contains("weights are mxfp4"),
        "{error}"
    );
    config.lora.base_dtype = None;
    config.lora.adopt_codes(&folder, true).unwrap();
    assert_eq!(config.lora.base_dtype, Some(BaseType::Mxfp4));
    let settings = Settings::new(&config).unwrap();
    let session = session(&settings);
    let coded = session.model().layout().entries().iter();
    let coded = coded.filter(|entry| entry.codes == Some(Codes::Mxfp4));
    assert_eq!(coded.count(), 4, "two of each layer with experts");
}
