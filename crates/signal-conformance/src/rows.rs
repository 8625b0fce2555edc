//! Rows that are normed, by every collective, every norm and to every output: what a call has, and what must come of it.

use signal_core::kernel::RowFormat;
use signal_core::reference::rows::{self, Norm};
use signal_core::reference::{Rng, random_inputs};
use signal_core::{
    Backend, Call, Collective, DeviceBuffer, E4m3, Element, Float, LayerNorm, NormOutput, Result, RmsNorm, Slice,
};

use crate::compare;
use crate::place::{below, pick};

/// What one call does.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// `None`: of each rank's own rows.
    pub collective: Option<Collective>,
    /// Rows that each rank gives, or, of a reduce-scatter, that each gets.
    pub rows: usize,
    pub elements: usize,
    pub is_layer: bool,
    pub has_bias: bool,
    pub is_fast: bool,
    pub format: RowFormat,
    pub residual: Where,
    pub sum: bool,
    pub offset: f32,
    pub epsilon: f32,
    /// Rows of zeros, and with NaNs and infinities; half of the time such weights.
    pub odd_rows: bool,
    pub seed: u64,
}

/// Where the new residual goes, if there is one.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Where {
    Nowhere,
    InPlace,
    Apart,
}

/// What each rank has, and what it must get.
#[derive(Debug)]
pub struct Data<T> {
    pub(crate) inputs: Vec<Vec<T>>,
    pub(crate) residuals: Vec<Vec<T>>,
    weights: Vec<Vec<T>>,
    biases: Vec<Vec<T>>,
    tensor_scale: f32,
    sums: Vec<Vec<T>>,
    /// In f32, as the output is coded from.
    pub(crate) values: Vec<Vec<f32>>,
    pub(crate) normed: Vec<Vec<T>>,
    pub(crate) new_residuals: Vec<Vec<T>>,
}

impl Job {
    /// RMSNorm, exact and plain, without a residual.
    pub fn plain(collective: Option<Collective>, rows: usize, elements: usize) -> Job {
        Job {
            collective,
            rows,
            elements,
            is_layer: false,
            has_bias: false,
            is_fast: false,
            format: RowFormat::Plain,
            residual: Where::Nowhere,
            sum: false,
            offset: 0.0,
            epsilon: 1e-5,
            odd_rows: false,
            seed: 0,
        }
    }

    /// RMSNorm behind an all-reduce, exact and plain.
    pub(crate) fn draw(rng: &mut Rng, rows: usize, elements: usize) -> Job {
        Job {
            residual: pick(rng, &[Where::Nowhere, Where::InPlace, Where::Apart]),
            sum: below(rng, 2) == 0,
            offset: pick(rng, &[0.0, 1.0]),
            epsilon: pick(rng, &[1e-6, 1e-5]),
            seed: rng.next_u64(),
            ..Job::plain(Some(Collective::AllReduce), rows, elements)
        }
    }

    /// Anything that such rows can be asked for.
    pub(crate) fn draw_any(rng: &mut Rng, rows: usize, elements: usize) -> Job {
        let all = [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather].map(Some);
        let whole = |format: &RowFormat| match format {
            RowFormat::Mxfp8 => elements.is_multiple_of(32),
            RowFormat::Nvfp4 => elements.is_multiple_of(16),
            _ => true,
        };
        let formats: Vec<RowFormat> = RowFormat::ALL.into_iter().filter(whole).collect();
        let is_layer = below(rng, 2) == 0;
        Job {
            collective: pick(rng, &[all[0], all[0], all[1], all[2], None]),
            is_layer,
            has_bias: is_layer && below(rng, 3) > 0,
            is_fast: below(rng, 3) == 0,
            format: pick(rng, &formats),
            offset: if is_layer { 0.0 } else { pick(rng, &[0.0, 1.0]) },
            odd_rows: below(rng, 4) == 0,
            ..Job::draw(rng, rows, elements)
        }
    }

    /// Rows that each rank gives, and rows that it gets.
    pub(crate) fn given_and_normed(&self, ranks: usize) -> [usize; 2] {
        match self.collective {
            Some(Collective::ReduceScatter) => [self.rows * ranks, self.rows],
            Some(Collective::AllGather) => [self.rows, self.rows * ranks],
            _ => [self.rows; 2],
        }
    }

