//! The emulation reports each mistake in `kernels/emulation/tests/misuse.cu`, and accepts the same kernel without it.

use emulation::Emulation;
use kernels::Queue;
use kernels::cuda::{Argument, Driver, Kernel, Launch};

/// Elements of every output.
const ROOM: usize = 1024;

#[repr(align(16))]
struct Room([u32; ROOM]);

fn kernel(name: &'static str) -> Kernel {
    let source = "misuse";
    Kernel { source, name }
}

/// Launches one block on an output of f32 or i32, followed by these arguments. Returns what the output holds, or the
/// message.
fn launch(
    name: &'static str,
    threads: u32,
    shared_bytes: u32,
    more: &[Argument],
) -> Result<Vec<u32>, String> {
    launch_grid(name, [1, threads], shared_bytes, more)
}

/// The same with so many blocks of so many threads.
fn launch_grid(
    name: &'static str,
    [blocks, threads]: [u32; 2],
    shared_bytes: u32,
    more: &[Argument],
) -> Result<Vec<u32>, String> {
    let mut out = Box::new(Room([0; ROOM]));
    let pointer = Argument::Pointer(out.0.as_mut_ptr().cast());
    let arguments: Vec<Argument> = std::iter::once(pointer)
        .chain(more.iter().copied())
        .collect();
    let launch = Launch {
        queue: Queue::Compute,
        kernel: kernel(name),
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        shared_bytes,
        arguments: &arguments,
    };
    // SAFETY: the kernels write no more than `ROOM` elements of the output.
    let launched = unsafe { Emulation::default().launch(&launch) };
    match launched {
        Ok(()) => Ok(out.0.to_vec()),
        Err(error) => {
            assert_eq!(error.operation, name);
            Err(error.message)
        }
    }
}

