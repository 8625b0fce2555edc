//! Ranks that meet: as threads here, and as processes where one has to die.
#![allow(clippy::unwrap_used, clippy::panic, reason = "clippy knows tests, but not what they call")]

mod rendezvous {
    mod faults;
    mod fds;
    mod gathers;
    mod meetings;
    mod processes;
    pub(crate) mod tools;
}
