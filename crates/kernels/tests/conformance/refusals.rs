//! What does not fit is refused by name, before anything is written.
//!
//! The suite's cases make the calls. Where calls are only checked, each is tried with every mistake in one of its tensors,
//! and with numbers that contradict them: what is not refused is listed here. Where calls are computed, the same is refused.

use crate::contradictions::{Contradiction, contradictions};
use crate::device::{Device, Tensor, computing, planning};
use crate::host::Host;
use crate::layout::{COLUMNS, Layout, PLAIN, TRANSPOSED};
use crate::{DTYPES, SUITE, case};
use kernels::{Init, OperandPlace, Operation};
use memory::{DType, Dims, In, Out};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr;
use std::rc::Rc;

/// Types that some tensor of some operation has.
const EVERY_TYPE: [DType; 9] = [
    DType::F32,
    DType::BF16,
    DType::F64,
    DType::I32,
    DType::I16,
    DType::U32,
    DType::U8,
    DType::F8E4M3,
    DType::F8E5M2,
];

/// The variations that each operation accepts in its tensors: the size of a dimension, the compute type or another, the rank, gaps
/// between rows, columns in place of rows, and a tensor that the result is added to. A question mark: in some calls only, since
/// it depends on numbers, on what else is given, or on the kernels' type.
const FREE: &str = "
abs_max: x rank, x type, x[0]
adafactor_step: gradients type, parameters type?
adamw: gradients type, parameters type?
add_bias: out gaps, out[0]
add_positions: table[0], x[0]?
add_positions_backward: dtable type, dtable[0], dx type, dx[0]?
attention_backward: dsinks type
balance_loss: lengths[0]?
bias_backward: dy gaps, dy type, dy[0], out type?
bias_dropout_add: out type?, out[0]?, out[1]?
cached_attention: k_cache[0]?, table[1]
cached_convolution: x gaps
cached_delta: a gaps, b gaps
combine: out type
copy: out gaps, out type, x gaps, x type
count_choices: counts[0]?, counts[1], ids[0]?, ids[1]
cross_entropy: logits type, logits[1]
dequantise_bytes: out rank, out type
dequantise_mxfp4: out rank, out type, out[0]?
dequantise_nf4: out rank, out type, out[0]?
divide_by_norm: x type, x[0]
embedding: table[0]
embedding_backward: dout type, dtable type, dtable[0]
expert_bias_dweights: bias[0], ids rank
expert_bias_gradient: dy type, dy[0], out type, weights rank
factor_variance: sums[0]
fill: out rank, out type, out[0]
flash_attention_backward: dsinks type
gated_delta: a gaps, b gaps
gated_delta_backward: a gaps, b gaps, da gaps, da_log type, db gaps, ddt_bias type
gated_norm: z gaps
gated_norm_backward: dweight type, dz gaps, z gaps
gelu: x type?
gram: out type?, x gaps, x transposed, x type?, x[1]
grouped_gradient: dy[0]?, out type?, rows[0]?
grouped_matmul: rows[0]?
join_qkv: table[1]?, table[2]?
layer_norm_backward: dbias type, dweight type
matmul: a gaps, a transposed, a type?, b gaps, b transposed, b type?, init added, out gaps, out type?
momentum: gradients type, momentum type, out type
norm_and_clip: grains[0]
norm_grains: x type, x[0]?
quantise: codes F8E4M3, codes F8E5M2, underflows gaps, underflows[0], x type
quantise_transposed: x type, x[0]?
rms_norm_backward: dweight type
rotary: table[1], table[2]?, x gaps, x type, x[0]?
rotary_tail: table[1], table[2]?, x type, x[0]?
route: lengths[0]?
route_backward: balance[0]?, dlogits type, lengths[0]?
router_z_loss: lengths[0]?, logits[1]?
scaled_matmul: a F8E4M3, a F8E5M2?, b F8E4M3, b F8E5M2?, init added, out type?
short_convolution: weight[1]?, x gaps
short_convolution_backward: dweight type, dx gaps, x gaps
soft_cap: x rank, x type, x[0]
split_qkv: table[1]?, table[2]?
step_along: direction type, parameters type?
store_in_cache: k_cache[0]?, table[1]
sum: x[0]
sum_in_order: x[0]
sum_rows: bias[0], bias_weights rank, ids rank, init added
swiglu: gate_up type?
transpose_codes: x[0]?
update_squares: gradients type
variance_scale: grains[0]
variance_sums: gradients type, gradients[0]?
weighed_swiglu: bias[0], ids rank, weights rank
weighed_swiglu_backward: bias[0], ids rank
weight_squares: parameters type?, parameters[0]?
";

