//! Calls with a norm: checked, planned and launched.

use bytemuck::bytes_of;

use super::rows::{Rows, Source, is_plain, is_whole};
use super::{LayerNorm, NormOutput, RmsNorm, RowNorm};
use crate::backend::Backend;
use crate::buffer::Slice;
use crate::collective::Collective;
use crate::comm::all_reduce::check_lamport;
use crate::comm::call::{ALL_RANKS, Call, Work};
use crate::comm::check::{Amount, Description, Normed};
use crate::comm::span::Span;
use crate::dtype::{Float, ReduceOp};
use crate::error::{ApiMisuse, Result};
use crate::kernel::{Algorithm, FastSum, Kernel, NormParams, RowFormat};
use crate::layout::{MAX_GPUS, PACK_BYTES};
use crate::plan::{self, Plan};

const SMALL_WORLD: usize = Kernel::SMALL_WORLD as usize;

/// The kernels of Lamport's form: of short whole rows by what becomes of them, else those of any rows.
enum Narrow {
    Plain,
    E4m3,
    Any,
    No,
}

/// The ways of a call.
enum Form {
    /// One kernel, by Lamport's algorithm.
    Lamport,
    /// One kernel, by pushing to the peers' scratch.
    TwoStage,
    /// The collective, and a norm of this rank's own rows behind it; between them so many bytes at the end of the scratch hold the rows.
    TwoKernels(u64),
}

/// The methods of a call with a norm, which differ in that and in whose rows they take.
macro_rules! norms {
    ($($name:ident, $norm:ident, $source:expr;)*) => {
        impl<B: Backend> Call<'_, B> {
            $(
                #[doc = concat!("See [`Communicator::", stringify!($name), "`](crate::Communicator::", stringify!($name), ").")]
                ///
                /// # Errors
                /// As there.
                pub fn $name<'a, T: Float>(
                    self,
                    stream: &B::Stream,
                    input: impl Into<Slice<'a, B, T>>,
                    output: impl Into<NormOutput<'a, B, T>>,
                    norm: $norm<'a, B, T>,
                ) -> Result<()> {
                    self.norm(stream, input.into(), &output.into(), &norm.0, $source)
                }
            )*
        }
    };
}

norms! {
    rms_norm, RmsNorm, Source::Own;
    layer_norm, LayerNorm, Source::Own;
    all_reduce_rms_norm, RmsNorm, Source::Collective(Collective::AllReduce);
    all_reduce_layer_norm, LayerNorm, Source::Collective(Collective::AllReduce);
    reduce_scatter_rms_norm, RmsNorm, Source::Collective(Collective::ReduceScatter);
    reduce_scatter_layer_norm, LayerNorm, Source::Collective(Collective::ReduceScatter);
    all_gather_rms_norm, RmsNorm, Source::Collective(Collective::AllGather);
    all_gather_layer_norm, LayerNorm, Source::Collective(Collective::AllGather);
}

