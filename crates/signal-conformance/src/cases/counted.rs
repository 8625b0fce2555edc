//! All-to-alls whose sizes are on the device: every count from none to more than there is room for, in graphs too.

use signal_core::reference::Rng;
use signal_core::{Algorithm, ApiMisuse, Backend, CallOptions, Collective, Communicator, DeviceBuffer};

use crate::cases::misuse::refused;
use crate::place::below;
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

/// What outputs hold before a call, and where nothing came.
const UNTOUCHED: u16 = 0xdead;

/// Buffers of all ranks for one call.
struct Rooms<B: Backend> {
    room: usize,
    inputs: Vec<DeviceBuffer<B, u16>>,
    outputs: Vec<DeviceBuffer<B, u16>>,
    counts: Vec<DeviceBuffer<B, u32>>,
    received: Vec<DeviceBuffer<B, u32>>,
    values: Vec<Vec<u16>>,
    sizes: Vec<Vec<u32>>,
}

impl<B: Backend> Rooms<B> {
    fn new(world: &mut World<B>, room: usize, symmetric: bool) -> Self {
        let ranks = world.ranks();
        let len = room * ranks;
        Rooms {
            room,
            inputs: if symmetric { world.alloc(len) } else { world.local(len) },
            outputs: world.local(len),
            counts: world.local(ranks),
            received: world.local(ranks),
            values: Vec::new(),
            sizes: Vec::new(),
        }
    }

    /// Draws and writes data and counts.
    fn fill(&mut self, world: &mut World<B>, rng: &mut Rng) {
        let (ranks, room) = (world.ranks(), self.room);
        self.values = (0..ranks).map(|_| (0..room * ranks).map(|_| rng.next_u64() as u16).collect()).collect();
        let size = |rng: &mut Rng| match below(rng, 8) {
            0 => 0,
            1 => 1,
            2 => room as u32,
            3 => room as u32 + 1 + below(rng, 1000) as u32,
            4 => u32::MAX,
            _ => below(rng, room + 1) as u32,
        };
        self.sizes = (0..ranks).map(|_| (0..ranks).map(|_| size(rng)).collect()).collect();
        world.each(|rank, _, stream| {
            self.inputs[rank].write(stream, &self.values[rank])?;
            self.counts[rank].write(stream, &self.sizes[rank])?;
            self.outputs[rank].write(stream, &vec![UNTOUCHED; room * ranks])?;
            self.received[rank].write(stream, &vec![77; ranks])
        });
    }

    fn launch(&mut self, world: &mut World<B>, options: CallOptions) {
        world.each(|rank, comm, stream| {
            let (input, counts) = (&self.inputs[rank], &self.counts[rank]);
            let (output, received) = (&mut self.outputs[rank], &mut self.received[rank]);
            comm.with(options).all_to_all_counted(stream, input, counts, output, received)
        });
    }

    fn check(&self, world: &World<B>, what: &str) {
        world.wait();
        for (rank, stream) in world.streams.iter().enumerate() {
            let sizes: Vec<u32> = self.sizes.iter().map(|of| of[rank]).collect();
            assert_eq!(self.received[rank].read(stream).unwrap(), sizes, "{what}: counts at rank {rank}");
            let mut expected = vec![UNTOUCHED; self.room * self.values.len()];
            for (from, size) in sizes.into_iter().enumerate() {
                let moved = self.room.min(size as usize);
                let (at, theirs) = (from * self.room, rank * self.room);
                expected[at..at + moved].copy_from_slice(&self.values[from][theirs..theirs + moved]);
            }
            let found = self.outputs[rank].read(stream).unwrap();
            let wrong = (0..found.len()).find(|i| found[*i] != expected[*i]);
            assert_eq!(wrong, None, "{what}: rank {rank}, room of {}", self.room);
        }
    }
}

