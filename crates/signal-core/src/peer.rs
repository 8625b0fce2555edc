//! Proving by data that one device reaches another's memory: drivers have answered "yes" and dropped the writes.

use bytemuck::bytes_of;

use crate::backend::{Backend, Launch, Link, MemoryKind, PeerAccess};
use crate::error::{Error, Result};
use crate::kernel::{Kernel, PeerProbeParams};

/// Words that the probe writes: more than one page.
const WORDS: usize = 2048;
/// Bytes that a probe writes.
pub(crate) const PATTERN_BYTES: usize = WORDS * 4;
const SEED: u32 = 0x5eed_0001;

/// Enables access from `from` to the memory of `to`, writes there by a kernel on `from`, and checks what arrived, read
/// back by `from` and read by `to` itself. `kind` is one that peers see: [`MemoryKind::PeerVisible`], of which a communicator of one
/// process is made, or [`MemoryKind::Shared`].
///
/// # Errors
/// [`Error::Peer`] with the pair and the reason; errors of the driver.
pub fn prove_peer<B: Backend>(from: &B::Device, to: &B::Device, kind: MemoryKind) -> Result<()> {
    prove_peer_with::<B>((from, to), kind, &B::load(from)?, &B::create_stream(from)?, &B::create_stream(to)?)
        .map(|_| ())
}

/// [`prove_peer`] with what the caller has at hand; gives what connects the two.
pub(crate) fn prove_peer_with<B: Backend>(
    (from, to): (&B::Device, &B::Device),
    kind: MemoryKind,
    module: &B::Module,
    near_stream: &B::Stream,
    far_stream: &B::Stream,
) -> Result<Link> {
    let refuse = |why: String| Error::Peer { from: B::describe(from).label(), to: B::describe(to).label(), why };
    let PeerAccess { link, refusal } = B::peer_access(from, to)?;
    if let Some(why) = refusal {
        return Err(refuse(why));
    }
    if from != to {
        B::enable_peer(from, to)?;
    }

    let far = B::allocate(to, WORDS * 4, kind)?;
    B::fill(far_stream, &far, 0, WORDS * 4, !SEED)?;
    B::synchronize(far_stream)?;
    write_pattern::<B>(near_stream, module, &far, 0, SEED)
        .and_then(|()| read_pattern::<B>(far_stream, &far, 0, SEED))
        .map_err(|failed| failed.into_error(refuse))?;
    Ok(link)
}

/// Why a pattern is not where it was written.
pub(crate) enum Failed {
    Driver(Error),
    Data(String),
}

impl Failed {
    /// `refuse` makes an error of what the data showed.
    pub(crate) fn into_error(self, refuse: impl FnOnce(String) -> Error) -> Error {
        match self {
            Failed::Driver(error) => error,
            Failed::Data(why) => refuse(why),
        }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed::Driver(error)
    }
}

/// Writes a pattern of [`PATTERN_BYTES`] at byte `offset` of `memory`, by a kernel on the stream's device, and reads it back there.
pub(crate) fn write_pattern<B: Backend>(
    stream: &B::Stream,
    module: &B::Module,
    memory: &B::Buffer,
    offset: usize,
    seed: u32,
) -> Result<(), Failed> {
    let wrong = B::allocate(&B::stream_device(stream), 4, MemoryKind::Device)?;
    B::fill(stream, &wrong, 0, 4, 0)?;
    for check in [0, 1] {
        let params = PeerProbeParams {
            remote: B::address(memory) + offset as u64,
            mismatches: B::address(&wrong),
            words: WORDS as u32,
            seed,
            check,
            delay: 0,
        };
        let launch = Launch {
            kernel: Kernel::PeerProbe.into(),
            grid: 1,
            threads: 64,
            params: bytes_of(&params),
            early: false,
            uses: &[memory, &wrong],
        };
        // SAFETY: the parameters are the probe's, its addresses are of buffers named in `uses`, and nobody else uses that part of
        // them now.
        unsafe { B::launch(stream, module, &launch)? };
    }
    let mut found = [0u32];
    B::download(stream, &wrong, 0, bytemuck::cast_slice_mut(&mut found))?;
    if found[0] != 0 { Err(Failed::Data("what was written does not read back".to_owned())) } else { Ok(()) }
}

/// Checks that the pattern has arrived at byte `offset` of `memory`, as the stream's device, whose memory it is, sees it.
pub(crate) fn read_pattern<B: Backend>(
    stream: &B::Stream,
    memory: &B::Buffer,
    offset: usize,
    seed: u32,
) -> Result<(), Failed> {
    let mut arrived = vec![0u32; WORDS];
    B::download(stream, memory, offset, bytemuck::cast_slice_mut(&mut arrived))?;
    let expected = |i: usize| seed.wrapping_add((i as u32).wrapping_mul(2_654_435_761));
    match arrived.iter().enumerate().find(|&(i, &word)| word != expected(i)) {
        Some((i, word)) => Err(Failed::Data(format!("word {i} arrived as {word:#x} instead of {:#x}", expected(i)))),
        None => Ok(()),
    }
}
