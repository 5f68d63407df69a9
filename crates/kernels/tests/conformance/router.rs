//! Choices of experts, their weights, and the gradients of logits; tables by which rows are grouped; and the loss and the
//! bias that balance experts.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, computing};
use crate::host::Host;
use crate::oracle::{constant, gradients, softmax, values, variable};
use candle_core::{Result, Tensor};
use kernels::{
    BalanceLoss, CountChoices, GroupByExpert, KernelError, Route, RouteBackward, RouterGroups,
    RouterScore, RouterZLoss, Routing, StepRouterBias,
};
use memory::DType;
use std::cmp::Ordering;

/// Added to each sum of scores before anything is divided by it, so that no division is by 0.
const TINY: f64 = 1e-20;

#[derive(Clone, Copy, Debug)]
enum Logits {
    Random,
    /// Whole numbers: many are equal.
    Coarse,
}

#[derive(Clone, Debug)]
struct Router {
    dtype: DType,
    tokens: usize,
    sequences: usize,
    experts: usize,
    routing: Routing,
    logits: Logits,
    has_bias: bool,
    has_balance: bool,
    z_loss: Option<f32>,
    has_padding: bool,
}

/// How many tokens of each sequence of `seq` are not padding: of the last of several none, of the first all.
fn lengths(sequences: usize, seq: usize) -> Host {
    let length = |sequence: usize| seq - seq * sequence / (sequences - 1).max(1);
    let lengths = (0..sequences).map(|sequence| length(sequence) as f64);
    Host::new(DType::I32, [sequences], lengths)
}

/// 1 for tokens that are not padding, 0 for padding.
fn counted(lengths: &Host, seq: usize) -> Vec<f64> {
    let lengths = lengths.values().into_iter();
    lengths
        .flat_map(|length| (0..seq).map(move |at| f64::from((at as f64) < length)))
        .collect()
}

impl Router {
    fn lengths(&self) -> Host {
        lengths(self.sequences, self.tokens / self.sequences)
    }

    fn logits(&self) -> Host {
        let dims = [self.tokens, self.experts];
        let random = Host::random(DType::F32, dims, 3.0, 1);
        match self.logits {
            Logits::Random => random,
            Logits::Coarse => Host::new(
                DType::F32,
                dims,
                random.values().into_iter().map(f64::round),
            ),
        }
    }

    fn bias(&self) -> Host {
        Host::random(DType::F32, [self.experts], 0.3, 2)
    }

    fn dweights(&self) -> Host {
        Host::random(DType::F32, [self.tokens, self.routing.choices], 1.0, 3)
    }

    fn balance(&self) -> Host {
        Host::random(DType::F32, [self.sequences, self.experts], 0.2, 4)
    }

    /// The factor of the loss that is computed alone, where the gradient asks for none.
    fn z_factor(&self) -> f32 {
        self.z_loss.unwrap_or(0.01)
    }

    /// Ids, weights and scores, as far as they are wanted.
    fn route(
        &self,
        device: &Device,
        logits: &Host,
        wanted: [bool; 3],
    ) -> std::result::Result<[Option<Host>; 3], KernelError> {
        let [logits, bias, lengths] =
            [logits, &self.bias(), &self.lengths()].map(|host| device.put(host));
        let chosen = [self.tokens, self.routing.choices];
        let all = [self.tokens, self.experts];
        let rooms = [
            (DType::I32, chosen),
            (DType::F32, chosen),
            (DType::F32, all),
        ];
        let mut index = 0;
        let [mut ids, mut weights, mut scores] = rooms.map(|(dtype, dims)| {
            index += 1;
            wanted[index - 1].then(|| device.room(dtype, dims))
        });
        device.run(Route {
            ids: ids.as_mut().map(|ids| ids.view_mut()),
            weights: weights.as_mut().map(|weights| weights.view_mut()),
            scores: scores.as_mut().map(|scores| scores.view_mut()),
            logits: logits.view(),
            bias: self.has_bias.then(|| bias.view()),
            lengths: self.has_padding.then(|| lengths.view()),
            routing: self.routing,
        })?;
        Ok([ids, weights, scores].map(|out| out.map(|out| device.take(&out))))
    }

