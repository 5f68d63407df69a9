//! Which attention a configuration takes.

use super::choices::AttentionBackend;
use super::error::ConfigError;
use super::schema::Config;
use crate::Result;
use data::Packing;
use kernels::Target;
use kernels::cuda::flash_shared_bytes;
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
    }
}

/// The choice of `auto`, and its reason: flash for packed documents and from 256 tokens on, else eager.
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
pub fn check_shared_memory(config: &Config, gpu: &str, has_bytes: usize) -> Result {
    let target = config.device().target();
    if attention(config) != Attention::Flash || target != Target::Cuda {
        return Ok(());
    }
    let spec = config.model.attention(0);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

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
            !said.contains("--dtype bf16") && said.contains("--attention eager"),
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
}
