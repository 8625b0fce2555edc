//! Bad input to the raw layer, where addresses come from elsewhere.

use signal_core::{Algorithm, ApiMisuse, Backend, Dtype, ReduceOp, Result};

use crate::cases::misuse::{Refusals, refused};
use crate::rig::Rig;
use crate::world::options;

/// Rank 0 alone makes a raw call with each algorithm; every one of them has to be refused.
fn refuse<B: Backend>(r: &mut Refusals<B>, input: u64, output: u64, count: usize, dtype: Dtype, expected: &ApiMisuse) {
    for algorithm in Algorithm::ALL_REDUCE {
        refused(raw(r, 0, algorithm, input, output, count, dtype), expected.clone());
    }
}

fn raw<B: Backend>(
    r: &mut Refusals<B>,
    rank: usize,
    algorithm: Algorithm,
    input: u64,
    output: u64,
    count: usize,
    dtype: Dtype,
) -> Result<()> {
    let call = r.world.comms[rank].with(options(|o| o.algorithm = Some(algorithm)));
    // SAFETY: the cases pass addresses within the buffers of `r`, which outlive the call, or such as are refused before
    // anything is enqueued, or a count of 0, for which no address is touched.
    unsafe { call.all_reduce_raw(&r.world.streams[rank], input, output, count, dtype, ReduceOp::Sum) }
}

/// Null, and addresses that no element can have.
pub fn misuse_raw_pointers<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(2));
    let (input, output) = (r.inputs[0].address(), r.outputs[0].address());
    for dtype in Dtype::ALL {
        refuse(&mut r, 0, output, 4, dtype, &ApiMisuse::NullPointer { what: "input" });
        refuse(&mut r, input, 0, 4, dtype, &ApiMisuse::NullPointer { what: "output" });
        for off in 1..dtype.bytes() as u64 {
            let (wrong_input, wrong_output) = (input + off, output + off);
            let expected = ApiMisuse::Misaligned { what: "input", address: wrong_input, dtype };
            refuse(&mut r, wrong_input, output, 4, dtype, &expected);
            let expected = ApiMisuse::Misaligned { what: "output", address: wrong_output, dtype };
            refuse(&mut r, input, wrong_output, 4, dtype, &expected);
        }
    }
    r.end();
}

/// Ranges that overlap in part, by one element and by all but one, in both directions.
pub fn misuse_raw_overlap<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(2));
    let base = r.outputs[0].address();
    for dtype in Dtype::ALL {
        let size = dtype.bytes() as u64;
        for apart in [1, 4, 15] {
            let (low, high) = (base, base + apart * size);
            for (input, output) in [(low, high), (high, low)] {
                let expected = ApiMisuse::Overlap { input, output, bytes: 16 * size };
                refuse(&mut r, input, output, 16, dtype, &expected);
            }
        }
    }
    r.end();
}

/// Counts beyond the address space.
pub fn misuse_raw_too_large<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(2));
    let (input, output) = (r.inputs[0].address(), r.outputs[0].address());
    for dtype in Dtype::ALL {
        for count in [usize::MAX, (usize::MAX / dtype.bytes()).saturating_add(1), usize::MAX / dtype.bytes()] {
            refuse(&mut r, input, output, count, dtype, &ApiMisuse::TooLarge { count, element_bytes: dtype.bytes() });
        }
    }
    r.end();
}

/// No element: nothing is launched, whatever the addresses, and no peer is waited for (P15).
pub fn misuse_raw_nothing_to_do<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(2));
    let base = r.inputs[0].address();
    for algorithm in Algorithm::ALL_REDUCE {
        for (input, output) in [(0, 0), (base, 0), (base, base), (base, base + 16)] {
            raw(&mut r, 0, algorithm, input, output, 0, Dtype::F16).unwrap();
        }
    }
    assert!(B::is_idle(&r.world.streams[0]).unwrap());
    r.end();
}
