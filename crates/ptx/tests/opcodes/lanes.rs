//! Shuffles, votes, branches and barriers: what lanes do together, and what is found where they do not.

use crate::harness::{Program, by_lane, fault, kernel, words, words_by_lane};
use ptx::MistakeKind;

pub const PROGRAMS: &[(&str, Program)] = &[
    ("bar.arrive", bar_arrive),
    ("bar.red.or.pred", bar_red),
    ("bar.sync", bar_sync),
    ("bar.warp.sync", bar_warp_sync),
    ("bra", bra),
    ("bra.uni", bra_uni),
    ("elect.sync", elect),
    ("exit", || ends("exit")),
    ("ret", || ends("ret")),
    ("shfl.sync.bfly.b32", || {
        shuffle("bfly", 5, 0x1f, |lane| (lane ^ 5, true))
    }),
    ("shfl.sync.bfly.b32", || {
        // Segments of 8 lanes: a clamp of 0x18 << 8 | 7 keeps the upper bits of the lane; lane 0 ^ 9 is in another one.
        shuffle("bfly", 9, 0x1807, |lane| {
            let inside = (lane ^ 9) <= (lane & 0x18 | 7);
            (if inside { lane ^ 9 } else { lane }, inside)
        })
    }),
    ("shfl.sync.down.b32", || {
        shuffle("down", 3, 0x1f, |lane| {
            if lane < 29 {
                (lane + 3, true)
            } else {
                (lane, false)
            }
        })
    }),
    ("shfl.sync.idx.b32", || {
        shuffle("idx", 6, 0x1f, |_| (6, true))
    }),
    ("shfl.sync.idx.b32", || {
        // The sixth of each 8 lanes.
        shuffle("idx", 6, 0x181f, |lane| (lane & 0x18 | 6, true))
    }),
    ("shfl.sync.up.b32", || {
        shuffle("up", 3, 0, |lane| {
            if lane >= 3 {
                (lane - 3, true)
            } else {
                (lane, false)
            }
        })
    }),
    ("vote.sync.all.pred", || vote("all", |some| some == 32)),
    ("vote.sync.any.pred", || vote("any", |some| some > 0)),
    ("vote.sync.ballot.b32", ballot),
];

fn shuffle(mode: &str, by: u32, clamp: u32, from: impl Fn(u32) -> (u32, bool)) -> String {
    let body = format!(
        ".reg .pred %p;
        shfl.sync.{mode}.b32 %d|%p, %a, {by}, {clamp}, -1;
        shl.b32 %d, %d, 1;
        selp.u32 %word, 1, 0, %p;
        or.b32 %d, %d, %word;"
    );
    let (text, found) = words_by_lane(&body, |lane| 100 + lane);
    let expected = (0..32).map(|lane| {
        let (from, inside) = from(lane);
        (100 + from) << 1 | u32::from(inside)
    });
    assert_eq!(found, expected.collect::<Vec<_>>(), "{mode}");
    text
}

/// `holds` is told how many lanes vote for it.
fn vote(mode: &str, holds: impl Fn(u32) -> bool) -> String {
    let body = format!(
        ".reg .pred %p, %q;
        setp.ne.u32 %p, %a, 0;
        vote.sync.{mode}.pred %q, %p, -1;
        selp.u32 %d, 1, 0, %q;"
    );
    let mut last = String::new();
    for some in [0, 1, 31, 32] {
        let (text, found) = words_by_lane(&body, |lane| u32::from(lane < some));
        assert_eq!(found, [u32::from(holds(some)); 32], "{some}");
        last = text;
    }
    last
}

fn ballot() -> String {
    let body = ".reg .pred %p;
        setp.gt.u32 %p, %a, 10;
        vote.sync.ballot.b32 %d, %p, -1;";
    let (text, found) = words_by_lane(body, |lane| if lane % 3 == 0 { 11 } else { 10 });
    let expected = (0..32)
        .filter(|lane| lane % 3 == 0)
        .fold(0, |all, lane| all | 1 << lane);
    assert_eq!(found, [expected; 32]);
    text
}

