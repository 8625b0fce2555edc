//! What a call costs the thread that makes it, beside a bare launch of the driver; and that it allocates nothing.
//!
//! `cargo bench --features cuda --bench call`, on a machine with an NVIDIA GPU. Nanoseconds a call: medians of rounds in
//! which bare launches and all-reduces of 2 KiB take turns, each round enqueued faster than the device works it off. The
//! bare launch has a kernel that does nothing, the same grid, and a parameter struct of 32 bytes.
//!
//! Fails when a call allocates on the heap, or costs more than the limit above the bare launch.

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytemuck::Zeroable;
use half::bf16;
use signal_comm::cuda::{self, Cuda, Stream, sys};
use signal_comm::kernel::PeerProbeParams;
use signal_comm::{Backend, Communicator, Kernel, ReduceOp};

/// Launches a round: few enough that the driver's queue takes them all at once.
const CALLS: u32 = 200;
const ROUNDS: usize = 101;
/// Most nanoseconds that a call may cost above a bare launch.
const LIMIT: f64 = 500.0;

/// The system's allocator, with a count of what is asked of it.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises; the pointer is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let devices = cuda::open()?.devices()?;
    let device = &devices[..1];
    // One rank: what the host does is the same, and no peer can fill the queue.
    let mut comm = Communicator::<Cuda>::all_local(device)?.remove(0);
    let stream = Cuda::create_stream(comm.device())?;
    let input = comm.alloc::<bf16>(1024)?;
    let mut output = comm.alloc::<bf16>(1024)?;
    let plan = comm.plan(1024, signal_comm::Dtype::Bf16, ReduceOp::Sum);
    let function = Cuda::load(comm.device())?.function(Kernel::PeerProbe);
    make_context_current()?;

    let mut bare = Vec::new();
    let mut calls = Vec::new();
    let mut allocations = 0;
    for round in 0..=ROUNDS {
        let start = Instant::now();
        for _ in 0..CALLS {
            launch(&stream, function, plan.blocks, plan.threads)?;
        }
        let bare_time = start.elapsed();
        Cuda::synchronize(&stream)?;

        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let start = Instant::now();
        for _ in 0..CALLS {
            comm.all_reduce(&stream, &input, &mut output, ReduceOp::Sum)?;
        }
        let call_time = start.elapsed();
        if round > 0 {
            // The first round warms up: the driver's structures, the marks on the buffers.
            allocations += ALLOCATIONS.load(Ordering::Relaxed) - before;
            bare.push(bare_time.as_nanos() as f64 / f64::from(CALLS));
            calls.push(call_time.as_nanos() as f64 / f64::from(CALLS));
        }
        comm.wait(&stream)?;
    }
    let (bare, call) = (median(&mut bare), median(&mut calls));
    println!("bare launch {bare:.0} ns, all-reduce {call:.0} ns, above it {:.0} ns", call - bare);
    println!("heap allocations in {} calls: {allocations}", ROUNDS as u64 * u64::from(CALLS));
    if allocations > 0 || call - bare > LIMIT {
        return Err(format!("a call may allocate nothing and cost {LIMIT} ns above a bare launch").into());
    }
    Ok(())
}

/// The primary context of the first device, which the library works in too.
fn make_context_current() -> Result<(), Box<dyn Error>> {
    let mut context = null_mut();
    // SAFETY: the driver is initialised, the output outlives the call; the context is never released.
    unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, 0) }.result()?;
    // SAFETY: the context was just retained.
    Ok(unsafe { sys::cuCtxSetCurrent(context) }.result()?)
}

fn launch(stream: &Stream, function: sys::CUfunction, blocks: u32, threads: u32) -> Result<(), Box<dyn Error>> {
    let mut params = PeerProbeParams::zeroed(); // no words: it touches no memory
    let mut arguments = [(&raw mut params).cast::<c_void>()];
    let config = sys::CUlaunchConfig {
        gridDimX: blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: stream.raw(),
        attrs: null_mut(),
        numAttrs: 0,
    };
    // SAFETY: the function takes this struct; function, stream and context are alive and belong together.
    Ok(unsafe { sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), null_mut()) }.result()?)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
