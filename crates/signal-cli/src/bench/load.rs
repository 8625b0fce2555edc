//! A collective at one size in one place, as a load to measure.

use signal_comm::{Backend, Element};

use super::args::Args;
use super::calls;
use super::check;
use super::data::Sets;
use super::measure::{self, Load, Measurement};
use super::ranks::{Ranks, Work};
use super::shape::Place;
use crate::error::Result;

/// What was found, and left.
pub(super) struct Measured<T> {
    pub(super) found: Measurement,
    /// Buffers of set 0 by rank of this process: of the timed calls out of place, of the single call in place.
    pub(super) outputs: Vec<Vec<T>>,
}

/// Measures and checks one size in one place.
pub(super) fn measure<B: Backend, T: Element>(
    ranks: &mut Ranks<B>,
    sets: &mut Sets<B, T>,
    place: Place,
    args: &Args,
) -> Result<Measured<T>> {
    let mut load = Placed { sets, place, outputs: Vec::new() };
    let found = measure::measure(ranks, &mut load, args)?;
    Ok(Measured { found, outputs: load.outputs })
}

struct Placed<'a, B: Backend, T: Element> {
    sets: &'a mut Sets<B, T>,
    place: Place,
    outputs: Vec<Vec<T>>,
}

impl<B: Backend, T: Element> Load<B> for Placed<'_, B, T> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn prepare(&mut self, ranks: &Ranks<B>) -> Result<()> {
        self.sets.prepare(ranks, self.place)
    }

    fn enqueue(&mut self, ranks: &mut Ranks<B>, set: usize) -> Result<()> {
        let (here, options, shape) = (ranks.here(), ranks.options, ranks.shape);
        let (size, set) = (self.sets.size, &mut self.sets.sets[set]);
        let ranks = here.zip(&mut ranks.communicators).zip(&ranks.streams);
        for (((rank, communicator), stream), buffers) in ranks.zip(set.inputs.iter().zip(&mut set.outputs)) {
            calls::enqueue(communicator.with(options), stream, (&shape, size, self.place), rank, buffers)?;
        }
        Ok(())
    }

    fn check(&mut self, ranks: &Ranks<B>, work: &Work<B>, found: &mut Measurement) -> Result<()> {
        let place = self.place;
        for (index, set) in self.sets.sets.iter().enumerate() {
            let calls = work.calls_of(index, self.sets.len());
            if calls == 0 {
                continue;
            }
            let again = (place == Place::InPlace && calls > 1).then(|| set.data.again(calls));
            let reduced = again.as_ref().unwrap_or(&set.data.once);
            let mut outputs = Vec::new();
            for ((rank, output), stream) in ranks.here().zip(&set.outputs).zip(&ranks.streams) {
                let output = output.read(stream)?;
                let wrong = check::wrong_elements(&output, &set.data.after(rank, place, calls, reduced));
                found.wrong += wrong;
                if again.is_none() && wrong > 0 {
                    found.max_error = found.max_error.max(set.data.error_of(rank, place, &output));
                }
                outputs.push(output);
            }
            if again.is_none() {
                // Outputs with the right bits have the reference's error.
                found.max_error = found.max_error.max(set.data.error);
                if index == 0 {
                    self.outputs = outputs;
                }
            }
        }
        Ok(())
    }

    /// Flips the lowest bit of the middle element of the rank's first result, in the device's memory; of the whole buffer where the rank has no
    /// result, as nothing is to be written there.
    fn corrupt(&mut self, ranks: &Ranks<B>, index: usize) -> Result<()> {
        let result = self.sets.size.elements(ranks.shape.output(ranks.here().start + index, self.place));
        let (output, stream) = (&mut self.sets.sets[0].outputs[index], &ranks.streams[index]);
        let mut values = output.read(stream)?;
        let range = if result.is_empty() { 0..values.len() } else { result };
        let middle = range.start + range.len() / 2;
        values[middle] = T::from_bits(values[middle].to_bits() ^ 1);
        output.write(stream, &values)?;
        Ok(())
    }
}
