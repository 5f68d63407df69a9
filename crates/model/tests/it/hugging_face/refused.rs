//! Weights that are not those of the model beside them.

use crate::hugging_face::folders::{Shape, Tensors, changed, golden};
use files::Dtype;
use model::{ModelWeights, Origin};

fn outcome(family: &str, change: impl FnOnce(&mut Tensors)) -> Result<(), String> {
    let shape = Shape::of(&Origin::read(&golden(family)).unwrap());
    let folder = changed(family, change);
    let opened = ModelWeights::open(folder.path(), &shape.parameters);
    opened.map(|_| ()).map_err(|error| error.to_string())
}

#[track_caller]
fn refused(family: &str, words: &[&str], change: impl FnOnce(&mut Tensors)) {
    let message = outcome(family, change).unwrap_err();
    for word in words {
        assert!(message.contains(word), "no {word:?}: {message}");
    }
}

const FIRST: &str = "model.layers.0.self_attn.q_proj.weight";

#[test]
fn a_tensor_that_is_missing_misshapen_or_of_a_strange_type() {
    refused("llama", &[FIRST, "is missing"], |tensors| {
        tensors.remove(FIRST);
    });
    refused(
        "llama",
        &[FIRST, "has shape [24, 30]; the model needs [30, 24]"],
        |tensors| {
            tensors.get_mut(FIRST).unwrap().1.reverse();
        },
    );
    refused("llama", &[FIRST, "holds I32"], |tensors| {
        tensors.get_mut(FIRST).unwrap().0 = Dtype::I32;
    });
    refused("llama", &["lm_head.weight", "is missing"], |tensors| {
        tensors.remove("lm_head.weight");
    });
}

#[test]
fn a_tensor_that_the_model_does_not_have() {
    let vector = || (Dtype::F32, vec![1], vec![0; 4]);
    for (family, name) in [
        ("llama", "model.layers.0.self_attn.o_proj.bias"),
        ("llama", "model.layers.2.self_attn.q_proj.weight"),
        ("qwen3", "score.weight"),
        ("gpt2", "transformer.h.0.crossattention.c_attn.weight"),
        ("gpt2", "wte.weight"),
    ] {
        refused(family, &[name, "is not one of the model's"], |tensors| {
            tensors.insert(name.into(), vector());
        });
    }
    // What follows from config.json says nothing new.
    for (family, name) in [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "h.0.attn.bias"),
        ("gpt2", "transformer.h.1.attn.masked_bias"),
    ] {
        let added = outcome(family, |tensors| {
            tensors.insert(name.into(), vector());
        });
        assert_eq!(added, Ok(()), "{name}");
    }
}

#[test]
fn a_tied_head_is_the_embedding_or_refused() {
    for (family, embedding) in [
        ("qwen2", "model.embed_tokens.weight"),
        ("gpt2", "transformer.wte.weight"),
    ] {
        let tied = outcome(family, |tensors| {
            tensors.insert("lm_head.weight".into(), tensors[embedding].clone());
        });
        assert_eq!(tied, Ok(()));
        refused(
            family,
            &["lm_head.weight", "differs from the embedding"],
            |tensors| {
                let mut head = tensors[embedding].clone();
                head.2[0] ^= 1;
                tensors.insert("lm_head.weight".into(), head);
            },
        );
    }
}

/// As the files of GPT-2 itself are.
#[test]
fn names_of_gpt2_may_lack_the_part_that_is_not_the_head() {
    let shorter = outcome("gpt2", |tensors| {
        let short = |(name, tensor): (String, _)| (name.replace("transformer.", ""), tensor);
        *tensors = std::mem::take(tensors).into_iter().map(short).collect();
        assert!(tensors.contains_key("wte.weight"));
    });
    assert_eq!(shorter, Ok(()));
}
