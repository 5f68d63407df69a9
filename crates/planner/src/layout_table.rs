//! Layouts as a table for people, with those that are left out and why.

use crate::layouts::{Grid, Layouts, PlannedLayout, RefusedLayout};
use memory::format_bytes;
use report::Align::{Left, Right};
use report::Table;
use std::fmt::{Display, Formatter};

impl Layouts {
    #[rustfmt::skip]
    fn table(&self) -> Table {
        let tiles = |layout: &PlannedLayout| {
            let tokens = layout.tile_tokens;
            tokens.map_or_else(String::new, |tokens| format!(", tiles of {tokens}"))
        };
        Table::of_items(&self.layouts, &[
            ("--cp", Right, &|layout| layout.grid.context.to_string()),
            ("--pp", Right, &|layout| layout.grid.pipeline.to_string()),
            ("micro x accum", Right, &|layout| format!("{} x {}", layout.micro_batch, layout.accum)),
            ("--zero", Left, &|layout| match layout.shard_group {
                None => layout.zero.stage().to_string(),
                Some(ranks) => format!("{} by {ranks}", layout.zero.stage()),
            }),
            ("recompute", Left, &|layout| layout.recompute.clone() + &tiles(layout)),
            ("on the host", Left, &|layout| match layout.on_host.is_empty() {
                true => "nothing".into(),
                false => layout.on_host.join(", "),
            }),
            ("needs", Right, &|layout| format_bytes(layout.needs_bytes)),
            ("host a rank", Right, &|layout| format_bytes(layout.host_pinned_bytes)),
            ("sent a step", Right, &|layout| format_bytes(layout.sent_bytes)),
            ("tokens/s of all", Right, &|layout| format!("{:.0}", layout.time.tokens_per_s)),
            ("bound by", Left, &|layout| layout.bound.to_string()),
        ])
    }
}

impl Display for Grid {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "--cp {}", self.context)?;
        match self.pipeline {
            1 => Ok(()),
            stages => write!(f, " --pp {stages}"),
        }
    }
}

impl Display for Layouts {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let room = format_bytes(self.device_memory_bytes);
        writeln!(
            f,
            "\nlayouts of {} ranks that fit {room} each, of steps of {} tokens; times are on paper\n",
            self.ranks, self.tokens_a_step
        )?;
        match self.layouts.is_empty() {
            true => writeln!(f, "none was found")?,
            false => write!(f, "{}", self.table())?,
        }
        if let Some(smallest) = self
            .too_large
            .iter()
            .min_by_key(|layout| layout.needs_bytes)
        {
            let grids = listed(self.too_large.iter().map(|layout| layout.grid));
            let needs = format_bytes(smallest.needs_bytes);
            writeln!(
                f,
                "too large: {grids}; the smallest that was found needs {needs} ({})",
                smallest.grid
            )?;
        }
        let others = [
            (&self.slower, "slower"),
            (
                &self.too_few_micro_batches,
                "too few micro-batches in a step for these groups (a larger --accum lets them in)",
            ),
        ];
        for (grids, words) in others {
            if !grids.is_empty() {
                writeln!(f, "{words}: {}", listed(grids.iter().copied()))?;
            }
        }
        for RefusedLayout { grid, reason } in &self.refused {
            writeln!(f, "{grid}: refused; {reason}")?;
        }
        match &self.command {
            Some(command) => writeln!(f, "\nthe first:\n{command}"),
            None => Ok(()),
        }
    }
}

/// Grids in words.
fn listed(grids: impl Iterator<Item = Grid>) -> String {
    let grids: Vec<String> = grids.map(|grid| grid.to_string()).collect();
    grids.join(", ")
}
