//! Memory whose earlier contents are known.

use crate::device::{Device, computing};
use memory::DType;

/// Every implementation that computes, twice: once on memory as it comes, once on memory that is NaN before it is
/// written.
pub fn clean_and_poisoned(dtype: DType) -> Vec<[Device; 2]> {
    let pairs = computing(dtype).into_iter().zip(computing(dtype));
    let pair = |(clean, poisoned): (Device, Device)| {
        poisoned.memory.set_poison(true);
        let contents =
            [&clean, &poisoned].map(|device| device.take(&device.room(DType::F32, [37])));
        assert!(
            contents[0].bytes != contents[1].bytes,
            "the memories differ"
        );
        assert!(contents[1].values().iter().all(|value| value.is_nan()));
        [clean, poisoned]
    };
    pairs.map(pair).collect()
}
