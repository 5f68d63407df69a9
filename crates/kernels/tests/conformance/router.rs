//! Routers: choices, weights and their gradients, tables by expert, counts, and losses of balance.

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

/// A router and the losses that its gradient has.
#[derive(Clone, Debug)]
struct Router {
    /// Of the gradient of the logits.
    dtype: DType,
    tokens: usize,
    experts: usize,
    routing: Routing,
    has_bias: bool,
    /// Sequences of the loss of balance; 0: there is none.
    sequences: usize,
    z_loss: Option<f32>,
    /// All logits of a token are equal.
    is_tied: bool,
}

const PLAIN: Routing = Routing {
    choices: 2,
    score: RouterScore::Softmax,
    is_normed: true,
    factor: 1.0,
    groups: None,
};

impl Router {
    fn logits(&self) -> Host {
        let dims = [self.tokens, self.experts];
        let random = Host::random(DType::F32, dims, 3.0, 1);
        let tied = random.values();
        let first = (0..tied.len()).map(|at| tied[at / self.experts * self.experts]);
        match self.is_tied {
            true => Host::new(DType::F32, dims, first),
            false => random,
        }
    }

    fn bias(&self) -> Host {
        Host::random(DType::F32, [self.experts], 0.4, 2)
    }

    fn dweights(&self) -> Host {
        Host::random(DType::F32, [self.tokens, self.routing.choices], 1.0, 3)
    }

    fn balance(&self) -> Host {
        Host::random(DType::F32, [self.sequences.max(1), self.experts], 1.0, 4)
    }

    /// Scores, and what losses of balance see of them, in f64.
    fn scores(&self, logits: &Tensor) -> Result<[Tensor; 2]> {
        match self.routing.score {
            RouterScore::Softmax => {
                let scores = softmax(logits)?;
                Ok([scores.clone(), scores])
            }
            RouterScore::Sigmoid => {
                let scores = (logits.neg()?.exp()? + 1.0)?.recip()?;
                let seen = scores.broadcast_div(&scores.sum_keepdim(1)?)?;
                Ok([scores, seen])
            }
        }
    }

    /// The chosen experts of a token, in ascending order: the best by score, of equal ones the first.
    fn chosen(&self, choices: &[f64]) -> Vec<usize> {
        let best = |numbers: &[(usize, f64)], count: usize| -> Vec<usize> {
            let mut sorted = numbers.to_vec();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            sorted.into_iter().take(count).map(|(at, _)| at).collect()
        };
        let all: Vec<(usize, f64)> = choices.iter().copied().enumerate().collect();
        let mut open = all.clone();
        if let Some(groups) = self.routing.groups {
            let size = self.experts / groups.count;
            let rate = |(group, numbers): (usize, &[(usize, f64)])| {
                let best = best(numbers, groups.best);
                (group, best.iter().map(|at| choices[*at]).sum())
            };
            let rates: Vec<(usize, f64)> = all.chunks(size).enumerate().map(rate).collect();
            let chosen = best(&rates, groups.chosen);
            open.retain(|(at, _)| chosen.contains(&(at / size)));
        }
        let mut chosen = best(&open, self.routing.choices);
        chosen.sort_unstable();
        chosen
    }

    fn ids(&self) -> Vec<usize> {
        let logits = constant(&self.logits()).unwrap();
        let [scores, _] = self.scores(&logits).unwrap();
        let bias = match self.has_bias {
            true => self.bias().values(),
            false => vec![0.0; self.experts],
        };
        let rows = scores.to_vec2::<f64>().unwrap().into_iter();
        rows.flat_map(|row| {
            let choices: Vec<f64> = row.iter().zip(&bias).map(|(a, b)| a + b).collect();
            self.chosen(&choices)
        })
        .collect()
    }

    /// Values by token and expert, from those by token and choice.
    fn spread(&self, ids: &[usize], by_choice: &[f64]) -> Result<Tensor> {
        let mut spread = vec![0.0; self.tokens * self.experts];
        for (slot, id) in ids.iter().enumerate() {
            spread[slot / self.routing.choices * self.experts + id] = by_choice[slot];
        }
        let dims = (self.tokens, self.experts);
        Tensor::from_vec(spread, dims, &candle_core::Device::Cpu)
    }

