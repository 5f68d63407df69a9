//! Plans of mixtures of experts and of latent attention: what they keep, what Megatron-LM's flags drop, and what counts.

use kernels::Target;
use model::{Action, MegatronFlags, ModelConfig};
use planner::{Plan, choose};
use settings::load::{Source, load};
use settings::{Config, Settings};

const MIB: f64 = (1u64 << 20) as f64;

fn preset(name: &str, set: &[&str]) -> Config {
    let source = Source::open(name).unwrap();
    let config = load(&source, &[], false).unwrap().config;
    let set = ["train.device=cuda", "batch.accum=1"].iter().chain(set);
    let set: Vec<String> = set.map(ToString::to_string).collect();
    config.with(&set).unwrap()
}

fn plan(name: &str, set: &[&str]) -> Plan {
    Plan::new(&Settings::new(&preset(name, set)).unwrap(), Target::Cuda).unwrap()
}

fn recomputing(name: &str, spec: &str) -> Plan {
    plan(name, &[&format!("recompute.spec={spec}")])
}

/// Names of the activations of a layer that are dropped.
fn dropped(plan: &Plan, layer: usize) -> Vec<&'static str> {
    let of_layer = plan.activations.iter().filter(|one| one.layer == layer);
    let dropped = of_layer.filter(|one| one.action == Action::Recompute);
    dropped.map(|one| one.name).collect()
}

/// MiB that a layer keeps.
fn kept(plan: &Plan, layer: usize) -> f64 {
    let of_layer = plan.activations.iter().filter(|one| one.layer == layer);
    let kept = of_layer.filter(|one| one.action == Action::Keep);
    kept.map(|one| one.bytes as f64 / MIB).sum()
}