impl<B: Backend> Call<'_, B> {
    fn norm<T: Float>(
        self,
        stream: &B::Stream,
        input: Slice<'_, B, T>,
        output: &NormOutput<'_, B, T>,
        norm: &RowNorm<'_, B, T>,
        source: Source,
    ) -> Result<()> {
        let (rows, sum) = self.check_rows(input, output, norm, source)?;
        let given = (input.address(), input.memory());
        let Source::Collective(collective) = source else {
            return if rows.rows == 0 { Ok(()) } else { self.norm_own(stream, (rows, sum), given, output, norm) };
        };
        match self.form::<T>(rows, output, norm, collective)? {
            Form::Lamport => self.norm_by_lamport(stream, (rows, sum), given, output, norm),
            Form::TwoStage => self.norm_two_stage(stream, (rows, sum), given, output, norm, collective),
            Form::TwoKernels(withheld) => {
                let (between, memory) = match norm.sum().or(output.plain) {
                    // The rows go where they are wanted, or else where the normed ones will lie.
                    Some(slice) => (self.span("output", slice)?, slice.memory()),
                    None => (self.at_end_of_scratch(withheld), self.comm.memory()),
                };
                let at = (between.address, memory);
                let count = rows.normed(source) * rows.elements as usize;
                self.again(withheld).run_collective(stream, input, between, count, collective)?;
                let own = Rows { rows: rows.normed(source) as u32, ..rows };
                if own.rows == 0 {
                    return Ok(());
                }
                self.again(withheld).norm_own(stream, (own, sum), at, output, norm)
            }
        }
    }

    fn at_end_of_scratch(&self, bytes: u64) -> Span<B> {
        let group = self.comm.group_params(self.options.domain);
        let address = group.own + group.scratch_offset + group.scratch_bytes - bytes;
        Span { address, bytes, symmetric: None, memory: Some(self.comm.memory().clone()) }
    }

    /// Checks all operands, and gives the rows.
    fn check_rows<T: Float>(
        &self,
        input: Slice<'_, B, T>,
        output: &NormOutput<'_, B, T>,
        norm: &RowNorm<'_, B, T>,
        source: Source,
    ) -> Result<(Rows, FastSum)> {
        let sum = FastSum::of(ReduceOp::Sum, T::DTYPE).ok_or(ApiMisuse::NormType(T::DTYPE))?;
        let elements = norm.weight.len();
        let rows = Rows::of::<T>(input.len(), elements, source, self.comm.world_size())?;
        let normed = rows.normed(source);
        let wrong = |found: usize| ApiMisuse::Length { input: input.len(), output: found };
        norm.rows()
            .map(|of_rows| of_rows.len())
            .try_for_each(|len| if len == normed * elements { Ok(()) } else { Err(wrong(len)) })?;
        if let Some(bias) = norm.bias.filter(|bias| bias.len() != elements) {
            return Err(ApiMisuse::Codes { what: "elements of bias", found: bias.len(), expected: elements }.into());
        }
        output.check(input.len(), normed, elements)?;
        self.check_device("input", input.memory())?;
        output.memory().try_for_each(|memory| self.check_device("output", memory))?;
        norm.all().try_for_each(|operand| self.check_device("operand of a norm", operand.memory()))?;
        Ok((rows, sum))
    }

    /// How the call is done. What ranks do not share has no say.
    fn form<T: Float>(
        &self,
        rows: Rows,
        output: &NormOutput<'_, B, T>,
        norm: &RowNorm<'_, B, T>,
        collective: Collective,
    ) -> Result<Form> {
        let wanted = self.options.algorithm.or(self.comm.settings.algorithm);
        // Sums that are not rounded have no other place than registers, or one kernel's scratch.
        let only_one = norm.is_fast && collective != Collective::AllGather;
        if collective == Collective::AllReduce {
            let bytes = rows.all_packs() * PACK_BYTES as u64;
            let what = (T::DTYPE, ReduceOp::Sum);
            let fits = check_lamport(bytes, self.comm.world_size(), self.options.domain, what);
            if self.options.algorithm == Some(Algorithm::Lamport) {
                fits?;
                return Ok(Form::Lamport);
            }
            let pays = only_one || plan::fuses_rows(rows.packs, rows.bytes);
            if fits.is_ok() && (wanted == Some(Algorithm::Lamport) || wanted.is_none() && pays) {
                return Ok(Form::Lamport);
            }
        }
        // Codes are not where rows can be before they are normed; that the call has a place for those is not what all ranks know.
        let withheld = if output.format == RowFormat::Plain { 0 } else { rows.bytes_between(collective) };
        let scratch = self.comm.group_params(self.options.domain).scratch_bytes;
        if only_one || wanted == Some(Algorithm::TwoStagePush) || withheld > scratch / 2 {
            return Ok(Form::TwoStage);
        }
        Ok(Form::TwoKernels(withheld))
    }

    fn run_collective<T: Float>(
        self,
        stream: &B::Stream,
        input: Slice<'_, B, T>,
        output: Span<B>,
        count: usize,
        collective: Collective,
    ) -> Result<()> {
        let size = size_of::<T>();
        let parts = match collective {
            Collective::AllGather => self.equal(input.len(), size)?,
            _ => self.equal(count, size)?,
        };
        let spans = [self.span("input", input)?, output];
        // SAFETY: what is read is a slice, and what is written one that is borrowed exclusively, or this rank's scratch, of whose end no other call knows
        // before the norm behind this one has ended; the spans keep both alive. They are as long as `check_rows` has found.
        unsafe {
            match collective {
                Collective::ReduceScatter => {
                    self.launch_reduce_scatter(stream, spans, &parts, (ReduceOp::Sum, T::DTYPE))
                }
                Collective::AllGather => self.launch_all_gather(stream, spans, &parts),
                _ => self.all_reduce_spans(stream, &spans, (count, T::DTYPE), ReduceOp::Sum),
            }
        }
    }

    fn norm_own<T: Float>(
        self,
        stream: &B::Stream,
        (rows, sum): (Rows, FastSum),
        input: (u64, &B::Buffer),
        output: &NormOutput<'_, B, T>,
        norm: &RowNorm<'_, B, T>,
    ) -> Result<()> {
        let mut plan = self.plan_rows(rows.rows, rows.packs, Algorithm::Pull);
        let mut params = rows.params(self.begin(plan.blocks, plan.threads)?, input.0, output, norm);
        if params.sum == input.0 {
            params.sum = 0; // they are there
        }
        let narrow = is_whole(&params)
            && rows.packs <= 2 * plan::ROW_THREADS
            && plan.threads >= plan::ROW_THREADS.min(rows.packs);
        let kernel = match (narrow, is_plain(&params)) {
            (true, true) => Kernel::RmsNorm(sum),
            (true, false) => Kernel::NormNarrowRows(sum),
            (false, _) => Kernel::NormRows(sum),
        };
        // Narrow rows need no place, but on the host, whose threads are few.
        plan.blocks = rows.fitting_blocks::<T>(plan.blocks, &params.all_reduce.group, 1)?;
        self.launch_rows(stream, (kernel, plan, None), &params, input, (output, norm))
    }

    fn norm_by_lamport<T: Float>(
        self,
        stream: &B::Stream,
        (rows, sum): (Rows, FastSum),
        input: (u64, &B::Buffer),
        output: &NormOutput<'_, B, T>,
        norm: &RowNorm<'_, B, T>,
    ) -> Result<()> {
        let mut plan = self.plan_rows(rows.rows, rows.packs, Algorithm::Lamport);
        let group = self.begin(plan.blocks, plan.threads)?;
        // Some rank may have to keep rows, and all have the same grid.
        plan.blocks = rows.fitting_blocks::<T>(plan.blocks, &group, 1)?;
        let described = describe(Collective::AllReduce, &plan, rows, output, norm);
        if rows.rows == 0 {
            return self.check_alone(stream, described);
        }
        let params = rows.params(group, input.0, output, norm);
        // Peers need not take the same one.
        let narrow = is_whole(&params) && rows.packs <= plan.threads.min(plan::ROW_THREADS);
        let form = match (narrow, is_plain(&params), output.format) {
            (false, ..) => Narrow::No,
            (true, true, RowFormat::Plain) => Narrow::Plain,
            (true, true, _) => Narrow::E4m3,
            (true, false, _) => Narrow::Any,
        };
        let kernel = match (form, self.comm.world_size()) {
            (Narrow::Plain, 2) => Kernel::AllReduceRmsNormPair(sum),
            (Narrow::Plain, 1..=SMALL_WORLD) => Kernel::AllReduceRmsNormSmall(sum),
            (Narrow::Plain, _) => Kernel::AllReduceRmsNorm(sum),
            (Narrow::E4m3, 2) => Kernel::AllReduceRmsNormE4m3Pair(sum),
            (Narrow::E4m3, 1..=SMALL_WORLD) => Kernel::AllReduceRmsNormE4m3Small(sum),
            (Narrow::E4m3, _) => Kernel::AllReduceRmsNormE4m3(sum),
            (Narrow::Any, 2) => Kernel::AllReduceNormPair(sum),
            (Narrow::Any, 1..=SMALL_WORLD) => Kernel::AllReduceNormSmall(sum),
            (Narrow::Any, _) => Kernel::AllReduceNorm(sum),
            (Narrow::No, 1..=SMALL_WORLD) => Kernel::AllReduceNormWideSmall(sum),
            (Narrow::No, _) => Kernel::AllReduceNormWide(sum),
        };
        self.launch_rows(stream, (kernel, plan, Some(described)), &params, input, (output, norm))
    }

    fn norm_two_stage<T: Float>(
        self,
        stream: &B::Stream,
        (rows, sum): (Rows, FastSum),
        input: (u64, &B::Buffer),
        output: &NormOutput<'_, B, T>,
        norm: &RowNorm<'_, B, T>,
        collective: Collective,
    ) -> Result<()> {
        let mut plan = self.plan_rows(rows.shard, rows.packs, Algorithm::TwoStagePush);
        let group = self.begin(plan.blocks, plan.threads)?;
        plan.blocks = rows.fitting_blocks::<T>(plan.blocks, &group, 2)?;
        let described = describe(collective, &plan, rows, output, norm);
        if rows.rows == 0 {
            return self.check_alone(stream, described);
        }
        let mut params = rows.params(group, input.0, output, norm);
        rows.divide_scratch::<T>(collective, plan.blocks, &mut params)?;
        let kernel = Kernel::NormTwoStage(sum);
        self.launch_rows(stream, (kernel, plan, Some(described)), &params, input, (output, norm))
    }

    /// The grid for rows of which each is one block's.
    fn plan_rows(&self, rows: u32, packs: u32, algorithm: Algorithm) -> Plan {
        self.comm.fitted(plan::rows(self.comm.group.topology, algorithm, rows, packs), &self.options)
    }

    fn launch_rows<T: Float>(
        self,
        stream: &B::Stream,
        (kernel, plan, described): (Kernel, Plan, Option<Description>),
        params: &NormParams,
        input: (u64, &B::Buffer),
        (output, norm): (&NormOutput<'_, B, T>, &RowNorm<'_, B, T>),
    ) -> Result<()> {
        let work = Work {
            kernel,
            grid: plan.blocks,
            threads: plan.threads,
            params: bytes_of(params),
            partners: if described.is_some() { ALL_RANKS } else { 0 },
            same_grid: true,
            described: described.map(|described| [described; MAX_GPUS]),
        };
        let uses = [input.1].into_iter().chain(output.memory()).chain(norm.all().map(|operand| operand.memory()));
        // SAFETY: the parameters are the kernel's. All operands are slices of buffers of this rank's device, of the lengths that
        // `check_rows` asks for, which the launch keeps alive; what is written is borrowed exclusively, so nothing overlaps but what is one.
        unsafe { self.launch(stream, work, uses) }
    }
}

fn describe<B: Backend, T: Float>(
    collective: Collective,
    plan: &Plan,
    rows: Rows,
    output: &NormOutput<'_, B, T>,
    norm: &RowNorm<'_, B, T>,
) -> Description {
    let normed = Normed { format: output.format, is_layer: norm.is_layer, is_fast: norm.is_fast };
    let amount = Amount::Rows(rows.rows, rows.elements, T::DTYPE, normed);
    Description::collective(collective, plan, 0, amount)
}
