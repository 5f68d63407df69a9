//! Writes down which attention `--attention auto` stands for.

use settings::{AttentionBackend, Config, Task, auto_attention};

/// Replaces `auto` in the configuration by the attention that is used, so that the written configuration gives the same
/// run, and returns it with the reason in words.
pub(crate) fn choose_attention(task: Task, config: &mut Config) -> Option<String> {
    // Plans try other sequence lengths too, for which `auto` may choose another attention.
    let keeps_auto = matches!(task, Task::Plan | Task::Init | Task::Doctor);
    if keeps_auto || config.attention.backend != AttentionBackend::Auto {
        return None;
    }
    let (attention, reason) = auto_attention(config);
    let backend = AttentionBackend::from(attention);
    config.attention.backend = backend;
    Some(format!("attention is {backend}: {reason}"))
}