    /// By what a token's experts are compared.
    fn compared(&self, logits: &[f64]) -> Vec<f64> {
        let adds_two = self.routing.groups.is_some_and(|groups| groups.best == 2);
        if !self.has_bias && !adds_two {
            return logits.to_vec();
        }
        let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
        let score = |logit: &f64| match self.routing.score {
            RouterScore::Softmax => logit.exp() / sum,
            RouterScore::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
        };
        let scores = logits.iter().map(score);
        match self.has_bias {
            true => scores
                .zip(self.bias().values())
                .map(|(s, b)| s + b)
                .collect(),
            false => scores.collect(),
        }
    }

    /// The experts that a token is sent to.
    fn chosen(&self, logits: &[f64]) -> Vec<usize> {
        let compared = self.compared(logits);
        let mut experts: Vec<usize> = (0..self.experts).collect();
        if let Some(RouterGroups {
            count,
            chosen,
            best,
        }) = self.routing.groups
        {
            let size = self.experts / count;
            let of_groups: Vec<f64> = compared
                .chunks(size)
                .map(|values| greatest(values, best).iter().map(|i| values[*i]).sum())
                .collect();
            let groups = greatest(&of_groups, chosen);
            experts.retain(|expert| groups.contains(&(expert / size)));
        }
        let left: Vec<f64> = experts.iter().map(|expert| compared[*expert]).collect();
        let mut chosen: Vec<usize> = greatest(&left, self.routing.choices)
            .into_iter()
            .map(|index| experts[index])
            .collect();
        chosen.sort();
        chosen
    }

    /// The ids of all tokens.
    fn ids(&self, logits: &Host) -> Vec<usize> {
        let values = logits.values();
        let rows = values.chunks(self.experts);
        rows.flat_map(|logits| self.chosen(logits)).collect()
    }

    /// Weights, scores, the other loss of each token, and the gradient of logits, which all losses have part in.
    fn oracle(&self, ids: &[usize]) -> Result<[Vec<f64>; 4]> {
        let Routing {
            choices,
            score,
            is_normed,
            factor,
            ..
        } = self.routing;
        let logits = variable(&self.logits())?;
        let dims = (self.tokens, self.experts);
        let mut mask = vec![0.0; self.tokens * self.experts];
        let mut spread = mask.clone();
        let places = ids.iter().enumerate();
        let places = places.map(|(slot, id)| slot / choices * self.experts + id);
        let places: Vec<usize> = places.collect();
        for (place, dweight) in places.iter().zip(self.dweights().values()) {
            mask[*place] = 1.0;
            spread[*place] = dweight;
        }
        let [mask, spread] =
            [mask, spread].map(|values| Tensor::from_vec(values, dims, logits.device()));
        let (scores, balanced) = match score {
            RouterScore::Softmax => (softmax(&logits)?, softmax(&logits)?),
            RouterScore::Sigmoid => {
                let scores = (logits.neg()?.exp()? + 1.0)?.recip()?;
                let balanced = scores.broadcast_div(&(scores.sum_keepdim(1)? + TINY)?)?;
                (scores, balanced)
            }
        };
        let chosen = (&scores * mask?)?;
        let weights = match is_normed {
            true => chosen.broadcast_div(&(chosen.sum_keepdim(1)? + TINY)?)?,
            false => chosen,
        };
        let weights = (weights * f64::from(factor))?;
        let lse = logits.exp()?.sum_keepdim(1)?.log()?;
        let mut z_losses = (lse.sqr()? * f64::from(self.z_factor()))?;
        let mut balanced = balanced;
        if self.has_padding {
            let counted = counted(&self.lengths(), self.tokens / self.sequences);
            let counted = Tensor::from_vec(counted, (self.tokens, 1), logits.device())?;
            balanced = balanced.broadcast_mul(&counted)?;
            z_losses = (z_losses * &counted)?.broadcast_div(&counted.sum_all()?)?;
        }
        let mut loss = (&weights * spread?)?.sum_all()?;
        if self.has_balance {
            let seq = self.tokens / self.sequences;
            let rows = constant(&self.balance())?.reshape((self.sequences, 1, self.experts))?;
            let rows = rows.repeat((1, seq, 1))?.reshape(dims)?;
            loss = (loss + (&balanced * rows)?.sum_all()?)?;
        }
        if self.z_loss.is_some() {
            loss = (loss + z_losses.sum_all()?)?;
        }
        let dlogits = gradients(&loss, &loss.ones_like()?, &[&logits])?.remove(0);
        let weights = values(&weights)?;
        let weights = places.iter().map(|place| weights[*place]).collect();
        Ok([weights, values(&balanced)?, values(&z_losses)?, dlogits])
    }
}

