//! Tables of plans that were measured on one kind of machine, as `signal tune` writes them.
//!
//! They come before the library's own rows, for the collective, link and world size that they were measured with and no other. A file names the
//! device family, the architecture and the layout of the Signal that it was measured on, and is refused elsewhere: what it says would be
//! about another protocol, or another machine.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::backend::{DeviceFamily, DeviceInfo, Link};
use crate::collective::Collective;
use crate::error::{ApiMisuse, Result};
use crate::kernel::Algorithm;
use crate::layout::{LAYOUT_VERSION, MAX_GPUS, MAX_NUM_BLOCKS_UPPER_BOUND};
use crate::plan::{self, Plan, fnv};

/// Version of the file's format.
const FORMAT: u32 = 1;
/// Most threads of a block on any device.
const MOST_THREADS: u32 = 1024;

/// What was measured to be fastest on one kind of machine: [`TuningTable`]s, for [`Settings::tuning`](crate::Settings::tuning).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Tuning {
    /// Family of the devices.
    pub family: DeviceFamily,
    /// Their architecture, such as `sm_90`.
    pub arch: String,
    /// Their name. For people: it is not compared.
    pub device: String,
    tables: Vec<TuningTable>,
}

/// What to do for one collective, among so many ranks whose slowest link is this.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TuningTable {
    /// The collective. A send-recv has none: its ranks exchange pieces of several sizes, and must take the same grid.
    pub collective: Collective,
    /// The slowest link among the ranks.
    pub link: Link,
    /// The number of ranks.
    pub world: usize,
    /// How it was measured. For people.
    pub note: String,
    /// By ascending [`max_bytes`](TuningRow::max_bytes); of those with the same, the best first.
    pub rows: Vec<TuningRow>,
}

/// What to do for messages up to some size.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct TuningRow {
    /// The largest message, in bytes: of all of a rank's input or output, whichever is larger.
    pub max_bytes: u64,
    /// The algorithm. Calls that cannot take it look at the next row.
    pub algorithm: Algorithm,
    /// Threads a block.
    pub threads: u32,
    /// Units of work (packs of 16 bytes, of lines 8) that a thread has before another block is added.
    pub units_per_thread: u64,
    /// Most blocks.
    pub max_blocks: u32,
    /// Microseconds that a call of `max_bytes` took. For people.
    pub us: f64,
}

impl TuningRow {
    /// What gives a call of `max_bytes` in equal parts this plan, which took so many microseconds, and smaller ones fewer blocks.
    pub fn new(collective: Collective, world: usize, max_bytes: u64, plan: Plan, us: f64) -> Self {
        let Plan { algorithm, blocks, threads } = plan;
        let units = plan::units(collective, algorithm, world, max_bytes);
        let units_per_thread = units.div_ceil((u64::from(blocks) * u64::from(threads)).max(1)).max(1);
        TuningRow { max_bytes, algorithm, threads, units_per_thread, max_blocks: blocks, us }
    }
}

impl TuningTable {
    /// A table without rows.
    pub fn new(collective: Collective, link: Link, world: usize, note: String) -> Self {
        TuningTable { collective, link, world, note, rows: Vec::new() }
    }

    fn key(&self) -> (Collective, Link, usize) {
        (self.collective, self.link, self.world)
    }
}

impl Tuning {
    /// For devices of one kind; nothing measured yet.
    pub fn new(device: &DeviceInfo) -> Self {
        Tuning { family: device.family, arch: device.arch.clone(), device: device.name.clone(), tables: Vec::new() }
    }

    /// The tables.
    pub fn tables(&self) -> &[TuningTable] {
        &self.tables
    }

