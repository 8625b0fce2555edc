//! NCCL and RCCL, found at run time: nothing is linked, and a machine without them gets an error that says what was tried.
//!
//! Both libraries have one C interface. [`Library::open`] loads the one of a [`Vendor`] and resolves what is used of it; a
//! [`Communicator`] makes calls on raw device addresses and raw streams, for whoever has these from elsewhere: this crate knows no
//! backend of Signal, and no backend knows it.
//!
//! **Who answers for what.** The library is asked to open, and each call to be taken: what it refuses is an [`Error`] with its code
//! and its text, and nothing here panics. What is true of addresses, counts, streams and peers the library cannot see and does not
//! check, so calls that name memory are `unsafe`, and their caller answers for it.
//!
//! **What can wait for ever.** [`Communicator::init_ranks`], the end of a [group](Library::group), [`Communicator::destroy`] and
//! the kernels of a call all wait for peers without a deadline. A caller who wants one looks at the stream instead of waiting for it, and at
//! [`Communicator::async_error`], and calls [`Communicator::abort`]: kernels that run end then. For the calls that themselves wait there is another
//! thread. A communicator that is dropped is left as it is, since ending it may wait.

mod communicator;
mod error;
mod library;
pub mod sys;

pub use self::communicator::{Communicator, DataType, Operation, UniqueId};
pub use self::error::{Error, Result};
pub use self::library::{Library, Vendor, Version};
