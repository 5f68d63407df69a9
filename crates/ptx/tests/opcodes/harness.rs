//! Runs single instructions, and small programs.

use ptx::{ArgumentValue, GlobalMemory, LaunchError, Mistake, Module, Report, Shape};

/// A value of a lane, with the type of the register that holds it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// `.b16`
    H(u16),
    /// `.b32`
    U(u32),
    /// `.b64`
    L(u64),
    /// `.f32`
    F(f32),
    /// `.f64`
    D(f64),
    /// `.pred`
    P(bool),
}

use Value::{D, F, H, L, P, U};

impl Value {
    fn bits(self) -> u64 {
        match self {
            H(value) => value.into(),
            U(value) => value.into(),
            L(value) => value,
            F(value) => value.to_bits().into(),
            D(value) => value.to_bits(),
            P(value) => value.into(),
        }
    }

    /// The type of its register, and how that is loaded and stored.
    fn kind(self) -> (&'static str, &'static str) {
        match self {
            H(_) => (".b16", "u16"),
            U(_) => (".b32", "u32"),
            L(_) => (".b64", "u64"),
            F(_) => (".f32", "f32"),
            D(_) => (".f64", "f64"),
            P(_) => (".pred", "u32"),
        }
    }
}

/// An opcode, and what it makes of some operands.
pub struct Case {
    pub opcode: &'static str,
    /// The instruction, where `d` is the result and `a`, `b`, `c`, `e` the operands; by default these in their order.
    instruction: Option<&'static str>,
    /// Further declarations.
    declared: &'static str,
    rows: Vec<(Vec<Value>, Value)>,
}

/// The cases of some opcodes.
pub type Table = fn() -> Vec<Case>;

pub fn case<const N: usize>(opcode: &'static str, rows: &[([Value; N], Value)]) -> Case {
    Case {
        opcode,
        instruction: None,
        declared: "",
        rows: rows
            .iter()
            .map(|(row, result)| (row.to_vec(), *result))
            .collect(),
    }
}

pub fn case_as<const N: usize>(
    opcode: &'static str,
    instruction: &'static str,
    rows: &[([Value; N], Value)],
) -> Case {
    let instruction = Some(instruction);
    Case {
        instruction,
        ..case(opcode, rows)
    }
}

impl Case {
    pub fn with(self, declared: &'static str) -> Case {
        Case { declared, ..self }
    }
}

const NAMES: [&str; 4] = ["%a", "%b", "%c", "%e"];

