//! Exchanges between ranks that are threads of this process: what orders them, what counts them, and how they fail.

#[cfg(feature = "cuda")]
mod cuda_device;
mod step;

use collectives::{Alone, Group};
use emulation::Emulation;
use fakes::Threads;
use fakes::scheduled::Scheduled;
use kernels::cpu::Cpu;
use kernels::cuda::Cuda;
use kernels::meta::{FlopCounter, Meta};
use kernels::timeline::{Rates, Timeline};
use kernels::{
    Event, Exchange, ExchangeBytes, Fault, Fill, KernelError, Kernels, Queue, Target, Traffic,
};
use memory::{DType, Memory};
use std::sync::Arc;
use std::time::Duration;
use step::{ENDS, REASONS, SEEN, SIZE, Step, lease, on_ranks, rounds, sent_bytes};

fn cpu(memory: &Memory, group: &Arc<dyn Group>) -> Kernels<Cpu> {
    Cpu::in_group(memory, DType::F32, group.clone()).unwrap()
}

fn emulated(memory: &Memory, group: &Arc<dyn Group>) -> Kernels<Cuda<Emulation>> {
    let group = Some(group.clone());
    Cuda::new(Emulation { group }, memory, DType::F32).unwrap()
}

#[test]
fn ranks_exchange_and_count_what_they_send() {
    type Device = fn(&Memory, &Arc<dyn Group>) -> Box<Kernels>;
    let devices: [Device; 2] = [
        |memory, group| Box::new(cpu(memory, group)),
        |memory, group| Box::new(emulated(memory, group)),
    ];
    for device in devices {
        on_ranks(Threads::group(ENDS.len()), |group| {
            let memory = Memory::host();
            let kernels = device(&memory, &group);
            let rank = group.rank();
            assert_eq!(rounds(&*kernels, &memory, rank).unwrap(), [SEEN; SIZE]);
            let sent = kernels.traffic().sent_bytes;
            assert_eq!([sent, group.sent_bytes()], [sent_bytes(rank); 2], "{rank}");

            let paper = Memory::shapes();
            let meta = Meta::new(&paper, Target::Cpu, DType::F32, FlopCounter::default());
            let meta = meta.unwrap().of_rank(rank);
            rounds(&meta, &paper, rank).unwrap();
            assert_eq!(meta.traffic(), kernels.traffic());
        });
    }
}

#[test]
fn every_schedule_keeps_the_order_and_none_does_without_one_of_the_waits() {
    let are_wrong = |seed: u64, ignored: Option<&'static str>| {
        let ranks = on_ranks(Threads::group(ENDS.len()), |group| {
            let memory = Memory::host();
            let seed = seed * ENDS.len() as u64 + group.rank() as u64;
            let kernels = Scheduled::new(cpu(&memory, &group), seed, ignored);
            rounds(&kernels, &memory, group.rank()).unwrap() != [SEEN; SIZE]
        });
        ranks.contains(&true)
    };
    for seed in 0..20 {
        assert!(!are_wrong(seed, None), "seed {seed}");
    }
    for reason in REASONS {
        let found = (0..20).any(|seed| are_wrong(seed, Some(reason)));
        assert!(found, "nothing needs `{reason}`");
    }
}

/// On the device that runs ahead, every queue under a schedule.
#[test]
fn launches_keep_the_order_under_every_schedule() {
    for seed in 0..6 {
        on_ranks(Threads::group(ENDS.len()), |group| {
            let (memory, rank) = (Memory::host(), group.rank());
            let kernels = Scheduled::new(emulated(&memory, &group), seed, None);
            assert_eq!(rounds(&kernels, &memory, rank).unwrap(), [SEEN; SIZE]);
        });
    }
}

/// Whichever exchange it is that another rank does not make: everything that is asked for later is refused with the reason,
/// and nobody waits for ever.
#[test]
fn an_exchange_that_fails_is_told_by_every_later_call() {
    let devices: [fn(Kernels<Cpu>) -> Box<Kernels>; 3] = [
        |cpu| Box::new(cpu),
        |cpu| Box::new(Scheduled::new(cpu, 1, None)),
        |cpu| Box::new(Scheduled::new(cpu, 2, None)),
    ];
    // All at once, since most of it is waiting.
    std::thread::scope(|scope| {
        for device in devices {
            scope.spawn(move || {
                fails_without_rank_2(device, true, "rank 2 ended the job with code 3");
                fails_without_rank_2(device, false, "rank 2");
            });
        }
    });
}