/// The indices of the `count` greatest values: of equal ones the first, of numbers before NaN.
fn greatest(values: &[f64], count: usize) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..values.len()).collect();
    indices.sort_by(|a, b| {
        let [a, b] = [a, b].map(|index| values[*index]);
        let by_value = b.partial_cmp(&a).unwrap_or(Ordering::Equal);
        a.is_nan().cmp(&b.is_nan()).then(by_value)
    });
    indices.truncate(count);
    indices
}

impl Case for Router {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let routed = self.route(device, &self.logits(), [true; 3])?;
        // Planning has no ids.
        let given = self.ids(&self.logits()).into_iter().map(|id| id as f64);
        let given = Host::new(DType::I32, [self.tokens, self.routing.choices], given);
        let [logits, dweights, ids, balance, lengths] = [
            self.logits(),
            self.dweights(),
            given,
            self.balance(),
            self.lengths(),
        ]
        .map(|host| device.put(&host));
        let lengths = self.has_padding.then(|| lengths.view());
        let mut dlogits = device.room(self.dtype, [self.tokens, self.experts]);
        device.run(RouteBackward {
            dlogits: dlogits.view_mut(),
            dweights: dweights.view(),
            logits: logits.view(),
            ids: ids.view(),
            routing: self.routing,
            balance: self.has_balance.then(|| balance.view()),
            z_loss: self.z_loss,
            lengths,
        })?;
        let mut losses = device.room(DType::F32, [self.tokens]);
        device.run(RouterZLoss {
            losses: losses.view_mut(),
            logits: logits.view(),
            lengths,
            factor: self.z_factor(),
        })?;
        let others = [&losses, &dlogits].map(|tensor| device.take(tensor));
        Ok(routed.into_iter().flatten().chain(others).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let ids = self.ids(&self.logits());
        let [weights, scores, losses, dlogits] = self.oracle(&ids).unwrap();
        let ids = ids.into_iter().map(|id| id as f64).collect();
        // The gradient of what is always 1 vanishes.
        let terms = if self.experts == 1 { 1.0 } else { 0.0 };
        vec![
            Expected::new("route: ids", ids, Rule::Exact),
            Expected::new("route: weights", weights, Rule::Standard),
            Expected::new("route: scores", scores, Rule::Standard),
            Expected::new("router_z_loss", losses, Rule::Standard),
            Expected::new("route_backward", dlogits, Rule::Standard).with_terms(terms),
        ]
    }
}

fn routing(choices: usize, score: RouterScore, is_normed: bool) -> Routing {
    Routing {
        choices,
        score,
        is_normed,
        factor: 1.0,
        groups: None,
    }
}

fn groups(count: usize, chosen: usize, best: usize) -> Option<RouterGroups> {
    Some(RouterGroups {
        count,
        chosen,
        best,
    })
}

