//! The plan as tables for people.

use crate::activations::{bytes_by_layer, total_bytes};
use crate::alternatives::Strategy;
use crate::arenas::{arena_table, host_memory};
use crate::gpus::{self, NcclMemory};
use crate::operations::PlannedOperations;
use crate::plan::Plan;
use crate::ranks::PlannedRanks;
use memory::{LiveLease, format_bytes};
use model::Label;
use report::Align::{Left, Right};
use report::{Table, memory_table};
use std::fmt::{Display, Formatter, Result};

/// How many of the largest leases are listed.
const LARGEST: usize = 8;

/// Characters of a line of reasons.
const LINE: usize = 130;

/// Without [`Plan::title`].
impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        self.headline(f)?;
        writeln!(
            f,
            "\n{}",
            memory_table((&self.peak_by_category, &self.phase_peak_bytes), None)
        )?;
        writeln!(f, "{}", arena_table("across steps", &self.arenas))?;
        if !self.host_arenas.is_empty() {
            let title = format!("in {}", host_memory(self.device));
            let table = arena_table(&title, &self.host_arenas);
            writeln!(f, "{table}")?;
        }
        writeln!(f, "{}", self.largest_table())?;
        writeln!(f, "{}", self.activation_table())?;
        if let Some(ranks) = self.ranks.as_ref().filter(|ranks| !ranks.stages.is_empty()) {
            writeln!(f, "{}", ranks.table())?;
        }
        if let Some(ranks) = &self.ranks
            && !ranks.pipeline_stages.is_empty()
        {
            writeln!(f, "{}", ranks.pipeline_table())?;
        }
        let of_ranks = self.ranks.iter().flat_map(PlannedRanks::notes);
        for note in self.notes.iter().cloned().chain(of_ranks) {
            writeln!(f, "  note: {}\n", note.replace("; ", "\n    "))?;
        }
        writeln!(f, "{}", self.strategy_table())?;
        writeln!(f, "{}", self.effect_table())?;
        writeln!(f, "{}", self.operation_table())?;
        write!(f, "{}", self.formula_table())?;
        self.explanations(f)
    }
}

impl Plan {
    /// What the plan is for, in a line.
    pub fn title(&self) -> String {
        let active = self.active_parameters;
        let active = active.map_or_else(String::new, |count| format!(" ({count} for each token)"));
        format!(
            "plan for {} in {}: {} parameters{active}, {} attention, the head in chunks of {} tokens",
            self.device,
            self.dtype,
            self.parameters,
            self.attention.name(),
            self.head_chunk
        )
    }

    fn headline(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(
            f,
            "peak {} ({} bytes) at {}, {}",
            format_bytes(self.peak_bytes),
            self.peak_bytes,
            self.peak_layer,
            self.peak_phase.name()
        )?;
        writeln!(
            f,
            "reserved {}: {} across steps ({:.2} bytes a parameter), slab {} ({:.2} % lost in placement)",
            format_bytes(self.reserved_bytes),
            format_bytes(self.persistent_bytes),
            self.bytes_per_parameter,
            format_bytes(self.slab_bytes),
            100.0 * self.fragmentation,
        )?;
        self.fitting_gpus(f)?;
        let between = [
            ("an evaluation", self.eval_peak_bytes),
            ("a sample", self.sample_peak_bytes),
        ];
        for (name, bytes) in between {
            if let Some(bytes) = bytes {
                let size = format_bytes(bytes);
                writeln!(
                    f,
                    "{name} between steps has a peak of {size} ({bytes} bytes)"
                )?;
            }
        }
        if self.host_pinned_bytes > 0 {
            writeln!(
                f,
                "host {} ({} bytes) {}; a step moves {} there and {} back",
                format_bytes(self.host_pinned_bytes),
                self.host_pinned_bytes,
                match self.device {
                    "cpu" => "for what is offloaded",
                    _ => "pinned",
                },
                format_bytes(self.d2h_bytes),
                format_bytes(self.h2d_bytes),
            )?;
        }
        // For a GPU that has all, the host holds next to nothing.
        if self.device == "cpu" || self.host_pinned_bytes > 0 {
            writeln!(f, "{}", self.host_phase_bytes)?;
        }
        if self.disk_bytes > 0 {
            writeln!(
                f,
                "disk {} ({} bytes, {:.3} a parameter) in scratch files; a step reads {} and writes {}",
                format_bytes(self.disk_bytes),
                self.disk_bytes,
                self.disk_bytes as f64 / self.parameters as f64,
                format_bytes(self.disk_read_bytes),
                format_bytes(self.disk_written_bytes),
            )?;
        }
        writeln!(
            f,
            "saved {} ({} bytes) a checkpoint{}, {} the model alone, beside small files",
            format_bytes(self.checkpoint_bytes),
            self.checkpoint_bytes,
            match &self.ranks {
                Some(_) => " of this rank",
                None => "",
            },
            format_bytes(self.model_bytes),
        )?;
        if let Some(ranks) = &self.ranks {
            writeln!(f, "{}", ranks.headline())?;
        }
        Ok(())
    }