    /// What all ranks have, and what the scalar reference makes of it.
    pub fn data<T: Float>(&self, ranks: usize) -> Data<T> {
        let [given, normed] = self.given_and_normed(ranks).map(|rows| rows * self.elements);
        let mut inputs = random_inputs::<T>(ranks, self.seed, given);
        if self.odd_rows {
            self.make_odd(&mut inputs);
        }
        let residuals = random_inputs::<T>(ranks, self.seed + 1, normed);
        let mut weights = random_inputs::<T>(ranks, self.seed + 2, self.elements);
        if self.odd_rows && self.seed.is_multiple_of(2) {
            for weights in &mut weights {
                weights[self.elements / 4] = T::from_f32(f32::INFINITY);
                weights[self.elements / 3] = T::from_f32(-f32::NAN);
            }
        }
        let biases = random_inputs::<T>(ranks, self.seed + 3, self.elements);
        let tensor_scale = 0.003 * (1 + self.seed % 50) as f32;
        let mut data = Data { inputs, residuals, weights, biases, tensor_scale, ..Data::nothing() };
        for rank in 0..ranks {
            let sums = self.sums(&data.inputs, rank);
            let norm = Norm {
                is_layer: self.is_layer,
                weight: &data.weights[rank],
                bias: self.has_bias.then_some(&data.biases[rank]),
                epsilon: self.epsilon,
                offset: self.offset,
                is_fast: self.is_fast,
            };
            let (mut all_sums, mut all_new, mut values) = (Vec::new(), Vec::new(), Vec::new());
            for (row, sums) in sums.chunks(self.elements).enumerate() {
                let range = row * self.elements..(row + 1) * self.elements;
                let residual = (self.residual != Where::Nowhere).then(|| &data.residuals[rank][range]);
                let found = rows::norm(sums, residual, &norm);
                all_sums.extend(found.sum);
                all_new.extend(found.residual);
                values.extend(found.normed);
            }
            data.normed.push(values.iter().map(|x| T::from_f32(*x)).collect());
            data.values.push(values);
            data.sums.push(all_sums);
            data.new_residuals.push(all_new);
        }
        data
    }

    /// The rows that a rank norms, before anything is rounded.
    fn sums<T: Float>(&self, inputs: &[Vec<T>], rank: usize) -> Vec<f32> {
        let all: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
        let own = self.rows * self.elements;
        match self.collective {
            None => inputs[rank].iter().map(|x| x.to_f32()).collect(),
            Some(Collective::AllGather) => inputs.iter().flatten().map(|x| x.to_f32()).collect(),
            Some(Collective::ReduceScatter) => rows::sums(&all)[rank * own..][..own].to_vec(),
            _ => rows::sums(&all),
        }
    }

    /// The first row becomes zeros on all ranks; the second gets a NaN, the third an infinity.
    fn make_odd<T: Float>(&self, inputs: &mut [Vec<T>]) {
        let [zero, nan, infinity] = [0.0, f32::NAN, f32::INFINITY].map(T::from_f32);
        for input in &mut *inputs {
            input[..self.elements].fill(zero);
        }
        for (row, odd) in [(1, nan), (2, infinity)] {
            if let Some(place) = inputs[0].get_mut(row * self.elements + self.elements / 2) {
                *place = odd;
            }
        }
    }
}

impl<T> Data<T> {
    fn nothing() -> Self {
        Data {
            inputs: Vec::new(),
            residuals: Vec::new(),
            weights: Vec::new(),
            biases: Vec::new(),
            tensor_scale: 0.0,
            sums: Vec::new(),
            values: Vec::new(),
            normed: Vec::new(),
            new_residuals: Vec::new(),
        }
    }
}

