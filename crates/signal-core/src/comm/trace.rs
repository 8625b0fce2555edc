//! A timeline of calls ([`Settings::trace`](crate::Settings::trace)).
//!
//! Before each call its ranks meet in a kernel that notes when each of them was ready, and behind it another notes when it had ended
//! (`kernels/signal/trace.h`); the call itself is the same as ever. The notes lie on the device, so that replays of graphs make them too. They are fetched
//! when the host waits for a stream and when the communicator is dropped, and appended to the file as events of the Chrome trace format, whole lines at a
//! time: so ranks, communicators and processes share one file, and what they have written outlives them.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytemuck::{Zeroable, bytes_of, cast_slice_mut};

use crate::backend::{Backend, Launch, MemoryKind};
use crate::error::{ApiMisuse, Result};
use crate::kernel::{FLAG_ALLOW_NEXT, Kernel, TraceParams, TraceRecord};

use super::call::{ALL_RANKS, CallOptions};
use super::check::Description;
use super::group::lock;
use super::member::Member;

/// Calls of a domain that the device keeps until they are fetched.
const CAPACITY: u32 = 16_384;
/// Of the count, so that records are where the device likes them.
const HEADER: usize = 256;
const RING_BYTES: usize = HEADER + CAPACITY as usize * size_of::<TraceRecord>();
/// Waits of the host that come more often fetch nothing.
const INTERVAL: Duration = Duration::from_millis(100);
/// Looks at both clocks; the quickest counts.
const LOOKS: usize = 5;
/// Text that is kept back before it is written.
const MOST_TEXT: usize = 64 << 10;

/// The timeline of one rank.
#[derive(Debug)]
pub(super) struct Tracer<B: Backend> {
    clock: Clock,
    /// By domain: the count of calls, and records.
    rings: Vec<B::Buffer>,
    tracks: Tracks,
    notes: Mutex<Notes>,
}

/// What the host knows.
#[derive(Debug)]
struct Notes {
    /// By number.
    calls: Vec<Note>,
    /// By domain: records that have been fetched.
    fetched: Vec<u64>,
    text: String,
    /// Gone once it could not be written.
    file: Option<File>,
    last: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Note {
    /// Nothing is said of a probe.
    description: Option<Description>,
    partners: u32,
}

/// Lines of the timeline: one for the host, one for each domain, one for the waits for each rank.
#[derive(Clone, Copy, Debug)]
struct Tracks {
    first: u32,
    domains: u32,
}

impl Tracks {
    fn host(self) -> u32 {
        self.first
    }
    fn device(self, domain: usize) -> u32 {
        self.first + 1 + domain as u32
    }
    fn peer(self, rank: usize) -> u32 {
        self.first + 1 + self.domains + rank as u32
    }
}

/// Which microsecond since 1970 a tick of the device is.
#[derive(Clone, Copy, Debug)]
struct Clock {
    ticks: u64,
    us: f64,
    us_a_tick: f64,
}

impl Clock {
    fn at(self, ticks: u64) -> f64 {
        self.us + ticks.wrapping_sub(self.ticks).cast_signed() as f64 * self.us_a_tick
    }
}

/// Microseconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

/// A call that is being enqueued.
#[derive(Debug)]
pub(super) struct Begun {
    number: u64,
    partners: u32,
    us: f64,
}

impl<B: Backend> Tracer<B> {
    /// Of a rank whose communicator is being made.
    pub(super) fn new(member: &Member<B>, path: &Path) -> Result<Self> {
        let (device, service) = (member.device(), &member.own.service);
        let domains = member.shares() as usize;
        let allocate = |_| B::allocate(device, RING_BYTES, MemoryKind::Device);
        let rings = (0..domains).map(allocate).collect::<Result<Vec<_>>>()?;
        for ring in &rings {
            B::fill(service, ring, 0, RING_BYTES, 0)?;
        }
        let clock = look_at_clocks(member, &rings[0])?;
        // Back to what the looks found.
        B::fill(service, &rings[0], 0, RING_BYTES, 0)?;
        B::synchronize(service)?;
        let world = member.world_size();
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // Relaxed: a number that nobody else gets.
        let first = NEXT.fetch_add((1 + domains + world) as u32, Ordering::Relaxed);
        let tracks = Tracks { first, domains: domains as u32 };
        let file = open(path).map_err(|why| {
            let value = path.display().to_string();
            ApiMisuse::Setting { name: "SIGNAL_TRACE", value, why: why.to_string() }
        })?;
        let mut notes = Notes {
            calls: Vec::new(),
            fetched: vec![0; domains],
            text: String::new(),
            file: Some(file),
            last: Instant::now(),
        };
        notes.name_tracks(tracks, (member.rank, world), B::NAME);
        notes.write();
        Ok(Tracer { clock, rings, tracks, notes: Mutex::new(notes) })
    }

