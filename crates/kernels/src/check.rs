//! One check an operation, made before any backend sees it.

use crate::attention::{Pass, scratch_elements};
use crate::operation::{
    AddBias, Attention, AttentionBackward, BiasBackward, CrossEntropy, Embedding,
    EmbeddingBackward, Fill, FlashAttention, FlashAttentionBackward, Matmul, NormAndClip, RmsNorm,
    RmsNormBackward, Rotary, Sum, Swiglu, SwigluBackward,
};
use crate::quantise::BLOCK;
use crate::queue::bytes_of;
use crate::{
    AdamW, AttentionShape, Backend, FlashOptions, Init, KernelError, Master, Moment, NORM_PARTS,
    Operation, READING_BYTES_MAX, Target, flash, operation,
};
use memory::{DType, In, Out};

type Checked = Result<(), KernelError>;

/// What the checks read of a view.
trait Shaped {
    fn shape(&self) -> &[usize];
    fn kind(&self) -> DType;
    fn contiguous(&self) -> bool;
}

impl Shaped for In<'_> {
    fn shape(&self) -> &[usize] {
        self.dims()
    }
    fn kind(&self) -> DType {
        self.dtype()
    }
    fn contiguous(&self) -> bool {
        self.is_contiguous()
    }
}

impl Shaped for Out<'_> {
    fn shape(&self) -> &[usize] {
        self.dims()
    }
    fn kind(&self) -> DType {
        self.dtype()
    }
    fn contiguous(&self) -> bool {
        self.is_contiguous()
    }
}