    /// Adds a table, in the place of an older one for the same collective, link and world size.
    ///
    /// # Errors
    /// [`ApiMisuse::Tuning`] with what is wrong with it.
    pub fn add(&mut self, table: TuningTable) -> Result<()> {
        check(&table).map_err(|why| misuse("a table", why))?;
        self.tables.retain(|other| other.key() != table.key());
        self.tables.push(table);
        Ok(())
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`ApiMisuse::Tuning`] with the file's name and what is wrong with it.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|why| misuse(&name, why.to_string()))?;
        Ok(parse(&text).map_err(|why| misuse(&name, why))?)
    }

    /// Parses what [`to_toml`](Self::to_toml) gives.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str) -> Result<Self> {
        Ok(parse(text).map_err(|why| misuse("the text", why))?)
    }

    /// The text of a file.
    pub fn to_toml(&self) -> String {
        let quoted = |text: &str| toml::Value::from(text).to_string();
        let mut text = "# Written by `signal tune`; SIGNAL_TUNING=FILE or Builder::tuning loads it.\n".to_owned();
        let device = quoted(&self.device);
        let family = family_name(self.family);
        let arch = quoted(&self.arch);
        let _ = write!(
            text,
            "format = {FORMAT}\nlayout = {LAYOUT_VERSION}\nfamily = \"{family}\"\narch = {arch}\ndevice = {device}\n"
        );
        for table in &self.tables {
            let TuningTable { collective, link, world, note, rows } = table;
            let _ = write!(
                text,
                "\n[[table]]\ncollective = \"{collective}\"\nlink = \"{}\"\nworld = {world}\n",
                link.name()
            );
            let _ = write!(text, "note = {}\nrows = [\n", quoted(note));
            for TuningRow { max_bytes, algorithm, threads, units_per_thread, max_blocks, us } in rows {
                let _ = writeln!(
                    text,
                    "  {{ max_bytes = {max_bytes}, algorithm = \"{algorithm}\", threads = {threads}, \
                     units_per_thread = {units_per_thread}, max_blocks = {max_blocks}, us = {us:.2} }},"
                );
            }
            text += "]\n";
        }
        text
    }

    /// Refuses devices that it was not measured on.
    ///
    /// # Errors
    /// [`ApiMisuse::Tuning`] with both.
    pub fn check_device(&self, device: &DeviceInfo) -> Result<()> {
        if (self.family, &self.arch) == (device.family, &device.arch) {
            return Ok(());
        }
        let [of, at] = [self.family, device.family].map(family_name);
        let why = format!("measured on {of} {}, and this is {at} {}", self.arch, device.arch);
        Err(misuse("the table of plans", why).into())
    }

    /// The rows for messages of this size, the best first; none where nothing was measured.
    pub(crate) fn rows(&self, key: (Collective, Link, usize), bytes: u64) -> &[TuningRow] {
        let Some(table) = self.tables.iter().find(|table| table.key() == key) else { return &[] };
        let from = table.rows.partition_point(|row| row.max_bytes < bytes);
        let rows = &table.rows[from..];
        let Some(first) = rows.first() else { return &[] };
        &rows[..rows.partition_point(|row| row.max_bytes == first.max_bytes)]
    }

    /// What ranks compare: all that plans depend on.
    pub(crate) fn fingerprint(&self) -> u64 {
        let tables = self.tables.iter().map(|table| {
            let rows = table.rows.iter().map(|row| TuningRow { us: 0.0, ..*row });
            format!("{:?}{:?}", table.key(), rows.collect::<Vec<_>>())
        });
        let mut tables: Vec<String> = tables.collect();
        tables.sort_unstable();
        fnv(format!("{:?} {} {tables:?}", self.family, self.arch).bytes())
    }
}

fn misuse(what: &str, why: String) -> ApiMisuse {
    ApiMisuse::Tuning { what: what.to_owned(), why }
}

const fn family_name(family: DeviceFamily) -> &'static str {
    match family {
        DeviceFamily::Host => "host",
        DeviceFamily::Nvidia => "nvidia",
        DeviceFamily::Amd => "amd",
    }
}

/// What is wrong with a table.
fn check(table: &TuningTable) -> Result<(), String> {
    let TuningTable { collective, world, rows, .. } = table;
    if *collective == Collective::SendRecv {
        return Err(
            "send-recv has no table: its ranks exchange pieces of several sizes and must take the same grid".into()
        );
    }
    if !(1..=MAX_GPUS).contains(world) {
        return Err(format!("world size {world} is not between 1 and {MAX_GPUS}"));
    }
    if rows.is_empty() {
        return Err(format!("no rows for {collective}"));
    }
    for (at, row) in rows.iter().enumerate() {
        let TuningRow { max_bytes, algorithm, threads, units_per_thread, max_blocks, .. } = *row;
        let place = format!("{collective} of {world} ranks, row {at}");
        if !collective.algorithms().contains(&algorithm) {
            return Err(format!("{place}: {collective} has no {algorithm}"));
        }
        if !(1..=MOST_THREADS).contains(&threads) || !(1..=MAX_NUM_BLOCKS_UPPER_BOUND as u32).contains(&max_blocks) {
            return Err(format!("{place}: a grid of {max_blocks} blocks of {threads} threads"));
        }
        if max_bytes == 0 || units_per_thread == 0 {
            return Err(format!("{place}: max_bytes and units_per_thread are above 0"));
        }
        if rows[..at].last().is_some_and(|before| before.max_bytes > max_bytes) {
            return Err(format!("{place}: max_bytes do not ascend"));
        }
        if rows[..at].iter().any(|other| (other.max_bytes, other.algorithm) == (max_bytes, algorithm)) {
            return Err(format!("{place}: {algorithm} twice for {max_bytes} bytes"));
        }
    }
    Ok(())
}

