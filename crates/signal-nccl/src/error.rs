//! What can go wrong, as values.

use crate::library::{Vendor, Version};

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library was not found, or cannot be loaded.
    #[error("{vendor} cannot be loaded; tried {tried}; install it, or name its file in {}", vendor.variable())]
    Absent {
        /// Whose.
        vendor: Vendor,
        /// Names and paths, each with what the loader said.
        tried: String,
    },
    /// The library lacks functions that are used: it is too old, or another library.
    #[error("{name} is no {vendor} of {} or later: it lacks {missing}", Version::NEEDED)]
    Symbols {
        /// Whose it should be.
        vendor: Vendor,
        /// The library.
        name: String,
        /// The functions.
        missing: String,
    },
    /// The library says that it is older than what is needed.
    #[error("{name} is {vendor} {version}, and {} is needed", Version::NEEDED)]
    TooOld {
        /// Whose.
        vendor: Vendor,
        /// The library.
        name: String,
        /// Its version.
        version: Version,
    },
    /// A call failed.
    #[error("{call} failed: {text} ({code})")]
    Call {
        /// The call.
        call: &'static str,
        /// The library's code.
        code: u32,
        /// The library's text for it.
        text: String,
    },
    /// The library reported success for a communicator that it has not made.
    #[error("ncclCommInitRank gave no communicator for rank {rank}")]
    NoCommunicator {
        /// The rank.
        rank: usize,
    },
    /// A number does not fit the interface, whose ranks are C's `int`.
    #[error("{what} {number} does not fit the interface")]
    Number {
        /// What it is of.
        what: &'static str,
        /// The number.
        number: usize,
    },
}
