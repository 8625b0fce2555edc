//! Values that a sum in another order, another precision or with another zero would get wrong (P12).

use half::{bf16, f16};
use signal_core::reference::Rng;
use signal_core::{Algorithm, Backend, Element, Float};

use crate::compare;
use crate::exchange::Exchange;
use crate::place::{Mix, below, pick};
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

/// Bit patterns of each kind of value: zeros, subnormals, the smallest and largest normals, infinities, quiet and
/// signalling NaNs with payloads, and the words that a Lamport protocol must not send (B20 to B22).
fn patterns<T: Element>() -> Vec<T> {
    let bits: &[u64] = match T::DTYPE.name() {
        "f32" => &[
            0x0000_0000,
            0x8000_0000,
            0x0000_0001,
            0x8000_0001,
            0x007f_ffff,
            0x807f_ffff,
            0x0080_0000,
            0x8080_0000,
            0x7f7f_ffff,
            0xff7f_ffff,
            0x7f80_0000,
            0xff80_0000,
            0x7fc0_0000,
            0xffc0_0001,
            0x7f80_0001,
            0xff8f_0f0f,
            0x3f80_0000,
            0xbf80_0001,
            0x3380_0000,
            0x7fff_ffff,
            0x8001_0000,
        ],
        "f16" => &[
            0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x83ff, 0x0400, 0x8400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00,
            0xfe01, 0x7c01, 0xfd55, 0x3c00, 0xbc01, 0x1400, 0x7fff, 0x6800,
        ],
        "bf16" => &[
            0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x807f, 0x0080, 0x8080, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0,
            0xffc1, 0x7f81, 0xff85, 0x3f80, 0xbf81, 0x3b80, 0x7fff, 0x8010,
        ],
        other => panic!("no special values for {other}"),
    };
    bits.iter().map(|&b| T::from_bits(b)).collect()
}

/// Runs one input with each algorithm, in whatever memory. A NaN has to come out canonical, a zero positive.
fn run<B: Backend, T: Float>(world: &mut World<B>, inputs: &[Vec<T>], rng: &mut Rng) -> Vec<T> {
    let negative_zero = T::from_f32(-0.0).to_bits();
    let mut output = Vec::new();
    for algorithm in Algorithm::ALL_REDUCE {
        let options = options(|o| (o.algorithm, o.blocks, o.threads) = (Some(algorithm), Some(2), Some(2)));
        let places = pick(rng, &Mix::ALL).places(world.ranks(), rng);
        output = Exchange::<B, T>::of(world, inputs, options, &places).run(world, 0);
        for (i, value) in output.iter().enumerate() {
            assert_ne!(value.to_bits(), negative_zero, "element {i} is -0.0");
            if value.to_f32().is_nan() {
                assert_eq!(value.to_bits(), T::CANONICAL_NAN.to_bits(), "the NaN of element {i}");
            }
        }
    }
    output
}

/// Every pair of special values.
pub fn all_reduce_special_pairs<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let mut rng = Rng::new(1);
    for_dtypes!(T => {
        let patterns = patterns::<T>();
        let first: Vec<T> = patterns.iter().flat_map(|p| vec![*p; patterns.len()]).collect();
        let second: Vec<T> = patterns.repeat(patterns.len());
        run(&mut world, &[first, second], &mut rng);
    });
}

/// Each element of 16 bits with others of every magnitude: two of them are added at once, on some devices by an instruction that knows no f32.
pub fn all_reduce_special_halves<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let mut rng = Rng::new(2);
    for_dtypes!(T => {
        let all: Vec<T> = (0..=u16::MAX).map(T::from_bits).collect();
        for _ in 0..scaled(4) {
            // An odd factor visits all of them, another neighbour for each.
            let (factor, from) = (2 * below(&mut rng, 1 << 15) + 1, below(&mut rng, 1 << 16));
            let other = (0..all.len()).map(|i| all[(i * factor + from) % all.len()]).collect();
            run(&mut world, &[all.clone(), other], &mut rng);
        }
    }; f16 bf16);
}

/// One rank alone, and random mixtures over more ranks.
pub fn all_reduce_special_mixtures<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 3, 8] {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        for_dtypes!(T => {
            let patterns = patterns::<T>();
            let mut draw = |rank: usize| -> Vec<T> {
                let count = if ranks == 1 { patterns.len() } else { 2001 };
                (0..count)
                    .map(|i| if ranks == 1 { patterns[i] } else { patterns[(i + rank * below(&mut rng, 9)) % patterns.len()] })
                    .collect()
            };
            let inputs: Vec<Vec<T>> = (0..ranks).map(&mut draw).collect();
            run(&mut world, &inputs, &mut rng);
        });
    }
}

/// Sums of nothing but -0.0 are +0.0, in every world (H08, B21).
pub fn all_reduce_special_negative_zero<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 2, 3, 5, 8] {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        for_dtypes!(T => {
            let output = run(&mut world, &vec![vec![T::from_f32(-0.0); 99]; ranks], &mut rng);
            compare::assert_bits("all -0.0", &output, &[T::from_f32(0.0); 99]);
        });
    }
}

/// Sums that were worked out by hand: rank order, f32 in between, one rounding.
pub fn all_reduce_special_order_and_rounding<B: Backend>(rig: &Rig<B>) {
    fn check<B: Backend, T: Float>(rig: &Rig<B>, cases: &[(&[f32], f32)]) {
        for (terms, expected) in cases {
            let mut world = rig.world(terms.len());
            let inputs: Vec<Vec<T>> = terms.iter().map(|t| vec![T::from_f32(*t); 37]).collect();
            let output = run(&mut world, &inputs, &mut Rng::new(3));
            compare::assert_bits(&format!("{terms:?} in {}", T::DTYPE), &output, &[T::from_f32(*expected); 37]);
        }
    }
    // 2^24 + 1 is a tie that goes to the even 2^24.
    check::<B, f32>(
        rig,
        &[
            (&[1e8, 1.0, -1e8], 0.0),
            (&[1e8, -1e8, 1.0], 1.0),
            (&[16_777_216.0, 1.0, 1.0], 16_777_216.0),
            (&[1.0, 1.0, 16_777_216.0], 16_777_218.0),
            (&[f32::MAX, f32::MAX, -f32::MAX], f32::INFINITY),
        ],
    );
    // A sum kept in f16 would stay at 2048, where the step is 2; one that overflows on the way comes back.
    let tiny = 2f32.powi(-10);
    check::<B, f16>(
        rig,
        &[
            (&[2048.0, 1.0, 1.0], 2050.0),
            (&[65504.0, 65504.0, -65504.0], 65504.0),
            (&[65504.0, 16.0], f32::INFINITY),
            (&[32768.0, tiny, -32768.0], 0.0),
            (&[32768.0, -32768.0, tiny], tiny),
        ],
    );
    // In bf16 the step at 256 is 2.
    let huge = 2f32.powi(27);
    check::<B, bf16>(
        rig,
        &[
            (&[256.0, 1.0, 1.0], 258.0),
            (&[256.0, 1.0], 256.0),
            (&[258.0, 1.0], 260.0),
            (&[huge, 1.0, -huge], 0.0),
            (&[huge, -huge, 1.0], 1.0),
        ],
    );
}
