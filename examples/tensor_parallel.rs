//! Tensor-parallel inference on real weights: the six BERT layers of all-MiniLM-L6-v2, split over the ranks.
//!
//! ```text
//! cargo run --release --example tensor_parallel -- --backend host --ranks 4 [PATH]
//! ```
//!
//! Every rank owns `heads / ranks` attention heads and `intermediate / ranks` rows of the MLP, the split of Megatron-LM
//! (Shoeybi et al. 2019): `q`, `k`, `v` and `up` are cut by output, `o` and `down` by input. So the ranks work alone
//! until the outputs of `o` and `down`, which are partial sums; an all-reduce adds them, twice a layer. The shards are
//! computed on the CPU, because the point here is the communicator and not the matrix product: what travels is what
//! an inference engine would send.
//!
//! The result is compared with references computed in f64. All ranks must hold the same bits.

#![cfg_attr(
    not(any(feature = "host", feature = "cuda")),
    allow(dead_code, reason = "without a backend that runs collectives only errors are left to report")
)]

use std::env;
use std::error::Error as StdError;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;

use half::f16;
use safetensors::{Dtype as TensorDtype, SafeTensors};
use signal_comm::{AbortHandle, Backend, Communicator, DeviceBuffer, Error, ReduceOp};

type Result<T> = std::result::Result<T, Box<dyn StdError + Send + Sync>>;

/// World sizes that divide both the 12 heads and the 1536 rows of the MLP, up to the library's limit of 8.
const WORLD_SIZES: [usize; 5] = [1, 2, 3, 4, 6];
/// Largest difference between an embedding's element and its reference. The elements are about 0.05.
const TOLERANCE: f64 = 1e-3;
const FIXTURE: &str = "minilm_l6_f16.safetensors";
const USAGE: &str = "usage: tensor_parallel [--backend host|cuda|rocm] [--ranks 1|2|3|4|6] [--share-devices] [PATH]";

fn main() -> ExitCode {
    match Options::parse(env::args().skip(1)).and_then(|options| options.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The command line.
struct Options {
    backend: String,
    ranks: usize,
    share_devices: bool,
    path: Option<PathBuf>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Options { backend: "host".into(), ranks: 2, share_devices: false, path: None };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value; {USAGE}"));
            match argument.as_str() {
                "--backend" => options.backend = value()?,
                "--ranks" => {
                    let text = value()?;
                    options.ranks = text.parse().map_err(|_| format!("--ranks {text} is not a number; {USAGE}"))?;
                }
                "--share-devices" => options.share_devices = true,
                flag if flag.starts_with('-') => return Err(format!("unknown option {flag}; {USAGE}").into()),
                _ if options.path.is_some() => return Err(format!("more than one path; {USAGE}").into()),
                path => options.path = Some(path.into()),
            }
        }
        if !WORLD_SIZES.contains(&options.ranks) {
            let ranks = options.ranks;
            return Err(format!(
                "{ranks} ranks cannot share 12 attention heads and 1536 MLP rows evenly: use one of {WORLD_SIZES:?}"
            )
            .into());
        }
        Ok(options)
    }

    /// Chooses the backend; everything behind [`run`] is generic over it.
    fn run(&self) -> Result<()> {
        match self.backend.as_str() {
            #[cfg(feature = "host")]
            "host" => run(&signal_comm::host::open()?, self),
            #[cfg(feature = "cuda")]
            "cuda" => run(&signal_comm::cuda::open()?, self),
            #[cfg(feature = "rocm")]
            "rocm" => unfinished(signal_comm::rocm::open()),
            name if ["host", "cuda", "rocm"].contains(&name) => {
                Err(format!("this build has no backend {name}; build with `--features {name}`").into())
            }
            name => Err(format!("unknown backend {name}; {USAGE}").into()),
        }
    }

    /// The fixture: the argument, else `$SIGNAL_FIXTURES` (a file or its directory), else `../shared/data`.
    fn fixture(&self) -> Result<PathBuf> {
        let place = match (&self.path, env::var_os("SIGNAL_FIXTURES")) {
            (Some(path), _) => path.clone(),
            (None, Some(fixtures)) => fixtures.into(),
            (None, None) => Path::new("..").join("shared").join("data"),
        };
        let path = if place.is_dir() { place.join(FIXTURE) } else { place };
        if path.is_file() {
            return Ok(path);
        }
        Err(format!(
            "{} does not exist; tests/fixtures/make_minilm.py makes it: then give its path as an argument or in $SIGNAL_FIXTURES",
            path.display()
        )
        .into())
    }
}

