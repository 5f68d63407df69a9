//! Numbers, absences and forms that contradict tensors which fit one by one.

use half::bf16;
use kernels::{
    CachedAttention, CachedConvolution, Dropout, GateFunction, MasterOperand, MomentOperand,
    Operation, Positions, Positive, Route, RouterGroups, Routing, SplitQkv,
};
use memory::{Element, In, Out};

/// A change after which an operation contradicts itself in some call.
pub struct Contradiction {
    pub text: &'static str,
    /// Changes an operation if it is this one.
    pub edit: Box<dyn Fn(&mut Operation) -> bool>,
    /// What the refusal says.
    pub message: &'static str,
}

/// A change of the operation `of`, and the message.
macro_rules! contradiction {
    ($operation:ident($of:ident) => $edit:expr, $message:expr) => {
        Contradiction {
            text: concat!(stringify!($operation), ": ", stringify!($edit)),
            edit: Box::new(move |operation| {
                let Operation::$operation($of) = operation else {
                    return false;
                };
                $edit;
                true
            }),
            message: $message,
        }
    };
}

/// As many zeros, which live as long as the test.
fn zeros<T: Element + Default + Clone>(elements: usize) -> Out<'static> {
    Out::of_slice(vec![T::default(); elements].leak(), [elements])
}

/// Of a router, no case of which has so many experts.
fn logits(tokens: usize) -> In<'static> {
    zeros::<f32>(tokens * 513).into_in().reshape([tokens, 513])
}

fn with(dropout: Option<Dropout>, probability: f32) -> Option<Dropout> {
    dropout.map(|dropout| Dropout {
        probability,
        ..dropout
    })
}

/// Weights of a convolution with so many taps.
fn taps(weight: In, taps: usize) -> In<'static> {
    let columns = weight.dims()[0];
    let weights = zeros::<f32>(columns * taps).into_in();
    weights.reshape([columns, taps])
}

/// Asks for so many sequences, with as many taps.
fn sequences(of: &mut CachedConvolution, count: usize, weight: In<'static>) {
    let [columns, taps] = [0, 1].map(|dim| weight.dims()[dim]);
    let kept = taps.saturating_sub(1);
    (of.weight, of.lengths) = (weight, zeros::<i32>(count).into_in());
    of.before = zeros::<f32>(count * kept * columns).reshape([count, kept, columns]);
}

/// Experts that a token is sent to; groups, those chosen, and those of a group whose choices are added up.
type Routes = (usize, Option<[usize; 3]>);

/// Asks for scores alone, by another routing.
fn route(of: &mut Route, (choices, groups): Routes) {
    (of.ids, of.weights) = (None, None);
    let groups = groups.map(|[count, chosen, best]| RouterGroups {
        count,
        chosen,
        best,
    });
    of.routing = Routing {
        choices,
        groups,
        ..of.routing
    };
}

/// Asks for no part of a row, or for parts of other widths.
fn split(of: &mut SplitQkv, kv_widths: [usize; 2]) {
    (of.q, of.k, of.v) = (None, None, None);
    of.kv_widths = kv_widths;
}

/// Asks for values that are wider than the keys.
fn widen_values(of: &mut CachedAttention) {
    of.shape.v_head_dim = of.shape.qk_head_dim + 1;
    let [rows, width] = of.shape.out();
    of.out = zeros::<f32>(rows * width).reshape([rows, width]);
}

pub fn contradictions() -> Vec<Contradiction> {
    let mut all = of_layers();
    all.extend(of_heads());
    all.extend(of_deltas());
    all.extend(of_routers());
    all.extend(of_updates());
    all
}

