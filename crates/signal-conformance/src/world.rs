//! All ranks of one communicator, in one place.

use bytemuck::Pod;
use signal_core::{Backend, CallOptions, Communicator, DeviceBuffer, Result};

/// The communicators of all ranks, and a stream for each.
pub(crate) struct World<B: Backend> {
    /// By rank.
    pub(crate) comms: Vec<Communicator<B>>,
    /// By rank.
    pub(crate) streams: Vec<B::Stream>,
}

/// Call options, adjusted from the default.
pub(crate) fn options(adjust: impl FnOnce(&mut CallOptions)) -> CallOptions {
    let mut options = CallOptions::default();
    adjust(&mut options);
    options
}

impl<B: Backend> World<B> {
    pub(crate) fn new(mut comms: Vec<Communicator<B>>) -> Self {
        comms.iter_mut().for_each(|comm| comm.plant_canaries().unwrap());
        let streams = comms.iter().map(|c| B::create_stream(c.device()).unwrap()).collect();
        World { comms, streams }
    }

    pub(crate) fn ranks(&self) -> usize {
        self.comms.len()
    }

    /// Another stream for each rank.
    pub(crate) fn more_streams(&self) -> Vec<B::Stream> {
        self.comms.iter().map(|c| B::create_stream(c.device()).unwrap()).collect()
    }

    /// Enqueues on each rank in turn; no call may fail.
    pub(crate) fn each(&mut self, mut call: impl FnMut(usize, &mut Communicator<B>, &B::Stream) -> Result<()>) {
        for (rank, (comm, stream)) in self.comms.iter_mut().zip(&self.streams).enumerate() {
            call(rank, comm, stream).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
        }
    }

    /// Runs `work` on a thread for each rank, with that rank's item.
    pub(crate) fn threads<I: Send>(
        &mut self,
        items: Vec<I>,
        work: impl Fn(usize, I, &mut Communicator<B>, &B::Stream) + Sync,
    ) {
        assert_eq!(items.len(), self.ranks());
        let work = &work;
        std::thread::scope(|scope| {
            let lanes = self.comms.iter_mut().zip(&self.streams).zip(items).enumerate();
            let threads: Vec<_> = lanes
                .map(|(rank, ((comm, stream), item))| scope.spawn(move || work(rank, item, comm, stream)))
                .collect();
            // Joined one by one: race detectors see a join, but not how a scope ends.
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    /// Waits for every rank; none may have failed.
    pub(crate) fn wait(&self) {
        for (rank, (comm, stream)) in self.comms.iter().zip(&self.streams).enumerate() {
            comm.wait(stream).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
        }
    }

    /// A symmetric buffer on every rank.
    pub(crate) fn alloc<T: Pod>(&mut self, len: usize) -> Vec<DeviceBuffer<B, T>> {
        self.comms.iter_mut().map(|c| c.alloc(len).unwrap()).collect()
    }

    /// A buffer on every rank that its peers cannot reach.
    pub(crate) fn local<T: Pod>(&self, len: usize) -> Vec<DeviceBuffer<B, T>> {
        self.comms.iter().map(|c| DeviceBuffer::new(c.device(), len).unwrap()).collect()
    }

    /// Captures what `calls` enqueues on one rank.
    pub(crate) fn capture(
        &mut self,
        rank: usize,
        calls: impl FnOnce(&mut Communicator<B>, &B::Stream) -> Result<()>,
    ) -> B::Graph {
        let stream = &self.streams[rank];
        B::begin_capture(stream).unwrap();
        calls(&mut self.comms[rank], stream).unwrap();
        B::end_capture(stream).unwrap()
    }
}

impl<B: Backend> Drop for World<B> {
    /// Panics if something was written between the parts of a rank's memory.
    fn drop(&mut self) {
        for comm in self.comms.iter().filter(|_| !std::thread::panicking()) {
            // A device that no longer answers is no write.
            if let Ok(Some(at)) = comm.overwritten() {
                panic!("rank {}: byte {at} of its memory was written, between its parts", comm.rank());
            }
        }
    }
}
