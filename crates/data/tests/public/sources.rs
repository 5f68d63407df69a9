//! Each source gives the samples that the contract says.

use data::{Dataset, Format, MASKED, Options};
use safetensors::tensor::Dtype;

use crate::fixture::{
    Folder, i32_bytes, i64_bytes, llmc_bytes, open, options, safetensors_bytes, u16_bytes,
};

/// The input rows and target rows of the first step.
fn first_rows(options: &Options) -> (Vec<Vec<i32>>, Vec<Vec<i32>>) {
    let step = open(options).next_step().unwrap();
    let rows = |take: fn(&data::MicroBatch) -> &Vec<i32>| {
        let rows = step.micro.iter().flat_map(|m| take(m).chunks(m.seq));
        rows.map(<[i32]>::to_vec).collect()
    };
    (rows(|m| &m.input_ids), rows(|m| &m.targets))
}

#[test]
fn text_is_bytes_each_the_target_of_the_one_before() {
    let folder = Folder::new();
    let options = Options {
        seq: Some(3),
        ..options(folder.file("a.txt", b"abcdefgh"))
    };
    let (inputs, targets) = first_rows(&options);
    assert_eq!(inputs, [[97, 98, 99], [100, 101, 102]]);
    assert_eq!(targets, [[98, 99, 100], [101, 102, 103]]);
}

#[test]
fn samples_are_the_whole_rows_that_have_a_last_target() {
    let folder = Folder::new();
    for (tokens, samples) in [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)] {
        let options = Options {
            seq: Some(3),
            ..options(folder.file("a.txt", &vec![b'x'; tokens]))
        };
        let dataset = Dataset::open(&options).unwrap();
        assert_eq!(dataset.samples(), samples, "{tokens} tokens");
    }
}

#[test]
fn the_three_token_layouts_give_the_same_tokens() {
    let folder = Folder::new();
    let tokens = [0, 1, 300, 999, 5, 6, 7, 8, 9];
    let narrow = u16_bytes(tokens);
    let wide = i32_bytes(&tokens.map(i32::from));
    let read = |name, bytes: &[u8], format| {
        let options = Options {
            seq: Some(4),
            format,
            ..options(folder.file(name, bytes))
        };
        first_rows(&options)
    };
    let bare = read("bare.bin", &narrow, Format::U16);
    assert_eq!(bare.0, [[0, 1, 300, 999], [5, 6, 7, 8]]);
    assert_eq!(bare.1, [[1, 300, 999, 5], [6, 7, 8, 9]]);
    let gpt2 = llmc_bytes(20240520, 1, 9, &narrow);
    assert_eq!(read("gpt2.bin", &gpt2, Format::Auto), bare);
    assert_eq!(read("gpt2.tokens", &gpt2, Format::LlmC), bare);
    let llama3 = llmc_bytes(20240801, 7, 9, &wide);
    assert_eq!(read("llama3.bin", &llama3, Format::Auto), bare);
}

#[test]
fn u32_tokens_reach_beyond_u16() {
    let folder = Folder::new();
    let bytes = llmc_bytes(20240801, 7, 3, &i32_bytes(&[128_255, 65_536, 0]));
    let options = Options {
        seq: Some(2),
        vocab: 128_256,
        ..options(folder.file("llama3.bin", &bytes))
    };
    assert_eq!(first_rows(&options).0[0], [128_255, 65_536]);
}

