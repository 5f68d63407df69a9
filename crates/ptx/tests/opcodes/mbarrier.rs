//! Barriers in shared memory: a warp that copies, and one that reads what it copied.

use crate::harness::{Program, fault, kernel, run, words};
use ptx::{ArgumentValue, GlobalMemory, LaunchError, MistakeKind};

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
    ("mbarrier.inval.shared::cta.b64", || {
        let text = format!("{RING}\n{INVALIDATE}");
        for (from, to, message) in [
            ("bar.sync 1;", "", "nothing orders the two"),
            (
                "mbarrier.inval",
                "//",
                "the barrier at 0x7f8 is overwritten",
            ),
            (
                "st.shared.u8",
                "mbarrier.arrive.shared::cta.b64 _, [%free];\nst.shared.u8",
                "there is no barrier at 0x7f8",
            ),
        ] {
            let wrong = kernel(&text.replacen(from, to, 1));
            let found = fault(&wrong, 1, 64);
            assert!(found.message.contains(message), "{from} -> {to}: {found}");
        }
        passes(&kernel(&text))
    }),
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

/// The place of a barrier is used for something else.
const INVALIDATE: &str = ".reg .b16 %byte;
    bar.sync 1;
    setp.ne.s32 %p, %t, 0;
    @%p bra used;
    mbarrier.inval.shared::cta.b64 [%free];
    mov.u16 %byte, 7;
    st.shared.u8 [%free+7], %byte;
    used:";

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
            "a wait for ever: phase 0 of the barrier at 0x7f0 lacks 32 of 32 arrivals and 0 bytes, phase 0 of the barrier at 0x7f8 lacks 1 of 1",
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
            "phase 0 of the barrier at 0x7f0 lacks 1 of 33 arrivals and 0 bytes",
        ),
        ("[%full], 32", "[%full], 31", Uninitialised, "never written"),
        ("[%full], 32", "[%full], %none", Barrier, "cannot count 0"),
        (
            "_, [%free];",
            "_, [%free], 2;",
            Barrier,
            "2 arrivals on a barrier",
        ),
        (
            "mbarrier.arrive.shared::cta.b64 _, [%free];",
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%free], 16;",
            Barrier,
            "phase 0 of the barrier at 0x7f8 lacks 0 of 1 arrivals and 16 bytes",
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
            "there is a barrier at 0x7f0 already",
        ),
        (
            "[%free], 1;",
            "[%free+8], 1;",
            Barrier,
            "there is no barrier at 0x7f8",
        ),
        ("[%free], 1;", "[%free+4], 1;", Misaligned, "8 bytes"),
        (
            "made:",
            "st.shared.u32 [%free+4], %t;\nmade:",
            Barrier,
            "the barrier at 0x7f8 is overwritten",
        ),
        (
            "made:",
            ".reg .b16 %h;\nmov.u16 %h, 7;\nst.shared.u16 [%free+6], %h;\nmade:",
            Barrier,
            "the barrier at 0x7f8 is overwritten",
        ),
        (
            "made:",
            "cp.async.ca.shared.global [%full+4], [%in], 4;\nmade:",
            Barrier,
            "the barrier at 0x7f0 is overwritten",
        ),
        // The arrival tells of copies alone.
        (
            "cp.async.ca.shared.global [%at], [%in], 4;",
            "st.shared.u32 [%at], %i;",
            Race,
            "wrote it",
        ),
    ] {
        assert!(RING.contains(from), "{from}");
        let text = kernel(&RING.replacen(from, to, 1));
        let found = fault(&text, 1, 64);
        assert_eq!(found.kind, kind, "{from} -> {to}: {found}");
        assert!(found.message.contains(message), "{from} -> {to}: {found}");
    }
}

