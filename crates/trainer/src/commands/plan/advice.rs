//! Answers that `plan` gives besides the plan: `--device-memory`, `--beside`, `--layout` and `--largest`.

use crate::args::RunArgs;
use crate::decisions::naming_head_chunk;
use crate::failure::{Failure, Result};
use crate::limits::limit_of_plan;
use crate::shell::quoted;
use clap::Args;
use memory::format_bytes;
use planner::{Advice, Largest, Layouts, Plan, Room, Sought, gpu_memory_bytes};
use settings::load::Override;
use settings::{AutoOr, Completed, Config, DEFAULT_HEAD_CHUNK, Resolved, Size};
use std::collections::BTreeSet;

/// Flags of `plan` that look for other settings.
#[derive(Clone, Debug, Default, Args)]
pub struct AdviceArgs {
    /// Say what makes the run fit so much memory, or a GPU such as h100 or rtx-4090
    #[arg(long, value_name = "SIZE|NAME", allow_hyphen_values = true)]
    pub device_memory: Option<String>,
    /// Leave so much of --device-memory, in bytes or as a share of it, to another program on the same GPU
    #[arg(
        long,
        value_name = "SIZE",
        requires = "device_memory",
        allow_hyphen_values = true
    )]
    pub beside: Option<String>,
    /// Compare how --ranks may divide the run so that it fits --device-memory, the fastest on paper first
    #[arg(long, value_name = "auto", value_parser = ["auto"], requires = "device_memory", conflicts_with = "largest")]
    pub layout: Option<String>,
    /// Find the largest that fits --device-memory, or else --memory-limit
    #[arg(long, value_name = "micro-batch|seq|rank", value_parser = ["micro-batch", "seq", "rank"])]
    pub largest: Option<String>,
}

impl AdviceArgs {
    /// The bytes of `--device-memory` that the run can have: what `--beside` does not take.
    pub(crate) fn device_bytes(&self) -> Result<Option<u64>> {
        let Some(device) = &self.device_memory else {
            return Ok(None);
        };
        let beside = self.beside_bytes()?.unwrap_or(0);
        Ok(Some(device_memory_bytes(device)? - beside))
    }

    /// What another program keeps of `--device-memory`.
    ///
    /// # Errors
    /// [`Failure::Usage`] if it leaves nothing.
    pub(crate) fn beside_bytes(&self) -> Result<Option<u64>> {
        let (Some(device), Some(text)) = (&self.device_memory, &self.beside) else {
            return Ok(None);
        };
        let size: Result<Size, _> = text.parse();
        let size = size.map_err(|error| Failure::Usage(format!("--beside: {error}")))?;
        let total = device_memory_bytes(device)?;
        let beside = size.bytes_of(total);
        if beside >= total {
            return Err(Failure::Usage(format!(
                "--beside {text}: the other program would keep {} of the device's {}, which leaves nothing to train in; give what it \
                 really holds, or a larger --device-memory",
                format_bytes(beside),
                format_bytes(total)
            )));
        }
        Ok(Some(beside))
    }
}

