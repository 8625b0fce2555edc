//! `--sweep`: the grid that is fastest at a size, out of place where the collective has that.

use signal_comm::{Backend, DeviceFamily, Element, Error};

use super::args::Args;
use super::data::Sets;
use super::load;
use super::ranks::Ranks;
use super::shape::Place;
use crate::error::{CliError, Result};

/// Threads and blocks to try.
type Candidates = (&'static [u32], &'static [u32]);

const GPU: Candidates = (&[64, 128, 256, 512, 1024], &[1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]);
/// Each thread is one of the machine's.
const HOST: Candidates = (&[1, 2], &[1, 2, 4]);
/// Batches of each grid: enough to tell it from others, the winner is measured again.
const BATCHES: u32 = 7;
/// Packs that a thread may have to do by itself.
const MOST_PACKS: usize = 256;

/// Blocks, threads, and microseconds a call.
pub(super) type Tried = (u32, u32, f64);

/// Tries the grids that suit this size, and leaves the ranks with the fastest, which comes first.
pub(super) fn sweep<B: Backend, T: Element>(
    ranks: &mut Ranks<B>,
    sets: &mut Sets<B, T>,
    args: &Args,
) -> Result<Vec<Tried>> {
    let short = Args { batches: Some(BATCHES), corrupt: None, ..args.clone() };
    let host = B::describe(ranks.device()).family == DeviceFamily::Host;
    let place = ranks.shape.places().first().copied().unwrap_or(Place::OutOfPlace);
    let mut tried: Vec<Tried> = Vec::new();
    for (blocks, threads) in grids(host, sets.size.bytes.div_ceil(16)) {
        ranks.set_grid(blocks, threads);
        match load::measure(ranks, sets, place, &short).map(|measured| measured.found) {
            Ok(found) if found.wrong > 0 => return Err(CliError::Mismatch(found.wrong)),
            Ok(found) => tried.push((blocks, threads, found.quantile(0.5))),
            // What the device cannot hold is no candidate.
            Err(CliError::Signal(Error::ApiMisuse(why))) if why.is_of_grid() => {}
            Err(error) => return Err(error),
        }
    }
    tried.sort_by(|a, b| a.2.total_cmp(&b.2));
    if let Some(&(blocks, threads, _)) = tried.first() {
        ranks.set_grid(blocks, threads);
    }
    Ok(tried)
}

/// Those that are neither mostly idle nor hopelessly small for a message of `packs` packs: blocks, and threads.
pub(super) fn grids(host: bool, packs: usize) -> impl Iterator<Item = (u32, u32)> {
    let (threads, blocks) = if host { HOST } else { GPU };
    let largest = blocks.last().copied();
    let all = blocks.iter().flat_map(|b| threads.iter().map(|t| (*b, *t)));
    all.filter(move |&(b, t)| {
        let all = b as usize * t as usize;
        (b == 1 || all < 2 * packs) && (packs <= MOST_PACKS * all || Some(b) == largest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_suit_the_message() {
        let small: Vec<_> = grids(false, 128).collect();
        assert!(small.contains(&(1, 1024)) && small.contains(&(2, 64)));
        assert!(!small.contains(&(4, 64)) && !small.contains(&(128, 128)));
        assert!(!grids(false, 1 << 22).any(|grid| grid == (1, 64)));
        // Whatever the size, something is tried.
        for packs in [1, 100, 1 << 16, 1 << 30] {
            assert!(grids(false, packs).count() > 0 && grids(true, packs).count() > 0, "{packs}");
        }
    }
}
