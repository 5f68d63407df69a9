//! Finds the cheapest assignment of entries to layers within a budget: a multiple-choice knapsack whose limit holds at
//! every layer. It is solved by dynamic programming over the Pareto sets of bytes kept and time spent so far.

use super::terms::{Term, Terms};

/// An entry for each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// The entry of each layer.
    pub(crate) entries: Vec<usize>,
    /// Picoseconds of a micro-batch that the layers take, waits for copies included.
    pub(crate) cost: u64,
    /// Its peak in bytes.
    pub(crate) peak: u64,
}

/// An assignment of the layers up to one of them.
#[derive(Clone, Copy)]
struct Node {
    kept: u64,
    cost: u64,
    entry: usize,
    /// Its node at the previous layer.
    from: usize,
}

impl Terms {
    /// The cheapest assignment whose peak is within `budget`; of equally cheap ones, the one with the lowest peak.
    pub(crate) fn cheapest(&self, budget: u64) -> Option<Assignment> {
        let mut best = self.any_cheapest(budget, u64::MAX)?;
        // Another assignment of the same cost may have a lower peak.
        while let Some(lower) = self.any_cheapest(best.peak - 1, best.cost) {
            best = lower;
        }
        Some(best)
    }

    /// The assignment with the lowest peak; of several, the cheapest.
    pub(crate) fn smallest(&self) -> Assignment {
        let keeping_most = vec![0; self.layers.len()];
        let (mut too_little, mut enough) = (self.rest.saturating_sub(1), self.peak(&keeping_most));
        while enough > too_little + 1 {
            let middle = too_little + (enough - too_little) / 2;
            match self.any_cheapest(middle, u64::MAX) {
                Some(found) => enough = found.peak.min(middle),
                None => too_little = middle,
            }
        }
        self.any_cheapest(enough, u64::MAX).expect("it is enough")
    }

    /// A cheapest assignment within a budget; none if it costs more than `most`.
    pub(crate) fn any_cheapest(&self, budget: u64, most: u64) -> Option<Assignment> {
        if self.rest > budget {
            return None;
        }
        let start = Node {
            kept: 0,
            cost: 0,
            entry: 0,
            from: 0,
        };
        let mut layers: Vec<Vec<Node>> = vec![vec![start]];
        for layer in 0..self.layers.len() {
            let nodes = self.next(layer, &layers[layer], budget, most);
            layers.push(nodes);
        }
        let last = layers.last()?.iter().enumerate();
        let fitting = last.filter(|(_, node)| node.kept + self.head <= budget);
        let (mut at, end) = fitting.min_by_key(|(_, node)| (node.cost, node.kept))?;
        let mut entries: Vec<usize> = Vec::with_capacity(self.layers.len());
        for nodes in layers[1..].iter().rev() {
            entries.push(nodes[at].entry);
            at = nodes[at].from;
        }
        entries.reverse();
        Some(Assignment {
            cost: end.cost,
            peak: self.peak(&entries),
            entries,
        })
    }

    /// The nodes of a layer: for each of its entries, those that no other node beats. Nodes whose entries have no bytes
    /// on their way beside a neighbour have the same effect on later layers, so they are compared with one another.
    fn next(&self, layer: usize, before: &[Node], budget: u64, most: u64) -> Vec<Node> {
        let terms = &self.layers[layer];
        let mut by_kind: Vec<Vec<Node>> = vec![Vec::new(); terms.len() + 1];
        for (entry, term) in terms.iter().enumerate() {
            // Nodes of one entry keep the order of those before, so `pareto` finds most of them sorted.
            for (from, node) in before.iter().enumerate() {
                let last = layer
                    .checked_sub(1)
                    .map(|last| &self.layers[last][node.entry]);
                let away = last.map_or(0, |last| last.away);
                let cost = node.cost + term.cost(last);
                if node.kept + away + term.at_work <= budget && cost <= most {
                    let kind = if is_alone(term) { terms.len() } else { entry };
                    by_kind[kind].push(Node {
                        kept: node.kept + term.kept,
                        cost,
                        entry,
                        from,
                    });
                }
            }
        }
        by_kind.into_iter().flat_map(pareto).collect()
    }
}

/// Whether the entry has no bytes on their way while a neighbour is at work.
fn is_alone(term: &Term) -> bool {
    term.away == 0
}

/// The nodes that no other node beats in both bytes and cost.
fn pareto(mut nodes: Vec<Node>) -> Vec<Node> {
    // This sort takes runs that are sorted already as they are.
    nodes.sort_by_key(|node| (node.kept, node.cost));
    let mut least = u64::MAX;
    nodes.retain(|node| {
        let is_cheaper = node.cost < least;
        least = least.min(node.cost);
        is_cheaper
    });
    nodes
}
