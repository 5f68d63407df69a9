//! What was in the memory before does not matter.

use crate::device::computing;
use crate::{DTYPES, SUITE, case};
use memory::DType;

#[test]
fn poisoned_memory_gives_the_same_bits() {
    for dtype in DTYPES {
        let clean_and_poisoned = computing(dtype).into_iter().zip(computing(dtype));
        for (clean, poisoned) in clean_and_poisoned {
            poisoned.memory.set_poison(true);
            let contents =
                [&clean, &poisoned].map(|device| device.take(&device.room(DType::F32, [37])));
            assert!(
                contents[0].bytes != contents[1].bytes,
                "the memories differ"
            );
            assert!(contents[1].values().iter().all(|value| value.is_nan()));
            for (_, cases) in SUITE {
                for case in cases(dtype) {
                    let [reference, got] =
                        [&clean, &poisoned].map(|device| case::run(case.as_ref(), device));
                    assert!(reference == got, "{case:?} on {}: poison shows", clean.name);
                }
            }
        }
    }
}