/// A loop that each lane leaves after another number of rounds, and lanes that part within it.
fn bra() -> String {
    let body = ".reg .pred %p, %q;
        mov.u32 %d, 0;
        mov.u32 %word, 0;
        again:
        setp.ge.u32 %p, %word, %a;
        @%p bra done;
        and.b32 %lane, %word, 1;
        setp.eq.s32 %q, %lane, 0;
        @!%q bra odd;
        add.s32 %d, %d, 10;
        bra next;
        odd:
        add.s32 %d, %d, 1;
        next:
        add.s32 %word, %word, 1;
        bra again;
        done:
        shfl.sync.idx.b32 %word, %d, 3, 31, -1;
        sub.s32 %d, %d, %word;";
    let (text, found) = words_by_lane(body, |lane| lane);
    let sum = |lane: u32| lane.div_ceil(2) * 10 + lane / 2;
    let expected = (0..32).map(|lane| sum(lane).wrapping_sub(sum(3)));
    assert_eq!(found, expected.collect::<Vec<_>>());
    text
}

fn bra_uni() -> String {
    let body = "mov.u32 %d, 1;
        bra.uni over;
        mov.u32 %d, 2;
        over:";
    let (text, found) = words_by_lane(body, |lane| lane);
    assert_eq!(found, [1; 32]);
    text
}

/// Some lanes end before they store.
fn ends(opcode: &str) -> String {
    let body = format!(
        ".reg .pred %p;
        setp.lt.u32 %p, %a, 5;
        mov.u32 %d, 7;
        @%p {opcode};"
    );
    let (text, found) = words_by_lane(&body, |lane| lane);
    let expected = (0..32).map(|lane| if lane < 5 { 0xeeee_eeee } else { 7 });
    assert_eq!(found, expected.collect::<Vec<_>>());
    text
}

/// Every thread of two warps reads what the one in its place in the other warp wrote.
fn exchange(between: &str, threads: u32) -> String {
    kernel(&format!(
        ".reg .b32 %t, %o, %v, %n, %at_own;
        .reg .b64 %out, %at;
        .shared .align 16 .b8 words[512];
        ld.param.u64 %out, [second];
        mov.u32 %t, %tid.x;
        mov.u32 %n, {};
        sub.s32 %o, %n, %t;
        shl.b32 %v, %t, 2;
        add.s32 %t, %t, 100;
        add.s32 %at_own, %v, words;
        st.shared.u32 [%at_own], %t;
        {between}
        shl.b32 %o, %o, 2;
        add.s32 %o, %o, words;
        ld.shared.u32 %t, [%o];
        cvt.u64.u32 %at, %v;
        add.s64 %out, %out, %at;
        st.global.u32 [%out], %t;",
        threads - 1
    ))
}

fn bar_sync() -> String {
    let expected: Vec<u32> = (0..64).map(|thread| 100 + 63 - thread).collect();
    for barrier in ["bar.sync 0;", "bar.sync 3, 64;"] {
        assert_eq!(words(&exchange(barrier, 64), 64, &[0], 64), expected);
    }
    let text = exchange("bar.sync 0;", 64);
    let race = fault(&exchange("", 64), 1, 64);
    assert_eq!(
        race.kind,
        MistakeKind::Uninitialised,
        "the second warp has not written yet"
    );
    // The barrier of one warp alone orders nothing for the other.
    let one = fault(&exchange("bar.sync 1, 32;", 64), 1, 64);
    assert_eq!(one.kind, MistakeKind::Barrier, "{one}");
    text
}

