//! Instructions that four warps execute alike.

use crate::harness::{Program, fault, kernel, run};
use ptx::{ArgumentValue, GlobalMemory, MistakeKind};

pub const PROGRAMS: &[(&str, Program)] = &[
    ("setmaxnreg.dec.sync.aligned.u32", registers),
    ("setmaxnreg.inc.sync.aligned.u32", registers),
];

/// Three groups, which are launched with 168 registers each: 504 = 24 + 240 + 240.
const REGISTERS: &str = ".reg .b32 %t;
    .reg .pred %p;
    mov.u32 %t, %tid.x;
    setp.lt.u32 %p, %t, 128;
    @%p bra fewer;
    setmaxnreg.inc.sync.aligned.u32 240;
    bra end;
    fewer:
    setmaxnreg.dec.sync.aligned.u32 24;
    end:";

/// A kernel for blocks of 384 threads.
fn bounded(body: &str) -> String {
    kernel(body).replace(")\n{", ")\n.maxntid 384\n{")
}

fn registers() -> String {
    let text = bounded(REGISTERS);
    let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(0)];
    run(&text, 384, &arguments, &mut GlobalMemory::new()).unwrap();
    text
}

#[test]
fn mistakes_of_groups_are_found() {
    for (from, to, message) in [
        (
            "u32 24;",
            "u32 32;",
            "a wait for ever: a warp asks for 72 more registers of each thread, and others gave back 40",
        ),
        ("u32 240", "u32 160", "160 registers, after 168"),
        ("u32 24;", "u32 176;", "176 registers, after 168"),
        (
            "%t, 128",
            "%t, 96",
            "another warp of the group came to another instruction",
        ),
        ("bra fewer", "bra end", "asks for 72 more registers"),
        (
            "setmaxnreg.inc",
            "setp.ge.u32 %p, %t, 352;\n@%p bra end;\nsetmaxnreg.inc",
            "not all warps of the group came",
        ),
    ] {
        let text = bounded(&REGISTERS.replacen(from, to, 1));
        let found = fault(&text, 1, 384);
        assert_eq!(found.kind, MistakeKind::Group, "{from} -> {to}: {found}");
        assert!(found.message.contains(message), "{from} -> {to}: {found}");
    }
    // Whoever asks for more waits until others have given back: here the last group, which waits for the second.
    let late = REGISTERS.replace("setp.lt.u32 %p, %t, 128", "setp.ge.u32 %p, %t, 256");
    let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(0)];
    run(&bounded(&late), 384, &arguments, &mut GlobalMemory::new()).unwrap();
    let never = late
        .replace("fewer:", "fewer:\nbar.sync 1, 256;")
        .replace("240;", "240;\nbar.sync 1, 256;");
    let found = fault(&bounded(&never), 1, 384);
    assert!(
        found
            .message
            .contains("a wait for ever: a warp asks for 72 more"),
        "{found}"
    );
    for (text, message) in [
        (kernel(REGISTERS), "without .maxntid"),
        (
            bounded(REGISTERS).replace("sm_90a", "sm_100a"),
            "without .target sm_90a",
        ),
    ] {
        let error = ptx::Module::parse(&text).err().unwrap();
        assert!(error.message.contains(message), "{error}");
    }
    let found = fault(&bounded(REGISTERS), 1, 352);
    assert!(
        found.message.contains("warps 8 to 10 are no group of four"),
        "{found}"
    );
    let partly = REGISTERS.replace("%t, 128", "%t, 120");
    assert_eq!(fault(&bounded(&partly), 1, 384).kind, MistakeKind::Lanes);
    for count in [16, 100, 264] {
        let text = bounded(&REGISTERS.replace("u32 24;", &format!("u32 {count};")));
        let error = ptx::Module::parse(&text).err().unwrap();
        assert!(
            error
                .message
                .contains(&format!("{count} registers; possible are")),
            "{error}"
        );
    }
}
