//! Races, and what orders accesses.

use crate::harness::{kernel, run_grid};
use ptx::{ArgumentValue, GlobalMemory, LaunchError, MistakeKind};

/// Accesses `[%at]` by `first` and then by `second`, in one of several ways that order them or do not.
fn race(body: &str, blocks: u32, threads: u32) -> Option<MistakeKind> {
    let text = kernel(&format!(
        ".reg .b32 %t, %b, %v;
        .reg .b16 %h;
        .reg .b64 %at, %own;
        .reg .pred %first, %other;
        .shared .align 4 .b8 word[4];
        ld.param.u64 %at, [first];
        mov.u32 %t, %tid.x;
        mov.u32 %b, %ctaid.x;
        add.s32 %v, %t, %b;
        setp.eq.s32 %first, %v, 0;
        setp.ne.s32 %other, %v, 0;
        mul.wide.u32 %own, %v, 2;
        add.s64 %own, %own, %at;
        {body}"
    ));
    let mut memory = GlobalMemory::new();
    let first = memory.allocate_with("first", &[0; 1024]);
    let arguments = [ArgumentValue::U64(first), ArgumentValue::U64(0)];
    match run_grid(&text, [blocks, 1, 1], threads, &arguments, &mut memory) {
        Ok(_) => None,
        Err(LaunchError::Mistake(fault)) => Some(fault.kind),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn races_are_found_and_ordered_accesses_are_not() {
    let found = Some(MistakeKind::Race);
    let (read, write) = ("ld.global.u32 %v, [%at];", "st.global.u32 [%at], %v;");
    // Between blocks, in either order; both may read.
    assert_eq!(
        race(&format!("@%first {write}\n@%other {read}"), 2, 1),
        found
    );
    assert_eq!(
        race(&format!("@%first {read}\n@%other {write}"), 2, 1),
        found
    );
    assert_eq!(race(write, 2, 1), found);
    assert_eq!(race(read, 2, 1), None);
    // Three readers of several blocks, and one that writes.
    assert_eq!(
        race(
            &format!("setp.lt.u32 %first, %b, 3;\n@%first {read}\n@!%first {write}"),
            4,
            1
        ),
        found
    );
    // Within a block a barrier orders, and nothing else.
    for threads in [32, 64] {
        for (first, then) in [(write, read), (read, write), (write, write)] {
            for order in ["", "bar.sync 0;"] {
                let body = format!(
                    "@%first {first}\n{order}\nsetp.eq.s32 %other, %t, {};\n@%other {then}",
                    threads - 1
                );
                let expected = if order.is_empty() { found } else { None };
                assert_eq!(race(&body, 1, threads), expected, "{body}");
            }
        }
        // All read, then one writes.
        assert_eq!(race(&format!("{read}\n@%first {write}"), 1, threads), found);
        assert_eq!(
            race(&format!("{read}\nbar.sync 0;\n@%first {write}"), 1, threads),
            None
        );
    }
    // A warp's own barrier orders the accesses of its lanes, not those of other warps.
    let of_warp = format!("@%first {write}\nbar.warp.sync -1;\nsetp.eq.s32 %other, %t, ");
    assert_eq!(race(&format!("{of_warp} 31;\n@%other {read}"), 1, 64), None);
    assert_eq!(
        race(&format!("{of_warp} 32;\n@%other {read}"), 1, 64),
        found
    );
    // Order among some lanes of a warp is not tracked.
    let partial = of_warp.replace("-1", "-2");
    let partial = format!("@%first bra over;\n{partial} 31;\n@%other {read}\nover:");
    let first = format!("@%first {write}\n");
    assert_eq!(race(&(first + &partial), 1, 32), found);
    // A shuffle of all lanes orders what they read before what they write afterwards, and nothing else.
    let shuffle = "shfl.sync.idx.b32 %v, %v, 0, 31, -1;";
    let last = "setp.eq.s32 %other, %t, 31;";
    let after = |first: &str, then: &str, mask: &str| {
        let shuffle = shuffle.replace("-1", mask);
        race(
            &format!("{first}\n{shuffle}\n{last}\n@%other {then}"),
            1,
            32,
        )
    };
    assert_eq!(after(read, write, "-1"), None);
    let fenced = format!("{read}\nfence.proxy.async.shared::cta;\n{last}\n@%other {write}");
    assert_eq!(race(&fenced, 1, 32), found, "lanes give each other nothing");
    assert_eq!(after(&format!("@%first {write}"), read, "-1"), found);
    assert_eq!(after(&format!("@%first {write}"), write, "-1"), found);
    let warps = format!("{read}\n{shuffle}\n@%first {write}");
    assert_eq!(race(&warps, 1, 64), found, "another warp reads too");
    // A barrier of two of three warps orders these alone.
    let of_two = "setp.lt.u32 %first, %t, 64;\n@!%first bra over;\nbar.sync 1, 64;\nover:\nsetp.eq.s32 %other, %t, ";
    assert_eq!(
        race(
            &format!("@%first {write}\n{of_two} 32;\n@%other {read}"),
            1,
            96
        ),
        None
    );
    assert_eq!(
        race(
            &format!("@%first {write}\n{of_two} 64;\n@%other {read}"),
            1,
            96
        ),
        found
    );
    // So too where several warps have read: all that did must be of the barrier.
    for (readers, expected) in [(64, None), (96, found)] {
        let body = format!(
            "setp.lt.u32 %first, %t, {readers};\n@%first {read}\n{of_two} 32;\n@%other {write}"
        );
        assert_eq!(race(&body, 1, 96), expected, "{readers}");
    }
    // Neighbours within a word do not race, whatever was accessed before as a whole.
    let halves = "mov.u16 %h, 1;\nst.global.u16 [%own], %h;";
    assert_eq!(
        race(halves, 4, 32).map(|_| ()),
        Some(()),
        "threads of several blocks have the same"
    );
    assert_eq!(race(halves, 1, 64), None);
    assert_eq!(race(&format!("{read}\nbar.sync 0;\n{halves}"), 1, 64), None);
    assert_eq!(race(halves, 2, 1), None);
    // Shared memory too.
    assert_eq!(race("st.shared.u32 [word], %t;", 1, 32), found);
    assert_eq!(
        race(
            "@%first st.shared.u32 [word], %t;\nbar.sync 0;\nld.shared.u32 %v, [word];",
            1,
            64
        ),
        None
    );
}
