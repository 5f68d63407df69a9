//! Products of groups of four warps, against CUTLASS's layouts: shapes and strides (`mma_traits_sm90_gmma.hpp`), which are written
//! down here as they stand there.

use crate::harness::{Program, kernel};
use ptx::{ArgumentValue, GlobalMemory, LaunchError, Mistake, MistakeKind, Module, Shape};

macro_rules! products {
    ($($n:literal)*) => {
        &[$((
            concat!("wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.bf16.bf16"),
            || Layouts::numbered($n / 8 - 1).check($n),
        ),)*]
    };
}

pub const PRODUCTS: &[(&str, Program)] = products!(
    8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152 160 168 176 184 192 200 208 216 224 232 240 248 256
);

pub const PROGRAMS: &[(&str, Program)] = &[
    ("fence.proxy.async.shared::cta", || {
        Layouts::numbered(0).check(8)
    }),
    ("wgmma.commit_group.sync.aligned", || {
        Layouts::numbered(1).check(8)
    }),
    ("wgmma.fence.sync.aligned", || Layouts::numbered(2).check(8)),
    ("wgmma.wait_group.sync.aligned", || {
        Layouts::numbered(3).check(8)
    }),
];

/// Where the right factor lies, where the left one does in global memory if it is in registers, and all that is copied.
const RIGHT: usize = 16 << 10;
const IN_REGISTERS: usize = 48 << 10;
const BYTES: usize = IN_REGISTERS + 128 * 16;

/// The offset that a CuTe layout gives a number: shapes and strides, the first runs fastest.
fn cute<const N: usize>(shape: [usize; N], stride: [usize; N], number: usize) -> usize {
    let (mut left, mut offset) = (number, 0);
    for (size, stride) in shape.into_iter().zip(stride) {
        offset += left % size * stride;
        left /= size;
    }
    offset
}

/// Element `i` of a thread's accumulators, as a number of `64 x N` with rows running fastest: `CLayout_64xN`.
fn accumulator(thread: usize, i: usize) -> (usize, usize) {
    let at = cute([4, 8, 4], [128, 1, 16], thread) + cute([2, 2, 32], [64, 8, 512], i);
    (at % 64, at / 64)
}

/// The same of the left factor: `ALayout_64x16`.
fn left(thread: usize, i: usize) -> (usize, usize) {
    let at = cute([4, 8, 4], [128, 1, 16], thread) + cute([2, 2, 2], [64, 8, 512], i);
    (at % 64, at / 64)
}

/// How a factor lies in shared memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// 0, 128, 64 or 32 bytes, as a descriptor numbers them.
    swizzle: usize,
    is_transposed: bool,
    /// Elements along k of the whole tile, of which a product takes 16.
    depth: usize,
}

impl Layout {
    /// Chunks of a swizzled row.
    fn width(self) -> usize {
        [1, 8, 4, 2][self.swizzle]
    }

    /// Leading and stride offsets, in chunks of 16 bytes, for a factor of so many rows.
    fn strides(self, rows: usize) -> (usize, usize) {
        match (self.is_transposed, self.width()) {
            (false, 1) => (rows, 8),
            (true, 1) => (8, self.depth),
            (false, width) => (1, 8 * width),
            (true, width) => (self.depth * width, 8 * width),
        }
    }

    /// The byte of an element: the canonical layouts in chunks of 16 bytes, then `Swizzle<B, 4, 3>`.
    fn byte(self, row: usize, k: usize, rows: usize) -> usize {
        let byte = self.place(row, k, rows);
        byte ^ (byte >> 7 & (self.width() - 1)) << 4
    }

    /// The same before the swizzle. With row 0 it says where the product of a depth begins.
    fn place(self, row: usize, k: usize, rows: usize) -> usize {
        let (width, (lbo, sbo)) = (self.width(), self.strides(rows));
        let (chunk, within) = match (self.is_transposed, width) {
            // ((8,n),2):((1,SBO),LBO)
            (false, 1) => (cute([8, 32], [1, sbo], row) + k / 8 * lbo, k % 8),
            // ((8,n),2):((W,SBO),1), a panel for each W chunks of the depth
            (false, _) => (
                cute([8, 32], [width, sbo], row) + cute([width, 8], [1, rows * width], k / 8),
                k % 8,
            ),
            // ((1,n),(8,k)):((X,SBO),(1,LBO))
            (true, 1) => (row / 8 * sbo + cute([8, 8], [1, lbo], k), row % 8),
            // ((W,n),(8,k)):((1,LBO),(W,SBO))
            (true, _) => (
                cute([width, 32], [1, lbo], row / 8) + cute([8, 8], [width, sbo], k),
                row % 8,
            ),
        };
        16 * chunk + 2 * within
    }