/// The first warp arrives and goes on; the second waits for it, and reads what it wrote.
fn bar_arrive() -> String {
    let body = ".reg .b32 %t, %v;
        .reg .b64 %out;
        .reg .pred %first;
        .shared .align 16 .b8 word[4];
        ld.param.u64 %out, [second];
        mov.u32 %t, %tid.x;
        setp.eq.s32 %first, %t, 0;
        @%first st.shared.u32 [word], %t;
        setp.lt.u32 %first, %t, 32;
        @%first bra first;
        bar.sync 2, 64;
        ld.shared.u32 %v, [word];
        st.global.u32 [%out], %v;
        bra end;
        first:
        bar.arrive 2, 64;
        end:";
    let of_one = body.replace(
        "st.global",
        "setp.eq.s32 %first, %t, 40;\n@%first st.global",
    );
    let text = kernel(&of_one);
    assert_eq!(words(&text, 64, &[0], 1), [0]);
    // The write comes after the arrival, and the arrivals of both must be for as many threads.
    let late = of_one
        .replace("@%first st.shared.u32 [word], %t;", "")
        .replace(
            "bar.arrive 2, 64;",
            "bar.arrive 2, 64;\nst.shared.u32 [word], %t;",
        );
    assert_eq!(fault(&kernel(&late), 1, 64).kind, MistakeKind::Race);
    for other in ["bar.arrive 2, 32;", "bar.arrive 3, 64;", ""] {
        let found = fault(&kernel(&of_one.replace("bar.arrive 2, 64;", other)), 1, 64);
        assert_eq!(found.kind, MistakeKind::Barrier, "{other}: {found}");
    }
    text
}

/// One lane of those of the mask is elected: here the first.
fn elect() -> String {
    let body = ".reg .pred %p, %q;
        setp.ge.u32 %q, %a, 4;
        mov.u32 %d, 9;
        @!%q bra over;
        elect.sync _|%p, 0xfffffff0;
        selp.u32 %d, 1, 0, %p;
        over:";
    let (text, found) = words_by_lane(body, |lane| lane);
    let expected = (0..32).map(|lane| if lane < 4 { 9 } else { u32::from(lane == 4) });
    assert_eq!(found, expected.collect::<Vec<_>>());
    text
}

fn bar_warp_sync() -> String {
    let text = exchange("bar.warp.sync -1;", 32);
    let expected: Vec<u32> = (0..32).map(|thread| 100 + 31 - thread).collect();
    assert_eq!(words(&text, 32, &[0], 32), expected);
    let race = fault(&exchange("", 32), 1, 32);
    assert_eq!(race.kind, MistakeKind::Race);
    assert!(race.text.starts_with("ld.shared.u32"), "{race}");
    let shuffled = fault(&exchange("shfl.sync.idx.b32 %n, %n, 0, 31, -1;", 32), 1, 32);
    assert_eq!(
        shuffled.kind,
        MistakeKind::Race,
        "a shuffle orders no accesses"
    );
    text
}

fn bar_red() -> String {
    let program = |least: u32| {
        kernel(&format!(
            ".reg .b32 %t, %d;
            .reg .b64 %out, %at;
            .reg .pred %p, %q;
            ld.param.u64 %out, [second];
            mov.u32 %t, %tid.x;
            setp.ge.u32 %p, %t, {least};
            bar.red.or.pred %q, 0, %p;
            selp.u32 %d, 1, 0, %q;
            mul.wide.u32 %at, %t, 4;
            add.s64 %out, %out, %at;
            st.global.u32 [%out], %d;"
        ))
    };
    // Of both warps only the last thread of the second, or none.
    assert_eq!(words(&program(63), 64, &[0], 64), [1; 64]);
    assert_eq!(words(&program(64), 64, &[0], 64), [0; 64]);
    program(63)
}

/// Lanes from `first` on skip an instruction.
fn skipped(first: u32, instruction: &str) -> String {
    by_lane(&format!(
        ".reg .pred %p;
        .reg .b32 %v;
        setp.ge.u32 %p, %lane, {first};
        @%p bra over;
        {instruction}
        over:"
    ))
}

