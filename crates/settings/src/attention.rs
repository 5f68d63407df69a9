//! Which attention a configuration takes.

use super::choices::AttentionBackend;
use super::schema::Config;
use data::Packing;
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
