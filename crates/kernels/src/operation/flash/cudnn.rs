//! What cuDNN's attention fits, and the scratch that it takes.

use super::{FlashAttention, FlashAttentionBackward};
use crate::{AttentionShape, Target};
use memory::DType;

/// Who computes attention that stores no scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flash {
    /// Our kernels.
    #[default]
    Own,
    /// cuDNN. The same result in other bits; what is left out and what is not makes no difference to them.
    Cudnn,
}

/// Places in scratch begin at multiples of this, which is what cuDNN's kernels ask of a workspace.
const ALIGNMENT_BYTES: usize = 256;

/// What may be wanted beyond the bytes that are counted: of the versions that were looked at none takes more than 288.
const SPARE_BYTES: usize = 4096;

/// Scratch of an attention by cuDNN: two pieces, and behind them the library's workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudnnScratch {
    /// Bytes of `out` and `lse` where they are left out; of the f32 sums of dq and of the row sums.
    pub(crate) pieces: [usize; 2],
    /// Bytes for the library: no fewer than a plan of versions 9.25 to 9.28 states on Hopper.
    pub(crate) workspace: usize,
}

impl CudnnScratch {
    pub(crate) fn forward(shape: AttentionShape, has_out: bool, has_lse: bool) -> CudnnScratch {
        let (out, lse) = (2 * elements(shape), 4 * rows(shape));
        let unless = |is_there: bool, bytes| if is_there { 0 } else { bytes };
        CudnnScratch::new([unless(has_out, out), unless(has_lse, lse)], 0)
    }

    pub(crate) fn backward(shape: AttentionShape) -> CudnnScratch {
        // dk and dv of every query head, bf16, before they are added up.
        let of_heads = match shape.group() {
            1 => 0,
            _ => 2 * 2 * elements(shape),
        };
        // Whose turn it is to add to a block of 64 rows of dq.
        let turns = 2 * 4 * shape.batch * shape.heads * shape.seq.div_ceil(64);
        let sums = [4 * elements(shape), 4 * rows(shape)];
        CudnnScratch::new(sums, of_heads + turns)
    }

    fn new(pieces: [usize; 2], workspace: usize) -> CudnnScratch {
        let rounded = |bytes: usize| bytes.next_multiple_of(ALIGNMENT_BYTES);
        CudnnScratch {
            pieces: pieces.map(rounded),
            workspace: rounded(workspace) + SPARE_BYTES,
        }
    }

    fn f32_elements(&self) -> usize {
        (self.pieces.iter().sum::<usize>() + self.workspace) / size_of::<f32>()
    }
}

/// Elements of q.
fn elements(shape: AttentionShape) -> usize {
    rows(shape) * shape.qk_head_dim
}

/// Queries of all heads.
fn rows(shape: AttentionShape) -> usize {
    shape.batch * shape.heads * shape.seq
}

impl FlashAttention<'_> {
    /// As [`FlashAttention::scratch_elements`], for cuDNN: it makes both outputs, one that is left out in scratch.
    pub fn cudnn_scratch_elements(shape: AttentionShape, has_out: bool, has_lse: bool) -> usize {
        CudnnScratch::forward(shape, has_out, has_lse).f32_elements()
    }
}

impl FlashAttentionBackward<'_> {
    /// As [`FlashAttentionBackward::scratch_elements`], for cuDNN: linear in the sequence, since its sums of dq are added up in
    /// order.
    pub fn cudnn_scratch_elements(shape: AttentionShape) -> usize {
        CudnnScratch::backward(shape).f32_elements()
    }
}