#[track_caller]
fn reports(result: Result<Vec<u32>, String>, parts: &[&str]) {
    let message = result.expect_err("the mistake is reported");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn threads_that_part_at_a_barrier() {
    let parts = [
        "separate ways",
        "32 threads wait at the barrier of misuse.cu:",
    ];
    reports(launch("two_barriers", 64, 0, &[]), &parts);
    let parts = [
        "1 threads have ended",
        "63 threads wait at the barrier of misuse.cu:",
    ];
    reports(launch("left_early", 64, 0, &[]), &parts);
}

#[test]
fn lanes_that_part_at_a_shuffle() {
    let parts = [
        "16 threads have ended",
        "16 threads wait for their warp at misuse.cu:",
    ];
    reports(launch("divergent_shuffle", 32, 0, &[]), &parts);
    let out = launch("masked_shuffle", 32, 0, &[Argument::Int(2)]).unwrap();
    assert_eq!(out[..6], [2, 0, 0, 0, 6, 0]);
    let result = launch("masked_shuffle", 32, 0, &[Argument::Int(1)]);
    reports(result, &["misuse.cu:", "reads lane 1"]);
}

#[test]
fn a_warp_that_is_not_whole() {
    let result = launch("conversation", 48, 0, &[]);
    reports(result, &["16 threads wait for their warp"]);
}

#[test]
fn shared_memory_beyond_its_bounds() {
    let call = |shift, barrier| launch("neighbours", 64, 0, &[Argument::Int(shift), barrier]);
    let out = call(0, Argument::Int(1)).unwrap();
    assert_eq!((out[0], out[63]), (1, 0));
    let parts = ["misuse.cu:", "element 64 of a shared array of 64"];
    reports(call(1, Argument::Int(1)), &parts);
    reports(call(-1, Argument::Int(1)), &["element -1"]);
}

#[test]
fn races_for_shared_memory() {
    // In either order of threads it is a race, though another thread is first.
    for _ in 0..2 {
        let arguments = [Argument::Int(0), Argument::Int(0)];
        let message = launch("neighbours", 64, 0, &arguments).unwrap_err();
        assert!(
            message.contains("race") || message.contains("before it is written"),
            "{message}"
        );
        reports(launch("overtaken", 64, 0, &[Argument::Int(0)]), &["race"]);
        assert_eq!(
            launch("overtaken", 64, 0, &[Argument::Int(1)]).unwrap()[63],
            1
        );
    }
}

#[test]
fn shared_memory_that_was_never_written() {
    let parts = ["misuse.cu:", "read before it is written"];
    reports(launch("never_written", 32, 0, &[]), &parts);
    let out = launch("never_written_by_address", 32, 0, &[]).unwrap();
    assert!(out[..32].iter().all(|bits| f32::from_bits(*bits).is_nan()));
}

#[test]
fn dynamic_shared_memory() {
    let call = |count, by_address| {
        let arguments = [Argument::Int(count), Argument::Int(by_address)];
        launch("dynamic", 32, 40, &arguments)
    };
    for by_address in [0, 1] {
        assert_eq!(call(10, by_address).unwrap()[0], 1f32.to_bits());
    }
    reports(call(11, 0), &["element 10 of a shared array of 10"]);
    reports(call(11, 1), &["beyond the shared array declared here"]);
    reports(
        launch("too_much_static", 32, 0, &[]),
        &["64000 bytes of static"],
    );
    let much = launch(
        "dynamic",
        32,
        300_000,
        &[Argument::Int(1), Argument::Int(0)],
    );
    reports(much, &["300000 bytes of dynamic shared memory"]);
}

#[test]
fn wide_accesses_off_their_alignment() {
    #[repr(align(16))]
    struct Aligned([f32; 8]);
    let x = Aligned([1.0; 8]);
    for (offset, fits) in [(0, true), (1, false), (4, true)] {
        let mut out = [0f32];
        let arguments = [
            Argument::Pointer(x.0[offset..].as_ptr().cast()),
            Argument::Pointer(out.as_mut_ptr().cast()),
        ];
        let launch = Launch {
            queue: Queue::Compute,
            kernel: kernel("wide_access"),
            grid: [1, 1, 1],
            block: [1, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        };
        // SAFETY: the kernel reads one element and writes one.
        let launched = unsafe { Emulation::default().launch(&launch) };
        assert_eq!(launched.is_ok(), fits, "{launched:?}");
    }
}

#[test]
fn results_that_depend_on_the_order_of_blocks_change() {
    let firsts: Vec<u32> = (0..LAUNCHES)
        .map(|_| launch_grid("queue_of_blocks", [3, 1], 0, &[]).unwrap()[1])
        .collect();
    assert!(firsts.contains(&0) && firsts.contains(&2), "{firsts:?}");
}

/// So many launches in a row have both orders of blocks.
const LAUNCHES: usize = 4;

/// Launches two blocks of one thread each, in both orders of blocks; the later block finds the race.
#[track_caller]
fn blocks_race(name: &'static str, arguments: &[Argument], parts: &[&str]) {
    let mut last = [false; 2];
    for _ in 0..LAUNCHES {
        let message = launch_grid(name, [2, 1], 0, arguments).expect_err("a race is reported");
        let by_second = message.contains(": block (1, 0, 0), thread (0, 0, 0): race: ");
        let [own, other] = if by_second { [1, 0] } else { [0, 1] };
        let own = format!(": block ({own}, 0, 0), thread (0, 0, 0): race: ");
        let other = format!("which block ({other}, 0, 0), thread (0, 0, 0) has ");
        for part in [&[own.as_str(), &other, "misuse.cu:"], parts].concat() {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
        last[usize::from(by_second)] = true;
    }
    assert_eq!(last, [true; 2], "both orders");
}

/// What a block does with an element.
#[derive(Clone, Copy, PartialEq)]
enum Use {
    Reads,
    Writes,
    Adds,
    AddsAtomically,
}

/// Two blocks that write the same value race too: CUDA's memory model does not define such a program.
#[test]
fn races_between_blocks_for_global_memory() {
    let uses = [Use::Reads, Use::Writes, Use::Adds, Use::AddsAtomically];
    for (first, second) in uses.iter().flat_map(|a| uses.map(|b| (*a, b))) {
        let arguments = [first, second].map(|how| Argument::Int(how as i32));
        if first == second && [Use::Reads, Use::AddsAtomically].contains(&first) {
            for _ in 0..LAUNCHES {
                launch_grid("two_blocks", [2, 1], 0, &arguments).unwrap();
            }
        } else {
            blocks_race("two_blocks", &arguments, &["byte 0 of argument 0"]);
        }
    }
    blocks_race("reads_before_a_write", &[], &["byte 0 of argument 0"]);
}

#[test]
fn blocks_may_share_a_word() {
    for bytes in [1, 2, 4, 8] {
        for start in (0..48).step_by(bytes) {
            let arguments = [start, bytes].map(|number| Argument::Int(number as i32));
            if start + bytes <= 16 || start >= 32 {
                for _ in 0..LAUNCHES {
                    launch_grid("wide_and_narrow", [2, 1], 0, &arguments).unwrap();
                }
            } else {
                let byte = format!("writes byte {start} of argument 0");
                blocks_race("wide_and_narrow", &arguments, &[&byte]);
            }
        }
    }
}

/// Ways to order two accesses of different threads.
const NONE: i32 = 0;
const WARPS: i32 = 1;
const BLOCK: i32 = 2;

/// Launches a block of two warps in both orders of threads; whether they race.
#[track_caller]
fn threads_race(name: &'static str, arguments: &[i32]) -> bool {
    let arguments: Vec<Argument> = arguments.iter().copied().map(Argument::Int).collect();
    let races = [(); LAUNCHES].map(|()| match launch(name, 64, 0, &arguments) {
        Ok(_) => false,
        Err(message) => {
            let parts = [
                "misuse.cu:",
                "race: ",
                ", which thread (",
                "no barrier since",
            ];
            reports(Err(message), &parts);
            true
        }
    });
    assert_eq!(races, [races[0]; LAUNCHES], "{name}: in one order only");
    races[0]
}

#[test]
fn races_within_a_block_for_global_memory() {
    for (distance, meeting, races) in [
        (0, NONE, false),
        (1, NONE, true),
        (63, NONE, true),
        (32, WARPS, true),
        (1, BLOCK, false),
        (32, BLOCK, false),
    ] {
        let found = threads_race("through_global_memory", &[distance, meeting]);
        assert_eq!(found, races, "distance {distance}, meeting {meeting}");
    }
    for (writer, meeting, races) in [
        (0, NONE, true),
        (31, NONE, true),
        (32, NONE, true),
        (63, NONE, true),
        (0, WARPS, true),
        (63, WARPS, true),
        (0, BLOCK, false),
        (63, BLOCK, false),
    ] {
        let found = threads_race("written_by_a_reader", &[writer, meeting]);
        assert_eq!(found, races, "writer {writer}, meeting {meeting}");
    }
    assert!(threads_race("sum_of_a_block", &[NONE]));
    assert!(!threads_race("sum_of_a_block", &[BLOCK]));
}

/// Lanes of one warp need only a synchronisation of the warp.
#[test]
fn lanes_meet_in_global_memory() {
    for (meeting, races) in [(NONE, true), (WARPS, false)] {
        let meeting = Argument::Int(meeting);
        for distance in [1, 16, 31] {
            let arguments = [Argument::Int(distance), meeting];
            let launched = launch("through_global_memory", 32, 0, &arguments);
            assert_eq!(launched.is_err(), races, "{launched:?}");
        }
        for writer in [0, 15, 31] {
            let arguments = [Argument::Int(writer), meeting];
            let launched = launch("written_by_a_reader", 32, 0, &arguments);
            assert_eq!(launched.is_err(), races, "{launched:?}");
        }
    }
}

/// A copy may read its source until its thread waits for it.
#[test]
fn races_with_copies() {
    launch("source_of_a_copy", 32, 0, &[Argument::Int(1)]).unwrap();
    let result = launch("source_of_a_copy", 32, 0, &[Argument::Int(0)]);
    let parts = [
        "misuse.cu:",
        "reads byte 12 of argument 0",
        "thread (1, 0, 0) has written",
    ];
    reports(result, &parts);
}

#[test]
fn launches_that_no_device_takes() {
    reports(
        launch("no_such_kernel", 32, 0, &[]),
        &["no kernel of this name"],
    );
    reports(launch("two_barriers", 0, 0, &[]), &["a block of 0 threads"]);
    reports(launch("two_barriers", 2048, 0, &[]), &["a block of 2048"]);
    reports(
        launch("swiglu_f32", 32, 0, &[]),
        &["comes from `swiglu.cu`, not from `misuse.cu`"],
    );
    let too_few = launch("dynamic", 32, 40, &[Argument::Int(1)]);
    reports(too_few, &["arguments `pi`, its parameters are `pii`"]);
    let wrong_type = launch("overtaken", 32, 0, &[Argument::Size(1)]);
    reports(wrong_type, &["arguments `ps`, its parameters are `pi`"]);
}

#[test]
fn a_failed_launch_does_not_harm_the_next() {
    for _ in 0..3 {
        launch("left_early", 64, 0, &[]).unwrap_err();
        let out = launch("neighbours", 64, 0, &[Argument::Int(0), Argument::Int(1)]).unwrap();
        assert_eq!(out[5], 6);
    }
}

#[test]
fn lanes_and_threads_talk() {
    let threads = 64;
    let out = launch("conversation", threads, 0, &[]).unwrap();
    assert_eq!(out[0], threads);
    for thread in 0..threads {
        let (warp, lane) = (thread / 32 * 32, thread % 32);
        let down = if lane < 30 { thread + 2 } else { thread };
        let up = if lane % 8 >= 2 { thread - 2 } else { thread };
        let upper = u32::from(warp == 32);
        let sum = threads * (threads - 1) / 2;
        let expected = [warp + 5, thread ^ 3, down, up, 7, upper, upper, 1, sum];
        let own = 1 + thread as usize * 9;
        assert_eq!(out[own..own + 9], expected, "thread {thread}");
    }
}

#[test]
fn lanes_that_part_at_a_product() {
    let out = launch("product", 32, 0, &[Argument::Int(32)]).unwrap();
    assert_eq!(out[..32], [16f32.to_bits(); 32]);
    let parts = ["1 threads have ended", "31 threads wait for their warp at"];
    reports(launch("product", 32, 0, &[Argument::Int(31)]), &parts);
}

/// All elements differ, and all sums are exact.
#[test]
fn fragments_lie_as_documented() {
    let out = launch("fragments", 32, 0, &[]).unwrap();
    for row in 0..16 {
        for column in 0..8 {
            let terms = (0..16).map(|k| (16 * row + k) * (8 * k + column));
            let expected = terms.sum::<usize>() as f32;
            let got = f32::from_bits(out[row * 8 + column]);
            assert_eq!(got, expected, "row {row}, column {column}");
        }
    }
}

#[test]
fn copies_that_nobody_waits_for() {
    #[repr(align(16))]
    struct Aligned([f32; 132]);
    let x = Aligned(std::array::from_fn(|index| index as f32));
    let call = |shift, wait| {
        let x = Argument::Pointer(x.0.as_ptr().cast());
        launch(
            "copies",
            32,
            0,
            &[x, Argument::Int(shift), Argument::Int(wait)],
        )
    };
    let out = call(4, 1).unwrap();
    assert_eq!(out[31], 5f32.to_bits());
    reports(call(0, 0), &["misuse.cu:", "has not waited for this copy"]);
    reports(
        call(1, 1),
        &["misuse.cu:", "a copy of 16 bytes is not aligned"],
    );
}
