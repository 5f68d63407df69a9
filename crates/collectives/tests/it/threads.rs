//! Groups of threads, and a group of one rank.

use crate::rules::{self, comes, goes};
use collectives::{Alone, Group, GroupError};
use fakes::Threads;
use std::sync::Arc;
use std::time::Duration;

/// Runs `of` on each rank of a group: the results by rank.
fn each<T: Send>(groups: &[Arc<dyn Group>], of: impl Fn(&dyn Group) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks = groups.iter().map(|group| scope.spawn(|| of(&**group)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn groups_of_threads_keep_the_rules() {
    for size in [1, 2, 4] {
        each(&Threads::group(size), rules::all);
    }
}

#[test]
fn a_rank_that_is_alone_keeps_the_rules() {
    rules::all(&Alone);
}

#[test]
fn ranks_that_wait_in_vain_say_for_whom() {
    let groups = Threads::with_deadline(3, Duration::from_millis(100));
    let mut bytes = [0; 4];
    // SAFETY: the bytes live on, untouched.
    let receiver = unsafe { groups[0].exchange(&[], &[comes(2, &mut bytes)]) };
    let Err(GroupError::Late(sentence)) = receiver else {
        panic!("{receiver:?}");
    };
    assert!(
        sentence.starts_with("rank 2 did not answer rank 0 in 0.1 s, in an exchange"),
        "{sentence}"
    );
    // Later calls return the same error at once.
    assert_eq!(groups[1].share(b"x"), Err(GroupError::Failed(sentence)));

    let groups = Threads::with_deadline(3, Duration::from_millis(100));
    // SAFETY: as above.
    let sender = unsafe { groups[0].exchange(&[goes(1, &bytes)], &[]) };
    assert!(
        sender
            .unwrap_err()
            .to_string()
            .starts_with("rank 1 did not")
    );

    let groups = Threads::with_deadline(3, Duration::from_millis(100));
    let sharer = groups[1].share(b"x").unwrap_err().to_string();
    assert!(
        sharer.starts_with("ranks 0, 2 did not answer rank 1 in 0.1 s, in a share"),
        "{sharer}"
    );
}

#[test]
fn a_rank_that_ends_the_job_is_named_to_all() {
    let groups = Threads::group(3);
    let results = each(&groups, |group| {
        if group.rank() == 1 {
            group.abort(3);
            return Ok(Vec::new());
        }
        group.share(b"x")
    });
    let reason = GroupError::Failed("rank 1 ended the job with code 3".into());
    assert_eq!(results[0], Err(reason.clone()));
    assert_eq!(results[2], Err(reason));
}

#[test]
fn ranks_that_disagree_are_told() {
    let results = each(&Threads::group(2), |group| {
        let mut bytes = [0; 8];
        // SAFETY: the bytes live on, untouched.
        unsafe {
            match group.rank() {
                0 => group.exchange(&[goes(1, &bytes)], &[]),
                _ => group.exchange(&[], &[comes(0, &mut bytes[..5])]),
            }
        }
    });
    for result in results {
        let sentence = result.unwrap_err().to_string();
        assert!(
            sentence.contains("rank 0 sends rank 1 8 bytes where 5 are expected"),
            "{sentence}"
        );
    }
    let mut bytes = [0; 8];
    // SAFETY: as above.
    let alone = unsafe {
        [
            Alone.exchange(&[goes(0, &[1, 2])], &[]),
            Alone.exchange(&[], &[comes(0, &mut bytes)]),
            Alone.exchange(&[goes(1, &[1])], &[]),
        ]
    };
    let sentences = alone.map(|result| result.unwrap_err().to_string());
    assert!(sentences[0].contains("none are expected"), "{sentences:?}");
    assert!(sentences[1].contains("does not send"), "{sentences:?}");
    assert!(
        sentences[2].contains("names rank 1, where there are 1"),
        "{sentences:?}"
    );
}