/// Why a backend that cannot run collectives yet cannot be used: opening it finds what is missing besides.
#[cfg(feature = "rocm")]
fn unfinished<T>(opened: signal_comm::Result<T>) -> Result<()> {
    opened?;
    Err("this version runs no collectives on this backend".into())
}

/// Runs all sentences on one thread a rank and compares the results.
fn run<B: Backend>(backend: &B, options: &Options) -> Result<()> {
    let path = options.fixture()?;
    let bytes = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let fixture = Fixture::parse(&bytes).map_err(|error| format!("{}: {error}", path.display()))?;
    if fixture.heads % options.ranks != 0 || fixture.intermediate % options.ranks != 0 {
        let (ranks, heads, rows) = (options.ranks, fixture.heads, fixture.intermediate);
        return Err(format!("{ranks} ranks cannot share this file's {heads} heads and {rows} MLP rows evenly").into());
    }

    let available = backend.devices()?;
    if available.len() < options.ranks && !options.share_devices {
        let (ranks, found, name) = (options.ranks, available.len(), B::NAME);
        return Err(format!("{ranks} ranks need {ranks} devices, {name} has {found} (see --share-devices)").into());
    }
    let devices: Vec<B::Device> = available.iter().cycle().take(options.ranks).cloned().collect();
    let communicators = Communicator::<B>::builder().share_devices(options.share_devices).all_local(&devices)?;
    // A rank that fails would leave its peers waiting for their deadline: it aborts them instead.
    let aborts: Vec<AbortHandle<B>> = communicators.iter().map(Communicator::abort_handle).collect();

    let results: Vec<Result<Vec<Vec<f32>>>> = thread::scope(|scope| {
        let (fixture, aborts) = (&fixture, &aborts);
        let spawn = |communicator| {
            scope.spawn(move || {
                let result = run_rank(communicator, fixture);
                if result.is_err() {
                    // A rank that cannot be told runs into its deadline.
                    let _: Vec<_> = aborts.iter().map(AbortHandle::abort).collect();
                }
                result
            })
        };
        let threads: Vec<_> = communicators.into_iter().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a rank's thread died".into()))).collect()
    });
    let by_rank = all_or_cause(results)?;
    report::<B>(&fixture, &by_rank)
}

/// The results of all ranks, or the error that made the others abort.
fn all_or_cause<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    let mut values = Vec::new();
    let mut cause: Option<Box<dyn StdError + Send + Sync>> = None;
    let is_echo = |error: &Error| matches!(error, Error::Aborted { .. } | Error::Poisoned { .. });
    for result in results {
        match result {
            Ok(value) => values.push(value),
            Err(error) => {
                if cause.as_ref().is_none_or(|cause| cause.downcast_ref().is_some_and(is_echo)) {
                    cause = Some(error);
                }
            }
        }
    }
    cause.map_or(Ok(values), Err)
}

/// Prints each sentence's error. An error if one is too large or if the ranks disagree.
fn report<B: Backend>(fixture: &Fixture<'_>, by_rank: &[Vec<Vec<f32>>]) -> Result<()> {
    println!(
        "{} ranks on {}, {} layers, {} all-reduces a sentence",
        by_rank.len(),
        B::NAME,
        fixture.layers,
        2 * fixture.layers
    );
    println!("{:>6} {:>10} {:>10} {:>12}  text", "tokens", "max error", "cosine", "hidden error");
    let mut worst = 0.0f64;
    for (index, text) in fixture.texts.iter().enumerate() {
        let hidden = &by_rank[0][index];
        if let Some(rank) = by_rank.iter().position(|other| !same_bits(&other[index], hidden)) {
            return Err(format!("sentence {index}: rank {rank} holds other bits than rank 0").into());
        }
        let tokens = hidden.len() / fixture.hidden;
        let embedding = embed(hidden, fixture.hidden);
        let wanted = fixture.tensor(&format!("embedding{index}"), &[fixture.hidden])?;
        let wanted_hidden = fixture.tensor(&format!("output{index}"), &[tokens, fixture.hidden])?;
        let error = max_error(&embedding, &wanted);
        let (cosine, hidden_error) = (cosine(&embedding, &wanted), max_error(hidden, &wanted_hidden));
        println!("{tokens:>6} {error:>10.2e} {cosine:>10.7} {hidden_error:>12.2e}  {text}");
        worst = worst.max(error);
    }
    if worst > TOLERANCE {
        return Err(format!("the largest embedding error is {worst:.2e}, above {TOLERANCE:.0e}").into());
    }
    println!("largest embedding error {worst:.2e}, at most {TOLERANCE:.0e} is allowed; all ranks hold the same bits");
    Ok(())
}