/// Adds to a plan what the flags ask for. With both, `--largest` is found within `--device-memory`.
pub(crate) fn answer(
    asked: &AdviceArgs,
    run: &RunArgs,
    completed: &Completed,
    config: &Config,
    mut plan: Plan,
) -> Result<Plan> {
    let target = completed.device().target();
    let device_memory = asked.device_bytes()?;
    plan.beside_bytes = asked.beside_bytes()?;
    let largest = asked.largest.as_deref().and_then(Sought::named);
    if completed.config.chooses() {
        let is_budget = !matches!(
            completed.config.memory.budget,
            None | Some(AutoOr::Number(Size::Bytes(_)))
        );
        let looks = largest.is_some() || asked.layout.is_some();
        return match looks || (device_memory.is_some() && !is_budget) {
            false => Ok(plan),
            true => Err(Failure::Usage(
                "--device-memory and --largest look for settings, and so does --recompute auto: give --memory-budget with \
                 auto, or a specification"
                    .into(),
            )),
        };
    }
    // The largest is searched with the smallest chunk that may be chosen: if a larger chunk does not fit, it is chosen.
    let mut smallest = config.clone();
    if completed.chooses_head_chunk {
        smallest.memory.head_chunk = AutoOr::Number(DEFAULT_HEAD_CHUNK);
    }
    let room = device_memory.map(Room::Device);
    let limit = limit_of_plan(&completed.config);
    match (largest, room.or(limit.map(Room::Limit))) {
        (Some(what), Some(room)) => {
            let mut found = Largest::new(&smallest, target, what, room)?;
            naming_head_chunk([&mut found.set], &smallest, completed)?;
            found.context_length = completed.context_length.filter(|_| what == Sought::Seq);
            plan.largest = Some(found);
        }
        (Some(_), None) => {
            return Err(Failure::Usage(
                "--largest needs to know what has to hold the run: add --device-memory SIZE|NAME, or --memory-limit SIZE \
                 in bytes"
                    .into(),
            ));
        }
        (None, Some(Room::Device(bytes))) if asked.layout.is_some() => {
            let mut layouts = Layouts::new(config, target, bytes)?;
            let sets = layouts.layouts.iter_mut().map(|layout| &mut layout.set);
            naming_head_chunk(sets, config, completed)?;
            let first = layouts.layouts.first().map(|first| first.set.clone());
            layouts.command = first.map(|set| train_command(run, completed, set));
            plan.layouts = Some(layouts);
        }
        (None, Some(Room::Device(bytes))) => {
            let mut advice = Advice::new(config, target, bytes)?;
            advice.beside_bytes = plan.beside_bytes.unwrap_or(0);
            let (mut set, of_rungs) = (advice.set(), advice.set().len());
            let others = advice.other_trainings.iter_mut();
            let sets = others
                .map(|other| &mut other.set)
                .chain(advice.fits.then_some(&mut set));
            naming_head_chunk(sets, config, completed)?;
            for other in &mut advice.other_trainings {
                other.command = Some(train_command(run, completed, other.set.clone()));
            }
            if advice.fits {
                if let Some(first) = advice.rungs.first_mut() {
                    first.set.extend_from_slice(&set[of_rungs..]);
                }
                advice.command = Some(train_command(run, completed, set));
            }
            plan.advice = Some(advice);
        }
        (None, _) => {}
    }
    Ok(plan)
}

/// A size in bytes, or the memory of a GPU.
pub(crate) fn device_memory_bytes(text: &str) -> Result<u64> {
    let names_a_gpu = text.starts_with(|first: char| first.is_alphabetic());
    let usage = |error: &dyn std::fmt::Display| Failure::Usage(format!("--device-memory: {error}"));
    if names_a_gpu {
        return gpu_memory_bytes(text).map_err(|error| usage(&error));
    }
    match text.parse() {
        Ok(Size::Bytes(bytes)) => Ok(bytes),
        Ok(Size::Percent(_)) => Err(usage(&format!(
            "`{text}` is a share of a device that is not there; write bytes, such as 80GiB, or a GPU, such as h100"
        ))),
        Err(error) => Err(usage(&error)),
    }
}