/// Where an operation has a tensor.
struct Spot {
    name: String,
    kind: Kind,
    /// None: an [`Init`] without a tensor.
    is_given: bool,
    /// Bytes from the operation's beginning.
    offset: usize,
    dtype: DType,
    dims: Vec<usize>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    In,
    Out,
    Init,
}

fn spots(operation: &Operation) -> Vec<Spot> {
    let start = ptr::from_ref(operation).addr();
    let mut spots: Vec<Spot> = Vec::new();
    operation.each_operand(&mut |row| {
        let (kind, address) = match row.place {
            OperandPlace::In(x) => (Kind::In, ptr::from_ref(x).addr()),
            OperandPlace::Out(x) => (Kind::Out, ptr::from_ref(x).addr()),
            OperandPlace::Init(x) => (Kind::Init, ptr::from_ref(x).addr()),
        };
        let view = row.view();
        spots.push(Spot {
            name: row.name(),
            kind,
            is_given: view.is_some(),
            offset: address - start,
            dtype: view.map_or(DType::F32, |view| view.dtype()),
            dims: view.map_or(vec![], |view| view.dims().to_vec()),
        });
    });
    // What could be added to a result is like the result.
    let mut outs = spots.iter().filter(|spot| spot.kind == Kind::Out);
    if let Some((dtype, dims)) = outs.next().map(|out| (out.dtype, out.dims.clone())) {
        for spot in spots.iter_mut().filter(|spot| !spot.is_given) {
            (spot.dtype, spot.dims) = (dtype, dims.clone());
        }
    }
    spots
}

/// A tensor in place of one that fits.
struct Other {
    /// As in [`FREE`].
    mistake: String,
    dtype: DType,
    dims: Vec<usize>,
    layout: Layout,
}

/// Every way in which the tensor of a spot may be otherwise.
fn others(spot: &Spot) -> Vec<Other> {
    let (own, rank) = (&spot.dims, spot.dims.len());
    let other = |mistake: String, dims: &[usize], dtype, layout| Other {
        mistake,
        dtype,
        dims: dims.to_vec(),
        layout,
    };
    if !spot.is_given {
        return vec![other(" added".into(), own, spot.dtype, PLAIN)];
    }
    let mut others = Vec::new();
    for dim in 0..rank {
        let mut dims = own.clone();
        dims[dim] += 1;
        others.push(other(format!("[{dim}]"), &dims, spot.dtype, PLAIN));
    }
    for dtype in EVERY_TYPE.into_iter().filter(|dtype| *dtype != spot.dtype) {
        let are_real = [dtype, spot.dtype].iter().all(|of| DTYPES.contains(of));
        let mistake = match are_real {
            true => " type".into(),
            false => format!(" {dtype:?}"),
        };
        others.push(other(mistake, own, dtype, PLAIN));
    }
    let elements = own.iter().product();
    let flat = &[elements, 1][..if rank == 1 { 2 } else { 1 }];
    others.push(other(" rank".into(), flat, spot.dtype, PLAIN));
    if rank == 2 {
        others.push(other(" gaps".into(), own, spot.dtype, COLUMNS));
    }
    // A single row or column may also lie so.
    let is_matrix = matches!(own[..], [.., rows, columns] if rows.min(columns) > 1);
    if is_matrix && spot.kind != Kind::Out {
        others.push(other(" transposed".into(), own, spot.dtype, TRANSPOSED));
    }
    others
}

impl Other {
    /// Room for it, of which it is a view.
    fn room(&self, device: &Device) -> Tensor {
        let mut dims = self.dims.clone();
        if let [.., rows, columns] = dims.as_mut_slice() {
            *columns += 2 * self.layout.margin;
            if self.layout.transposed {
                std::mem::swap(rows, columns);
            }
        }
        device.room(self.dtype, Dims::try_from(dims.as_slice()).unwrap())
    }

    fn view<'a>(&self, tensor: &'a Tensor) -> In<'a> {
        match (self.layout.transposed, self.layout.margin) {
            (true, _) => tensor.view().t(),
            (false, 0) => tensor.view(),
            (false, _) => self.layout.view(tensor.view()),
        }
    }

    fn view_mut<'a>(&self, tensor: &'a mut Tensor) -> Out<'a> {
        match self.layout.margin {
            0 => tensor.view_mut(),
            _ => self.layout.view_mut(tensor.view_mut()),
        }
    }
}

/// The same operation on the same tensors.
fn copied<'a>(operation: &Operation<'a>) -> Operation<'a> {
    // SAFETY: operations are views and numbers, of which nothing is dropped, and are run one by one.
    unsafe { ptr::read(operation) }
}