/// One rank's work: the hidden states after the last layer, for each sentence.
fn run_rank<B: Backend>(mut communicator: Communicator<B>, fixture: &Fixture<'_>) -> Result<Vec<Vec<f32>>> {
    let stream = B::create_stream(communicator.device())?;
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let layers = (0..fixture.layers).map(|l| Layer::load(fixture, l, rank, world)).collect::<Result<Vec<_>>>()?;

    let mut outputs = Vec::new();
    for index in 0..fixture.texts.len() {
        let mut x = fixture.input(index)?;
        // Symmetric memory: peers read the partial sums where they are. Every rank makes the same allocations.
        let mut partial: DeviceBuffer<B, f32> = communicator.alloc(x.len())?;
        let mut total: DeviceBuffer<B, f32> = communicator.alloc(x.len())?;
        let mut all_reduce = |values: &[f32]| -> Result<Vec<f32>> {
            partial.write(&stream, values)?;
            communicator.all_reduce(&stream, &partial, &mut total, ReduceOp::Sum)?;
            let sum = total.read(&stream)?;
            communicator.status()?;
            Ok(sum)
        };
        for layer in &layers {
            let attention = all_reduce(&layer.attention(&x))?;
            x = layer.norm1.apply(&x, &attention, &layer.o.bias);
            let mlp = all_reduce(&layer.mlp(&x))?;
            x = layer.norm2.apply(&x, &mlp, &layer.down.bias);
        }
        outputs.push(x);
    }
    Ok(outputs)
}

/// One rank's shard of one layer.
struct Layer {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    norm1: LayerNorm,
    up: Linear,
    down: Linear,
    norm2: LayerNorm,
    head_dim: usize,
}

impl Layer {
    fn load(fixture: &Fixture<'_>, layer: usize, rank: usize, world: usize) -> Result<Self> {
        let (hidden, intermediate) = (fixture.hidden, fixture.intermediate);
        let head_dim = hidden / fixture.heads;
        let heads = shard(fixture.heads, rank, world);
        let heads = heads.start * head_dim..heads.end * head_dim;
        let rows = shard(intermediate, rank, world);
        let name = |part: &str| format!("layer{layer}.{part}");
        Ok(Layer {
            q: Linear::by_output(fixture, &name("q"), [hidden, hidden], heads.clone())?,
            k: Linear::by_output(fixture, &name("k"), [hidden, hidden], heads.clone())?,
            v: Linear::by_output(fixture, &name("v"), [hidden, hidden], heads.clone())?,
            o: Linear::by_input(fixture, &name("o"), [hidden, hidden], heads)?,
            norm1: LayerNorm::load(fixture, &name("ln1"))?,
            up: Linear::by_output(fixture, &name("up"), [intermediate, hidden], rows.clone())?,
            down: Linear::by_input(fixture, &name("down"), [hidden, intermediate], rows)?,
            norm2: LayerNorm::load(fixture, &name("ln2"))?,
            head_dim,
        })
    }