    /// Weights by token and choice, scores as seen, losses by the size of logits, and the gradient of the logits.
    fn oracle(&self, ids: &[usize]) -> Result<[Vec<f64>; 4]> {
        let logits = variable(&self.logits())?;
        let [scores, seen] = self.scores(&logits)?;
        let mask = self.spread(ids, &vec![1.0; ids.len()])?;
        let mut weights = (scores * &mask)?;
        if self.routing.is_normed {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        let weights = (weights * f64::from(self.routing.factor))?;
        let dweights = self.spread(ids, &self.dweights().values())?;
        let mut loss = (&weights * dweights)?.sum_all()?;
        if self.sequences > 0 {
            let seq = self.tokens / self.sequences;
            let rows: Vec<u32> = (0..self.tokens).map(|token| (token / seq) as u32).collect();
            let rows = Tensor::from_vec(rows, self.tokens, &candle_core::Device::Cpu)?;
            let gradient = constant(&self.balance())?.index_select(&rows, 0)?;
            loss = (loss + (&seen * gradient)?.sum_all()?)?;
        }
        let largest = logits.max_keepdim(1)?.detach();
        let sums = logits.broadcast_sub(&largest)?.exp()?.sum_keepdim(1)?;
        let of_all = ((sums.log()? + largest)?.sqr()? * f64::from(self.z_loss.unwrap_or(0.5)))?;
        if self.z_loss.is_some() {
            loss = (loss + of_all.sum_all()?)?;
        }
        let one = loss.ones_like()?;
        let dlogits = gradients(&loss, &one, &[&logits])?.remove(0);
        let all = values(&weights)?;
        let of_choice =
            |(slot, id): (usize, &usize)| all[slot / self.routing.choices * self.experts + id];
        let weights = ids.iter().enumerate().map(of_choice).collect();
        Ok([weights, values(&seen)?, values(&of_all)?, dlogits])
    }
}

impl Case for Router {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let chosen = [self.tokens, self.routing.choices];
        let [mut weights, mut scores] =
            [chosen, [self.tokens, self.experts]].map(|dims| device.room(DType::F32, dims));
        let mut ids = device.room(DType::I32, chosen);
        let mut losses = device.room(DType::F32, [self.tokens]);
        let mut dlogits = device.room(self.dtype, [self.tokens, self.experts]);
        let hosts = [self.logits(), self.bias(), self.dweights(), self.balance()];
        let [logits, bias, dweights, balance] = hosts.map(|host| device.put(&host));
        device.kernels.run(Route {
            ids: Some(ids.view_mut()),
            weights: Some(weights.view_mut()),
            scores: Some(scores.view_mut()),
            logits: logits.view(),
            bias: self.has_bias.then(|| bias.view()),
            routing: self.routing,
        })?;
        device.kernels.run(RouterZLoss {
            losses: losses.view_mut(),
            logits: logits.view(),
            factor: self.z_loss.unwrap_or(0.5),
        })?;
        device.kernels.run(RouteBackward {
            dlogits: dlogits.view_mut(),
            dweights: dweights.view(),
            logits: logits.view(),
            ids: ids.view(),
            routing: self.routing,
            balance: (self.sequences > 0).then(|| balance.view()),
            z_loss: self.z_loss,
        })?;
        let outputs = [&ids, &weights, &scores, &losses, &dlogits];
        Ok(outputs.map(|tensor| device.take(tensor)).into())
    }

    fn expected(&self) -> Vec<Expected> {
        let ids = self.ids();
        let [weights, scores, losses, dlogits] = self.oracle(&ids).unwrap();
        let ids = ids.into_iter().map(|id| id as f64).collect();
        vec![
            Expected::new("ids", ids, Rule::Exact),
            Expected::new("weights", weights, Rule::Standard),
            Expected::new("scores", scores, Rule::Standard),
            Expected::new("z losses", losses, Rule::Standard),
            Expected::new("dlogits", dlogits, Rule::Standard).with_terms(1.0),
        ]
    }
}

