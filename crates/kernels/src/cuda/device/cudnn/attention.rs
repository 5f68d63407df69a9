//! Causal attention as graphs: forward, one operation with a mask inside it; backward, taken apart, from which engines make
//! one again.
//!
//! These are the operations that NVIDIA's frontend (`cudnn-frontend`, `sdpa` and `sdpa_backward`) writes for the same
//! thing, since engines know attention by its pattern.

use super::descriptor::{Descriptor, Refused};
use super::graph::{BF16, F32, Graph, OF_ROWS, OF_SCORES, Sizes, Tensor, Uid};
use super::interface::{Kind, Name, Pointwise, Raw};
use crate::cuda::LibraryShape;

/// `out` and `lse` from `q`, `k`, `v`.
pub(super) fn forward(shape: LibraryShape) -> Result<Graph, Refused> {
    let sizes = Sizes::of(shape);
    let mut graph = Graph::of(sizes)?;
    let q = graph.tensor(Uid::Q, BF16, sizes.q())?;
    let k = graph.tensor(Uid::K, BF16, sizes.k())?;
    let v = graph.tensor(Uid::V, BF16, sizes.v())?;
    let out = graph.tensor(Uid::Out, BF16, sizes.out())?;
    let lse = graph.tensor(Uid::Lse, F32, sizes.stored_rows())?;
    let scale = graph.scalar(Uid::Scale)?;

    let scores = graph.passing(F32, sizes.scores())?;
    let probs = graph.passing(F32, sizes.scores())?;
    let softmax = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_SOFTMAX_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_OPERATION_SOFTMAX_XDESC, scores.raw())?
        .with(Name::CUDNN_ATTR_OPERATION_SOFTMAX_YDESC, probs.raw())?
        .with(Name::CUDNN_ATTR_OPERATION_SOFTMAX_STATS_DESC, lse.raw())?
        .finalized()?;
    let softmax = graph.hold(softmax);
    let mask = mask_graph(&mut graph, sizes)?;

    let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, q.raw())?
        .with(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, k.raw())?
        .with(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, v.raw())?
        .with(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, out.raw())?
        .with(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SOFTMAX_DESC, softmax)?
        .with(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, scale.raw())?
        .with(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH, mask.graph)?
        .with(
            Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID,
            mask.input,
        )?
        .with(
            Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID,
            mask.output,
        )?;
    if let Some(lengths) = graph.lengths() {
        operation = operation
            .with(
                Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_QDESC,
                lengths.raw(),
            )?
            .with(
                Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_KVDESC,
                lengths.raw(),
            )?;
    }
    graph.add(operation.finalized()?);
    Ok(graph)
}

/// What happens to scores before the softmax, as a graph within an operation.
struct MaskGraph {
    graph: Raw,
    input: i64,
    output: i64,
}

fn mask_graph(graph: &mut Graph, sizes: Sizes) -> Result<MaskGraph, Refused> {
    let fill = graph.scalar(Uid::Masked)?;
    let input = graph.passing(F32, sizes.scores())?;
    let output = graph.passing(F32, sizes.scores())?;
    let mut inner = Graph::default();
    inner.causal_mask(input, fill, output)?;
    let (finished, kept) = inner.finished::<i64>(None)?;
    kept.into_iter().for_each(|descriptor| {
        graph.hold(descriptor);
    });
    Ok(MaskGraph {
        graph: graph.hold(finished),
        input: input.uid,
        output: output.uid,
    })
}