/// Checks of one operation, with its name for the message.
struct Check(&'static str);

impl Check {
    fn that(&self, condition: bool, message: impl FnOnce() -> String) -> Checked {
        if condition {
            Ok(())
        } else {
            Err(KernelError::misfit(self.0, message()))
        }
    }

    /// A contiguous tensor of this shape and type.
    fn tensor(&self, name: &str, x: &dyn Shaped, shape: &[usize], dtype: DType) -> Checked {
        self.that(x.shape() == shape, || {
            format!("`{name}` is {:?}, expected {shape:?}", x.shape())
        })?;
        self.that(x.kind() == dtype, || {
            format!("`{name}` holds {:?}, expected {dtype:?}", x.kind())
        })?;
        self.that(x.contiguous(), || {
            format!("`{name}` is strided, expected contiguous")
        })
    }

    fn real(&self, name: &str, x: &dyn Shaped) -> Checked {
        let real = matches!(x.kind(), DType::F32 | DType::BF16);
        self.that(real, || {
            format!("`{name}` holds {:?}, expected F32 or BF16", x.kind())
        })
    }

    /// A contiguous tensor of this shape that holds f32 or bf16, whatever the compute type: gradients.
    fn gradient(&self, name: &str, x: &dyn Shaped, shape: &[usize]) -> Checked {
        self.real(name, x)?;
        self.tensor(name, x, shape, x.kind())
    }

    fn rank(&self, name: &str, x: &dyn Shaped, rank: usize) -> Checked {
        let fits = x.shape().len() == rank;
        self.that(fits, || {
            format!("`{name}` is {:?}, expected {rank} dimensions", x.shape())
        })
    }

    fn init(&self, init: &Init, out: &dyn Shaped) -> Checked {
        match init {
            Init::Add(x) => self.tensor("init", x, out.shape(), out.kind()),
            Init::Overwrite | Init::Accumulate => Ok(()),
        }
    }

    fn no_residual(&self, init: &Init) -> Checked {
        self.that(!matches!(init, Init::Add(_)), || {
            "only matmul adds to another tensor".into()
        })
    }
}

/// A tensor and as many host bytes.
pub(crate) fn transfer(operation: &'static str, tensor: &In, host: usize) -> Checked {
    let check = Check(operation);
    let bytes = bytes_of(tensor);
    check.that(tensor.is_contiguous(), || {
        "the tensor is strided, expected contiguous".into()
    })?;
    check.that(bytes == host, || {
        format!("the tensor has {bytes} bytes, the host side {host}")
    })
}

/// A few bytes for the host.
pub(crate) fn start_read(x: &In) -> Checked {
    let check = Check("start_read");
    let bytes = bytes_of(x);
    check.that(x.is_contiguous() && bytes <= READING_BYTES_MAX, || {
        format!("a reading is contiguous and at most {READING_BYTES_MAX} bytes, not {bytes}")
    })
}

/// A copy beside the computation.
pub(crate) fn start_copy(operation: &'static str, out: &Out, x: &In) -> Checked {
    let check = Check(operation);
    check.that(out.is_contiguous() && x.is_contiguous(), || {
        "a side is strided, expected contiguous".into()
    })?;
    let sides = [(out.dtype(), out.elements()), (x.dtype(), x.elements())];
    check.that(sides[0] == sides[1], || {
        format!("`out` has {:?}, `x` {:?}", sides[0], sides[1])
    })
}

/// Refuses an operation that does not fit, or that the backend was not made for.
pub(crate) fn operation(backend: &dyn Backend, operation: &Operation) -> Checked {
    let check = &Check(operation.name());
    match operation {
        Operation::Fill(operation) => fill(check, operation),
        Operation::Copy(operation) => copy(check, operation),
        Operation::Matmul(operation) => matmul(check, backend.widens(), operation),
        Operation::AddBias(operation) => add_bias(check, operation),
        Operation::BiasBackward(operation) => bias_backward(check, operation),
        Operation::Embedding(operation) => embedding(check, operation),
        Operation::EmbeddingBackward(operation) => embedding_backward(check, operation),
        Operation::RmsNorm(operation) => rms_norm(check, operation),
        Operation::RmsNormBackward(operation) => rms_norm_backward(check, operation),
        Operation::Rotary(operation) => rotary(check, operation),
        Operation::Attention(operation) => attention(check, backend.target(), operation),
        Operation::AttentionBackward(operation) => {
            attention_backward(check, backend.target(), operation)
        }
        Operation::FlashAttention(operation) => flash_attention(check, backend.target(), operation),
        Operation::FlashAttentionBackward(operation) => {
            flash_attention_backward(check, backend.target(), operation)
        }
        Operation::Swiglu(operation) => swiglu(check, operation),
        Operation::SwigluBackward(operation) => swiglu_backward(check, operation),
        Operation::CrossEntropy(operation) => cross_entropy(check, operation),
        Operation::Sum(operation) => sum(check, operation),
        Operation::NormAndClip(operation) => norm_and_clip(check, operation),
        Operation::AdamW(update) => adamw(check, update),
    }
}

fn fill(check: &Check, Fill { out, value: _ }: &Fill) -> Checked {
    check.real("out", out)?;
    check.that(out.is_contiguous(), || {
        "`out` is strided, expected contiguous".into()
    })
}

fn copy(check: &Check, operation::Copy { out, x }: &operation::Copy) -> Checked {
    check.real("out", out)?;
    check.real("x", x)?;
    check.tensor("out", out, x.dims(), out.dtype())?;
    check.tensor("x", x, x.dims(), x.dtype())
}

/// `widens`: whether there is a workspace to widen bf16 in, or no need for one.
fn matmul(check: &Check, widens: bool, Matmul { out, a, b, init }: &Matmul) -> Checked {
    for (name, x) in [("out", out as &dyn Shaped), ("a", a), ("b", b)] {
        check.rank(name, x, 2)?;
        check.real(name, x)?;
    }
    let (m, k, n) = (a.dims()[0], a.dims()[1], b.dims()[1]);
    check.that(b.dims()[0] == k, || {
        format!(
            "`a` is {:?} and `b` {:?}: inner sizes differ",
            a.dims(),
            b.dims()
        )
    })?;
    check.tensor("out", out, &[m, n], out.dtype())?;
    let all_f32 = [out.dtype(), a.dtype(), b.dtype()] == [DType::F32; 3];
    check.that(widens || all_f32, || {
        "these kernels were made for f32 and have no workspace to widen bf16 in".into()
    })?;
    check.init(init, out)
}

fn add_bias(check: &Check, AddBias { out, bias }: &AddBias) -> Checked {
    check.rank("out", out, 2)?;
    check.real("out", out)?;
    check.tensor("out", out, out.dims(), out.dtype())?;
    check.tensor("bias", bias, &out.dims()[1..], out.dtype())
}

fn bias_backward(check: &Check, BiasBackward { out, dy, init }: &BiasBackward) -> Checked {
    check.no_residual(init)?;
    check.rank("dy", dy, 2)?;
    check.real("dy", dy)?;
    check.tensor("dy", dy, dy.dims(), dy.dtype())?;
    check.gradient("out", out, &dy.dims()[1..])
}

fn embedding(check: &Check, Embedding { out, table, ids }: &Embedding) -> Checked {
    check.rank("table", table, 2)?;
    check.rank("ids", ids, 1)?;
    check.real("table", table)?;
    check.tensor("table", table, table.dims(), table.dtype())?;
    check.tensor("ids", ids, ids.dims(), DType::I32)?;
    check.tensor("out", out, &[ids.dims()[0], table.dims()[1]], table.dtype())
}

fn embedding_backward(check: &Check, operation: &EmbeddingBackward) -> Checked {
    let EmbeddingBackward {
        dtable,
        dout,
        ids,
        init,
    } = operation;
    check.no_residual(init)?;
    check.rank("dtable", dtable, 2)?;
    check.rank("ids", ids, 1)?;
    check.real("dout", dout)?;
    check.gradient("dtable", dtable, dtable.dims())?;
    check.tensor("ids", ids, ids.dims(), DType::I32)?;
    check.tensor(
        "dout",
        dout,
        &[ids.dims()[0], dtable.dims()[1]],
        dout.dtype(),
    )
}

fn rms_norm(check: &Check, operation: &RmsNorm) -> Checked {
    let RmsNorm {
        y,
        rstd,
        x,
        weight,
        eps: _,
    } = operation;
    check.rank("x", x, 2)?;
    check.real("x", x)?;
    check.tensor("x", x, x.dims(), x.dtype())?;
    check.tensor("weight", weight, &x.dims()[1..], x.dtype())?;
    if let Some(y) = y {
        check.tensor("y", y, x.dims(), x.dtype())?;
    }
    match rstd {
        Some(rstd) => check.tensor("rstd", rstd, &x.dims()[..1], DType::F32),
        None => Ok(()),
    }
}

fn rms_norm_backward(check: &Check, operation: &RmsNormBackward) -> Checked {
    let RmsNormBackward {
        dx,
        dx_init,
        dweight,
        dweight_init,
        dy,
        x,
        weight,
        rstd,
    } = operation;
    check.no_residual(dx_init)?;
    check.no_residual(dweight_init)?;
    check.rank("x", x, 2)?;
    check.real("x", x)?;
    for (name, tensor) in [("dx", dx as &dyn Shaped), ("dy", dy), ("x", x)] {
        check.tensor(name, tensor, x.dims(), x.dtype())?;
    }
    check.tensor("weight", weight, &x.dims()[1..], x.dtype())?;
    check.gradient("dweight", dweight, &x.dims()[1..])?;
    check.tensor("rstd", rstd, &x.dims()[..1], DType::F32)
}

fn rotary(check: &Check, operation: &Rotary) -> Checked {
    let Rotary {
        x,
        table,
        inverse: _,
    } = operation;
    check.rank("x", x, 2)?;
    check.real("x", x)?;
    check.rank("table", table, 3)?;
    check.tensor("x", x, x.dims(), x.dtype())?;
    check.tensor(
        "table",
        table,
        &[2, table.dims()[1], table.dims()[2]],
        DType::F32,
    )?;
    let (seq, head_dim) = (table.dims()[1], 2 * table.dims()[2]);
    let whole = x.dims()[0].is_multiple_of(seq) && x.dims()[1].is_multiple_of(head_dim);
    check.that(whole, || {
        format!(
            "`x` is {:?}: not whole sequences of {seq} and heads of {head_dim}",
            x.dims()
        )
    })
}

/// Shapes of q, k, v and what is shaped like them.
fn attention_tensors(
    check: &Check,
    like_q: &[(&str, &dyn Shaped)],
    like_k: &[(&str, &dyn Shaped)],
    shape: AttentionShape,
) -> Checked {
    let whole = shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads);
    check.that(whole, || {
        format!(
            "{} heads do not divide into {} groups",
            shape.heads, shape.kv_heads
        )
    })?;
    let dtype = like_q[0].1.kind();
    check.real(like_q[0].0, like_q[0].1)?;
    let tokens = shape.batch * shape.seq;
    for (name, x) in like_q {
        check.tensor(name, *x, &[tokens, shape.heads * shape.head_dim], dtype)?;
    }
    for (name, x) in like_k {
        check.tensor(name, *x, &[tokens, shape.kv_heads * shape.head_dim], dtype)?;
    }
    Ok(())
}