impl<T: Float> Data<T> {
    /// A row that a rank gets behind an all-reduce, in f64: the normed elements, and the sum of the magnitudes that stand behind each.
    pub(crate) fn real_row(&self, job: &Job, rank: usize, row: usize) -> Vec<(f64, f64)> {
        let range = row * job.elements..(row + 1) * job.elements;
        let all = self.inputs.iter().chain(Some(&self.residuals[rank]).filter(|_| job.residual != Where::Nowhere));
        let parts: Vec<&[T]> = all.map(|part| &part[range.clone()]).collect();
        let add = |i: usize, of: fn(f64) -> f64| parts.iter().map(|part| of(part[i].to_f64())).sum::<f64>();
        let x: Vec<(f64, f64)> = (0..job.elements).map(|i| (add(i, |x| x), add(i, f64::abs))).collect();
        let average = |of: &dyn Fn(f64) -> f64| x.iter().map(|(x, _)| of(*x)).sum::<f64>() / job.elements as f64;
        let mean = if job.is_layer { average(&|x| x) } else { 0.0 };
        let scale = 1.0 / (average(&|x| (x - mean) * (x - mean)) + f64::from(job.epsilon)).sqrt();
        let most = x.iter().fold(0.0, |most: f64, (_, magnitude)| most.max(*magnitude));
        let normed = |(i, (x, magnitude)): (usize, &(f64, f64))| {
            let weight = self.weights[rank][i].to_f64() + f64::from(job.offset);
            let bias = if job.has_bias { self.biases[rank][i].to_f64() } else { 0.0 };
            // The mean's error is that of the largest.
            let behind = (magnitude + if job.is_layer { most } else { 0.0 }) * scale * weight.abs();
            ((x - mean) * scale * weight + bias, behind + bias.abs())
        };
        x.iter().enumerate().map(normed).collect()
    }
}

/// One rank's buffers.
#[derive(Debug)]
pub struct Buffers<B: Backend, T: Element> {
    /// Operands begin so many elements behind an aligned address, and codes so many bytes.
    start: usize,
    input: DeviceBuffer<B, T>,
    pub(crate) output: DeviceBuffer<B, T>,
    weight: DeviceBuffer<B, T>,
    bias: DeviceBuffer<B, T>,
    pub(crate) residual: DeviceBuffer<B, T>,
    pub(crate) new: DeviceBuffer<B, T>,
    sum: DeviceBuffer<B, T>,
    codes: DeviceBuffer<B, E4m3>,
    integers: DeviceBuffer<B, i8>,
    bytes: DeviceBuffer<B, u8>,
    scales: DeviceBuffer<B, f32>,
    scale_bytes: DeviceBuffer<B, u8>,
    scale_codes: DeviceBuffer<B, E4m3>,
    tensor_scale: DeviceBuffer<B, f32>,
}

