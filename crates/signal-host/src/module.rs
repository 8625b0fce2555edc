//! The image: a table of host functions, compiled from the same kernels as the device images and handed in by whoever
//! links them. This crate calls through the table and knows no kernel.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::mem::{align_of, offset_of, size_of};
use std::ptr;
use std::sync::Arc;

use signal_core::backend::Entry;
use signal_core::error::{Image, Result};
use signal_core::kernel::Kernel;
use signal_core::layout::LAYOUT_VERSION;

use crate::device::{Device, HostInner};

/// A host kernel. Every thread of the grid calls it once, with the same parameters.
pub type HostKernel = unsafe extern "C" fn(params: *const c_void, thread: *const HostThread);

/// Who a thread of a grid is; `struct HostThread` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HostThread {
    /// Index within the block.
    pub thread: u32,
    /// Index of the block.
    pub block: u32,
    /// Threads in the block.
    pub block_dim: u32,
    /// Blocks in the grid.
    pub grid_dim: u32,
    /// The block's [`HOST_BLOCK_BYTES`] bytes, aligned to 64 and zero when the block starts: its barrier and its shared
    /// memory. The same for all threads of the block.
    pub state: *mut c_void,
}

/// Bytes behind [`HostThread::state`].
pub const HOST_BLOCK_BYTES: usize = 4096;

/// One kernel of an image; `struct HostEntry` in C.
#[repr(C)]
pub struct HostEntry {
    name: *const c_char,
    run: Option<HostKernel>,
}

impl HostEntry {
    /// Names a kernel.
    ///
    /// # Safety
    /// `run` is the kernel that the catalogue ([`Kernel`]) has under this name, or a user's of a name that is not there: given that kernel's
    /// parameter struct, it touches only the memory that the struct, the thread description and the protocol give it, and does not
    /// unwind.
    pub const unsafe fn new(name: &'static CStr, run: HostKernel) -> Self {
        HostEntry { name: name.as_ptr(), run: Some(run) }
    }
}

// SAFETY: an entry is never written after it was made, and both its pointers are to what lives for the whole program.
unsafe impl Sync for HostEntry {}
// SAFETY: as above.
unsafe impl Send for HostEntry {}

/// The kernels of an image; `struct HostImageTable` in C.
#[repr(C)]
pub struct HostImageTable {
    layout_version: u32,
    count: u32,
    entries: *const HostEntry,
}

impl HostImageTable {
    /// A table of entries, made for a version of the layout
    /// ([`LAYOUT_VERSION`]). A C program exports its own as a constant.
    pub const fn new(layout_version: u32, entries: &'static [HostEntry]) -> Self {
        HostImageTable { layout_version, count: entries.len() as u32, entries: entries.as_ptr() }
    }

    fn entries(&self) -> &[HostEntry] {
        if self.entries.is_null() {
            return &[];
        }
        // SAFETY: both come from a slice in `new`, or from a C table that promises the same: `count` entries that live,
        // unchanged, for the whole program.
        unsafe { std::slice::from_raw_parts(self.entries, self.count as usize) }
    }
}

// SAFETY: a table is never written after it was made, and its entries live for the whole program.
unsafe impl Sync for HostImageTable {}
// SAFETY: as above.
unsafe impl Send for HostImageTable {}

impl fmt::Debug for HostImageTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostImageTable")
            .field("layout_version", &self.layout_version)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

// The numbers that the C side asserts about its three structs.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<HostThread>() == 24 && offset_of!(HostThread, state) == 16);
    assert!(size_of::<HostEntry>() == 16 && offset_of!(HostEntry, run) == 8);
    assert!(size_of::<HostImageTable>() == 16 && offset_of!(HostImageTable, entries) == 8);
};

/// An image, or the reason why the build has none.
#[derive(Clone, Copy, Debug)]
pub struct HostImage {
    /// The kernels; `None` if the build embedded none.
    pub table: Option<&'static HostImageTable>,
    /// Fingerprint of the image's sources, flags and compiler.
    pub fingerprint: u64,
    /// What the build was missing, where `table` is `None`.
    pub missing: &'static str,
}

impl HostImage {
    /// The table, and its kernels in catalogue order.
    pub(crate) fn index(&self) -> Result<(&'static HostImageTable, Arc<[HostKernel]>)> {
        let Some(table) = self.table else {
            return Err(Image::Missing { target: TARGET, missing: self.missing.to_string() }.into());
        };
        Ok((table, table.kernels(Kernel::names())?))
    }
}

const TARGET: &str = "host";

impl HostImageTable {
    /// The kernels of these names.
    fn kernels(&self, names: &[&str]) -> Result<Arc<[HostKernel]>> {
        if self.layout_version != LAYOUT_VERSION {
            let (found, expected) = (self.layout_version, LAYOUT_VERSION);
            return Err(Image::Layout { target: TARGET, found, expected }.into());
        }
        let find = |&name: &&str| {
            let run = self.entries().iter().find(|entry| entry.is_named(name)).and_then(|entry| entry.run);
            run.ok_or_else(|| Image::Kernel { target: TARGET, kernel: name.to_string() }.into())
        };
        names.iter().map(find).collect()
    }
}