/// Numbers of tokens, sequences and experts, how they are routed, and whether by a bias too.
fn routers() -> Vec<([usize; 3], Routing, bool)> {
    use RouterScore::{Sigmoid, Softmax};
    let grouped = |routing, groups, factor| Routing {
        groups,
        factor,
        ..routing
    };
    vec![
        // The gate of shared experts.
        ([70, 1, 1], routing(1, Sigmoid, false), false),
        ([5, 1, 1], routing(1, Softmax, true), false),
        ([200, 4, 8], routing(2, Softmax, true), false),
        ([66, 3, 60], routing(4, Softmax, false), false),
        ([40, 2, 128], routing(8, Softmax, true), false),
        ([9, 1, 5], routing(5, Sigmoid, true), false),
        ([7, 7, 33], routing(3, Sigmoid, false), true),
        ([12, 2, 8], routing(3, Softmax, true), true),
        ([6, 1, 512], routing(17, Softmax, true), false),
        (
            [30, 3, 160],
            grouped(routing(6, Softmax, false), groups(8, 3, 1), 16.0),
            false,
        ),
        (
            [30, 2, 256],
            grouped(routing(8, Sigmoid, true), groups(8, 4, 2), 2.5),
            true,
        ),
        // More groups than lanes, and groups of one.
        (
            [8, 1, 140],
            grouped(routing(10, Sigmoid, true), groups(70, 40, 2), 1.5),
            false,
        ),
        (
            [8, 1, 6],
            grouped(routing(2, Softmax, true), groups(6, 3, 1), 1.0),
            true,
        ),
    ]
}

fn router_cases(dtype: DType) -> Vec<Router> {
    let mut cases = Vec::new();
    for ([tokens, sequences, experts], routing, has_bias) in routers() {
        for (logits, has_balance, z_loss, has_padding) in [
            (Logits::Random, false, None, false),
            (Logits::Random, true, None, false),
            (Logits::Coarse, false, Some(0.1), false),
            (Logits::Coarse, true, Some(0.02), false),
            (Logits::Random, false, Some(0.8), true),
            (Logits::Random, true, Some(0.3), true),
        ] {
            cases.push(Router {
                dtype,
                tokens,
                sequences,
                experts,
                routing,
                logits,
                has_bias,
                has_balance,
                z_loss,
                has_padding,
            });
        }
    }
    cases
}

#[derive(Clone, Copy, Debug)]
enum Choices {
    Random,
    /// All tokens choose the first experts.
    First,
    /// All tokens choose the last experts.
    Last,
}

#[derive(Debug)]
struct Grouping {
    sequences: usize,
    seq: usize,
    choices: usize,
    experts: usize,
    chosen: Choices,
}

impl Grouping {
    fn ids(&self) -> Host {
        let (tokens, experts) = (self.sequences * self.seq, self.experts);
        let random = Host::random(DType::F32, [tokens, experts], 1.0, 1).values();
        let chosen = |values: &[f64]| {
            let mut chosen = match self.chosen {
                Choices::Random => greatest(values, self.choices),
                Choices::First => (0..self.choices).collect(),
                Choices::Last => (experts - self.choices..experts).collect(),
            };
            chosen.sort();
            chosen
        };
        let ids = random.chunks(experts).flat_map(chosen);
        let ids = ids.map(|id| id as f64);
        Host::new(DType::I32, [tokens, self.choices], ids)
    }

    /// The tables that are wanted: offsets, tokens and slots of rows, rows of slots.
    fn group(
        &self,
        device: &Device,
        wanted: [bool; 4],
    ) -> std::result::Result<[Option<Host>; 4], KernelError> {
        let ids = device.put(&self.ids());
        let rows = self.ids().dims.elements();
        let room = |wanted: bool, count: usize| wanted.then(|| device.room(DType::I32, [count]));
        let [mut offsets, mut row_token, mut row_slot] = [
            room(wanted[0], self.experts + 1),
            room(wanted[1], rows),
            room(wanted[2], rows),
        ];
        let mut slot_row = wanted[3].then(|| device.room(DType::I32, self.ids().dims));
        device.run(GroupByExpert {
            offsets: offsets.as_mut().map(|table| table.view_mut()),
            row_token: row_token.as_mut().map(|table| table.view_mut()),
            row_slot: row_slot.as_mut().map(|table| table.view_mut()),
            slot_row: slot_row.as_mut().map(|table| table.view_mut()),
            ids: ids.view(),
            experts: self.experts,
        })?;
        let tables = [offsets, row_token, row_slot, slot_row];
        Ok(tables.map(|table| table.map(|table| device.take(&table))))
    }
}