fn attention(check: &Check, target: Target, operation: &Attention) -> Checked {
    let Attention {
        out,
        probs,
        scratch,
        q,
        k,
        v,
        shape,
    } = operation;
    let shape = *shape;
    attention_tensors(check, &[("q", q)], &[("k", k), ("v", v)], shape)?;
    if let Some(out) = out {
        attention_tensors(check, &[("q", q), ("out", out)], &[], shape)?;
    }
    if let Some(probs) = probs {
        check.tensor("probs", probs, &shape.probs(), q.dtype())?;
    }
    let pass = Pass::Forward {
        probs_kept: probs.is_some(),
    };
    check.tensor(
        "scratch",
        scratch,
        &[scratch_elements(target, shape, q.dtype(), pass)],
        DType::F32,
    )
}

fn attention_backward(check: &Check, target: Target, operation: &AttentionBackward) -> Checked {
    let AttentionBackward {
        dq,
        dk,
        dv,
        scratch,
        dout,
        probs,
        q,
        k,
        v,
        shape,
    } = operation;
    let shape = *shape;
    let like_k: [(&str, &dyn Shaped); 4] = [("k", k), ("v", v), ("dk", dk), ("dv", dv)];
    attention_tensors(
        check,
        &[("q", q), ("dq", dq), ("dout", dout)],
        &like_k,
        shape,
    )?;
    check.tensor("probs", probs, &shape.probs(), q.dtype())?;
    check.tensor(
        "scratch",
        scratch,
        &[scratch_elements(target, shape, q.dtype(), Pass::Backward)],
        DType::F32,
    )
}

