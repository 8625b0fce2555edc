//! RMSNorm of rows, alone and behind an all-reduce: bit by bit the reference's, whatever the grid, the batch and the algorithm.

use std::time::Duration;

use half::{bf16, f16};
use signal_core::reference::{self, Rng};
use signal_core::{
    Algorithm, ApiMisuse, Backend, CallOptions, DeviceBuffer, Dtype, E4m3, Element, Error, Float, Phase, ReduceOp,
    RmsNorm,
};

use crate::compare;
use crate::exchange::{random_inputs, works};
use crate::place::{below, pick};
use crate::rig::{Rig, is_scaled_down, scaled};
use crate::world::{World, options};

/// What one call does.
#[derive(Clone, Copy, Debug)]
struct Job {
    rows: usize,
    elements: usize,
    residual: Where,
    sum: bool,
    offset: f32,
    epsilon: f32,
    seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Where {
    Nowhere,
    InPlace,
    Apart,
}

/// What each rank has, and what it must get.
struct Data<T> {
    inputs: Vec<Vec<T>>,
    residuals: Vec<Vec<T>>,
    weights: Vec<Vec<T>>,
    sums: Vec<T>,
    normed: Vec<Vec<T>>,
    new_residuals: Vec<Vec<T>>,
}

impl Job {
    fn draw(rng: &mut Rng, rows: usize, elements: usize) -> Job {
        Job {
            rows,
            elements,
            residual: pick(rng, &[Where::Nowhere, Where::InPlace, Where::Apart]),
            sum: below(rng, 2) == 0,
            offset: pick(rng, &[0.0, 1.0]),
            epsilon: pick(rng, &[1e-6, 1e-5]),
            seed: rng.next_u64(),
        }
    }

    fn count(&self) -> usize {
        self.rows * self.elements
    }

    /// `summed`: the rows are the sums of all ranks' inputs, else each rank's own.
    fn data<T: Float>(&self, ranks: usize, summed: bool) -> Data<T> {
        let inputs = random_inputs::<T>(ranks, self.seed, self.count());
        let residuals = random_inputs::<T>(ranks, self.seed + 1, self.count());
        let weights = random_inputs::<T>(ranks, self.seed + 2, self.elements);
        let all: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
        let sums = reference::all_reduce(&all, ReduceOp::Sum);
        let (mut normed, mut new_residuals) = (Vec::new(), Vec::new());
        for rank in 0..ranks {
            let source = if summed { &sums } else { &inputs[rank] };
            let (mut all_normed, mut all_new) = (Vec::new(), Vec::new());
            for row in 0..self.rows {
                let range = row * self.elements..(row + 1) * self.elements;
                let residual = (self.residual != Where::Nowhere).then(|| &residuals[rank][range.clone()]);
                let (row, new) =
                    reference::rms_norm(&source[range], residual, &weights[rank], self.epsilon, self.offset);
                all_normed.extend(row);
                all_new.extend(new);
            }
            normed.push(all_normed);
            new_residuals.push(all_new);
        }
        Data { inputs, residuals, weights, sums, normed, new_residuals }
    }
}

/// One rank's buffers.
struct Buffers<B: Backend, T: Element> {
    input: DeviceBuffer<B, T>,
    output: DeviceBuffer<B, T>,
    weight: DeviceBuffer<B, T>,
    residual: DeviceBuffer<B, T>,
    new: DeviceBuffer<B, T>,
    sum: DeviceBuffer<B, T>,
}

impl<B: Backend, T: Float> Buffers<B, T> {
    /// Operands begin `start` elements behind an aligned address.
    fn new(device: &B::Device, stream: &B::Stream, job: &Job, data: &Data<T>, rank: usize, start: usize) -> Self {
        let buffer = |content: &[T]| {
            let mut buffer = DeviceBuffer::<B, T>::new(device, start + content.len()).unwrap();
            let shifted: Vec<T> = std::iter::repeat_n(T::from_f32(7.0), start).chain(content.iter().copied()).collect();
            buffer.write(stream, &shifted).unwrap();
            buffer
        };
        let garbage = vec![T::from_f32(-3.0); job.count()];
        Buffers {
            input: buffer(&data.inputs[rank]),
            output: buffer(&garbage),
            weight: buffer(&data.weights[rank]),
            residual: buffer(&data.residuals[rank]),
            new: buffer(&garbage),
            sum: buffer(&garbage),
        }
    }

