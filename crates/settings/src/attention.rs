//! Which attention a configuration takes, and what cuDNN's does not compute.

use super::choices::AttentionBackend;
use super::error::ConfigError;
use super::schema::Config;
use super::sharing;
use data::Packing;
use kernels::cuda::{LibraryShape, flash_shared_bytes};
use kernels::{AttentionShape, Target};
use memory::DType;
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

/// Refuses flash attention, chosen or asked for, on a GPU whose blocks have too little shared memory for its heads.
///
/// # Errors
/// [`ConfigError::Contradiction`] with what to do.
pub fn check_shared_memory(
    config: &Config,
    gpu: &str,
    has_bytes: usize,
) -> Result<(), ConfigError> {
    let target = config.device().target();
    if attention(config) != Attention::Flash || target != Target::Cuda {
        return Ok(());
    }
    let spec = config.model.attention(config.model.sliding_window);
    let shape = spec.shape(config.batch.micro, config.data.seq);
    let dtype = config.dtype().into();
    let Some(bytes) = flash_shared_bytes(shape, dtype).filter(|bytes| *bytes > has_bytes) else {
        return Ok(());
    };
    let half = match flash_shared_bytes(shape, DType::BF16) {
        Some(bytes) if bytes <= has_bytes => "--dtype bf16, ",
        _ => "",
    };
    Err(ConfigError::Contradiction(format!(
        "flash attention of heads of {} takes {} KiB of shared memory of a block in {}, and one of {gpu} has {}: take {half}a GPU of \
         compute capability 8.0, 9.0 or 10.0 (A100, H100, B200), or --attention eager, whose memory grows with the square of --seq \
         and which takes no packed documents",
        shape.qk_head_dim,
        bytes.div_ceil(1024),
        config.dtype(),
        has_bytes >> 10
    )))
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

    /// DeepSeek's heads of 192 and 128 fit an A100, and not an RTX 4090, where heads of 128 do in bf16.
    #[test]
    fn heads_that_a_block_has_no_room_for_are_refused() {
        let refusal = |set: &str, kib: usize| {
            let set: Vec<&str> = set.split(' ').collect();
            let checked = check_shared_memory(&config(&set), "a card", kib << 10);
            checked.err().map(|error| error.to_string())
        };
        let wide = "model.head_dim=192 train.dtype=bf16";
        assert_eq!(refusal(wide, 163), None);
        let said = refusal(wide, 99).unwrap();
        assert!(
            said.contains("takes 141 KiB") && said.contains("a card has 99"),
            "{said}"
        );
        assert!(
            !said.contains("bf16,") && said.contains("--attention eager"),
            "{said}"
        );
        let f32 = "model.head_dim=128 train.dtype=f32";
        assert!(
            refusal(f32, 99)
                .unwrap()
                .contains("take --dtype bf16, a GPU")
        );
        assert_eq!(refusal("model.head_dim=128 train.dtype=bf16", 99), None);
        assert_eq!(
            refusal("model.head_dim=192 attention.backend=eager", 99),
            None
        );
        assert_eq!(refusal("model.head_dim=192 train.device=cpu", 99), None);
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