/// Rank 2 makes one round, and then leaves the others, or ends the job. They wait for it so long that they do not miss each
/// other, however busy the machine is.
fn fails_without_rank_2(device: fn(Kernels<Cpu>) -> Box<Kernels>, ends: bool, says: &str) {
    let groups = Threads::with_deadline(ENDS.len(), Duration::from_secs(2));
    on_ranks(groups, |group| {
        let memory = Memory::host();
        let kernels = device(cpu(&memory, &group));
        let mut step = Step::new(&*kernels, &memory, group.rank());
        if group.rank() == 2 {
            step.round(&*kernels).unwrap();
            kernels
                .finish(kernels.record(Queue::Collective).unwrap())
                .unwrap();
            if ends {
                group.abort(3);
            }
            return;
        }
        let failed = rounds(&*kernels, &memory, group.rank()).unwrap_err();
        assert_eq!(
            (failed.operation, failed.fault),
            ("exchange", Fault::Collective)
        );
        assert!(failed.message.contains(says), "{failed}");
        assert_refused(&*kernels, &mut step, &failed);
    });
}

/// Everything that is asked for fails as something before did.
fn assert_refused(kernels: &Kernels, step: &mut Step, failed: &KernelError) {
    for queue in Queue::ALL {
        assert_eq!(kernels.record(queue).unwrap_err(), *failed);
    }
    assert_eq!(kernels.finish(Event::PAST).unwrap_err(), *failed);
    let waited = kernels.wait(Queue::Compute, Event::PAST, "nothing");
    assert_eq!(waited.unwrap_err(), *failed);
    let sent = kernels.traffic();
    assert_eq!(step.reduce(kernels).unwrap_err(), *failed);
    assert_eq!(kernels.traffic(), sent, "what is refused is not sent");
    let download = kernels.download(&mut [0; SIZE * 4], step.numbers.view());
    assert_eq!(download.unwrap_err(), *failed);
}

#[test]
fn what_does_not_fit_is_refused_when_it_is_asked_for() {
    let memory = Memory::host();
    let (x, mut out) = (lease(&memory, 12), lease(&memory, 12));
    let group: Arc<dyn Group> = Arc::new(Alone);
    let devices: [Box<Kernels>; 3] = [
        Box::new(cpu(&memory, &group)),
        Box::new(Scheduled::new(cpu(&memory, &group), 1, None)),
        Box::new(emulated(&memory, &group)),
    ];
    for kernels in &devices {
        let refused = |exchange: Exchange| {
            // SAFETY: nothing is started.
            let refused = unsafe { kernels.start_exchange(exchange) }.unwrap_err();
            assert_eq!(
                (refused.operation, refused.fault),
                ("exchange", Fault::Caller)
            );
            refused.message
        };
        let strided = x.view().reshape([3, 4]).t();
        let said = refused(Exchange {
            sends: vec![(0, strided)],
            receives: vec![(0, out.view_mut())],
        });
        assert!(said.contains("strided"), "{said}");
        let said = refused(Exchange {
            sends: vec![(0, x.view().rows(0..5)), (0, x.view().rows(5..7))],
            receives: vec![(0, out.view_mut().rows(0..7))],
        });
        assert!(said.contains("[20, 8]") && said.contains("[28]"), "{said}");
    }
    assert!(
        devices
            .iter()
            .all(|kernels| kernels.traffic() == Traffic::default())
    );
}

/// Under a schedule when the exchange runs, which nobody but the group below knows.
#[test]
fn ranks_that_are_not_there_are_refused() {
    let memory = Memory::host();
    let x = lease(&memory, 12);
    let group: Arc<dyn Group> = Arc::new(Alone);
    let in_group = || cpu(&memory, &group);
    let without = || Cpu::new(&memory, DType::F32).unwrap();
    let alone = Emulation::default();
    let cases: [(Box<Kernels>, usize, &str); 5] = [
        (Box::new(in_group()), 3, "there is no rank 3"),
        (Box::new(emulated(&memory, &group)), 3, "there is no rank 3"),
        (
            Box::new(Scheduled::new(in_group(), 1, None)),
            3,
            "there is no rank 3",
        ),
        (Box::new(without()), 1, "without a group"),
        (
            Box::new(Cuda::new(alone, &memory, DType::F32).unwrap()),
            1,
            "without a group",
        ),
    ];
    for (kernels, to, says) in cases {
        let exchange = Exchange {
            sends: vec![(to, x.view())],
            receives: Vec::new(),
        };
        // SAFETY: `x` lives to the end.
        let refused = unsafe { kernels.start_exchange(exchange) };
        let refused = refused.and_then(|()| kernels.finish(kernels.record(Queue::Collective)?));
        let refused = refused.unwrap_err();
        assert_eq!(
            (refused.operation, refused.fault),
            ("exchange", Fault::Caller)
        );
        assert!(refused.message.contains(says), "{refused}");
    }
}

