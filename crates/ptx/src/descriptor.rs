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
