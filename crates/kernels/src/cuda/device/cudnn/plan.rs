//! A plan: a graph, the engine that computes it, and what that engine takes.

use super::attention;
use super::descriptor::{Descriptor, Pointer, Refused};
use super::graph::{Graph, Uid};
use super::interface::{self as sys, CudnnHandle, Kind, Knob, Mode, Name, Status};
use crate::cuda::{AttentionPass, LibraryShape};

/// The engine of the backward pass on Hopper, and how it is set: in tiles of 64 queries and 64 keys (`TILE_M`, `TILE_N`,
/// `KERNEL_CFG`), with sums of dq that blocks add to in turn (`STAGES` 4), so that the result has the same bits every time and
/// takes memory that is linear in the sequence. The heuristic's own choice adds to them in any order.
const BACKWARD_ENGINE: i64 = 6;
const BACKWARD_KNOBS: [(Knob, i64); 6] = [
    (Knob::CUDNN_KNOB_TYPE_TILE_M, 2),
    (Knob::CUDNN_KNOB_TYPE_TILE_N, 1),
    (Knob::CUDNN_KNOB_TYPE_KERNEL_CFG, 2),
    (Knob::CUDNN_KNOB_TYPE_STREAM_K, 0),
    (Knob::CUDNN_KNOB_TYPE_TILE_CGA_M, 0),
    (Knob::CUDNN_KNOB_TYPE_STAGES, 4),
];

/// Most answers of the heuristic that are tried.
const CHOICES_MAX: usize = 8;

/// What a plan is made for.
#[derive(Clone, Copy)]
pub(super) enum Device<'a> {
    /// The device of a handle.
    Handle(CudnnHandle),
    /// A device that need not be there, by its properties.
    Described(&'a Descriptor),
}

/// A graph that can be run.
pub(super) struct Plan {
    plan: Descriptor,
    /// What the library takes beside the tensors.
    pub(super) workspace_bytes: usize,
    /// Everything that the plan refers to.
    _kept: Vec<Descriptor>,
}

impl Plan {
    pub(super) fn new(
        device: Device,
        shape: LibraryShape,
        pass: AttentionPass,
    ) -> Result<Plan, Refused> {
        let made: Graph = match pass {
            AttentionPass::Forward => attention::forward(shape)?,
            AttentionPass::Backward => attention::backward(shape)?,
        };
        let handle = match device {
            Device::Handle(handle) => Some((Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle)),
            Device::Described(_) => None,
        };
        let (graph, mut kept) = made.finished(handle)?;
        let (plan, chosen) = match pass {
            AttentionPass::Forward => first_choice(device, &graph)?,
            AttentionPass::Backward => ordered_backward(device, &graph)?,
        };
        kept.push(graph);
        kept.extend(chosen);
        let workspace_bytes = plan.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
        Ok(Plan {
            plan,
            workspace_bytes: workspace_bytes.max(0) as usize,
            _kept: kept,
        })
    }

    /// Runs the graph in the handle's stream.
    ///
    /// # Safety
    /// The tensors are those of the graph, in device memory that nothing else writes and that they do not share where one is
    /// written; scalars are on the host. `workspace` starts as many bytes as the plan takes.
    pub(super) unsafe fn run(
        &self,
        handle: CudnnHandle,
        tensors: &[(Uid, *const u8)],
        workspace: *mut u8,
    ) -> Result<(), Refused> {
        let uids: Vec<i64> = tensors.iter().map(|(uid, _)| *uid as i64).collect();
        let pointers: Vec<Pointer> = tensors.iter().map(|(_, at)| Pointer(*at)).collect();
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .with_all(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?
            .with_all(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &uids)?
            .with(
                Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
                Pointer(workspace.cast_const()),
            )?
            .finalized()?;
        // SAFETY: the caller's promise; numbers on the host are read before the call returns.
        let status = unsafe { sys::cudnnBackendExecute(handle, self.plan.raw(), pack.raw()) };
        super::descriptor::accepted(status, || "running attention".into())
    }

    /// The plan as the library writes it down, machine code included.
    pub(super) fn written(&self) -> Result<Vec<u8>, Refused> {
        let name = Name::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION;
        self.plan.text(name)
    }
}

/// A plan and what it refers to.
type Planned = (Descriptor, Vec<Descriptor>);

/// The first of the heuristic's engines that can do it. It follows from the graph and the device alone.
fn first_choice(device: Device, graph: &Descriptor) -> Result<Planned, Refused> {
    let heuristic = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.raw())?
        .with(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Mode::CUDNN_HEUR_MODE_A)?;
    let heuristic = match device {
        Device::Handle(_) => heuristic,
        Device::Described(properties) => {
            heuristic.with(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, properties.raw())?
        }
    };
    let heuristic = heuristic.finalized()?;
    let choices = heuristic.list(
        Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
        Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
        CHOICES_MAX,
    )?;
    let mut refused = None;
    for choice in choices {
        match planned(device, &choice) {
            Ok(plan) => return Ok((plan, vec![choice])),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.unwrap_or_else(|| {
        let status = Status::CUDNN_STATUS_NOT_SUPPORTED;
        Refused::because(status, "no engine knows this graph")
    }))
}

/// The engine that adds to dq in order.
fn ordered_backward(device: Device, graph: &Descriptor) -> Result<Planned, Refused> {
    let engine = Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph.raw())?
        .with(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, BACKWARD_ENGINE)?;
    let engine = match device {
        Device::Handle(_) => engine,
        Device::Described(properties) => {
            engine.with(Name::CUDNN_ATTR_ENGINE_DEVICEPROP, properties.raw())?
        }
    };
    let engine = engine.finalized()?;
    let knob = |(knob, value): (Knob, i64)| {
        Descriptor::new(Kind::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, knob)?
            .with(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, value)?
            .finalized()
    };
    let knobs = BACKWARD_KNOBS.into_iter().map(knob);
    let mut kept = knobs.collect::<Result<Vec<_>, Refused>>()?;
    let raw: Vec<_> = kept.iter().map(Descriptor::raw).collect();
    let choice = Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_ENGINECFG_ENGINE, engine.raw())?
        .with_all(Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, &raw)?
        .finalized()?;
    let plan = planned(device, &choice)?;
    kept.extend([engine, choice]);
    Ok((plan, kept))
}

fn planned(device: Device, choice: &Descriptor) -> Result<Descriptor, Refused> {
    let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, choice.raw())?;
    let plan = match device {
        Device::Handle(handle) => plan.with(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle)?,
        Device::Described(properties) => {
            plan.with(Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, properties.raw())?
        }
    };
    plan.finalized()
}
