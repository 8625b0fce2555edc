//! The vendor-neutral core of Signal: GPU collectives from one synchronization protocol.
//!
//! # Layers, and who answers for what
//! - `kernels/signal` holds the device side of the protocol, once, for every platform.
//! - [`layout`] and [`kernel`] are its mirror: the memory that ranks share and the parameters of each kernel, asserted
//!   byte by byte on both sides.
//! - A [`Backend`] provides devices, memory, streams and launches, and knows nothing of collectives. Its contract stands
//!   at the trait.
//! - A [`Communicator`] is one rank. Its typed calls check everything that can be checked on the host before anything is
//!   enqueued; what remains, that all ranks make the same calls in the same order, ends as [`Error::Timeout`] if it is
//!   broken, never as a hang.
//! - Kernels of a user ([`Call::launch_kernel`]) get the host's checks too; what they do is theirs, by the rules that
//!   `include/signal/device.h` states.
//! - The raw layer ([`Call::all_reduce_raw`]) takes addresses; its caller answers for their lifetime.
//!
//! Data flows one way: settings and shapes become a [`Plan`], a plan and addresses become parameters, parameters become
//! one launch. Everything that changes from call to call (counters, epochs, sequence numbers) lives on the device, so
//! that a captured graph replays without the host.
//!
//! Nothing here depends on a vendor. [`reference`](mod@reference) states the arithmetic; every backend must match it bit by bit.

pub mod backend;
mod buffer;
mod collective;
mod comm;
pub mod deferred;
mod dtype;
pub mod error;
pub mod image;
pub mod kernel;
pub mod layout;
pub mod mapping;
mod peer;
mod plan;
pub mod reference;
pub mod rendezvous;
mod settings;
mod signal;
mod tuning;

pub use self::backend::{
    Backend, DeviceFamily, DeviceInfo, Entry, Launch, Link, MemoryKind, PeerAccess, Readers, StreamId,
};
pub use self::buffer::{DeviceBuffer, Slice, SliceMut};
pub use self::collective::Collective;
pub use self::comm::{
    AbortHandle, BarrierProbe, Builder, Call, CallOptions, Communicator, Domain, LayerNorm, NormOutput, Registration,
    RmsNorm, Transfers, UserKernel, UserLaunch,
};
pub use self::dtype::{Dtype, E4m3, E5m2, Element, Float, ReduceOp};
pub use self::error::{ApiMisuse, Error, Result, Timeout};
pub use self::kernel::{Algorithm, FastSum, Kernel, Phase};
pub use self::layout::Signal;
pub use self::peer::prove_peer;
pub use self::plan::Plan;
pub use self::rendezvous::{Id, Rendezvous, TcpRendezvous, UnixRendezvous};
pub use self::settings::{Settings, parse_bytes};
pub use self::signal::{SIGNAL_BUFFER_BYTES, SignalPtr};
pub use self::tuning::{Tuning, TuningRow, TuningTable};
