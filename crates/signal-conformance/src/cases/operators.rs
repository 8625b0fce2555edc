//! Every operator on every element type (P12).

use half::{bf16, f16};
use signal_core::reference::Rng;
use signal_core::{Algorithm, ApiMisuse, Backend, Dtype, E4m3, E5m2, Element, ReduceOp};

use crate::compare;
use crate::exchange::{Exchange, random_inputs, works};
use crate::place::{Mix, Place, below, pick};
use crate::rig::{Rig, is_scaled_down};
use crate::world::{World, options};

/// Runs a block for each element type.
macro_rules! for_every_dtype {
    ($T:ident => $body:expr) => {
        for_dtypes!($T => $body; f32 f16 bf16 f64 i8 u8 i32 u32 i64 u64 E4m3 E5m2)
    };
}

/// Inputs of one call.
type Inputs<T> = Vec<Vec<T>>;

/// A call by each algorithm that takes it, with places drawn; all have to give the same bits.
fn run<B: Backend, T: Element>(world: &mut World<B>, op: ReduceOp, inputs: &Inputs<T>, rng: &mut Rng) {
    for algorithm in [Algorithm::OneStage, Algorithm::TwoStage, Algorithm::TwoStagePush] {
        let options = options(|o| {
            o.algorithm = Some(algorithm);
            (o.blocks, o.threads) = pick(rng, &[(None, None), (Some(1), Some(1)), (Some(3), Some(2))]);
        });
        let places = pick(rng, &Mix::ALL).places(world.ranks(), rng);
        Exchange::<B, T>::by(op, world, inputs, options, &places).run(world, 0);
    }
}

/// Each with each, at sizes around the limits of packs and shards, aligned and not, and beyond one window.
pub fn operators_of_every_type<B: Backend>(rig: &Rig<B>) {
    for ranks in if is_scaled_down() { vec![3] } else { vec![1, 2, 3, 8] } {
        let mut world = rig.world_with(ranks, |s| s.scratch_bytes = 64 << 10);
        let mut rng = Rng::new(ranks as u64);
        for_every_dtype!(T => {
            let pack = 16 / T::DTYPE.bytes();
            for op in ReduceOp::ALL {
                let near_pack = pack * (1 + below(&mut rng, 4)) + below(&mut rng, 3) - 1;
                let near_shard = pack * ranks * 9 + below(&mut rng, 3) - 1;
                for count in [1 + below(&mut rng, pack), near_pack, near_shard] {
                    run(&mut world, op, &random_inputs::<T>(ranks, rng.next_u64(), count), &mut rng);
                }
            }
            // More than the scratch holds.
            let count = (64 << 10) / T::DTYPE.bytes() + 77;
            let op = pick(&mut rng, &ReduceOp::ALL);
            run(&mut world, op, &random_inputs::<T>(ranks, rng.next_u64(), count), &mut rng);
        });
    }
}

/// Elements that an operator may get wrong: zeros of both signs, the smallest and the largest, infinities, every kind of NaN, and
/// what only just rounds up or down.
fn edges<T: Element>() -> Vec<T> {
    let bits = 8 * T::DTYPE.bytes() as u32;
    // Bits of the fraction; of integers none.
    let fraction: u64 = match T::DTYPE {
        Dtype::F64 => 52,
        Dtype::F32 => 23,
        Dtype::F16 => 10,
        Dtype::Bf16 => 7,
        Dtype::E4m3 | Dtype::E5m2 => return (0..=0xff).map(T::from_bits).collect(),
        _ => 0,
    };
    let sign = 1u64 << (bits - 1);
    let infinity = sign - (1 << fraction);
    let mut magnitudes = vec![0, 1, sign - 1, sign / 2, sign / 2 + 1, sign / 3];
    if fraction > 0 {
        let one = sign / 2 - (1 << fraction);
        let quiet = infinity | 1 << (fraction - 1);
        magnitudes.extend([infinity, infinity - 1, infinity + 1, quiet, quiet + 5, (1 << fraction) - 1, 1 << fraction]);
        magnitudes.extend([one, one + 1, one - 1, one - (fraction << fraction)]);
    }
    magnitudes.into_iter().flat_map(|bits| [T::from_bits(bits), T::from_bits(bits | sign)]).collect()
}

/// Every pair of such elements, and of 8-bit types every pair there is; then three ranks.
pub fn operators_special_values<B: Backend>(rig: &Rig<B>) {
    let mut rng = Rng::new(4);
    let (mut two, mut three) = (rig.world(2), rig.world(3));
    for_every_dtype!(T => {
        let edges = edges::<T>();
        let first: Vec<T> = edges.iter().flat_map(|edge| vec![*edge; edges.len()]).collect();
        let second = edges.repeat(edges.len());
        let third: Vec<T> = (0..first.len()).map(|_| pick(&mut rng, &edges)).collect();
        for op in ReduceOp::ALL {
            run(&mut two, op, &vec![first.clone(), second.clone()], &mut rng);
            if !is_scaled_down() {
                run(&mut three, op, &vec![first.clone(), third.clone(), second.clone()], &mut rng);
            }
        }
    });
}

/// The NaN of a result is the type's own, whatever the operator, and a zero that comes in has no sign.
pub fn operators_canonical_results<B: Backend>(rig: &Rig<B>) {
    fn check<B: Backend, T: Element>(world: &mut World<B>, nan: u64, negative_zero: u64, canonical: u64) {
        for op in ReduceOp::ALL {
            for (value, expected) in [(nan, canonical), (negative_zero, 0)] {
                let inputs = vec![vec![T::from_bits(value); 33]; world.ranks()];
                let places = vec![Place::symmetric(); world.ranks()];
                let output = Exchange::<B, T>::by(op, world, &inputs, options(|_| ()), &places).run(world, 0);
                compare::assert_bits(&format!("{op} of {}", T::DTYPE), &output, &[T::from_bits(expected); 33]);
            }
        }
    }
    let mut world = rig.world(2);
    check::<B, f32>(&mut world, 0xffc1_2345, 1 << 31, 0x7fc0_0000);
    check::<B, f16>(&mut world, 0xfd55, 1 << 15, 0x7e00);
    check::<B, bf16>(&mut world, 0xff85, 1 << 15, 0x7fc0);
    check::<B, f64>(&mut world, 0xfff4_0000_0000_0001, 1 << 63, 0x7ff8_0000_0000_0000);
    check::<B, E4m3>(&mut world, 0xff, 0x80, 0x7f);
    check::<B, E5m2>(&mut world, 0xfd, 0x80, 0x7e);
}

/// Lamport's algorithm takes few of them, and says so; by default they go another way.
pub fn misuse_lamport_types<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(2, |s| s.algorithm = Some(Algorithm::Lamport));
    let inputs = random_inputs::<i32>(2, 1, 100);
    let places = vec![Place::symmetric(); 2];
    Exchange::<B, i32>::by(ReduceOp::Max, &mut world, &inputs, options(|_| ()), &places).run(&mut world, 0);
    let mut buffers = world.alloc::<i32>(100);
    for (op, rank) in [(ReduceOp::Sum, 0), (ReduceOp::Avg, 1)] {
        let call = options(|o| o.algorithm = Some(Algorithm::Lamport));
        let stream = &world.streams[rank];
        let found = world.comms[rank].with(call).all_reduce_in_place(stream, &mut buffers[rank], op);
        assert_eq!(found, Err(ApiMisuse::LamportType { op, dtype: Dtype::I32 }.into()));
    }
    works(&mut world);
}