/// Random counts, in place and staged, with windows where the scratch is small, on one domain and another.
pub fn counted_all_to_all<B: Backend>(rig: &Rig<B>) {
    for ranks in 1..=8 {
        let mut rng = Rng::new(ranks as u64);
        let mut world = rig.world_with(ranks, |s| (s.scratch_bytes, s.domains) = (1 << 20, true));
        for round in 0..scaled(4) as usize {
            for room in [1, 7, 8, 500, 30_000] {
                let symmetric = round % 2 == 0;
                let mut rooms = Rooms::new(&mut world, room, symmetric);
                rooms.fill(&mut world, &mut rng);
                let options = options(|o| {
                    o.domain = [0, 3][round / 2 % 2];
                    (o.blocks, o.threads) = [(None, None), (Some(3), Some(2))][below(&mut rng, 2)];
                });
                rooms.launch(&mut world, options);
                rooms.check(&world, &format!("{ranks} ranks, symmetric: {symmetric}"));
            }
        }
    }
}

/// A graph captured once is replayed with other counts each time, and other calls between.
pub fn counted_all_to_all_in_graphs<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut rng = Rng::new(40 + ranks as u64);
        let mut world = rig.world(ranks);
        let mut rooms = Rooms::new(&mut world, 300, true);
        rooms.fill(&mut world, &mut rng);
        world.wait();
        let graphs: Vec<_> = (0..ranks)
            .map(|rank| {
                let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
                B::begin_capture(stream).unwrap();
                let (input, counts) = (&rooms.inputs[rank], &rooms.counts[rank]);
                let (output, received) = (&mut rooms.outputs[rank], &mut rooms.received[rank]);
                comm.all_to_all_counted(stream, input, counts, output, received).unwrap();
                B::end_capture(stream).unwrap()
            })
            .collect();
        for replay in 0..scaled(20) {
            rooms.fill(&mut world, &mut rng);
            if replay % 3 == 0 {
                rooms.launch(&mut world, CallOptions::default());
            }
            for (graph, stream) in graphs.iter().zip(&world.streams) {
                B::replay(graph, stream).unwrap();
            }
            rooms.check(&world, &format!("replay {replay} of {ranks} ranks"));
        }
    }
}

/// What has no room, or counts for other ranks than there are, is refused; and ranks that differ in the room are told.
pub fn counted_all_to_all_misuse<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let mut rooms = Rooms::new(&mut world, 100, true);
    let mut few = world.local::<u32>(3);
    let (comm, stream) = (&mut world.comms[0], &world.streams[0]);
    let (input, output) = (&rooms.inputs[0], &mut rooms.outputs[0]);
    let (counts, received) = (&rooms.counts[0], &mut rooms.received[0]);
    let (found, world_size) = (3, 2);
    let wrong = ApiMisuse::Counts { found, world: world_size };
    refused(comm.all_to_all_counted(stream, input, &few[0], &mut *output, &mut *received), wrong.clone());
    refused(comm.all_to_all_counted(stream, input, counts, &mut *output, &mut few[0]), wrong);
    let nothing = input.slice(..0).unwrap();
    refused(
        comm.all_to_all_counted(stream, nothing, counts, output.slice_mut(..0).unwrap(), &mut *received),
        ApiMisuse::NoRoom,
    );
    let (collective, algorithm) = (Collective::AllToAll, Algorithm::Lines);
    let lines = options(|o| o.algorithm = Some(algorithm));
    refused(
        comm.with(lines).all_to_all_counted(stream, input, counts, &mut *output, &mut *received),
        ApiMisuse::Algorithm { collective, algorithm },
    );

    let mut rng = Rng::new(1);
    rooms.fill(&mut world, &mut rng);
    world.each(|rank, comm, stream| {
        let len = 200 - 2 * rank;
        let input = rooms.inputs[rank].slice(..len)?;
        let output = rooms.outputs[rank].slice_mut(..len)?;
        comm.all_to_all_counted(stream, input, &rooms.counts[rank], output, &mut rooms.received[rank])
    });
    for (rank, (comm, stream)) in world.comms.iter().zip(&world.streams).enumerate() {
        match comm.wait(stream) {
            Err(signal_core::Error::RankMismatch { rank: found, .. }) => assert_eq!(found, rank),
            other => panic!("rank {rank} found {other:?}"),
        }
    }
    Communicator::recover_all(&mut world.comms).unwrap();
    rooms.fill(&mut world, &mut rng);
    rooms.launch(&mut world, CallOptions::default());
    rooms.check(&world, "recovered");
}