/// An operation with one mistake.
struct Mistaken<'a> {
    mistake: Mistake,
    operation: Operation<'a>,
    /// What a refusal says.
    message: &'static str,
    _tensor: Option<Tensor>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mistake {
    /// In a tensor of this operation, as in [`FREE`].
    Tensor(&'static str, String),
    /// That of this index.
    Contradiction(usize),
}

/// An operation with every mistake in a tensor, and with every contradiction.
fn mistaken<'a>(
    device: &Device,
    operation: &Operation<'a>,
    contradictions: &[Contradiction],
) -> Vec<Mistaken<'a>> {
    let mut all = Vec::new();
    for spot in spots(operation) {
        for other in others(&spot) {
            let (name, mut tensor) = (operation.name(), other.room(device));
            let message = match spot.is_given {
                true => "",
                false => "only `matmul` and `sum_rows` add to another tensor",
            };
            all.push(Mistaken {
                mistake: Mistake::Tensor(name, format!("{}{}", spot.name, other.mistake)),
                operation: with_other(operation, &spot, &other, &mut tensor),
                message,
                _tensor: Some(tensor),
            });
        }
    }
    for (index, contradiction) in contradictions.iter().enumerate() {
        let mut operation = copied(operation);
        if (contradiction.edit)(&mut operation) {
            all.push(Mistaken {
                mistake: Mistake::Contradiction(index),
                operation,
                message: contradiction.message,
                _tensor: None,
            });
        }
    }
    all
}

/// The operation with another tensor, which has to outlive it.
fn with_other<'a>(
    operation: &Operation<'a>,
    spot: &Spot,
    other: &Other,
    tensor: &mut Tensor,
) -> Operation<'a> {
    let mut operation = copied(operation);
    let place = ptr::from_mut(&mut operation).cast::<u8>();
    // SAFETY: the operation has such a view there; callers keep the tensor beside it.
    unsafe {
        let place = place.add(spot.offset);
        match spot.kind {
            Kind::In => *place.cast() = other.view(tensor).outliving(),
            Kind::Out => *place.cast() = other.view_mut(tensor).outliving(),
            Kind::Init => *place.cast() = Init::Add(other.view(tensor).outliving()),
        }
    }
    operation
}

/// The contents of contiguous outputs.
fn outputs(device: &Device, operation: &Operation) -> Vec<Vec<u8>> {
    let mut outputs = Vec::new();
    operation.each_operand(&mut |row| match row.place {
        OperandPlace::Out(out) if out.is_contiguous() => {
            let mut bytes = vec![0; out.bytes()];
            device.kernels.download(&mut bytes, out.as_in()).unwrap();
            outputs.push(bytes);
        }
        _ => {}
    });
    outputs
}

/// The names of an operation and of its tensors.
fn form(operation: &Operation) -> Vec<String> {
    let names = spots(operation).into_iter().map(|spot| spot.name);
    [operation.name().into()].into_iter().chain(names).collect()
}

/// Mistakes that were accepted or refused in some call, and the forms of all calls.
#[derive(Default)]
struct Tried {
    accepted: BTreeSet<Mistake>,
    refused: BTreeSet<Mistake>,
    forms: BTreeSet<Vec<String>>,
}

impl Tried {
    fn every_mistake(
        &mut self,
        device: &Device,
        operation: &Operation,
        contradictions: &[Contradiction],
    ) {
        for mistaken in mistaken(device, operation, contradictions) {
            let Err(error) = device.kernels.run(copied(&mistaken.operation)) else {
                self.accepted.insert(mistaken.mistake);
                continue;
            };
            assert_eq!(error.operation, operation.name(), "{error}");
            match error.message.contains(mistaken.message) {
                true => _ = self.refused.insert(mistaken.mistake),
                false => assert!(mistaken._tensor.is_none(), "{error}: {}", mistaken.message),
            }
        }
        self.forms.insert(form(operation));
    }
}

/// What is refused where it is only checked is refused alike where it is computed, and nothing is written.
fn refuse_alike(
    [checking, device]: [&Device; 2],
    operation: &Operation,
    contradictions: &[Contradiction],
) {
    let before = outputs(device, operation);
    for mistaken in mistaken(device, operation, contradictions) {
        let run = |device: &Device| device.kernels.run(copied(&mistaken.operation));
        if let Err(error) = run(checking) {
            assert_eq!(
                run(device),
                Err(error),
                "{}: {:?}",
                device.name,
                mistaken.mistake
            );
        }
    }
    let is_unchanged = outputs(device, operation) == before;
    assert!(is_unchanged, "{}: {} wrote", device.name, operation.name());
}