    /// The GPUs that the run fits, and those that it does not.
    fn fitting_gpus(&self, f: &mut Formatter<'_>) -> Result {
        if self.fits.is_empty() {
            return Ok(());
        }
        let list = |fitting| -> Vec<&str> {
            let names = gpus::names_by_memory();
            names
                .filter(|name| self.fits.get(name) == Some(&fitting))
                .collect()
        };
        let (fitting, too_small) = (list(true), list(false));
        let overhead = format_bytes(self.device_overhead_bytes);
        let nccl = self.ranks.as_ref().and_then(|ranks| ranks.nccl.as_ref());
        let nccl = nccl.map(NcclMemory::describe).unwrap_or_default();
        writeln!(
            f,
            "with about {overhead} for context and libraries (an estimate){nccl}"
        )?;
        for (verdict, gpus) in [("fits", fitting), ("too large for", too_small)] {
            if !gpus.is_empty() {
                writeln!(f, "  {verdict} {}", gpus.join(", "))?;
            }
        }
        Ok(())
    }

    #[rustfmt::skip]
    fn largest_table(&self) -> Table {
        let place = |lease: &LiveLease| lease.layer.block().map(|block| format!("block {block}"));
        Table::of_items(self.largest_at_peak.iter().take(LARGEST), &[
            ("largest at the peak", Left, &|lease| lease.name.into()),
            ("", Left, &|lease| place(lease).unwrap_or_default()),
            ("bytes", Right, &|lease| format_bytes(lease.bytes)),
        ])
    }

    #[rustfmt::skip]
    fn activation_table(&self) -> Table {
        let offloads = total_bytes(&self.activations, None).offloaded > 0;
        let mut layers = bytes_by_layer(&self.activations, None).map(|layer| layer.all);
        let first = layers.next();
        let a_layer = match layers.all(|other| Some(other) == first) {
            true => "a layer",
            false => "largest layer",
        };
        let total = |label: &Option<Label>| total_bytes(&self.activations, *label);
        let host = |label: &Option<Label>| format_bytes(total(label).offloaded);
        let largest = |label: &Option<Label>| {
            let layers = bytes_by_layer(&self.activations, *label);
            layers.map(|layer| layer.all).max().unwrap_or(0)
        };
        let labels: Vec<Option<Label>> = self.labels.iter().map(Some).chain([None]).collect();
        let table = Table::of_items(&labels, &[
            ("activations of a micro-batch", Left, &|label| label.map_or("total", Label::name).into()),
            ("all", Right, &|label| format_bytes(total(label).all)),
            ("kept", Right, &|label| format_bytes(total(label).kept)),
            ("on the host", Right, &|label| if offloads { host(label) } else { String::new() }),
            (a_layer, Right, &|label| format_bytes(largest(label))),
        ]);
        table.without_empty_columns()
    }

