//! The C interface of NCCL and RCCL for ranks of one process whose device memory is the host's, as tests/hip-abi has it: so that the loader and the bench's
//! comparison run where there is no GPU. Calls wait for their streams when their group ends, and are done when that returns. Nothing of it can be captured.
//!
//! `NCCL_ABI_FAILS` makes it fail: `init` refuses communicators, `hang` never ends a group, `corrupt` changes one bit of each result.
// The interface's own names, and its documentation.
#![allow(
    non_snake_case,
    non_camel_case_types,
    non_upper_case_globals,
    missing_docs,
    unreachable_pub,
    clippy::missing_safety_doc
)]

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use half::{bf16, f16};
use signal_nccl::sys::{ncclResult_t, ncclSuccess, ncclUniqueId};

const UNHANDLED: ncclResult_t = 1;
const INVALID_ARGUMENT: ncclResult_t = 4;
const INVALID_USAGE: ncclResult_t = 5;

struct Comm {
    rank: usize,
    world: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    Send,
    Receive,
}

/// One rank's call.
#[derive(Clone, Copy)]
struct Call {
    kind: Kind,
    rank: usize,
    world: usize,
    send: usize,
    receive: usize,
    count: usize,
    dtype: u32,
    op: u32,
    /// The root, or the peer.
    other: usize,
    stream: *mut c_void,
}

thread_local! {
    static GROUP: RefCell<(u32, Vec<Call>, Vec<usize>)> = const { RefCell::new((0, Vec::new(), Vec::new())) };
}

