//! Barriers in shared memory: a warp that copies, and one that reads what it copied.

use crate::harness::{Program, fault, kernel, words};
use ptx::MistakeKind;

pub const PROGRAMS: &[(&str, Program)] = &[
    ("cp.async.mbarrier.arrive.noinc.shared::cta.b64", ring),
    ("fence.mbarrier_init.release.cluster", ring),
    ("mbarrier.arrive.expect_tx.shared::cta.b64", || {
        let text = RING.replace(
            ARRIVE,
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%free], %none;",
        );
        passes(&kernel(&text))
    }),
    ("mbarrier.arrive.shared::cta.b64", || {
        let text = RING.replace(
            ARRIVE,
            "mbarrier.arrive.shared::cta.b64 %state, [%free], %one;",
        );
        passes(&kernel(&text))
    }),
    ("mbarrier.init.shared::cta.b64", ring),
    ("mbarrier.try_wait.parity.shared::cta.b64", ring),
];

const ARRIVE: &str = "mbarrier.arrive.shared::cta.b64 _, [%free];";

/// The second warp copies four rows of 32 words, one after the other to the same place; each lane of the first reads its
/// neighbour's word of every row.
const RING: &str =
    ".reg .b32 %t, %lane, %v, %at, %of_other, %full, %free, %i, %parity, %none, %one;
    .reg .b64 %s, %in, %out, %off, %state;
    .reg .pred %p, %over, %leader;
    ld.param.u64 %in, [first];
    ld.param.u64 %out, [second];
    mov.u32 %none, 0;
    mov.u32 %one, 1;
    mov.u64 %s, dynamic;
    cvt.u32.u64 %full, %s;
    add.s32 %free, %full, 8;
    mov.u32 %t, %tid.x;
    and.b32 %lane, %t, 31;
    shl.b32 %v, %lane, 2;
    add.s32 %at, %full, 128;
    add.s32 %at, %at, %v;
    xor.b32 %of_other, %at, 4;
    cvt.u64.u32 %off, %v;
    add.s64 %in, %in, %off;
    add.s64 %out, %out, %off;
    setp.eq.s32 %leader, %lane, 0;
    mov.u32 %i, 0;
    setp.ne.s32 %p, %t, 0;
    @%p bra made;
    mbarrier.init.shared::cta.b64 [%full], 32;
    mbarrier.init.shared::cta.b64 [%free], 1;
    fence.mbarrier_init.release.cluster;
    made:
    bar.sync 0;
    setp.lt.u32 %p, %t, 32;
    @%p bra read;
    mov.u32 %parity, 1;
    copy:
    mbarrier.try_wait.parity.shared::cta.b64 %over, [%free], %parity;
    @!%over bra copy;
    cp.async.ca.shared.global [%at], [%in], 4;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%full];
    xor.b32 %parity, %parity, 1;
    add.s64 %in, %in, 128;
    add.s32 %i, %i, 1;
    setp.lt.u32 %p, %i, 4;
    @%p bra copy;
    bra end;
    read:
    mov.u32 %parity, 0;
    again:
    mbarrier.try_wait.parity.shared::cta.b64 %over, [%full], %parity;
    @!%over bra again;
    ld.shared.u32 %v, [%of_other];
    st.global.u32 [%out], %v;
    bar.warp.sync -1;
    @%leader mbarrier.arrive.shared::cta.b64 _, [%free];
    xor.b32 %parity, %parity, 1;
    add.s64 %out, %out, 128;
    add.s32 %i, %i, 1;
    setp.lt.u32 %p, %i, 4;
    @%p bra again;
    end:";

fn passes(text: &str) -> String {
    let input: Vec<u32> = (0..128).map(|index| 7 * index).collect();
    let expected: Vec<u32> = (0..128).map(|index| 7 * (index ^ 1)).collect();
    assert_eq!(words(text, 64, &input, 128), expected);
    text.into()
}