    #[rustfmt::skip]
    fn strategy_table(&self) -> Table {
        let offloads = self.strategies.iter().any(Strategy::offloads);
        let extra = |strategy: &Strategy| 100.0 * strategy.recompute_flops_fraction;
        let table = Table::of_items(&self.strategies, &[
            ("--recompute", Left, &|one| one.recompute.clone()),
            ("--offload-activations", Left, &|one| match offloads {
                true => one.offload_activations.clone(),
                false => String::new(),
            }),
            ("peak", Right, &|one| format_bytes(one.peak_bytes)),
            ("reserved", Right, &|one| format_bytes(one.reserved_bytes)),
            ("extra FLOPs", Right, &|one| format!("{:.1} %", extra(one))),
        ]);
        table.without_empty_columns()
    }

    #[rustfmt::skip]
    fn effect_table(&self) -> Table {
        let sign = |bytes: i64| if bytes < 0 { "-" } else { "+" };
        let signed = |bytes: i64| sign(bytes).to_string() + &format_bytes(bytes.unsigned_abs());
        Table::of_items(&self.effects, &[
            ("what another setting would change", Left, &|effect| effect.change.clone()),
            ("peak", Right, &|effect| format_bytes(effect.peak_bytes)),
            ("difference", Right, &|effect| signed(effect.difference_bytes)),
        ])
    }

    #[rustfmt::skip]
    fn operation_table(&self) -> Table {
        let of = |bytes, ms: f64| if bytes > 0 { [format_bytes(bytes), format!("{ms:.3}")] } else { Default::default() };
        let passes = |one: &PlannedOperations| of(one.micro_batch_bytes, one.micro_batch_ms);
        let update = |one: &PlannedOperations| of(one.update_bytes, one.update_ms);
        let total = |of: fn(&PlannedOperations) -> u64| self.operations.iter().map(of).sum();
        let total_ms = |of: fn(&PlannedOperations) -> f64| self.operations.iter().map(of).sum();
        let total = PlannedOperations {
            group: "total",
            micro_batch_bytes: total(|one| one.micro_batch_bytes),
            micro_batch_ms: total_ms(|one| one.micro_batch_ms),
            update_bytes: total(|one| one.update_bytes),
            update_ms: total_ms(|one| one.update_ms),
        };
        Table::of_items(self.operations.iter().chain([&total]), &[
            ("operations read and write", Left, &|one| one.group.into()),
            ("in a micro-batch", Right, &|one| passes(one)[0].clone()),
            ("ms on paper", Right, &|one| passes(one)[1].clone()),
            ("in the update", Right, &|one| update(one)[0].clone()),
            ("ms on paper", Right, &|one| update(one)[1].clone()),
        ])
    }

    #[rustfmt::skip]
    fn formula_table(&self) -> Table {
        Table::of_items(&self.formulas, &[
            ("rule of thumb", Left, &|formula| formula.name.into()),
            ("formula", Left, &|formula| formula.formula.into()),
            ("says", Right, &|formula| format_bytes(formula.bytes)),
            ("plan", Right, &|formula| format_bytes(formula.plan_bytes)),
        ])
    }

    fn explanations(&self, f: &mut Formatter<'_>) -> Result {
        for formula in &self.formulas {
            writeln!(f, "  the plan differs from \"{}\":", formula.name)?;
            let mut line = String::new();
            for reason in formula.difference.split("; ") {
                if !line.is_empty() && line.len() + reason.len() > LINE {
                    writeln!(f, "    {line}")?;
                    line.clear();
                }
                if !line.is_empty() {
                    line += "; ";
                }
                line += reason;
            }
            writeln!(f, "    {line}")?;
        }
        Ok(())
    }
}