/// The command that trains with these flags and further settings. Of several for one key, only the last is written.
pub(super) fn train_command(args: &RunArgs, resolved: &Resolved, set: Vec<String>) -> String {
    let given = args.given();
    let mut words = vec!["trainer".to_string(), "train".to_string()];
    if let Some(rank) = resolved.config.rank.filter(|rank| rank.of > 1) {
        let ranks = rank.of.to_string();
        words.splice(0..0, ["mpirun".into(), "-n".into(), ranks]);
    }
    let mut pair = |flag: &str, value: String| words.extend([flag.to_string(), value]);
    if let Some(config) = given.config.as_ref().or(given.resumed.as_ref()) {
        pair("--config", config.clone());
    }
    let output = &args.output;
    let folders = [
        ("--init-from", &args.weights.init_from),
        ("--lora-from", &args.weights.lora_from),
        ("--out", &output.out),
        ("--save-final", &output.save_final),
    ];
    for (flag, folder) in folders {
        if let Some(folder) = folder {
            pair(flag, folder.display().to_string());
        }
    }
    if let Some(step) = output.dump_gradients {
        pair("--dump-gradients", step.to_string());
    }
    words.extend(output.quiet.then(|| "--quiet".to_string()));

    let mut settings = Vec::new();
    if resolved.config.train.device.is_none() {
        // A plan is for the device that it names, while training would use any device it finds.
        let device = resolved.device().to_string();
        settings.push(("train.device".into(), vec!["--device".into(), device]));
    }
    if let Ok(Some(spec)) = given.megatron.spec() {
        settings.push(("recompute.spec".into(), vec!["--recompute".into(), spec]));
    }
    let flags = given.flags.into_iter();
    settings.extend(flags.map(|flag| (flag.key, words_of(&flag.place))));
    for one in given.set.into_iter().chain(set) {
        let key = Override::from_set(&one).map_or_else(|_| one.clone(), |set| set.key);
        settings.push((key, vec!["--set".into(), one]));
    }
    words.extend(last_of_each(settings));
    let quoted: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    quoted.join(" ")
}

/// A flag, and its value if it has one. A repeated flag is written each time.
fn words_of(place: &str) -> Vec<String> {
    let Some((flag, values)) = place.split_once(' ') else {
        return vec![place.into()];
    };
    let again = format!(" {flag} ");
    let values = values.split(&again);
    values
        .flat_map(|value| [flag.into(), value.into()])
        .collect()
}

