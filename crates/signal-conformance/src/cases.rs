//! The cases, by topic. [`suite!`](crate::suite) lists them.

pub mod barrier;
pub mod blocks;
pub mod check;
pub mod counted;
pub mod domains;
pub mod exchange_rules;
pub mod exchanges;
pub mod fault;
pub mod graph;
pub mod lamport;
pub mod layout;
pub mod matches;
pub mod misuse;
pub mod operators;
pub mod overwrite;
pub mod peer;
pub mod pinned;
pub mod processes;
pub mod program;
pub mod raw;
pub mod recover;
pub mod setup;
pub mod special;
pub mod split;
pub mod streams;
pub mod two_shot;
