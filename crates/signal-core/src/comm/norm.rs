//! RMSNorm of rows, alone or of the sums of an all-reduce: what stands behind it in a transformer. In one kernel by Lamport's algorithm where the
//! rows fit, else in two; the bits are the same.

use bytemuck::{Zeroable, bytes_of};

use crate::backend::Backend;
use crate::buffer::{Slice, SliceMut};
use crate::collective::Collective;
use crate::dtype::{Float, ReduceOp};
use crate::error::{ApiMisuse, Result};
use crate::kernel::{Algorithm, AllReduceParams, FastSum, GroupParams, Kernel, NormParams};
use crate::layout::{MAX_GPUS, PACK_BYTES};
use crate::plan::{self, Plan};

use super::all_reduce::check_lamport;
use super::call::{ALL_RANKS, Call, Work};
use super::check::{Amount, Description};

/// What becomes of rows: `round(v * (1 / sqrt(mean(v^2) + epsilon)) * (weight + offset))`, where `v` is the row, or with a residual
/// `round(row + residual)`. Between the roundings to the element type everything is in f32, in an order that depends on nothing but the row's length
/// ([`reference::rms_norm`](crate::reference::rms_norm)): a row has the same bits on every rank, in every batch and by every algorithm.
#[derive(Debug)]
pub struct RmsNorm<'a, B: Backend, T> {
    weight: Slice<'a, B, T>,
    epsilon: f32,
    offset: f32,
    residual: Residual<'a, B, T>,
    sum: Option<SliceMut<'a, B, T>>,
}

/// What is added to the rows first, and where that goes.
#[derive(Debug)]
enum Residual<'a, B: Backend, T> {
    None,
    InPlace(SliceMut<'a, B, T>),
    Apart(Slice<'a, B, T>, SliceMut<'a, B, T>),
}

impl<'a, B: Backend, T: Float> RmsNorm<'a, B, T> {
    /// With a weight for each element of a row. It is taken for constant: where kernels are launched early ([`Settings`](crate::Settings)), it is read
    /// before the kernel ahead on the stream has ended. So a kernel that writes it must not be the work right ahead of the call, unless
    /// something that waits for its end, such as an event or a copy, stands between.
    pub fn new(weight: impl Into<Slice<'a, B, T>>, epsilon: f32) -> Self {
        RmsNorm { weight: weight.into(), epsilon, offset: 0.0, residual: Residual::None, sum: None }
    }

    /// Adds this to each weight: 1 as Gemma has it.
    #[must_use]
    pub fn weight_offset(mut self, offset: f32) -> Self {
        self.offset = offset;
        self
    }

    /// Adds the residual to the rows first, and makes it what is normed then.
    #[must_use]
    pub fn residual_in_place(mut self, residual: impl Into<SliceMut<'a, B, T>>) -> Self {
        self.residual = Residual::InPlace(residual.into());
        self
    }

    /// Adds the residual to the rows first; `new` becomes what is normed then.
    #[must_use]
    pub fn residual(mut self, old: impl Into<Slice<'a, B, T>>, new: impl Into<SliceMut<'a, B, T>>) -> Self {
        self.residual = Residual::Apart(old.into(), new.into());
        self
    }

    /// Gives the sums too, before the residual.
    #[must_use]
    pub fn sum(mut self, sum: impl Into<SliceMut<'a, B, T>>) -> Self {
        self.sum = Some(sum.into());
        self
    }

    fn residuals(&self) -> Option<[Slice<'_, B, T>; 2]> {
        match &self.residual {
            Residual::None => None,
            Residual::InPlace(both) => Some([both.as_slice(); 2]),
            Residual::Apart(old, new) => Some([*old, new.as_slice()]),
        }
    }

    /// The rest of the memory that it touches.
    fn memory(&self) -> impl Iterator<Item = Slice<'_, B, T>> {
        let sum = self.sum.as_ref().map(SliceMut::as_slice);
        self.residuals().into_iter().flatten().chain(sum).chain([self.weight])
    }
}

const SMALL_WORLD: usize = Kernel::SMALL_WORLD as usize;

/// Whether all packs of all operands are whole and aligned.
fn is_whole(p: &NormParams) -> bool {
    let all = p.all_reduce.input | p.all_reduce.output | p.residual | p.new_residual | p.sum | p.weight | p.row_bytes;
    all.is_multiple_of(PACK_BYTES as u64)
}

