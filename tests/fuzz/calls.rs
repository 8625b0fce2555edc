//! Collectives of a case, by all ranks or some, and what has to come of them.

use signal_comm::host::Host;
use signal_comm::{Algorithm, Backend, CallOptions, DeviceBuffer, Error, ReduceOp, Result, reference};

use super::op::{Part, Who};
use super::state::{Buffer, Comm, State, Stream, refusable};

/// Times that a call of all ranks is tried again after it missed the deadline.
pub(super) const ATTEMPTS: usize = 20;

impl State {
    /// Makes a call on some ranks.
    pub(super) fn each(
        &mut self,
        who: Who,
        stream: usize,
        mut call: impl FnMut(&mut Comm, &Stream, &mut DeviceBuffer<Host, u32>) -> Result<()>,
    ) {
        self.diverged |= self.capturing();
        let mut accepted = 0;
        for rank in 0..self.world() {
            if matches!(who, Who::One(one) if one % self.world() != rank) {
                continue;
            }
            let stream = self.stream(rank, stream);
            if let Some(comm) = &mut self.comms[rank] {
                accepted += usize::from(refusable(call(comm, &stream, &mut self.counts[rank])).is_some());
            }
        }
        self.note(accepted);
    }

    pub(super) fn all_reduce(&mut self, who: Who, stream: usize, input: Part, output: Part, options: CallOptions) {
        let world = self.world();
        let sets = self.sets.len().max(1);
        let (input, output) = (Part { set: input.set % sets, ..input }, Part { set: output.set % sets, ..output });
        self.diverged |= self.capturing();
        let meant = self.can_be_meant(&input, &output, &options) && stream < 2 && matches!(who, Who::All);
        if meant && !self.diverged && !self.mixed {
            return self.check_sum(stream, &input, &output, options);
        }
        let misuse = is_misuse(&options, self.domains) || (input.set != output.set && lengths_differ(&input, &output));
        let mut accepted = 0;
        for rank in 0..world {
            if matches!(who, Who::One(one) if one % world != rank) {
                continue;
            }
            let stream = self.stream(rank, stream);
            if let Some(call) = self.call(rank, &stream, &input, &output, options) {
                let empty = input.start == input.end;
                assert!(call.is_err() || !misuse || empty, "{options:?} on {input:?} to {output:?}");
                accepted += usize::from(refusable(call).is_some() && !empty);
            }
        }
        self.note(accepted);
    }

    /// One rank's call; `None` where it lacks what that takes.
    fn call(
        &mut self,
        rank: usize,
        stream: &Stream,
        input: &Part,
        output: &Part,
        options: CallOptions,
    ) -> Option<Result<()>> {
        // Out, so that both can be borrowed at once.
        let mut target = self.sets.get_mut(output.set)?[rank].take()?;
        let comm = self.comms[rank].as_mut();
        let call = comm.and_then(|comm| {
            let call = comm.with(options);
            if input.set == output.set {
                let part = target.slice_mut(input.start..input.end);
                return Some(part.and_then(|part| call.all_reduce_in_place(stream, part, ReduceOp::Sum)));
            }
            let source = self.sets[input.set][rank].as_ref()?.slice(input.start..input.end);
            let part = target.slice_mut(output.start..output.end);
            Some(source.and_then(|source| call.all_reduce(stream, source, part?, ReduceOp::Sum)))
        });
        self.sets[output.set][rank] = Some(target);
        call
    }

    /// Whether all ranks can make the call.
    fn can_be_meant(&self, input: &Part, output: &Part, options: &CallOptions) -> bool {
        let within = |part: &Part| {
            let holds = |buffer: &Option<Buffer>| {
                buffer.as_ref().is_some_and(|buffer| part.start <= part.end && part.end <= buffer.len())
            };
            self.sets.get(part.set).is_some_and(|set| set.iter().all(holds))
        };
        let alike = input.set == output.set || !lengths_differ(input, output);
        let all_here = self.comms.iter().all(Option::is_some);
        within(input)
            && (input.set == output.set || within(output))
            && alike
            && all_here
            && !is_misuse(options, self.domains)
    }

