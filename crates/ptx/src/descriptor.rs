//! Matrices in shared memory as descriptors say, and as fragments of a group's registers: the layouts of `wgmma` in the PTX
//! manual ("Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions"), for elements of 16 bits.

/// Elements of 16 bytes, which every layout keeps together.
pub(crate) const CHUNK: usize = 8;
pub(crate) const CHUNK_BYTES: u64 = 16;
/// Depth of a product.
pub(crate) const K: usize = 16;

/// Bits that have a meaning: the address, both strides, and the swizzle.
const FIELDS: u64 = 0x3fff | 0x3fff << 16 | 0x3fff << 32 | 3 << 62;

/// A matrix in shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Descriptor {
    start: u64,
    leading: u64,
    stride: u64,
    /// Chunks of a swizzled row; 1 without swizzle.
    width: u64,
}

impl Descriptor {
    /// The bits of a register.
    pub(crate) fn new(bits: u64) -> Result<Descriptor, String> {
        if bits & !FIELDS != 0 {
            return Err(format!(
                "the descriptor {bits:#x} has bits without meaning, or a base offset, which is not supported"
            ));
        }
        let field = |shift: u32| (bits >> shift & 0x3fff) * CHUNK_BYTES;
        let (start, width) = (field(0), [1, 8, 4, 2][(bits >> 62) as usize]);
        // A product of another depth begins within the first row of the swizzle's pattern.
        let (row, pattern) = (width * CHUNK_BYTES, 8 * width * CHUNK_BYTES);
        if width > 1 && start % pattern >= row {
            return Err(format!(
                "a swizzled matrix at {start:#x}, which has to begin at a multiple of {pattern} bytes: is its array aligned?"
            ));
        }
        Ok(Descriptor {
            start,
            leading: field(16),
            stride: field(32),
            width,
        })
    }

    /// The address of eight elements along k: row `row` of the operand, and which half of its depth.
    pub(crate) fn along_k(&self, row: usize, half: usize) -> u64 {
        let half = half as u64
            * if self.width == 1 {
                self.leading
            } else {
                CHUNK_BYTES
            };
        self.place(row, self.stride, half)
    }

    /// The address of eight neighbouring rows of an operand that is stored transposed, at a depth.
    pub(crate) fn along_rows(&self, chunk: usize, k: usize) -> u64 {
        let (chunk, width) = (chunk as u64, self.width);
        let (panels, depths) = match width {
            1 => (chunk * self.stride, self.leading),
            _ => (chunk / width * self.leading, self.stride),
        };
        self.place(k, depths, panels + chunk % width * CHUNK_BYTES)
    }

    /// Lines of eight lie one behind the other, `eights` from one eight to the next; a swizzle permutes the chunks of a line
    /// by its address.
    fn place(&self, line: usize, eights: u64, offset: u64) -> u64 {
        let (line, width) = (line as u64, self.width);
        let address = self.start + line / 8 * eights + line % 8 * width * CHUNK_BYTES + offset;
        address ^ ((address >> 3) & ((width - 1) * CHUNK_BYTES))
    }
}

/// Row, of a warp's 16, and column of an element of a lane's accumulators.
pub(crate) fn accumulator(lane: usize, index: usize) -> (usize, usize) {
    let row = lane / 4 + 8 * (index / 2 % 2);
    (row, 8 * (index / 4) + 2 * (lane % 4) + index % 2)
}

/// Row, of a warp's 16, and depth of the lower half of a lane's register of the left factor; the upper half has the next.
pub(crate) fn left(lane: usize, register: usize) -> (usize, usize) {
    (
        lane / 4 + 8 * (register % 2),
        2 * (lane % 4) + 8 * (register / 2),
    )
}

#[cfg(test)]
mod tests {
    //! CUTLASS's layouts, as shapes and strides: `CLayout_64xN`, `ALayout_64x16`, and the canonical layouts that `make_gmma_desc`
    //! takes, in elements of 16 bits.

    use super::{Descriptor, accumulator, left};

    /// The offset of a coordinate: shapes and strides, the first runs fastest.
    fn offset(shape: &[usize], stride: &[usize], mut coordinate: usize) -> usize {
        let modes = shape.iter().zip(stride);
        modes.fold(0, |offset, (size, stride)| {
            let now = coordinate % size;
            coordinate /= size;
            offset + now * stride
        })
    }

    #[test]
    fn fragments_are_those_of_cutlass() {
        // ((4,8,4),(2,2,N/8)):((128,1,16),(64,8,512)), of a matrix whose 64 rows run fastest.
        let place = |thread, value| {
            offset(&[4, 8, 4], &[128, 1, 16], thread) + offset(&[2, 2, 32], &[64, 8, 512], value)
        };
        for thread in 0..128 {
            let (warp, lane) = (thread / 32, thread % 32);
            for value in 0..128 {
                let (row, column) = accumulator(lane, value);
                assert_eq!(16 * warp + row + 64 * column, place(thread, value));
            }
            // The left factor's is the same with N = 16: two values a register.
            for value in 0..8 {
                let (row, k) = left(lane, value / 2);
                assert_eq!(16 * warp + row + 64 * (k + value % 2), place(thread, value));
            }
        }
    }

    /// What `Swizzle<B, 4, 3>` makes of a byte.
    fn swizzled(bits: u32, byte: u64) -> u64 {
        byte ^ (byte >> 3 & ((1 << bits) - 1) << 4)
    }

    #[test]
    fn matrices_in_shared_memory_are_those_of_cutlass() {
        // In chunks of 16 bytes; as large as strides in these may be.
        let (start, lbo, sbo) = (16 << 10, 320, 1152);
        for (code, bits) in [(0, 0), (3, 1), (2, 2), (1, 3)] {
            let (width, t) = (1 << bits, 8);
            let fields = start >> 4 | lbo << 16 | sbo << 32 | code << 62;
            let descriptor = Descriptor::new(fields).unwrap();
            let (lbo, sbo) = (t * lbo as usize, t * sbo as usize);
            let byte = |element: usize| start + 2 * element as u64;
            for row in 0..256 {
                for k in 0..16 {
                    // ((8,m),(T,2)):((W T,SBO),(1,T)), and without swizzle LBO in place of the last.
                    let half = if bits == 0 { lbo } else { t };
                    let element =
                        offset(&[8, 32], &[width * t, sbo], row) + offset(&[t, 2], &[1, half], k);
                    let chunk = descriptor.along_k(row, k / t);
                    let expected = swizzled(bits, byte(element));
                    assert_eq!(chunk + 2 * (k % t) as u64, expected, "{bits}: {row}, {k}");
                    // ((T,W,m),(8,k)):((1,T,LBO),(W T,SBO)), and without swizzle LBO and SBO for each other.
                    let (panel, eight) = if bits == 0 { (sbo, lbo) } else { (lbo, sbo) };
                    let element = offset(&[t, width, 32], &[1, t, panel], row)
                        + offset(&[8, 2], &[width * t, eight], k);
                    let chunk = descriptor.along_rows(row / t, k);
                    let expected = swizzled(bits, byte(element));
                    assert_eq!(chunk + 2 * (row % t) as u64, expected, "{bits}: {row}, {k}");
                }
            }
        }
    }
}
