//! Models by the names that others have for them.

use super::meaning::plain;
use settings::preset;

/// Presets that nobody else has.
const OWN: [&str; 4] = ["tiny", "tiny-moe", "tiny-mla", "llama-15m"];

/// Ends of hub names of models that have the same shape.
const KINDS: [&str; 9] = [
    "-instruct",
    "-chat",
    "-base",
    "-hf",
    "-it",
    "-v0.1",
    "-0324",
    "-671b",
    "-2407",
];

/// Models that have the shape of a preset of another name.
const SAME_SHAPE: [(&str, &str); 8] = [
    ("llama-3.1-8b", "llama-3-8b"),
    ("llama-3.1-70b", "llama-3-70b"),
    ("llama-3.3-70b", "llama-3-70b"),
    ("llama-3-405b", "llama-3.1-405b"),
    ("deepseek-r1", "deepseek-v3"),
    ("qwen3.6-27b", "qwen3.5-27b"),
    ("qwen3.6-35b-a3b", "qwen3.5-35b-a3b"),
    ("qwen3.8-27b", "qwen3.5-27b"),
];

/// How the rotary embedding of Llama 3.1 and 3.3 is stretched, in which they differ from Llama 3.
const LLAMA_3_1: &str = "model.rope_scaling.kind=llama3 model.rope_scaling.factor=8.0 model.rope_scaling.low_freq_factor=1.0 \
     model.rope_scaling.high_freq_factor=4.0 model.rope_scaling.original_max_position=8192";

/// The preset of a model by its name on the hub, and settings in which the two differ.
pub(super) fn preset_of(name: &str) -> Option<(&'static str, &'static str)> {
    let name = plain(name.rsplit('/').next().unwrap_or(name));
    let name = name
        .replace("llama3", "llama-3")
        .replace("llama-3-1", "llama-3.1");
    let mut name = name.trim_start_matches("meta-");
    while let Some(shorter) = KINDS.iter().find_map(|kind| name.strip_suffix(kind)) {
        name = shorter;
    }
    let same = SAME_SHAPE.iter().find(|(theirs, _)| *theirs == name);
    let ours = same.map_or(name, |(_, ours)| ours);
    let stretched = ["llama-3.1-8b", "llama-3.1-70b", "llama-3.3-70b"].contains(&name);
    let preset = preset::names().find(|preset| *preset == ours && !OWN.contains(preset))?;
    Some((preset, if stretched { LLAMA_3_1 } else { "" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_presets() {
        for (name, preset) in [
            ("meta-llama/Meta-Llama-3-8B-Instruct", Some("llama-3-8b")),
            ("meta-llama/Llama-3.1-8B", Some("llama-3-8b")),
            ("NousResearch/Llama-3.2-1B", Some("llama-3.2-1b")),
            ("Qwen/Qwen2.5-7B-Instruct", Some("qwen2.5-7b")),
            ("Qwen/Qwen3-30B-A3B", Some("qwen3-30b-a3b")),
            (
                "Qwen/Qwen3-Next-80B-A3B-Instruct",
                Some("qwen3-next-80b-a3b"),
            ),
            ("Qwen/Qwen3.6-27B", Some("qwen3.5-27b")),
            ("mistralai/Mixtral-8x7B-Instruct-v0.1", Some("mixtral-8x7b")),
            ("deepseek-ai/DeepSeek-V3-Base", Some("deepseek-v3")),
            ("openai-community/gpt2-xl", Some("gpt2-xl")),
            ("llama3-405B", Some("llama-3.1-405b")),
            ("HuggingFaceTB/SmolLM-360M", None),
            ("somebody/tiny", None),
        ] {
            assert_eq!(preset_of(name).map(|(preset, _)| preset), preset, "{name}");
        }
        assert!(
            preset_of("meta-llama/Llama-3.1-8B")
                .unwrap()
                .1
                .contains("factor=8.0")
        );
        assert_eq!(preset_of("meta-llama/Meta-Llama-3-8B").unwrap().1, "");
    }
}