impl Case for Grouping {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let tables = self.group(device, [true; 4])?;
        let ids = device.put(&self.ids());
        let lengths = device.put(&lengths(self.sequences, self.seq));
        let mut results: Vec<Host> = tables.into_iter().flatten().collect();
        for lengths in [None, Some(lengths.view())] {
            let mut counts = device.room(DType::F32, [self.sequences, self.experts]);
            device.run(CountChoices {
                counts: counts.view_mut(),
                ids: ids.view(),
                lengths,
            })?;
            results.push(device.take(&counts));
        }
        Ok(results)
    }

    fn expected(&self) -> Vec<Expected> {
        let ids = self.ids().values();
        let mut row_slot: Vec<usize> = (0..ids.len()).collect();
        row_slot.sort_by_key(|slot| ids[*slot] as usize);
        let mut slot_row = vec![0.0; ids.len()];
        for (row, slot) in row_slot.iter().enumerate() {
            slot_row[*slot] = row as f64;
        }
        let before = |expert: usize| ids.iter().filter(|id| **id < expert as f64).count();
        let offsets = (0..=self.experts).map(|expert| before(expert) as f64);
        let count = |ids: &[f64], expert| ids.iter().filter(|id| **id == expert as f64).count();
        let counts_of = |lengths: Vec<f64>| {
            let sequences = ids.chunks(self.seq * self.choices).zip(lengths);
            let own = sequences.map(|(ids, length)| &ids[..length as usize * self.choices]);
            own.flat_map(|ids| (0..self.experts).map(move |expert| count(ids, expert) as f64))
                .collect()
        };
        let counts = counts_of(vec![self.seq as f64; self.sequences]);
        let without_padding = counts_of(lengths(self.sequences, self.seq).values());
        let tokens = row_slot.iter().map(|slot| (slot / self.choices) as f64);
        let slots = row_slot.iter().map(|slot| *slot as f64);
        let exact = |name, values| Expected::new(name, values, Rule::Exact);
        vec![
            exact("group_by_expert: offsets", offsets.collect()),
            exact("group_by_expert: row_token", tokens.collect()),
            exact("group_by_expert: row_slot", slots.collect()),
            exact("group_by_expert: slot_row", slot_row),
            exact("count_choices", counts),
            exact("count_choices: without padding", without_padding),
        ]
    }
}

fn groupings() -> Vec<Grouping> {
    let sizes = [
        [1, 1, 1, 1],
        [1, 5, 2, 8],
        [3, 37, 4, 5],
        [2, 350, 3, 40],
        [1, 600, 1, 2],
        [1, 9, 5, 5],
        [1, 20, 6, 512],
    ];
    let all = [Choices::Random, Choices::First, Choices::Last];
    let grouping = |[sequences, seq, choices, experts]: [usize; 4], chosen| Grouping {
        sequences,
        seq,
        choices,
        experts,
        chosen,
    };
    sizes
        .into_iter()
        .flat_map(|sizes| all.map(|chosen| grouping(sizes, chosen)))
        .collect()
}

#[derive(Debug)]
struct Balance {
    rows: usize,
    pooled: usize,
    experts: usize,
    start: Start,
    /// Sequences that have lengths.
    padded: Option<usize>,
}

const FACTOR: f32 = 0.03;

impl Balance {
    /// Lengths of sequences, of which that of the last of several is 0.
    fn lengths(&self) -> Host {
        let count = self.padded.unwrap_or(1);
        let length = |sequence| (count - 1 - sequence) as f64 + f64::from(count == 1) * 3.0;
        Host::new(DType::I32, [count], (0..count).map(length))
    }

    /// Counts, sums, and an earlier loss.
    fn tensors(&self) -> [Host; 3] {
        let dims = [self.rows, self.experts];
        let counts = Host::random_ids(self.rows * self.experts, 50, 1).values();
        let sums = Host::random(DType::F32, dims, 20.0, 2).values();
        [
            Host::new(DType::F32, dims, counts),
            Host::new(DType::F32, dims, sums.into_iter().map(f64::abs)),
            Host::new(DType::F32, [1], [3.5]),
        ]
    }
}