/// The table of the guide: MiB of a layer with experts for 4096 tokens in bf16, by what is recomputed. Counted by hand from the
/// shapes: a row of each expert is its gate, up and act; routers add f32 logits and weights, and tables, which only `full`
/// drops; norms add an f32 a token, and flash attention one a head. The columns of keys that all heads share (0.5 MiB) are kept
/// only where keys are made again from them.
#[test]
fn a_layer_keeps_what_the_guide_says() {
    let guide = include_str!("../../../../docs/guides/moe.md");
    let cells = |line: &'static str| line.trim_matches('|').split('|').map(str::trim);
    let mut lines = guide.lines();
    let head = lines.find(|line| line.starts_with("| MiB, by what is recomputed"));
    let columns = cells(head.unwrap()).skip(1);
    let specs: Vec<Vec<String>> = columns
        .map(|column| match column {
            "nothing" => vec!["none".to_owned()],
            labels => labels
                .replace('`', "")
                .split(", ")
                .map(str::to_owned)
                .collect(),
        })
        .collect();
    let mut checked = 0;
    for row in lines.skip(1).take_while(|line| line.starts_with('|')) {
        let mut row = cells(row);
        let name = row.next().unwrap().to_lowercase().replace(' ', "-");
        for (specs, expected) in specs.iter().zip(row) {
            let settings =
                |spec: &str| Settings::new(&preset(&name, &[&format!("recompute.spec={spec}")]));
            let known = specs.iter().find_map(|spec| settings(spec).ok());
            let of_layer = |settings| kept(&Plan::new(&settings, Target::Cuda).unwrap(), 20);
            let found = of_layer(known.unwrap());
            match expected {
                "" => assert_eq!(
                    found,
                    of_layer(settings("none").unwrap()),
                    "{name} {specs:?}"
                ),
                _ => assert_eq!(format!("{found:.1}"), expected, "{name} {specs:?}"),
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 4 * 7);
}

/// What replays of a token's products take in all layers, by the label that drops them: only the products that lead to what is
/// dropped run again, not those of the way down, whose results nobody reads.
fn replayed_flops(model: &ModelConfig, spec: &str) -> f64 {
    let experts = model.experts.as_ref().unwrap();
    let with_experts = model.layers - experts.dense_layers.len();
    let (hidden, layers) = (model.hidden, model.layers);
    let shared = 4 * hidden * experts.shared_ffn;
    let router = 2 * hidden * experts.count;
    let of_all = match spec {
        "moe" => with_experts * (router + 4 * experts.chosen * hidden * experts.ffn + shared),
        "moe_router" => with_experts * router,
        "shared_experts" => with_experts * shared,
        "qkv" => layers * 2 * hidden * (model.q_width() + 2 * model.kv_width()),
        "mla_up_proj" => {
            let latent = model.latent.as_ref().unwrap();
            let keys = model.head_dim - latent.rotary_dim;
            let kv = latent.kv * model.heads * (keys + latent.v_head_dim);
            layers * 2 * (latent.q.unwrap_or(hidden) * model.q_width() + kv)
        }
        "moe_act" | "moe_dispatch" | "layernorm" => 0,
        other => panic!("{other}"),
    };
    of_all as f64
}

#[test]
fn replays_run_the_products_of_what_is_dropped() {
    let all = ["moe", "moe_router", "moe_act", "moe_dispatch", "layernorm"];
    for (name, more) in [
        ("mixtral-8x7b", &["qkv"][..]),
        ("qwen3-30b-a3b", &["qkv"]),
        ("deepseek-v2-lite", &["shared_experts", "mla_up_proj"]),
        ("deepseek-v3", &["shared_experts", "mla_up_proj"]),
    ] {
        for spec in all.iter().chain(more) {
            let (plan, model) = (recomputing(name, spec), preset(name, &[]).model);
            // Flash attention's backward pass makes the scores again, which no model FLOPs count.
            let scores = 2 * model.layers * model.q_width() * 4096;
            let whole = plan.flops_per_token as f64 + scores as f64;
            let expected = replayed_flops(&model, spec) / whole;
            let found = plan.recompute_flops_fraction;
            assert!(
                (found - expected).abs() < 1e-6,
                "{name} {spec}: {found} {expected}"
            );
        }
    }
}

/// Published, rounded: 12.9, 39, 3.3, 22, 21 and 37 billion; of DeepSeek-V2 Lite 2.4 without the embedding.
#[test]
fn a_token_counts_the_experts_that_it_is_sent_to() {
    for (name, all, active) in [
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("mixtral-8x22b", 140_620_634_112, 39_152_031_744),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520),
        ("deepseek-v2-lite", 15_706_484_224, 2_661_150_208),
        ("deepseek-v2", 235_741_434_880, 21_375_800_320),
        ("deepseek-v3", 671_026_404_352, 37_552_282_624),
    ] {
        let (plan, model) = (plan(name, &[]), preset(name, &[]).model);
        assert_eq!(
            (plan.parameters, plan.active_parameters),
            (all, Some(active)),
            "{name}"
        );
        // All but the embedding, whose rows are copied, and vectors, which are next to nothing; and attention at 4096 tokens.
        let values = model
            .latent
            .as_ref()
            .map_or(model.head_dim, |latent| latent.v_head_dim);
        let attention = 6 * model.layers * model.heads * 4096 * (model.head_dim + values);
        let products = 6 * (active - model.vocab * model.hidden);
        let share = plan.flops_per_token as f64 / (products + attention) as f64;
        assert!((share - 1.0).abs() < 1e-3, "{name}: {share}");
    }
    let dense = plan("qwen3-8b", &[]);
    assert_eq!(dense.active_parameters, None);
    let frozen = plan("qwen3-30b-a3b", &["train.freeze=[\"*experts*\"]"]);
    let experts = 48 * 3 * 8 * 2048 * 768;
    let whole = plan("qwen3-30b-a3b", &[]).flops_per_token;
    assert_eq!(
        whole - frozen.flops_per_token,
        2 * experts,
        "no gradients of the experts used"
    );
}

/// Layer 0 of DeepSeek-V3 is dense, layer 20 has experts; Qwen3's attention has no latents.
#[test]
fn modules_of_megatron_mean_what_they_mean_there() {
    let of_modules = |name, modules: &[&str]| {
        let flags = MegatronFlags {
            granularity: Some("selective".into()),
            modules: Some(modules.iter().map(ToString::to_string).collect()),
            ..MegatronFlags::default()
        };
        recomputing(name, &flags.spec().unwrap().unwrap())
    };
    // Dropped whatever the policy: nothing but a replay of the keys reads it.
    let always = "k_rotary";
    for (modules, dense, with_experts) in [
        (&["core_attn"][..], &["lse"][..], &["lse"][..]),
        (&["mlp"], &["gate_up", "act"], &[]),
        (&["moe_act"], &[], &["expert_act"]),
        (&["shared_experts"], &[], &["shared_gate_up", "shared_act"]),
        (
            &["moe"],
            &[],
            &[
                "router_logits",
                "router_weights",
                "expert_gate_up",
                "expert_act",
                "shared_gate_up",
                "shared_act",
            ],
        ),
        (
            &["layernorm"],
            &["h1", "rstd1", "h2", "rstd2"],
            &["h1", "rstd1", "h2", "rstd2"],
        ),
        (&["mla_up_proj"], &["q", "k", "v"], &["q", "k", "v"]),
        (&["mlp", "moe_act"], &["gate_up", "act"], &["expert_act"]),
    ] {
        let plan = of_modules("deepseek-v3", modules);
        for (layer, expected) in [(0, dense), (20, with_experts)] {
            let mut found = dropped(&plan, layer);
            found.retain(|name| *name != always);
            assert_eq!(found, expected, "{modules:?} in layer {layer}");
        }
    }
    let moe = of_modules("qwen3-30b-a3b", &["moe"]);
    let names = [
        "router_logits",
        "router_weights",
        "expert_gate_up",
        "expert_act",
    ];
    assert_eq!(dropped(&moe, 20), names);
}

#[test]
fn what_megatron_refuses_is_refused_by_name() {
    for (name, set, words) in [
        (
            "qwen3-30b-a3b",
            &["recompute.spec=mla_up_proj"][..],
            "`mla_up_proj` names a layer that this model does not have",
        ),
        (
            "deepseek-v3",
            &["recompute.spec=qkv"],
            "`qkv` names a layer that this model does not have",
        ),
        (
            "llama-3-8b",
            &["recompute.spec=moe"],
            "`moe` names a layer that this model does not have",
        ),
        (
            "llama-3-8b",
            &["recompute.spec=mlp,moe_act"],
            "`moe_act` names a layer",
        ),
        (
            "qwen3-30b-a3b",
            &["recompute.spec=moe", "offload.activations=moe_act"],
            "`moe_act` cannot be offloaded: `moe_act` is recomputed",
        ),
        (
            "qwen3-30b-a3b",
            &["recompute.spec=moe", "offload.activations=moe_dispatch"],
            "`moe_dispatch` cannot be offloaded",
        ),
        (
            "qwen3-30b-a3b",
            &["recompute.spec=moe_act", "offload.activations=moe"],
            "`moe` cannot be offloaded: `moe_act` is recomputed",
        ),
        (
            "qwen3-30b-a3b",
            &["recompute.spec=moe_tables"],
            "for clauses alone",
        ),
        (
            "qwen3-30b-a3b",
            &["recompute.spec=moe_ack"],
            "did you mean `moe_act`?",
        ),
    ] {
        let refused = Settings::new(&preset(name, set)).unwrap_err().to_string();
        assert!(refused.contains(words), "{set:?}: {refused}");
    }
    let beside = &[
        "recompute.spec=layernorm,mlp",
        "offload.activations=moe_dispatch,mla_up_proj",
    ];
    assert!(Settings::new(&preset("deepseek-v3", beside)).is_ok());
}

/// Within half of what recompute can save, cheap labels of experts go first; what is chosen is what is planned.
#[test]
fn auto_chooses_by_the_labels_of_experts() {
    for (name, label) in [
        ("mixtral-8x7b", "moe_act"),
        ("qwen3-30b-a3b", "moe_act"),
        ("deepseek-v2-lite", "moe_act"),
        ("deepseek-v3", "mla_up_proj"),
    ] {
        let [most, least] = ["none", "full"].map(|spec| recomputing(name, spec).peak_bytes);
        let budget = least + (most - least) / 2;
        let asked = ["recompute.spec=auto", &format!("memory.budget={budget}")];
        let config = preset(name, &asked);
        let choice = choose(&config, Target::Cuda, budget).unwrap();
        let text = choice.policy();
        assert!(text.contains(label), "{name}: {text}");
        let settings = Settings::new(&choice.applied_to(&config)).unwrap();
        let planned = Plan::new(&settings, Target::Cuda).unwrap().peak_bytes;
        assert!(planned == choice.peak_bytes && planned <= budget, "{name}");
        let full = recomputing(name, "full").recompute_flops_fraction;
        let slower = choice.step_ms / choice.keep_all_step_ms - 1.0;
        assert!(slower < full / 2.0, "{name}: {slower} {full}");
    }
}

/// A label under which this model has nothing is told, unless another one took it along.
#[test]
fn labels_that_name_nothing_are_told() {
    let said = |spec: &str| {
        let plan = recomputing("qwen3-30b-a3b", spec);
        let mut notes = plan.notes.into_iter();
        notes.find(|note| note.contains("no activations under"))
    };
    for (spec, told) in [
        ("moe_dispatch", "`moe_dispatch`"),
        ("mlp,moe_act,shared_experts", "`mlp`, `shared_experts`"),
    ] {
        let note = said(spec).expect(spec);
        assert!(note.contains(&format!("under {told};")), "{spec}: {note}");
    }
    for spec in ["none", "full", "moe", "moe_act"] {
        assert_eq!(said(spec), None, "{spec}");
    }
}
