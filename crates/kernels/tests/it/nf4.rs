//! Matrices as codes: NF4 against bitsandbytes (`golden/bitsandbytes/README.md`), and both kinds against the operations.

use kernels::quantise::{
    BlockScale, dequantise_block, quantise_absmax, quantise_absmax_above, quantise_blocks,
    round_to_codes,
};
use memory::Codes;

const GOLDEN: &str = include_str!("../golden/bitsandbytes/nf4.json");

/// The text between the delimiters that follow a key.
fn text(key: &str, delimiters: [char; 2]) -> &'static str {
    let (_, rest) = GOLDEN.split_once(&format!("\"{key}\": ")).unwrap();
    let rest = rest.strip_prefix(delimiters[0]).unwrap();
    rest.split_once(delimiters[1]).unwrap().0
}

/// Bytes in hexadecimal digits.
fn bytes(key: &str) -> Vec<u8> {
    let digits = text(key, ['"', '"']).as_bytes().chunks(2);
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16);
    digits.map(|digits| byte(digits).unwrap()).collect()
}

fn floats(key: &str) -> Vec<f32> {
    let numbers = text(key, ['[', ']']).split(", ");
    let bits = numbers.map(|bits| bits.parse().unwrap());
    bits.map(f32::from_bits).collect()
}

/// The matrix of `benches/peers/nf4_reference.py`.
fn matrix() -> Vec<f32> {
    let value = |at: u64| {
        let hashed = ((at * 2_654_435_761) % (1 << 32)) >> 8;
        let centred = (hashed as i64 - (1 << 23)) as f32 / (1 << 23) as f32;
        centred * (1 + at / 64 % 7) as f32
    };
    (0..257 * 64 + 32).map(value).collect()
}

#[test]
fn nf4_has_the_bits_of_bitsandbytes() {
    let (codes, absmax) = quantise_blocks(Codes::Nf4, &matrix());
    assert_eq!(codes, bytes("codes"));
    let theirs = floats("offset")[0];
    let scales = quantise_absmax_above(&absmax, theirs);
    assert_eq!(scales.absmax, floats("absmax"));
    // bitsandbytes' quantiser to 8 bits on the CPU is coarse (`bitsandbytes.rs`): its codes may be one off.
    let expected = bytes("absmax_codes");
    assert_eq!(scales.codes.len(), expected.len());
    let off = scales.codes.iter().zip(&expected);
    let off: Vec<u8> = off.map(|(ours, theirs)| ours.abs_diff(*theirs)).collect();
    assert!(off.iter().all(|off| *off <= 1) && off.iter().filter(|off| **off > 0).count() <= 6);
    let own = quantise_absmax(&absmax).offset;
    assert!(
        own.to_bits().abs_diff(theirs.to_bits()) <= 2,
        "{own} {theirs}"
    );
    let mut values = vec![0.0; 64 * codes.len().div_ceil(32)];
    for (block, values) in values.chunks_mut(64).enumerate() {
        let bytes = &codes[32 * block..codes.len().min(32 * block + 32)];
        let scale = BlockScale::Coded {
            code: expected[block],
            absmax: floats("absmax")[block / 256],
            offset: theirs,
        };
        dequantise_block(bytes, scale, values);
    }
    let seen: Vec<f32> = values
        .iter()
        .copied()
        .take(257 * 64 + 32)
        .step_by(37)
        .collect();
    assert_eq!(seen, floats("dequantised"));
}

#[test]
fn every_bf16_has_the_code_of_bitsandbytes() {
    let patterns = (0..0x7f80u32).chain(0x8000..0xff80);
    let values: Vec<f32> = patterns.map(|bits| f32::from_bits(bits << 16)).collect();
    assert_eq!(quantise_blocks(Codes::Nf4, &values).0, bytes("bf16_codes"));
}

#[test]
fn a_matrix_is_rounded_to_what_its_codes_stand_for() {
    for (codes, most) in [(Codes::EightBit, 0.008), (Codes::Nf4, 0.16)] {
        let before = matrix();
        let mut after = before.clone();
        round_to_codes(codes, &mut after);
        let largest = |block: &[f32]| block.iter().fold(0f32, |most, x| most.max(x.abs()));
        for (before, after) in before.chunks(64).zip(after.chunks(64)) {
            let errors = before.iter().zip(after).map(|(a, b)| (a - b).abs());
            let error = errors.fold(0f32, f32::max) / 7.0;
            assert!(
                error <= most && largest(after) > 0.8 * largest(before),
                "{error}"
            );
        }
        assert_ne!(before, after);
    }
    let mut zeros = [0.0; 100];
    round_to_codes(Codes::EightBit, &mut zeros);
    assert_eq!(zeros, [0.0; 100]);
}