/// Modules of cases and cases, by their numbers.
type Places = BTreeSet<(usize, usize)>;

/// Tries every call of every case, and tells in which cases a form comes first.
fn try_every_call(mut device: Device, dtype: DType, tried: &Rc<RefCell<Tried>>) -> Places {
    let (contradictions, noted) = (contradictions(), tried.clone());
    device.watch = Some(Box::new(move |device, operation| {
        let mut tried = noted.borrow_mut();
        tried.every_mistake(device, operation, &contradictions);
    }));
    tried.borrow_mut().forms.clear();
    let mut firsts = Places::new();
    for (module, (_, cases)) in SUITE.iter().enumerate() {
        for (index, case) in cases(dtype).iter().enumerate() {
            let before = tried.borrow().forms.len();
            case::run(case.as_ref(), &device);
            if tried.borrow().forms.len() > before {
                firsts.insert((module, index));
            }
        }
    }
    firsts
}

/// Runs some cases, the first of each form with every mistake.
fn compute(mut device: Device, dtype: DType, cases: &Places) {
    let is_same = |checking: &Device| checking.kernels.target() == device.kernels.target();
    let checking = planning(dtype).into_iter().find(is_same).unwrap();
    let (contradictions, forms) = (contradictions(), RefCell::new(BTreeSet::new()));
    device.watch = Some(Box::new(move |device, operation| {
        if forms.borrow_mut().insert(form(operation)) {
            refuse_alike([&checking, device], operation, &contradictions);
        }
    }));
    for (module, index) in cases {
        let case = SUITE[*module].1(dtype).swap_remove(*index);
        case::run(case.as_ref(), &device);
    }
}

/// Everything that checks.
pub fn devices(dtype: DType) -> impl Iterator<Item = Device> {
    computing(dtype).into_iter().chain(planning(dtype))
}

#[test]
fn what_does_not_fit_is_refused() {
    let tried = Rc::new(RefCell::new(Tried::default()));
    for dtype in DTYPES {
        let mut firsts = Places::new();
        for device in planning(dtype) {
            firsts.extend(try_every_call(device, dtype, &tried));
        }
        for device in computing(dtype) {
            compute(device, dtype, &firsts);
        }
    }
    let tried = tried.borrow();
    let operations: BTreeSet<&String> = tried.forms.iter().map(|form| &form[0]).collect();
    assert_eq!(operations.len(), Operation::COUNT);
    let contradictions = contradictions().into_iter().enumerate();
    let taken = contradictions.filter(|(index, _)| {
        let mistake = Mistake::Contradiction(*index);
        !tried.refused.contains(&mistake)
    });
    let taken: Vec<_> = taken.map(|(_, of)| (of.text, of.message)).collect();
    assert_eq!(taken, [], "contradictions that no call refuses");
    let mut free = BTreeMap::<&str, Vec<String>>::new();
    for mistake in &tried.accepted {
        if let Mistake::Tensor(operation, what) = mistake {
            let mark = if tried.refused.contains(mistake) {
                "?"
            } else {
                ""
            };
            let of_operation = free.entry(operation).or_default();
            of_operation.push(format!("{what}{mark}"));
        }
    }
    let lines = free.iter();
    let lines = lines.map(|(operation, what)| format!("{operation}: {}", what.join(", ")));
    let lines: Vec<String> = lines.collect();
    assert_eq!(lines.join("\n"), FREE.trim());
}

#[test]
fn transfers_of_another_size_or_of_strided_tensors_are_refused() {
    let of_all = |dtype| devices(dtype).map(move |device| (dtype, device));
    for (dtype, device) in DTYPES.into_iter().flat_map(of_all) {
        let (before, kernels) = (Host::random(dtype, [4, 6], 1.0, 1), &device.kernels);
        let mut tensor = device.put(&before);
        for bytes in [0, before.bytes.len() - 1, before.bytes.len() + 1] {
            let mut host = vec![7; bytes];
            let error = kernels.upload(tensor.view_mut(), &host).unwrap_err();
            assert_eq!(error.operation, "upload");
            let error = kernels.download(&mut host, tensor.view()).unwrap_err();
            assert_eq!(error.operation, "download");
            assert!(host.iter().all(|byte| *byte == 7));
        }
        let mut host = vec![7; before.bytes.len()];
        let error = kernels.download(&mut host, tensor.view().t());
        assert_eq!(error.unwrap_err().operation, "download");
        assert!(device.memory.is_shapes() || device.take(&tensor) == before);
    }
}
