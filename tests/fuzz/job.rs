//! Collectives of a case of every kind and form: by the typed layer and by the raw one, as they are meant and with something wrong.

use bytemuck::cast_slice;
use signal_comm::host::Host;
use signal_comm::reference::Rng;
use signal_comm::{Algorithm, CallOptions, DeviceBuffer, Dtype, Element, Error, Result};
use signal_conformance::job::{Form, Job, Operands, RankData, RawOperands, Twist};
use signal_conformance::with_dtype;

use super::calls::{ATTEMPTS, is_misuse};
use super::op::{Draw, Who};
use super::state::{Buffer, State, Stream, refusable};

/// What buffers hold around operands.
const CANARY: u8 = 0xa7;
/// Elements behind an operand in a buffer of its own.
const GUARD: usize = 19;
/// The type of the buffers, and of typed calls.
const F32: usize = size_of::<f32>();

/// A call as it was drawn.
#[derive(Clone, Debug)]
struct Planned {
    job: Job,
    dtype: Dtype,
    form: Form,
    twist: Option<Twist>,
    options: CallOptions,
}

/// Counts to send and received counts, and what they have to be.
type Counts = ([DeviceBuffer<Host, u32>; 2], [Vec<u32>; 2]);

/// One rank's memory for a call.
struct Hand {
    /// By operand: out of a set, or made for this call.
    buffers: Vec<Buffer>,
    /// The set that each is of.
    sets: Vec<Option<usize>>,
    operands: Vec<Bytes>,
    counts: Option<Counts>,
}

/// An operand, as bytes.
struct Bytes {
    /// Where it begins in its buffer.
    first: usize,
    before: Vec<u8>,
    after: Vec<u8>,
}

/// One rank's operands, and its counts.
type OfRank = (Vec<Bytes>, Option<[Vec<u32>; 2]>);

impl Bytes {
    fn all<T: Element>(data: Vec<RankData<T>>) -> Vec<OfRank> {
        let bytes = |values: &[T]| cast_slice::<T, u8>(values).to_vec();
        let of_rank = |rank: RankData<T>| {
            let operands = rank.operands.iter();
            let operands =
                operands.map(|o| Bytes { first: 0, before: bytes(&o.before), after: bytes(&o.after) }).collect();
            (operands, rank.counts)
        };
        data.into_iter().map(of_rank).collect()
    }

    /// What a buffer of so many elements holds around `values`.
    fn image(&self, len: usize, values: &[u8]) -> Vec<u8> {
        let mut image = vec![CANARY; len * F32];
        image[self.first..][..values.len()].copy_from_slice(values);
        image
    }
}

impl State {
    pub(super) fn collective(&mut self, who: Who, stream: usize, draw: &Draw) {
        let world = self.world();
        let mut rng = Rng::new(draw.seed);
        let planned = self.plan(&mut rng, draw);
        self.diverged |= self.capturing();
        // Raw calls keep nothing alive: what they use must not go while a graph holds it.
        if planned.form.raw && self.capturing() {
            return;
        }
        let mut hands = self.hands(&planned, &mut rng, draw);
        let refused = planned.must_be_refused(self.domains);
        let meant = matches!(who, Who::All)
            && stream < 2
            && planned.can_be_meant(self.domains)
            && self.comms.iter().all(Option::is_some);
        let known = !self.diverged && !self.mixed;
        if meant && known {
            self.check_job(stream, &planned, &mut hands);
        } else {
            if refused && known {
                self.settle();
                self.fill(&mut hands);
            }
            let mut accepted = 0;
            for (rank, hand) in hands.iter_mut().enumerate() {
                if matches!(who, Who::One(one) if one % world != rank) {
                    continue;
                }
                let stream = self.stream(rank, stream);
                if let Some(call) = self.launch(rank, &stream, &planned, hand) {
                    assert!(call.is_err() || !refused, "rank {rank} of {world} accepted {planned:?}");
                    accepted += usize::from(refusable(call).is_some() && !planned.job.is_empty());
                }
            }
            self.note(accepted);
            if planned.form.raw {
                self.settle();
            }
            if refused && known && accepted == 0 {
                self.settle();
                let before = |operand: &Bytes| operand.before.clone();
                self.compare_hands(&planned, &hands, "which was refused", before);
                self.saw(planned.name("refused"));
            }
        }
        for (rank, hand) in hands.into_iter().enumerate() {
            for (buffer, set) in hand.buffers.into_iter().zip(hand.sets) {
                if let Some(set) = set {
                    self.sets[set][rank] = Some(buffer);
                }
            }
        }
    }