impl<B: Backend, T: Float> Buffers<B, T> {
    /// Buffers with a rank's data, whose operands begin `start` elements behind an aligned address.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(
        device: &B::Device,
        stream: &B::Stream,
        job: &Job,
        data: &Data<T>,
        rank: usize,
        start: usize,
    ) -> Result<Self> {
        fn filled<B: Backend, E: Element>(
            (device, stream): (&B::Device, &B::Stream),
            start: usize,
            content: &[E],
        ) -> Result<DeviceBuffer<B, E>> {
            let mut buffer = DeviceBuffer::new(device, start + content.len())?;
            let before = std::iter::repeat_n(E::from_f64(7.0), start);
            let shifted: Vec<E> = before.chain(content.iter().copied()).collect();
            buffer.write(stream, &shifted)?;
            Ok(buffer)
        }
        let at = (device, stream);
        let garbage = vec![T::from_f32(-3.0); data.normed[rank].len()];
        // Of codes and scales those that the format has.
        let count = |formats: &[RowFormat], count: usize| if formats.contains(&job.format) { count } else { 0 };
        let (all, elements) = (data.normed[rank].len(), job.elements);
        let scales = all / elements * job.format.row_scales(elements);
        use RowFormat::{E4m3Group, E4m3Row, E4m3Tensor, I8Row, Mxfp8, Nvfp4};
        let codes = count(&[E4m3Tensor, E4m3Row, E4m3Group, Mxfp8], all);
        Ok(Buffers {
            start,
            input: filled(at, start, &data.inputs[rank])?,
            output: filled(at, start, &garbage)?,
            weight: filled(at, start, &data.weights[rank])?,
            bias: filled(at, start, &data.biases[rank])?,
            residual: filled(at, start, &data.residuals[rank])?,
            new: filled(at, start, &garbage)?,
            sum: filled(at, start, &garbage)?,
            codes: filled(at, start, &vec![E4m3(0x55); codes])?,
            integers: filled(at, start, &vec![77i8; count(&[I8Row], all)])?,
            bytes: filled(at, start, &vec![0x55u8; count(&[Nvfp4], all / 2)])?,
            scales: filled(at, start, &vec![-1f32; count(&[E4m3Row, E4m3Group, I8Row], scales)])?,
            scale_bytes: filled(at, start, &vec![0x55u8; count(&[Mxfp8], scales)])?,
            scale_codes: filled(at, start, &vec![E4m3(0x55); count(&[Nvfp4], scales)])?,
            tensor_scale: filled(at, 0, &[data.tensor_scale])?,
        })
    }

    /// Overwrites what the call is to write, but for a residual in place. Of buffers that begin at an aligned address.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn spoil(&mut self, stream: &B::Stream) -> Result<()> {
        const WORD: u32 = 0x5555_5555;
        self.output.fill_bytes(stream, WORD)?;
        self.new.fill_bytes(stream, WORD)?;
        self.codes.fill_bytes(stream, WORD)?;
        self.integers.fill_bytes(stream, WORD)?;
        self.bytes.fill_bytes(stream, WORD)?;
        self.scales.fill_bytes(stream, WORD)?;
        self.scale_bytes.fill_bytes(stream, WORD)?;
        self.scale_codes.fill_bytes(stream, WORD)
    }

    /// Makes the new residual's middle element wrong by its last bit, to test the check.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn corrupt(&mut self, stream: &B::Stream) -> Result<()> {
        let mut values = self.new.read(stream)?;
        let middle = values.len() / 2;
        values[middle] = T::from_bits(values[middle].to_bits() ^ 1);
        self.new.write(stream, &values)
    }

    /// Makes the call.
    ///
    /// # Errors
    /// Those of the call.
    pub fn launch(&mut self, call: Call<'_, B>, stream: &B::Stream, job: &Job) -> Result<()> {
        let from = self.start;
        let Buffers { input, output, weight, bias, residual, new, sum, .. } = self;
        let Buffers { codes, integers, bytes, scales, scale_bytes, scale_codes, tensor_scale, .. } = self;
        let output: NormOutput<'_, B, T> = match job.format {
            RowFormat::Plain => output.slice_mut(from..)?.into(),
            RowFormat::E4m3Tensor => NormOutput::e4m3(codes.slice_mut(from..)?, &*tensor_scale),
            RowFormat::E4m3Row => NormOutput::e4m3_per_row(codes.slice_mut(from..)?, scales.slice_mut(from..)?),
            RowFormat::E4m3Group => NormOutput::e4m3_per_group(codes.slice_mut(from..)?, scales.slice_mut(from..)?),
            RowFormat::I8Row => NormOutput::i8_per_row(integers.slice_mut(from..)?, scales.slice_mut(from..)?),
            RowFormat::Mxfp8 => NormOutput::mxfp8(codes.slice_mut(from..)?, scale_bytes.slice_mut(from..)?),
            _ => NormOutput::nvfp4(bytes.slice_mut(from..)?, scale_codes.slice_mut(from..)?, &*tensor_scale),
        };
        let (input, weight) = (input.slice(from..)?, weight.slice(from..)?);
        // Both norms have the same operands.
        macro_rules! with_operands {
            ($norm:expr) => {{
                let mut norm = $norm.fast(job.is_fast);
                norm = match job.residual {
                    Where::Nowhere => norm,
                    Where::InPlace => norm.residual_in_place(residual.slice_mut(from..)?),
                    Where::Apart => norm.residual(residual.slice(from..)?, new.slice_mut(from..)?),
                };
                if job.sum { norm.sum(sum.slice_mut(from..)?) } else { norm }
            }};
        }
        if job.is_layer {
            let bias: Option<Slice<'_, B, T>> = job.has_bias.then(|| bias.slice(from..)).transpose()?;
            let norm = match bias {
                Some(bias) => LayerNorm::new(weight, bias, job.epsilon),
                None => LayerNorm::without_bias(weight, job.epsilon),
            };
            let norm = with_operands!(norm);
            match job.collective {
                None => call.layer_norm(stream, input, output, norm),
                Some(Collective::ReduceScatter) => call.reduce_scatter_layer_norm(stream, input, output, norm),
                Some(Collective::AllGather) => call.all_gather_layer_norm(stream, input, output, norm),
                Some(_) => call.all_reduce_layer_norm(stream, input, output, norm),
            }
        } else {
            let norm = with_operands!(RmsNorm::new(weight, job.epsilon).weight_offset(job.offset));
            match job.collective {
                None => call.rms_norm(stream, input, output, norm),
                Some(Collective::ReduceScatter) => call.reduce_scatter_rms_norm(stream, input, output, norm),
                Some(Collective::AllGather) => call.all_gather_rms_norm(stream, input, output, norm),
                Some(_) => call.all_reduce_rms_norm(stream, input, output, norm),
            }
        }
    }

    /// Compares all that the call must and must not touch.
    pub(crate) fn check(&self, what: &str, stream: &B::Stream, job: &Job, data: &Data<T>, rank: usize) {
        struct Assert<'a>(&'a str);
        impl Compare for Assert<'_> {
            fn compare<E: Element>(&mut self, part: &str, found: &[E], expected: &[E]) {
                compare::assert_bits(&format!("{}: {part}", self.0), found, expected);
            }
        }
        self.compare(&mut Assert(what), stream, job, data, rank).unwrap();
    }

    /// Elements whose bits are wrong, of all that the call must and must not touch.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn wrong(&self, stream: &B::Stream, job: &Job, data: &Data<T>, rank: usize) -> Result<u64> {
        struct Count(u64);
        impl Compare for Count {
            fn compare<E: Element>(&mut self, _: &str, found: &[E], expected: &[E]) {
                let differs = found.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits());
                self.0 += (differs.count() + found.len().abs_diff(expected.len())) as u64;
            }
        }
        let mut count = Count(0);
        self.compare(&mut count, stream, job, data, rank)?;
        Ok(count.0)
    }

    fn compare(
        &self,
        with: &mut impl Compare,
        stream: &B::Stream,
        job: &Job,
        data: &Data<T>,
        rank: usize,
    ) -> Result<()> {
        let read = |buffer: &DeviceBuffer<B, T>| -> Result<Vec<T>> { Ok(buffer.read(stream)?.split_off(self.start)) };
        self.compare_output(with, stream, job, data, rank)?;
        with.compare("input", &read(&self.input)?, &data.inputs[rank]);
        let (old, new) = match job.residual {
            Where::Nowhere => (&data.residuals[rank], None),
            Where::InPlace => (&data.new_residuals[rank], None),
            Where::Apart => (&data.residuals[rank], Some(&data.new_residuals[rank])),
        };
        with.compare("residual", &read(&self.residual)?, old);
        if let Some(new) = new {
            with.compare("new residual", &read(&self.new)?, new);
        }
        if job.sum {
            with.compare("sum", &read(&self.sum)?, &data.sums[rank]);
        }
        Ok(())
    }

    fn compare_output(
        &self,
        with: &mut impl Compare,
        stream: &B::Stream,
        job: &Job,
        data: &Data<T>,
        rank: usize,
    ) -> Result<()> {
        fn bytes_behind<B: Backend, E: Element>(
            stream: &B::Stream,
            start: usize,
            buffer: &DeviceBuffer<B, E>,
        ) -> Result<Vec<u8>> {
            Ok(bytemuck::cast_slice(&buffer.read(stream)?[start..]).to_vec())
        }
        if job.format == RowFormat::Plain {
            with.compare("normed", &self.output.read(stream)?[self.start..], &data.normed[rank]);
            return Ok(());
        }
        let found = [
            bytes_behind(stream, self.start, &self.codes)?,
            bytes_behind(stream, self.start, &self.integers)?,
            bytes_behind(stream, self.start, &self.bytes)?,
        ]
        .concat();
        let found_scales = [
            bytes_behind(stream, self.start, &self.scales)?,
            bytes_behind(stream, self.start, &self.scale_bytes)?,
            bytes_behind(stream, self.start, &self.scale_codes)?,
        ]
        .concat();
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for row in data.values[rank].chunks(job.elements) {
            let (of_row, scales_of_row) = rows::coded(job.format, row, data.tensor_scale);
            codes.extend(of_row);
            scales.extend(scales_of_row);
        }
        with.compare("scales", &found_scales, &scales);
        with.compare("codes", &found, &codes);
        Ok(())
    }
}

/// What becomes of each comparison.
trait Compare {
    fn compare<E: Element>(&mut self, part: &str, found: &[E], expected: &[E]);
}
