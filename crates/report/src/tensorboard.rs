//! Event files for TensorBoard, which `tensorboard --logdir` draws.
//!
//! A file is a sequence of records as TensorFlow frames them (TFRecord), each a protocol buffer `Event`. Of both formats only
//! what scalars take is written here, by hand: the schemas are `tensorflow/core/util/event.proto` and
//! `tensorflow/core/framework/summary.proto`. Scalars are f32, so bytes are given in GiB; `metrics.jsonl` has them exactly.

use crate::metrics::StepRecord;
use memory::Category;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Result, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes the scalars of a run.
pub struct TensorBoard {
    file: BufWriter<File>,
}

impl TensorBoard {
    /// Starts a file `events.out.tfevents.TIME.HOST` in a folder, which is made where it is missing, for a run whose first step
    /// is `first_step`. Whatever earlier files of the folder say of that step and of later ones is forgotten by TensorBoard: so
    /// a run that is resumed goes on where its checkpoint was.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn create(folder: &Path, first_step: usize) -> Result<TensorBoard> {
        std::fs::create_dir_all(folder)?;
        let mut board = TensorBoard {
            file: BufWriter::new(new_file(folder)?),
        };
        board.write(&event(0, Content::FileVersion))?;
        board.write(&event(first_step, Content::Start))?;
        Ok(board)
    }

    /// Adds a step: loss, gradient norm, learning rate, speed, the peak of memory by category, of routers their losses,
    /// and the load of experts in the worst layer, and of pairs their rewards.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn step(&mut self, record: &StepRecord) -> Result<()> {
        let mut scalars = vec![
            ("train/loss".to_string(), record.loss),
            ("train/grad_norm".into(), record.grad_norm),
            ("train/lr".into(), record.lr),
            (
                "speed/tokens_per_s".into(),
                record.timing.tokens_per_s as f32,
            ),
            ("speed/step_ms".into(), record.timing.step_ms as f32),
            ("memory_gib/peak".into(), gib(record.peak_bytes)),
        ];
        let matrices = record.lr_matrices;
        scalars.extend(matrices.map(|rate| ("train/lr_matrices".to_string(), rate)));
        if let Some(routers) = &record.routers {
            let losses = [
                ("router/aux", routers.router_aux),
                ("router/z_loss", routers.router_z_loss),
                (
                    "router/expert_load_max_over_mean",
                    Some(routers.largest_load() as f32),
                ),
                (
                    "router/expert_load_entropy",
                    Some(routers.least_entropy() as f32),
                ),
            ];
            let known = losses.into_iter();
            scalars.extend(known.filter_map(|(name, value)| Some((name.to_string(), value?))));
        }
        scalars.extend(record.fp8_underflows.iter().map(|underflows| {
            let name = format!("fp8_underflows/{}_{}", underflows.layer, underflows.operand);
            (name, underflows.share as f32)
        }));
        if let Some(rewards) = &record.rewards {
            scalars.extend([
                ("rewards/chosen".into(), rewards.rewards_chosen),
                ("rewards/rejected".into(), rewards.rewards_rejected),
                ("rewards/margin".into(), rewards.rewards_margin),
                ("rewards/accuracy".into(), rewards.rewards_accuracy),
            ]);
        }
        scalars.extend(Category::ALL.map(|category| {
            let bytes = record.peak_by_category.get(category);
            (format!("memory_gib/{}", category.name()), gib(bytes))
        }));
        self.write(&event(record.step, Content::Scalars(&scalars)))
    }

    /// Adds an evaluation after a step.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn evaluation(&mut self, step: usize, loss: f64, perplexity: f64) -> Result<()> {
        let scalars = [
            ("eval/loss".to_string(), loss as f32),
            ("eval/perplexity".to_string(), perplexity as f32),
        ];
        self.write(&event(step, Content::Scalars(&scalars)))
    }

    /// Appends a record: its length, that length's checksum, the bytes, and their checksum.
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let length = (bytes.len() as u64).to_le_bytes();
        self.file.write_all(&length)?;
        self.file.write_all(&masked_crc(&length).to_le_bytes())?;
        self.file.write_all(bytes)?;
        self.file.write_all(&masked_crc(bytes).to_le_bytes())?;
        self.file.flush()
    }
}

/// A file that was not there, named so that files sort by age: TensorBoard reads a folder's files in the order of their names.
fn new_file(folder: &Path) -> Result<File> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = Some(host.trim()).filter(|host| !host.is_empty());
    let mut time = seconds_since_epoch() as u64;
    loop {
        let name = format!(
            "events.out.tfevents.{time:010}.{}",
            host.unwrap_or("localhost")
        );
        let opened = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(folder.join(name));
        match opened {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => time += 1,
            opened => return opened,
        }
    }
}

fn seconds_since_epoch() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |time| time.as_secs_f64())
}

fn gib(bytes: u64) -> f32 {
    (bytes as f64 / f64::from(1 << 30)) as f32
}

/// What an event says.
enum Content<'a> {
    /// How TensorBoard knows the format.
    FileVersion,
    /// What other files say of this step and later ones is void.
    Start,
    /// Values by tag.
    Scalars(&'a [(String, f32)]),
}