    fn plan(&self, rng: &mut Rng, draw: &Draw) -> Planned {
        let count = match rng.below(12) {
            0 => 0,
            1 => 1,
            2 => rng.below(900) as usize,
            _ => rng.below(100) as usize,
        };
        let job = Job::draw_any(rng, self.world(), count);
        let form = Form { raw: job.has_raw() && rng.below(2) == 0, in_place: job.has_in_place() && rng.below(3) == 0 };
        let dtype = if form.raw { pick(rng, &Dtype::ALL) } else { Dtype::F32 };
        let twist =
            (draw.twisted && !job.is_empty()).then(|| Twist::draw(rng, &job, self.world(), dtype, form, self.domains));
        let mut options = draw.options;
        let algorithms = job.algorithms(dtype, options.domain, self.shares());
        options.algorithm = match rng.below(10) {
            0..5 => None,
            5 => Some(pick(rng, &Algorithm::ALL)),
            _ if algorithms.is_empty() => None,
            _ => Some(pick(rng, &algorithms)),
        };
        Planned { job, dtype, form, twist, options }
    }

    fn shares(&self) -> usize {
        if self.domains { 8 } else { 1 }
    }

    /// Memory for all ranks: the first two operands lie in sets, as far as there are any that have room.
    fn hands(&mut self, planned: &Planned, rng: &mut Rng, draw: &Draw) -> Vec<Hand> {
        let Planned { job, dtype, form, .. } = planned;
        let seed = rng.next_u64();
        let data = with_dtype!(*dtype, T => Bytes::all(job.data::<T>(self.world(), seed, form.in_place)));
        let mut hands = Vec::new();
        for (rank, (mut operands, counts)) in data.into_iter().enumerate() {
            let (mut buffers, mut sets) = (Vec::new(), Vec::new());
            for (number, operand) in operands.iter_mut().enumerate() {
                // What is only moved has no alignment.
                let at = draw.starts[number % 2] * F32;
                operand.first = match (form.raw, job.op()) {
                    (true, None) => at + rng.below(F32 as u64) as usize,
                    (true, Some(_)) => at.next_multiple_of(dtype.bytes()),
                    (false, _) => at,
                };
                let len = (operand.first + operand.before.len()).div_ceil(F32) + GUARD;
                let set = (number < 2).then(|| draw.sets[number] % self.sets.len().max(1));
                let holds = |buffer: &mut Buffer| {
                    !buffer.is_empty() && operand.first + operand.before.len() <= buffer.len() * F32
                };
                let place = set.and_then(|set| self.sets.get_mut(set)).map(|sets| &mut sets[rank]);
                let taken = place.and_then(|place| place.take_if(holds));
                // Else the set is taken, too small, or was not to be had.
                sets.push(set.filter(|_| taken.is_some()));
                buffers.push(taken.unwrap_or_else(|| DeviceBuffer::new(&self.devices[rank], len).unwrap()));
            }
            let counts = counts.map(|counts| {
                let buffer = || DeviceBuffer::new(&self.devices[rank], counts[0].len()).unwrap();
                ([buffer(), buffer()], counts)
            });
            hands.push(Hand { buffers, sets, operands, counts });
        }
        hands
    }

    /// Writes what operands hold before the call, and canaries around them.
    fn fill(&self, hands: &mut [Hand]) {
        for (hand, streams) in hands.iter_mut().zip(&self.streams) {
            for (buffer, operand) in hand.buffers.iter_mut().zip(&hand.operands) {
                let image = operand.image(buffer.len(), &operand.before);
                let image: Vec<f32> = image.chunks_exact(F32).map(bytemuck::pod_read_unaligned).collect();
                buffer.write(&streams[0], &image).unwrap();
            }
            if let Some((buffers, counts)) = &mut hand.counts {
                buffers[0].write(&streams[0], &counts[0]).unwrap();
                buffers[1].write(&streams[0], &vec![0xbad; counts[1].len()]).unwrap();
            }
        }
        self.settle();
    }

    /// One rank's call; `None` where it has left.
    fn launch(&mut self, rank: usize, stream: &Stream, planned: &Planned, hand: &mut Hand) -> Option<Result<()>> {
        let comm = self.comms[rank].as_mut()?;
        let Planned { job, dtype, form, twist, options } = planned;
        let twisted = twist.as_ref().map_or_else(|| job.clone(), |twist| twist.job(job));
        let options = twist.as_ref().map_or(*options, |twist| twist.options(*options));
        if form.raw {
            let addresses = hand.buffers.iter().zip(&hand.operands);
            let mut addresses: Vec<u64> =
                addresses.map(|(buffer, operand)| buffer.address() + operand.first as u64).collect();
            if let Some(twist) = twist {
                twist.addresses(rank, job, *dtype, &mut addresses);
            }
            let counts =
                hand.counts.as_ref().map_or([0; 2], |(buffers, _)| [buffers[0].address(), buffers[1].address()]);
            let operands = RawOperands { addresses, counts, in_place: form.in_place };
            // SAFETY: a call with something wrong is refused. Else the operands lie within buffers of this rank, which are kept until
            // the streams have settled, and which nothing else touches.
            return Some(unsafe { twisted.launch_raw(comm, options, stream, *dtype, &operands) });
        }
        let mut ranges: Vec<_> = hand
            .operands
            .iter()
            .map(|operand| operand.first / F32..(operand.first + operand.before.len()) / F32)
            .collect();
        if let Some(twist) = twist {
            twist.ranges(&mut ranges);
        }
        let counts = hand.counts.as_mut().map(|(buffers, _)| buffers);
        let operands = Operands { buffers: &mut hand.buffers[..], ranges: &ranges, counts, in_place: form.in_place };
        Some(twisted.launch(comm, options, stream, operands))
    }

