//! Several ranks on the command line: who they are, what they divide, and what does not go with them.

use super::{assert_refused, config, file, resolve};
use clap::Parser;
use memory::Rank;
use settings::{Config, RankEngine, Settings, Size};
use trainer::cli::Cli;
use units::{Ranks, Reduce, Zero};

const FOUR: Rank = Rank { number: 1, of: 4 };

/// The ranks of a command that a launcher started as one of four.
fn launched(arguments: &[&str]) -> Option<Ranks> {
    let cli = Cli::try_parse_from([&["trainer"], arguments].concat()).unwrap();
    cli.resolve_as(Some(FOUR), None).unwrap().config.ranks()
}

fn planned(arguments: &[&str]) -> Config {
    config(&[&["plan"], arguments].concat())
}

#[test]
fn a_process_alone_has_no_ranks_until_a_stage_is_asked_for() {
    assert_eq!(config(&[]).ranks(), None);
    assert_eq!(config(&["--bucket-size", "1MiB"]).ranks(), None);
    for zero in Zero::ALL {
        let stage = zero.stage().to_string();
        let ranks = config(&["--zero", &stage]).ranks().unwrap();
        assert_eq!((ranks.rank, ranks.zero), (Rank::ALONE, zero));
    }
}

#[test]
fn a_launcher_makes_a_rank_of_a_run_and_of_nothing_else() {
    let ranks = launched(&[]).unwrap();
    assert_eq!((ranks.rank, ranks.zero), (FOUR, Zero::States));
    assert_eq!(
        launched(&["train", "--zero", "3"]).unwrap().zero,
        Zero::Weights
    );
    assert_eq!(launched(&["plan"]), None, "a plan is that of --ranks");
    assert_eq!(launched(&["--set", "collectives.engine=alone"]), None);
    let alone = launched(&["--set", "collectives.engine=alone", "--zero", "2"]);
    assert_eq!(alone.unwrap().rank, Rank::ALONE);
}

#[test]
fn a_plan_is_that_of_the_rank_that_is_named() {
    let of_four = planned(&["--ranks", "4", "--rank", "3", "--zero", "2", "--accum", "5"]);
    assert_eq!(of_four.rank, Some(Rank { number: 3, of: 4 }));
    assert_eq!(of_four.micro_batches(), 20);
    // Further settings are those of the same rank.
    let changed = of_four.with(&["collectives.zero=3".into()]).unwrap();
    assert_eq!(changed.ranks().unwrap().zero, Zero::Weights);
    assert_eq!(changed.rank, of_four.rank);
    // No file says it.
    let (_folder, path) = file(&of_four.to_toml().unwrap());
    assert_eq!(
        config(&["--config", &path]).ranks().unwrap().rank,
        Rank::ALONE
    );

    assert_refused(
        &["plan", "--ranks", "4", "--rank", "4"],
        &["rank 4", "4 ranks"],
    );
    for refused in [&["--ranks", "0"][..], &["--rank", "1"], &["--ranks", "-1"]] {
        let words = [&["trainer", "plan"], refused].concat();
        assert!(Cli::try_parse_from(words).is_err(), "{refused:?}");
    }
}

#[test]
fn every_flag_of_ranks_sets_its_key() {
    let flags = "--zero 2 --bucket-size 1MB --reduce micro-batch --overlap-grad-reduce=false \
                 --overlap-param-gather=false --reshard-after-forward=false";
    let given = config(&flags.split_whitespace().collect::<Vec<_>>()).collectives;
    let mut expected = Config::default().collectives;
    assert_eq!(expected.engine, RankEngine::Auto);
    assert!(expected.overlap_grad_reduce && expected.overlap_param_gather);
    assert!(expected.reshard_after_forward);
    expected.zero = Some(Zero::Gradients);
    expected.bucket_size = Size::Bytes(1_000_000);
    expected.overlap_grad_reduce = false;
    expected.overlap_param_gather = false;
    expected.reshard_after_forward = false;
    assert_eq!(given, expected);
    // As Megatron-LM has them.
    let bare = config(&["--overlap-grad-reduce", "--overlap-param-gather"]);
    assert_eq!(bare.collectives, Config::default().collectives);
    let step = launched(&["--reduce", "step"]).unwrap();
    assert_eq!((step.reduce, step.bucket_bytes), (Reduce::Step, 128 << 20));
    let words = resolve(&["--overlap-grad-reduce=maybe"]).unwrap_err();
    assert!(words.to_string().contains("true or false"), "{words}");
}

#[test]
fn parts_of_sequences_need_no_launcher() {
    let parts = |arguments: &[&str]| {
        let ranks = config(arguments).ranks();
        ranks.map(|ranks| (ranks.rank.of, ranks.sharing, ranks.parts_each, ranks.zero))
    };
    assert_eq!(parts(&["--context-parts", "1"]), None);
    let four = Some((1, 1, 4, Zero::States));
    assert_eq!(parts(&["--context-parts", "4"]), four);
    let on_two = launched(&["--cp", "2", "--context-parts", "4"]).unwrap();
    assert_eq!((on_two.sharing, on_two.parts_each), (2, 2));
    let by_default = launched(&["--cp", "2"]).unwrap();
    assert_eq!((by_default.sharing, by_default.parts_each), (2, 1));
}

