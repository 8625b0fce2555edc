//! `--dump`: inputs and outputs as raw files, for a check that shares no code with this library.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Serialize;
use signal_comm::Element;

use super::report::{Report, write_json};
use crate::error::{CliError, Result};

// The files hold elements as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"));

/// Says how to read the files, without this source.
const LAYOUT: &str = "Each file holds `count` elements of `dtype` without a header, little-endian, in order. The output \
    of every rank is the element-wise `op` over the inputs of all ranks, added in f32 in rank order from +0.0 and rounded \
    once to `dtype`. `input`: what the rank contributed; `output`: what the timed calls left out of place; `in_place`: what \
    a single call left over the input. f32: numpy '<f4'; f16: numpy '<f2'; bf16: the upper halves of f32, numpy '<u2' \
    shifted left by 16 and viewed as '<f4'.";

/// A directory being filled: by each process with its ranks' files, by the leading one with the manifest. That is rewritten
/// after every size, so that it never names a missing file.
pub(super) struct Dump {
    directory: PathBuf,
    manifest: Manifest,
    leads: bool,
}

#[derive(Serialize)]
struct Manifest {
    layout: &'static str,
    collective: &'static str,
    backend: &'static str,
    dtype: &'static str,
    op: &'static str,
    algo: &'static str,
    ranks: usize,
    seed: u64,
    sizes: Vec<Size>,
}

#[derive(Serialize)]
struct Size {
    bytes: usize,
    count: usize,
    /// By rank.
    files: Vec<Files>,
}

#[derive(Serialize)]
struct Files {
    rank: usize,
    input: String,
    output: String,
    in_place: String,
}

impl Dump {
    pub(super) fn create(directory: &Path, report: &Report, leads: bool) -> Result<Self> {
        fs::create_dir_all(directory).map_err(CliError::file(directory))?;
        let arguments = &report.arguments;
        let manifest = Manifest {
            layout: LAYOUT,
            collective: arguments.collective,
            backend: arguments.backend,
            dtype: arguments.dtype,
            op: arguments.op,
            algo: arguments.algo,
            ranks: arguments.ranks,
            seed: arguments.seed,
            sizes: Vec::new(),
        };
        let dump = Dump { directory: directory.to_owned(), manifest, leads };
        dump.write_manifest()?;
        Ok(dump)
    }

    /// Writes one size's files of the ranks `here`, by which each slice is.
    pub(super) fn write<T: Element>(
        &self,
        here: Range<usize>,
        inputs: &[Vec<T>],
        outputs: &[Vec<T>],
        in_place: &[Vec<T>],
    ) -> Result<()> {
        let write = |name: &str, values: &[T]| {
            let path = self.directory.join(name);
            fs::write(&path, bytemuck::cast_slice::<T, u8>(values)).map_err(CliError::file(&path))
        };
        for (rank, ((input, output), in_place)) in here.zip(inputs.iter().zip(outputs).zip(in_place)) {
            let files = Files::new::<T>(rank, input.len());
            write(&files.input, input)?;
            write(&files.output, output)?;
            write(&files.in_place, in_place)?;
        }
        Ok(())
    }

    /// Adds one size, whose files are there, to the manifest.
    pub(super) fn note<T: Element>(&mut self, count: usize) -> Result<()> {
        let files = (0..self.manifest.ranks).map(|rank| Files::new::<T>(rank, count)).collect();
        self.manifest.sizes.push(Size { bytes: count * T::DTYPE.bytes(), count, files });
        self.write_manifest()
    }

    fn write_manifest(&self) -> Result<()> {
        if self.leads { write_json(&self.directory.join("manifest.json"), &self.manifest) } else { Ok(()) }
    }
}

impl Files {
    /// The names of a rank's files of `count` elements.
    fn new<T: Element>(rank: usize, count: usize) -> Self {
        let name = |kind: &str| format!("{}_rank{rank}_{kind}.bin", count * T::DTYPE.bytes());
        Files { rank, input: name("input"), output: name("output"), in_place: name("in_place") }
    }
}