    fn descriptor(self, start: usize, rows: usize) -> u64 {
        let (lbo, sbo) = self.strides(rows);
        let fields = start as u64 >> 4 | (lbo as u64) << 16 | (sbo as u64) << 32;
        fields | (self.swizzle as u64) << 62
    }
}

/// How a product finds its factors.
#[derive(Clone, Copy, Debug)]
struct Layouts {
    left: Option<Layout>,
    right: Layout,
}

fn number(row: usize, k: usize, seed: usize) -> i32 {
    (((row * 31 + k * 17 + seed * 13) * 2_654_435_761) >> 7) as i32 % 9 - 4
}

fn bf16(value: i32) -> [u8; 2] {
    let bits = (value as f32).to_bits() >> 16;
    (bits as u16).to_le_bytes()
}

impl Layouts {
    /// All 32: swizzles, transposes, and whether the left factor is in registers.
    fn numbered(number: usize) -> Layouts {
        let layout = |swizzle, is_transposed| Layout {
            swizzle,
            is_transposed,
            depth: 16,
        };
        let left = layout(number % 4, number / 4 % 2 == 1);
        Layouts {
            left: (number < 16).then_some(left),
            right: layout((number + number / 4) % 4, number / 8 % 2 == 1),
        }
    }

    /// The same with tiles that several products go through.
    fn deep(self, depth: usize) -> Layouts {
        Layouts {
            left: self.left.map(|left| Layout { depth, ..left }),
            right: Layout {
                depth,
                ..self.right
            },
        }
    }

    /// Four warps multiply, and add the same products once more.
    fn text(self, columns: usize) -> String {
        let sums: Vec<String> = (0..columns / 2).map(|index| format!("%d{index}")).collect();
        let (sums, flag) = (sums.join(", "), u8::from(self.right.is_transposed));
        let (left, end) = match self.left {
            None => ("{%a0, %a1, %a2, %a3}", format!("1, 1, {flag}")),
            Some(left) => (
                "%left",
                format!("1, 1, {}, {flag}", u8::from(left.is_transposed)),
            ),
        };
        let opcode = format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16");
        let left_bits = self.left.map_or(0, |left| left.descriptor(0, 64));
        let right_bits = self.right.descriptor(RIGHT, columns);
        let depths = || (0..self.right.depth).step_by(16);
        let products: String = depths()
            .chain(depths())
            .enumerate()
            .map(|(index, k)| {
                let adds = if index == 0 { "%no" } else { "%yes" };
                let step = |layout: Layout, rows| layout.place(0, k, rows) >> 4;
                format!(
                    "add.s64 %left, %base, {};
                    add.s64 %right, %base, {};
                    {opcode} {{{sums}}}, {left}, %right, {adds}, {end};\n",
                    left_bits + self.left.map_or(0, |left| step(left, 64)) as u64,
                    right_bits + step(self.right, columns) as u64,
                )
            })
            .collect();
        let stores: String = (0..columns / 2)
            .map(|index| format!("st.global.f32 [%out+{}], %d{index};\n", 4 * index))
            .collect();
        kernel(&format!(
            ".reg .b32 %t, %at, %a<4>, %v<4>;
            .reg .f32 %d<{}>;
            .reg .b64 %s, %in, %out, %off, %base, %left, %right;
            .reg .pred %p, %no, %yes;
            ld.param.u64 %in, [first];
            ld.param.u64 %out, [second];
            mov.u32 %t, %tid.x;
            mul.wide.u32 %off, %t, {};
            add.s64 %out, %out, %off;
            mul.wide.u32 %off, %t, 16;
            add.s64 %in, %in, %off;
            ld.global.v4.u32 {{%a0, %a1, %a2, %a3}}, [%in+{IN_REGISTERS}];
            mov.u64 %s, dynamic;
            cvt.u32.u64 %at, %s;
            shl.b32 %t, %t, 4;
            add.s32 %at, %at, %t;
            mov.u32 %t, 0;
            copy:
            ld.global.v4.u32 {{%v0, %v1, %v2, %v3}}, [%in];
            st.shared.v4.u32 [%at], {{%v0, %v1, %v2, %v3}};
            add.s64 %in, %in, 2048;
            add.s32 %at, %at, 2048;
            add.s32 %t, %t, 1;
            setp.lt.u32 %p, %t, {};
            @%p bra copy;
            fence.proxy.async.shared::cta;
            bar.sync 0;
            shr.u64 %base, %s, 4;
            setp.ne.s32 %no, %t, %t;
            setp.eq.s32 %yes, %t, %t;
            wgmma.fence.sync.aligned;
            {products}
            wgmma.commit_group.sync.aligned;
            wgmma.wait_group.sync.aligned 0;
            {stores}",
            columns / 2,
            2 * columns,
            IN_REGISTERS / 2048,
        ))
        .replace(".align 16 .b8 dynamic", ".align 1024 .b8 dynamic")
    }