/// The words of the last setting of each key, in order. A flag that sets several keys is written once.
fn last_of_each(settings: Vec<(String, Vec<String>)>) -> impl Iterator<Item = String> {
    let mut seen = BTreeSet::new();
    let last = settings.into_iter().rev();
    let mut last: Vec<_> = last.filter(|(key, _)| seen.insert(key.clone())).collect();
    last.reverse();
    last.dedup_by(|(_, next), (_, before)| next == before);
    last.into_iter().flat_map(|(_, words)| words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::begin::complete;
    use crate::cli::{Cli, Command};
    use crate::commands::plan::PlanArgs;
    use crate::decisions::on_paper;
    use clap::Parser;
    use kernels::Target;
    use planner::{OomReport, first_refused};
    use settings::Settings;

    /// The flags of a plan, and what they resolve to.
    fn parsed<'a>(flags: impl Iterator<Item = &'a str>) -> (PlanArgs, Completed) {
        let cli = Cli::try_parse_from(["trainer", "plan"].into_iter().chain(flags)).unwrap();
        let resolved = complete(cli.resolve().unwrap()).unwrap();
        let Some(Command::Plan(args)) = &cli.command else {
            panic!("{cli:?}")
        };
        ((**args).clone(), resolved)
    }

    fn command(flags: &[&str], set: &[&str]) -> String {
        let (args, resolved) = parsed(flags.iter().copied());
        let set = set.iter().map(|one| one.to_string()).collect();
        train_command(&args.run, &resolved, set)
    }

    /// A plan by itself, without the answers.
    fn planned(flags: &str) -> Plan {
        let (_, resolved) = parsed(flags.split(' '));
        let config = on_paper(&resolved, None).unwrap().config.clone();
        Plan::new(&Settings::new(&config).unwrap(), resolved.device().target()).unwrap()
    }

    /// What a printed command needs, planned by itself: of the largest stage, where there are several.
    fn needs(command: &str) -> u64 {
        let (before, flags) = command.split_once("trainer train ").unwrap();
        let ranks = before.strip_prefix("mpirun -n ").map(str::trim_end);
        let flags = flags.replace('\'', "");
        let plan = |more: String| {
            let plan = planned(&format!("{flags}{more}"));
            let needs = plan.reserved_bytes + plan.device_overhead_bytes;
            (needs, plan.ranks.map_or(1, |ranks| ranks.pipeline))
        };
        let Some(ranks) = ranks else {
            return plan(String::new()).0;
        };
        let (first, stages) = plan(format!(" --ranks {ranks}"));
        let in_a_stage = ranks.parse::<usize>().unwrap() / stages;
        let others = (1..stages).map(|stage| {
            let rank = stage * in_a_stage;
            plan(format!(" --ranks {ranks} --rank {rank}")).0
        });
        others.fold(first, u64::max)
    }

    /// A plan with its answers.
    fn answered(flags: &str) -> Plan {
        let (args, resolved) = parsed(flags.split(' '));
        let device_bytes = args.advice.device_bytes().unwrap();
        let config = on_paper(&resolved, device_bytes).unwrap().config.clone();
        let plan = Plan::new(&Settings::new(&config).unwrap(), resolved.device().target());
        answer(&args.advice, &args.run, &resolved, &config, plan.unwrap()).unwrap()
    }

    /// The chunk of the output head is chosen by the memory that a plan has, so a command may have to name it.
    #[test]
    fn what_is_printed_has_the_bytes_that_are_planned() {
        // Larger ones take minutes to advise on.
        let names = [
            "gpt2-xl",
            "llama-3.2-1b",
            "qwen2.5-1.5b",
            "qwen2.5-7b",
            "llama-3-8b",
            "deepseek-v2-lite",
        ];
        let (mut commands, mut named) = (0, 0);
        let mut check = |command: &str, needs_bytes: u64| {
            assert_eq!(needs(command), needs_bytes, "{command}");
            commands += 1;
            named += usize::from(command.contains("memory.head_chunk="));
        };
        for name in names {
            for memory in ["rtx-4090", "h100"] {
                let run = format!("--config {name} --device cuda --device-memory {memory}");
                let advice = answered(&run).advice.unwrap();
                if let Some(command) = &advice.command {
                    check(command, advice.needs_bytes);
                }
                for other in &advice.other_trainings {
                    check(other.command.as_ref().unwrap(), other.needs_bytes);
                }
            }
        }
        for run in [
            "--config qwen2.5-7b --ranks 4 --layout auto --device-memory h100",
            "--config llama-3.2-1b --ranks 4 --layout auto --device-memory rtx-4090",
        ] {
            let layouts = answered(run).layouts.unwrap();
            let (args, resolved) = parsed(run.split(' '));
            for layout in &layouts.layouts {
                let command = train_command(&args.run, &resolved, layout.set.clone());
                check(&command, layout.needs_bytes);
            }
        }
        assert!(
            commands > 20 && named > 0 && named < commands,
            "{named} of {commands}"
        );
    }

    /// So have fixes under a limit, and the largest value.
    #[test]
    fn settings_to_add_have_the_bytes_that_are_planned() {
        let run = "--config qwen2.5-0.5b --device cuda --micro-batch 8 --seq 2048";
        let (_, resolved) = parsed(run.split(' '));
        let config = on_paper(&resolved, None).unwrap().config.clone();
        let limit = planned(&format!("{run} --recompute mlp")).most_bytes();
        let settings = Settings::new(&config).unwrap();
        let error = first_refused(&settings, Target::Cuda, limit)
            .unwrap()
            .unwrap();
        let mut report = OomReport::new(&error, &config, Target::Cuda).unwrap();
        naming_head_chunk(report.sets(), &config, &resolved).unwrap();
        let with = |set: &[String]| planned(&format!("{run} --set {}", set.join(" --set ")));
        let is_named = |set: &[String]| set.iter().any(|one| one.starts_with("memory.head_chunk="));
        let named = report.fixes.iter().filter(|fix| is_named(&fix.set)).count();
        assert!(
            named > 0 && named < report.fixes.len(),
            "{:?}",
            report.fixes
        );
        for fix in &report.fixes {
            assert_eq!(with(&fix.set).most_bytes(), fix.peak_bytes, "{fix:?}");
        }
        for memory in ["--memory-limit 40GiB", "--device-memory rtx-4090"] {
            let largest = answered(&format!("{run} --largest micro-batch {memory}")).largest;
            let largest = largest.unwrap();
            assert_eq!(
                with(&largest.set).most_bytes(),
                largest.peak_bytes,
                "{largest:?}"
            );
        }
    }

    /// A plan beside another program is that of a device with less memory.
    #[test]
    fn what_another_program_keeps_is_taken_off_every_answer() {
        let bytes = |answered: Plan| {
            let advice = answered
                .advice
                .map(|advice| (advice.needs_bytes, advice.command));
            let layouts = answered.layouts.map(|layouts| layouts.command);
            (advice, layouts, answered.largest)
        };
        for run in [
            "--config gpt2-xl",
            "--config gpt2-xl --largest micro-batch",
            "--config llama-3.2-1b --ranks 4 --layout auto",
        ] {
            let run = format!("{run} --device cuda --device-memory");
            let whole = bytes(answered(&format!("{run} 40GiB")));
            let beside = answered(&format!("{run} 40GiB --beside 24GiB"));
            assert_eq!(beside.beside_bytes, Some(24 << 30));
            let beside = bytes(beside);
            assert_ne!(whole, beside, "{run}");
            assert_eq!(beside, bytes(answered(&format!("{run} 16GiB"))), "{run}");
            let share = answered(&format!("{run} 40GiB --beside 60%"));
            assert_eq!(share.beside_bytes, Some(24 << 30));
            assert_eq!(bytes(share), beside, "{run}");
        }
    }

    #[test]
    fn the_last_setting_of_a_key_is_left() {
        let flags = [
            "--micro-batch",
            "8",
            "--seq",
            "64",
            "--set",
            "optim.beta1=0.8",
        ];
        assert_eq!(
            command(
                &flags,
                &[
                    "batch.micro=4",
                    "batch.accum=4",
                    "batch.micro=2",
                    "batch.accum=8"
                ]
            ),
            "trainer train --device cuda --seq 64 --set optim.beta1=0.8 --set batch.micro=2 --set batch.accum=8"
        );
        let flags = [
            "--device",
            "cpu",
            "--optimizer",
            "adamw8bit",
            "--no-shuffle",
            "--json",
        ];
        assert_eq!(
            command(&flags, &[]),
            "trainer train --no-shuffle --device cpu --optimizer adamw8bit"
        );
    }

    #[test]
    fn ranks_are_launched() {
        let flags = [
            "--ranks",
            "8",
            "--rank",
            "3",
            "--device",
            "cpu",
            "--reshard-after-forward=false",
        ];
        assert_eq!(
            command(&flags, &["collectives.zero=3"]),
            "mpirun -n 8 trainer train --device cpu --reshard-after-forward=false --set collectives.zero=3"
        );
    }

    #[test]
    fn a_flag_that_was_repeated_is_again() {
        assert_eq!(
            command(&["--data", "a b:1", "--data", "c:2"], &[]),
            "trainer train --device cuda --data 'a b:1' --data c:2"
        );
    }

    #[test]
    fn what_a_shell_would_read_is_quoted() {
        let full = [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
        ];
        let flags = [
            &["--out", "it's here"],
            &full[..],
            &["--recompute-num-layers", "1"],
        ]
        .concat();
        let layers = "recompute.layers={\"0\"=\"full\"}";
        assert_eq!(
            command(&flags, &[layers]),
            "trainer train --out 'it'\\''s here' --device cuda --recompute full:uniform:1 --set \
             'recompute.layers={\"0\"=\"full\"}'"
        );
    }
}
