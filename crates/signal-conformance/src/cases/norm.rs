//! RMSNorm of rows, alone and behind an all-reduce: bit by bit the reference's, whatever the grid, the batch and the algorithm.

use std::time::Duration;

use half::{bf16, f16};
use signal_core::reference::{Rng, random_inputs};
use signal_core::{
    Algorithm, ApiMisuse, Backend, CallOptions, Collective, DeviceBuffer, Dtype, E4m3, Error, Float, LayerNorm,
    NormOutput, Phase, ReduceOp, RmsNorm,
};

use crate::compare;
use crate::exchange::works;
use crate::place::{below, pick};
use crate::rig::{Rig, is_scaled_down, scaled};
use crate::rows::{Buffers, Job, Where};
use crate::world::{World, options};

/// Runs a call on all ranks and compares all that it must and must not touch.
fn run<B: Backend, T: Float>(world: &mut World<B>, rng: &mut Rng, job: &Job, call: CallOptions) {
    let data = job.data::<T>(world.ranks());
    let mut buffers = Vec::new();
    world.each(|rank, comm, stream| {
        buffers.push(Buffers::<B, T>::new(comm.device(), stream, job, &data, rank, pick(rng, &[0, 0, 1, 3]))?);
        Ok(())
    });
    world.each(|rank, comm, stream| buffers[rank].launch(comm.with(call), stream, job));
    world.wait();
    for (rank, buffers) in buffers.iter().enumerate() {
        let what = format!("rank {rank} of {}, {job:?}, {}, {call:?}", world.ranks(), T::DTYPE);
        buffers.check(&what, &world.streams[rank], job, &data, rank);
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
                    let job = Job { odd_rows: below(&mut rng, 4) == 0, ..Job::draw(&mut rng, rows, elements) };
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
    let (input, mut output) = (world.local::<f32>(1025 * 1024), world.local::<f32>(1025 * 1024));
    let weight = world.local::<f32>(1024);
    let call = options(|o| o.algorithm = Some(Algorithm::Lamport));
    let norm = RmsNorm::new(&weight[0], 1e-5);
    let found = world.comms[0].with(call).all_reduce_rms_norm(&world.streams[0], &input[0], &mut output[0], norm);
    assert!(matches!(found, Err(Error::ApiMisuse(ApiMisuse::LamportTooLarge { .. }))), "{found:?}");
    works(&mut world);
}

/// Every norm, of every collective and alone, exact and fast, to every output.
pub fn norm_forms<B: Backend>(rig: &Rig<B>) {
    for ranks in if is_scaled_down() { vec![2, 3] } else { vec![1, 2, 3, 4, 8] } {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(100 + ranks as u64);
        for elements in [1, 3, 16, 96, 333, 1032, 2880, 4096, 5128] {
            for _ in 0..scaled(3) {
                for_dtypes!(T => {
                    let rows = 1 + below(&mut rng, if elements > 1000 { 3 } else { 9 });
                    let job = Job::draw_any(&mut rng, rows, elements);
                    let algorithm = match job.collective {
                        Some(Collective::AllReduce) => pick(
                            &mut rng,
                            &[None, Some(Algorithm::Lamport), Some(Algorithm::TwoStagePush), Some(Algorithm::OneStage)],
                        ),
                        _ => pick(&mut rng, &[None, Some(Algorithm::TwoStagePush)]),
                    };
                    let call = grid(&mut rng, algorithm.filter(|_| job.collective.is_some()));
                    run::<B, T>(&mut world, &mut rng, &job, call);
                });
            }
        }
        works(&mut world);
    }
}

/// Through a scratch that holds a few rows at a time, so that the two-stage form takes windows.
pub fn norm_windows<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut world = rig.world_with(ranks, |s| s.scratch_bytes = 256 << 10);
        let mut rng = Rng::new(200 + ranks as u64);
        for _ in 0..scaled(20) {
            let elements = pick(&mut rng, &[64, 1000, 1024]);
            let rows = 1 + below(&mut rng, 60);
            let job = Job::draw_any(&mut rng, rows, elements);
            let job = Job { collective: job.collective.or(Some(Collective::AllReduce)), ..job };
            let call = grid(&mut rng, Some(Algorithm::TwoStagePush));
            run::<B, bf16>(&mut world, &mut rng, &job, call);
            run::<B, f32>(&mut world, &mut rng, &job, CallOptions::default());
        }
        // No block's row has a place.
        let count = 100_000;
        let (input, mut output) = (world.local::<f32>(count), world.local::<f32>(count));
        let weight = world.local::<f32>(count);
        let norm = LayerNorm::without_bias(&weight[0], 1e-5);
        let found = world.comms[0].layer_norm(&world.streams[0], &input[0], &mut output[0], norm);
        assert!(matches!(found, Err(Error::ApiMisuse(ApiMisuse::RowTooLarge { .. }))), "{found:?}");
        works(&mut world);
    }
}