/// Rows, as the kernels count them.
#[derive(Clone, Copy)]
struct Rows {
    rows: u32,
    elements: u32,
    /// Of a row.
    bytes: u64,
    packs: u32,
}

impl Rows {
    fn of<T: Float>(count: usize, elements: usize) -> Result<Rows, ApiMisuse> {
        let too_large = || ApiMisuse::TooLarge { count, element_bytes: size_of::<T>() };
        if elements == 0 {
            let (found, expected) = (elements, 1);
            return Err(ApiMisuse::Parts { what: "weight", found, expected, parts: 1, part: 1 });
        }
        let rows = count / elements;
        if rows * elements != count {
            let (parts, part) = (rows + 1, elements);
            return Err(ApiMisuse::Parts { what: "input", found: count, expected: parts * part, parts, part });
        }
        let bytes = (elements * size_of::<T>()) as u64;
        let narrow = |number: u64| u32::try_from(number).map_err(|_| too_large());
        Ok(Rows {
            rows: narrow(rows as u64)?,
            elements: narrow(elements as u64)?,
            bytes,
            packs: narrow(bytes.div_ceil(PACK_BYTES as u64))?,
        })
    }

    /// Packs of all of them.
    fn all_packs(self) -> u64 {
        u64::from(self.rows) * u64::from(self.packs)
    }
}

