//! Typed device memory: buffers that a call may read or write, and slices of them.

use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use bytemuck::Pod;

use crate::backend::{Backend, MemoryKind};
use crate::comm::Symmetric;
use crate::error::{ApiMisuse, Result};

/// Memory of one device, seen as elements of `T`.
///
/// [`new`](Self::new) gives memory that only this device touches: collectives stage it. Memory from
/// [`Communicator::alloc`](crate::Communicator::alloc) is symmetric: peers read it in place, which is faster.
///
/// Calls enqueue and return. Dropping a buffer while a call uses it is safe: the memory stays until the call is done.
pub struct DeviceBuffer<B: Backend, T> {
    memory: B::Buffer,
    symmetric: Option<Arc<Symmetric<B>>>,
    len: usize,
    element: PhantomData<T>,
}

impl<B: Backend, T: Pod> DeviceBuffer<B, T> {
    /// Allocates `len` elements, with unspecified content.
    ///
    /// # Errors
    /// [`ApiMisuse::TooLarge`]; errors of the driver, such as out of memory.
    pub fn new(device: &B::Device, len: usize) -> Result<Self> {
        let memory = B::allocate(device, allocation_bytes::<T>(len)?, MemoryKind::Device)?;
        Ok(DeviceBuffer { memory, symmetric: None, len, element: PhantomData })
    }

    pub(crate) fn of_symmetric(symmetric: Arc<Symmetric<B>>, rank: usize, len: usize) -> Self {
        let memory = symmetric.memory(rank).clone();
        DeviceBuffer { memory, symmetric: Some(symmetric), len, element: PhantomData }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first element, as the buffer's device sees it.
    pub fn address(&self) -> u64 {
        B::address(&self.memory)
    }

    /// True when peers read this memory in place.
    pub fn is_symmetric(&self) -> bool {
        self.symmetric.is_some()
    }

    /// The backend's handle of the memory.
    pub fn memory(&self) -> &B::Buffer {
        &self.memory
    }

    /// Elements `range`, for reading.
    ///
    /// # Errors
    /// [`ApiMisuse::Range`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Slice<'_, B, T>> {
        let (start, len) = self.resolve(&range)?;
        Ok(Slice { buffer: self, start, len })
    }

    /// Elements `range`, for writing.
    ///
    /// # Errors
    /// [`ApiMisuse::Range`].
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<SliceMut<'_, B, T>> {
        let (start, len) = self.resolve(&range)?;
        Ok(SliceMut { buffer: self, start, len })
    }

    /// Enqueues a copy of `source`, which may be reused at once.
    ///
    /// # Errors
    /// [`ApiMisuse::Length`] unless `source` has as many elements as the buffer; errors of the driver.
    pub fn write(&mut self, stream: &B::Stream, source: &[T]) -> Result<()> {
        if source.len() != self.len {
            return Err(ApiMisuse::Length { input: source.len(), output: self.len }.into());
        }
        if self.is_empty() {
            return Ok(());
        }
        B::upload(stream, bytemuck::cast_slice(source), &self.memory, 0)
    }

    /// Reads all elements behind the work on `stream`, and waits for it.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn read(&self, stream: &B::Stream) -> Result<Vec<T>> {
        let mut elements = vec![T::zeroed(); self.len];
        if !self.is_empty() {
            B::download(stream, &self.memory, 0, bytemuck::cast_slice_mut(&mut elements))?;
        }
        Ok(elements)
    }

    /// Enqueues a copy from another buffer of the same device and length.
    ///
    /// # Errors
    /// [`ApiMisuse::Length`], [`ApiMisuse::WrongDevice`]; errors of the driver.
    pub fn copy_from(&mut self, stream: &B::Stream, source: &DeviceBuffer<B, T>) -> Result<()> {
        if source.len != self.len {
            return Err(ApiMisuse::Length { input: source.len, output: self.len }.into());
        }
        if self.is_empty() {
            return Ok(());
        }
        B::copy(stream, (&source.memory, 0), (&self.memory, 0), self.len * size_of::<T>())
    }

    /// Enqueues a fill of the whole allocation with a 32-bit word, for poisoning buffers in tests.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn fill_bytes(&mut self, stream: &B::Stream, word: u32) -> Result<()> {
        B::fill(stream, &self.memory, 0, B::bytes(&self.memory), word)
    }

    fn resolve(&self, range: &impl RangeBounds<usize>) -> Result<(usize, usize)> {
        let start = match range.start_bound() {
            Bound::Included(&n) => n,
            Bound::Excluded(&n) => n.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&n) => n.saturating_add(1),
            Bound::Excluded(&n) => n,
            Bound::Unbounded => self.len,
        };
        if start > end || end > self.len {
            return Err(ApiMisuse::Range { start, end, len: self.len }.into());
        }
        Ok((start, end - start))
    }
}