/// Fast, how far it may be from the real numbers: half a unit of the type's last place, and of f32 what some hundred additions lose, relative to the
/// magnitudes that were added.
pub fn norm_fast_is_close<B: Backend>(rig: &Rig<B>) {
    const ELEMENTS: usize = 520;
    let mut world = rig.world(3);
    let mut rng = Rng::new(7);
    for_dtypes!(T => {
        for is_layer in [false, true] {
            let job = Job { is_layer, has_bias: is_layer, is_fast: true, residual: Where::Apart, ..Job::draw(&mut rng, 4, ELEMENTS) };
            let data = job.data::<T>(3);
            let mut buffers = Vec::new();
            world.each(|rank, comm, stream| {
                buffers.push(Buffers::<B, T>::new(comm.device(), stream, &job, &data, rank, 0)?);
                buffers[rank].launch(comm.with(CallOptions::default()), stream, &job)
            });
            world.wait();
            for (rank, buffers) in buffers.iter().enumerate() {
                let found = buffers.output.read(&world.streams[rank]).unwrap();
                for row in 0..job.rows {
                    check_closeness(&job, &data.real_row(&job, rank, row), &found[row * ELEMENTS..][..ELEMENTS]);
                }
            }
        }
    });
}

/// Of a row in f64: the normed elements, and what magnitudes stand behind each.
fn check_closeness<T: Float>(job: &Job, row: &[(f64, f64)], found: &[T]) {
    let half_unit = match T::DTYPE {
        Dtype::Bf16 => 2f64.powi(-8),
        Dtype::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    };
    for (i, ((real, magnitude), found)) in row.iter().zip(found).enumerate() {
        let bound = real.abs() * half_unit + magnitude * 2f64.powi(-20) + 2f64.powi(-24);
        let error = (found.to_f64() - real).abs();
        assert!(error <= bound, "{job:?}, {}: element {i} is {found:?} and not {real}: {error} > {bound}", T::DTYPE);
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
        let data = job.data::<f16>(ranks);
        let mut buffers: Vec<Buffers<B, f16>> = Vec::new();
        let mut plain = world.local::<f32>(20_000);
        world.each(|rank, comm, stream| {
            buffers.push(Buffers::new(comm.device(), stream, &job, &data, rank, 0)?);
            Ok(())
        });
        let late = below(&mut rng, ranks);
        let graphs: Vec<_> = (0..ranks)
            .map(|rank| {
                world.capture(rank, |comm, stream| {
                    let delay = (rank == late).then_some((Phase::Exchange, Duration::from_millis(2)));
                    buffers[rank].launch(comm.with(options(|o| o.delay = delay)), stream, &job)
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
    let comm_device = &comm.device().clone();
    let buffer = |len| DeviceBuffer::<B, f32>::new(comm_device, len).unwrap();
    let (input, mut output, mut other) = (buffer(100), buffer(100), buffer(99));
    let odd_input = buffer(110);
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
    let [short, one] = [7, 1].map(buffer);
    let norm = LayerNorm::new(&weight, &short, 1e-5);
    let found = comm.all_reduce_layer_norm(stream, &input, &mut output, norm);
    assert_eq!(found, Err(ApiMisuse::Codes { what: "elements of bias", found: 7, expected: 10 }.into()));
    let found = comm.reduce_scatter_rms_norm(stream, &odd_input, &mut output, RmsNorm::new(&weight, 1e-5));
    parts(found.unwrap_err(), "input");
    let codes = |len| DeviceBuffer::<B, E4m3>::new(comm_device, len).unwrap();
    let (mut few, mut all, mut scales) = (codes(99), codes(100), buffer(9));
    let rms = || RmsNorm::new(&weight, 1e-5);
    let found = comm.all_reduce_rms_norm(stream, &input, NormOutput::e4m3(&mut few, &one), rms());
    assert_eq!(found, Err(ApiMisuse::Codes { what: "codes", found: 99, expected: 100 }.into()));
    let found = comm.all_reduce_rms_norm(stream, &input, NormOutput::e4m3(&mut all, &weight), rms());
    assert_eq!(found, Err(ApiMisuse::Codes { what: "scale of all", found: 10, expected: 1 }.into()));
    let found = comm.all_reduce_rms_norm(stream, &input, NormOutput::e4m3_per_row(&mut all, &mut scales), rms());
    assert_eq!(found, Err(ApiMisuse::Codes { what: "scales", found: 9, expected: 10 }.into()));
    let mut bytes = DeviceBuffer::<B, u8>::new(comm_device, 10).unwrap();
    let found = comm.all_reduce_rms_norm(stream, &input, NormOutput::mxfp8(&mut all, &mut bytes), rms());
    assert_eq!(found, Err(ApiMisuse::Blocks { elements: 10, block: 32 }.into()));
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
                    assert_eq!((found.missing.as_slice(), found.operation), ([0].as_slice(), "all-reduce with a norm"));
                }
                other => panic!("{other:?}"),
            }
        }
        signal_core::Communicator::recover_all(&mut world.comms).unwrap();
        works(&mut world);
    }
}