/// `dq`, `dk`, `dv` from `dout`, `q`, `k`, `v`, `out` and `lse`. Sums of dq are f32 in memory that is handed over, where blocks add
/// to them in the order that the engine's knobs ask for.
pub(super) fn backward(shape: LibraryShape) -> Result<Graph, Refused> {
    const EXP: Pointwise = Pointwise::CUDNN_POINTWISE_EXP;
    const IDENTITY: Pointwise = Pointwise::CUDNN_POINTWISE_IDENTITY;
    const MUL: Pointwise = Pointwise::CUDNN_POINTWISE_MUL;
    const SUB: Pointwise = Pointwise::CUDNN_POINTWISE_SUB;
    let sizes = Sizes::of(shape);
    let mut graph = Graph::of(sizes)?;
    let (scores, rows) = (sizes.scores(), sizes.stored_rows());
    let q = graph.tensor(Uid::Q, BF16, sizes.q())?;
    // Products read keys and values with their dimensions exchanged.
    let k = graph.tensor(Uid::K, BF16, sizes.k().transposed())?;
    let v = graph.tensor(Uid::V, BF16, sizes.v().transposed())?;
    let out = graph.tensor(Uid::Out, BF16, sizes.out())?;
    let dout = graph.tensor(Uid::Dout, BF16, sizes.out())?;
    let lse = graph.tensor(Uid::Lse, F32, rows)?;
    let dq = graph.tensor(Uid::Dq, BF16, sizes.q())?;
    let dk = graph.tensor(Uid::Dk, BF16, sizes.k())?;
    let dv = graph.tensor(Uid::Dv, BF16, sizes.v())?;
    let [scale, masked, one] = [
        graph.scalar(Uid::Scale)?,
        graph.scalar(Uid::Masked)?,
        graph.scalar(Uid::One)?,
    ];

    // Row sums of dout * out.
    let product = graph.passing(F32, sizes.by_head())?;
    let product = graph.pointwise(MUL, dout, Some(out), product)?;
    let sums = graph.passing(F32, sizes.rows())?;
    let sums = graph.sum(product, sums)?;
    let row_sums = graph.tensor(Uid::RowSums, F32, rows)?;
    let row_sums = graph.pointwise(MUL, sums, Some(one), row_sums)?;

    // The probabilities again: exp(scale q k^T - lse), zero above the diagonal.
    let next = |graph: &mut Graph| graph.passing(F32, scores);
    let score = next(&mut graph)?;
    let score = graph.product([q, k, score], OF_SCORES)?;
    let scaled = next(&mut graph)?;
    let scaled = graph.pointwise(MUL, score, Some(scale), scaled)?;
    let shifted = next(&mut graph)?;
    let shifted = graph.pointwise(SUB, scaled, Some(lse), shifted)?;
    let within = match graph.lengths() {
        Some(lengths) => graph.length_mask(shifted, lengths, scores)?,
        None => shifted,
    };
    let seen = next(&mut graph)?;
    let seen = graph.causal_mask(within, masked, seen)?;
    let probs = next(&mut graph)?;
    let probs = graph.pointwise(EXP, seen, None, probs)?;

    // dv = probs^T dout.
    let turned = graph.passing(BF16, scores.transposed())?;
    let turned = graph.reshape(probs, turned)?;
    product_over_heads(&mut graph, sizes, [turned, dout, dv], Uid::DvOfHeads)?;

    // ds = scale (dout v^T - row sums) * probs.
    let dp = next(&mut graph)?;
    let dp = graph.product([dout, v, dp], OF_SCORES)?;
    let less = next(&mut graph)?;
    let less = graph.pointwise(SUB, dp, Some(row_sums), less)?;
    let weighted = next(&mut graph)?;
    let weighted = graph.pointwise(MUL, less, Some(probs), weighted)?;
    let ds = next(&mut graph)?;
    let ds = graph.pointwise(MUL, weighted, Some(scale), ds)?;

    // dk = ds^T q.
    let turned = graph.passing(BF16, scores.transposed())?;
    let turned = graph.reshape(ds, turned)?;
    product_over_heads(&mut graph, sizes, [turned, q, dk], Uid::DkOfHeads)?;

    // dq = ds k.
    let keys = graph.passing(F32, sizes.k())?;
    let keys = graph.reshape(k, keys)?;
    let sums = graph.tensor(Uid::DqSums, F32, sizes.dq_sums())?;
    let sums = graph.product([ds, keys, sums], OF_ROWS)?;
    graph.pointwise(IDENTITY, sums, None, dq)?;
    Ok(graph)
}

/// `out` = `a` `b` for every query head, added up over the heads that share a key-value head. Where documents are packed, those of
/// every head are in memory that is handed over: the library's own would be for documents that are all as long as the longest.
fn product_over_heads(
    graph: &mut Graph,
    sizes: Sizes,
    [a, b, out]: [Tensor; 3],
    of_heads: Uid,
) -> Result<(), Refused> {
    if sizes.heads == sizes.kv_heads {
        graph.product([a, b, out], OF_ROWS)?;
        return Ok(());
    }
    let of_each = match sizes.has_documents {
        true => graph.tensor(of_heads, BF16, sizes.of_heads())?,
        false => graph.passing(BF16, sizes.of_heads())?,
    };
    let of_each = graph.product([a, b, of_each], OF_ROWS)?;
    graph.sum(of_each, out)?;
    Ok(())
}
