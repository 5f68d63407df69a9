//! The reference names every key.

use crate::fixture::Moment;

#[test]
fn the_reference_names_every_key_of_the_state() {
    let reference = include_str!("../../../../docs/reference/checkpoint.md");
    let state = serde_json::to_value(Moment::new(1, 1).state).unwrap();
    for (key, value) in state.as_object().unwrap() {
        assert!(reference.contains(&format!("`{key}`")), "{key}");
        for inner in value.as_object().into_iter().flatten() {
            assert!(
                reference.contains(&format!("`{key}.{}`", inner.0)),
                "{key}.{}",
                inner.0
            );
        }
    }
}