impl HostEntry {
    fn is_named(&self, name: &str) -> bool {
        if self.name.is_null() {
            return false;
        }
        // SAFETY: the name comes from a `CStr` in `new`, or from a C table that promises the same: a string that ends
        // in a zero and lives for the whole program.
        unsafe { CStr::from_ptr(self.name) }.to_bytes() == name.as_bytes()
    }
}

impl fmt::Debug for HostEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostEntry").finish_non_exhaustive()
    }
}

/// An image on one device. Host code is loaded with the program, so this is a view of it.
#[derive(Clone)]
pub struct Module {
    kernels: Arc<[HostKernel]>,
    fingerprint: u64,
    device: Device,
}

impl Module {
    /// The embedded image.
    pub(crate) fn new(device: &Device) -> Self {
        let HostInner { kernels, fingerprint, .. } = &**device.host();
        Module { kernels: kernels.clone(), fingerprint: *fingerprint, device: device.clone() }
    }

    /// A user's, of which nothing is known but its functions.
    pub(crate) fn of(device: &Device, table: &HostImageTable, names: &[&str]) -> Result<Self> {
        Ok(Module { kernels: table.kernels(names)?, fingerprint: 0, device: device.clone() })
    }

    pub(crate) fn kernel(&self, kernel: Entry) -> Result<HostKernel> {
        let missing = || Image::Kernel { target: TARGET, kernel: format!("{kernel:?}") }.into();
        self.kernels.get(kernel.0).copied().ok_or_else(missing)
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("device", &self.device).finish_non_exhaustive()
    }
}

/// The memory behind [`HostThread::state`]. Opaque here; kernels lay it out.
#[repr(C, align(64))]
pub(crate) struct HostBlock(UnsafeCell<[u8; HOST_BLOCK_BYTES]>);

const _: () = assert!(size_of::<HostBlock>() == HOST_BLOCK_BYTES && align_of::<HostBlock>() == 64);

impl HostBlock {
    pub(crate) const fn new() -> Self {
        HostBlock(UnsafeCell::new([0; HOST_BLOCK_BYTES]))
    }

    pub(crate) fn state(&self) -> *mut c_void {
        self.0.get().cast()
    }

    /// Makes the block's memory zero again.
    ///
    /// # Safety
    /// No kernel that uses it is running.
    pub(crate) unsafe fn clear(&self) {
        // SAFETY: the memory is ours for as long as `self` lives; the caller vouches that nobody else touches it now.
        unsafe { ptr::write_bytes(self.0.get(), 0, 1) };
    }
}

// SAFETY: Rust code touches the memory only in `clear`, whose caller answers for exclusivity; kernels touch it with
// their own atomics.
unsafe impl Sync for HostBlock {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TABLE, no_kernel};
    use crate::{Host, HostConfig};
    use signal_core::error::Error;

    fn open(image: HostImage) -> Result<Host> {
        Host::open(image, HostConfig::default())
    }

    #[test]
    fn a_missing_image_is_named() {
        let image = HostImage { table: None, fingerprint: 0, missing: "no C++ compiler (tried c++)" };
        let missing = "no C++ compiler (tried c++)".to_string();
        assert_eq!(open(image).unwrap_err(), Error::Image(Image::Missing { target: "host", missing }));
    }

    #[test]
    fn another_layout_is_refused() {
        static OTHER: HostImageTable = HostImageTable::new(LAYOUT_VERSION + 1, &[]);
        let image = HostImage { table: Some(&OTHER), fingerprint: 0, missing: "" };
        let (found, expected) = (LAYOUT_VERSION + 1, LAYOUT_VERSION);
        assert_eq!(open(image).unwrap_err(), Error::Image(Image::Layout { target: "host", found, expected }));
    }

    #[test]
    fn a_missing_kernel_is_named() {
        // SAFETY: this kernel touches nothing, whatever the parameters.
        static ENTRIES: [HostEntry; 2] = [unsafe { HostEntry::new(c"signal_barrier", no_kernel) }, unnamed()];
        const fn unnamed() -> HostEntry {
            HostEntry { name: ptr::null(), run: None }
        }
        static SHORT: HostImageTable = HostImageTable::new(LAYOUT_VERSION, &ENTRIES);
        let image = HostImage { table: Some(&SHORT), fingerprint: 0, missing: "" };
        let kernel = Kernel::names()[1].to_string();
        assert_eq!(open(image).unwrap_err(), Error::Image(Image::Kernel { target: "host", kernel }));
    }

    #[test]
    fn a_null_table_holds_no_kernel() {
        static NULL: HostImageTable = HostImageTable { layout_version: LAYOUT_VERSION, count: 7, entries: ptr::null() };
        let image = HostImage { table: Some(&NULL), fingerprint: 0, missing: "" };
        assert!(matches!(open(image), Err(Error::Image(Image::Kernel { .. }))));
        assert_eq!(TABLE.entries().len(), Kernel::COUNT);
    }
}
