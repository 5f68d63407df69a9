//! `trainer show`: a memory snapshot as a page and a timeline.

use crate::workplace::Workplace;

const LATE: &[u8] = include_bytes!("../../../snapshots/tests/fixtures/late-2.13.pickle");
const TWO_DEVICES: &[u8] =
    include_bytes!("../../../snapshots/tests/fixtures/expandable-2.5.pickle");

#[test]
fn a_snapshot_becomes_a_page_and_a_picture() {
    let place = Workplace::new();
    place.file("late.pickle", LATE);
    let outcome = place.trainer("show late.pickle").succeeds();
    assert_eq!(outcome.stdout, "late.html\nlate.svg\n");
    let page = place.text("late.html").replace("&#x2f;", "/");
    let picture = place.text("late.svg");
    for words in [
        "12,581,921",
        "project/train.py step",
        "before recording began",
        "reserved at the peak",
    ] {
        assert!(page.contains(words), "no {words:?}");
    }
    assert!(
        !page.replace("http://www.w3.org", "").contains("http:"),
        "it needs no network"
    );
    assert!(picture.contains("class=\"place-0\"") && picture.contains("12,581,921 bytes"));
    let text = place.trainer("show late.pickle --text").succeeds().stdout;
    assert!(text.contains("project/train.py step:40"), "{text}");

    // A page is written over, another file is not.
    place.trainer("show late.pickle").succeeds();
    for out in ["late.pickle", "late.svg"] {
        let outcome = place.trainer(&format!("show late.pickle --out {out}"));
        outcome.fails(2, &[out, "does not end in .html"]);
    }
    place.file("own.html", "<p>mine</p>");
    place
        .trainer("show late.pickle --out own.html")
        .fails(2, &["own.html", "was not written by this command"]);

    place.file("two.pickle", TWO_DEVICES);
    let outcome = place.trainer("show two.pickle --out page.html").succeeds();
    assert_eq!(outcome.stdout, "page.html\npage.0.svg\npage.1.svg\n");
}

/// Categories have the colours that they have in all pictures.
#[test]
fn a_trace_of_our_own_is_shown_by_category() {
    let place = Workplace::new();
    place
        .trainer("plan --config small.toml --device cpu --trace paper")
        .succeeds();
    place.trainer("show paper/snapshot.pickle").succeeds();
    let picture = place.text("paper/snapshot.svg");
    assert!(picture.contains("class=\"activation\" d="), "{picture}");
    assert!(!picture.contains("class=\"place-0\" d="));
}

#[test]
fn what_is_no_snapshot_is_refused() {
    let place = Workplace::new();
    place
        .trainer("show small.toml")
        .fails(4, &["small.toml", "no pickle"]);
    place
        .trainer("show nowhere")
        .fails(4, &["nowhere", "No such file"]);
    assert_eq!(place.names("."), ["plain.toml", "small.toml"]);
}