/// What a warp publishes, how, and what another one does when it has waited for both barriers, or for the first.
#[test]
fn an_arrival_tells_what_its_lanes_did() {
    let race = Some(MistakeKind::Race);
    let (own, all) = (
        "st.shared.u32 [%at], %t;",
        "mbarrier.arrive.shared::cta.b64 _, [%full];",
    );
    let (one, first) = (format!("@%leader {own}"), format!("@%leader {all}"));
    let (read, other) = ("ld.shared.u32 %v, [%at];", "ld.shared.u32 %v, [%of_other];");
    let (write, meet) = ("st.shared.u32 [%at], %t;", "bar.warp.sync -1;");
    let of_first = format!("@%leader {read}");
    let of_both = format!("@%leader ld.shared.u32 %v, [%full+512];\n{first}");
    let even = "and.b32 %v, %lane, 1;\nsetp.eq.s32 %p, %v, 0;";
    let two = format!("{even}\n@%p {all}\n@!%p {}", all.replace("%full", "%free"));
    for (steps, arrivals, used, expected) in [
        // A lane tells of its own accesses, not of others', whatever the warp did before.
        ([&one, &first, ""], 1, of_first.as_str(), None),
        ([own, &first, ""], 1, read, race),
        ([own, meet, &first], 1, other, None),
        ([own, all, ""], 32, other, None),
        ([own, &first, meet], 1, read, race),
        // It tells of reads too.
        (
            ["@%leader ld.shared.u32 %v, [%full+512];", &first, ""],
            1,
            "@%leader st.shared.u32 [%full+512], %t;",
            None,
        ),
        (
            ["ld.shared.u32 %v, [%full+512];", &first, ""],
            1,
            "@%leader st.shared.u32 [%full+512], %t;",
            race,
        ),
        (
            ["ld.shared.u32 %v, [%full+512];", all, ""],
            32,
            "@%leader st.shared.u32 [%full+512], %t;",
            None,
        ),
        // Of what lanes of two warps have read too.
        (
            [of_both.as_str(), "", ""],
            2,
            "@%leader st.shared.u32 [%full+512], %t;",
            None,
        ),
        // Lanes that arrive elsewhere tell nothing here.
        (
            [own, &two, ""],
            16,
            "@%leader ld.shared.u32 %v, [%at];",
            None,
        ),
        (
            [own, &two, ""],
            16,
            "@%leader ld.shared.u32 %v, [%of_other];",
            race,
        ),
        // What comes later is not told of.
        ([&first, own, ""], 1, read, race),
        // An arrival orders nothing within its own warp.
        ([own, all, other], 32, "", race),
        ([own, &format!("{all}\n{other}"), write], 32, "", race),
    ] {
        let text = kernel(&format!(
            ".reg .b32 %t, %lane, %v, %at, %of_other, %full, %free;
            .reg .b64 %s;
            .reg .pred %p, %over, %leader;
            mov.u64 %s, dynamic;
            cvt.u32.u64 %full, %s;
            add.s32 %free, %full, 8;
            mov.u32 %t, %tid.x;
            and.b32 %lane, %t, 31;
            shl.b32 %v, %lane, 2;
            add.s32 %at, %full, 128;
            add.s32 %at, %at, %v;
            xor.b32 %of_other, %at, 4;
            setp.eq.s32 %leader, %lane, 0;
            setp.ne.s32 %p, %t, 0;
            @%p bra made;
            mbarrier.init.shared::cta.b64 [%full], {arrivals};
            mbarrier.init.shared::cta.b64 [%free], {arrivals};
            st.shared.u32 [%full+512], %t;
            made:
            bar.sync 0;
            setp.lt.u32 %p, %t, 32;
            @%p bra use;
            {}
            bra end;
            use:
            mbarrier.try_wait.parity.shared::cta.b64 %over, [%full], 0;
            @!%over bra use;
            {used}
            end:",
            steps.join("\n")
        ));
        let mut memory = GlobalMemory::new();
        let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(0)];
        // Where two arrivals are expected, two warps publish.
        let threads = if arrivals == 2 { 96 } else { 64 };
        let found = match run(&text, threads, &arguments, &mut memory) {
            Err(LaunchError::Mistake(mistake)) => Some(mistake.kind),
            launched => launched.map(|_| None).unwrap(),
        };
        assert_eq!(found, expected, "{steps:?}, then {used}");
    }
}

/// Copies with which a thread arrived are waited for at their barrier or as others are, but they are waited for.
#[test]
fn copies_that_arrive_are_waited_for() {
    let one = |arrivals: u32, wait: &str| {
        kernel(&format!(
            ".reg .b32 %t, %at, %full, %v;
            .reg .b64 %s, %in;
            .reg .pred %p, %over;
            ld.param.u64 %in, [first];
            mov.u64 %s, dynamic;
            cvt.u32.u64 %full, %s;
            mov.u32 %t, %tid.x;
            shl.b32 %at, %t, 2;
            add.s32 %at, %at, %full;
            setp.ne.s32 %p, %t, 0;
            @!%p mbarrier.init.shared::cta.b64 [%full], {arrivals};
            bar.sync 0;
            cp.async.ca.shared.global [%at+128], [%in], 4;
            cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%full];
            {wait}"
        ))
    };
    let read = "ld.shared.u32 %v, [%at+128];";
    let wait =
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 %over, [%full], 0;\n@!%over bra again;";
    for arrivals in [32, 33] {
        words(
            &one(arrivals, &format!("cp.async.wait_all;\n{read}")),
            32,
            &[1],
            1,
        );
    }
    words(&one(32, &format!("{wait}\n{read}")), 32, &[1], 1);
    for (arrivals, end, kind, message) in [
        (33, "", MistakeKind::Unfinished, "lacks 1 of 33 arrivals"),
        (
            32,
            "",
            MistakeKind::Unfinished,
            "nobody waits for the barrier",
        ),
        (32, read, MistakeKind::Race, "a copy by thread number 0"),
        (33, read, MistakeKind::Uninitialised, "never written"),
    ] {
        let found = fault(&one(arrivals, end), 1, 32);
        assert_eq!(found.kind, kind, "{found}");
        assert!(found.message.contains(message), "{found}");
    }
}

/// A lane goes on although another one waits at another barrier: for what the first does next.
#[test]
fn lanes_may_wait_at_different_barriers() {
    let text = kernel(
        ".reg .b32 %t, %full, %at;
        .reg .b64 %s;
        .reg .pred %p, %over;
        mov.u64 %s, dynamic;
        cvt.u32.u64 %full, %s;
        mov.u32 %t, %tid.x;
        shl.b32 %at, %t, 3;
        add.s32 %at, %at, %full;
        mbarrier.init.shared::cta.b64 [%at], 1;
        bar.warp.sync -1;
        setp.eq.s32 %p, %t, 0;
        @%p mbarrier.arrive.shared::cta.b64 _, [%at];
        again:
        mbarrier.try_wait.parity.shared::cta.b64 %over, [%at], 0;
        @!%over bra again;
        setp.ne.s32 %p, %t, 31;
        @%p mbarrier.arrive.shared::cta.b64 _, [%at+8];",
    );
    words(&text, 32, &[0], 1);
    let found = fault(
        &text.replace("@%p mbarrier.arrive.shared::cta.b64 _, [%at];", ""),
        1,
        32,
    );
    assert!(
        found.message.contains("a wait for ever: phase 0"),
        "{found}"
    );
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