fn flash_attention(check: &Check, target: Target, operation: &FlashAttention) -> Checked {
    let FlashAttention {
        out,
        lse,
        scratch,
        q,
        k,
        v,
        shape,
        options,
    } = operation;
    let shape = *shape;
    attention_tensors(check, &[("q", q)], &[("k", k), ("v", v)], shape)?;
    if let Some(out) = out {
        attention_tensors(check, &[("q", q), ("out", out)], &[], shape)?;
    }
    if let Some(lse) = lse {
        let statistics = [shape.batch, shape.heads, shape.seq];
        check.tensor("lse", lse, &statistics, DType::F32)?;
    }
    flash_options(check, shape, options)?;
    let elements = flash::scratch_elements(target, shape, q.dtype(), flash::Pass::Forward);
    check.tensor("scratch", scratch, &[elements], DType::F32)
}

fn flash_attention_backward(
    check: &Check,
    target: Target,
    operation: &FlashAttentionBackward,
) -> Checked {
    let FlashAttentionBackward {
        dq,
        dk,
        dv,
        scratch,
        dout,
        out,
        lse,
        q,
        k,
        v,
        shape,
        options,
    } = operation;
    let shape = *shape;
    let like_q: [(&str, &dyn Shaped); 4] = [("q", q), ("dq", dq), ("dout", dout), ("out", out)];
    let like_k: [(&str, &dyn Shaped); 4] = [("k", k), ("v", v), ("dk", dk), ("dv", dv)];
    attention_tensors(check, &like_q, &like_k, shape)?;
    let statistics = [shape.batch, shape.heads, shape.seq];
    check.tensor("lse", lse, &statistics, DType::F32)?;
    flash_options(check, shape, options)?;
    let elements = flash::scratch_elements(target, shape, q.dtype(), flash::Pass::Backward);
    check.tensor("scratch", scratch, &[elements], DType::F32)
}

fn flash_options(check: &Check, shape: AttentionShape, options: &FlashOptions) -> Checked {
    if let Some(documents) = &options.documents {
        let tokens = [shape.batch, shape.seq];
        check.tensor("documents", documents, &tokens, DType::I32)?;
    }
    let probability = options.dropout.map_or(0.0, |dropout| dropout.probability);
    check.that((0.0..1.0).contains(&probability), || {
        format!("dropout of {probability}, expected from 0 to below 1")
    })
}

