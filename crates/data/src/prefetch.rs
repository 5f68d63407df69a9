//! Reads ahead, so that a training step does not wait for the disk.

use std::{
    sync::mpsc::{Receiver, TryRecvError, sync_channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{Batches, DataError, Position, Result, StepBatch};

/// A step or an error, and the position after it.
type Read = (Result<StepBatch>, Position);

/// Steps from a thread that reads ahead. They are the same steps, errors and positions as those of the [`Batches`] that
/// it reads. Dropping it stops the thread.
#[derive(Debug)]
pub struct Prefetched {
    position: Position,
    waited: Duration,
    steps: Option<Receiver<Read>>, // none only while being dropped
    reader: Option<JoinHandle<()>>,
    /// Why the thread has ended, if the channel is closed.
    stopped: String,
}

/// Reads the steps of `batches` ahead in a thread, which keeps up to `depth` of them ready, and one more in work.
pub fn prefetch(mut batches: Batches, depth: usize) -> Prefetched {
    let start = batches.position();
    read_ahead(start, depth, move || {
        let step = batches.next_step();
        (step, batches.position())
    })
}

fn read_ahead(
    position: Position,
    depth: usize,
    mut read: impl FnMut() -> Read + Send + 'static,
) -> Prefetched {
    let (sender, steps) = sync_channel(depth);
    let spawned = thread::Builder::new()
        .name("data-prefetch".to_owned())
        // An error does not end the thread: it is read again, as without a thread.
        .spawn(move || while sender.send(read()).is_ok() {});
    let (reader, stopped) = match spawned {
        Ok(reader) => (Some(reader), "panicked".to_owned()),
        Err(error) => (None, format!("could not be started ({error})")),
    };
    Prefetched {
        position,
        waited: Duration::ZERO,
        steps: Some(steps),
        reader,
        stopped,
    }
}

impl Prefetched {
    /// The position of the step that [`Self::next_step`] returns next, however far the thread has read ahead: the
    /// position to save.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Returns the next step, and waits for it if it is not ready.
    ///
    /// # Errors
    ///
    /// The errors of [`Batches::next_step`], at the same step, and an error if there is no thread.
    pub fn next_step(&mut self) -> Result<StepBatch> {
        let read = self.receive();
        let (step, position) = read.ok_or_else(|| {
            DataError::Unusable(format!(
                "the thread that reads data ahead {}; run again, and report it if it recurs",
                self.stopped
            ))
        })?;
        self.position = position;
        step
    }

    fn receive(&mut self) -> Option<Read> {
        let steps = self.steps.as_ref()?;
        self.waited = Duration::ZERO;
        match steps.try_recv() {
            Err(TryRecvError::Empty) => {
                let start = Instant::now();
                let read = steps.recv().ok();
                self.waited = start.elapsed();
                read
            }
            read => read.ok(),
        }
    }

    /// How long the last [`Self::next_step`] waited: exactly zero if the step was ready.
    pub fn data_wait(&self) -> Duration {
        self.waited
    }
}

impl Drop for Prefetched {
    fn drop(&mut self) {
        // Closes the channel. The thread's next send fails, and it ends.
        self.steps = None;
        if let Some(reader) = self.reader.take() {
            // A panic was already printed by the thread, and reported by `next_step`.
            let _ = reader.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn no_step() -> Read {
        (
            Err(DataError::Zero { key: "test" }),
            Position { epoch: 3, index: 1 },
        )
    }

    #[test]
    fn reads_depth_steps_ahead_and_no_more() {
        let (saw, reads) = mpsc::channel();
        let mut steps = read_ahead(Position::default(), 2, move || {
            saw.send(()).unwrap();
            no_step()
        });
        for _ in 0..3 {
            reads
                .recv_timeout(PATIENCE)
                .expect("two held ready, one in hand");
        }
        assert!(reads.recv_timeout(Duration::from_millis(50)).is_err());
        assert_eq!(steps.position(), Position::default());
        steps.next_step().unwrap_err();
        reads.recv_timeout(PATIENCE).expect("room for one more");
        assert_eq!(steps.position(), Position { epoch: 3, index: 1 });
    }

    #[test]
    fn a_step_that_lies_ready_is_not_waited_for_and_one_that_does_not_is() {
        let (saw, reads) = mpsc::channel();
        let mut steps = read_ahead(Position::default(), 1, move || {
            let _ = saw.send(());
            no_step()
        });
        reads.recv_timeout(PATIENCE).expect("the first");
        reads
            .recv_timeout(PATIENCE)
            .expect("begun once the first lay ready");
        steps.next_step().unwrap_err();
        assert_eq!(steps.data_wait(), Duration::ZERO);

        let mut slow = read_ahead(Position::default(), 0, || {
            thread::sleep(Duration::from_millis(1));
            no_step()
        });
        let waited = (0..1000).any(|_| {
            slow.next_step().unwrap_err();
            slow.data_wait() > Duration::ZERO
        });
        assert!(waited);
    }

    #[test]
    fn dropping_stops_the_thread() {
        let (alive, ended) = mpsc::channel::<()>();
        let steps = read_ahead(Position::default(), 1, move || {
            let _held = &alive;
            no_step()
        });
        thread::spawn(move || drop(steps));
        // Disconnected rather than timed out, because the thread has dropped its end.
        let seen = ended.recv_timeout(PATIENCE);
        assert_eq!(seen, Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn a_panicking_reader_is_an_error_not_a_hang() {
        let mut steps = read_ahead(Position::default(), 1, || panic!("on purpose"));
        let message = steps.next_step().unwrap_err().to_string();
        assert!(message.contains("panicked"), "{message}");
    }
}