impl<B: Backend> Call<'_, B> {
    /// See [`Communicator::all_reduce_rms_norm`](crate::Communicator::all_reduce_rms_norm). Another algorithm than Lamport's is that of the
    /// all-reduce, which is then a kernel of its own.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce_rms_norm`](crate::Communicator::all_reduce_rms_norm).
    pub fn all_reduce_rms_norm<'a, T: Float>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        norm: RmsNorm<'a, B, T>,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        let (rows, sum) = self.check_rows(input, &output, &norm)?;
        if let Some(plan) = self.plan_rows::<T>(rows)? {
            let group = self.begin(plan.blocks, plan.threads)?;
            let amount = Amount::Rows(rows.rows, rows.elements, T::DTYPE);
            let described = Description::collective(Collective::AllReduce, &plan, 0, amount);
            if rows.rows == 0 {
                return self.check_alone(stream, described);
            }
            let params = rows.params(group, input.address(), &output, &norm);
            // Peers need not take the same one.
            let narrow = is_whole(&params) && rows.packs <= plan.threads.min(plan::ROW_THREADS);
            let kernel = match (narrow, self.comm.world_size()) {
                (true, 2) => Kernel::AllReduceNormPair(sum),
                (true, 1..=SMALL_WORLD) => Kernel::AllReduceNormSmall(sum),
                (true, _) => Kernel::AllReduceNorm(sum),
                (false, 1..=SMALL_WORLD) => Kernel::AllReduceNormWideSmall(sum),
                (false, _) => Kernel::AllReduceNormWide(sum),
            };
            return self.launch_rows(
                stream,
                (kernel, plan, Some(described)),
                &params,
                [input, output.as_slice()],
                &norm,
            );
        }
        // The sums go where they are wanted, or else where the normed rows will lie.
        let sums = norm.sum.as_ref().unwrap_or(&output).as_slice();
        self.again().all_reduce_slices(stream, input, sums, ReduceOp::Sum)?;
        if rows.rows == 0 {
            return Ok(());
        }
        let (kernel, plan) = (Kernel::RmsNorm(sum), self.plan_own_rows(rows));
        let mut params = rows.params(self.begin(plan.blocks, plan.threads)?, sums.address(), &output, &norm);
        params.sum = 0;
        self.launch_rows(stream, (kernel, plan, None), &params, [sums, output.as_slice()], &norm)
    }

    /// See [`Communicator::rms_norm`](crate::Communicator::rms_norm).
    ///
    /// # Errors
    /// As [`Communicator::rms_norm`](crate::Communicator::rms_norm).
    pub fn rms_norm<'a, T: Float>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        norm: RmsNorm<'a, B, T>,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        let (rows, sum) = self.check_rows(input, &output, &norm)?;
        if rows.rows == 0 {
            return Ok(());
        }
        let plan = self.plan_own_rows(rows);
        let params = rows.params(self.begin(plan.blocks, plan.threads)?, input.address(), &output, &norm);
        self.launch_rows(stream, (Kernel::RmsNorm(sum), plan, None), &params, [input, output.as_slice()], &norm)
    }

    /// Checks all operands, and gives the rows.
    fn check_rows<T: Float>(
        &self,
        input: Slice<'_, B, T>,
        output: &SliceMut<'_, B, T>,
        norm: &RmsNorm<'_, B, T>,
    ) -> Result<(Rows, FastSum)> {
        let sum = FastSum::of(ReduceOp::Sum, T::DTYPE).ok_or(ApiMisuse::NormType(T::DTYPE))?;
        let rows = Rows::of::<T>(input.len(), norm.weight.len())?;
        for of_input in norm
            .residuals()
            .into_iter()
            .flatten()
            .chain(norm.sum.as_ref().map(SliceMut::as_slice))
            .chain([output.as_slice()])
        {
            if of_input.len() != input.len() {
                return Err(ApiMisuse::Length { input: input.len(), output: of_input.len() }.into());
            }
        }
        self.check_device("input", input.memory())?;
        self.check_device("output", output.as_slice().memory())?;
        norm.memory().try_for_each(|operand| self.check_device("operand of RMSNorm", operand.memory()))?;
        Ok((rows, sum))
    }

    /// The plan of one kernel for all of it, if Lamport's algorithm takes it and is wanted.
    fn plan_rows<T: Float>(&self, rows: Rows) -> Result<Option<Plan>> {
        let bytes = rows.all_packs() * PACK_BYTES as u64;
        let fits = check_lamport(bytes, self.comm.world_size(), self.options.domain, (T::DTYPE, ReduceOp::Sum));
        let is_wanted = match (self.options.algorithm, self.comm.settings.algorithm) {
            (Some(Algorithm::Lamport), _) => fits.map(|()| true)?,
            (None, Some(Algorithm::Lamport)) => fits.is_ok(),
            (None, None) => fits.is_ok() && plan::fuses_rows(rows.packs, rows.bytes),
            _ => false,
        };
        let plan = plan::rows(self.comm.group.topology, Algorithm::Lamport, rows.rows, rows.packs);
        Ok(is_wanted.then(|| self.comm.fitted(plan, &self.options)))
    }

    /// The grid for rows of this rank alone.
    fn plan_own_rows(&self, rows: Rows) -> Plan {
        let plan = plan::rows(self.comm.group.topology, Algorithm::Pull, rows.rows, rows.packs);
        self.comm.fitted(plan, &self.options)
    }

    /// `memory` are input and output.
    fn launch_rows<T: Float>(
        self,
        stream: &B::Stream,
        (kernel, plan, described): (Kernel, Plan, Option<Description>),
        params: &NormParams,
        memory: [Slice<'_, B, T>; 2],
        norm: &RmsNorm<'_, B, T>,
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
        let uses = memory.into_iter().chain(norm.memory()).map(|operand| operand.memory());
        // SAFETY: the parameters are the kernel's. All operands are slices of buffers of this rank's device, of the lengths that
        // `check_rows` asks for, which the launch keeps alive; what is written is borrowed exclusively, so nothing overlaps but what is one.
        unsafe { self.launch(stream, work, uses) }
    }
}

impl Rows {
    fn params<B: Backend, T: Float>(
        self,
        group: GroupParams,
        input: u64,
        output: &SliceMut<'_, B, T>,
        norm: &RmsNorm<'_, B, T>,
    ) -> NormParams {
        let [residual, new_residual] = norm.residuals().map_or([0; 2], |slices| slices.map(|slice| slice.address()));
        let packs = self.all_packs();
        let all_reduce = AllReduceParams {
            group,
            input,
            output: output.address(),
            bytes: u64::from(self.rows) * self.bytes,
            packs,
            whole_packs: packs,
            window_packs: packs,
            ..AllReduceParams::zeroed()
        };
        NormParams {
            all_reduce,
            residual,
            new_residual,
            sum: norm.sum.as_ref().map_or(0, SliceMut::address),
            weight: norm.weight.address(),
            row_bytes: self.bytes,
            rows: self.rows,
            row_packs: self.packs,
            inverse_elements: 1.0 / self.elements as f32,
            epsilon: norm.epsilon,
            offset: norm.offset,
            reserved: 0,
        }
    }
}
