//! How ranks in processes of their own find each other, and pass each other what a communicator is made of.
//!
//! Everything that a peer sends is untrusted. Ranks prove to rank 0, and rank 0 to them, that they know the group's secret,
//! which itself is never sent; who cannot is closed and disturbs nobody. Lengths are checked before memory is taken. Every
//! wait is bounded, nothing here starts a thread, and nothing is left in a file system.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::time::Duration;

use crate::error::{Error, Result};

mod conn;
mod env;
pub mod fds;
#[cfg(test)]
mod fuzz;
mod id;
mod join;
mod offer;
mod secret;
mod star;
mod tcp;
mod unix;
mod wire;

pub use self::env::{Launch, from_env};
pub use self::id::Id;
pub use self::tcp::TcpRendezvous;
pub use self::unix::UnixRendezvous;

/// A way for the ranks of one group to exchange bytes.
///
/// [`UnixRendezvous`] and [`TcpRendezvous`] are built in; a program that has another way, such as MPI, may implement it.
pub trait Rendezvous: Debug + Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Sends `bytes` to all ranks and returns what each of them sent, in rank order, this one's included. Collective: the
    /// n-th gather of a rank meets the n-th of the others. Lengths may differ from rank to rank.
    ///
    /// Waits at most for `patience`. After an error the group has ended: every later gather fails at once with the same
    /// error, here and on the other ranks.
    ///
    /// # Errors
    /// [`Absent`](crate::error::Rendezvous::Absent) with all ranks that did not come in time, and
    /// [`Lost`](crate::error::Rendezvous::Lost) with ranks that died or dropped their rendezvous.
    /// [`ApiMisuse::TooMany`](crate::ApiMisuse::TooMany) over 1 MiB: nothing was sent then, and the group goes on.
    fn gather(&mut self, bytes: &[u8], patience: Duration) -> Result<Vec<Vec<u8>>>;

    /// Ends the group because of `error`, which this rank met elsewhere: every later gather fails with it, and those of the
    /// other ranks at once: with the ranks that it says are absent or lost, else with this one as lost.
    ///
    /// Without it, a rank that leaves because another has died would itself be taken for lost. It does nothing unless it is
    /// implemented.
    fn end(&mut self, error: &Error) {
        let _ = error;
    }
}

impl<R: Rendezvous + ?Sized> Rendezvous for Box<R> {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn gather(&mut self, bytes: &[u8], patience: Duration) -> Result<Vec<Vec<u8>>> {
        (**self).gather(bytes, patience)
    }

    fn end(&mut self, error: &Error) {
        (**self).end(error);
    }
}

/// A moment before an address is tried again.
fn pause(deadline: conn::Deadline) -> Duration {
    deadline.left().min(Duration::from_millis(5))
}