impl Case for Balance {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [counts, sums, earlier] = self.tensors();
        let mut loss = device.start(self.start, &earlier);
        let mut gradient = device.room(DType::F32, counts.dims);
        let [counts, sums, earlier, lengths] =
            [counts, sums, earlier, self.lengths()].map(|host| device.put(&host));
        device.run(BalanceLoss {
            loss: loss.view_mut(),
            gradient: gradient.view_mut(),
            counts: counts.view(),
            sums: sums.view(),
            lengths: self.padded.map(|_| lengths.view()),
            pooled: self.pooled,
            factor: FACTOR,
            init: self.start.init(&earlier),
        })?;
        Ok(vec![device.take(&loss), device.take(&gradient)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [counts, sums, earlier] = self.tensors();
        let [counts, sums] = [counts, sums].map(|host| host.values());
        let (mut loss, mut gradient) = (self.start.values(&earlier), vec![0.0; counts.len()]);
        let of_group = self.pooled * self.experts;
        for (place, gradient) in gradient.iter_mut().enumerate() {
            let (start, expert) = (place / of_group * of_group, place % self.experts);
            let rows = (0..self.pooled).map(|row| start + row * self.experts + expert);
            let count: f64 = rows.map(|other| counts[other]).sum();
            let tokens = match self.padded {
                Some(sequences) => {
                    let lengths = self.lengths().values();
                    let rows = (0..self.pooled).map(|row| start / self.experts + row);
                    let tokens: f64 = rows.map(|row| lengths[row % sequences]).sum();
                    tokens.max(1.0)
                }
                None => 1.0,
            };
            let factor = f64::from(FACTOR) / (tokens * tokens);
            *gradient = factor * count;
            // Each row's sum is multiplied by the counts of its group.
            loss[0] += factor * count * sums[place];
        }
        vec![
            Expected::new("balance_loss", loss, Rule::Standard),
            Expected::new("balance_loss: gradient", gradient, Rule::Standard),
        ]
    }
}

#[derive(Debug)]
struct BiasStep {
    experts: usize,
    clip: f32,
}

const RATE: f32 = 0.001;

impl BiasStep {
    /// The bias, and counts of which the mean is whole, and the count of the last.
    fn tensors(&self) -> [Host; 2] {
        let mut counts = Host::random_ids(self.experts, 9, 1).values();
        let last = self.experts - 1;
        let others = |counts: &[f64]| counts[..last].iter().sum::<f64>();
        while last > 0 && !(others(&counts) as usize).is_multiple_of(last) {
            counts[0] += 1.0;
        }
        counts[last] = others(&counts) / last.max(1) as f64;
        [
            Host::random(DType::F32, [self.experts], 0.1, 2),
            Host::new(DType::F32, [self.experts], counts),
        ]
    }
}

impl Case for BiasStep {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [mut bias, counts] = self.tensors().map(|host| device.put(&host));
        let clip = Host::new(DType::F32, [2], [17.0, f64::from(self.clip)]);
        let clip = device.put(&clip);
        device.run(StepRouterBias {
            bias: bias.view_mut(),
            counts: counts.view(),
            clip: clip.view(),
            rate: RATE,
        })?;
        Ok(vec![device.take(&bias)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [bias, counts] = self.tensors().map(|host| host.values());
        if self.clip.is_nan() {
            return vec![Expected::new(
                "step_router_bias: skipped",
                bias,
                Rule::Exact,
            )];
        }
        let mean = counts.iter().sum::<f64>() / counts.len() as f64;
        let steps = counts.iter().map(|count| match mean.partial_cmp(count) {
            Some(Ordering::Greater) => RATE,
            Some(Ordering::Less) => -RATE,
            _ => 0.0,
        });
        let moved = bias
            .iter()
            .zip(steps)
            .map(|(bias, step)| bias + f64::from(step));
        // A step is a hundredth of the bias: the rule would hardly see it, f32's own rounding does.
        let rounded = moved.map(|moved| f64::from(moved as f32)).collect();
        vec![Expected::new("step_router_bias", rounded, Rule::Exact)]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for case in router_cases(dtype) {
        cases.push(Box::new(case));
    }
    for case in groupings() {
        cases.push(Box::new(case));
    }
    for (rows, pooled, experts, sequences) in [
        (1, 1, 1, 1),
        (6, 1, 8, 3),
        (6, 3, 33, 3),
        (40, 40, 64, 4),
        (48, 8, 128, 8),
    ] {
        for (start, padded) in [
            (Start::Overwrite, None),
            (Start::Accumulate, None),
            (Start::Accumulate, Some(sequences)),
        ] {
            cases.push(Box::new(Balance {
                rows,
                pooled,
                experts,
                start,
                padded,
            }));
        }
    }
    for experts in [1, 8, 33, 160, 512] {
        for clip in [1.0, 0.25, f32::NAN] {
            cases.push(Box::new(BiasStep { experts, clip }));
        }
    }
    cases
}

#[test]
fn leaving_outputs_out_changes_no_bit_of_the_others() {
    for device in computing(DType::F32) {
        device.memory.set_poison(true);
        for case in router_cases(DType::F32) {
            let all = case.route(&device, &case.logits(), [true; 3]).unwrap();
            for combination in 0..8 {
                let wanted = [1, 2, 4].map(|bit| combination & bit != 0);
                let some = case.route(&device, &case.logits(), wanted).unwrap();
                compare(&all, &some, &wanted, &format!("{} {case:?}", device.name));
            }
        }
        for case in groupings() {
            let all = case.group(&device, [true; 4]).unwrap();
            for combination in 0..16 {
                let wanted = [1, 2, 4, 8].map(|bit| combination & bit != 0);
                let some = case.group(&device, wanted).unwrap();
                compare(&all, &some, &wanted, &format!("{} {case:?}", device.name));
            }
        }
    }
}

fn compare(all: &[Option<Host>], some: &[Option<Host>], wanted: &[bool], place: &str) {
    for ((all, some), wanted) in all.iter().zip(some).zip(wanted) {
        assert!(all.is_some());
        let expected = all.as_ref().filter(|_| *wanted);
        assert!(some.as_ref() == expected, "{place}");
    }
}

/// A step with such logits is skipped later on, but ids are row numbers before that.
#[test]
fn tokens_whose_logits_are_no_numbers_choose_distinct_experts() {
    for device in computing(DType::F32) {
        for case in router_cases(DType::F32) {
            let mut values = case.logits().values();
            let rows = values.chunks_mut(case.experts);
            for (token, row) in rows.enumerate() {
                match token % 5 {
                    0 => row.fill(f64::NAN),
                    1 => row[case.experts / 2] = f64::NAN,
                    2 => row[1..].fill(f64::NAN),
                    3 => row[0] = f64::INFINITY,
                    _ => {}
                }
            }
            let logits = Host::new(DType::F32, [case.tokens, case.experts], values);
            let [ids, weights, _] = case.route(&device, &logits, [true; 3]).unwrap();
            let [ids, weights] = [ids, weights].map(|out| out.unwrap().values());
            let choices = case.routing.choices;
            for (token, ids) in ids.chunks(choices).enumerate() {
                let place = format!("{}: token {token} of {case:?}", device.name);
                assert!(ids.is_sorted_by(|a, b| a < b), "{place}: {ids:?}");
                assert!(ids[0] >= 0.0 && ids[choices - 1] < case.experts as f64);
                // The others have scores, where a token's scores do not depend on each other.
                if !case.has_bias && case.routing.groups.is_none() {
                    let expected =
                        case.chosen(&logits.values()[token * case.experts..][..case.experts]);
                    assert!(
                        ids.iter().zip(expected).all(|(a, b)| *a == b as f64),
                        "{place}"
                    );
                }
                let weights = &weights[token * choices..][..choices];
                let is_bad = weights.iter().any(|weight| weight.is_nan());
                match token % 5 {
                    0 => assert!(is_bad, "{place}"),
                    4 => assert!(!is_bad, "{place}"),
                    _ => {}
                }
            }
        }
    }
}
