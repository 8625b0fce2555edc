//! The buffers of a size: a few independent sets, each with random data of its own.

use signal_comm::reference::Rng;
use signal_comm::{Backend, Communicator, DeviceBuffer, DeviceFamily, Element, Registration};

use super::args::{Args, Memory};
use super::expected::{Data, GARBAGE};
use super::ranks::Ranks;
use super::shape::{Place, Size};
use crate::error::{CliError, Result};
use crate::machine::binary_size;

/// More than one set is taken from at most one part in this many of the memory: the host keeps references beside them.
const MEMORY_SHARE: u64 = 8;

/// One call's buffers on the ranks of this process.
pub(super) struct Set<B: Backend, T: Element> {
    /// Of the buffers, which they go before.
    _registrations: Vec<Registration<B>>,
    /// As [`Shape::before`](super::shape::Shape::before) has it: what calls out of place read, and a copy for those in place.
    pub(super) inputs: Vec<DeviceBuffer<B, T>>,
    pub(super) outputs: Vec<DeviceBuffer<B, T>>,
    pub(super) data: Data<T>,
}

/// All sets of a size.
pub(super) struct Sets<B: Backend, T: Element> {
    pub(super) size: Size,
    pub(super) sets: Vec<Set<B, T>>,
}

impl<B: Backend, T: Element> Sets<B, T> {
    /// Allocates and fills the sets of one size with data that depends on the seed and the size only.
    pub(super) fn create(ranks: &mut Ranks<B>, args: &Args, size: Size) -> Result<Self> {
        let (memory, seed) = (args.memory, ranks.seed);
        let number = affordable_sets(ranks, size.bytes, args.sets())?;
        let name = |index| [seed, size.count as u64, index as u64];
        let sets = (0..number).map(|index| Set::create(ranks, memory, name(index), size));
        Ok(Sets { size, sets: sets.collect::<Result<_>>()? })
    }

    pub(super) fn len(&self) -> usize {
        self.sets.len()
    }

    /// Enqueues what makes every output ready for a batch: the input to be worked on in place, else garbage.
    pub(super) fn prepare(&mut self, ranks: &Ranks<B>, place: Place) -> Result<()> {
        for set in &mut self.sets {
            for ((stream, input), output) in ranks.streams.iter().zip(&set.inputs).zip(&mut set.outputs) {
                match place {
                    Place::InPlace => output.copy_from(stream, input)?,
                    Place::OutOfPlace => output.fill_bytes(stream, GARBAGE)?,
                }
            }
        }
        Ok(())
    }
}

impl<B: Backend, T: Element> Set<B, T> {
    fn create(ranks: &mut Ranks<B>, memory: Memory, name: [u64; 3], size: Size) -> Result<Self> {
        let len = ranks.shape.parts() * size.count;
        let mut registrations = Vec::new();
        let mut allocate = || -> Result<Vec<DeviceBuffer<B, T>>> {
            let buffers = ranks.communicators.iter_mut().map(|communicator| match memory {
                Memory::Symmetric => Ok(communicator.alloc(len)?),
                Memory::Local => Ok(DeviceBuffer::new(communicator.device(), len)?),
                Memory::Registered => {
                    let buffer = DeviceBuffer::new(communicator.device(), len)?;
                    registrations.push(register(communicator, &buffer)?);
                    Ok(buffer)
                }
            });
            buffers.collect()
        };
        let (mut inputs, outputs) = (allocate()?, allocate()?);
        let seed = name.into_iter().fold(0, |state, part| Rng::new(state ^ part).next_u64());
        let data = Data::new(ranks.shape, size, seed, ranks.here());
        for ((rank, buffer), stream) in ranks.here().zip(&mut inputs).zip(&ranks.streams) {
            buffer.write(stream, &data.before(rank))?;
        }
        Ok(Set { _registrations: registrations, inputs, outputs, data })
    }
}

/// An error where peers cannot be let at the buffer: what is measured would not be what was asked for.
fn register<B: Backend, T: Element>(
    communicator: &mut Communicator<B>,
    buffer: &DeviceBuffer<B, T>,
) -> Result<Registration<B>> {
    // SAFETY: a set is dropped once its calls have ended, or with a process that ends because one failed; the registration goes first.
    let registration = unsafe { communicator.register(buffer.address(), buffer.len() * size_of::<T>()) }?;
    match registration.refusal() {
        None => Ok(registration),
        Some(why) => Err(CliError::Arguments(format!("--memory registered: peers cannot be let at it: {why}"))),
    }
}

/// How many sets of two buffers of `bytes` a rank can be had; an error if not one.
pub(super) fn affordable_sets<B: Backend>(ranks: &Ranks<B>, bytes: usize, wanted: u32) -> Result<usize> {
    let family = B::describe(ranks.device()).family;
    let mut affordable = u64::from(wanted);
    for device in &ranks.devices {
        // CPU devices are slices of one memory.
        let sharers = match family {
            DeviceFamily::Host => ranks.world(),
            _ => ranks.devices.iter().filter(|other| other.uuid == device.uuid).count(),
        };
        let set_bytes = 2 * bytes as u64 * sharers as u64;
        if set_bytes > device.memory_bytes {
            let (need, have) = (binary_size(set_bytes), binary_size(device.memory_bytes));
            let size = binary_size(bytes as u64);
            return Err(CliError::Arguments(format!("{size} a rank need {need} on {}, which has {have}", device.name)));
        }
        affordable = affordable.min(device.memory_bytes / MEMORY_SHARE / set_bytes);
    }
    Ok(affordable.max(1) as usize)
}