#[test]
fn batch_rows_come_in_order_as_accum_micro_batches_of_rows() {
    let folder = Folder::new();
    let inputs: Vec<i32> = (0..12).collect();
    let targets: Vec<i32> = (0..12)
        .map(|i| if i % 4 == 1 { MASKED } else { i + 100 })
        .collect();
    let options = Options {
        accum: 2,
        ..options(folder.batches(&inputs, &targets, 2))
    };
    let mut batches = open(&options);
    assert_eq!(
        (batches.dataset().samples(), batches.dataset().seq()),
        (6, 2)
    );

    let step = batches.next_step().unwrap();
    assert_eq!(step.micro.len(), 2);
    assert_eq!((step.micro[0].rows, step.micro[0].seq), (2, 2));
    assert_eq!(step.micro[0].input_ids, [0, 1, 2, 3]);
    assert_eq!(step.micro[0].targets, [100, MASKED, 102, 103]);
    assert_eq!(step.micro[1].input_ids, [4, 5, 6, 7]);
    assert_eq!(step.micro[0].target_count(), 3);
    assert_eq!(step.target_count(), 6);

    let step = batches.next_step().unwrap();
    assert_eq!(step.micro[0].input_ids, [8, 9, 10, 11]);
    assert_eq!(step.micro[1].input_ids, [0, 1, 2, 3], "the next epoch");
}

#[test]
fn i64_batches_read_as_i32_ones() {
    let folder = Folder::new();
    let bytes = safetensors_bytes([
        (
            "input_ids",
            Dtype::I64,
            vec![2, 2],
            i64_bytes(&[1, 2, 3, 4]),
        ),
        (
            "targets",
            Dtype::I32,
            vec![2, 2],
            i32_bytes(&[2, -100, 4, 5]),
        ),
        ("unrelated", Dtype::U8, vec![3], vec![1, 2, 3]),
    ]);
    let (inputs, targets) = first_rows(&options(folder.file("b.safetensors", &bytes)));
    assert_eq!(inputs, [[1, 2], [3, 4]]);
    assert_eq!(targets, [[2, MASKED], [4, 5]]);
}

#[test]
fn a_step_may_have_micro_batches_without_targets() {
    let folder = Folder::new();
    let options = Options {
        micro_batch: 1,
        accum: 2,
        ..options(folder.batches(&[1, 2, 3, 4], &[-100, -100, 5, -100], 2))
    };
    let step = open(&options).next_step().unwrap();
    assert_eq!(step.micro[0].target_count(), 0);
    assert_eq!(step.target_count(), 1);
}

#[test]
fn a_seq_equal_to_the_batch_file_s_is_accepted() {
    let folder = Folder::new();
    let options = Options {
        seq: Some(2),
        ..options(folder.batches(&[1, 2, 3, 4], &[1, 2, 3, 4], 2))
    };
    assert_eq!(open(&options).dataset().seq(), 2);
}

#[test]
fn no_path_means_the_built_in_text() {
    let options = Options {
        path: None,
        vocab: 256,
        ..options("unused")
    };
    let mut batches = open(&options);
    assert_eq!(batches.dataset().seq(), data::DEFAULT_SEQ);
    assert!(batches.dataset().samples() > 500);
    assert_eq!(batches.next_step().unwrap().target_count(), 2 * 256);
}

#[test]
fn descriptions_say_what_and_how_much() {
    let folder = Folder::new();
    let describe = |options: &Options| Dataset::open(options).unwrap().describe();
    let text = Options {
        seq: Some(4),
        ..options(folder.file("a.txt", b"0123456789"))
    };
    let said = describe(&text);
    assert!(
        said.ends_with("a.txt: 10 bytes of text, 2 samples of 4"),
        "{said}"
    );

    let llama3 = llmc_bytes(20240801, 7, 6, &i32_bytes(&[1, 2, 3, 4, 5, 6]));
    let tokens = Options {
        seq: Some(5),
        ..options(folder.file("a.bin", &llama3))
    };
    let said = describe(&tokens);
    assert!(
        said.ends_with("a.bin: 6 llm.c u32 tokens, 1 samples of 5"),
        "{said}"
    );

    let said = describe(&options(folder.batches(&[1, 2, 3, 4], &[1, 2, 3, 4], 2)));
    assert!(
        said.ends_with("batches.safetensors: 2 rows of 2 tokens"),
        "{said}"
    );
}