    /// Enqueues the meeting before a call.
    pub(super) fn begin(
        &self,
        member: &Member<B>,
        stream: &B::Stream,
        domain: u32,
        partners: u32,
        description: Option<Description>,
    ) -> Result<Begun> {
        let us = now();
        let partners = partners & ((1 << member.world_size()) - 1);
        let number = {
            let mut notes = lock(&self.notes);
            notes.calls.push(Note { description, partners });
            notes.calls.len() as u64 - 1
        };
        let begun = Begun { number, partners, us };
        self.stamp(member, stream, domain, &begun, false)?;
        Ok(begun)
    }

    /// Enqueues the note behind it.
    pub(super) fn end(&self, member: &Member<B>, stream: &B::Stream, domain: u32, begun: &Begun) -> Result<()> {
        self.stamp(member, stream, domain, begun, true)?;
        let captured = B::is_capturing(stream)?;
        let mut notes = lock(&self.notes);
        let name = notes.name_of(begun.number);
        let verb = if captured { "capture" } else { "enqueue" };
        let args = format!("\"call\":{}", begun.number);
        notes.event(&format!("{verb} {name}"), self.tracks.host(), (begun.us, now()), &args);
        if notes.text.len() > MOST_TEXT {
            notes.write();
        }
        Ok(())
    }

    fn stamp(&self, member: &Member<B>, stream: &B::Stream, domain: u32, begun: &Begun, is_end: bool) -> Result<()> {
        stamp(member, stream, &self.rings[domain as usize], domain, begun, is_end)
    }

    /// Fetches and writes what the device has noted, unless that was done a moment ago. `quiet`: no call of this rank is under way.
    pub(super) fn fetch(&self, member: &Member<B>, quiet: bool) -> Result<()> {
        let mut notes = lock(&self.notes);
        if !quiet && notes.last.elapsed() < INTERVAL {
            return Ok(());
        }
        notes.last = Instant::now();
        for (domain, ring) in self.rings.iter().enumerate() {
            let mut count = 0u64;
            B::download(&member.own.service, ring, 0, bytemuck::bytes_of_mut(&mut count))?;
            // The last one may still be under way.
            let end = if quiet { count } else { count.saturating_sub(1) };
            let oldest = count.saturating_sub(u64::from(CAPACITY));
            let begin = notes.fetched[domain].max(oldest);
            if oldest > notes.fetched[domain] {
                let lost = oldest - notes.fetched[domain];
                let at = now();
                notes.event(&format!("{lost} calls lost"), self.tracks.device(domain), (at, at), "");
            }
            for record in self.records(member, ring, begin, end)? {
                self.tell(&mut notes, domain, member.rank, &record);
            }
            notes.fetched[domain] = end.max(notes.fetched[domain]);
        }
        notes.write();
        Ok(())
    }