    /// Global memory: both factors as they lie in shared memory, and behind them the left one as it lies in registers.
    fn image(self, columns: usize) -> Vec<u8> {
        let mut image = vec![0; BYTES];
        let mut put = |byte: usize, value| image[byte..byte + 2].copy_from_slice(&bf16(value));
        for k in 0..self.right.depth {
            for row in 0..64 {
                if let Some(left) = self.left {
                    put(left.byte(row, k, 64), number(row, k, 1));
                }
            }
            for row in 0..columns {
                put(RIGHT + self.right.byte(row, k, columns), number(row, k, 2));
            }
        }
        for thread in 0..128 {
            for i in 0..8 {
                let (row, k) = left(thread, i);
                put(IN_REGISTERS + 16 * thread + 2 * i, number(row, k, 1));
            }
        }
        image
    }

    fn check(self, columns: usize) -> String {
        let text = self.text(columns);
        let found = launch(&text, &self.image(columns), 128, 256 * columns);
        let found = found.unwrap_or_else(|error| panic!("{self:?}, {columns} columns: {error}"));
        for thread in 0..128 {
            for i in 0..columns / 2 {
                let (row, column) = accumulator(thread, i);
                let depth = 0..self.right.depth;
                let terms = depth.map(|k| number(row, k, 1) * number(column, k, 2));
                let expected = 2 * terms.sum::<i32>();
                assert_eq!(
                    found[columns / 2 * thread + i],
                    expected as f32,
                    "{self:?}, {columns} columns: row {row}, column {column}"
                );
            }
        }
        text
    }
}

fn launch(text: &str, image: &[u8], threads: u32, bytes: usize) -> Result<Vec<f32>, Box<Mistake>> {
    let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut memory = GlobalMemory::new();
    let first = memory.allocate_with("first", image);
    let second = memory.allocate_with("second", &vec![0; bytes]);
    let shape = Shape {
        grid: [1, 1, 1],
        block: [threads, 1, 1],
        shared_bytes: 64 << 10,
    };
    let arguments = [ArgumentValue::U64(first), ArgumentValue::U64(second)];
    match module.launch("test", shape, &arguments, &mut memory) {
        Err(LaunchError::Mistake(mistake)) => return Err(mistake),
        launched => drop(launched.unwrap()),
    }
    let found = memory.read(second, bytes).unwrap().chunks_exact(4);
    Ok(found
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect())
}

#[test]
fn every_layout_is_read() {
    for number in 0..32 {
        Layouts::numbered(number).check(72);
    }
}

/// Products go through a tile of 64 elements along k: within a swizzled row, and from panel to panel.
#[test]
fn every_layout_is_read_at_every_depth() {
    for number in 0..16 {
        Layouts::numbered(number).deep(64).check(72);
    }
}

/// A swizzle permutes by the address, so a tile that is not aligned is not where its descriptor says.
#[test]
fn tiles_that_are_not_aligned_are_found() {
    for (number, pattern) in [(1, 1024), (2, 512), (3, 256)] {
        let layouts = Layouts::numbered(number);
        let alignment = format!(".align {} .b8 dynamic", pattern / 2);
        let text = layouts
            .text(8)
            .replace(".align 1024 .b8 dynamic", &alignment);
        let found = launch(&text, &layouts.image(8), 128, 2048).unwrap_err();
        let message = format!("begin at a multiple of {pattern} bytes");
        assert!(found.message.contains(&message), "{found}");
    }
}

/// Static arrays have tiles too.
#[test]
fn tiles_may_lie_in_static_arrays() {
    let layouts = Layouts::numbered(1).deep(64);
    let text = layouts
        .text(8)
        .replace("mov.u64 %s, dynamic;", "mov.u64 %s, tile;")
        .replace(
            ".reg .b64 %s",
            ".shared .align 16 .b8 first[100];\n.shared .align 1024 .b8 tile[65536];\n.reg .b64 %s",
        );
    launch(&text, &layouts.image(8), 128, 2048).unwrap();
}

