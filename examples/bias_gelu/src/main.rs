//! A kernel of one's own behind a collective: `bias_gelu.cu` fuses all-reduce, bias and GELU.
//!
//! ```text
//! cargo run --release -p bias-gelu -- --backend host
//! cargo run --release -p bias-gelu --features cuda -- --backend cuda [--ranks N] [--share-devices]
//! ```
//!
//! Every element of every rank's output is compared, bit by bit, with the same arithmetic on one CPU: for one element and for as many as the Lamport
//! region takes, eagerly and in graphs, between the library's own calls. At last a rank stays away, and the error names it.

#![cfg_attr(
    not(any(feature = "host", feature = "cuda", feature = "rocm")),
    allow(
        dead_code,
        unused_assignments,
        unused_variables,
        unused_mut,
        reason = "without a backend only errors are left to report"
    )
)]

use std::env;
use std::error::Error as StdError;
use std::process::ExitCode;
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use half::bf16;
use signal_comm::kernel::GroupParams;
use signal_comm::layout::most_lamport_bytes;
use signal_comm::{
    Backend, CallOptions, Communicator, DeviceBuffer, DeviceFamily, Error, ReduceOp, Settings, UserKernel, UserLaunch,
};

type Result<T> = std::result::Result<T, Box<dyn StdError>>;

const USAGE: &str = "usage: bias-gelu [--backend host|cuda|rocm] [--ranks 1..8] [--share-devices]";
/// Elements of the bias: whole packs.
const COLUMNS: usize = 1024;

/// As in `bias_gelu.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    group: GroupParams,
    input: u64,
    bias: u64,
    output: u64,
    bytes: u64,
    bias_bytes: u64,
}

fn main() -> ExitCode {
    match choose() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn choose() -> Result<()> {
    let (mut backend, mut ranks, mut share) = ("host".to_owned(), 2, false);
    let mut arguments = env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value; {USAGE}"));
        match argument.as_str() {
            "--backend" => backend = value()?,
            "--ranks" => ranks = value()?.parse()?,
            "--share-devices" => share = true,
            _ => return Err(format!("unknown option {argument}; {USAGE}").into()),
        }
    }
    match backend.as_str() {
        #[cfg(feature = "host")]
        "host" => run(&signal_comm::host::open()?, host_image()?, ranks, share),
        #[cfg(feature = "cuda")]
        "cuda" => {
            run(&signal_comm::cuda::open()?, include_bytes!(concat!(env!("OUT_DIR"), "/bias_gelu.cuda")), ranks, share)
        }
        #[cfg(feature = "rocm")]
        "rocm" => {
            run(&signal_comm::rocm::open()?, include_bytes!(concat!(env!("OUT_DIR"), "/bias_gelu.hip")), ranks, share)
        }
        name => Err(format!("this build has no backend {name}; {USAGE}").into()),
    }
}

/// The table of kernels that `SIGNAL_IMAGE` makes.
#[cfg(feature = "host")]
fn host_image() -> Result<&'static signal_comm::host::HostImageTable> {
    #[cfg(host_kernel)]
    {
        unsafe extern "C" {
            safe static bias_gelu_image: signal_comm::host::HostImageTable;
        }
        Ok(&bias_gelu_image)
    }
    #[cfg(not(host_kernel))]
    Err("this build had no C++ compiler".into())
}

/// One rank: its communicator, and what its calls use.
struct Rank<B: Backend> {
    comm: Communicator<B>,
    stream: B::Stream,
    kernel: UserKernel<B>,
    input: DeviceBuffer<B, bf16>,
    bias: DeviceBuffer<B, bf16>,
    output: DeviceBuffer<B, bf16>,
}

impl<B: Backend> Rank<B> {
    /// Enqueues GELU(sum of `count` elements + bias).
    fn bias_gelu(&mut self, count: usize) -> signal_comm::Result<()> {
        let bytes = (count * size_of::<bf16>()) as u64;
        let packs = bytes.div_ceil(16) as u32;
        let threads = if B::describe(self.comm.device()).family == DeviceFamily::Host { 1 } else { 256 };
        let blocks = packs.div_ceil(threads).clamp(1, 64).min(self.comm.most_blocks(&self.kernel, threads));
        let (input, bias, output) = (self.input.address(), self.bias.address(), self.output.address());
        let params =
            |group| Params { group, input, bias, output, bytes, bias_bytes: (COLUMNS * size_of::<bf16>()) as u64 };
        let uses = [self.input.memory(), self.bias.memory(), self.output.memory()];
        let launch = UserLaunch::new(blocks, threads).lamport(bytes);
        // SAFETY: `Params` mirrors the kernel's struct. The kernel keeps to the header's rules; all ranks launch it with the same count, and so with the
        // same grid on equal devices. It reads and writes `count` elements of the buffers, which have as many and are in the list;
        // nothing else uses them meanwhile.
        unsafe {
            self.comm.with(CallOptions::default()).launch_kernel(&self.stream, &self.kernel, launch, params, uses)
        }
    }
}

