//! Random numbers by counter: a pure function of a key and an index, so every device gets the same ones again.

/// 32 random bits.
///
/// Two rounds of a 32-bit mixer (a multiply-xorshift hash with the constants of C. Wellons' search for low bias), with
/// half of the key and of the index in each: 32-bit integer arithmetic alone, so that it vectorises and runs on a GPU.
#[inline(always)]
pub fn random_u32(key: u64, index: u64) -> u32 {
    let high = mix((index >> 32) as u32 ^ (key >> 32) as u32);
    mix(mix(index as u32 ^ key as u32) ^ high)
}

/// [`random_u32`] of indices that follow one another; fewer than 2^32, and `first` such that their upper halves agree.
#[inline(always)]
pub fn random_run(key: u64, first: u64, numbers: &mut [u32]) {
    let high = mix((first >> 32) as u32 ^ (key >> 32) as u32);
    for (lane, number) in numbers.iter_mut().enumerate() {
        let low = (first as u32).wrapping_add(lane as u32);
        *number = mix(mix(low ^ key as u32) ^ high);
    }
}

/// The key of a stream: one of a run (`seed`), in a step, for a purpose (`stream`).
pub fn key(seed: u64, step: u64, stream: u32) -> u64 {
    let mut key = seed ^ u64::from(stream).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for word in [step, seed] {
        key = key.wrapping_add(word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        key ^= key >> 31;
    }
    key
}

#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}