/// Places that the manual's figures show, so that the test's layouts are not judged by themselves alone.
#[test]
fn layouts_have_the_places_of_the_manual() {
    let byte = |swizzle, is_transposed, row, k| {
        Layout {
            swizzle,
            is_transposed,
            depth: 16,
        }
        .byte(row, k, 64)
    };
    for (row, k, [plain, of_128, of_64, of_32]) in [
        (0, 0, [0, 0, 0, 0]),
        (0, 8, [1024, 16, 16, 16]),
        (1, 0, [16, 144, 64, 32]),
        (2, 0, [32, 288, 144, 64]),
        (4, 0, [64, 576, 288, 144]),
        (7, 9, [1138, 994, 482, 226]),
        (8, 1, [130, 1026, 514, 258]),
    ] {
        let found = [0, 1, 2, 3].map(|swizzle| byte(swizzle, false, row, k));
        assert_eq!(found, [plain, of_128, of_64, of_32], "row {row}, k {k}");
    }
    for (row, k, [plain, of_128]) in [
        (1, 0, [2, 2]),
        (8, 0, [256, 16]),
        (0, 1, [16, 144]),
        (9, 3, [306, 418]),
        (64, 8, [2176, 3072]),
    ] {
        assert_eq!(
            [0, 1].map(|swizzle| byte(swizzle, true, row, k)),
            [plain, of_128],
            "row {row}, k {k}"
        );
    }
}

#[test]
fn mistakes_of_products_are_found() {
    use MistakeKind::{Group, Meaningless, Race, UnderWay, Unfenced, Unfinished, Unwritten};
    let wait = "wgmma.wait_group.sync.aligned 0;";
    let commit = "wgmma.commit_group.sync.aligned;";
    let of_warp = |warp: u32, instruction: &str| {
        format!(
            "mov.u32 %v0, %tid.x;\nshr.u32 %v0, %v0, 5;\nsetp.eq.s32 %p, %v0, {warp};\n{instruction}"
        )
    };
    let moved = of_warp(1, "@%p add.s64 %base, %base, 2;\nwgmma.fence");
    let ended = of_warp(3, "@%p bra over;\nwgmma.fence");
    let skipped = of_warp(3, "@%p bra past;\nwgmma.commit_group.sync.aligned;\npast:");
    let lanes = "setp.eq.s32 %p, %at, 49152;\nadd.s64 %base, %base, %off;\nwgmma.fence";
    let shared_store = "wgmma.wait_group.sync.aligned 0;\n";
    let write = |line: &str| format!("{line}\n{shared_store}");
    let own = write("st.shared.u32 [%at+-49152], %t;");
    let ordered = write("bar.sync 0;\nst.shared.u32 [%at+-49152], %t;\nbar.sync 0;");
    let between_lanes = format!("st.shared.u32 [%at], %t;\n{wait}\nld.shared.u32 %v0, [%at+16];");
    let of_one =
        "mov.u32 %v0, %laneid;\nsetp.eq.s32 %p, %v0, 0;\n@%p fence.proxy.async.shared::cta;";
    for (number, from, to, kind, message) in [
        (
            0,
            "fence.proxy.async.shared::cta;",
            "",
            Unfenced,
            "no fence.proxy.async was between",
        ),
        (
            0,
            "fence.proxy.async.shared::cta;",
            of_one,
            Unfenced,
            "no fence.proxy.async was between",
        ),
        // A wait for products orders nothing between lanes.
        (0, wait, &between_lanes, Race, "nothing orders the two"),
        (0, "bar.sync 0;", "", Race, "nothing orders the two"),
        (
            0,
            "wgmma.fence.sync.aligned;",
            "",
            Unfenced,
            "since the last wgmma.fence",
        ),
        (
            16,
            "wgmma.fence.sync.aligned;",
            "wgmma.fence.sync.aligned;\nmov.u32 %a2, 0;",
            Unfenced,
            "since the last wgmma.fence",
        ),
        (0, wait, "", UnderWay, "reads a sum"),
        (
            0,
            wait,
            "wgmma.wait_group.sync.aligned 1;",
            UnderWay,
            "reads a sum",
        ),
        (0, commit, "", UnderWay, "reads a sum"),
        (
            0,
            wait,
            "mov.f32 %d1, 0f00000000;",
            UnderWay,
            "writes a register",
        ),
        (16, wait, "mov.u32 %a1, 0;", UnderWay, "writes a register"),
        (0, "%right, %no", "%right, %yes", Unwritten, "never wrote"),
        (
            0,
            commit,
            "wgmma.commit_group.sync.aligned;\nret;",
            Unfinished,
            "ended with 2 products",
        ),
        (
            0,
            "wgmma.fence",
            &moved,
            Group,
            "the warps of a group disagree",
        ),
        (0, "wgmma.fence", lanes, Group, "different descriptors"),
        (
            0,
            "wgmma.fence",
            &ended,
            Group,
            "not all warps of the group",
        ),
        (0, commit, &skipped, Group, "came to another instruction"),
        (0, "%right, %no", "%right, %p", Group, "some lanes add"),
        (
            0,
            "add.s64 %left, %base, ",
            "mov.u64 %left, 0x2000000000000;\nmov.u64 %right, ",
            Meaningless,
            "a base offset",
        ),
        (
            0,
            "wgmma.wait_group.sync.aligned 0;\n",
            &own,
            Race,
            "Write of 4 bytes",
        ),
        (
            0,
            "wgmma.wait_group.sync.aligned 0;\n",
            &ordered,
            Race,
            "products of warp 0",
        ),
    ] {
        let layouts = Layouts::numbered(number);
        let text = layouts.text(8);
        assert!(text.contains(from), "{from}");
        let mut text = text
            .replacen(from, to, 1)
            .replacen("ret;\n}", "over:\nret;\n}", 1);
        if to == "%right, %p" {
            text = text.replacen(
                "wgmma.fence",
                "mov.u32 %v0, %tid.x;\nsetp.lt.u32 %p, %v0, 20;\nwgmma.fence",
                1,
            );
        }
        let found = launch(&text, &layouts.image(8), 128, 2048);
        let found = found.map(drop).expect_err(&format!("{from} -> {to}"));
        assert_eq!(found.kind, kind, "{from} -> {to}: {found}");
        assert!(found.message.contains(message), "{from} -> {to}: {found}");
    }
}

