//! Launches: their report, those that a device refuses, and special registers.

use crate::harness::{kernel, run, run_grid, words_by_lane};
use ptx::{ArgumentValue, GlobalMemory, Module, Shape};

/// 32 lanes: words in a row, a word of each second bank, one word, and a column of a matrix of 32 words a row.
#[test]
fn sectors_and_conflicts_are_counted_by_line() {
    for (shift, rounds, sectors) in [(2, 1, 4), (3, 2, 8), (31, 1, 1), (7, 32, 32)] {
        let text = kernel(&format!(
            ".reg .b32 %t, %v;
            .reg .b64 %in, %at;
            .shared .align 128 .b8 words[4096];
            ld.param.u64 %in, [first];
            mov.u32 %t, %tid.x;
            mov.u32 %v, %t;
            shl.b32 %t, %t, {shift};
            and.b32 %t, %t, 4095;
            cvt.u64.u32 %at, %t;
            add.s64 %in, %in, %at;
            ld.global.u32 %v, [%in];
            add.s32 %t, %t, words;
            @!%never st.shared.u32 [%t], %v;
            ",
        ))
        .replace(".reg .b32 %t", ".reg .pred %never;\n.reg .b32 %t")
        .replace("mov.u32 %v, %t;", "setp.eq.s32 %never, 0, 1;");
        let mut memory = GlobalMemory::new();
        let first = memory.allocate_with("first", &[0; 4096]);
        let text = match shift {
            // All lanes may read one word, and only one write it.
            31 => text.replace("setp.eq.s32 %never, 0, 1", "setp.ne.s32 %never, %t, 0"),
            _ => text,
        };
        let arguments = [ArgumentValue::U64(first), ArgumentValue::U64(0)];
        let report = run(&text, 32, &arguments, &mut memory).unwrap();
        let [global, shared] = report.lines[..] else {
            panic!("{report:?}");
        };
        assert_eq!(
            (global.counts.global, global.counts.sectors),
            (1, sectors),
            "{shift}"
        );
        assert_eq!(
            (shared.counts.shared, shared.counts.rounds),
            (1, rounds),
            "{shift}"
        );
        assert_eq!(shared.counts.conflicts, rounds - 1, "{shift}");
    }
}

#[test]
fn launches_that_a_device_refuses_are_refused() {
    let text =
        kernel(".shared .align 16 .b8 array[49152];").replace(")\n{", ")\n.maxntid 128, 1, 1\n{");
    let hopper = Module::parse(&text).unwrap();
    let module = Module::parse(&text.replace("sm_90a", "sm_80")).unwrap();
    let mut memory = GlobalMemory::new();
    let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(0)];
    let good = Shape {
        grid: [1; 3],
        block: [128, 1, 1],
        shared_bytes: 0,
    };
    let mut launch = |name: &str, shape| {
        module
            .launch(name, shape, &arguments, &mut memory)
            .map(|_| ())
    };
    launch("test", good).unwrap();
    for (name, shape, message) in [
        ("other", good, "no such kernel"),
        (
            "test",
            Shape {
                block: [129, 1, 1],
                ..good
            },
            "128 are allowed",
        ),
        (
            "test",
            Shape {
                block: [0, 1, 1],
                ..good
            },
            "128 are allowed",
        ),
        (
            "test",
            Shape {
                grid: [1, 65_536, 1],
                ..good
            },
            "a grid of",
        ),
        (
            "test",
            Shape {
                shared_bytes: 120 << 10,
                ..good
            },
            "bytes of shared memory",
        ),
    ] {
        let error = launch(name, shape).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    for (kibibytes, fits) in [(179, true), (180, false)] {
        let shared_bytes = kibibytes << 10;
        let shape = Shape {
            shared_bytes,
            ..good
        };
        let launched = hopper.launch("test", shape, &arguments, &mut GlobalMemory::new());
        assert_eq!(launched.is_ok(), fits, "{kibibytes}");
    }
}

#[test]
fn a_block_knows_its_place_in_the_grid() {
    let (_, lanes) = words_by_lane("mov.u32 %d, %laneid;", |_| 0);
    assert_eq!(lanes, (0..32).collect::<Vec<u32>>());
    let text = kernel(
        ".reg .b32 %x, %y, %z, %n, %v;
        .reg .b64 %out, %at;
        ld.param.u64 %out, [second];
        mov.u32 %x, %ctaid.x;
        mov.u32 %y, %ctaid.y;
        mov.u32 %z, %ctaid.z;
        mov.u32 %n, %nctaid.y;
        mad.lo.s32 %v, %z, %n, %y;
        mov.u32 %n, %nctaid.x;
        mad.lo.s32 %v, %v, %n, %x;
        mul.wide.u32 %at, %v, 4;
        add.s64 %out, %out, %at;
        mov.u32 %n, %nctaid.z;
        mul.lo.s32 %x, %x, 100;
        mad.lo.s32 %x, %y, 10, %x;
        add.s32 %x, %x, %z;
        st.global.u32 [%out], %x;",
    );
    let mut memory = GlobalMemory::new();
    let second = memory.allocate("second", 4 * 24);
    let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(second)];
    run_grid(&text, [4, 3, 2], 1, &arguments, &mut memory).unwrap();
    let last = memory.read(second + 4 * 23, 4).unwrap();
    assert_eq!(u32::from_le_bytes(last.try_into().unwrap()), 321);
    assert_eq!(memory.written(second, 96).unwrap(), 96);
}
