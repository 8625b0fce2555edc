//! placeholder
pub mod backend;
pub mod dtype;
pub mod error;
pub mod kernel;
pub mod layout;
pub use backend::*;
pub use dtype::*;
pub use error::{Error, Result};
