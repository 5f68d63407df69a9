//! Phases and layers as slices of time, nested if one interrupts another.

use memory::{History, Layer, MemoryChange, Phase, Place, Playback};

/// What a slice shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Track {
    /// The phase of the step.
    Phases,
    /// The layer of the model.
    Layers,
}

/// A stretch of time on a track, from one event to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slice {
    pub track: Track,
    pub place: Place,
    /// Whether it is a replay, which lies inside the slice that it interrupts.
    pub is_replay: bool,
    /// Number of its first event.
    pub start: usize,
    /// Number of its last event.
    pub end: usize,
}

impl Slice {
    pub(super) fn name(&self) -> String {
        match (self.track, self.is_replay) {
            (Track::Phases, _) => self.place.phase.name().to_string(),
            (Track::Layers, false) => self.place.layer.to_string(),
            (Track::Layers, true) => format!("{}, again", self.place.layer),
        }
    }

    /// Its start and end in seconds.
    pub(super) fn seconds(&self, playback: &Playback) -> (f64, f64) {
        let at_s = |event: usize| playback.instants[event].at_s;
        (at_s(self.start), at_s(self.end))
    }
}

/// The slices of both tracks, ordered by their starts, outer ones first.
///
/// A history records the new place, but not whether it was entered or returned to. It is a return if the place is the
/// one below on the stack. Between the blocks of a pass, the run returns to the whole model for no time, so a phase
/// lasts until the run enters another phase.
pub(super) fn slices(history: &History) -> Vec<Slice> {
    if history.events.is_empty() {
        return Vec::new();
    }
    let mut entered = vec![Place {
        phase: Phase::Load,
        layer: Layer::Whole,
    }];
    let mut tracks = Tracks::default();
    tracks.be_at(entered[0], 0);
    for (number, event) in history.events.iter().enumerate() {
        let place = match event.change {
            MemoryChange::Enter(place) => place,
            // Other steps were made in between.
            MemoryChange::BeginStep => {
                tracks.close_all(number.saturating_sub(1));
                continue;
            }
            _ => continue,
        };
        let is_return = entered.len() > 1 && entered[entered.len() - 2] == place;
        if is_return {
            entered.pop();
        } else {
            entered.push(place);
        }
        if is_return && place.layer == Layer::Whole {
            tracks.leave_layer(number);
        } else {
            tracks.be_at(place, number);
        }
    }
    tracks.close_all(history.events.len().saturating_sub(1));
    tracks.slices
}

/// A slice that has not ended.
#[derive(Clone, Copy)]
struct Open {
    index: usize,
    /// The event at which it ends unless it continues: the run has left its last layer.
    left: Option<usize>,
}

#[derive(Default)]
struct Tracks {
    slices: Vec<Slice>,
    /// For each track the open slice, and the replay inside it.
    open: [[Option<Open>; 2]; 2],
}

impl Tracks {
    /// Records that the run is at a place from an event on.
    fn be_at(&mut self, place: Place, event: usize) {
        let is_replay = place.phase == Phase::Recompute;
        for track in [Track::Phases, Track::Layers] {
            let open = self.open[track as usize][usize::from(is_replay)];
            let lasts = open.is_some_and(|open| {
                let of = self.slices[open.index].place;
                let same_layer = track == Track::Phases || of.layer == place.layer;
                of.phase == place.phase && same_layer
            });
            if !is_replay {
                self.close(track, true, event);
            }
            if lasts {
                let open = &mut self.open[track as usize][usize::from(is_replay)];
                open.iter_mut().for_each(|open| open.left = None);
                continue;
            }
            self.close(track, is_replay, event);
            if track == Track::Phases || place.layer != Layer::Whole {
                self.begin(track, place, is_replay, event);
            }
        }
    }

    fn begin(&mut self, track: Track, place: Place, is_replay: bool, event: usize) {
        let open = Open {
            index: self.slices.len(),
            left: None,
        };
        self.open[track as usize][usize::from(is_replay)] = Some(open);
        self.slices.push(Slice {
            track,
            place,
            is_replay,
            start: event,
            end: event,
        });
    }

    /// Records that the run is between layers.
    fn leave_layer(&mut self, event: usize) {
        for is_replay in [true, false] {
            self.close(Track::Layers, is_replay, event);
        }
        self.close(Track::Phases, true, event);
        if let Some(phase) = &mut self.open[Track::Phases as usize][0] {
            phase.left.get_or_insert(event);
        }
    }

    fn close(&mut self, track: Track, is_replay: bool, event: usize) {
        if let Some(open) = self.open[track as usize][usize::from(is_replay)].take() {
            self.slices[open.index].end = open.left.unwrap_or(event);
        }
    }

    fn close_all(&mut self, event: usize) {
        for track in [Track::Phases, Track::Layers] {
            self.close(track, true, event);
            self.close(track, false, event);
        }
    }
}
