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

/// The forward pass's workspace has room for at least this many packed documents.
const FORWARD_DOCUMENTS_MIN: usize = 64;

/// Scratch of an attention by cuDNN: some pieces, and behind them the library's workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudnnScratch {
    /// Bytes of `out` and `lse` where they are left out; of the f32 sums of dq, of the row sums, and, where documents are packed,
    /// of dk and dv of every query head.
    pub(crate) pieces: [usize; 4],
    /// Bytes for the library: no fewer than a plan of versions 9.25 to 9.28 states on Hopper.
    pub(crate) workspace: usize,
}

/// Without packed documents, or with room for so many.
impl CudnnScratch {
    pub(crate) fn forward(
        shape: AttentionShape,
        documents: Option<usize>,
        [has_out, has_lse]: [bool; 2],
    ) -> CudnnScratch {
        let described = documents.map_or(0, |most| described(4, most.max(FORWARD_DOCUMENTS_MIN)));
        let unless = |is_there: bool, bytes| if is_there { 0 } else { bytes };
        let out = unless(has_out, 2 * elements(shape));
        let lse = unless(has_lse, 4 * rows(shape));
        CudnnScratch::new([out, lse, 0, 0], described)
    }

    pub(crate) fn backward(shape: AttentionShape, documents: Option<usize>) -> CudnnScratch {
        // dk or dv of every query head, bf16, before they are added up.
        let of_heads = match shape.group() {
            1 => 0,
            _ => 2 * elements(shape),
        };
        // Whose turn it is to add to a block of 64 rows of dq.
        let sequences = documents.unwrap_or(shape.batch);
        let turns = 2 * 4 * sequences * shape.heads * shape.seq.div_ceil(64);
        let [dq_sums, row_sums] = [4 * elements(shape), 4 * rows(shape)];
        match documents {
            Some(most) => {
                let pieces = [dq_sums, row_sums, of_heads, of_heads];
                CudnnScratch::new(pieces, turns + described(7, most))
            }
            None => CudnnScratch::new([dq_sums, row_sums, 0, 0], 2 * of_heads + turns),
        }
    }

    fn new(pieces: [usize; 4], workspace: usize) -> CudnnScratch {
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

/// Bytes of where each of so many documents lies in some tensors, and of how long it is.
fn described(tensors: usize, documents: usize) -> usize {
    tensors * 64 * (documents + 1) + 4 * documents
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
    /// As [`FlashAttention::scratch_elements`], for cuDNN: it makes both outputs, `out` and `lse`, one that is left out in scratch.
    pub fn cudnn_scratch_elements(
        shape: AttentionShape,
        has_documents: bool,
        has_outputs: [bool; 2],
    ) -> usize {
        let documents = has_documents.then(|| shape.documents_max());
        CudnnScratch::forward(shape, documents, has_outputs).f32_elements()
    }
}

impl FlashAttentionBackward<'_> {
    /// As [`FlashAttentionBackward::scratch_elements`], for cuDNN: linear in the sequence, since its sums of dq are added up in
    /// order. With packed documents a small part is quadratic: 8 bytes for each document that there is room for, head and 64 tokens.
    pub fn cudnn_scratch_elements(shape: AttentionShape, has_documents: bool) -> usize {
        let documents = has_documents.then(|| shape.documents_max());
        CudnnScratch::backward(shape, documents).f32_elements()
    }
}

impl AttentionShape {
    /// Why cuDNN does not compute attention of this shape and type, without dropout; none: it does.
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

    /// Why cuDNN does not compute packed documents in a micro-batch of this shape, of which it computes whole sequences.
    /// NVIDIA's frontend notes a known issue for heads that are no multiple of 16 wide, where memory is for the tokens that there
    /// are. Offsets are 32-bit.
    pub fn documents_misfit(&self) -> Option<String> {
        let (head_dim, elements) = (self.qk_head_dim, elements(*self));
        let misfit =
            |reason: String| Some(format!("cuDNN's attention of packed documents {reason}"));
        match () {
            () if !head_dim.is_multiple_of(16) => misfit(format!(
                "takes heads that are a multiple of 16 wide, not {head_dim}"
            )),
            () if elements > i32::MAX as usize => misfit(format!(
                "takes queries of up to {} elements, not {elements}: make micro-batches smaller",
                i32::MAX
            )),
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
            CudnnScratch::forward(odd, None, [false, false]),
            CudnnScratch::forward(odd, Some(3), [true, false]),
            CudnnScratch::backward(odd, None),
            CudnnScratch::backward(odd, Some(3)),
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
        let backward = |shape| 4 * FlashAttentionBackward::cudnn_scratch_elements(shape, false);
        let leased = backward(SHAPE);
        assert!(
            (stated..stated + 3 * 256 + SPARE_BYTES).contains(&leased),
            "{leased}"
        );
        let alone = AttentionShape {
            kv_heads: 8,
            ..SHAPE
        };
        let of_heads = 4 * 2 * 8 * 1000 * 64;
        assert_eq!(leased - backward(alone), of_heads);
        // An output that is left out is made all the same.
        let forward =
            |has_outputs| FlashAttention::cudnn_scratch_elements(SHAPE, false, has_outputs);
        let [both, no_out, no_lse] = [[true, true], [false, true], [true, false]].map(forward);
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