impl Case {
    /// One row per lane; spare lanes repeat the first row.
    pub fn check(&self) {
        let (first, result) = &self.rows[0];
        let mut body = format!(".reg {} %d;\n{}\n", result.kind().0, self.declared);
        for (index, value) in first.iter().enumerate() {
            let (name, (register, loaded)) = (NAMES[index], value.kind());
            body += &format!(".reg {register} {name};\n");
            body += &match value {
                P(_) => format!(
                    "ld.global.u32 %word, [%in+{}];\nsetp.ne.u32 {name}, %word, 0;\n",
                    8 * index
                ),
                _ => format!("ld.global.{loaded} {name}, [%in+{}];\n", 8 * index),
            };
        }
        let operands = NAMES[..first.len()].join(", ");
        body += &match self.instruction {
            None => format!("{} %d, {operands};\n", self.opcode),
            Some(instruction) => format!("{} {instruction};\n", self.opcode),
        };
        body += &match result {
            P(_) => "selp.u32 %word, 1, 0, %d;\nst.global.u32 [%out], %word;\n".into(),
            _ => format!("st.global.{} [%out], %d;\n", result.kind().1),
        };
        let text = by_lane(&body);
        let mut input = Vec::new();
        for lane in 0..32 {
            let row = &self.rows.get(lane).unwrap_or(&self.rows[0]).0;
            let mut words: Vec<u64> = row.iter().map(|value| value.bits()).collect();
            words.resize(4, 0);
            input.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        let mut memory = GlobalMemory::new();
        let input = memory.allocate_with("input", &input);
        let output = memory.allocate_with("output", &[0; 32 * 32]);
        let arguments = [ArgumentValue::U64(input), ArgumentValue::U64(output)];
        run(&text, 32, &arguments, &mut memory).unwrap_or_else(|error| panic!("{text}\n{error}"));
        for (lane, (row, expected)) in self.rows.iter().enumerate() {
            let bytes = memory.read(output + 32 * lane as u64, 8).unwrap();
            let found = u64::from_le_bytes(bytes.try_into().unwrap());
            let (opcode, expected_bits) = (self.opcode, expected.bits());
            assert_eq!(
                found, expected_bits,
                "{opcode} of {row:?}: {found:#x} in place of {expected:?} ({expected_bits:#x})"
            );
        }
    }
}

/// A kernel `test` of two arrays, of which lane `l` finds its 32 bytes at `%in` and `%out`.
pub fn by_lane(body: &str) -> String {
    kernel(&format!(
        ".reg .b32 %lane, %word;
        .reg .b64 %in, %out, %at;
        ld.param.u64 %in, [first];
        ld.param.u64 %out, [second];
        mov.u32 %lane, %tid.x;
        mul.wide.u32 %at, %lane, 32;
        add.s64 %in, %in, %at;
        add.s64 %out, %out, %at;
        {body}"
    ))
}

/// A kernel `test` of two addresses, `first` and `second`.
pub fn kernel(body: &str) -> String {
    format!(
        ".version 8.8\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 dynamic[];\n.visible .entry test(.param .u64 first, .param .u64 second)\n{{\n{body}\nret;\n}}\n"
    )
}

/// The text that a test ran.
pub type Program = fn() -> String;

/// Runs the kernel `test` in one block.
pub fn run(
    text: &str,
    threads: u32,
    arguments: &[ArgumentValue],
    memory: &mut GlobalMemory,
) -> Result<Report, LaunchError> {
    run_grid(text, [1, 1, 1], threads, arguments, memory)
}

/// Runs the kernel `test` with 1 KiB of dynamic shared memory.
pub fn run_grid(
    text: &str,
    grid: [u32; 3],
    threads: u32,
    arguments: &[ArgumentValue],
    memory: &mut GlobalMemory,
) -> Result<Report, LaunchError> {
    let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let shape = Shape {
        grid,
        block: [threads, 1, 1],
        shared_bytes: 1024,
    };
    module.launch("test", shape, arguments, memory)
}

/// Runs a kernel `test` of so many threads on words, and gives the words that it wrote.
pub fn words(text: &str, threads: u32, input: &[u32], output_words: usize) -> Vec<u32> {
    let mut memory = GlobalMemory::new();
    let bytes: Vec<u8> = input.iter().flat_map(|word| word.to_le_bytes()).collect();
    let first = memory.allocate_with("first", &bytes);
    let second = memory.allocate_with("second", &vec![0xee; 4 * output_words]);
    let arguments = [ArgumentValue::U64(first), ArgumentValue::U64(second)];
    run(text, threads, &arguments, &mut memory).unwrap_or_else(|error| panic!("{text}\n{error}"));
    let bytes = memory.read(second, 4 * output_words).unwrap();
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    bytes.chunks_exact(4).map(word).collect()
}

/// The mistake of a kernel `test` of so many threads and blocks, on two arrays of 1 KiB that are written.
pub fn fault(text: &str, blocks: u32, threads: u32) -> Mistake {
    let mut memory = GlobalMemory::new();
    let first = memory.allocate_with("first", &[0; 1024]);
    let second = memory.allocate_with("second", &[0; 1024]);
    let arguments = [ArgumentValue::U64(first), ArgumentValue::U64(second)];
    match run_grid(text, [blocks, 1, 1], threads, &arguments, &mut memory) {
        Err(LaunchError::Mistake(fault)) => *fault,
        other => panic!("{other:?}\n{text}"),
    }
}

/// A kernel in which every lane has a word of its own in `%a`, and what it left in `%d`.
pub fn words_by_lane(body: &str, a: impl Fn(u32) -> u32) -> (String, Vec<u32>) {
    let text = by_lane(&format!(
        ".reg .b32 %a, %d;
        ld.global.u32 %a, [%in];
        {body}
        st.global.u32 [%out], %d;"
    ));
    let input: Vec<u32> = (0..32 * 8).map(|index| a(index / 8)).collect();
    let output = words(&text, 32, &input, 32 * 8);
    (text, output.into_iter().step_by(8).collect())
}
