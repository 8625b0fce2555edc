//! `--dump`: inputs and outputs as raw files, for a check that shares no code with this library.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Serialize;
use signal_comm::{Collective, Element};

use super::expected::Data;
use super::load::Measured;
use super::report::{Report, write_json};
use super::shape::{Place, Shape, Size};
use crate::error::{CliError, Result};

// The files hold elements as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"));

/// Says how to read the files, without this source.
const LAYOUT: &str = "Each file holds elements of `dtype` without a header, little-endian, in order: parts of `count` \
    elements, one behind the other. `input`: what the rank brought; `output`: its result, as the timed calls left it out of \
    place; `in_place`: its result, as a single call left it in place; null: the rank has none, or the collective no such \
    form. A reduction is the element-wise `op` over all ranks, computed in f32 in rank order with -0.0 taken as +0.0, and \
    rounded once to `dtype`. f32: numpy '<f4'; f16: numpy '<f2'; bf16: the upper halves of f32, numpy '<u2' shifted left by \
    16 and viewed as '<f4'.";

/// What a result is.
fn result(collective: Collective) -> &'static str {
    match collective {
        Collective::AllReduce => "of every rank: the reduction of all inputs",
        Collective::ReduceScatter => "of rank r: part r of the reduction of all inputs",
        Collective::AllGather => "of every rank: the inputs of ranks 0, 1, ...",
        Collective::Broadcast => "of every rank: the root's input",
        Collective::Scatter => "of rank r: part r of the root's input",
        Collective::Gather => "of the root: the inputs of ranks 0, 1, ...",
        Collective::Reduce => "of the root: the reduction of all inputs",
        Collective::AllToAll => "of rank r: part r of the inputs of ranks 0, 1, ...",
        Collective::SendRecv => "of rank r: the input of rank (r - 1) mod `ranks`",
        _ => "",
    }
}

/// A directory being filled: by each process with its ranks' files, by the leading one with the manifest. That is rewritten
/// after every size, so that it never names a missing file.
pub(super) struct Dump {
    directory: PathBuf,
    shape: Shape,
    manifest: Manifest,
    leads: bool,
}

#[derive(Serialize)]
struct Manifest {
    layout: &'static str,
    collective: &'static str,
    result: &'static str,
    backend: &'static str,
    dtype: &'static str,
    op: &'static str,
    root: i64,
    algo: String,
    ranks: usize,
    seed: u64,
    sizes: Vec<SizeFiles>,
}

#[derive(Serialize)]
struct SizeFiles {
    bytes: usize,
    count: usize,
    /// By rank.
    files: Vec<Files>,
}

#[derive(Serialize)]
struct Files {
    rank: usize,
    input: Option<String>,
    output: Option<String>,
    in_place: Option<String>,
}

impl Dump {
    pub(super) fn create(directory: &Path, shape: Shape, report: &Report, leads: bool) -> Result<Self> {
        fs::create_dir_all(directory).map_err(CliError::file(directory))?;
        let arguments = &report.arguments;
        let manifest = Manifest {
            layout: LAYOUT,
            collective: arguments.collective,
            result: result(shape.collective),
            backend: arguments.backend,
            dtype: arguments.dtype,
            op: arguments.op,
            root: arguments.root,
            algo: arguments.algo.clone(),
            ranks: arguments.ranks,
            seed: arguments.seed,
            sizes: Vec::new(),
        };
        let dump = Dump { directory: directory.to_owned(), shape, manifest, leads };
        dump.write_manifest()?;
        Ok(dump)
    }

    /// Writes one size's files of the ranks `here`, by which `measured` has buffers, out of place and in place.
    pub(super) fn write<T: Element>(
        &self,
        here: Range<usize>,
        size: Size,
        data: &Data<T>,
        measured: [Option<&Measured<T>>; 2],
    ) -> Result<()> {
        let write = |name: Option<&String>, values: &[T]| {
            let Some(name) = name else { return Ok(()) };
            let path = self.directory.join(name);
            fs::write(&path, bytemuck::cast_slice::<T, u8>(values)).map_err(CliError::file(&path))
        };
        for (index, rank) in here.enumerate() {
            let files = Files::new(&self.shape, rank, size);
            let result = |found: Option<&Measured<T>>, place| -> Vec<T> {
                let buffer = found.and_then(|found| found.outputs.get(index));
                let result = buffer.and_then(|buffer| buffer.get(size.elements(self.shape.output(rank, place))));
                result.map_or_else(Vec::new, <[T]>::to_vec)
            };
            write(files.input.as_ref(), &data.input(rank))?;
            write(files.output.as_ref(), &result(measured[0], Place::OutOfPlace))?;
            write(files.in_place.as_ref(), &result(measured[1], Place::InPlace))?;
        }
        Ok(())
    }

    /// Adds one size, whose files are there, to the manifest.
    pub(super) fn note(&mut self, size: Size) -> Result<()> {
        let files = (0..self.manifest.ranks).map(|rank| Files::new(&self.shape, rank, size)).collect();
        self.manifest.sizes.push(SizeFiles { bytes: size.bytes, count: size.count, files });
        self.write_manifest()
    }

    fn write_manifest(&self) -> Result<()> {
        if self.leads { write_json(&self.directory.join("manifest.json"), &self.manifest) } else { Ok(()) }
    }
}

impl Files {
    /// The names of a rank's files of one size.
    fn new(shape: &Shape, rank: usize, size: Size) -> Self {
        let name = |kind: &str, parts: Range<usize>| {
            (!parts.is_empty()).then(|| format!("{}_rank{rank}_{kind}.bin", size.bytes))
        };
        let result = |kind, place| {
            let has = shape.places().contains(&place);
            name(kind, if has { shape.output(rank, place) } else { 0..0 })
        };
        Files {
            rank,
            input: name("input", shape.input(rank)),
            output: result("output", Place::OutOfPlace),
            in_place: result("in_place", Place::InPlace),
        }
    }
}
