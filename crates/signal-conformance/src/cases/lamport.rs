//! The Lamport region: generations, the wrap of its flag, what may follow what, and early launches (P5 to P9).

use half::{bf16, f16};
use signal_core::kernel::PeerProbeParams;
use signal_core::reference::Rng;
use signal_core::{
    Algorithm, ApiMisuse, Backend, CallOptions, Communicator, DeviceBuffer, DeviceFamily, Element, Float, Kernel,
    Launch, ReduceOp, Result,
};

use crate::cases::misuse::refused;
use crate::compare;
use crate::exchange::{Exchange, poison, random_inputs, sum, works};
use crate::place::{Mix, Place, below, pick};
use crate::rig::{Rig, is_scaled_down, scaled};
use crate::world::{World, options};

fn lamport(blocks: u32, threads: u32) -> CallOptions {
    options(|o| (o.algorithm, o.blocks, o.threads) = (Some(Algorithm::Lamport), Some(blocks), Some(threads)))
}

/// Calls of changing sizes on both sides of the place where the flag skips its last value (P7).
pub fn lamport_flag_wraps<B: Backend>(rig: &Rig<B>) {
    for (ranks, first) in [(2, 0xffff_fffa), (3, 0xffff_fffa), (8, 0xffff_fffe)] {
        for start in first..=0xffff_fffe_u32 {
            let mut world = rig.world(ranks);
            for comm in &mut world.comms {
                refused(comm.preset_lamport_flag(u32::MAX), ApiMisuse::LamportFlag(u32::MAX));
                comm.preset_lamport_flag(start).unwrap();
            }
            for (call, count) in [1, 900, 3, 77, 5000, 4, 8, 600, 1, 2, 3000, 5].into_iter().enumerate() {
                let grid = lamport(1 + call as u32 % 3, 2);
                let places = vec![Place::symmetric(); ranks];
                Exchange::<B, f32>::random(&mut world, count, call as u64, grid, &places).run(&mut world, call % ranks);
            }
        }
    }
}

/// Large and small calls, of few and many blocks and of each type, in every order: one clears what another has left.
pub fn lamport_sizes_follow_each_other<B: Backend>(rig: &Rig<B>) {
    let largest = if is_scaled_down() { 1 << 16 } else { 1 << 20 };
    for ranks in [2, 3, 8] {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        // Few ranks have several slots each.
        let several = largest * if ranks == 2 { 3 } else { 1 };
        let sizes = [several, 16, largest, largest - 2, 40_000, 4_096, 4_112, 6, largest, 20_000, 10];
        let calls = if ranks == 8 { 3 } else { scaled(sizes.len() as u32).max(4) };
        for_dtypes!(T => for (call, bytes) in sizes.into_iter().take(calls as usize).enumerate() {
            let grid = lamport(pick(&mut rng, &[1, 2, 4]), pick(&mut rng, &[1, 2]));
            let places = pick(&mut rng, &Mix::ALL).places(ranks, &mut rng);
            let count = bytes / T::DTYPE.bytes();
            Exchange::<B, T>::random(&mut world, count, call as u64, grid, &places).run(&mut world, call % ranks);
        });
    }
}

/// A long sequence of one element type, never waited for: each call reads a slice of one input and writes a slice of one
/// output, all of them different, and the whole output is compared at the end.
struct Sequence<B: Backend, T: Element> {
    inputs: Vec<DeviceBuffer<B, T>>,
    outputs: Vec<DeviceBuffer<B, T>>,
    values: Vec<Vec<T>>,
    image: Vec<T>,
    /// Elements of the output that are taken.
    used: usize,
}

const INPUT: usize = 4096;
const OUTPUT: usize = 1 << 19;

impl<B: Backend, T: Element> Sequence<B, T> {
    fn new(world: &mut World<B>, seed: u64) -> Self {
        let (mut inputs, mut outputs) = (world.alloc(INPUT), world.local(OUTPUT));
        let values = random_inputs(world.ranks(), seed, INPUT);
        let image = vec![poison(); OUTPUT];
        world.each(|rank, _, stream| {
            inputs[rank].write(stream, &values[rank])?;
            outputs[rank].write(stream, &image)
        });
        Sequence { inputs, outputs, values, image, used: 0 }
    }

    /// Enqueues one call on every rank, the first one first; false when the output is full.
    fn step(&mut self, world: &mut World<B>, options: CallOptions, rng: &mut Rng) -> bool {
        let count = if below(rng, 50) == 0 { below(rng, 2000) } else { below(rng, 120) };
        let start = below(rng, INPUT - count + 1);
        let first = self.used + below(rng, 4);
        self.used = first + count;
        if self.used > OUTPUT {
            return false;
        }
        let (range, place) = (start..start + count, first..self.used);
        world.each(|rank, comm, stream| {
            let input = self.inputs[rank].slice(range.clone())?;
            comm.with(options).all_reduce(stream, input, self.outputs[rank].slice_mut(place.clone())?, ReduceOp::Sum)
        });
        let slices: Vec<Vec<T>> = self.values.iter().map(|values| values[range.clone()].to_vec()).collect();
        self.image[place].copy_from_slice(&sum(&slices));
        true
    }