    fn records(&self, member: &Member<B>, ring: &B::Buffer, begin: u64, end: u64) -> Result<Vec<TraceRecord>> {
        let mut records = vec![TraceRecord::zeroed(); end.saturating_sub(begin) as usize];
        let first = (begin % u64::from(CAPACITY)) as usize;
        let straight = records.len().min(CAPACITY as usize - first);
        let (straight, wrapped) = records.split_at_mut(straight);
        for (part, from) in [(straight, first), (wrapped, 0)] {
            if !part.is_empty() {
                let offset = HEADER + from * size_of::<TraceRecord>();
                B::download(&member.own.service, ring, offset, cast_slice_mut(part))?;
            }
        }
        Ok(records)
    }

    /// The events of one call: the call, and the wait for each peer.
    fn tell(&self, notes: &mut Notes, domain: usize, rank: usize, record: &TraceRecord) {
        let Some(note) = notes.calls.get(record.call as usize).copied() else { return };
        let name = notes.name_of(record.call);
        let at = |ticks| self.clock.at(ticks);
        let args = format!("\"call\":{}", record.call);
        // A call that a fault has ended has no end.
        let ended = if record.ended == 0 { record.began } else { record.ended };
        notes.event(&name, self.tracks.device(domain), (at(record.began), at(ended)), &args);
        let peers = (0..record.seen.len()).filter(|peer| *peer != rank && note.partners >> peer & 1 != 0);
        for peer in peers {
            let name = format!("wait for rank {peer}");
            notes.event(&name, self.tracks.peer(peer), (at(record.ready), at(record.seen[peer])), &args);
        }
    }
}

impl Notes {
    fn name_of(&self, number: u64) -> String {
        let description = self.calls.get(number as usize).and_then(|note| note.description);
        // "an all-reduce of ..." without its article.
        let name = description.map_or_else(|| "a call".to_owned(), |description| description.to_string());
        name.split_once(' ').map_or(name.clone(), |(_, name)| name.to_owned())
    }

    fn name_tracks(&mut self, tracks: Tracks, (rank, world): (usize, usize), backend: &str) {
        let of = format!("rank {rank} of {world}");
        let mut names = vec![(tracks.host(), format!("{of}: host"))];
        for domain in 0..tracks.domains as usize {
            let name =
                if tracks.domains == 1 { format!("{of}: device") } else { format!("{of}: device, domain {domain}") };
            names.push((tracks.device(domain), name));
        }
        let peers = (0..world).filter(|peer| *peer != rank);
        names.extend(peers.map(|peer| (tracks.peer(peer), format!("{of}: waits for rank {peer}"))));
        let process = std::process::id();
        self.text += &format!(
            "{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{process},\"args\":{{\"name\":\"{backend} process {process}\"}}}},\n"
        );
        for (track, name) in names {
            self.text += &format!(
                "{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{process},\"tid\":{track},\"args\":{{\"name\":\"{name}\"}}}},\n\
                 {{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":{process},\"tid\":{track},\"args\":{{\"sort_index\":{track}}}}},\n"
            );
        }
    }

    /// A span of time on a track. Names are made of nothing that JSON would have to escape.
    fn event(&mut self, name: &str, track: u32, (from, to): (f64, f64), args: &str) {
        let (process, duration) = (std::process::id(), (to - from).max(0.0));
        self.text += &format!(
            "{{\"name\":\"{name}\",\"ph\":\"X\",\"ts\":{from:.3},\"dur\":{duration:.3},\"pid\":{process},\"tid\":{track},\"args\":{{{args}}}}},\n"
        );
    }

