//! Groups within groups: they run beside each other and beside what they were made of (P4).

use std::time::Duration;

use signal_core::error::Rendezvous;
use signal_core::{Algorithm, ApiMisuse, Backend, Communicator, DeviceBuffer, Error, ReduceOp};

use crate::cases::blocks::budget;
use crate::cases::misuse::refused;
use crate::cases::recover::many_calls;
use crate::compare;
use crate::exchange::{Exchange, random_inputs, sum, works};
use crate::place::Place;
use crate::rig::{Rig, is_scaled_down, scaled};
use crate::world::{World, options};

const COUNT: usize = 300;

/// A colour and a key.
pub(crate) type Wish = (Option<u32>, i64);

/// Splits, on one thread, and checks who has come where. The new groups by colour.
pub(crate) fn split<B: Backend>(world: &mut World<B>, wishes: &[Wish]) -> Vec<World<B>> {
    let made = Communicator::split_all(&mut world.comms, wishes).unwrap();
    gather(made, wishes)
}

/// The new groups by colour, with their ranks in order.
fn gather<B: Backend>(made: Vec<Option<Communicator<B>>>, wishes: &[Wish]) -> Vec<World<B>> {
    let mut colors: Vec<u32> = wishes.iter().filter_map(|(color, _)| *color).collect();
    colors.sort_unstable();
    colors.dedup();
    let mut groups: Vec<Vec<(usize, Communicator<B>)>> = colors.iter().map(|_| Vec::new()).collect();
    for (rank, comm) in made.into_iter().enumerate() {
        let (color, _) = wishes[rank];
        assert_eq!(comm.is_some(), color.is_some(), "rank {rank}");
        if let Some(comm) = comm {
            groups[colors.binary_search(&color.unwrap()).unwrap()].push((rank, comm));
        }
    }
    for group in &mut groups {
        let size = group.len();
        group.sort_by_key(|(rank, _)| (wishes[*rank].1, *rank));
        for (expected, (rank, comm)) in group.iter().enumerate() {
            assert_eq!((comm.rank(), comm.world_size()), (expected, size), "rank {rank} of the old group");
        }
    }
    groups.into_iter().map(|group| World::new(group.into_iter().map(|(_, comm)| comm).collect())).collect()
}

/// Calls of all groups at once, enqueued by the ranks of each in another order, so that everybody waits for somebody.
fn at_once<B: Backend>(worlds: &mut [&mut World<B>], rounds: u32) {
    for round in 0..rounds as usize {
        let mut calls = Vec::new();
        for (at, world) in worlds.iter_mut().enumerate() {
            let algorithm = Algorithm::ALL_REDUCE[(round + at) % 5];
            let call = options(|o| (o.algorithm, o.blocks, o.threads) = (Some(algorithm), Some(2), Some(2)));
            let places = vec![[Place::symmetric(), Place::local()][round % 2]; world.ranks()];
            calls.push(Exchange::<B, f32>::random(world, COUNT, (10 * round + at) as u64, call, &places));
        }
        let most = worlds.iter().map(|world| world.ranks()).max().unwrap();
        for turn in 0..most {
            for (at, world) in worlds.iter_mut().enumerate().filter(|(_, world)| turn < world.ranks()) {
                let rank = (turn + at + round) % world.ranks();
                calls[at].launch_one(world, rank);
            }
        }
        calls.iter().zip(worlds.iter()).for_each(|(call, world)| drop(call.finish(world)));
    }
}

/// Four ranks as 2 x 2: tensors over rows, data over columns. Both kinds of groups and the whole are used at the same time.
pub fn split_rows_and_columns<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(4);
    let mut rows = split(&mut world, &[0, 1, 2, 3].map(|rank| (Some(rank / 2), 0)));
    let mut columns = split(&mut world, &[0, 1, 2, 3].map(|rank| (Some(rank % 2), 0)));
    let mut all: Vec<&mut World<B>> = vec![&mut world];
    all.extend(rows.iter_mut().chain(&mut columns));
    at_once(&mut all, scaled(12));
    // What happens to one is nothing to the others.
    drop(rows);
    columns[0].comms[0].abort_handle().abort().unwrap();
    let World { comms, streams } = &mut columns[0];
    for (comm, stream) in comms.iter_mut().zip(&*streams) {
        let found = comm.barrier(stream).and_then(|()| comm.wait(stream));
        assert!(matches!(found, Err(Error::Aborted { by: 0, .. })), "{found:?}");
    }
    works(&mut columns[1]);
    works(&mut world);
    Communicator::recover_all(&mut columns[0].comms).unwrap();
    works(&mut columns[0]);
}