/// Tables, counts and the loss of balance of given choices.
#[derive(Debug)]
struct Tables {
    /// Ids of all tokens, ascending in each.
    ids: Vec<usize>,
    choices: usize,
    experts: usize,
    sequences: usize,
    pooled: usize,
    start: Start,
}

impl Tables {
    /// Choices of random tokens, of which none takes the expert that is left out.
    fn random([tokens, choices, experts]: [usize; 3], without: Option<usize>) -> Tables {
        let mut ids = Vec::new();
        for token in 0..tokens {
            let open: Vec<usize> = (0..experts)
                .filter(|expert| Some(*expert) != without)
                .collect();
            let order = Host::random(DType::F32, [open.len()], 1.0, 50 + token as u64).values();
            let mut sorted: Vec<usize> = (0..open.len()).collect();
            sorted.sort_by(|a, b| order[*a].total_cmp(&order[*b]));
            let mut chosen: Vec<usize> = sorted[..choices].iter().map(|at| open[*at]).collect();
            chosen.sort_unstable();
            ids.extend(chosen);
        }
        Tables {
            ids,
            choices,
            experts,
            sequences: 1,
            pooled: 1,
            start: Start::Overwrite,
        }
    }

    fn counts(&self) -> Vec<f64> {
        let of_sequence = self.ids.len() / self.sequences;
        let mut counts = vec![0.0; self.sequences * self.experts];
        for (slot, id) in self.ids.iter().enumerate() {
            counts[slot / of_sequence * self.experts + id] += 1.0;
        }
        counts
    }

    fn sums(&self) -> Host {
        Host::random(DType::F32, [self.sequences, self.experts], 1.0, 5)
    }
}

const FACTOR: f32 = 0.3;

impl Case for Tables {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let tokens = self.ids.len() / self.choices;
        let slots = [tokens, self.choices];
        let ids = self.ids.iter().map(|id| *id as f64);
        let ids = device.put(&Host::new(DType::I32, slots, ids));
        let mut offsets = device.room(DType::I32, [self.experts + 1]);
        let [mut row_token, mut row_slot] =
            [(); 2].map(|()| device.room(DType::I32, [self.ids.len()]));
        let mut slot_row = device.room(DType::I32, slots);
        device.kernels.run(GroupByExpert {
            offsets: Some(offsets.view_mut()),
            row_token: Some(row_token.view_mut()),
            row_slot: Some(row_slot.view_mut()),
            slot_row: Some(slot_row.view_mut()),
            ids: ids.view(),
            experts: self.experts,
        })?;
        let by_sequence = [self.sequences, self.experts];
        let [mut counts, mut gradient] = [(); 2].map(|()| device.room(DType::F32, by_sequence));
        device.kernels.run(CountChoices {
            counts: counts.view_mut(),
            ids: ids.view(),
        })?;
        let earlier = Host::new(DType::F32, [1], [2.0]);
        let mut loss = device.start(self.start, &earlier);
        let (sums, earlier) = (device.put(&self.sums()), device.put(&earlier));
        device.kernels.run(BalanceLoss {
            loss: loss.view_mut(),
            gradient: gradient.view_mut(),
            counts: counts.view(),
            sums: sums.view(),
            pooled: self.pooled,
            factor: FACTOR,
            init: self.start.init(&earlier),
        })?;
        let outputs = [
            &offsets, &row_token, &row_slot, &slot_row, &counts, &loss, &gradient,
        ];
        Ok(outputs.map(|tensor| device.take(tensor)).into())
    }

    fn expected(&self) -> Vec<Expected> {
        let mut rows: Vec<usize> = (0..self.ids.len()).collect();
        rows.sort_by_key(|slot| (self.ids[*slot], *slot));
        let before = |expert| self.ids.iter().filter(|id| **id < expert).count() as f64;
        let mut slot_row = vec![0.0; rows.len()];
        rows.iter()
            .enumerate()
            .for_each(|(row, slot)| slot_row[*slot] = row as f64);
        let (counts, sums) = (self.counts(), self.sums().values());
        let group = self.pooled * self.experts;
        let pool = |of: &[f64], place: usize| -> f64 {
            let first = place / group * group;
            let of_group = of[first..first + group].iter();
            of_group
                .skip(place % self.experts)
                .step_by(self.experts)
                .sum()
        };
        let factor = f64::from(FACTOR);
        let firsts = (0..counts.len()).filter(|place| place % group < self.experts);
        let loss: f64 = firsts
            .map(|place| pool(&counts, place) * pool(&sums, place))
            .sum();
        let earlier = if self.start == Start::Overwrite {
            0.0
        } else {
            2.0
        };
        let gradient = (0..counts.len()).map(|place| factor * pool(&counts, place));
        let tokens = rows.iter().map(|slot| (slot / self.choices) as f64);
        let exact = |name, values| Expected::new(name, values, Rule::Exact);
        vec![
            exact("offsets", (0..=self.experts).map(before).collect()),
            exact("row_token", tokens.collect()),
            exact("row_slot", rows.iter().map(|slot| *slot as f64).collect()),
            exact("slot_row", slot_row),
            exact("counts", counts.clone()),
            Expected::new("loss", vec![factor * loss + earlier], Rule::Standard),
            Expected::new("gradient", gradient.collect(), Rule::Standard),
        ]
    }
}

