//! What the tests share: an image of small kernels written in Rust, and a stream to run them on.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use signal_core::backend::{Backend, Launch, MemoryKind};
use signal_core::error::Result;
use signal_core::kernel::{FastSum, Kernel};
use signal_core::layout::LAYOUT_VERSION;

use crate::*;

/// Appends a number to a log: (log, cursor, number). Not atomic: the stream orders it.
pub(crate) const APPEND: Kernel = Kernel::Barrier;
/// Raises the own flag and waits for the other: (own, other).
pub(crate) const MEET: Kernel = Kernel::BarrierProbe;
/// All threads wait for all: (arrivals, faults found in the thread description or the block's memory).
pub(crate) const ASSEMBLE: Kernel = Kernel::PeerProbe;
/// Waits for a flag: (flag).
pub(crate) const HOLD: Kernel = Kernel::AllReduceOneStage(FastSum::F32);
/// Each thread adds 1 to a number of its own: (numbers).
pub(crate) const BUMP: Kernel = Kernel::AllReduceOneStage(FastSum::F16);

type Words = [u64; 4];

unsafe extern "C" fn append(params: *const c_void, _: *const HostThread) {
    // SAFETY: the tests launch it with three words, in a grid of one thread, on memory that they pass as used.
    unsafe {
        let [log, cursor, number, _] = *params.cast::<Words>();
        let cursor = cursor as *mut u64;
        *(log as *mut u64).add(*cursor as usize) = number;
        *cursor += 1;
    }
}

unsafe extern "C" fn meet(params: *const c_void, _: *const HostThread) {
    // SAFETY: the tests launch it with the addresses of two flags in memory that they pass as used.
    let (own, other) = unsafe {
        let [own, other, ..] = *params.cast::<Words>();
        (&*(own as *const AtomicU32), &*(other as *const AtomicU32))
    };
    own.store(1, Ordering::Release);
    while other.load(Ordering::Acquire) == 0 {
        thread::yield_now();
    }
}

unsafe extern "C" fn assemble(params: *const c_void, thread: *const HostThread) {
    // SAFETY: the tests launch it with the addresses of two counters in memory that they pass as used; the description
    // and the state behind it are the backend's, and of the state each thread touches one counter and its own byte.
    let (arrivals, faults, me, met, mark) = unsafe {
        let [arrivals, faults, ..] = *params.cast::<Words>();
        let me = *thread;
        let met = &*me.state.cast::<AtomicU32>();
        let mark = &mut *me.state.cast::<u8>().add(HOST_BLOCK_BYTES - 1 - me.thread as usize);
        (&*(arrivals as *const AtomicU32), &*(faults as *const AtomicU32), me, met, mark)
    };
    let aligned = (me.state as usize).is_multiple_of(64);
    if !aligned || me.thread >= me.block_dim || me.block >= me.grid_dim || std::mem::replace(mark, 1) != 0 {
        faults.fetch_add(1, Ordering::Relaxed);
    }
    met.fetch_add(1, Ordering::Relaxed);
    arrivals.fetch_add(1, Ordering::AcqRel);
    while arrivals.load(Ordering::Acquire) < me.grid_dim * me.block_dim {
        thread::yield_now();
    }
    // Now every thread of the block was there, and none of another block.
    if met.load(Ordering::Relaxed) != me.block_dim {
        faults.fetch_add(1, Ordering::Relaxed);
    }
}

unsafe extern "C" fn hold(params: *const c_void, _: *const HostThread) {
    // SAFETY: the tests launch it with the address of a flag in memory that they pass as used.
    let flag = unsafe { &*((*params.cast::<Words>())[0] as *const AtomicU32) };
    while flag.load(Ordering::Acquire) == 0 {
        thread::yield_now();
    }
}

unsafe extern "C" fn bump(params: *const c_void, thread: *const HostThread) {
    // SAFETY: the tests launch it with the address of a number for each thread of the grid.
    unsafe {
        let me = *thread;
        let numbers = (*params.cast::<Words>())[0] as *mut u64;
        *numbers.add((me.block * me.block_dim + me.thread) as usize) += 1;
    }
}

pub(crate) unsafe extern "C" fn no_kernel(_: *const c_void, _: *const HostThread) {}

