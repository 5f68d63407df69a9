//! The built-in text. It is generated, so that the binary has a grammar rather than a book. Its sentences are about
//! trains, harbours and memory, with enough repetition for a tiny byte-level transformer to learn within a few hundred
//! steps. A paragraph keeps to one person and one town, so that there is also something to learn from further back.

use rand_chacha::ChaCha8Rng;

use crate::order::{below, keyed_rng};

/// The least length of the text. It is at most a paragraph longer.
const LENGTH: usize = 200_000;

const PEOPLE: &str = "Ada, Bruno, Clara, Daniel, Edith, Felix, Greta, Hugo, Irene, Jonas, \
                      Klara, Lena, Martin, Nora, Otto, Paula";

const TOWNS: &str = "Alder Quay, Brightwater, Coldharbour, Dunmere, Eastgate, Fernhill, \
                     Greyport, Holloway, Larkfield, Northwick";

/// The words for each `{slot}`. `{person}` and `{town}` are fixed for a paragraph.
const SLOTS: &[(&str, &str)] = &[
    (
        "adjective",
        "old, quiet, narrow, green, heavy, bright, small, grey, patient, wooden, iron, slow",
    ),
    (
        "goods",
        "apples, letters, salt, timber, wool, coal, grain, glass, lamp oil, newspapers",
    ),
    (
        "vehicle",
        "train, ferry, barge, engine, cart, night train, mail boat",
    ),
    (
        "place",
        "harbour, station, market, bridge, lighthouse, warehouse, signal box, square, canal",
    ),
    ("weather", "rain, fog, snow, wind, sunlight, frost"),
    (
        "time",
        "dawn, noon, dusk, midnight, six o'clock, first light",
    ),
    (
        "thing",
        "ledger, timetable, lantern, map, clock, notebook, ticket, key",
    ),
    (
        "number",
        "two, three, four, five, six, seven, eight, nine, ten",
    ),
    ("bird", "gulls, crows, swallows, pigeons, herons"),
];

const SENTENCES: &[&str] = &[
    "The {adjective} {vehicle} left {town} at {time}, loaded with {goods}.",
    "At {time} the {vehicle} from {town} came in through the {weather}.",
    "{person} waited by the {place} with a {adjective} {thing}.",
    "{person} wrote it all down in the {thing}, as on every other day.",
    "There were {number} crates of {goods} beside the {place}.",
    "Nobody in {town} could remember who had built the {place}.",
    "What is not written down is forgotten by {time}.",
    "The {bird} over the {place} took no notice of the {weather}.",
    "\"Is this the {vehicle} to {town}?\" asked {person}.",
    "\"It is late again,\" said {person}, and looked at the {thing}.",
    "\"There is room for {number} more,\" said the keeper of the {place}.",
    "When the {weather} cleared, the {place} looked {adjective} and new.",
    "The road from the {place} to the {place} takes {number} minutes on foot.",
    "{person} carried the {goods} up the hill, and then carried them down again.",
    "A {adjective} {thing} hung on the wall of the {place}.",
    "First came the {goods}, then the {goods}, and last of all the {thing}.",
    "In {town} the {vehicle} is never early and never more than {number} minutes late.",
    "{person} had a good memory for names and a poor one for numbers.",
    "A shelf that is full holds no more, so {person} moved the {goods} to the {place}.",
    "It is cheaper to fetch the {goods} twice than to store them for a year.",
    "The {adjective} {place} was empty but for {number} {bird}.",
    "After {time} only the {vehicle} and the {weather} were left in the streets of {town}.",
    "{person} counted the crates: {number} by the {place}, and {number} on the {vehicle}.",
    "If the {vehicle} stops at {town}, the {goods} will be there by {time}.",
    "The {thing} said one thing and the {thing} said another.",
    "Every day at {time} the {bird} gathered near the {place}.",
    "The {weather} came in from the sea and stayed for {number} days.",
    "{person} folded the {thing}, crossed the {place} and went home.",
];

/// The text, always the same ASCII bytes.
pub(crate) fn text() -> String {
    let mut rng = keyed_rng(0, 0, b"built-in text   ");
    let mut text = String::with_capacity(LENGTH + 1000);
    while text.len() < LENGTH {
        paragraph(&mut rng, &mut text);
    }
    text
}

fn paragraph(rng: &mut ChaCha8Rng, text: &mut String) {
    let (person, town) = (pick(rng, PEOPLE), pick(rng, TOWNS));
    let sentences = 4 + below(rng, 4);
    for sentence in 0..sentences {
        if sentence > 0 {
            text.push(' ');
        }
        let template = SENTENCES[below(rng, SENTENCES.len() as u64) as usize];
        // After splitting at braces, every second piece is a slot.
        for (piece, words) in template.split(['{', '}']).enumerate() {
            text.push_str(match words {
                literal if piece % 2 == 0 => literal,
                "person" => person,
                "town" => town,
                slot => match SLOTS.iter().find(|(name, _)| *name == slot) {
                    Some((_, words)) => pick(rng, words),
                    None => unreachable!("every slot of SENTENCES is in SLOTS, not `{slot}`"),
                },
            });
        }
    }
    text.push_str("\n\n");
}

fn pick<'a>(rng: &mut ChaCha8Rng, words: &'a str) -> &'a str {
    let words: Vec<&str> = words.split(", ").collect();
    words[below(rng, words.len() as u64) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 64-bit FNV-1a.
    fn hash(bytes: &[u8]) -> u64 {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    #[test]
    fn the_text_never_changes() {
        // Recorded from the first run. Losses in the documentation depend on it.
        let text = text();
        assert_eq!(
            (text.len(), hash(text.as_bytes())),
            (200261, 9061936863344578250)
        );
    }

    #[test]
    fn the_text_is_plain_and_uses_the_whole_grammar() {
        let text = text();
        assert!(
            text.bytes()
                .all(|b| b == b'\n' || (b' '..=b'~').contains(&b))
        );
        let lists = SLOTS.iter().map(|(_, words)| *words);
        for word in lists
            .chain([PEOPLE, TOWNS])
            .flat_map(|list| list.split(", "))
        {
            assert!(text.contains(word), "{word} never occurs");
        }
        for (slot, _) in SLOTS {
            let used = SENTENCES.iter().any(|s| s.contains(&format!("{{{slot}}}")));
            assert!(used, "no sentence uses {slot}");
        }
    }

    #[test]
    fn the_text_is_not_one_passage_over_and_over() {
        let text = text();
        let passages = text.split("\n\n").filter(|passage| !passage.is_empty());
        let distinct: std::collections::HashSet<_> = passages.clone().collect();
        assert_eq!(distinct.len(), passages.count());
    }
}