    /// Slices of all operands, as a call takes them.
    fn norm(&mut self, job: &Job, start: usize) -> [Operand<'_, B, T>; 1] {
        let Buffers { input, output, weight, residual, new, sum } = self;
        let mut norm = RmsNorm::new(weight.slice(start..).unwrap(), job.epsilon).weight_offset(job.offset);
        norm = match job.residual {
            Where::Nowhere => norm,
            Where::InPlace => norm.residual_in_place(residual.slice_mut(start..).unwrap()),
            Where::Apart => norm.residual(residual.slice(start..).unwrap(), new.slice_mut(start..).unwrap()),
        };
        if job.sum {
            norm = norm.sum(sum.slice_mut(start..).unwrap());
        }
        [(input.slice(start..).unwrap(), output.slice_mut(start..).unwrap(), norm)]
    }

    fn check(
        &self,
        what: &str,
        stream: &B::Stream,
        job: &Job,
        data: &Data<T>,
        (rank, start): (usize, usize),
        sums: &[T],
    ) {
        let read = |buffer: &DeviceBuffer<B, T>| buffer.read(stream).unwrap().split_off(start);
        compare::assert_bits(&format!("{what}: normed"), &read(&self.output), &data.normed[rank]);
        compare::assert_bits(&format!("{what}: input"), &read(&self.input), &data.inputs[rank]);
        let (old, new) = match job.residual {
            Where::Nowhere => (&data.residuals[rank], None),
            Where::InPlace => (&data.new_residuals[rank], None),
            Where::Apart => (&data.residuals[rank], Some(&data.new_residuals[rank])),
        };
        compare::assert_bits(&format!("{what}: residual"), &read(&self.residual), old);
        if let Some(new) = new {
            compare::assert_bits(&format!("{what}: new residual"), &read(&self.new), new);
        }
        if job.sum {
            compare::assert_bits(&format!("{what}: sum"), &read(&self.sum), sums);
        }
    }
}

type Operand<'a, B, T> = (signal_core::Slice<'a, B, T>, signal_core::SliceMut<'a, B, T>, RmsNorm<'a, B, T>);

/// Runs a call on all ranks and compares all that it must and must not touch.
fn run<B: Backend, T: Float>(world: &mut World<B>, rng: &mut Rng, job: &Job, call: CallOptions) {
    let data = job.data::<T>(world.ranks(), true);
    let mut buffers = Vec::new();
    world.each(|rank, comm, stream| {
        let start = pick(rng, &[0, 0, 1, 3]);
        buffers.push((Buffers::<B, T>::new(comm.device(), stream, job, &data, rank, start), start));
        Ok(())
    });
    world.each(|rank, comm, stream| {
        let (buffers, start) = &mut buffers[rank];
        let [(input, output, norm)] = buffers.norm(job, *start);
        comm.with(call).all_reduce_rms_norm(stream, input, output, norm)
    });
    world.wait();
    for (rank, (buffers, start)) in buffers.iter().enumerate() {
        let what = format!("rank {rank} of {}, {job:?}, {}, {call:?}", world.ranks(), T::DTYPE);
        buffers.check(&what, &world.streams[rank], job, &data, (rank, *start), &data.sums);
    }
}

fn grid(rng: &mut Rng, algorithm: Option<Algorithm>) -> CallOptions {
    options(|o| {
        o.algorithm = algorithm;
        (o.blocks, o.threads) =
            pick(rng, &[(None, None), (Some(1), Some(1)), (Some(3), Some(2)), (Some(2), Some(3)), (Some(5), None)]);
    })
}

/// Hidden sizes as models have them, and odd ones.
const ELEMENTS: [usize; 9] = [1, 3, 8, 64, 333, 1032, 2880, 4096, 5128];

/// All forms of the call, by Lamport's algorithm, by others, and by what the library chooses.
pub fn norm_behind_an_all_reduce<B: Backend>(rig: &Rig<B>) {
    for ranks in if is_scaled_down() { vec![2, 3] } else { vec![1, 2, 3, 8] } {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        for elements in ELEMENTS {
            for _ in 0..scaled(2) {
                for_dtypes!(T => {
                    let rows = 1 + below(&mut rng, if elements > 1000 { 3 } else { 9 });
                    let job = Job::draw(&mut rng, rows, elements);
                    let algorithm = pick(&mut rng, &[None, Some(Algorithm::Lamport), Some(Algorithm::OneStage), Some(Algorithm::TwoStage)]);
                    let call = grid(&mut rng, algorithm);
                    run::<B, T>(&mut world, &mut rng, &job, call);
                });
            }
        }
        works(&mut world);
    }
}