// SAFETY: these are not the catalogue's kernels, but nobody but the tests below launches from this table.
static ENTRIES: [HostEntry; Kernel::COUNT] = unsafe {
    [
        // In another order than the catalogue: names count, not places.
        HostEntry::new(c"signal_lines_reduce_sum_f32", no_kernel),
        HostEntry::new(c"signal_lines_reduce_sum_f16", no_kernel),
        HostEntry::new(c"signal_lines_reduce_sum_bf16", no_kernel),
        HostEntry::new(c"signal_lines_reduce_any", no_kernel),
        HostEntry::new(c"signal_rms_norm_f32", no_kernel),
        HostEntry::new(c"signal_rms_norm_f16", no_kernel),
        HostEntry::new(c"signal_rms_norm_bf16", no_kernel),
        HostEntry::new(c"signal_norm_rows_f32", no_kernel),
        HostEntry::new(c"signal_norm_rows_f16", no_kernel),
        HostEntry::new(c"signal_norm_rows_bf16", no_kernel),
        HostEntry::new(c"signal_norm_narrow_rows_f32", no_kernel),
        HostEntry::new(c"signal_norm_narrow_rows_f16", no_kernel),
        HostEntry::new(c"signal_norm_narrow_rows_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_small_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_small_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_small_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_pair_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_pair_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_pair_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_small_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_small_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_small_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_pair_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_pair_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_rms_norm_e4m3_pair_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_small_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_small_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_small_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_pair_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_pair_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_pair_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_wide_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_wide_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_wide_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_wide_small_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_wide_small_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_norm_wide_small_bf16", no_kernel),
        HostEntry::new(c"signal_trace", no_kernel),
        HostEntry::new(c"signal_norm_two_stage_f32", no_kernel),
        HostEntry::new(c"signal_norm_two_stage_f16", no_kernel),
        HostEntry::new(c"signal_norm_two_stage_bf16", no_kernel),
        HostEntry::new(c"signal_lines_move", no_kernel),
        HostEntry::new(c"signal_move", no_kernel),
        HostEntry::new(c"signal_move_counted", no_kernel),
        HostEntry::new(c"signal_reduce_scatter_any", no_kernel),
        HostEntry::new(c"signal_reduce_scatter_sum_bf16", no_kernel),
        HostEntry::new(c"signal_reduce_scatter_sum_f16", no_kernel),
        HostEntry::new(c"signal_reduce_scatter_sum_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_stage_any", no_kernel),
        HostEntry::new(c"signal_all_reduce_one_stage_any", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_shot_small_sum_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_shot_small_sum_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_shot_small_sum_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_shot_sum_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_shot_sum_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_shot_sum_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_lamport_small_sum_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_lamport_small_sum_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_lamport_small_sum_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_lamport_sum_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_lamport_sum_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_lamport_sum_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_one_stage_small_sum_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_one_stage_small_sum_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_one_stage_small_sum_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_stage_sum_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_stage_sum_f16", no_kernel),
        HostEntry::new(c"signal_all_reduce_two_stage_sum_f32", no_kernel),
        HostEntry::new(c"signal_all_reduce_one_stage_sum_bf16", no_kernel),
        HostEntry::new(c"signal_all_reduce_one_stage_sum_f16", bump),
        HostEntry::new(c"signal_all_reduce_one_stage_sum_f32", hold),
        HostEntry::new(c"signal_peer_probe", assemble),
        HostEntry::new(c"signal_check", no_kernel),
        HostEntry::new(c"signal_barrier_probe", meet),
        HostEntry::new(c"signal_barrier", append),
    ]
};
pub(crate) static TABLE: HostImageTable = HostImageTable::new(LAYOUT_VERSION, &ENTRIES);
pub(crate) const IMAGE: HostImage = HostImage { table: Some(&TABLE), fingerprint: 0xfeed, missing: "" };

pub(crate) fn host() -> Host {
    Host::open(IMAGE, HostConfig::default()).unwrap()
}

pub(crate) fn first_device() -> Device {
    host().devices().unwrap().remove(0)
}

/// One stream on one device.
pub(crate) struct Bench {
    pub(crate) host: Host,
    pub(crate) device: Device,
    pub(crate) module: Module,
    pub(crate) stream: Stream,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::on(host())
    }

    pub(crate) fn on(host: Host) -> Self {
        let device = host.devices().unwrap().remove(0);
        let (module, stream) = (Host::load(&device).unwrap(), Host::create_stream(&device).unwrap());
        Bench { host, device, module, stream }
    }

    pub(crate) fn buffer(&self, bytes: usize) -> Buffer {
        Host::allocate(&self.device, bytes, MemoryKind::HostMapped).unwrap()
    }

    pub(crate) fn try_launch(
        &self,
        stream: &Stream,
        kernel: Kernel,
        shape: (u32, u32),
        params: &[u64],
        uses: &[&Buffer],
    ) -> Result<()> {
        let bytes: Vec<u8> = params.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let launch =
            Launch { kernel: kernel.into(), grid: shape.0, threads: shape.1, params: &bytes, early: false, uses };
        // SAFETY: the tests below pass what the kernels above ask for.
        unsafe { Host::launch(stream, &self.module, &launch) }
    }

    pub(crate) fn launch(&self, stream: &Stream, kernel: Kernel, shape: (u32, u32), params: &[u64], uses: &[&Buffer]) {
        self.try_launch(stream, kernel, shape, params, uses).unwrap();
    }

    /// Enqueues a kernel that waits until the gate is opened.
    pub(crate) fn hold(&self, stream: &Stream) -> Gate {
        let gate = Gate(self.buffer(4));
        self.launch(stream, HOLD, (1, 1), &[Host::address(&gate.0)], &[&gate.0]);
        gate
    }

    pub(crate) fn words(&self, buffer: &Buffer, count: usize) -> Vec<u64> {
        let mut bytes = vec![0; count * 8];
        Host::download(&self.stream, buffer, 0, &mut bytes).unwrap();
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect()
    }
}

/// Opens when dropped too, so that a failing test does not leave a thread spinning.
pub(crate) struct Gate(pub(crate) Buffer);

impl Gate {
    pub(crate) fn open(&self) {
        flag(&self.0).store(1, Ordering::Release);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

fn flag(buffer: &Buffer) -> &AtomicU32 {
    // SAFETY: the tests' kernels access this word atomically, and the buffer is borrowed for as long as the reference.
    unsafe { Host::host_pointer(buffer).unwrap().cast().as_ref() }
}
