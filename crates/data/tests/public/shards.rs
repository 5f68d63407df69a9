//! Folders of shards: which are read, in what order, and how one that is not whole is named.

use std::{collections::BTreeSet, fs};

use data::{Dataset, Format, Inputs, MASKED, MicroBatch, Options, Packing, Split};

use crate::fixture::{
    Folder, assert_says, i32_bytes, llmc_bytes, open, open_error, options, step_error, u16_bytes,
};

/// The rows of `steps` steps.
fn rows(options: &Options, steps: usize) -> Vec<Vec<i32>> {
    let mut batches = open(options);
    let steps = (0..steps).map(|_| batches.next_step().unwrap());
    let micro = steps.flat_map(|step| step.micro);
    micro
        .flat_map(|micro| {
            micro
                .input_ids
                .chunks(micro.seq)
                .map(<[i32]>::to_vec)
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Two training shards of 2 and 3 samples of two tokens, and one for validation of 1.
fn folder() -> (Folder, Options) {
    let folder = Folder::new();
    folder.shard("train-00001.bin", &[10, 11, 12, 13, 14, 15, 16], &[0], &[]);
    folder.shard("train-00000.bin", &[0, 1, 2, 3, 4, 5], &[0, 4], &[]);
    folder.shard("validation-00000.bin", &[20, 21, 22], &[0], &[]);
    let options = Options {
        seq: Some(2),
        micro_batch: 1,
        ..options(folder.path())
    };
    (folder, options)
}

#[test]
fn shards_come_in_the_order_of_their_names_and_samples_do_not_cross_them() {
    let (_folder, options) = folder();
    assert_eq!(
        rows(&options, 6),
        [[0, 1], [2, 3], [10, 11], [12, 13], [14, 15], [0, 1]]
    );
    let validation = Options {
        split: Split::Validation,
        ..options
    };
    assert_eq!(rows(&validation, 2), [[20, 21], [20, 21]]);
}

/// The rest of the first shard fills a padded row; the second has no rest.
#[test]
fn evaluations_read_shards_to_their_ends() {
    let (_folder, options) = folder();
    let tails = Options {
        tails: true,
        packing: Packing::Auto,
        ..options
    };
    let dataset = Dataset::open(&tails).unwrap();
    let rows: Vec<_> = dataset.once(None).map(Result::unwrap).collect();
    assert_eq!((rows.len(), dataset.samples()), (6, 6));
    assert_eq!(
        (&rows[2].input_ids[..], &rows[2].targets[..]),
        (&[4, 0][..], &[5, MASKED][..])
    );
    assert_eq!(rows[3].input_ids, [10, 11]);
    let targets: usize = rows.iter().map(MicroBatch::target_count).sum();
    assert_eq!(targets, 5 + 6);
}

#[test]
fn llm_c_s_names_tell_validation_too_and_a_folder_without_it_gives_all() {
    let folder = Folder::new();
    let shard = |first: u16| llmc_bytes(20240520, 1, 3, &u16_bytes(first..first + 3));
    folder.file("fineweb_train_000001.bin", &shard(10));
    let validation = Options {
        seq: Some(2),
        split: Split::Validation,
        micro_batch: 1,
        ..options(folder.path())
    };
    assert_eq!(rows(&validation, 1), [[10, 11]]);
    folder.file("fineweb_val_000000.bin", &shard(0));
    assert_eq!(rows(&validation, 2), [[0, 1], [0, 1]]);
    let train = Options {
        split: Split::Train,
        ..validation
    };
    assert_eq!(rows(&train, 2), [[10, 11], [10, 11]]);
}

#[test]
fn a_shuffled_epoch_covers_all_shards() {
    let (_folder, options) = folder();
    let shuffled = Options {
        shuffle: true,
        ..options.clone()
    };
    let [in_order, mixed] = [&options, &shuffled].map(|options| rows(options, 5));
    assert_ne!(in_order, mixed);
    let set = |rows: Vec<Vec<i32>>| rows.into_iter().collect::<BTreeSet<_>>();
    assert_eq!(set(in_order), set(mixed));
}

#[test]
fn masked_tokens_are_never_targets() {
    let folder = Folder::new();
    let path = folder.shard("a.bin", &[0, 1, 2, 3, 4, 5, 6], &[0], &[0..2, 3..5]);
    let options = Options {
        seq: Some(3),
        ..options(path)
    };
    let step = open(&options).next_step().unwrap();
    assert_eq!(step.micro[0].input_ids, [0, 1, 2, 3, 4, 5]);
    assert_eq!(step.micro[0].targets, [MASKED, 2, MASKED, MASKED, 5, 6]);

    let path = folder.shard(
        "b.bin",
        &[0, 1, 2, 3, 4, 5, 6],
        &[0],
        std::slice::from_ref(&(0..7)),
    );
    assert_says(
        &step_error(&Options {
            path: Some(path.into()),
            ..options
        }),
        &["every target is masked"],
    );
}

#[test]
fn a_corrupt_block_is_named_when_it_is_first_read() {
    let folder = Folder::new();
    // Three blocks of 2^19 tokens, but for the header's 512; the target of sample 7's last token is the first in the third.
    let path = folder.shard("a.bin", &vec![1; 1_200_000], &[0], &[]);
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 2;
    fs::write(&path, &bytes).unwrap();
    let options = Options {
        seq: Some(1 << 17),
        micro_batch: 1,
        ..options(&path)
    };
    let mut batches = open(&options);
    let error = (0..9).find_map(|step| {
        batches
            .next_step()
            .err()
            .map(|error| (step, error.to_string()))
    });
    let (step, message) = error.expect("the last samples touch the corrupt block");
    assert_eq!(step, 7);
    assert_says(
        &message,
        &[
            "a.bin is corrupt",
            "offset 2097152",
            "copy or write it again",
        ],
    );
    assert_eq!(batches.next_step().unwrap_err().to_string(), message);
}

#[test]
fn folders_that_are_not_whole() {
    let (folder, options) = folder();
    let index = folder.path().join("train-00001.idx");
    let whole = fs::read(&index).unwrap();
    fs::remove_file(&index).unwrap();
    assert_says(
        &open_error(&options),
        &["train-00001.bin has no .idx", "train-00000.bin has"],
    );
    fs::copy(folder.path().join("train-00000.idx"), &index).unwrap();
    assert_says(
        &open_error(&options),
        &[
            "train-00001.idx describes 6 tokens",
            "holds 7",
            "another file",
        ],
    );
    fs::write(&index, whole).unwrap();
    open(&options);

    let shard = folder.path().join("train-00001.bin");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 2]).unwrap();
    assert_says(
        &open_error(&options),
        &["train-00001.bin", "says 7 tokens", "holds 6", "cut short"],
    );
}

#[test]
fn folders_that_cannot_be_read() {
    let folder = Folder::new();
    let options = options(folder.path());
    assert_says(
        &open_error(&options),
        &["no .bin shards", "trainer prepare"],
    );
    let text = Options {
        format: Format::Text,
        ..options.clone()
    };
    assert_says(&open_error(&text), &["\"text\"", "is a folder", "\"auto\""]);
    folder.file("a.bin", &llmc_bytes(20240520, 1, 3, &u16_bytes([1, 2, 3])));
    assert_says(
        &open_error(&options),
        &["a.bin holds 3 tokens", "data.seq=256"],
    );
    folder.file("b.bin", &llmc_bytes(20240801, 7, 1, &i32_bytes(&[1])));
    assert_says(
        &open_error(&options),
        &["b.bin has tokens of 4 bytes", "a.bin", "of 2"],
    );
}

#[test]
fn bytes_of_text_a_token_come_from_indices_and_from_text() {
    let (folder, options) = folder();
    let ratio = |options: &Options| Dataset::open(options).unwrap().bytes_per_token();
    assert_eq!(ratio(&options), Some(4.0));
    let text = Options {
        path: None,
        vocab: 256,
        ..options.clone()
    };
    assert_eq!(ratio(&text), Some(1.0));
    let bare = folder.file("bare.tokens", &u16_bytes([1, 2, 3]));
    let bare = Options {
        path: Some(bare.into()),
        format: Format::U16,
        ..options
    };
    assert_eq!(ratio(&bare), None);
}

/// Losses are of the samples that an epoch has.
#[test]
fn bytes_a_token_of_a_mixture_follow_its_shares() {
    let folder = Folder::new();
    let tokens = folder.shard("a.bin", &[7; 9], &[0], &[]);
    let text = folder.file("b.txt", b"nine long");
    let ratio = |weights: [&str; 2]| {
        let inputs = [&tokens, &text].into_iter().zip(weights);
        let inputs = inputs.map(|(path, weight)| format!("{}{weight}", path.display()));
        let inputs: Vec<String> = inputs.collect();
        let options = Options {
            path: Some(Inputs::read(&inputs).unwrap()),
            seq: Some(2),
            micro_batch: 1,
            ..options("")
        };
        Dataset::open(&options).unwrap().bytes_per_token()
    };
    assert_eq!(ratio(["", ""]), Some((4.0 + 1.0) / 2.0));
    assert_eq!(ratio([":3", ":1"]), Some((3.0 * 4.0 + 1.0) / 4.0));
}

#[test]
fn inputs_with_rows_of_other_lengths_are_both_named() {
    let folder = Folder::new();
    let batches = folder.batches(&[1; 8], &[2; 8], 4);
    let text = folder.file("b.txt", &[b'a'; 300]);
    let inputs = [&batches, &text].map(|path| path.display().to_string());
    let options = Options {
        path: Some(Inputs::read(&inputs).unwrap()),
        ..options("")
    };
    let words = [
        "batches.safetensors",
        "b.txt",
        "4 tokens",
        "of the other 256",
    ];
    assert_says(&open_error(&options), &words);
}

#[test]
fn a_fingerprint_tells_other_data_by_content_and_not_by_name() {
    let (folder, options) = folder();
    let fingerprint = |options: &Options| Dataset::open(options).unwrap().fingerprint();
    let before = fingerprint(&options);
    for name in ["train-00000", "train-00001"] {
        for end in ["bin", "idx"] {
            let path = |name: &str| folder.path().join(name).with_extension(end);
            fs::rename(path(name), path(&format!("x{name}"))).unwrap();
        }
    }
    assert_eq!(fingerprint(&options), before);
    folder.shard("xtrain-00000.bin", &[0, 1, 2, 3, 4, 6], &[0, 4], &[]);
    let changed = fingerprint(&options);
    assert_ne!(changed, before);
    folder.shard("xtrain-00000.bin", &[0, 1, 2, 3, 4, 6], &[0, 3], &[]);
    assert_ne!(fingerprint(&options), changed, "documents are data");

    let text = |bytes: &[u8]| {
        fingerprint(&Options {
            path: Some(folder.file("a.txt", bytes).into()),
            ..options.clone()
        })
    };
    let mut long = vec![b'x'; 1_000_000];
    let before = text(&long);
    *long.last_mut().unwrap() = b'y';
    assert_ne!(text(&long), before);
    assert_ne!(text(b"abc"), text(b"abd"));
}

#[test]
fn descriptions_of_folders_count_shards_and_documents() {
    let (_folder, options) = folder();
    let describe = |packing| {
        let options = Options {
            packing,
            ..options.clone()
        };
        Dataset::open(&options).unwrap().describe()
    };
    let start = ": 13 llm.c u16 tokens in 2 shards, ";
    assert!(describe(Packing::Concatenate).ends_with(&format!("{start}5 samples of 2")));
    assert!(
        describe(Packing::FirstFit)
            .ends_with(&format!("{start}documents in 5 rows of 2, 100.0 % filled"))
    );
    assert!(describe(Packing::Pad).ends_with(&format!("{start}3 documents of at most 2")));
}

/// Tokens that the model of these tests knows.
const VOCAB: usize = 1000;

/// The text of a listing of training and of validation shards.
fn listing(version: u32, train: &[(&str, u64)], validation: &[(&str, u64)]) -> String {
    let part = |shards: &[(&str, u64)]| {
        let shards = shards.iter();
        let shards =
            shards.map(|(name, tokens)| serde_json::json!({"name": name, "tokens": tokens}));
        serde_json::json!({"shards": shards.collect::<Vec<_>>(), "documents": 3})
    };
    let (train, validation) = (part(train), part(validation));
    let tokenizer = serde_json::json!({"vocab": VOCAB});
    serde_json::json!({"format_version": version, "tokenizer": tokenizer, "train": train, "validation": validation})
        .to_string()
}

#[test]
fn shards_that_are_not_those_listed_are_named() {
    let (folder, options) = folder();
    let validation = Options {
        split: Split::Validation,
        ..options.clone()
    };
    let (first, second, third) = (
        ("train-00000.bin", 6),
        ("train-00001.bin", 7),
        ("validation-00000.bin", 3),
    );
    let list = |text: &str| folder.file("dataset.json", text.as_bytes());
    list(&listing(1, &[first, second], &[third]));
    assert_eq!(rows(&options, 1), [[0, 1]]);
    assert_eq!(rows(&validation, 1), [[20, 21]]);

    list(&listing(1, &[first], &[third]));
    let said = open_error(&options);
    assert_says(
        &said,
        &[
            "dataset.json does not list train-00001.bin",
            "remove that file",
        ],
    );
    assert_eq!(rows(&validation, 1), [[20, 21]], "which has what it lists");
    list(&listing(
        1,
        &[first, second, ("train-00002.bin", 1)],
        &[third],
    ));
    assert_says(
        &open_error(&options),
        &["dataset.json lists train-00002.bin", "not beside it"],
    );
    list(&listing(1, &[first, ("train-00001.bin", 8)], &[third]));
    assert_says(
        &open_error(&options),
        &["train-00001.bin with 8 tokens, but it holds 7"],
    );
    let model = Options {
        vocab: VOCAB - 1,
        ..options.clone()
    };
    list(&listing(1, &[first, second], &[third]));
    assert_says(&open_error(&model), &["dataset.json", "--tokenizer MODEL"]);
    list(&listing(2, &[first, second], &[third]));
    assert_says(
        &open_error(&options),
        &["dataset.json has format_version 2"],
    );
    for text in [
        "",
        "{}",
        "[1]",
        r#"{"format_version": 1, "train": {"shards": 2}}"#,
    ] {
        list(text);
        assert_says(
            &open_error(&options),
            &["dataset.json is not what `trainer prepare` writes"],
        );
    }
}
