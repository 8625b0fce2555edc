//! Comparison bit by bit.

use signal_core::Element;

/// Equal bits, or NaN on both sides: which NaN the reference writes is checked by cases of their own.
fn same<T: Element>(a: T, b: T) -> bool {
    a.to_bits() == b.to_bits() || (a.to_f64().is_nan() && b.to_f64().is_nan())
}

/// Panics unless `found` is `expected`; `what` says what was compared.
pub(crate) fn assert_same<T: Element>(what: &str, found: &[T], expected: &[T]) {
    report(what, found, expected, same);
}

/// Like [`assert_same`], but a NaN has to be the very same NaN.
pub(crate) fn assert_bits<T: Element>(what: &str, found: &[T], expected: &[T]) {
    report(what, found, expected, |a, b| a.to_bits() == b.to_bits());
}

fn report<T: Element>(what: &str, found: &[T], expected: &[T], same: impl Fn(T, T) -> bool) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let wrong: Vec<usize> = (0..found.len()).filter(|&i| !same(found[i], expected[i])).collect();
    if wrong.is_empty() {
        return;
    }
    let first: Vec<String> = wrong
        .iter()
        .take(4)
        .map(|&i| {
            let (f, e) = (found[i], expected[i]);
            format!("[{i}] {f:?} ({:#x}), expected {e:?} ({:#x})", f.to_bits(), e.to_bits())
        })
        .collect();
    panic!("{what}: {} of {} elements are wrong: {}", wrong.len(), found.len(), first.join("; "));
}

/// Runs a block for each of the given types, under the name given; without, for those that have sums of their own.
macro_rules! for_dtypes {
    ($T:ident => $body:expr) => {
        for_dtypes!($T => $body; f32 f16 bf16)
    };
    ($T:ident => $body:expr; $($Type:ty)+) => {{$(
        {
            type $T = $Type;
            $body
        }
    )+}};
}