fn run<B: Backend>(backend: &B, image: &B::Image, ranks: usize, share: bool) -> Result<()> {
    let devices: Vec<_> = backend.devices()?.into_iter().cycle().take(ranks).collect();
    let group = |settings: Settings, count: usize| -> Result<Vec<Rank<B>>> {
        let comms = Communicator::<B>::builder().settings(settings).share_devices(share).all_local(&devices)?;
        let rank = |comm: Communicator<B>| {
            let device = comm.device().clone();
            let [kernel] = UserKernel::load(&device, image, ["bias_gelu_bf16"])?;
            let buffer = |len| DeviceBuffer::<B, bf16>::new(&device, len);
            let stream = B::create_stream(&device)?;
            let (input, mut bias, output) = (buffer(count)?, buffer(COLUMNS)?, buffer(count)?);
            bias.write(&stream, &random(0, COLUMNS))?;
            Ok(Rank { comm, stream, kernel, input, bias, output })
        };
        comms.into_iter().map(rank).collect()
    };
    let most = most_lamport_bytes(ranks) / size_of::<bf16>();
    for (round, count) in [1, 7, 8, 1000, 4099, 65_536, most - 3, most].into_iter().enumerate() {
        let mut all = group(Settings::from_env()?, count)?;
        check(&mut all, round as u64, count, Rank::bias_gelu)?;
        if round == 0 {
            println!("{} ranks on {}, kernel from {}", ranks, B::NAME, all[0].kernel.code());
        }
    }
    println!("calls of 1 to {most} elements: every bit right on every rank");
    graphs(&mut group(Settings::from_env()?, 5000)?)?;
    if ranks > 1 {
        let mut settings = Settings::from_env()?;
        settings.timeout = Duration::from_secs(1);
        missing_rank(&mut group(settings, 1000)?)?;
    }
    Ok(())
}

/// New inputs, a call on each rank, and every bit of the outputs.
fn check<B: Backend>(
    all: &mut [Rank<B>],
    seed: u64,
    count: usize,
    mut call: impl FnMut(&mut Rank<B>, usize) -> signal_comm::Result<()>,
) -> Result<()> {
    let inputs: Vec<Vec<bf16>> = (0..all.len()).map(|rank| random(1 + seed * 8 + rank as u64, count)).collect();
    for (rank, input) in all.iter_mut().zip(&inputs) {
        rank.input.write(&rank.stream, input)?;
        call(rank, count)?;
    }
    let bias: Vec<bf16> = random(0, COLUMNS);
    let expected = |i: usize| {
        let sum = inputs.iter().fold(0.0f32, |sum, input| sum + input[i].to_f32());
        bf16::from_f32(gelu(sum + bias[i % COLUMNS].to_f32()))
    };
    let expected: Vec<bf16> = (0..count).map(expected).collect();
    for (number, rank) in all.iter().enumerate() {
        rank.comm.wait(&rank.stream)?;
        let found = rank.output.read(&rank.stream)?;
        if let Some(i) = (0..count).find(|&i| found[i].to_bits() != expected[i].to_bits()) {
            return Err(format!("rank {number}, element {i} of {count}: {}, not {}", found[i], expected[i]).into());
        }
    }
    Ok(())
}

/// The kernel in graphs, with new inputs for each replay, and between the library's own calls of the same region.
fn graphs<B: Backend>(all: &mut [Rank<B>]) -> Result<()> {
    let mut graphs = Vec::new();
    for rank in &mut *all {
        B::synchronize(&rank.stream)?;
        B::begin_capture(&rank.stream)?;
        rank.comm.all_reduce(&rank.stream, &rank.bias, rank.output.slice_mut(..COLUMNS)?, ReduceOp::Sum)?;
        rank.bias_gelu(5000)?;
        graphs.push(B::end_capture(&rank.stream)?);
    }
    for replay in 0..20 {
        let mut next = graphs.iter();
        check(all, 100 + replay, 5000, |rank, _| next.next().map_or(Ok(()), |graph| B::replay(graph, &rank.stream)))?;
        check(all, 200 + replay, 5000, |rank, count| {
            rank.comm.all_reduce(&rank.stream, &rank.bias, rank.output.slice_mut(..COLUMNS)?, ReduceOp::Sum)?;
            rank.bias_gelu(count)
        })?;
    }
    println!("20 replays of graphs, and calls between all-reduces: every bit right on every rank");
    Ok(())
}

/// The last rank does not come: every other ends with an error that names it. Then all recover.
fn missing_rank<B: Backend>(all: &mut [Rank<B>]) -> Result<()> {
    let last = all.len() - 1;
    // In checked mode the comparison of the calls waits for it.
    let operations = ["user's kernel", "check of a call"];
    for rank in &mut all[..last] {
        rank.bias_gelu(1000)?;
    }
    for rank in &all[..last] {
        match rank.comm.wait(&rank.stream) {
            Err(Error::Timeout(why)) if why.missing == [last] && operations.contains(&why.operation) => {
                println!("{why}")
            }
            other => return Err(format!("rank {last} was missing, and the end was {other:?}").into()),
        }
    }
    // Each on a thread of its own, since all meet.
    let recovered: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = all.iter_mut().map(|rank| scope.spawn(|| rank.comm.recover())).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    for result in recovered {
        result.map_err(|_| "a thread died")??;
    }
    check(all, 300, 1000, Rank::bias_gelu)?;
    println!("all ranks recovered, and the next call is right");
    Ok(())
}

/// Numbers from -4 to 4.
fn random(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        // Xorshift; its upper bits.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1 << 21) as f32 - 4.0)
    };
    (0..count).map(next).collect()
}

/// As in `bias_gelu.cu`, operation by operation.
fn exponential(x: f32) -> f32 {
    let t = x * std::f32::consts::LOG2_E;
    let n = (t + if t < 0.0 { -0.5 } else { 0.5 }) as i32;
    let r = (x - n as f32 * 0.693_359_4) + n as f32 * 2.121_944_4e-4;
    let mut y = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        y = y * r + coefficient;
    }
    (y * (r * r) + r + 1.0) * f32::from_bits(((n + 127) as u32) << 23)
}

fn gelu(x: f32) -> f32 {
    let v = 1.595_769_2 * (x + 0.044_715 * (x * x * x));
    match v {
        v if v > 80.0 => x,
        v if v < -80.0 => 0.0,
        v => x / (1.0 + exponential(-v)),
    }
}