    /// A call of all ranks that has to be right. It may miss the deadline, which is short; then they recover and try again.
    fn check_sum(&mut self, stream: usize, input: &Part, output: &Part, options: CallOptions) {
        for _ in 0..ATTEMPTS {
            self.settle();
            let mut inputs = Vec::new();
            for rank in 0..self.world() {
                let values = reference::random::<f32>(rank as u64, input.end);
                let stream = self.stream(rank, stream);
                let buffer = self.sets[input.set][rank].as_mut().unwrap();
                let mut image = vec![0.0; buffer.len()];
                image[..input.end].copy_from_slice(&values);
                buffer.write(&stream, &image).unwrap();
                inputs.push(values[input.start..].to_vec());
            }
            let mut ended = Vec::new();
            for rank in 0..self.world() {
                let stream = self.stream(rank, stream);
                ended.push(self.call(rank, &stream, input, output, options).unwrap());
            }
            for (rank, comm) in self.comms.iter().enumerate() {
                ended.push(comm.as_ref().unwrap().wait(&self.streams[rank][stream]));
            }
            match ended.into_iter().find_map(Result::err) {
                None => {
                    self.saw("sum".to_owned());
                    return self.compare(stream, input, output, &inputs);
                }
                Some(Error::Timeout(_) | Error::Poisoned { .. }) => self.recover_all(0, self.world()),
                Some(error) => panic!("{options:?} on {input:?} to {output:?}: {error}"),
            }
            assert!(!self.diverged, "all ranks were there, and none could recover");
        }
        panic!("no attempt of {ATTEMPTS} met the deadline: {options:?} on {input:?}");
    }

    fn compare(&self, stream: usize, input: &Part, output: &Part, inputs: &[Vec<f32>]) {
        let slices: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
        let start = if input.set == output.set { input.start } else { output.start };
        let expected = reference::all_reduce(&slices, ReduceOp::Sum);
        for (buffer, streams) in self.sets[output.set].iter().zip(&self.streams) {
            let found = buffer.as_ref().unwrap().read(&streams[stream]).unwrap();
            assert!(found[start..start + expected.len()] == expected, "{input:?} to {output:?}");
        }
    }

    /// Notes on how many ranks a call was accepted. If not on all, whoever made it misses the others now: left to wait, it
    /// would meet them in another call, which no API can make sense of.
    pub(super) fn note(&mut self, accepted: usize) {
        if (accepted != 0 && accepted != self.world()) || self.capturing() {
            self.diverged = true;
            self.settle();
        }
    }
}

fn lengths_differ(input: &Part, output: &Part) -> bool {
    input.end.wrapping_sub(input.start) != output.end.wrapping_sub(output.start)
}

/// What no call is accepted with that moves something.
pub(super) fn is_misuse(options: &CallOptions, domains: bool) -> bool {
    let impossible = |size: Option<u32>| size.is_some_and(|size| size == 0 || size > 1024);
    options.domain > 7
        || (options.domain > 0 && (!domains || options.algorithm.is_some_and(Algorithm::uses_region)))
        || impossible(options.blocks)
        || impossible(options.threads)
}

/// All ranks add up, and all is right.
pub(crate) fn check_sum(mut comms: Vec<Comm>) {
    let mut calls = Vec::new();
    for comm in &mut comms {
        let stream = Host::create_stream(comm.device()).unwrap();
        let mut input = comm.alloc::<f32>(1000).unwrap();
        let output = comm.alloc::<f32>(1000).unwrap();
        input.write(&stream, &reference::random(comm.rank() as u64, 1000)).unwrap();
        calls.push((stream, input, output));
    }
    for (comm, (stream, input, output)) in comms.iter_mut().zip(&mut calls) {
        comm.all_reduce(stream, &*input, output, ReduceOp::Sum).unwrap();
    }
    let inputs: Vec<Vec<f32>> = (0..comms.len() as u64).map(|rank| reference::random(rank, 1000)).collect();
    let slices: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
    let expected = reference::all_reduce(&slices, ReduceOp::Sum);
    for (comm, (stream, _, output)) in comms.iter().zip(&calls) {
        comm.wait(stream).unwrap();
        assert!(output.read(stream).unwrap() == expected);
    }
}
