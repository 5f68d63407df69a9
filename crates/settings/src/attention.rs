//! Which attention a configuration takes, and what cuDNN's does not compute.

use super::choices::AttentionBackend;
use super::schema::Config;
use super::sharing;
use data::Packing;
use kernels::AttentionShape;
use kernels::cuda::LibraryShape;
use model::Attention;

/// Sequences from which flash attention is faster than eager attention on the CPU (`benches/results/`).
const FLASH_FROM_SEQ: usize = 256;

/// The kind of attention of a configuration.
pub(crate) fn attention(config: &Config) -> Attention {
    match config.attention.backend {
        AttentionBackend::Auto => auto_attention(config).0,
        AttentionBackend::Eager => Attention::Eager,
        AttentionBackend::Flash => Attention::Flash,
        AttentionBackend::Cudnn if config.packing() == Packing::FirstFit => {
            Attention::CudnnDocuments
        }
        AttentionBackend::Cudnn => Attention::Cudnn,
    }
}

/// The choice of `auto`, and its reason: flash for packed documents and from 256 tokens on, else eager. Never cuDNN's: version 9.25 on an
/// H100 was slower than our own, since its backward pass adds up in a fixed order (`benches/results/2026-11-27-h100.md`).
pub fn auto_attention(config: &Config) -> (Attention, String) {
    let (seq, packing) = (config.data.seq, config.packing());
    if packing == Packing::FirstFit {
        let reason = format!(
            "data.packing is {packing}, and eager attention cannot keep documents from seeing each other"
        );
        return (Attention::Flash, reason);
    }
    let attention = match seq >= FLASH_FROM_SEQ {
        true => Attention::Flash,
        false => Attention::Eager,
    };
    let reason =
        format!("auto takes flash from {FLASH_FROM_SEQ} tokens on, and these sequences have {seq}");
    (attention, reason)
}

/// Why cuDNN does not compute what a configuration without open questions asks for; none: it does.
pub fn cudnn_misfit(config: &Config) -> Option<String> {
    let (model, packing) = (&config.model, config.packing());
    if model.dropout > 0.0 {
        return Some(format!(
            "its kernels do not know our random numbers, and model.dropout is {}",
            model.dropout
        ));
    }
    if packing == Packing::Pad {
        return Some(format!(
            "data.packing is {packing}, which gives micro-batches of many lengths, and cuDNN's attention takes one"
        ));
    }
    let (shape, dtype) = (cudnn_shape(config), config.dtype().into());
    let misfit = shape.cudnn_misfit(config.device().target(), dtype);
    let of_documents = || match packing {
        Packing::FirstFit => shape.documents_misfit(),
        _ => None,
    };
    misfit.or_else(of_documents)
}

/// The attention of a micro-batch: of one part's heads, where sequences have parts.
fn cudnn_shape(config: &Config) -> AttentionShape {
    let whole = config.model.attention(config.model.sliding_window);
    let own = sharing::ranks(config.ranks().as_ref()).attention(&whole);
    own.shape(config.batch.micro, config.data.seq)
}

/// The attention of a micro-batch as cuDNN is asked for it.
pub fn library_shape(config: &Config) -> LibraryShape {
    let spec = config.model.attention(config.model.sliding_window);
    if config.packing() == Packing::FirstFit {
        return LibraryShape::of_documents(cudnn_shape(config));
    }
    let is_shared = config.parts() > 1;
    match Attention::Cudnn.reads_packed(&spec) && !is_shared {
        true => LibraryShape::packed(cudnn_shape(config)),
        false => LibraryShape::apart(cudnn_shape(config)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Settings};

    fn config(set: &[&str]) -> Config {
        let mut config = Config::default();
        config.train.device = Some(Device::Cuda { index: 0 });
        let shared = [
            "data.path=documents",
            "model.hidden=512",
            "model.heads=8",
            "model.kv_heads=4",
        ];
        let set = shared
            .iter()
            .chain(&["model.head_dim=64", "data.seq=512"])
            .chain(set);
        let set: Vec<String> = set.map(ToString::to_string).collect();
        config.with(&set).unwrap()
    }

    #[test]
    fn how_long_sequences_may_be_depends_on_whether_scores_are_stored() {
        let long = config(&["data.seq=15000000", "attention.backend=flash"]);
        let eager = long.with(&["attention.backend=eager".into()]);
        let refused = eager.unwrap_err().to_string();
        let said = "larger than any machine holds";
        assert!(refused.contains(said), "{refused}");
        let longer = long.with(&["data.seq=100000000".into()]);
        let refused = longer.unwrap_err().to_string();
        let said = "more operations than are counted";
        assert!(refused.contains(said), "{refused}");
    }

    #[test]
    fn cudnn_is_refused_with_a_reason_where_it_does_not() {
        let cudnn = "attention.backend=cudnn";
        let settings = Settings::new(&config(&[cudnn])).unwrap();
        assert_eq!(settings.attention, Attention::Cudnn);
        for (set, word) in [
            ("train.dtype=f32", "bf16"),
            ("train.device=cpu", "CUDA device"),
            ("model.head_dim=136", "not 136"),
            ("data.packing=pad", "data.packing is pad"),
            ("model.sliding_window=511", "511 of 512 keys"),
            (
                "data.packing=first-fit model.head_dim=72",
                "multiple of 16 wide, not 72",
            ),
        ] {
            let set: Vec<&str> = std::iter::once(cudnn).chain(set.split(' ')).collect();
            let refused = Settings::new(&config(&set)).unwrap_err().to_string();
            let said = refused.contains(word) && refused.contains("--attention flash");
            assert!(said, "{refused}");
        }
        let mut dropped = config(&[cudnn]);
        dropped.model.dropout = 0.1;
        let refused = Settings::new(&dropped).unwrap_err().to_string();
        assert!(refused.contains("model.dropout is 0.1"), "{refused}");
    }
}
