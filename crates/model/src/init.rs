//! Fresh weights.

use crate::{Initial, Parameter, Parameters};
use files::CHUNK_ELEMENTS;
use memory::Layout;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal, StandardUniform};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// Hands every parameter's initial values to `set` in chunks: the first element's place in the arena, and the values. Each
/// tensor has a random stream of its own, so a seed gives the same weights on every machine, in whatever order tensors
/// are drawn.
///
/// # Errors
/// What `set` returns.
pub fn initialise<E>(
    parameters: &Parameters,
    layout: &Layout,
    init: Fresh,
    order: DrawingOrder,
    set: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let wanted = |_: &Parameter| true;
    initialise_some(parameters, layout, (init, order), wanted, set)
}

/// As [`initialise`], for the factors of adapters alone.
///
/// # Errors
/// What `set` returns.
pub fn initialise_factors<E>(
    parameters: &Parameters,
    layout: &Layout,
    init: Fresh,
    order: DrawingOrder,
    set: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let wanted = |parameter: &Parameter| parameter.is_factor;
    initialise_some(parameters, layout, (init, order), wanted, set)
}

fn initialise_some<E>(
    parameters: &Parameters,
    layout: &Layout,
    (init, order): (Fresh, DrawingOrder),
    wanted: impl Fn(&Parameter) -> bool,
    mut set: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let all = parameters.in_layout().zip(parameters.numbers());
    let mut tensors: Vec<Drawn> = all
        .zip(layout.entries())
        .filter(|((parameter, _), _)| wanted(parameter))
        .map(|((parameter, number), entry)| Drawn {
            values: (parameter.initial, parameter.stream(number)),
            elements: entry.range(),
        })
        .collect();
    let threads = match order {
        DrawingOrder::Layout => 1,
        DrawingOrder::Any => {
            // The largest first, or the last thread would draw it alone.
            tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.elements.len()));
            rayon::current_num_threads().clamp(1, tensors.len().max(1))
        }
    };
    // Small, since every thread holds one; below this size, the calls of `set` would take longer than the drawing.
    let elements = CHUNK_ELEMENTS / 4;
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (sender, chunks) = sync_channel(0);
        for _ in 0..threads {
            let (sender, next, tensors) = (sender.clone(), &next, &tensors);
            scope.spawn(move || {
                let mut room = DrawBuffers::of(elements);
                while let Some(tensor) = tensors.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if tensor.send(init, &mut room, &sender).is_none() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        // An error drops the receiver, which ends the threads.
        chunks
            .into_iter()
            .try_for_each(|chunk: Chunk| set(chunk.start, &chunk.values))
    })
}

/// The order in which tensors are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrawingOrder {
    /// Several threads draw, and chunks come as they are ready.
    Any,
    /// One thread draws the tensors as they lie in the arena. For values that go to a file through a buffer: in any
    /// other order, nearly every chunk would have the file read and written.
    Layout,
}

/// Values of one tensor, on their way from the thread that drew them.
struct Chunk {
    /// The first one's place in the arena.
    start: usize,
    values: Vec<f32>,
    back: Sender<Vec<f32>>,
}

impl Drop for Chunk {
    /// Gives the memory back, also after an error or a panic of `set`, because the thread waits for it. A thread that has ended
    /// needs it no more.
    fn drop(&mut self) {
        let _ = self.back.send(std::mem::take(&mut self.values));
    }
}

/// The memory in which a thread draws, so that it allocates once.
struct DrawBuffers {
    elements: usize,
    back: Sender<Vec<f32>>,
    returned: Receiver<Vec<f32>>,
}

impl DrawBuffers {
    fn of(elements: usize) -> DrawBuffers {
        let (back, returned) = channel();
        // The receiver is in this struct, so the room arrives.
        let _ = back.send(Vec::with_capacity(elements));
        DrawBuffers {
            elements,
            back,
            returned,
        }
    }
}

/// A tensor that is drawn: what from, with which stream of random numbers, and its elements in the arena.
struct Drawn {
    values: (Initial, u64),
    elements: Range<usize>,
}

impl Drawn {
    /// Draws all values, and sends them a chunk at a time; none if nobody receives them any more.
    fn send(&self, init: Fresh, room: &mut DrawBuffers, sender: &SyncSender<Chunk>) -> Option<()> {
        let mut values = init.values(self.values.0, self.values.1);
        for start in self.elements.clone().step_by(room.elements) {
            let mut chunk = room.returned.recv().ok()?;
            chunk.clear();
            let count = room.elements.min(self.elements.end - start);
            chunk.extend(values.by_ref().take(count));
            let back = room.back.clone();
            let chunk = Chunk {
                start,
                values: chunk,
                back,
            };
            sender.send(chunk).ok()?;
        }
        Some(())
    }
}

/// The distribution of fresh weights.
#[derive(Clone, Copy, Debug)]
pub struct Fresh {
    /// Standard deviation of matrices.
    pub deviation: f64,
    /// Seed of the random streams.
    pub seed: u64,
}

impl Fresh {
    /// The infinite sequence of values of a parameter that draws from this stream of random numbers. A model's
    /// parameters have streams by their places in the layout.
    pub fn values(self, initial: Initial, stream: u64) -> InitialValues {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(stream);
        InitialValues {
            random,
            deviation: self.deviation as f32,
            initial,
        }
    }
}