/// A thread for each rank, which splits twice and has calls of all three communicators in flight, from threads of their own.
pub fn split_with_a_thread_a_rank<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(4);
    let calls = scaled(40);
    world.threads(vec![(); 4], |rank, (), comm, stream| {
        let row = comm.split(Some(rank as u32 / 2), 0).unwrap().unwrap();
        comm.barrier(stream).unwrap();
        // In the other order.
        let column = comm.split(Some(rank as u32 % 2), -(rank as i64)).unwrap().unwrap();
        assert_eq!([row.rank(), column.rank()], [rank % 2, 1 - rank / 2]);
        std::thread::scope(|scope| {
            let threads = [row, column].map(|mut comm| {
                scope.spawn(move || {
                    let stream = B::create_stream(comm.device()).unwrap();
                    sums(&mut comm, &stream, calls);
                })
            });
            sums(comm, stream, calls);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    });
    works(&mut world);
}

/// One rank's part of all-reduces, checked.
pub(crate) fn sums<B: Backend>(comm: &mut Communicator<B>, stream: &B::Stream, calls: u32) {
    let mut buffer = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
    for call in 0..calls {
        let inputs = random_inputs::<f32>(comm.world_size(), call.into(), COUNT);
        buffer.write(stream, &inputs[comm.rank()]).unwrap();
        comm.all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum).unwrap();
        compare::assert_bits("a sum of a group", &buffer.read(stream).unwrap(), &sum(&inputs));
    }
    comm.wait(stream).unwrap();
}

/// Keys that reorder, ranks without a colour, groups of one, and groups of groups.
pub fn split_by_key_and_again<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(5);
    let mut backwards = split(&mut world, &[0, 1, 2, 3, 4].map(|rank| (Some(9), -rank)));
    let mut some = split(&mut world, &[(Some(3), 5), (None, 0), (Some(3), i64::MIN), (Some(0), 0), (Some(3), 5)]);
    assert_eq!(some.iter().map(World::ranks).collect::<Vec<_>>(), [1, 3]);
    assert!(split(&mut world, &[(None, 0); 5]).is_empty());
    let mut halves = split(&mut backwards[0], &[0, 1, 2, 3, 4].map(|rank| (Some(rank / 3), 0)));
    let mut pair = split(&mut halves[0], &[(Some(0), 1), (None, 0), (Some(0), 0)]);
    let mut all: Vec<&mut World<B>> = vec![&mut world];
    all.extend(backwards.iter_mut().chain(&mut some).chain(&mut halves).chain(&mut pair));
    at_once(&mut all, scaled(6));
    // The old group may go first.
    drop(world);
    many_calls(&mut halves[1], 5, 1);
    drop(backwards);
    many_calls(&mut pair[0], 5, 2);
}

/// A rank does not come: the others say who, and nothing is divided. Then all come.
pub fn split_waits_for_all<B: Backend>(rig: &Rig<B>) {
    let patience = Duration::from_millis(if is_scaled_down() { 1500 } else { 300 });
    let mut world = rig.world_with(3, |s| s.timeout = patience);
    let before = budget(&mut world, 1);
    for late in 0..3 {
        world.threads(vec![(); 3], |rank, (), comm, _| {
            if rank != late {
                match comm.split(Some(0), 0) {
                    Err(Error::Rendezvous(Rendezvous::Absent { rank: r, missing, .. })) => {
                        assert_eq!((r, missing), (rank, vec![late]));
                    }
                    other => panic!("{other:?}"),
                }
            }
        });
    }
    assert_eq!(budget(&mut world, 1), before);
    world.threads(vec![(); 3], |rank, (), comm, stream| {
        let mut child = comm.split((rank != 1).then_some(4), 0).unwrap();
        if let Some(child) = &mut child {
            sums(child, stream, 3);
        }
        assert_eq!(child.is_some(), rank != 1);
    });
    works(&mut world);
}

/// What groups may launch at once is no more than what the whole could, and it does run at once.
pub fn split_divides_the_blocks<B: Backend>(rig: &Rig<B>) {
    let widths = [1, 32, 128];
    let mut world = rig.world(4);
    let before = widths.map(|threads| budget(&mut world, threads));
    let mut rows = split(&mut world, &[0, 1, 2, 3].map(|rank| (Some(rank / 2), 0)));
    let mut columns = split(&mut world, &[0, 1, 2, 3].map(|rank| (Some(rank % 2), 0)));
    let mut single = split(&mut rows[1], &[(Some(0), 0), (None, 0)]);
    for (threads, before) in widths.into_iter().zip(before) {
        let [whole, column] = [&mut world, &mut columns[0]].map(|world| budget(world, threads));
        let [first, second, single] = [rows.iter_mut(), single.iter_mut()]
            .into_iter()
            .flatten()
            .map(|world| budget(world, threads))
            .collect::<Vec<_>>()[..]
        else {
            panic!()
        };
        assert_eq!(budget(&mut columns[1], threads), column);
        // Of a rank in the first row, and of one in the second, which was split.
        assert!(whole + first + column <= before && whole + second + single + column <= before);
        assert_eq!(
            [whole, first, column, second, single],
            [before / 4, before / 2, before / 4, before / 4, before / 4]
        );
    }

    // Three grids of each rank, as wide as may be, none of which can end before the others have begun.
    let cut = rig.is_host().then_some(32); // a block is a thread there
    let mut world = rig.world_with(4, |s| s.max_blocks = cut);
    let mut rows = split(&mut world, &[0, 1, 2, 3].map(|rank| (Some(rank / 2), 0)));
    let mut columns = split(&mut world, &[0, 1, 2, 3].map(|rank| (Some(rank % 2), 0)));
    let mut all: Vec<&mut World<B>> = vec![&mut world];
    all.extend(rows.iter_mut().chain(&mut columns));
    for _ in 0..scaled(3) {
        for turn in [0, 1] {
            for (at, world) in all.iter_mut().enumerate() {
                let blocks = budget(world, 32);
                let grid = options(|o| (o.blocks, o.threads) = (Some(blocks), Some(32)));
                let ranks = world.ranks();
                for rank in (0..ranks).filter(|rank| (rank + at + turn) % 2 == 0) {
                    world.comms[rank].with(grid).barrier(&world.streams[rank]).unwrap();
                }
            }
        }
        all.iter().for_each(|world| world.wait());
    }
}

