//! What a case is made of, and how it is drawn: mostly what can be meant, so that a sequence gets somewhere. Strategies are
//! boxed, because their values would else nest on the stack until it overflows.

use proptest::prelude::*;
use signal_comm::{Algorithm, CallOptions};

/// A group of ranks, and what is done with it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) world: usize,
    /// All ranks on one device.
    pub(crate) shared: bool,
    pub(crate) domains: bool,
    pub(crate) ops: Vec<Op>,
}

/// Who makes a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Who {
    All,
    One(usize),
}

/// Elements of a set of buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) set: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// A collective of any kind: what it is comes out of the seed.
#[derive(Clone, Debug)]
pub(crate) struct Draw {
    pub(crate) seed: u64,
    /// Whether something is wrong with it.
    pub(crate) twisted: bool,
    /// Where its first two operands lie, and from which element on.
    pub(crate) sets: [usize; 2],
    pub(crate) starts: [usize; 2],
    /// The algorithm comes out of the seed too.
    pub(crate) options: CallOptions,
}

/// Numbers choose among what there is, whatever there is: modulo its length.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// In place if both parts are of one set.
    AllReduce {
        who: Who,
        stream: usize,
        input: Part,
        output: Part,
        options: CallOptions,
    },
    Collective {
        who: Who,
        stream: usize,
        draw: Draw,
    },
    Barrier {
        who: Who,
        stream: usize,
        options: CallOptions,
    },
    Probe {
        who: Who,
        stream: usize,
        options: CallOptions,
        rounds: u32,
    },
    Alloc {
        who: Who,
        len: usize,
    },
    Local {
        len: usize,
    },
    DropSet(usize),
    Write {
        rank: usize,
        set: usize,
        stream: usize,
        len: usize,
    },
    Copy {
        rank: usize,
        from: usize,
        to: usize,
        stream: usize,
    },
    Read {
        rank: usize,
        set: usize,
        stream: usize,
    },
    /// Below the typed layer.
    Bytes {
        rank: usize,
        set: usize,
        stream: usize,
        offset: usize,
        bytes: usize,
    },
    FromBuffer {
        rank: usize,
        set: usize,
        stream: usize,
        offset: usize,
    },
    BeginCapture {
        rank: usize,
        stream: usize,
    },
    EndCapture {
        rank: usize,
        stream: usize,
    },
    Replay {
        rank: usize,
        graph: usize,
        stream: usize,
    },
    Order {
        rank: usize,
        from: usize,
        to: usize,
    },
    Wait {
        rank: usize,
        stream: usize,
    },
    Plan {
        rank: usize,
        count: usize,
    },
    Abort(usize),
    Recover(usize),
    /// Of so many ranks, from this one on.
    RecoverAll {
        first: usize,
        ranks: usize,
    },
    Leave(usize),
    Create {
        ranks: usize,
        share: bool,
        timeout_ms: u64,
        scratch: usize,
        blocks: Option<u32>,
        threads: Option<u32>,
    },
}

pub(crate) fn case() -> impl Strategy<Value = Case> {
    let ops = prop::collection::vec(op(), 1..40);
    let group = (1usize..=3, any::<bool>(), any::<bool>(), ops);
    group.prop_map(|(world, shared, domains, ops)| Case { world, shared, domains, ops })
}

fn op() -> BoxedStrategy<Op> {
    let calls = prop_oneof![
        14 => (who(), stream(), draw()).prop_map(|(who, stream, draw)| Op::Collective { who, stream, draw }),
        5 => (who(), stream(), parts(), options())
            .prop_map(|(who, stream, (input, output), options)| Op::AllReduce { who, stream, input, output, options }),
        2 => (who(), stream(), options()).prop_map(|(who, stream, options)| Op::Barrier { who, stream, options }),
        1 => (who(), stream(), options(), 0u32..4)
            .prop_map(|(who, stream, options, rounds)| Op::Probe { who, stream, options, rounds }),
    ]
    .boxed();
    let memory = prop_oneof![
        4 => (who(), length()).prop_map(|(who, len)| Op::Alloc { who, len }),
        3 => length().prop_map(|len| Op::Local { len }),
        1 => small().prop_map(Op::DropSet),
        2 => (small(), small(), stream(), length())
            .prop_map(|(rank, set, stream, len)| Op::Write { rank, set, stream, len }),
        1 => (small(), small(), small(), stream()).prop_map(|(rank, from, to, stream)| Op::Copy { rank, from, to, stream }),
        1 => (small(), small(), stream()).prop_map(|(rank, set, stream)| Op::Read { rank, set, stream }),
        1 => (small(), small(), stream(), hostile(), hostile())
            .prop_map(|(rank, set, stream, offset, bytes)| Op::Bytes { rank, set, stream, offset, bytes }),
        1 => (small(), small(), stream(), hostile())
            .prop_map(|(rank, set, stream, offset)| Op::FromBuffer { rank, set, stream, offset }),
    ]
    .boxed();
    let streams = prop_oneof![
        1 => (small(), stream()).prop_map(|(rank, stream)| Op::BeginCapture { rank, stream }),
        3 => (small(), stream()).prop_map(|(rank, stream)| Op::EndCapture { rank, stream }),
        1 => (small(), small(), stream()).prop_map(|(rank, graph, stream)| Op::Replay { rank, graph, stream }),
        1 => (small(), stream(), stream()).prop_map(|(rank, from, to)| Op::Order { rank, from, to }),
        2 => (small(), stream()).prop_map(|(rank, stream)| Op::Wait { rank, stream }),
    ]
    .boxed();
    let rest = prop_oneof![
        2 => (small(), hostile()).prop_map(|(rank, count)| Op::Plan { rank, count }),
        2 => small().prop_map(Op::Abort),
        2 => small().prop_map(Op::Recover),
        14 => (small(), prop_oneof![3 => Just(8), 1 => 0usize..4]).prop_map(|(first, ranks)| Op::RecoverAll { first, ranks }),
        1 => small().prop_map(Op::Leave),
        1 => create(),
    ]
    .boxed();
    prop_oneof![8 => calls, 4 => memory, 2 => streams, 3 => rest].boxed()
}