fn fails(how: &str) -> bool {
    std::env::var("NCCL_ABI_FAILS").is_ok_and(|fails| fails == how)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(to: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's output.
    unsafe { *to = 22_809 };
    ncclSuccess
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: ncclResult_t) -> *const c_char {
    match code {
        ncclSuccess => c"no error".as_ptr(),
        INVALID_USAGE => c"invalid usage".as_ptr(),
        _ => c"a failure that a test asked for".as_ptr(),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(to: *mut ncclUniqueId) -> ncclResult_t {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    // Relaxed: a number that no other has.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's output.
    unsafe { (*to).internal = [number as c_char; 128] };
    ncclSuccess
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    to: *mut *mut c_void,
    world: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    if fails("init") || id.internal[0] == 0 {
        return UNHANDLED;
    }
    let comm = Comm { rank: rank as usize, world: world as usize };
    GROUP.with_borrow_mut(|group| group.2.push(comm.world));
    // SAFETY: the caller's output; whoever destroys it takes it back.
    unsafe { *to = Box::into_raw(Box::new(comm)).cast() };
    ncclSuccess
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut c_void) -> ncclResult_t {
    // SAFETY: from `ncclCommInitRank`, and the caller's last use of it.
    drop(unsafe { Box::from_raw(comm.cast::<Comm>()) });
    ncclSuccess
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut c_void) -> ncclResult_t {
    // SAFETY: as above.
    unsafe { ncclCommDestroy(comm) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(_: *mut c_void, to: *mut ncclResult_t) -> ncclResult_t {
    // SAFETY: the caller's output.
    unsafe { *to = ncclSuccess };
    ncclSuccess
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> ncclResult_t {
    GROUP.with_borrow_mut(|group| group.0 += 1);
    ncclSuccess
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> ncclResult_t {
    let (calls, worlds) = GROUP.with_borrow_mut(|group| {
        group.0 -= 1;
        if group.0 > 0 {
            (Vec::new(), Vec::new())
        } else {
            (std::mem::take(&mut group.1), std::mem::take(&mut group.2))
        }
    });
    if fails("hang") && !calls.is_empty() {
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    // Ranks of other processes never come.
    if worlds.iter().any(|world| *world != worlds.len()) {
        return INVALID_USAGE;
    }
    if calls.iter().any(|call| synchronize(call.stream) != 0) { UNHANDLED } else { run(&calls) }
}

fn synchronize(stream: *mut c_void) -> c_int {
    static HIP: OnceLock<Option<libloading::Library>> = OnceLock::new();
    // SAFETY: the library that the backend has loaded already.
    let library = HIP.get_or_init(|| unsafe { libloading::Library::new("libamdhip64.so.7") }.ok());
    let Some(library) = library else { return -1 };
    // SAFETY: the runtime's function has this signature, and the stream is the caller's.
    unsafe {
        let call = library.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"hipStreamSynchronize");
        call.map_or(-1, |call| call(stream))
    }
}

fn add(call: Call) -> ncclResult_t {
    let depth = GROUP.with_borrow_mut(|group| {
        group.1.push(call);
        group.0
    });
    if depth > 0 { ncclSuccess } else { INVALID_USAGE }
}

/// What stands in all calls.
unsafe fn of(comm: *mut c_void, kind: Kind, stream: *mut c_void) -> Call {
    // SAFETY: from `ncclCommInitRank`, not destroyed yet.
    let Comm { rank, world } = unsafe { &*comm.cast::<Comm>() };
    Call { kind, rank: *rank, world: *world, send: 0, receive: 0, count: 0, dtype: 0, op: 0, other: 0, stream }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    comm: *mut c_void,
    stream: *mut c_void,
) -> ncclResult_t {
    // SAFETY: the caller's communicator.
    let call = unsafe { of(comm, Kind::AllReduce, stream) };
    add(Call { send: send as usize, receive: receive as usize, count, dtype, op, ..call })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    comm: *mut c_void,
    stream: *mut c_void,
) -> ncclResult_t {
    // SAFETY: as above.
    let call = unsafe { of(comm, Kind::ReduceScatter, stream) };
    add(Call { send: send as usize, receive: receive as usize, count, dtype, op, ..call })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: u32,
    comm: *mut c_void,
    stream: *mut c_void,
) -> ncclResult_t {
    // SAFETY: as above.
    let call = unsafe { of(comm, Kind::AllGather, stream) };
    add(Call { send: send as usize, receive: receive as usize, count, dtype, ..call })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: u32,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> ncclResult_t {
    // SAFETY: as above.
    let call = unsafe { of(comm, Kind::Broadcast, stream) };
    add(Call { send: send as usize, receive: receive as usize, count, dtype, other: root as usize, ..call })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> ncclResult_t {
    // SAFETY: as above.
    let call = unsafe { of(comm, Kind::Reduce, stream) };
    add(Call { send: send as usize, receive: receive as usize, count, dtype, op, other: root as usize, ..call })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    send: *const c_void,
    count: usize,
    dtype: u32,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> ncclResult_t {
    // SAFETY: as above.
    let call = unsafe { of(comm, Kind::Send, stream) };
    add(Call { send: send as usize, count, dtype, other: peer as usize, ..call })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    receive: *mut c_void,
    count: usize,
    dtype: u32,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> ncclResult_t {
    // SAFETY: as above.
    let call = unsafe { of(comm, Kind::Receive, stream) };
    add(Call { receive: receive as usize, count, dtype, other: peer as usize, ..call })
}

/// Bytes of an element.
fn width(dtype: u32) -> Option<usize> {
    match dtype {
        0 | 1 => Some(1),
        6 | 9 => Some(2),
        2 | 3 | 7 => Some(4),
        4 | 5 | 8 => Some(8),
        _ => None,
    }
}

fn read(at: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: the caller of the interface gave an address of so many bytes, which nobody writes now: all streams are idle.
    unsafe { std::slice::from_raw_parts(at as *const u8, bytes) }.to_vec()
}

fn write(at: usize, bytes: &[u8]) {
    // SAFETY: as above, of what is to be written, and nobody else touches it.
    let to = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, bytes.len()) };
    to.copy_from_slice(bytes);
    if fails("corrupt") {
        // Of the exponent's bits, so that a sum's value shows it.
        to[bytes.len() - 1] ^= 0x10;
    }
}

/// The sum of the ranks' elements, from the last rank on: another order than Signal's.
fn reduce(dtype: u32, op: u32, inputs: &[Vec<u8>]) -> Option<Vec<u8>> {
    fn fold<const W: usize>(inputs: &[Vec<u8>], op: u32, from: fn([u8; W]) -> f64, to: fn(f64) -> [u8; W]) -> Vec<u8> {
        let element = |input: &Vec<u8>, i: usize| from(std::array::from_fn(|b| input[i * W + b]));
        let count = inputs[0].len() / W;
        let results = (0..count).map(|i| {
            let values = inputs.iter().rev().map(|input| element(input, i));
            let folded = values.reduce(|a, b| match op {
                1 => a * b,
                2 => a.max(b),
                3 => a.min(b),
                _ => a + b,
            });
            let folded = folded.unwrap_or(0.0);
            to(if op == 4 { folded / inputs.len() as f64 } else { folded })
        });
        results.flatten().collect()
    }
    match dtype {
        7 => Some(fold(inputs, op, |b| f64::from(f32::from_ne_bytes(b)), |x| (x as f32).to_ne_bytes())),
        6 => Some(fold(inputs, op, |b| f16::from_ne_bytes(b).to_f64(), |x| f16::from_f64(x).to_ne_bytes())),
        9 => Some(fold(inputs, op, |b| bf16::from_ne_bytes(b).to_f64(), |x| bf16::from_f64(x).to_ne_bytes())),
        _ => None,
    }
}

/// All calls of a group: a collective of all ranks, or sends and receives.
fn run(calls: &[Call]) -> ncclResult_t {
    let Some(first) = calls.first() else { return ncclSuccess };
    let Some(width) = width(first.dtype) else { return INVALID_ARGUMENT };
    let Call { kind, world, count, dtype, op, other: root, .. } = *first;
    let part = count * width;
    if matches!(kind, Kind::Send | Kind::Receive) {
        // Each pair's in order. What is sent is read before anything is written.
        let sends: Vec<(Call, Vec<u8>)> = calls
            .iter()
            .filter(|call| call.kind == Kind::Send)
            .map(|call| (*call, read(call.send, call.count * width)))
            .collect();
        let mut taken = vec![false; sends.len()];
        for call in calls.iter().filter(|call| call.kind == Kind::Receive) {
            let matching = |(at, (send, _)): (usize, &(Call, Vec<u8>))| {
                let pair = send.rank == call.other && send.other == call.rank && send.count == call.count;
                (pair && !taken[at]).then_some(at)
            };
            let Some(at) = sends.iter().enumerate().find_map(matching) else { return INVALID_USAGE };
            taken[at] = true;
            write(call.receive, &sends[at].1);
        }
        return if taken.iter().all(|taken| *taken) { ncclSuccess } else { INVALID_USAGE };
    }
    let mut ranks: Vec<Call> = calls.to_vec();
    ranks.sort_by_key(|call| call.rank);
    if ranks.len() != world || ranks.iter().any(|call| call.kind != kind || call.count != count) {
        return INVALID_USAGE;
    }
    let parts = if kind == Kind::ReduceScatter { world } else { 1 };
    let inputs: Vec<Vec<u8>> = ranks.iter().map(|call| read(call.send, part * parts)).collect();
    let result = match kind {
        Kind::Broadcast => Some(inputs[root].clone()),
        Kind::AllGather => Some(inputs.concat()),
        _ => reduce(dtype, op, &inputs),
    };
    let Some(result) = result else { return INVALID_ARGUMENT };
    for call in &ranks {
        match kind {
            Kind::ReduceScatter => write(call.receive, &result[call.rank * part..][..part]),
            Kind::Reduce if call.rank != root => {}
            _ => write(call.receive, &result),
        }
    }
    ncclSuccess
}
