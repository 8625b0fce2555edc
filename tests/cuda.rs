//! The conformance suite on CUDA. Needs a GPU: where there is none every test fails, saying so.
#![cfg(feature = "cuda")]

use signal_comm::cuda;

signal_conformance::suite!(conformance, cuda::open());

/// A user's image is looked at before the driver is; what looks like one and is none, the driver refuses.
#[test]
fn a_users_image_that_is_none() {
    use signal_comm::error::{Error, Image};
    use signal_comm::{Backend, UserKernel};
    let device = cuda::open().unwrap().devices().unwrap().swap_remove(0);
    let load =
        |bytes: &[u8]| UserKernel::<cuda::Cuda>::load(&device, bytes, ["signal_barrier"]).map(|_| ()).unwrap_err();
    let whole = cuda::image().bytes;
    for bytes in [&[][..], b"text", &whole[..1000], &whole[..whole.len() - 1], b".version 8.0 .target sm_90 nonsense"] {
        let found = load(bytes);
        assert!(matches!(&found, Error::Image(Image::Broken { target: "cuda", .. })), "{found}");
    }
    assert!(matches!(load(whole), Error::Image(Image::Abi { .. })));
}

/// Memory of pools and mappings, as users of the driver have it (P14).
mod foreign {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "clippy knows tests, but not what they call")]

    use std::ffi::{c_int, c_uint, c_void};

    use signal_comm::cuda::{self, Cuda, sys};
    use signal_comm::reference::{self, random_inputs};
    use signal_comm::{Backend, CallOptions, Communicator, DeviceBuffer, Dtype, ReduceOp, Settings};

    const COUNT: usize = 100_003;

    /// What the driver takes for `CUmemAccessDesc`, whose bindings name their fields differently from version to version.
    #[repr(C)]
    struct Access {
        kind: c_uint,
        device: c_int,
        flags: c_uint,
    }

    fn access(device: usize, flags: c_uint) -> Access {
        Access { kind: 1, device: device as c_int, flags }
    }

    fn ok(result: sys::CUresult) {
        assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
    }

    /// Makes the primary context of a device current, which the backend retains as well.
    fn enter(device: usize) {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver was opened by the backend; the output outlives the call.
        ok(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device as c_int) });
        // SAFETY: the context stays for the rest of the program.
        ok(unsafe { sys::cuCtxSetCurrent(context) });
    }

    /// Two ranks, on two devices if there are.
    struct Pair {
        devices: [usize; 2],
        comms: Vec<Communicator<Cuda>>,
        streams: Vec<cuda::Stream>,
    }

    fn pair() -> Pair {
        let all = cuda::open().unwrap().devices().unwrap();
        let devices = [0, usize::from(all.len() > 1)];
        let own: Vec<_> = devices.map(|at| all[at].clone()).into();
        let builder = Communicator::<Cuda>::builder().settings(Settings::default()).share_devices(true);
        let comms = builder.all_local(&own).unwrap();
        let streams = own.iter().map(|device| Cuda::create_stream(device).unwrap()).collect();
        Pair { devices, comms, streams }
    }

    impl Pair {
        /// Sums what is at the addresses, which are `registered` or not, and compares all of it.
        fn check(&mut self, inputs: [u64; 2], bytes: usize, registered: Result<(), &str>) {
            let data = random_inputs::<f32>(2, inputs[0], COUNT);
            let expected = reference::all_reduce(&[&data[0], &data[1]], ReduceOp::Sum);
            let mut registrations = Vec::new();
            let outputs: Vec<_> =
                self.comms.iter().map(|c| DeviceBuffer::<Cuda, f32>::new(c.device(), COUNT).unwrap()).collect();
            for (rank, comm) in self.comms.iter_mut().enumerate() {
                enter(self.devices[rank]);
                // SAFETY: the caller's memory holds so many.
                ok(unsafe { sys::cuMemcpyHtoD_v2(inputs[rank], data[rank].as_ptr().cast(), 4 * COUNT) });
                // SAFETY: the caller frees it behind this.
                let registration = unsafe { comm.register(inputs[rank], bytes) }.unwrap();
                match (registration.refusal(), registered) {
                    (None, Ok(())) => assert!(comm.is_read_in_place(inputs[rank], bytes)),
                    (Some(why), Err(part)) => assert!(why.contains(part), "{why}"),
                    found => panic!("{found:?}"),
                }
                registrations.push(registration);
            }
            for (rank, comm) in self.comms.iter_mut().enumerate() {
                let (stream, output) = (&self.streams[rank], outputs[rank].address());
                let call = comm.with(CallOptions::default());
                // SAFETY: all of it lives until the wait below.
                unsafe { call.all_reduce_raw(stream, inputs[rank], output, COUNT, Dtype::F32, ReduceOp::Sum) }.unwrap();
            }
            for (rank, comm) in self.comms.iter_mut().enumerate() {
                comm.wait(&self.streams[rank]).unwrap();
                let found = outputs[rank].read(&self.streams[rank]).unwrap();
                assert!(found.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits())), "rank {rank}");
            }
        }
    }

    #[test]
    fn register_memory_of_a_pool() {
        let mut pair = pair();
        let mut inputs = [0; 2];
        for (rank, input) in inputs.iter_mut().enumerate() {
            enter(pair.devices[rank]);
            // SAFETY: the output outlives the call.
            ok(unsafe { sys::cuMemAllocAsync(&raw mut *input, 4 * COUNT, pair.streams[rank].raw()) });
            Cuda::synchronize(&pair.streams[rank]).unwrap();
        }
        let apart = pair.devices[0] != pair.devices[1];
        pair.check(inputs, 4 * COUNT, if apart { Err("cuMemPoolSetAccess") } else { Ok(()) });
        let give = |flags: c_uint| {
            for (device, peer) in [(0, 1), (1, 0)] {
                let mut pool = std::ptr::null_mut();
                let access = access(peer, flags);
                // SAFETY: the output outlives the call.
                ok(unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, device) });
                // SAFETY: a struct of the driver's layout.
                ok(unsafe { sys::cuMemPoolSetAccess(pool, (&raw const access).cast(), 1) });
            }
        };
        if apart {
            give(3);
            pair.check(inputs, 4 * COUNT, Ok(()));
            give(0);
            pair.check(inputs, 4 * COUNT, Err("cuMemPoolSetAccess"));
        }
        for (rank, input) in inputs.into_iter().enumerate() {
            enter(pair.devices[rank]);
            // SAFETY: nothing uses it any more.
            ok(unsafe { sys::cuMemFreeAsync(input, pair.streams[rank].raw()) });
            Cuda::synchronize(&pair.streams[rank]).unwrap();
        }
    }

    /// Memory that is mapped for its own device alone; then for the other one too.
    #[test]
    fn register_mapped_memory() {
        const BYTES: usize = 2 << 20;
        #[repr(C)]
        struct Properties {
            kind: c_uint,
            handle_types: c_uint,
            location: [c_int; 2],
            rest: [u64; 2],
        }
        const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmemAllocationProp>());
        const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());
        let mut pair = pair();
        let allow = |address: u64, device: usize| {
            let access = access(device, 3);
            // SAFETY: a struct of the driver's layout; the range is mapped.
            ok(unsafe { sys::cuMemSetAccess(address, BYTES, (&raw const access).cast(), 1) });
        };
        let inputs = pair.devices.map(|device| {
            enter(device);
            let (mut handle, mut address) = (0, 0);
            let properties = Properties { kind: 1, handle_types: 0, location: [1, device as c_int], rest: [0; 2] };
            let properties: *const c_void = (&raw const properties).cast();
            // SAFETY: a struct of the driver's layout; the output outlives the call.
            ok(unsafe { sys::cuMemCreate(&raw mut handle, BYTES, properties.cast(), 0) });
            // SAFETY: as above.
            ok(unsafe { sys::cuMemAddressReserve(&raw mut address, BYTES, 0, 0, 0) });
            // SAFETY: nothing is mapped there.
            ok(unsafe { sys::cuMemMap(address, BYTES, 0, handle, 0) });
            // SAFETY: the mapping keeps the memory.
            ok(unsafe { sys::cuMemRelease(handle) });
            allow(address, device);
            address
        });
        let apart = pair.devices[0] != pair.devices[1];
        pair.check(inputs, 4 * COUNT, if apart { Err("cuMemSetAccess") } else { Ok(()) });
        if apart {
            allow(inputs[0], 1);
            allow(inputs[1], 0);
            pair.check(inputs, 4 * COUNT, Ok(()));
        }
        pair.check(inputs, BYTES + 1, Err("beyond"));
        for (device, input) in pair.devices.into_iter().zip(inputs) {
            enter(device);
            // SAFETY: nothing uses it any more.
            ok(unsafe { sys::cuMemUnmap(input, BYTES) });
            // SAFETY: nothing is mapped there.
            ok(unsafe { sys::cuMemAddressFree(input, BYTES) });
        }
    }
}