fn swiglu(check: &Check, Swiglu { act, gate, up }: &Swiglu) -> Checked {
    check.real("gate", gate)?;
    for (name, x) in [("gate", gate as &dyn Shaped), ("up", up), ("act", act)] {
        check.tensor(name, x, gate.dims(), gate.dtype())?;
    }
    Ok(())
}

fn swiglu_backward(check: &Check, SwigluBackward { gate, up, dact }: &SwigluBackward) -> Checked {
    check.real("gate", gate)?;
    for (name, x) in [("gate", gate as &dyn Shaped), ("up", up), ("dact", dact)] {
        check.tensor(name, x, gate.dims(), gate.dtype())?;
    }
    Ok(())
}

fn cross_entropy(check: &Check, operation: &CrossEntropy) -> Checked {
    let CrossEntropy {
        losses,
        logits,
        targets,
        scale: _,
    } = operation;
    check.rank("logits", logits, 2)?;
    check.real("logits", logits)?;
    check.tensor("logits", logits, logits.dims(), logits.dtype())?;
    check.tensor("losses", losses, &logits.dims()[..1], DType::F32)?;
    check.tensor("targets", targets, &logits.dims()[..1], DType::I32)
}

fn sum(check: &Check, Sum { out, x, init }: &Sum) -> Checked {
    check.no_residual(init)?;
    check.rank("x", x, 1)?;
    check.tensor("x", x, x.dims(), DType::F32)?;
    check.tensor("out", out, &[1], DType::F32)
}

fn norm_and_clip(check: &Check, operation: &NormAndClip) -> Checked {
    let NormAndClip {
        out,
        parts,
        x,
        loss,
        max_norm: _,
    } = operation;
    check.rank("x", x, 1)?;
    check.gradient("x", x, x.dims())?;
    check.tensor("loss", loss, &[1], DType::F32)?;
    check.tensor("parts", parts, &[NORM_PARTS], DType::F64)?;
    check.tensor("out", out, &[2], DType::F32)
}

fn moment(check: &Check, name: &str, moment: &Moment, elements: usize) -> Checked {
    match moment {
        Moment::Plain(moment) => check.gradient(name, moment, &[elements]),
        Moment::Quantised { codes, absmax } => {
            let blocks = elements.div_ceil(BLOCK);
            check.tensor(&format!("{name}.codes"), codes, &[elements], DType::U8)?;
            check.tensor(&format!("{name}.absmax"), absmax, &[blocks], DType::F32)
        }
    }
}

/// The type of a moment's elements, which tells its form.
fn form(moment: &Moment) -> DType {
    match moment {
        Moment::Plain(moment) => moment.dtype(),
        Moment::Quantised { codes, .. } => codes.dtype(),
    }
}

fn master(check: &Check, master: &Master, elements: usize, weights: DType) -> Checked {
    let needless = || "f32 weights are their own master".into();
    match master {
        Master::Parameters => Ok(()),
        Master::F32(master) => {
            check.tensor("master", master, &[elements], DType::F32)?;
            check.that(weights == DType::BF16, needless)
        }
        Master::Remainder(remainder) => {
            check.tensor("remainder", remainder, &[elements], DType::I16)?;
            check.that(weights == DType::BF16, needless)
        }
    }
}

fn adamw(check: &Check, update: &AdamW) -> Checked {
    let parameters = &update.parameters;
    check.rank("parameters", parameters, 1)?;
    check.real("parameters", parameters)?;
    let (elements, weights) = (parameters.elements(), parameters.dtype());
    check.tensor("parameters", parameters, &[elements], weights)?;
    master(check, &update.master, elements, weights)?;
    moment(check, "first_moment", &update.first_moment, elements)?;
    moment(check, "second_moment", &update.second_moment, elements)?;
    check.that(
        form(&update.first_moment) == form(&update.second_moment),
        || "`first_moment` and `second_moment` are not of the same form".into(),
    )?;
    check.gradient("gradients", &update.gradients, &[elements])?;
    check.tensor("rates", &update.rates, &[3], DType::F32)?;
    check.tensor("clip", &update.clip, &[2], DType::F32)?;
    check.tensor("key", &update.key, &[2], DType::U32)?;
    check.that(update.first_index.is_multiple_of(BLOCK as u64), || {
        format!(
            "`first_index` is {}, expected a multiple of {BLOCK}",
            update.first_index
        )
    })
}