/// The infinite sequence of one parameter's initial values.
pub struct InitialValues {
    random: ChaCha8Rng,
    deviation: f32,
    initial: Initial,
}

impl InitialValues {
    fn normal(&mut self, deviation: f32) -> f32 {
        let value: f32 = StandardNormal.sample(&mut self.random);
        value * deviation
    }
}

impl Iterator for InitialValues {
    type Item = f32;

    fn next(&mut self) -> Option<f32> {
        Some(match self.initial {
            Initial::One => 1.0,
            Initial::Zero => 0.0,
            Initial::Normal => self.normal(self.deviation),
            Initial::NormalOf(deviation) => self.normal(deviation),
            Initial::Uniform(bound) => {
                let share: f32 = StandardUniform.sample(&mut self.random);
                (2.0 * share - 1.0) * bound
            }
            Initial::LogUniform([least, most]) => {
                let share: f32 = StandardUniform.sample(&mut self.random);
                (least + share * (most - least)).ln()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Architecture, Attention, ModelConfig};

    #[test]
    fn matrices_are_normal_and_vectors_plain() {
        let values = |initial, count: usize, index: u64, seed| -> Vec<f32> {
            let fresh = Fresh {
                deviation: 0.02,
                seed,
            };
            fresh.values(initial, index).take(count).collect()
        };
        let matrix = |index, seed| values(Initial::Normal, 20_000, index, seed);
        let (n, drawn) = (20_000.0, matrix(3, 7));
        let mean = drawn.iter().sum::<f32>() / n;
        let deviation = (drawn.iter().map(|value| value * value).sum::<f32>() / n).sqrt();
        assert!(
            mean.abs() < 6e-4 && (deviation - 0.02).abs() < 4e-4,
            "{mean} {deviation}"
        );
        assert_eq!(drawn, matrix(3, 7));
        assert_ne!(drawn, matrix(4, 7));
        assert_ne!(drawn, matrix(3, 8));
        let factor = values(Initial::Uniform(0.25), 20_000, 3, 7);
        let [least, most] = factor.iter().fold([0f32; 2], |[least, most], value| {
            [least.min(*value), most.max(*value)]
        });
        let mean = factor.iter().sum::<f32>() / n;
        assert!((-0.25..-0.2499).contains(&least) && (0.2499..0.25).contains(&most));
        assert!(mean.abs() < 3e-3, "{mean}");
        assert_eq!(values(Initial::NormalOf(0.02), 20_000, 3, 7), drawn);
        let decays = values(Initial::LogUniform([1.0, 4.0]), 20_000, 3, 7);
        let mean = decays.iter().map(|value| value.exp()).sum::<f32>() / n;
        assert!(decays.iter().all(|value| (0.0..=4f32.ln()).contains(value)));
        assert!((mean - 2.5).abs() < 0.02, "{mean}");
        assert_eq!(values(Initial::One, 2, 0, 7), [1.0, 1.0]);
        assert_eq!(values(Initial::Zero, 2, 0, 7), [0.0, 0.0]);
    }

    const FRESH: Fresh = Fresh {
        deviation: 0.02,
        seed: 1,
    };

    /// A model whose embedding takes several chunks.
    fn architecture() -> Architecture {
        let text = r#"{"hidden": 300, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "ffn": 8, "vocab": 2000}"#;
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        Architecture::of(&config, Attention::Eager)
    }

    #[test]
    fn an_error_ends_all_threads() {
        let architecture = architecture();
        let parameters = architecture.parameters;
        let mut calls = 0;
        let set = |_, _: &[f32]| {
            calls += 1;
            if calls < 3 { Ok(()) } else { Err("full") }
        };
        let layout = parameters.layout(|_, _| false);
        assert_eq!(
            initialise(&parameters, &layout, FRESH, DrawingOrder::Any, set),
            Err("full")
        );
        assert_eq!(calls, 3);
    }

    #[test]
    fn chunks_cover_every_parameter_once() {
        let architecture = architecture();
        let parameters = architecture.parameters;
        let layout = parameters.layout(|_, _| false);
        assert!(
            layout.entries()[0].elements() > 2 * CHUNK_ELEMENTS,
            "the embedding needs several chunks"
        );
        for order in [DrawingOrder::Any, DrawingOrder::Layout] {
            let mut filled = vec![f32::NAN; layout.elements()];
            let mut starts = Vec::new();
            let set = |offset: usize, values: &[f32]| -> Result<(), ()> {
                let room = &mut filled[offset..offset + values.len()];
                assert!(room.iter().all(|value| value.is_nan()));
                room.copy_from_slice(values);
                starts.push(offset);
                Ok(())
            };
            initialise(&parameters, &layout, FRESH, order, set).unwrap();
            if order == DrawingOrder::Layout {
                assert!(starts.is_sorted(), "{starts:?}");
            }
            let entries = layout.entries().iter().zip(parameters.in_layout());
            for (index, (entry, parameter)) in entries.enumerate() {
                let values = FRESH.values(parameter.initial, index as u64);
                let expected: Vec<f32> = values.take(entry.elements()).collect();
                assert_eq!(filled[entry.range()], expected);
            }
        }
    }
}