/// More rows than the region holds, which take two kernels, and as many as it holds.
pub fn norm_around_the_region<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let mut rng = Rng::new(5);
    for rows in [1023, 1024, 1025] {
        let job = Job::draw(&mut rng, rows, 1024);
        run::<B, f32>(&mut world, &mut rng, &job, CallOptions::default());
    }
    let job = Job::draw(&mut rng, 1025, 1024);
    let (input, mut output) = (world.local::<f32>(job.count()), world.local::<f32>(job.count()));
    let weight = world.local::<f32>(1024);
    let call = options(|o| o.algorithm = Some(Algorithm::Lamport));
    let norm = RmsNorm::new(&weight[0], 1e-5);
    let found = world.comms[0].with(call).all_reduce_rms_norm(&world.streams[0], &input[0], &mut output[0], norm);
    assert!(matches!(found, Err(Error::ApiMisuse(ApiMisuse::LamportTooLarge { .. }))), "{found:?}");
    works(&mut world);
}

/// Alone, and in place.
pub fn norm_alone<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(1);
    let mut rng = Rng::new(6);
    for elements in ELEMENTS {
        for_dtypes!(T => {
            let rows = 1 + below(&mut rng, 4);
            let job = Job::draw(&mut rng, rows, elements);
            let data = job.data::<T>(1, false);
            let call = grid(&mut rng, None);
            world.each(|rank, comm, stream| {
                let mut buffers = Buffers::<B, T>::new(comm.device(), stream, &job, &data, rank, 0);
                let [(input, output, norm)] = buffers.norm(&job, 0);
                comm.with(call).rms_norm(stream, input, output, norm)?;
                comm.wait(stream)?;
                buffers.check(&format!("{job:?}"), stream, &job, &data, (rank, 0), &data.inputs[0]);
                Ok(())
            });
        });
    }
}

/// A row has the bits that it has alone, in whatever batch.
pub fn norm_rows_do_not_know_each_other<B: Backend>(rig: &Rig<B>) {
    const ELEMENTS: usize = 520;
    let mut world = rig.world(2);
    let row = random_inputs::<bf16>(2, 1, ELEMENTS);
    let weights = random_inputs::<bf16>(1, 2, ELEMENTS);
    let mut first = None;
    for batch in [1, 2, 63, 64, 65, 128] {
        let (mut inputs, mut outputs) = (world.local::<bf16>(batch * ELEMENTS), world.local::<bf16>(batch * ELEMENTS));
        let mut weight = world.local::<bf16>(ELEMENTS);
        world.each(|rank, comm, stream| {
            // Between other rows each time.
            let mut content = random_inputs::<bf16>(2, batch as u64, batch * ELEMENTS).swap_remove(rank);
            content[(batch / 2) * ELEMENTS..][..ELEMENTS].copy_from_slice(&row[rank]);
            inputs[rank].write(stream, &content)?;
            weight[rank].write(stream, &weights[0])?;
            let norm = RmsNorm::new(&weight[rank], 1e-6);
            comm.all_reduce_rms_norm(stream, &inputs[rank], &mut outputs[rank], norm)
        });
        world.wait();
        for (rank, output) in outputs.iter().enumerate() {
            let found = output.read(&world.streams[rank]).unwrap()[(batch / 2) * ELEMENTS..][..ELEMENTS].to_vec();
            let expected = first.get_or_insert(found.clone());
            compare::assert_bits(&format!("rank {rank}, batch of {batch}"), &found, expected);
        }
    }
}