/// Routers of every family, and at the ends of what there may be.
fn routers(dtype: DType) -> Vec<Router> {
    let groups = |count, chosen, best| RouterGroups {
        count,
        chosen,
        best,
    };
    let plain = Router {
        dtype,
        tokens: 37,
        experts: 8,
        routing: PLAIN,
        has_bias: false,
        sequences: 0,
        z_loss: None,
        is_tied: false,
    };
    let with = |tokens, experts, routing: Routing| Router {
        tokens,
        experts,
        routing,
        ..plain.clone()
    };
    let sigmoid = Routing {
        score: RouterScore::Sigmoid,
        factor: 2.5,
        ..PLAIN
    };
    let all = |choices| Routing { choices, ..PLAIN };
    let mut routers = vec![
        plain.clone(),
        // The gate of shared experts, all experts chosen, and more experts than lanes of a warp.
        with(
            5,
            1,
            Routing {
                choices: 1,
                is_normed: false,
                ..sigmoid
            },
        ),
        with(9, 5, all(5)),
        with(
            11,
            131,
            Routing {
                choices: 8,
                is_normed: false,
                ..PLAIN
            },
        ),
        with(
            3,
            512,
            Routing {
                choices: 12,
                ..sigmoid
            },
        ),
        with(
            21,
            24,
            Routing {
                choices: 3,
                is_normed: false,
                factor: 16.0,
                groups: Some(groups(4, 2, 1)),
                ..PLAIN
            },
        ),
        with(
            21,
            64,
            Routing {
                choices: 8,
                groups: Some(groups(8, 4, 2)),
                ..sigmoid
            },
        ),
        with(
            4,
            96,
            Routing {
                choices: 6,
                groups: Some(groups(48, 7, 2)),
                ..sigmoid
            },
        ),
    ];
    let more: Vec<Router> = routers
        .iter()
        .map(|router| Router {
            has_bias: true,
            sequences: if router.tokens % 3 == 0 { 3 } else { 1 },
            z_loss: Some(0.3),
            ..router.clone()
        })
        .collect();
    let tied = routers.iter().map(|router| Router {
        is_tied: true,
        ..router.clone()
    });
    let tied: Vec<Router> = tied.collect();
    routers.extend(more);
    routers.extend(tied);
    routers
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for router in routers(dtype) {
        cases.push(Box::new(router));
    }
    // More rows than a block of threads takes at a time.
    for (sizes, without) in [
        ([1, 1, 1], None),
        ([6, 2, 5], Some(4)),
        ([300, 2, 7], Some(0)),
        ([150, 8, 131], None),
    ] {
        cases.push(Box::new(Tables::random(sizes, without)));
        cases.push(Box::new(Tables {
            ids: (0..sizes[0]).flat_map(|_| 0..sizes[1]).collect(),
            sequences: if sizes[0] % 3 == 0 { 3 } else { 1 },
            start: Start::Accumulate,
            ..Tables::random(sizes, without)
        }));
    }
    for pooled in [1, 2, 6] {
        cases.push(Box::new(Tables {
            sequences: 6,
            pooled,
            ..Tables::random([12, 3, 300], None)
        }));
    }
    cases
}