fn of_layers() -> Vec<Contradiction> {
    let mut all = vec![
        contradiction!(RmsNorm(of) => of.y = None, "`y` is left out"),
        contradiction!(LayerNorm(of) => of.y = None, "`y` is left out"),
        contradiction!(Rotary(of) => of.head_dim = 0, "not whole heads of 0"),
        contradiction!(Rotary(of) => of.head_dim = 1, "are to be turned"),
        contradiction!(RotaryTail(of) => of.head_dim = 0, "not whole heads of 0"),
        contradiction!(RotaryTail(of) => of.head_dim = 1, "are to be turned"),
        contradiction!(BiasDropoutAdd(of) => of.scale = f32::NAN, "a finite number"),
        contradiction!(DropoutScale(of) => of.scale = f32::INFINITY, "a finite number"),
        contradiction!(SumInOrder(of) => of.x = of.x.rows(0..0), "no rows"),
    ];
    // Sequences of none, that do not divide the tokens, and longer than the table: cases have 74, or 111.
    for (seqs, message) in [
        ([0, 0], "of 0"),
        ([4, 2], "whole sequences"),
        ([74, 111], "longer"),
    ] {
        let [rotary, learned] = seqs.map(Positions::Sequences);
        all.extend([
            contradiction!(Rotary(of) => of.positions = rotary, message),
            contradiction!(AddPositions(of) => of.positions = learned, message),
            contradiction!(AddPositionsBackward(of) => of.positions = learned, message),
        ]);
    }
    for number in [-1.0, f32::NAN, f32::INFINITY] {
        all.extend([
            contradiction!(PolicyGradientLoss(of) => of.clip_low = number, "`clip_low` is "),
            contradiction!(PolicyGradientLoss(of) => of.clip_high = number, "`clip_high` is "),
            contradiction!(PolicyGradientLoss(of) => of.beta = number, "`beta` is "),
        ]);
    }
    all.push(contradiction!(PolicyGradientLoss(of) => (of.beta, of.reference) = (0.1, None), "there is no `reference`"));
    for number in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        all.extend([
            contradiction!(CrossEntropy(of) => of.cap = Some(number), "`cap` is "),
            contradiction!(SoftCap(of) => of.cap = number, "`cap` is "),
        ]);
        for (alpha, limit, message) in
            [(number, 7.0, "`alpha` is "), (1.702, number, "`limit` is ")]
        {
            let function = GateFunction::ClampedSwish { alpha, limit };
            all.extend([
                contradiction!(GatedActivation(of) => of.function = function, message),
                contradiction!(GatedActivationBackward(of) => of.function = function, message),
                contradiction!(WeighedGatedActivation(of) => of.function = function, message),
                contradiction!(WeighedGatedActivationBackward(of) => of.function = function, message),
            ]);
        }
    }
    for probability in [1.0, -0.1, f32::NAN, f32::INFINITY] {
        let message = "dropout of ";
        all.extend([
            contradiction!(BiasDropoutAdd(of) => of.dropout = with(of.dropout, probability), message),
            contradiction!(DropoutScale(of) => of.dropout = with(of.dropout, probability), message),
            contradiction!(Attention(of) => of.dropout = with(of.dropout, probability), message),
            contradiction!(AttentionBackward(of) => of.dropout = with(of.dropout, probability), message),
            contradiction!(FlashAttention(of) => of.options.dropout = with(of.options.dropout, probability), message),
            contradiction!(FlashAttentionBackward(of) => of.options.dropout = with(of.options.dropout, probability), message),
        ]);
    }
    all
}

fn of_heads() -> Vec<Contradiction> {
    let mut all = vec![
        contradiction!(SplitQkv(of) => split(of, [of.qkv.dims()[1], 0]), "leave none of"),
        contradiction!(SplitQkv(of) => split(of, [1, 1]), "not whole heads"),
        contradiction!(ExpandKeys(of) => (of.k, of.v) = (None, None), "neither `k` nor `v`"),
        contradiction!(ExpandKeysBackward(of) => of.heads = 0, "not whole heads of 0"),
        contradiction!(CachedAttention(of) => of.shape.kv_heads = 0, "do not divide into 0 groups"),
        contradiction!(CachedAttention(of) => widen_values(of), "no part of keys"),
        contradiction!(Attention(of) => of.sinks = None, "there are no `sinks`"),
        contradiction!(AttentionBackward(of) => of.sinks = None, "and there are none"),
        contradiction!(AttentionBackward(of) => of.lse = None, "given together"),
        contradiction!(FlashAttentionBackward(of) => of.sinks = None, "and there are none"),
    ];
    for (heads, message) in [
        (0, "not whole heads of 0"),
        (7, "heads"),
        (1, "do not add up"),
    ] {
        all.push(contradiction!(ExpandKeys(of) => of.heads = heads, message));
    }
    let groups = "do not divide into";
    for (kv_heads, message) in [(0, groups), (1, "`k` is"), (3, groups)] {
        all.extend([
            contradiction!(Attention(of) => of.shape.kv_heads = kv_heads, message),
            contradiction!(FlashAttention(of) => of.shape.kv_heads = kv_heads, message),
        ]);
    }
    let no_keys = "a window of no keys";
    all.extend([
        contradiction!(Attention(of) => of.shape.window = Some(0), no_keys),
        contradiction!(FlashAttention(of) => of.shape.window = Some(0), no_keys),
        contradiction!(CachedAttention(of) => of.shape.window = Some(0), no_keys),
    ]);
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let (scale, message) = (Some(Positive::new(scale)), "a positive number");
        all.extend([
            contradiction!(Attention(of) => of.shape.scale = scale, message),
            contradiction!(FlashAttention(of) => of.shape.scale = scale, message),
            contradiction!(CachedAttention(of) => of.shape.scale = scale, message),
            contradiction!(Attention(of) => of.shape.cap = scale, "capped at a positive number"),
            contradiction!(FlashAttention(of) => of.shape.cap = scale, "capped at a positive number"),
            contradiction!(CachedAttention(of) => of.shape.cap = scale, "capped at a positive number"),
        ]);
    }
    all
}