fn draw() -> BoxedStrategy<Draw> {
    let twisted = prop_oneof![2 => Just(false), 1 => Just(true)];
    // No seed is simpler than another.
    let seed = any::<u64>().no_shrink();
    let (sets, starts) = (prop::array::uniform2(0usize..8), prop::array::uniform2(0usize..8));
    (seed, twisted, sets, starts, options())
        .prop_map(|(seed, twisted, sets, starts, options)| Draw { seed, twisted, sets, starts, options })
        .boxed()
}

fn who() -> BoxedStrategy<Who> {
    prop_oneof![12 => Just(Who::All), 1 => small().prop_map(Who::One)].boxed()
}

/// A rank, or something else of which there are few.
fn small() -> impl Strategy<Value = usize> {
    0usize..8
}

/// The first two of a rank are its own, the others another's.
fn stream() -> BoxedStrategy<usize> {
    prop_oneof![40 => Just(0), 12 => Just(1), 1 => 2usize..6].boxed()
}

/// A length that can be had, or one that cannot.
fn length() -> BoxedStrategy<usize> {
    prop_oneof![4 => 0usize..40, 4 => Just(1000), 2 => Just(20_000), 1 => hostile().prop_map(|n| n.saturating_mul(1 << 52))].boxed()
}

/// Ends and edges.
fn hostile() -> BoxedStrategy<usize> {
    prop_oneof![
        0usize..64,
        Just(usize::MAX),
        Just(usize::MAX / 4),
        Just(usize::MAX / 4 + 1),
        Just(isize::MAX as usize),
        Just(u32::MAX as usize),
    ]
    .boxed()
}

/// Input and output, mostly of one length and within most buffers.
fn parts() -> BoxedStrategy<(Part, Part)> {
    let fits = (0usize..8, 0usize..900, 0usize..8).prop_map(|(from, len, to)| [from, from + len, to, to + len]);
    let any = prop::array::uniform4(hostile());
    let ranges = prop_oneof![8 => fits, 1 => any];
    (small(), small(), ranges)
        .prop_map(|(from, to, [start, end, other_start, other_end])| {
            (Part { set: from, start, end }, Part { set: to, start: other_start, end: other_end })
        })
        .boxed()
}

fn options() -> BoxedStrategy<CallOptions> {
    let algorithm = prop::option::of(prop::sample::select(Algorithm::ALL_REDUCE.to_vec()));
    let domain = prop_oneof![20 => Just(0u32), 2 => 1u32..8, 1 => Just(8u32), 1 => Just(u32::MAX)];
    (algorithm, domain, size(), size())
        .prop_map(|(algorithm, domain, blocks, threads)| {
            let mut options = CallOptions::default();
            (options.algorithm, options.domain, options.blocks, options.threads) = (algorithm, domain, blocks, threads);
            options
        })
        .boxed()
}

/// Blocks, or threads a block.
fn size() -> BoxedStrategy<Option<u32>> {
    prop_oneof![
        8 => Just(None),
        8 => (1u32..4).prop_map(Some),
        1 => prop::sample::select(vec![Some(0u32), Some(1025), Some(1 << 31), Some(u32::MAX)]),
    ]
    .boxed()
}

fn create() -> BoxedStrategy<Op> {
    let scratch = prop_oneof![Just(64usize << 10), hostile()];
    (0usize..12, any::<bool>(), prop_oneof![Just(1000u64), Just(0), Just(u64::MAX)], scratch, size(), size())
        .prop_map(|(ranks, share, timeout_ms, scratch, blocks, threads)| Op::Create {
            ranks,
            share,
            timeout_ms,
            scratch,
            blocks,
            threads,
        })
        .boxed()
}
