//! Memory of this rank that a call reads or writes.

use std::sync::Arc;

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::Slice;
use crate::dtype::Dtype;
use crate::error::{ApiMisuse, Result};

use super::Symmetric;
use super::call::Call;

/// A range of this rank's memory, and what keeps it alive.
#[derive(Debug)]
pub(super) struct Span<B: Backend> {
    /// As this rank's device sees it.
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// The symmetric buffer that it lies in, if peers can be told of it.
    pub(super) symmetric: Option<Arc<Symmetric<B>>>,
    /// `None` where the caller answers for it.
    pub(super) memory: Option<B::Buffer>,
}

impl<B: Backend> Span<B> {
    fn overlaps(&self, other: &Self) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.address < other.address + other.bytes
            && other.address < self.address + self.bytes
    }

    /// Refuses an output that overlaps this input, unless that begins at byte `in_place` of the output. A larger input, of which the
    /// output is a part in place, is the one whose bytes are counted.
    pub(super) fn check_apart(&self, output: &Self, in_place: impl Fn(u64, u64) -> bool) -> Result<()> {
        if self.overlaps(output) && !in_place(self.address, output.address) {
            let bytes = self.bytes.max(output.bytes);
            return Err(ApiMisuse::Overlap { input: self.address, output: output.address, bytes }.into());
        }
        Ok(())
    }
}

impl<B: Backend> Call<'_, B> {
    /// The memory of a slice, of this rank's device.
    pub(super) fn span<T: Pod>(&self, what: &'static str, slice: Slice<'_, B, T>) -> Result<Span<B>> {
        self.check_device(what, slice.memory())?;
        Ok(Span {
            address: slice.address(),
            bytes: (slice.len() * size_of::<T>()) as u64,
            symmetric: self.symmetric_of(&slice),
            memory: Some(slice.memory().clone()),
        })
    }

    /// The symmetric buffer that a slice lies in, or the registered memory, if peers can be told of it.
    pub(super) fn symmetric_of<T: Pod>(&self, slice: &Slice<'_, B, T>) -> Option<Arc<Symmetric<B>>> {
        let Some(symmetric) = slice.symmetric() else {
            return self.comm.find_symmetric(slice.address(), (slice.len() * size_of::<T>()) as u64);
        };
        // Another rank's part of the buffer, on a shared device, is not what peers would be told of.
        let is_own = || B::address(symmetric.memory(self.comm.rank)) == B::address(slice.memory());
        let told = self.comm.group.reaches_peers() && symmetric.belongs_to(&self.comm.group) && is_own();
        told.then(|| symmetric.clone())
    }

    /// Memory for which the caller answers; `dtype`: of its elements, if they are added.
    pub(super) fn raw_span(
        &self,
        what: &'static str,
        address: u64,
        bytes: u64,
        dtype: Option<Dtype>,
    ) -> Result<Span<B>> {
        if bytes > 0 {
            check_pointer(what, address, bytes, dtype)?;
        }
        let symmetric = self.comm.find_symmetric(address, bytes);
        let memory = symmetric.as_ref().map(|s| s.memory(self.comm.rank).clone());
        Ok(Span { address, bytes, symmetric, memory })
    }
}

/// Refuses an operand that has not the elements of its (parts, elements of a part).
pub(super) fn check_len(
    what: &'static str,
    found: usize,
    expected: usize,
    (parts, part): (usize, usize),
) -> Result<(), ApiMisuse> {
    if found == expected { Ok(()) } else { Err(ApiMisuse::Parts { what, found, expected, parts, part }) }
}

/// Refuses an address at which no operand can be.
pub(super) fn check_pointer(
    what: &'static str,
    address: u64,
    bytes: u64,
    dtype: Option<Dtype>,
) -> Result<(), ApiMisuse> {
    if address == 0 {
        return Err(ApiMisuse::NullPointer { what });
    }
    if let Some(dtype) = dtype.filter(|dtype| !address.is_multiple_of(dtype.bytes() as u64)) {
        return Err(ApiMisuse::Misaligned { what, address, dtype });
    }
    let element_bytes = dtype.map_or(1, Dtype::bytes);
    let too_large = ApiMisuse::TooLarge { count: (bytes / element_bytes as u64) as usize, element_bytes };
    address.checked_add(bytes).map(|_| ()).ok_or(too_large)
}