    /// A call of all ranks that has to be right. It may miss the deadline, which is short; then they recover and try again.
    fn check_job(&mut self, stream: usize, planned: &Planned, hands: &mut [Hand]) {
        for _ in 0..ATTEMPTS {
            self.settle();
            self.fill(hands);
            let mut ended = Vec::new();
            for (rank, hand) in hands.iter_mut().enumerate() {
                let stream = self.stream(rank, stream);
                ended.extend(self.launch(rank, &stream, planned, hand));
            }
            for (comm, streams) in self.comms.iter().flatten().zip(&self.streams) {
                ended.push(comm.wait(&streams[stream]));
            }
            self.settle();
            match ended.into_iter().find_map(Result::err) {
                None => {
                    self.saw(planned.name("right"));
                    return self.compare_hands(planned, hands, "", |operand| operand.after.clone());
                }
                Some(Error::Timeout(_) | Error::Poisoned { .. }) => self.recover_all(0, self.world()),
                Some(error) => panic!("{planned:?}: {error}"),
            }
            assert!(!self.diverged, "all ranks were there, and none could recover");
        }
        panic!("no attempt of {ATTEMPTS} met the deadline: {planned:?}");
    }

    fn compare_hands(&self, planned: &Planned, hands: &[Hand], what: &str, expected: impl Fn(&Bytes) -> Vec<u8>) {
        for (rank, (hand, streams)) in hands.iter().zip(&self.streams).enumerate() {
            for (number, (buffer, operand)) in hand.buffers.iter().zip(&hand.operands).enumerate() {
                let found = buffer.read(&streams[0]).unwrap();
                let (found, image) = (cast_slice::<f32, u8>(&found), operand.image(buffer.len(), &expected(operand)));
                let wrong = (0..image.len()).find(|at| found[*at] != image[*at]);
                let wrong = wrong.map(|at| at as isize - operand.first as isize);
                assert_eq!(wrong, None, "byte of operand {number} of rank {rank}: {planned:?} {what}");
            }
            if let Some((buffers, [sent, received])) = hand.counts.as_ref().filter(|_| what.is_empty()) {
                assert_eq!(
                    (&buffers[0].read(&streams[0]).unwrap(), &buffers[1].read(&streams[0]).unwrap()),
                    (sent, received)
                );
            }
        }
    }
}

impl Planned {
    fn name(&self, ended: &str) -> String {
        let counted = if matches!(self.job, Job::AllToAllCounted(..)) { ", counted" } else { "" };
        let layer = if self.form.raw { "raw" } else { "typed" };
        format!("{layer} {}{counted}: {ended}", self.job.collective())
    }

    /// Whether no rank may accept it.
    fn must_be_refused(&self, domains: bool) -> bool {
        let Planned { job, options, twist, .. } = self;
        // A rank that has nothing to send and to receive does not look at the grid.
        let mut looked_at = *options;
        if matches!(job, Job::Transfers(_)) {
            (looked_at.blocks, looked_at.threads) = (None, None);
        }
        !job.is_empty() && (twist.is_some() || is_misuse(&looked_at, domains) || !self.takes_algorithm(domains))
    }

    /// Of a call that moves nothing, whether what is wrong with it is looked at is nobody's business.
    fn can_be_meant(&self, domains: bool) -> bool {
        !self.must_be_refused(domains) && !is_misuse(&self.options, domains) && self.takes_algorithm(domains)
    }

    fn takes_algorithm(&self, domains: bool) -> bool {
        let shares = if domains { 8 } else { 1 };
        let algorithms = self.job.algorithms(self.dtype, self.options.domain, shares);
        self.options.algorithm.is_none_or(|algorithm| algorithms.contains(&algorithm))
    }
}

fn pick<T: Copy>(rng: &mut Rng, choices: &[T]) -> T {
    choices[rng.below(choices.len() as u64) as usize]
}