/// A token of which nothing is known goes to as many experts as any other.
#[test]
fn logits_that_are_no_numbers_give_distinct_experts() {
    for device in computing(DType::F32) {
        for routing in [
            PLAIN,
            Routing {
                choices: 4,
                score: RouterScore::Sigmoid,
                groups: Some(RouterGroups {
                    count: 4,
                    chosen: 2,
                    best: 2,
                }),
                ..PLAIN
            },
        ] {
            let mut logits = Host::random(DType::F32, [3, 8], 1.0, 1).values();
            logits[3] = f64::NAN;
            logits[8..16].fill(f64::NAN);
            logits[16..22].fill(f64::NEG_INFINITY);
            let logits = device.put(&Host::new(DType::F32, [3, 8], logits));
            let mut ids = device.room(DType::I32, [3, routing.choices]);
            let route = Route {
                ids: Some(ids.view_mut()),
                weights: None,
                scores: None,
                logits: logits.view(),
                bias: None,
                routing,
            };
            device.kernels.run(route).unwrap();
            for ids in device.take(&ids).values().chunks(routing.choices) {
                let are_ascending = ids.is_sorted_by(|one, next| one < next);
                let are_experts = ids.iter().all(|id| (0.0..8.0).contains(id));
                assert!(are_ascending && are_experts, "{}: {ids:?}", device.name);
            }
        }
    }
}

#[test]
fn what_is_left_out_changes_no_bit_of_the_rest() {
    for device in computing(DType::F32) {
        let router = &routers(DType::F32)[6];
        let logits = device.put(&router.logits());
        let route = |wanted: [bool; 3]| {
            let dims = [
                router.routing.choices,
                router.routing.choices,
                router.experts,
            ];
            let types = [DType::I32, DType::F32, DType::F32];
            let mut outputs = [0, 1, 2]
                .map(|at| wanted[at].then(|| device.room(types[at], [router.tokens, dims[at]])));
            let [ids, weights, scores] = outputs
                .each_mut()
                .map(|output| output.as_mut().map(|output| output.view_mut()));
            let route = Route {
                ids,
                weights,
                scores,
                logits: logits.view(),
                bias: None,
                routing: router.routing,
            };
            device.kernels.run(route).unwrap();
            outputs.map(|output| output.map(|output| device.take(&output)))
        };
        let all = route([true; 3]);
        for at in 0..3 {
            let alone = route([0, 1, 2].map(|other| other == at));
            assert!(alone[at] == all[at], "{}: output {at}", device.name);
        }
    }
}

/// A bias moves by the rate towards the mean, and not at all in a step that is skipped.
#[test]
fn biases_move_towards_the_mean_load() {
    for device in computing(DType::F32) {
        let moved = |factor: f64| {
            let counts = device.put(&Host::new(DType::F32, [4], [2.0, 6.0, 4.0, 4.0]));
            let clip = device.put(&Host::new(DType::F32, [2], [1.0, factor]));
            let mut bias = device.put(&Host::new(DType::F32, [4], [1.0, 1.0, 1.0, 1.0]));
            let step = StepRouterBias {
                bias: bias.view_mut(),
                counts: counts.view(),
                clip: clip.view(),
                rate: 0.25,
            };
            device.kernels.run(step).unwrap();
            device.take(&bias).values()
        };
        assert_eq!(moved(1.0), [1.25, 0.75, 1.0, 1.0], "{}", device.name);
        assert_eq!(moved(f64::NAN), [1.0; 4], "{}", device.name);
    }
}