    /// This rank's heads, projected: a partial sum, without the bias of `o`.
    fn attention(&self, x: &[f32]) -> Vec<f32> {
        let (q, k, v) = (self.q.with_bias(x), self.k.with_bias(x), self.v.with_bias(x));
        let width = self.q.outputs;
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let mut context = vec![0.0; q.len()];
        for head in (0..width).step_by(self.head_dim) {
            let part = |row: usize| row * width + head..row * width + head + self.head_dim;
            for row in 0..q.len() / width {
                let scores = (0..q.len() / width).map(|other| scale * dot(&q[part(row)], &k[part(other)])).collect();
                for (other, weight) in softmax(scores).into_iter().enumerate() {
                    let target = context[part(row)].iter_mut();
                    target.zip(&v[part(other)]).for_each(|(c, v)| *c += weight * v);
                }
            }
        }
        self.o.without_bias(&context)
    }

    /// This rank's rows of the MLP: a partial sum, without the bias of `down`.
    fn mlp(&self, x: &[f32]) -> Vec<f32> {
        let mut inner = self.up.with_bias(x);
        inner.iter_mut().for_each(|value| *value = gelu(*value));
        self.down.without_bias(&inner)
    }
}

/// A shard of `y = W x + b`, `W` stored by output row.
struct Linear {
    weight: Vec<f32>,
    bias: Vec<f32>,
    inputs: usize,
    outputs: usize,
}

impl Linear {
    /// Keeps the rows `range`, and their biases.
    fn by_output(fixture: &Fixture<'_>, name: &str, shape: [usize; 2], range: Range<usize>) -> Result<Self> {
        let [outputs, inputs] = shape;
        let weight = fixture.tensor(&format!("{name}.weight"), &shape)?;
        let bias = fixture.tensor(&format!("{name}.bias"), &[outputs])?;
        let weight = weight[range.start * inputs..range.end * inputs].to_vec();
        Ok(Linear { weight, bias: bias[range.clone()].to_vec(), inputs, outputs: range.len() })
    }

    /// Keeps the columns `range`, and the whole bias: it is added once, after the sum over the ranks.
    fn by_input(fixture: &Fixture<'_>, name: &str, shape: [usize; 2], range: Range<usize>) -> Result<Self> {
        let [outputs, inputs] = shape;
        let weight = fixture.tensor(&format!("{name}.weight"), &shape)?;
        let bias = fixture.tensor(&format!("{name}.bias"), &[outputs])?;
        let weight = weight.chunks_exact(inputs).flat_map(|row| row[range.clone()].iter().copied()).collect();
        Ok(Linear { weight, bias, inputs: range.len(), outputs })
    }

    fn with_bias(&self, x: &[f32]) -> Vec<f32> {
        let mut y = self.without_bias(x);
        for row in y.chunks_exact_mut(self.outputs) {
            row.iter_mut().zip(&self.bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn without_bias(&self, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len() / self.inputs * self.outputs];
        // A row of weights outside, so that each is fetched once and the few tokens stay in the cache.
        for (output, weights) in self.weight.chunks_exact(self.inputs).enumerate() {
            for (token, values) in x.chunks_exact(self.inputs).enumerate() {
                y[token * self.outputs + output] = dot(weights, values);
            }
        }
        y
    }
}

struct LayerNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
    eps: f64,
}

impl LayerNorm {
    fn load(fixture: &Fixture<'_>, name: &str) -> Result<Self> {
        let shape = [fixture.hidden];
        let weight = fixture.tensor(&format!("{name}.weight"), &shape)?;
        Ok(LayerNorm { weight, bias: fixture.tensor(&format!("{name}.bias"), &shape)?, eps: fixture.eps })
    }

    /// Normalises `x + sum + bias`, token by token (BERT normalises after the residual).
    fn apply(&self, x: &[f32], sum: &[f32], bias: &[f32]) -> Vec<f32> {
        let hidden = self.weight.len();
        let mut y = Vec::with_capacity(x.len());
        for (x, sum) in x.chunks_exact(hidden).zip(sum.chunks_exact(hidden)) {
            let row: Vec<f64> = (0..hidden).map(|i| f64::from(x[i]) + f64::from(sum[i]) + f64::from(bias[i])).collect();
            let mean = row.iter().sum::<f64>() / hidden as f64;
            let variance = row.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / hidden as f64;
            let scale = 1.0 / (variance + self.eps).sqrt();
            let affine = |i: usize| (row[i] - mean) * scale * f64::from(self.weight[i]) + f64::from(self.bias[i]);
            y.extend((0..hidden).map(|i| affine(i) as f32));
        }
        y
    }
}

/// The safetensors file and its metadata.
struct Fixture<'a> {
    tensors: SafeTensors<'a>,
    texts: Vec<String>,
    layers: usize,
    hidden: usize,
    heads: usize,
    intermediate: usize,
    eps: f64,
}