fn of_deltas() -> Vec<Contradiction> {
    let (uneven, wide) = ("do not share 2 key heads evenly", "at most 128 columns");
    let mut all = vec![
        contradiction!(GatedDelta(of) => of.shape.value_dim = 0, "a size of 0"),
        contradiction!(GatedDelta(of) => of.shape.state_interval = 0, "a size of 0"),
        contradiction!(GatedDelta(of) => of.shape.value_heads += 1, uneven),
        contradiction!(GatedDelta(of) => of.shape.key_dim = 129, wide),
        contradiction!(GatedDeltaBackward(of) => of.shape.key_heads = 0, "a size of 0"),
        contradiction!(GatedDeltaBackward(of) => of.shape.value_heads += 1, uneven),
        contradiction!(GatedDeltaBackward(of) => of.shape.key_dim = 129, wide),
        contradiction!(CachedDelta(of) => of.shape.seq = 0, "a size of 0"),
        contradiction!(CachedDelta(of) => of.shape.value_heads += 1, uneven),
        contradiction!(CachedDelta(of) => of.shape.key_dim = 129, wide),
    ];
    for count in [0, 3] {
        let message = "not as many for each of";
        all.push(contradiction!(CachedConvolution(of) => sequences(of, count, taps(of.weight, 4)), message));
    }
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        all.push(contradiction!(GatedNorm(of) => of.eps = eps, "`eps` is "));
    }
    for (count, message) in [(0, "not 0"), (9, "1 to 8 taps, not 9")] {
        all.extend([
            contradiction!(ShortConvolution(of) => of.weight = taps(of.weight, count), message),
            contradiction!(CachedConvolution(of) => sequences(of, 1, taps(of.weight, count)), message),
            contradiction!(ShortConvolutionBackward(of) => {
                of.weight = taps(of.weight, count);
                of.dweight = zeros::<f32>(of.weight.elements()).reshape([of.weight.dims()[0], count]);
            }, message),
        ]);
    }
    for (seq, message) in [(0, "sequences of 0"), (11, "whole sequences")] {
        all.extend([
            contradiction!(ShortConvolution(of) => (of.documents, of.seq) = (None, seq), message),
            contradiction!(ShortConvolutionBackward(of) => (of.documents, of.seq) = (None, seq), message),
        ]);
    }
    all
}

fn of_routers() -> Vec<Contradiction> {
    let experts_max = "at most 512 experts";
    let mut all = vec![
        contradiction!(RouterZLoss(of) => of.logits = logits(of.losses.elements()), experts_max),
        contradiction!(GroupByExpert(of) => (of.offsets, of.experts) = (None, 513), experts_max),
        contradiction!(Route(of) => route(of, (2, Some([of.logits.dims()[1], 1, 2]))), "no 2 best"),
        contradiction!(Route(of) => route(of, (2, Some([of.logits.dims()[1], 1, 1]))), "2 of 1 experts"),
        contradiction!(BalanceLoss(of) => of.pooled = 0, "not groups of 0"),
        contradiction!(BalanceLoss(of) => of.pooled = 1000, "not groups of 1000"),
    ];
    let routes: [(Routes, &str); 8] = [
        ((0, None), "0 of "),
        ((513, None), "513 of "),
        ((1, Some([0, 1, 1])), "not 0 equal groups"),
        ((1, Some([511, 1, 1])), "not 511 equal groups"),
        ((1, Some([1, 0, 1])), "0 of 1 groups"),
        ((1, Some([1, 2, 1])), "2 of 1 groups"),
        ((1, Some([1, 1, 0])), "no 0 best"),
        ((1, Some([1, 1, 3])), "no 3 best"),
    ];
    all.extend(
        routes.map(|(routes, message)| contradiction!(Route(of) => route(of, routes), message)),
    );
    all
}

fn of_updates() -> Vec<Contradiction> {
    let (no_master, other) = ("f32 weights are their own master", "not of the same form");
    let mut all = vec![
        contradiction!(AdamW(of) => of.master = MasterOperand::F32(zeros::<f32>(of.parameters.elements())), no_master),
        contradiction!(AdamW(of) => of.master = MasterOperand::Remainder(zeros::<i16>(of.parameters.elements())), no_master),
        contradiction!(AdamW(of) => of.master = MasterOperand::RemainderByte(zeros::<u8>(of.parameters.elements())), no_master),
        contradiction!(AdamW(of) => of.first_moment = MomentOperand::Plain(zeros::<bf16>(of.parameters.elements())), other),
        contradiction!(AdamW(of) => of.second_moment = MomentOperand::Plain(zeros::<f32>(of.parameters.elements())), other),
        contradiction!(AdafactorRate(of) => (of.elements, of.squares) = (0, zeros::<f64>(0).into_in().reshape([2, 0])), "no element"),
    ];
    // Blocks of 256 and random numbers count from a range's first element.
    for first in [1, 255, 257] {
        let message = "`first_index` is ";
        all.extend([
            contradiction!(AdamW(of) => of.first_index = first, message),
            contradiction!(Momentum(of) => of.first_index = first, message),
            contradiction!(StepAlong(of) => of.first_index = first, message),
            contradiction!(AdafactorStep(of) => of.first_index = first, message),
        ]);
    }
    all
}