/// Two communicators that know nothing of each other, and one of them split, each with half of the blocks, by threads.
pub fn split_beside_another_communicator<B: Backend>(rig: &Rig<B>) {
    let half = |blocks: u32| if rig.is_host() { 16 } else { blocks / 2 };
    let blocks = half(budget(&mut rig.world(3), 512.min(B::describe(&rig.devices()[0]).max_block_threads)));
    let [mut one, mut other] = [0, 1].map(|_| rig.world_with(3, |s| s.max_blocks = Some(blocks)));
    let calls = scaled(40);
    let wishes = [(Some(1), 0), (Some(1), 0), (Some(2), 0)];
    let mut parts = split(&mut one, &wishes);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for world in [&mut one, &mut other].into_iter().chain(&mut parts) {
            for (comm, stream) in world.comms.iter_mut().zip(&world.streams) {
                threads.push(scope.spawn(move || sums(comm, stream, calls)));
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Some ranks, too few wishes, a stream that captures, a fault that nobody has recovered from, and nothing left to divide.
pub fn misuse_split<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let missing = |given, found, world| ApiMisuse::NotAllRanks { given, found, world };
    let wish = (Some(0), 0);
    refused(Communicator::<B>::split_all(&mut [], &[]).map(drop), missing(0, 0, 0));
    refused(Communicator::split_all(&mut world.comms[..1], &[wish]).map(drop), missing(1, 1, 2));
    refused(Communicator::split_all(&mut world.comms, &[wish]).map(drop), ApiMisuse::Colors { found: 1, world: 2 });
    refused(Communicator::split_all(&mut world.comms, &[wish; 3]).map(drop), ApiMisuse::Colors { found: 3, world: 2 });

    world.each(|_, comm, stream| comm.barrier(stream));
    world.wait();
    B::begin_capture(&world.streams[1]).unwrap();
    let found = Communicator::split_all(&mut world.comms, &[wish; 2]).map(drop);
    assert!(matches!(found, Err(Error::ApiMisuse(ApiMisuse::Capture { .. }))), "{found:?}");
    B::end_capture(&world.streams[1]).unwrap();

    world.comms[0].abort_handle().abort().unwrap();
    world.comms[0].barrier(&world.streams[0]).unwrap();
    let found = Communicator::split_all(&mut world.comms, &[wish; 2]).map(drop);
    assert!(matches!(found, Err(Error::Aborted { rank: 0, by: 0 })), "{found:?}");
    let found = world.comms[0].split(Some(0), 0).map(drop);
    assert!(matches!(found, Err(Error::Poisoned { .. })), "{found:?}");
    Communicator::recover_all(&mut world.comms).unwrap();
    assert_eq!(Communicator::split_all(&mut world.comms, &[wish; 2]).unwrap().len(), 2);
    works(&mut world);

    let mut narrow = rig.world_with(2, |s| s.max_blocks = Some(3));
    let mut children = split(&mut narrow, &[wish; 2]);
    assert_eq!([budget(&mut narrow, 1), budget(&mut children[0], 1)], [1, 1]);
    for world in [&mut narrow, &mut children[0]] {
        let none = ApiMisuse::Grid { blocks: 1, budget: 0 };
        refused(Communicator::split_all(&mut world.comms, &[wish; 2]).map(drop), none.clone());
        world.threads(vec![(); 2], |_, (), comm, _| refused(comm.split(Some(0), 0).map(drop), none.clone()));
        // Without groups there is nothing to divide.
        assert!(split(world, &[(None, 0); 2]).is_empty());
        works(world);
    }
    let mut fixed = rig.world_with(2, |s| (s.max_blocks, s.blocks) = (Some(3), Some(2)));
    refused(Communicator::split_all(&mut fixed.comms, &[wish; 2]).map(drop), ApiMisuse::Grid { blocks: 2, budget: 1 });
    works(&mut fixed);
}