impl<'a> Fixture<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let metadata = header.metadata().as_ref().ok_or("the header has no metadata")?;
        let text = |key: &str| metadata.get(key).ok_or_else(|| format!("the metadata has no {key}"));
        let number =
            |key: &str| -> Result<usize> { Ok(text(key)?.parse().map_err(|_| format!("{key} is no number"))?) };
        let fixture = Fixture {
            tensors: SafeTensors::deserialize(bytes)?,
            texts: string_list(text("texts")?).ok_or("texts is not a list of strings")?,
            layers: number("layers")?,
            hidden: number("hidden")?,
            heads: number("heads")?,
            intermediate: number("intermediate")?,
            eps: text("layer_norm_eps")?.parse().map_err(|_| "layer_norm_eps is no number")?,
        };
        let (hidden, heads) = (fixture.hidden, fixture.heads);
        if heads == 0 || hidden == 0 || hidden % heads != 0 {
            return Err(format!("{heads} heads cannot share {hidden} hidden elements").into());
        }
        Ok(fixture)
    }

    /// A tensor of this shape, widened to f32.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let view = self.tensors.tensor(name).map_err(|error| format!("{name}: {error}"))?;
        if view.shape() != shape {
            return Err(format!("{name} has shape {:?}, {shape:?} was expected", view.shape()).into());
        }
        // Element by element: nothing aligns a tensor within the file's bytes.
        match view.dtype() {
            TensorDtype::F16 => {
                Ok(view.data().chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect())
            }
            TensorDtype::F32 => {
                Ok(view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
            }
            other => Err(format!("{name} is {other:?}, not F16 or F32").into()),
        }
    }

    /// The hidden states of sentence `index` before the first layer.
    fn input(&self, index: usize) -> Result<Vec<f32>> {
        let name = format!("input{index}");
        let tokens = self.tensors.tensor(&name)?.shape().first().copied().unwrap_or(0);
        self.tensor(&name, &[tokens, self.hidden])
    }
}

/// The strings of a JSON list without escapes, which is what the fixture's metadata holds.
fn string_list(json: &str) -> Option<Vec<String>> {
    let inner = json.trim().strip_prefix('[')?.strip_suffix(']')?;
    Some(inner.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

/// What `rank` owns of `total` equal parts.
fn shard(total: usize, rank: usize, world: usize) -> Range<usize> {
    rank * total / world..(rank + 1) * total / world
}

/// Dot product in 16 independent sums, which the compiler can keep in vector registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + tail
}

fn softmax(mut scores: Vec<f32>) -> Vec<f32> {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
    let total: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= total);
    scores
}

/// GELU by the error function, not its tanh approximation: x/2 (1 + erf(x / sqrt 2)).
fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))) as f32
}

/// Error function by Abramowitz and Stegun, Handbook of Mathematical Functions, formula 7.1.26: |error| <= 1.5e-7.
fn erf(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let coefficients = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let polynomial = coefficients.iter().fold(0.0, |sum, c| (sum + c) * t);
    (1.0 - polynomial * (-x * x).exp()).copysign(x)
}

/// Mean over the tokens, scaled to length 1.
fn embed(states: &[f32], hidden: usize) -> Vec<f32> {
    let tokens = states.len() / hidden;
    let mean = |i: usize| states.iter().skip(i).step_by(hidden).map(|&v| f64::from(v)).sum::<f64>() / tokens as f64;
    let means: Vec<f64> = (0..hidden).map(mean).collect();
    let length = means.iter().map(|value| value * value).sum::<f64>().sqrt();
    means.into_iter().map(|value| (value / length) as f32).collect()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The largest difference; infinite if one is a NaN, which `max` would drop.
fn max_error(a: &[f32], b: &[f32]) -> f64 {
    let differences = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs());
    differences.map(|difference| if difference.is_nan() { f64::INFINITY } else { difference }).fold(0.0, f64::max)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