    /// A timeline that cannot be written keeps no call from being made.
    fn write(&mut self) {
        let text = std::mem::take(&mut self.text);
        if let Some(file) = &mut self.file
            && let Err(why) = file.write_all(text.as_bytes())
        {
            tracing::warn!(%why, "the trace ends here: its file cannot be written");
            self.file = None;
        }
    }
}

/// The file, which whoever makes it begins.
fn open(path: &Path) -> std::io::Result<File> {
    match OpenOptions::new().append(true).create_new(true).open(path) {
        Ok(mut file) => file.write_all(b"[\n").map(|()| file),
        Err(why) if why.kind() == ErrorKind::AlreadyExists => OpenOptions::new().append(true).open(path),
        Err(why) => Err(why),
    }
}

/// Launches one of the two kernels around a call.
fn stamp<B: Backend>(
    member: &Member<B>,
    stream: &B::Stream,
    ring: &B::Buffer,
    domain: u32,
    begun: &Begun,
    is_end: bool,
) -> Result<()> {
    let (grid, threads) = (1, member.group.whole_wave(1));
    let early = member.allows_early(grid, threads);
    let mut group = member.group_params(domain);
    group.flags |= if early { FLAG_ALLOW_NEXT } else { 0 };
    let params = TraceParams {
        group,
        count: B::address(ring),
        records: B::address(ring) + HEADER as u64,
        call: begun.number,
        capacity: CAPACITY,
        partners: begun.partners,
        is_end: u32::from(is_end),
        reserved: 0,
    };
    let mut uses = member.group_memory();
    uses.extend([ring]);
    let params = bytes_of(&params);
    let launch = Launch { kernel: Kernel::Trace.into(), grid, threads, params, early, uses: uses.as_slice() };
    // SAFETY: the parameters are the kernel's; the ring holds a count and as many records as they say, is in the list, and is touched by the kernels of
    // this rank's domain alone, which are in order.
    unsafe { B::launch(stream, &member.own.module, &launch) }
}

/// The device's clock beside the host's.
fn look_at_clocks<B: Backend>(member: &Member<B>, ring: &B::Buffer) -> Result<Clock> {
    let service = &member.own.service;
    B::fill(service, ring, 0, 4, 1)?; // so that the end of a record 0 is noted
    let begun = Begun { number: 0, partners: ALL_RANKS, us: 0.0 };
    let mut best: Option<(f64, Clock)> = None;
    for _ in 0..LOOKS {
        B::synchronize(service)?;
        let before = now();
        stamp(member, service, ring, 0, &begun, true)?;
        B::synchronize(service)?;
        let after = now();
        let mut record = TraceRecord::zeroed();
        B::download(service, ring, HEADER, bytemuck::bytes_of_mut(&mut record))?;
        let us_a_tick = 1e6 / B::describe(member.device()).clock_hz as f64;
        let clock = Clock { ticks: record.ended, us: (before + after) / 2.0, us_a_tick };
        if best.is_none_or(|(took, _)| after - before < took) {
            best = Some((after - before, clock));
        }
    }
    Ok(best.map_or(Clock { ticks: 0, us: now(), us_a_tick: 1.0 }, |(_, clock)| clock))
}

/// Around one launch: nothing where nobody wants a timeline.
pub(super) fn around<B: Backend>(
    member: &Member<B>,
    stream: &B::Stream,
    options: &CallOptions,
    (partners, description): (u32, Option<Description>),
    launch: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Some(tracer) = &member.tracer else { return launch() };
    let begun = tracer.begin(member, stream, options.domain, partners, description)?;
    launch()?;
    tracer.end(member, stream, options.domain, &begun)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_before_and_behind_the_look_are_times() {
        let clock = Clock { ticks: 1000, us: 5e6, us_a_tick: 0.01 };
        assert_eq!([0, 1000, 1100].map(|ticks| clock.at(ticks)), [5e6 - 10.0, 5e6, 5e6 + 1.0]);
    }

    #[test]
    fn the_first_to_open_a_file_begins_it() {
        let path = std::env::temp_dir().join(format!("signal-trace-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        open(&path).unwrap().write_all(b"1,\n").unwrap();
        open(&path).unwrap().write_all(b"2,\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "[\n1,\n2,\n");
        std::fs::remove_file(&path).unwrap();
        assert!(open(Path::new("no/such/folder/trace.json")).is_err());
    }
}