/// A lane's fence counts for what it wrote and what it knows of, and a barrier tells of it.
#[test]
fn lanes_may_fence_one_by_one() {
    let fence = "fence.proxy.async.shared::cta;";
    let for_all =
        format!("bar.sync 0;\nmov.u32 %v0, %tid.x;\nsetp.eq.s32 %p, %v0, 70;\n@%p {fence}");
    let each = format!("mov.u32 %v0, %tid.x;\nsetp.lt.u32 %p, %v0, 70;\n@%p {fence}\n@!%p {fence}");
    let layouts = Layouts::numbered(0);
    for fences in [for_all, each] {
        let text = layouts.text(8).replace(fence, &fences);
        launch(&text, &layouts.image(8), 128, 2048).unwrap();
    }
}

#[test]
fn products_may_be_subtracted() {
    let layouts = Layouts::numbered(0);
    for signs in ["%yes, -1, 1", "%yes, 1, -1"] {
        let text = layouts.text(8).replace("%yes, 1, 1", signs);
        let found = launch(&text, &layouts.image(8), 128, 2048).unwrap();
        assert_eq!(found, [0.0; 512], "{signs}");
    }
}

#[test]
fn operands_of_products_that_mean_nothing_are_refused() {
    for (number, from, to, message) in [
        (0, "1, 1, 0, 0;", "1, 1, 0, 2;", "2 says not whether"),
        (0, "1, 1, 0, 0;", "1, 3, 0, 0;", "not 3"),
        (0, "1, 1, 0, 0;", "1, 1, 0;", "7 operands in place of 8"),
        (16, "%a3}, %right", "%left}, %right", "are words"),
        (16, "%a3}, %right", "0}, %right", "are words"),
        (0, "aligned 0;", "aligned 8;", "7 are possible"),
        (0, "sm_90a", "sm_90", "without .target sm_90a"),
    ] {
        let text = Layouts::numbered(number).text(8);
        assert!(text.contains(from), "{from}");
        let error = Module::parse(&text.replacen(from, to, 1)).err().unwrap();
        assert!(error.message.contains(message), "{error}");
    }
}

/// Products of one shape may add to the same registers one after the other, of another shape not.
#[test]
fn products_of_two_shapes_do_not_share_registers() {
    let layouts = Layouts::numbered(0);
    let text = layouts.text(16);
    let second = text.rfind("wgmma.mma_async").unwrap();
    let sums = "{%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}";
    let shorter = text[second..].replacen("n16k16", "n8k16", 1);
    let shorter = shorter.replacen(sums, "{%d4, %d5, %d6, %d7}", 1);
    let found = launch(
        &(text[..second].to_string() + &shorter),
        &layouts.image(16),
        128,
        4096,
    );
    let found = found.unwrap_err();
    assert_eq!(found.kind, MistakeKind::UnderWay, "{found}");
    assert!(found.message.contains("of another product"), "{found}");
}