/// The file, as text has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "format")]
    _format: u32,
    #[serde(rename = "layout")]
    _layout: u32,
    family: String,
    arch: String,
    device: String,
    #[serde(default)]
    table: Vec<FileTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTable {
    collective: String,
    link: String,
    world: usize,
    #[serde(default)]
    note: String,
    rows: Vec<FileRow>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRow {
    max_bytes: u64,
    algorithm: String,
    threads: u32,
    units_per_thread: u64,
    max_blocks: u32,
    #[serde(default)]
    us: f64,
}

/// The versions, which are read before anything whose meaning depends on them.
#[derive(Deserialize)]
struct Versions {
    format: u32,
    layout: u32,
}

fn parse(text: &str) -> Result<Tuning, String> {
    // Of one line, as errors are.
    let one_line = |why: toml::de::Error| {
        let line = why.span().map(|span| text[..span.start].matches('\n').count() + 1);
        line.map_or_else(String::new, |line| format!("line {line}: ")) + why.message()
    };
    let Versions { format, layout } = toml::from_str(text).map_err(one_line)?;
    if format != FORMAT {
        return Err(format!("format {format}, and this library reads {FORMAT}"));
    }
    if layout != LAYOUT_VERSION {
        return Err(format!(
            "measured with version {layout} of the Signal, and this is {LAYOUT_VERSION}: run `signal tune` again"
        ));
    }
    let file: File = toml::from_str(text).map_err(one_line)?;
    let families = [DeviceFamily::Host, DeviceFamily::Nvidia, DeviceFamily::Amd];
    let family = families.into_iter().find(|family| family_name(*family) == file.family);
    let family = family.ok_or_else(|| format!("no device family is called {:?}", file.family))?;
    let mut tuning = Tuning { family, arch: file.arch, device: file.device, tables: Vec::new() };
    for FileTable { collective, link, world, note, rows } in file.table {
        let named = |what: &str, name: &str| format!("no {what} is called {name:?}");
        let table = TuningTable {
            collective: Collective::from_name(&collective).ok_or_else(|| named("collective", &collective))?,
            link: Link::from_name(&link).ok_or_else(|| named("link", &link))?,
            world,
            note,
            rows: rows.into_iter().map(row).collect::<Result<_, _>>()?,
        };
        check(&table)?;
        if tuning.tables.iter().any(|other| other.key() == table.key()) {
            return Err(format!("two tables for {collective} of {world} ranks over {link}"));
        }
        tuning.tables.push(table);
    }
    Ok(tuning)
}

fn row(row: FileRow) -> Result<TuningRow, String> {
    let FileRow { max_bytes, algorithm, threads, units_per_thread, max_blocks, us } = row;
    let algorithm = Algorithm::from_name(&algorithm).ok_or_else(|| format!("no algorithm is called {algorithm:?}"))?;
    Ok(TuningRow { max_bytes, algorithm, threads, units_per_thread, max_blocks, us })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(max_bytes: u64, algorithm: Algorithm, blocks: u32) -> TuningRow {
        TuningRow::new(Collective::AllReduce, 2, max_bytes, Plan { algorithm, blocks, threads: 64 }, 1.5)
    }

    fn tuning() -> Tuning {
        let mut table = TuningTable::new(Collective::AllReduce, Link::NvLink, 2, "on a \"quiet\" machine".into());
        table.rows = vec![
            row(2048, Algorithm::Lamport, 2),
            row(2048, Algorithm::OneStage, 1),
            row(1 << 20, Algorithm::TwoShot, 64),
        ];
        let mut gather = TuningTable::new(Collective::AllGather, Link::NvLink, 2, String::new());
        gather.rows = vec![row(4096, Algorithm::Lines, 4)];
        let mut tuning =
            Tuning { family: DeviceFamily::Nvidia, arch: "sm_90".into(), device: "H200".into(), tables: Vec::new() };
        tuning.add(table).unwrap();
        tuning.add(gather).unwrap();
        tuning
    }

    #[test]
    fn a_file_says_what_was_written() {
        let tuning = tuning();
        let text = tuning.to_toml();
        assert_eq!(Tuning::parse(&text).unwrap(), tuning, "{text}");
    }

    #[test]
    fn rows_are_those_of_the_size() {
        let tuning = tuning();
        let found = |world, bytes| {
            let rows = tuning.rows((Collective::AllReduce, Link::NvLink, world), bytes);
            rows.iter().map(|row| row.algorithm).collect::<Vec<_>>()
        };
        use Algorithm::{Lamport, OneStage, TwoShot};
        assert_eq!(found(2, 1), [Lamport, OneStage]);
        assert_eq!(found(2, 2048), [Lamport, OneStage]);
        assert_eq!(found(2, 2049), [TwoShot]);
        assert_eq!(found(2, 1 << 21), []);
        assert_eq!(found(3, 1), []);
    }

    #[test]
    fn what_is_wrong_is_told() {
        let text = tuning().to_toml();
        let refused = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            Tuning::parse(&text.replacen(from, to, 1)).unwrap_err().to_string()
        };
        let layout = format!("layout = {LAYOUT_VERSION}");
        for (from, to, expected) in [
            ("format = 1", "format = 9", "format 9, and this library reads 1"),
            (layout.as_str(), "layout = 1", "run `signal tune` again"),
            ("\"nvidia\"", "\"intel\"", "no device family is called \"intel\""),
            ("all-reduce", "all-hands", "no collective is called \"all-hands\""),
            ("\"lamport\"", "\"lamprey\"", "no algorithm is called \"lamprey\""),
            ("\"lamport\"", "\"pull\"", "all-reduce has no pull"),
            ("\"all-gather\"", "\"send-recv\"", "send-recv has no table"),
            ("nvlink", "string", "no link is called \"string\""),
            ("world = 2", "world = 9", "world size 9"),
            ("max_bytes = 2048", "max_bytes = 4096", "max_bytes do not ascend"),
            ("\"one-stage\"", "\"lamport\"", "lamport twice for 2048 bytes"),
            ("threads = 64", "threads = 2048", "blocks of 2048 threads"),
            ("threads = 64", "threads = 0", "blocks of 0 threads"),
            ("units_per_thread = 1", "units_per_thread = 0", "above 0"),
            ("max_blocks = 2", "max_blocks = 2, colour = 3", "line 14: unknown field `colour`"),
            ("collective = \"all-gather\"", "collective = \"all-reduce\"", "two tables for all-reduce"),
            ("format = 1", "format = ", "line 2: "),
        ] {
            let found = refused(from, to);
            assert!(found.contains(expected) && !found.contains('\n'), "{from} -> {to}: {found}");
        }
        let absent = Tuning::read(Path::new("no/such/file.toml")).unwrap_err().to_string();
        assert!(absent.contains("no/such/file.toml"), "{absent}");
    }

    #[test]
    fn the_files_that_come_with_the_library_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tuning");
        let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!files.is_empty());
        for file in files {
            let tuning = Tuning::read(&file).unwrap();
            let name = format!("{}-{}", family_name(tuning.family), tuning.arch);
            assert_eq!(file.file_stem().unwrap().to_str(), Some(name.as_str()));
            assert!(!tuning.tables().is_empty());
        }
    }

    #[test]
    fn a_later_table_takes_the_place_of_an_earlier() {
        let mut tuning = tuning();
        let before = tuning.fingerprint();
        let mut table = tuning.tables[0].clone();
        table.rows.truncate(1);
        table.note = "again".to_owned();
        tuning.add(table).unwrap();
        assert_eq!((tuning.tables.len(), tuning.rows((Collective::AllReduce, Link::NvLink, 2), 5000).len()), (2, 0));
        assert_ne!(tuning.fingerprint(), before);
        let mut empty = tuning.tables[0].clone();
        empty.rows.clear();
        assert!(tuning.add(empty).is_err());
    }

    #[test]
    fn ranks_compare_plans_and_not_remarks() {
        let (one, mut other) = (tuning(), tuning());
        other.tables.reverse();
        other.tables[0].note = "elsewhere".to_owned();
        other.tables[0].rows[0].us = 9.0;
        other.device = "another".to_owned();
        assert_eq!(one.fingerprint(), other.fingerprint());
        other.tables[0].rows[0].max_blocks += 1;
        assert_ne!(one.fingerprint(), other.fingerprint());
    }
}
