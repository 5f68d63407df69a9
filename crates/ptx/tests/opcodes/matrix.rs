//! Tensor cores, against the tables of fragments in the PTX manual, which are written down here as they stand there.

use crate::harness::{Program, by_lane, fault, words};
use ptx::MistakeKind;

pub const PROGRAMS: &[(&str, Program)] = &[
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", || load(false)),
    ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", || {
        load(true)
    }),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        multiply,
    ),
];

/// The manual's table for `ldmatrix`: thread, and the two elements of its row that it receives. Row `r` has threads `4 r` to
/// `4 r + 3`, each with two neighbours.
const THREAD_OF_ELEMENT: [[usize; 8]; 8] = [
    [0, 0, 1, 1, 2, 2, 3, 3],
    [4, 4, 5, 5, 6, 6, 7, 7],
    [8, 8, 9, 9, 10, 10, 11, 11],
    [12, 12, 13, 13, 14, 14, 15, 15],
    [16, 16, 17, 17, 18, 18, 19, 19],
    [20, 20, 21, 21, 22, 22, 23, 23],
    [24, 24, 25, 25, 26, 26, 27, 27],
    [28, 28, 29, 29, 30, 30, 31, 31],
];

/// Rows of 32 bytes, so that they are no neighbours; matrices in an order of their own.
const LOAD: &str = ".reg .b32 %v<4>, %d<4>;
    .reg .b64 %s, %row;
    .shared .align 16 .b8 rows[1024];
    ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%in];
    mov.u64 %s, rows;
    add.s64 %row, %s, %at;
    st.shared.v4.u32 [%row], {%v0, %v1, %v2, %v3};
    bar.sync 0;
    xor.b32 %word, %lane, 8;
    shl.b32 %word, %word, 5;
    cvt.u64.u32 %row, %word;
    add.s64 %s, %s, %row;
    cvt.u32.u64 %word, %s;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%d0, %d1, %d2, %d3}, [%word];
    st.global.v4.u32 [%out], {%d0, %d1, %d2, %d3};";

fn load(is_transposed: bool) -> String {
    let body = match is_transposed {
        false => LOAD.into(),
        true => LOAD.replace("x4.shared", "x4.trans.shared"),
    };
    let text = by_lane(&body);
    // Element `c` of row `r`, which lane `r` wrote, is `100 r + c`.
    let element = |row: usize, column: usize| (100 * row + column) as u32;
    let input: Vec<u32> = (0..32)
        .flat_map(|row| (0..8).map(move |word| (row, word)))
        .map(|(row, word)| match word {
            0..4 => element(row, 2 * word) | element(row, 2 * word + 1) << 16,
            _ => 0,
        })
        .collect();
    let output = words(&text, 32, &input, 256);
    for matrix in 0..4 {
        for (row, threads) in THREAD_OF_ELEMENT.iter().enumerate() {
            for (column, &thread) in threads.iter().enumerate() {
                let half = output[8 * thread + matrix] >> (16 * (column % 2)) & 0xffff;
                let [of_row, at] = if is_transposed {
                    [column, row]
                } else {
                    [row, column]
                };
                // Lane 8 m + r gives the address of row r of matrix m ^ 1.
                let expected = element(8 * (matrix ^ 1) + of_row, at);
                assert_eq!(
                    half, expected,
                    "matrix {matrix}, row {row}, column {column}"
                );
            }
        }
    }
    let crooked = fault(
        &text.replace(
            "xor.b32 %word, %lane, 8;\n    shl.b32 %word, %word, 5;",
            "shl.b32 %word, %lane, 3;",
        ),
        1,
        32,
    );
    assert_eq!(crooked.kind, MistakeKind::Misaligned, "{crooked}");
    let half = fault(
        &text
            .replace(
                "mov.u64 %s, rows;",
                "mov.u64 %s, rows;\nsetp.lt.u32 %p, %lane, 16;\n@%p bra over;",
            )
            .replace("bar.sync 0;", "")
            .replace(
                "{%d0, %d1, %d2, %d3};\nret;",
                "{%d0, %d1, %d2, %d3};\nover:\nret;",
            )
            .replace(".reg .b32 %v", ".reg .pred %p;\n.reg .b32 %v"),
        1,
        32,
    );
    assert_eq!(half.kind, MistakeKind::Lanes, "{half}");
    text
}

/// Row and column of an element of a fragment, as the manual gives them: by `groupID = lane >> 2`, `threadID_in_group = lane %
/// 4` and the element's number.
fn a_place(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if i < 2 || (4..6).contains(&i) {
        group
    } else {
        group + 8
    };
    let column = thread * 2 + (i & 1) + if i >= 4 { 8 } else { 0 };
    (row, column)
}

fn b_place(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (thread * 2 + (i & 1) + if i >= 2 { 8 } else { 0 }, group)
}

fn c_place(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}

/// A small integer, which bf16 holds exactly.
fn number(row: usize, column: usize, seed: usize) -> i32 {
    (((row * 31 + column * 17 + seed * 13) * 2_654_435_761) >> 7) as i32 % 9 - 4
}

fn bf16(value: i32) -> u32 {
    (value as f32).to_bits() >> 16
}

fn multiply() -> String {
    let text = by_lane(
        ".reg .b32 %a<4>, %b<2>;
        .reg .f32 %c<4>, %d<4>;
        ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%in];
        ld.global.v2.u32 {%b0, %b1}, [%in+16];
        cvt.rn.f32.s32 %c0, %lane;
        add.f32 %c1, %c0, 0f42C80000;
        add.f32 %c2, %c1, 0f42C80000;
        add.f32 %c3, %c2, 0f42C80000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c1, %c2, %c3};
        st.global.v4.f32 [%out], {%d0, %d1, %d2, %d3};",
    );
    let mut input = vec![0; 256];
    let mut c = [[0; 8]; 16];
    for lane in 0..32 {
        for i in 0..8 {
            let (row, column) = a_place(lane, i);
            input[8 * lane + i / 2] |= bf16(number(row, column, 1)) << (16 * (i % 2));
        }
        for i in 0..4 {
            let (row, column) = b_place(lane, i);
            input[8 * lane + 4 + i / 2] |= bf16(number(row, column, 2)) << (16 * (i % 2));
            let (row, column) = c_place(lane, i);
            c[row][column] = lane as i32 + 100 * i as i32;
        }
    }
    let output = words(&text, 32, &input, 256);
    for lane in 0..32 {
        for i in 0..4 {
            let (row, column) = c_place(lane, i);
            let products = (0..16).map(|k| number(row, k, 1) * number(k, column, 2));
            let expected = (c[row][column] + products.sum::<i32>()) as f32;
            let found = f32::from_bits(output[8 * lane + i]);
            assert_eq!(found, expected, "lane {lane}, element {i}");
        }
    }
    let partly = text
        .replace("mma.sync", "setp.eq.s32 %p, %lane, 3;\n@%p ret;\nmma.sync")
        .replace(".reg .b32 %a<4>", ".reg .pred %p;\n.reg .b32 %a<4>");
    assert_eq!(fault(&partly, 1, 32).kind, MistakeKind::Lanes);
    text
}