/// In graphs, between other calls through the same region, of other sizes; the residual is overwritten as soon as the call has ended, while a
/// peer is late.
pub fn norm_in_graphs_and_between_calls<B: Backend>(rig: &Rig<B>) {
    const ELEMENTS: usize = 160;
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        let job = Job { residual: Where::InPlace, ..Job::draw(&mut rng, 3, ELEMENTS) };
        let data = job.data::<f16>(ranks, true);
        let mut buffers: Vec<Buffers<B, f16>> = Vec::new();
        let mut plain = world.local::<f32>(20_000);
        world.each(|rank, comm, stream| {
            buffers.push(Buffers::new(comm.device(), stream, &job, &data, rank, 0));
            Ok(())
        });
        let late = below(&mut rng, ranks);
        let graphs: Vec<_> = (0..ranks)
            .map(|rank| {
                world.capture(rank, |comm, stream| {
                    let [(input, output, norm)] = buffers[rank].norm(&job, 0);
                    let delay = (rank == late).then_some((Phase::Exchange, Duration::from_millis(2)));
                    comm.with(options(|o| o.delay = delay)).all_reduce_rms_norm(stream, input, output, norm)
                })
            })
            .collect();
        for round in 0..scaled(30) {
            let count = pick(&mut rng, &[1, 100, 4_000, 20_000]);
            world.each(|rank, comm, stream| {
                comm.with(options(|o| o.algorithm = Some(Algorithm::Lamport))).all_reduce_in_place(
                    stream,
                    plain[rank].slice_mut(..count)?,
                    ReduceOp::Sum,
                )?;
                buffers[rank].residual.write(stream, &data.residuals[rank])?;
                B::replay(&graphs[rank], stream)?;
                let Buffers { residual, new, .. } = &mut buffers[rank];
                new.copy_from(stream, residual)?;
                residual.fill_bytes(stream, round)
            });
        }
        world.wait();
        for (rank, buffers) in buffers.iter().enumerate() {
            let stream = &world.streams[rank];
            compare::assert_bits("normed", &buffers.output.read(stream).unwrap(), &data.normed[rank]);
            compare::assert_bits("new residual", &buffers.new.read(stream).unwrap(), &data.new_residuals[rank]);
        }
    }
}

/// What does not fit is refused, and nothing has been launched.
pub fn norm_misuse<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let (comm, stream) = (&mut world.comms[0], &world.streams[0]);
    let buffer = |len| DeviceBuffer::<B, f32>::new(comm.device(), len).unwrap();
    let (input, mut output, mut other) = (buffer(100), buffer(100), buffer(99));
    let [weight, odd, none] = [10, 7, 0].map(buffer);
    let fp8 = DeviceBuffer::<B, E4m3>::new(comm.device(), 10).unwrap();
    let mut fp8_output = DeviceBuffer::<B, E4m3>::new(comm.device(), 10).unwrap();
    let lengths = ApiMisuse::Length { input: 100, output: 99 };
    let mut refused =
        |norm: RmsNorm<'_, B, f32>| comm.all_reduce_rms_norm(stream, &input, &mut output, norm).unwrap_err();
    let parts = |error: Error, of: &str| {
        assert!(matches!(&error, Error::ApiMisuse(ApiMisuse::Parts { what, .. }) if *what == of), "{error}");
    };
    parts(refused(RmsNorm::new(&odd, 1e-5)), "input");
    parts(refused(RmsNorm::new(&none, 1e-5)), "weight");
    assert_eq!(refused(RmsNorm::new(&weight, 1e-5).residual_in_place(&mut other)), lengths.clone().into());
    assert_eq!(refused(RmsNorm::new(&weight, 1e-5).sum(&mut other)), lengths.clone().into());
    let found = comm.rms_norm(stream, &input, &mut other, RmsNorm::new(&weight, 1e-5));
    assert_eq!(found, Err(lengths.into()));
    let found = comm.all_reduce_rms_norm(stream, &fp8, &mut fp8_output, RmsNorm::new(&fp8, 1e-5));
    assert_eq!(found, Err(ApiMisuse::NormType(Dtype::E4m3).into()));
    // No rows are no call.
    let (nothing, mut to) =
        (DeviceBuffer::new(comm.device(), 0).unwrap(), DeviceBuffer::new(comm.device(), 0).unwrap());
    comm.all_reduce_rms_norm(stream, &nothing, &mut to, RmsNorm::new(&weight, 1e-5)).unwrap();
    works(&mut world);
}

/// A rank that does not come is named, and whoever waited leaves as one.
pub fn norm_names_the_missing_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut world = rig.world_with(ranks, |s| s.timeout = Duration::from_millis(300));
        let (input, mut output) = (world.local::<f32>(4000), world.local::<f32>(4000));
        let weight = world.local::<f32>(1000);
        for rank in 1..ranks {
            let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
            let call = options(|o| (o.algorithm, o.blocks, o.threads) = (Some(Algorithm::Lamport), Some(2), Some(3)));
            let norm = RmsNorm::new(&weight[rank], 1e-5);
            comm.with(call).all_reduce_rms_norm(stream, &input[rank], &mut output[rank], norm).unwrap();
        }
        for rank in 1..ranks {
            match world.comms[rank].wait(&world.streams[rank]) {
                Err(Error::Timeout(found)) => {
                    assert_eq!(
                        (found.missing.as_slice(), found.operation),
                        ([0].as_slice(), "all-reduce with RMSNorm")
                    );
                }
                other => panic!("{other:?}"),
            }
        }
        signal_core::Communicator::recover_all(&mut world.comms).unwrap();
        works(&mut world);
    }
}