    fn check(&self, world: &World<B>) {
        world.wait();
        for (rank, output) in self.outputs.iter().enumerate() {
            let found = output.read(&world.streams[rank]).unwrap();
            compare::assert_bits(&format!("rank {rank} of {}", world.ranks()), &found, &self.image);
        }
    }
}

/// Ten thousand calls on two ranks without a wait between them, of random sizes, types, algorithms and grids, and fewer on
/// more; a hundred thousand, and ten thousand on more ranks, on a GPU, where a call is short.
pub fn lamport_ten_thousand_calls<B: Backend>(rig: &Rig<B>) {
    let host = rig.is_host();
    let calls = if host {
        [(2, 10_000), (3, 4000), (5, 1000), (8, 500)]
    } else {
        [(2, 100_000), (3, 10_000), (5, 10_000), (8, 10_000)]
    };
    for (ranks, calls) in calls {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        let mut left = scaled(calls);
        while left > 0 {
            let seed = rng.next_u64();
            let mut full = Sequence::<B, f32>::new(&mut world, seed);
            let mut half = Sequence::<B, f16>::new(&mut world, seed + 1);
            let mut brain = Sequence::<B, bf16>::new(&mut world, seed + 2);
            let mut room = true;
            while room && left > 0 {
                // Mostly one call behind the other in the region.
                let algorithm = match below(&mut rng, 8) {
                    0 => pick(&mut rng, &Algorithm::ALL_REDUCE),
                    1..4 => Algorithm::TwoShot,
                    _ => Algorithm::Lamport,
                };
                let call = options(|o| {
                    o.algorithm = Some(algorithm);
                    (o.blocks, o.threads) = pick(&mut rng, &[(None, None), (Some(1), Some(1)), (Some(3), Some(2))]);
                });
                room = match below(&mut rng, 3) {
                    0 => full.step(&mut world, call, &mut rng),
                    1 => half.step(&mut world, call, &mut rng),
                    _ => brain.step(&mut world, call, &mut rng),
                };
                left -= u32::from(room);
            }
            full.check(&world);
            half.check(&world);
            brain.check(&world);
        }
    }
}

/// Words that a careless test takes for "not ready": -0.0, and 16-bit halves of which the upper one is a negative subnormal
/// above a zero, which a comparison of floats would flush to -0.0.
pub fn lamport_words_like_the_sentinel<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        for_dtypes!(T => {
            let (zeros, values) = (vec![T::from_f32(0.0); 578], words_like_the_sentinel::<T>());
            // One rank alone, so that its word meets zeros; then all ranks.
            for only in (0..ranks).map(Some).chain([None]) {
                let inputs: Vec<Vec<T>> = (0..ranks)
                    .map(|rank| if only.is_none_or(|o| o == rank) { values.clone() } else { zeros.clone() })
                    .collect();
                let places = vec![Place::symmetric(); ranks];
                Exchange::<B, T>::of(&mut world, &inputs, lamport(2, 2), &places).run(&mut world, 0);
            }
        });
    }
}

fn words_like_the_sentinel<T: Element>() -> Vec<T> {
    let upper = if T::DTYPE.bytes() == 4 { 0x8000_0000 } else { 0x8000 };
    let halves = (0..=0x100).flat_map(|low| [T::from_bits(0), T::from_bits(upper | low)]);
    halves.chain(std::iter::repeat_n(T::from_bits(upper), 64)).collect()
}

