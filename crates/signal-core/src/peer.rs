//! Proving by data that one device reaches another's memory: drivers have answered "yes" and dropped the writes.

use bytemuck::bytes_of;

use crate::backend::{Backend, Launch, Link, MemoryKind, PeerAccess};
use crate::error::{Error, Result};
use crate::kernel::{Kernel, PeerProbeParams};

/// Words that the probe writes: more than one page.
const WORDS: usize = 2048;
const SEED: u32 = 0x5eed_0001;

/// Enables access from `from` to the memory of `to`, writes there by a kernel on `from`, and checks what arrived, read
/// back by `from` and read by `to` itself.
///
/// # Errors
/// [`Error::Peer`] with the pair and the reason; errors of the driver.
pub fn prove_peer<B: Backend>(from: &B::Device, to: &B::Device) -> Result<()> {
    prove_peer_with::<B>(from, to, &B::load(from)?, &B::create_stream(from)?, &B::create_stream(to)?).map(|_| ())
}

/// [`prove_peer`] with what the caller has at hand; gives what connects the two.
pub(crate) fn prove_peer_with<B: Backend>(
    from: &B::Device,
    to: &B::Device,
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

    let far = B::allocate(to, WORDS * 4, MemoryKind::PeerVisible)?;
    let wrong = B::allocate(from, 4, MemoryKind::Device)?;
    B::fill(far_stream, &far, 0, WORDS * 4, !SEED)?;
    B::synchronize(far_stream)?;
    B::fill(near_stream, &wrong, 0, 4, 0)?;
    for check in [0, 1] {
        let params = PeerProbeParams {
            remote: B::address(&far),
            mismatches: B::address(&wrong),
            words: WORDS as u32,
            seed: SEED,
            check,
            delay: 0,
        };
        let launch = Launch {
            kernel: Kernel::PeerProbe,
            grid: 1,
            threads: 64,
            params: bytes_of(&params),
            early: false,
            uses: &[&far, &wrong],
        };
        // SAFETY: the parameters are the probe's, its addresses are of buffers named in `uses`, and nobody else knows
        // them.
        unsafe { B::launch(near_stream, module, &launch)? };
    }
    let mut found = [0u32];
    B::download(near_stream, &wrong, 0, bytemuck::cast_slice_mut(&mut found))?;
    if found[0] != 0 {
        return Err(refuse("what was written does not read back".to_owned()));
    }
    let mut arrived = vec![0u32; WORDS];
    B::download(far_stream, &far, 0, bytemuck::cast_slice_mut(&mut arrived))?;
    let expected = |i: usize| SEED.wrapping_add((i as u32).wrapping_mul(2_654_435_761));
    match arrived.iter().enumerate().find(|&(i, &word)| word != expected(i)) {
        Some((i, word)) => Err(refuse(format!("word {i} arrived as {word:#x} instead of {:#x}", expected(i)))),
        None => Ok(link),
    }
}