impl<B: Backend, T> std::fmt::Debug for DeviceBuffer<B, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("memory", &self.memory)
            .field("len", &self.len)
            .field("symmetric", &self.symmetric.is_some())
            .finish()
    }
}

/// A part of a [`DeviceBuffer`], for reading.
#[derive(Debug)]
pub struct Slice<'a, B: Backend, T> {
    buffer: &'a DeviceBuffer<B, T>,
    start: usize,
    len: usize,
}

/// A part of a [`DeviceBuffer`], for writing.
#[derive(Debug)]
pub struct SliceMut<'a, B: Backend, T> {
    buffer: &'a mut DeviceBuffer<B, T>,
    start: usize,
    len: usize,
}

impl<B: Backend, T> Clone for Slice<'_, B, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, T> Copy for Slice<'_, B, T> {}

impl<'a, B: Backend, T: Pod> Slice<'a, B, T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.buffer.address() + (self.start * size_of::<T>()) as u64
    }

    /// `len` elements of it, which must have as many, from `start` on.
    pub(crate) fn part(&self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len);
        Slice { buffer: self.buffer, start: self.start + start, len }
    }

    pub(crate) fn memory(&self) -> &'a B::Buffer {
        &self.buffer.memory
    }

    pub(crate) fn symmetric(&self) -> Option<&'a Arc<Symmetric<B>>> {
        self.buffer.symmetric.as_ref()
    }
}

impl<'a, B: Backend, T: Pod> SliceMut<'a, B, T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.as_slice().address()
    }

    /// The same, for as long as this was borrowed.
    pub(crate) fn into_slice(self) -> Slice<'a, B, T> {
        Slice { buffer: self.buffer, start: self.start, len: self.len }
    }

    /// The same elements, for reading.
    pub fn as_slice(&self) -> Slice<'_, B, T> {
        Slice { buffer: self.buffer, start: self.start, len: self.len }
    }
}

impl<'a, B: Backend, T: Pod> From<&'a DeviceBuffer<B, T>> for Slice<'a, B, T> {
    fn from(buffer: &'a DeviceBuffer<B, T>) -> Self {
        Slice { start: 0, len: buffer.len, buffer }
    }
}

impl<'a, B: Backend, T: Pod> From<&'a mut DeviceBuffer<B, T>> for SliceMut<'a, B, T> {
    fn from(buffer: &'a mut DeviceBuffer<B, T>) -> Self {
        SliceMut { start: 0, len: buffer.len, buffer }
    }
}

/// Bytes to allocate for `len` elements: at least one pack, so that an empty buffer has an address too.
pub(crate) fn allocation_bytes<T>(len: usize) -> Result<usize> {
    len.checked_mul(size_of::<T>())
        .filter(|&bytes| bytes <= isize::MAX as usize - 15)
        .map(|bytes| bytes.next_multiple_of(16).max(16))
        .ok_or_else(|| ApiMisuse::TooLarge { count: len, element_bytes: size_of::<T>() }.into())
}