impl AttentionShape {
    /// Why cuDNN does not compute attention of this shape and type without documents and dropout; none: it does.
    ///
    /// Its graphs here have a causal mask and no other: queries that see a window of keys are left to our own kernels.
    /// Its kernels are for heads of whole 16-byte pieces. For queries that see one key alone there is no backward pass, and
    /// forward there are reports of wrong results (cudnn-frontend, issue 1072).
    pub fn cudnn_misfit(&self, target: Target, dtype: DType) -> Option<String> {
        let (head_dim, seq) = (self.qk_head_dim, self.seq);
        let misfit = |reason: String| Some(format!("cuDNN's attention {reason}"));
        match () {
            () if target != Target::Cuda => misfit("needs a CUDA device".into()),
            () if dtype != DType::BF16 => misfit(format!("computes in bf16, not {dtype:?}")),
            () if self.v_head_dim != head_dim => misfit(format!(
                "takes keys and values of one width here, not {head_dim} and {}",
                self.v_head_dim
            )),
            () if !head_dim.is_multiple_of(8) || !(8..=128).contains(&head_dim) => misfit(format!(
                "takes heads that are a multiple of 8 wide, up to 128, not {head_dim}"
            )),
            () if self.is_windowed() => misfit(format!(
                "has no sliding window here, and queries see {} of {seq} keys",
                self.reach()
            )),
            () if seq < 2 => misfit(format!("takes sequences of two tokens or more, not {seq}")),
            () => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape::new([2, 1000], [8, 2], 64);

    #[test]
    fn pieces_begin_where_cudnn_wants_them() {
        let odd = AttentionShape { seq: 7, ..SHAPE };
        for scratch in [
            CudnnScratch::forward(odd, false, false),
            CudnnScratch::forward(odd, true, false),
            CudnnScratch::backward(odd),
        ] {
            let pieces = scratch.pieces;
            assert!(
                pieces.iter().all(|bytes| bytes.is_multiple_of(256)),
                "{scratch:?}"
            );
        }
    }

    /// As stated by cuDNN 9.28's plans for an H100, with what its frontend adds for the sums.
    #[test]
    fn scratch_is_what_plans_state_and_a_little_more() {
        let stated = 4 * 2 * 8 * 1000 * 64 * 2 + 4 * 2 * 8 * 1000 + 8 * 2 * 8 * 16 + 256;
        let leased = 4 * FlashAttentionBackward::cudnn_scratch_elements(SHAPE);
        assert!(
            (stated..stated + 3 * 256 + SPARE_BYTES).contains(&leased),
            "{leased}"
        );
        let alone = AttentionShape {
            kv_heads: 8,
            ..SHAPE
        };
        let of_heads = 4 * 2 * 8 * 1000 * 64;
        let without = 4 * FlashAttentionBackward::cudnn_scratch_elements(alone);
        assert_eq!(leased - without, of_heads);
        // An output that is left out is made all the same.
        let both = FlashAttention::cudnn_scratch_elements(SHAPE, true, true);
        let no_out = FlashAttention::cudnn_scratch_elements(SHAPE, false, true);
        let no_lse = FlashAttention::cudnn_scratch_elements(SHAPE, true, false);
        assert_eq!(4 * (no_out - both), 2 * 2 * 8 * 1000 * 64);
        assert_eq!(4 * (no_lse - both), 4 * 2 * 8 * 1000);
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let misfit = |shape: AttentionShape| shape.cudnn_misfit(Target::Cuda, DType::BF16);
        assert_eq!(misfit(SHAPE), None);
        let of_width = |width| AttentionShape::new([2, 1000], [8, 2], width);
        let narrow = AttentionShape {
            v_head_dim: 32,
            ..SHAPE
        };
        let one = AttentionShape { seq: 1, ..SHAPE };
        let windowed = |window| AttentionShape {
            window: Some(window),
            ..SHAPE
        };
        assert_eq!(misfit(windowed(1000)), None);
        for (misfit, word) in [
            (misfit(of_width(136)), "not 136"),
            (misfit(of_width(100)), "not 100"),
            (misfit(narrow), "not 64 and 32"),
            (misfit(one), "two tokens"),
            (misfit(windowed(999)), "999 of 1000 keys"),
            (SHAPE.cudnn_misfit(Target::Cuda, DType::F32), "bf16"),
            (SHAPE.cudnn_misfit(Target::Cpu, DType::BF16), "CUDA device"),
        ] {
            let misfit = misfit.unwrap();
            assert!(misfit.contains(word), "{misfit}");
        }
    }
}