#[test]
fn what_parts_of_sequences_do_not_go_with_is_refused_with_a_way_out() {
    let refused = |arguments: &[&str], words: &[&str]| {
        let all = [&["plan"], arguments].concat();
        let error = match resolve(&all) {
            Err(error) => error.to_string(),
            Ok(resolved) => Settings::new(&resolved.config)
                .expect_err("it is refused")
                .to_string(),
        };
        for word in words {
            assert!(error.contains(word), "{error}");
        }
    };
    let four = ["--context-parts", "4"];
    let cases: &[(&[&str], &[&str])] = &[
        (
            &["--context-parts", "3"],
            &["parallel.context_parts is 3", "sizes that do: 2, 4"],
        ),
        (
            &["--ranks", "2", "--cp", "2", "--context-parts", "3"],
            &["no multiple of the 2 ranks", "--context-parts 4"],
        ),
        (
            &["--seq", "6"],
            &[
                "parallel.context_parts is 4",
                "6 tokens",
                "sizes that do: 2",
            ],
        ),
        (
            &["--packing", "pad", "--data", "documents"],
            &["--context-parts 4", "first-fit", "--context-parts 1"],
        ),
        (
            &["--sample-every", "2"],
            &["--context-parts 4", "trainer generate"],
        ),
        (
            &["--reduce", "step"],
            &["--reduce at micro-batch", "--cp 4"],
        ),
        (
            &["--recompute", "auto", "--memory-budget", "1GiB"],
            &["--recompute auto", "--recompute full"],
        ),
        (
            &[
                "--ranks",
                "2",
                "--pp",
                "2",
                "--zero",
                "2",
                "--set",
                "model.tie_embeddings=false",
            ],
            &["--pp", "--pp 1"],
        ),
    ];
    for (arguments, words) in cases {
        let has_parts = arguments.contains(&"--context-parts");
        let parts: &[&str] = if has_parts { &[] } else { &four };
        refused(&[parts, arguments].concat(), words);
    }
}

#[test]
fn what_does_not_go_with_ranks_is_refused_with_a_way_out() {
    let release = "optim.release=backward";
    let unclipped = ["--set", release, "--set", "optim.clip_norm=inf"];
    let cases: &[(&[&str], &[&str])] = &[
        (
            &["--offload-gradients", "pinned", "--zero", "0"],
            &["offload.gradients", "--zero 1"],
        ),
        (
            &["--offload-gradients", "pinned", "--reduce", "step"],
            &["offload.gradients", "--reduce at micro-batch"],
        ),
        (
            &["--zero", "3", "--shard-group", "3"],
            &["collectives.shard_group is 3", "take --shard-group 2 or 4"],
        ),
        (
            &[
                "--zero",
                "3",
                "--shard-group",
                "2",
                "--offload-parameters",
                "pinned",
            ],
            &["add --shard-group 4 or --offload-parameters none"],
        ),
        (&unclipped, &["optim.release", "--zero 2"]),
        (&["--dump-gradients", "1"], &["--dump-gradients", "without"]),
        (
            &["--reduce", "step", "--zero", "2"],
            &["--zero 2", "--zero 1"],
        ),
        (
            &["--reduce", "step", "--zero", "3"],
            &["--zero 3", "micro-batch"],
        ),
    ];
    for (arguments, words) in cases {
        let cli = Cli::try_parse_from([&["trainer"], *arguments].concat()).unwrap();
        let refused = cli.resolve_as(Some(FOUR), None).unwrap_err().to_string();
        for word in *words {
            assert!(refused.contains(word), "{arguments:?}: {refused}");
        }
        // One process has no groups, but stages of ZeRO.
        let is_refused_alone =
            arguments.contains(&"--zero") && !arguments.contains(&"--shard-group");
        assert!(!is_refused_alone || cli.resolve().is_err());
    }
    launched(&["--offload-gradients", "pinned"]).unwrap();
    launched(&["--offload-parameters", "pinned"]).unwrap();
    let groups = launched(&["--zero", "3", "--shard-group", "2"]).unwrap();
    assert_eq!(groups.shard_group, Some(2));
    let of_all = launched(&["--zero", "3", "--shard-group", "4"]).unwrap();
    assert_eq!(of_all.shard_group, None);
    // Alone, all but a stage of a group is as it was.
    config(&["--offload-gradients", "pinned"]);
    config(&[
        "--accum",
        "1",
        "--set",
        release,
        "--set",
        "optim.clip_norm=inf",
    ]);
    config(&["--offload-parameters", "pinned"]);
    config(&["--offload-parameters", "pinned", "--zero", "3"]);
    assert_refused(&["--bucket-size", "10%"], &["128MiB"]);
    assert_refused(&["--zero", "4"], &["from 0 to 3"]);
    assert_refused(&["--reduce", "once"], &["micro-batch, step"]);
}

/// What ranks alone have a use for is said to have none; what they use is not.
#[test]
fn what_has_no_effect_without_ranks_is_named() {
    let unused = |arguments: &[&str]| -> Vec<&str> {
        let unused = planned(arguments).allowed_in_vain();
        unused.into_iter().map(|(key, _)| key).collect()
    };
    let bucket = ["--bucket-size", "1MiB"];
    assert_eq!(unused(&bucket), ["collectives.bucket_size"]);
    assert_eq!(unused(&[&bucket[..], &["--ranks", "2"]].concat()), [""; 0]);
    let reshard = ["--reshard-after-forward=false", "--ranks", "2"];
    assert_eq!(unused(&reshard), ["collectives.reshard_after_forward"]);
    assert_eq!(unused(&[&reshard[..], &["--zero", "3"]].concat()), [""; 0]);
    let gather = ["--overlap-param-gather=false", "--zero", "0"];
    assert_eq!(unused(&gather), ["collectives.overlap_param_gather"]);
}