/// A group of one sends nothing and copies.
#[test]
fn a_group_of_one_copies() {
    let memory = Memory::host();
    let group: Arc<dyn Group> = Arc::new(Alone);
    let kernels = cpu(&memory, &group);
    let (mut x, mut out) = (lease(&memory, 12), lease(&memory, 12));
    let (filled, value) = (x.view_mut(), 2.5);
    kernels.run(Fill { out: filled, value }).unwrap();
    let exchange = Exchange {
        sends: vec![(0, x.view().rows(0..5)), (0, x.view().rows(5..12))],
        receives: vec![],
    };
    let (first, second) = out.view_mut().split_at(5);
    let exchange = Exchange {
        receives: vec![(0, first), (0, second)],
        ..exchange
    };
    // SAFETY: both live until the event is over.
    unsafe { kernels.start_exchange(exchange) }.unwrap();
    let copied = kernels.record(Queue::Collective).unwrap();
    kernels.finish(copied).unwrap();
    assert_eq!(out.view().slice::<f32>(), [2.5; 12]);
    assert_eq!(kernels.traffic().sent_bytes, 0);
}

/// On paper an exchange takes as long as the longer way, beside everything else.
#[test]
fn exchanges_take_time_on_paper() {
    let rates = Rates {
        flops: 1.0,
        grouped_flops: 1.0,
        attention_flops: [1.0; 2],
        delta_flops: 1.0,
        memory: 1.0,
        upload: 1.0,
        download: 1.0,
        both_ways: 1.0,
        disk: 1.0,
        link: 100.0,
        near_link: 200.0,
        near_ranks: 8,
    };
    let (memory, timeline) = (Memory::shapes(), Timeline::new(rates));
    let meta = Meta::new(&memory, Target::Cuda, DType::F32, FlopCounter::default());
    let meta = meta.unwrap().of_rank(1).on(&timeline);
    let (x, mut out) = (lease(&memory, 100), lease(&memory, 400));
    let (own, other) = out.view_mut().split_at(100);
    let exchange = Exchange {
        sends: vec![(0, x.view().rows(0..50)), (1, x.view())],
        receives: vec![(1, own), (0, other)],
    };
    timeline.keep_spans();
    // SAFETY: on shapes nothing runs.
    unsafe { meta.start_exchange(exchange) }.unwrap();
    assert_eq!(timeline.computed().with_copies, 0.0);
    let came = meta.record(Queue::Collective).unwrap();
    meta.wait(Queue::Compute, came, "pieces").unwrap();
    assert_eq!(timeline.computed().with_copies, 12.0);
    assert_eq!(timeline.computed().without_copies, 0.0);
    assert_eq!(meta.traffic().sent_bytes, 200);
    for (ranks, seconds) in [(8, 2.0), (4, 2.0), (6, 4.0), (16, 4.0)] {
        let before = timeline.computed().with_copies;
        let bytes = ExchangeBytes::both_ways(400).among(ranks);
        // SAFETY: as above.
        unsafe { meta.start_exchange_of(bytes, Box::new(|| unreachable!("it is counted"))) }
            .unwrap();
        let came = meta.record(Queue::Collective).unwrap();
        meta.wait(Queue::Compute, came, "pieces").unwrap();
        let took = timeline.computed().with_copies - before;
        assert_eq!(took, seconds, "among {ranks} neighbours");
    }
    let spans = timeline.take_spans();
    let span = spans.first().map(|span| (span.queue, span.name));
    assert_eq!(span, Some((Queue::Collective, "exchange")));
}

/// Pieces are listed where they move, and then they have the bytes that were said; a plan counts those.
#[test]
fn pieces_are_listed_where_they_move() {
    let memory = Memory::shapes();
    let meta = Meta::new(&memory, Target::Cpu, DType::F32, FlopCounter::default()).unwrap();
    let said = ExchangeBytes::new(12, 8);
    let nobody = || panic!("a plan lists no pieces");
    // SAFETY: nothing moves.
    unsafe { meta.start_exchange_of(said, Box::new(nobody)) }.unwrap();
    assert_eq!(meta.traffic().sent_bytes, 12);

    let memory = Memory::host();
    let alone: Arc<dyn Group> = Arc::new(Alone);
    let cpu = cpu(&memory, &alone);
    let nothing = || Exchange {
        sends: Vec::new(),
        receives: Vec::new(),
    };
    let none = ExchangeBytes::both_ways(0);
    // SAFETY: there are no pieces.
    unsafe { cpu.start_exchange_of(none, Box::new(nothing)) }.unwrap();
    // SAFETY: as above.
    let refused = unsafe { cpu.start_exchange_of(said, Box::new(nothing)) }.unwrap_err();
    assert!(refused.to_string().contains("sent: 12"), "{refused}");
}