/// A producer that lets its successor be launched at once, dawdles, and only then writes the input; calls in between; eager
/// and from a graph (P9).
pub fn lamport_waits_for_an_early_producer<B: Backend>(rig: &Rig<B>) {
    const WORDS: usize = 3000;
    for ranks in [2, 3] {
        for captured in [false, true] {
            let mut world = rig.world(ranks);
            let modules: Vec<B::Module> = world.comms.iter().map(|c| B::load(c.device()).unwrap()).collect();
            let mut inputs = world.local::<f32>(WORDS);
            let mut outputs = [world.local::<f32>(WORDS), world.local::<f32>(WORDS)];
            let mut produce_and_add = |rank: usize, comm: &mut Communicator<B>, stream: &B::Stream| -> Result<()> {
                for (seed, outputs) in [1, 2].into_iter().zip(&mut outputs) {
                    produce::<B>(comm, &modules[rank], stream, &inputs[rank], WORDS, 100 * seed + rank as u32)?;
                    comm.with(lamport(2, 64)).all_reduce(stream, &inputs[rank], &mut outputs[rank], ReduceOp::Sum)?;
                }
                // In place, so that the next producer writes what this call still holds.
                comm.with(lamport(2, 64)).all_reduce_in_place(stream, &mut inputs[rank], ReduceOp::Sum)
            };
            if captured {
                let graphs: Vec<B::Graph> = (0..ranks)
                    .map(|rank| {
                        let stream = world.streams[rank].clone();
                        B::begin_capture(&stream).unwrap();
                        produce_and_add(rank, &mut world.comms[rank], &stream).unwrap();
                        B::end_capture(&stream).unwrap()
                    })
                    .collect();
                for _ in 0..3 {
                    world.each(|rank, _, stream| B::replay(&graphs[rank], stream));
                }
                world.wait();
            } else {
                for _ in 0..3 {
                    world.each(&mut produce_and_add);
                }
                world.wait();
            }
            let produced = |seed: u32| -> Vec<Vec<f32>> {
                (0..ranks).map(|rank| pattern(100 * seed + rank as u32, WORDS)).collect()
            };
            for rank in 0..ranks {
                let what = format!("rank {rank} of {ranks}, captured: {captured}");
                let stream = &world.streams[rank];
                for (seed, outputs) in [1, 2].into_iter().zip(&outputs) {
                    compare::assert_same(&what, &outputs[rank].read(stream).unwrap(), &sum(&produced(seed)));
                }
                compare::assert_same(&what, &inputs[rank].read(stream).unwrap(), &sum(&produced(2)));
            }
        }
    }
}

/// What [`produce`] writes.
fn pattern(seed: u32, words: usize) -> Vec<f32> {
    (0..words as u32).map(|i| f32::from_bits(seed.wrapping_add(i.wrapping_mul(2_654_435_761)))).collect()
}

/// Enqueues a kernel that writes a pattern, a tenth of a millisecond after it has let the next one come.
fn produce<B: Backend>(
    comm: &Communicator<B>,
    module: &B::Module,
    stream: &B::Stream,
    target: &DeviceBuffer<B, f32>,
    words: usize,
    seed: u32,
) -> Result<()> {
    let ticks = B::describe(comm.device()).clock_hz / 10_000;
    let params = PeerProbeParams {
        remote: target.address(),
        mismatches: 0,
        words: words as u32,
        seed,
        check: 0,
        delay: ticks as u32,
    };
    let launch = Launch {
        kernel: Kernel::PeerProbe.into(),
        grid: 1,
        threads: if B::describe(comm.device()).family == DeviceFamily::Host { 1 } else { 64 },
        params: bytemuck::bytes_of(&params),
        early: true,
        uses: &[target.memory()],
    };
    // SAFETY: the parameters are the probe's; what it writes lies in the buffer, which `uses` keeps alive.
    unsafe { B::launch(stream, module, &launch) }
}

/// Calls that the region cannot take, and the setting that then gives way.
pub fn misuse_lamport<B: Backend>(rig: &Rig<B>) {
    const LIMIT: usize = 4 << 20;
    let mut world = rig.world_with(2, |s| (s.domains, s.algorithm) = (true, Some(Algorithm::Lamport)));
    let mut large = world.alloc::<f32>(LIMIT / 4 + 1);
    let (comm, stream) = (&mut world.comms[0], &world.streams[0]);
    let too_large = ApiMisuse::LamportTooLarge { bytes: LIMIT as u64 + 4, limit: LIMIT };
    refused(comm.with(lamport(1, 1)).all_reduce_in_place(stream, &mut large[0], ReduceOp::Sum), too_large);
    let mut elsewhere = lamport(1, 1);
    elsewhere.domain = 3;
    let mut small = DeviceBuffer::<B, f32>::new(comm.device(), 10).unwrap();
    refused(comm.with(elsewhere).all_reduce_in_place(stream, &mut small, ReduceOp::Sum), ApiMisuse::LamportDomain(3));
    assert_eq!(comm.plan(LIMIT / 4, signal_core::Dtype::F32, ReduceOp::Sum).algorithm, Algorithm::Lamport);
    assert_ne!(comm.plan(LIMIT / 4 + 1, signal_core::Dtype::F32, ReduceOp::Sum).algorithm, Algorithm::Lamport);
    // Without a choice of its own a call takes what it can.
    let places = [Place::symmetric(), Place::local()];
    let on_domain = options(|o| o.domain = 3);
    for (count, options) in [(100, CallOptions::default()), (100, on_domain), (LIMIT / 4 + 9, CallOptions::default())] {
        Exchange::<B, f32>::random(&mut world, count, 1, options, &places).run(&mut world, 0);
    }
    works(&mut world);
}