/// An `Event`: `wall_time` = 1, `step` = 2, `file_version` = 3, `summary` = 5, `session_log` = 7.
fn event(step: usize, content: Content) -> Vec<u8> {
    let mut bytes = vec![key(1, EIGHT_BYTES)];
    bytes.extend(seconds_since_epoch().to_le_bytes());
    bytes.push(key(2, VARINT));
    push_varint(&mut bytes, step as u64);
    match content {
        Content::FileVersion => push_bytes(&mut bytes, 3, b"brain.Event:2"),
        // A `SessionLog` whose `status` = 1 is START = 1.
        Content::Start => push_bytes(&mut bytes, 7, &[key(1, VARINT), 1]),
        Content::Scalars(scalars) => push_bytes(&mut bytes, 5, &summary(scalars)),
    }
    bytes
}

/// A `Summary`: a `value` = 1 a scalar, with its `tag` = 1 and `simple_value` = 2.
fn summary(scalars: &[(String, f32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (tag, scalar) in scalars {
        let mut value = Vec::new();
        push_bytes(&mut value, 1, tag.as_bytes());
        value.push(key(2, FOUR_BYTES));
        value.extend(scalar.to_le_bytes());
        push_bytes(&mut bytes, 1, &value);
    }
    bytes
}

// Wire types of protocol buffers.
const VARINT: u8 = 0;
const EIGHT_BYTES: u8 = 1;
const LENGTH_FIRST: u8 = 2;
const FOUR_BYTES: u8 = 5;

/// What precedes a field's value; fields of these messages are below 16, so it is one byte.
const fn key(field: u8, wire_type: u8) -> u8 {
    field << 3 | wire_type
}

fn push_bytes(bytes: &mut Vec<u8>, field: u8, value: &[u8]) {
    bytes.push(key(field, LENGTH_FIRST));
    push_varint(bytes, value.len() as u64);
    bytes.extend(value);
}

/// Seven bits a byte, the lowest first; the high bit says that more follow.
fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// The checksum of a record, turned and shifted as TensorFlow does, so that checksums of checksums are not special.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), a bit at a time: records are a few hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let shift = |crc: u32, _| (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
    !bytes
        .iter()
        .fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), shift))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Timing, UnderflowMarks};
    use memory::{ByCategory, ByPhase, Layer, Phase};
    use std::path::PathBuf;
    use std::time::Duration;

    /// Vectors of RFC 3720, appendix B.4, and the check value of the CRC catalogues.
    #[test]
    fn checksums_are_castagnoli_s() {
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&ascending), 0x46dd_794e);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    fn record(step: usize) -> StepRecord {
        let peak_by_category = ByCategory {
            parameter: 1 << 30,
            temporary: 1 << 29,
            ..ByCategory::default()
        };
        StepRecord {
            step,
            loss: 2.5,
            grad_norm: f32::NAN,
            finite: false,
            lr: 3e-4,
            lr_matrices: None,
            routers: None,
            fp8_underflows: vec![UnderflowMarks {
                layer: "mlp_down",
                operand: "gradient",
                share: 0.25,
                block: 3,
            }],
            rewards: None,
            policy: None,
            tokens: 7,
            epoch: 0.5,
            timing: Timing::new(
                Duration::from_millis(250),
                Duration::ZERO,
                &ByPhase::default(),
                1000,
                1,
                None,
            ),
            peak_bytes: 3 << 29,
            planned_peak_bytes: 3 << 29,
            peak_by_category,
            peak_phase: Phase::Backward,
            peak_layer: Layer::Whole,
            phase_peak_bytes: ByPhase::default(),
            slab_bytes: 0,
            host_pinned_bytes: 0,
            replayed: Default::default(),
            h2d_bytes: 0,
            d2h_bytes: 0,
            disk_read_bytes: 0,
            disk_written_bytes: 0,
            sent_bytes: None,
            device: None,
        }
    }

    /// A field of a message, read without the code above.
    #[derive(Clone, Debug)]
    enum Field {
        Number(u64),
        Bytes(Vec<u8>),
    }

    impl Field {
        fn bytes(&self) -> &[u8] {
            match self {
                Field::Bytes(bytes) => bytes,
                Field::Number(number) => panic!("{number} is not bytes"),
            }
        }

        fn number(&self) -> u64 {
            match self {
                Field::Number(number) => *number,
                Field::Bytes(bytes) => panic!("{bytes:?} is not a number"),
            }
        }
    }

    fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
        let (taken, rest) = bytes.split_at(count);
        *bytes = rest;
        taken
    }

    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut place) = (0, 0);
        loop {
            let byte = take(bytes, 1)[0];
            value += u64::from(byte % 128) << place;
            place += 7;
            if byte < 128 {
                return value;
            }
        }
    }

    fn little_endian(bytes: &[u8]) -> u64 {
        let places = bytes.iter().rev();
        places.fold(0, |value, byte| value * 256 + u64::from(*byte))
    }

    /// All fields of a message by number, in order.
    fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let field = match key % 8 {
                0 => Field::Number(varint(&mut bytes)),
                1 => Field::Number(little_endian(take(&mut bytes, 8))),
                5 => Field::Number(little_endian(take(&mut bytes, 4))),
                2 => {
                    let length = varint(&mut bytes) as usize;
                    Field::Bytes(take(&mut bytes, length).to_vec())
                }
                other => panic!("wire type {other}"),
            };
            fields.push((key / 8, field));
        }
        fields
    }

    fn field(message: &[u8], number: u64) -> Option<Field> {
        let mut fields = fields(message).into_iter();
        fields.find_map(|(found, field)| (found == number).then_some(field))
    }

    /// The CRC by its definition, the remainder of a polynomial's division, most significant bit first.
    fn slow_crc(bytes: &[u8]) -> u32 {
        let divide = |crc: u32, bit: u32| {
            let top = crc >> 31 ^ bit;
            (crc << 1) ^ (0x1edc_6f41 * top)
        };
        let bits = bytes
            .iter()
            .flat_map(|byte| (0..8).map(move |place| u32::from(byte >> place & 1)));
        !bits.fold(!0, divide).reverse_bits()
    }

    fn is_sealed(bytes: &[u8], stored: &[u8]) -> bool {
        let crc = slow_crc(bytes);
        let masked = u64::from(crc.rotate_right(15)) + 0xa282_ead8;
        masked % (1 << 32) == little_endian(stored)
    }

    /// The events of a file, their checksums compared.
    fn events(path: &Path) -> Vec<Vec<u8>> {
        let file = std::fs::read(path).unwrap();
        let (mut rest, mut events) = (&file[..], Vec::new());
        while !rest.is_empty() {
            let length = take(&mut rest, 8);
            assert!(is_sealed(length, take(&mut rest, 4)));
            let event = take(&mut rest, little_endian(length) as usize);
            assert!(is_sealed(event, take(&mut rest, 4)));
            events.push(event.to_vec());
        }
        events
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    }

    fn scalars(event: &[u8]) -> Vec<(String, f32)> {
        let summary = field(event, 5).expect("an event with scalars");
        let values = fields(summary.bytes()).into_iter();
        let scalar = |(_, value): (u64, Field)| {
            let tag = field(value.bytes(), 1).unwrap();
            let bits = field(value.bytes(), 2).unwrap().number() as u32;
            let tag = String::from_utf8(tag.bytes().to_vec()).unwrap();
            (tag, f32::from_bits(bits))
        };
        values.map(scalar).collect()
    }

    #[test]
    fn an_independent_reader_finds_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(folder.path(), 1).unwrap();
        board.step(&record(300)).unwrap();
        board.evaluation(300, 1.5, 4.5).unwrap();
        let files = files(folder.path());
        let [path] = &files[..] else {
            panic!("{files:?}");
        };
        let name = path.file_name().unwrap().to_str().unwrap();
        let (time, host) = name
            .strip_prefix("events.out.tfevents.")
            .and_then(|rest| rest.split_once('.'))
            .unwrap();
        assert!(time.len() == 10 && time.parse::<u64>().is_ok() && !host.is_empty());
        let events = events(path);
        assert_eq!(field(&events[0], 3).unwrap().bytes(), b"brain.Event:2");
        let wall_time = f64::from_bits(field(&events[2], 1).unwrap().number());
        assert!((wall_time - seconds_since_epoch()).abs() < 3600.0);
        assert_eq!(field(&events[2], 2).unwrap().number(), 300);
        let step = scalars(&events[2]);
        let of = |tag: &str| step.iter().find(|(found, _)| found == tag).unwrap().1;
        assert_eq!((of("train/loss"), of("train/lr")), (2.5, 3e-4));
        assert!(of("train/grad_norm").is_nan());
        assert_eq!(of("fp8_underflows/mlp_down_gradient"), 0.25);
        assert_eq!(
            (of("speed/step_ms"), of("speed/tokens_per_s")),
            (250.0, 4000.0)
        );
        assert_eq!(
            (of("memory_gib/peak"), of("memory_gib/parameter")),
            (1.5, 1.0)
        );
        assert_eq!(of("memory_gib/temporary"), 0.5);
        let evaluation = [("eval/loss".into(), 1.5), ("eval/perplexity".into(), 4.5)];
        assert_eq!(scalars(&events[3]), evaluation);
        assert_eq!(events.len(), 4);
    }

    /// Within one second too: names say in which order files are to be read.
    #[test]
    fn a_resumed_run_adds_a_later_file_that_voids_its_steps() {
        let folder = tempfile::tempdir().unwrap();
        drop(TensorBoard::create(folder.path(), 1).unwrap());
        drop(TensorBoard::create(folder.path(), 41).unwrap());
        let files = files(folder.path());
        assert_eq!(files.len(), 2);
        for (file, first_step) in files.iter().zip([1, 41]) {
            let start = &events(file)[1];
            assert_eq!(field(start, 2).unwrap().number(), first_step);
            let status = field(field(start, 7).unwrap().bytes(), 1);
            assert_eq!(status.unwrap().number(), 1);
        }
    }
}
