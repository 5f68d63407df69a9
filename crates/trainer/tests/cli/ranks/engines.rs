//! Whatever moves the bytes, they are the same.

use crate::ranks::job::{mpich, open_mpi, place, train_by};

#[test]
fn mpich_and_open_mpi() {
    let place = place();
    let way = "--config gpt2.toml --zero 3 --bucket-size 8KiB";
    let [first, second] = [("open-mpi", open_mpi(2)), ("mpich", mpich(2))]
        .map(|(name, launcher)| (name, train_by(&place, launcher, 2, way, name)));
    assert!(first.1.bits() == second.1.bits());
    for (name, run, engine) in [
        (first.0, &first.1, "Open MPI"),
        (second.0, &second.1, "MPICH"),
    ] {
        let record = run.ranks[1].of_kind("ranks").next().unwrap().clone();
        assert!(
            record["engine"].as_str().unwrap().contains(engine),
            "{name}: {record}"
        );
    }
}