fn ring() -> String {
    passes(&kernel(RING))
}

/// Each breaks one thing; the message has the numbers of what is missing.
#[test]
fn mistakes_with_barriers_in_memory_are_found() {
    use MistakeKind::{Barrier, Misaligned, Race, Uninitialised};
    for (from, to, kind, message) in [
        ("%parity, 0;", "%parity, 1;", Uninitialised, "never written"),
        (
            "%parity, 1;\n    copy",
            "%parity, 0;\n    copy",
            Barrier,
            "a wait for ever: phase 0 of the barrier at 0x100000 lacks 32 of 32 arrivals and 0 bytes, phase 0 of the barrier at 0x100008 lacks 1 of 1",
        ),
        (
            "%parity, 1;\n    copy",
            "%parity, 2;\n    copy",
            Barrier,
            "2 is no parity",
        ),
        (
            "[%full], 32",
            "[%full], 33",
            Barrier,
            "phase 0 of the barrier at 0x100000 lacks 1 of 33 arrivals and 0 bytes",
        ),
        ("[%full], 32", "[%full], 31", Uninitialised, "never written"),
        ("[%full], 32", "[%full], %none", Barrier, "cannot count 0"),
        (
            "_, [%free];",
            "_, [%free], 2;",
            Barrier,
            "2 arrivals at the barrier",
        ),
        (
            "mbarrier.arrive.shared::cta.b64 _, [%free];",
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%free], 16;",
            Barrier,
            "phase 0 of the barrier at 0x100008 lacks 0 of 1 arrivals and 16 bytes",
        ),
        (
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%full]",
            "mbarrier.arrive.shared::cta.b64 _, [%full]",
            Uninitialised,
            "never written",
        ),
        // Released before all lanes have read it.
        (
            "ld.shared.u32 %v, [%of_other];",
            "@%leader mbarrier.arrive.shared::cta.b64 _, [%free];\nld.shared.u32 %v, [%of_other];\nsetp.lt.s32 %leader, %lane, 0;",
            Race,
            "read it",
        ),
        ("bar.warp.sync -1;", "", Race, "read it"),
        // Goes on although the phase is not over.
        ("@!%over bra again;", "", Race, "wrote it"),
        ("bar.sync 0;", "", Race, "wrote it"),
        (
            "[%free], 1;",
            "[%full], 1;",
            Barrier,
            "there is a barrier at 0x100000 already",
        ),
        (
            "[%free], 1;",
            "[%free+8], 1;",
            Barrier,
            "there is no barrier at 0x100008",
        ),
        ("[%free], 1;", "[%free+4], 1;", Misaligned, "8 bytes"),
        (
            "made:",
            "st.shared.u32 [%free+4], %t;\nmade:",
            Barrier,
            "the barrier at 0x100008 was overwritten",
        ),
    ] {
        assert!(RING.contains(from), "{from}");
        let text = kernel(&RING.replacen(from, to, 1));
        let found = fault(&text, 1, 64);
        assert_eq!(found.kind, kind, "{from} -> {to}: {found}");
        assert!(found.message.contains(message), "{from} -> {to}: {found}");
    }
}

/// What a lane waited for alone is not known to the others before the warp meets.
#[test]
fn a_wait_of_one_lane_orders_that_lane() {
    let one = RING.replace(
        "again:\n",
        "again:\nsetp.ne.s32 %p, %lane, 1;\n@%p bra others;\nalone:\n",
    );
    let one = one.replace("@!%over bra again;", "@!%over bra alone;\nothers:\nMEET");
    passes(&kernel(&one.replace("MEET", "bar.warp.sync -1;")));
    let found = fault(
        &kernel(&one.replace("MEET", "shfl.sync.idx.b32 %t, %t, 0, 31, -1;")),
        1,
        64,
    );
    assert_eq!(found.kind, MistakeKind::Race, "{found}");
    assert_ne!(found.thread[0], 1, "{found}");
}