#[test]
fn lanes_that_do_not_take_part_are_found() {
    for instruction in [
        "shfl.sync.idx.b32 %v, %lane, 0, 31, -1;",
        "vote.sync.ballot.b32 %v, %p, -1;",
        "bar.warp.sync -1;",
    ] {
        let found = fault(&skipped(16, instruction), 1, 32);
        assert_eq!(found.kind, MistakeKind::Lanes, "{found}");
        assert!(
            instruction.starts_with(found.text.trim_end_matches(';')),
            "{found}"
        );
        assert!(found.message.contains("lanes 0x0000ffff wait"), "{found}");
    }
    // An instruction that no lane executes is skipped: no barrier waits for it.
    let none = by_lane(".reg .pred %p;\nsetp.gt.u32 %p, %lane, 99;\n@%p bar.sync 0;");
    crate::harness::words(&none, 64, &[0; 512], 512);
    // With the mask of those that are there it is right.
    crate::harness::words(&skipped(16, "bar.warp.sync 0xffff;"), 32, &[0; 256], 256);
}

#[test]
fn a_mask_that_leaves_out_its_own_lane_is_found() {
    let found = fault(
        &by_lane(".reg .b32 %v;\nshfl.sync.idx.b32 %v, %lane, 0, 31, 0x7fffffff;"),
        1,
        32,
    );
    assert_eq!(
        (found.kind, found.thread),
        (MistakeKind::Lanes, [31, 0, 0]),
        "{found}"
    );
}

#[test]
fn a_shuffle_from_a_lane_outside_of_its_mask_is_found() {
    let found = fault(
        &skipped(16, "shfl.sync.idx.b32 %v, %lane, 20, 31, 0xffff;"),
        1,
        32,
    );
    assert_eq!(found.kind, MistakeKind::Lanes);
    assert!(found.message.contains("reads lane 20"), "{found}");
}

#[test]
fn halves_of_a_warp_may_shuffle_at_the_same_time() {
    let body = ".reg .b32 %m;
        .reg .pred %p;
        setp.lt.u32 %p, %lane, 16;
        selp.b32 %m, 0xffff, 0xffff0000, %p;
        and.b32 %word, %lane, 16;
        shfl.sync.idx.b32 %d, %a, %word, 31, %m;";
    let (_, found) = words_by_lane(body, |lane| lane);
    assert_eq!(found, [[0; 16], [16; 16]].concat());
}

#[test]
fn a_barrier_that_not_all_threads_reach_is_found() {
    let partly = kernel(
        ".reg .b32 %t;
        .reg .pred %p;
        mov.u32 %t, %tid.x;
        setp.ge.u32 %p, %t, 32;
        @%p bra over;
        bar.sync 0;
        over:",
    );
    let found = fault(&partly, 1, 64);
    assert_eq!(found.kind, MistakeKind::Barrier);
    assert!(
        found
            .message
            .contains("of 64 threads 32 came to barrier 0, 32 ended"),
        "{found}"
    );
    let divergent = partly.replace("%p, %t, 32", "%p, %t, 48");
    let found = fault(&divergent, 1, 64);
    assert_eq!(found.kind, MistakeKind::Lanes, "{found}");
    let twice = partly.replace("over:", "bra end;\nover:\nbar.sync 0, 32;\nend:");
    assert_eq!(fault(&twice, 1, 64).kind, MistakeKind::Barrier);
}

#[test]
fn what_does_not_end_is_found() {
    let found = fault(&kernel("again:\nbra again;"), 1, 32);
    assert_eq!(found.kind, MistakeKind::Endless);
}

#[test]
fn a_division_by_zero_is_found() {
    let found = fault(
        &by_lane(".reg .b32 %v;\nsub.s32 %v, 5, %lane;\ndiv.u32 %v, 7, %v;"),
        1,
        32,
    );
    assert_eq!(
        (found.kind, found.thread),
        (MistakeKind::Meaningless, [5, 0, 0]),
        "{found}"
    );
}
