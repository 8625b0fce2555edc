//! Collectives with a norm as methods of a communicator: what each does.

use super::{LayerNorm, NormOutput, RmsNorm};
use crate::backend::Backend;
use crate::buffer::Slice;
use crate::comm::CallOptions;
use crate::comm::domain::callers;
use crate::dtype::Float;
use crate::error::Result;

callers! {
/// Norms, alone and behind collectives.
impl<B: Backend> Communicator<B> {
    /// Enqueues an all-reduce by sum of rows, and RMSNorm of each sum: `output` becomes the normed rows, or codes of them. How many elements a row
    /// has, the norm's weights say.
    ///
    /// Small messages take one kernel by Lamport's algorithm; larger ones two kernels, or, where only one has a place for what is between, one by
    /// [`TwoStagePush`](crate::Algorithm::TwoStagePush). The bits are the same. What `norm` adds and weighs is this rank's own: ranks that give equal
    /// operands get equal bits. The norm, whether it is fast, and the form of the output are those of the call, on every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ApiMisuse::NormType`](crate::ApiMisuse::NormType) for other types than f32, f16 and bf16;
    /// [`ApiMisuse::Codes`](crate::ApiMisuse::Codes), [`ApiMisuse::Blocks`](crate::ApiMisuse::Blocks) and
    /// [`ApiMisuse::RowTooLarge`](crate::ApiMisuse::RowTooLarge).
    pub fn all_reduce_rms_norm<'a, T: Float>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<NormOutput<'a, B, T>>,
        norm: RmsNorm<'a, B, T>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_reduce_rms_norm(stream, input, output, norm)
    }

    /// As [`all_reduce_rms_norm`](Self::all_reduce_rms_norm), with LayerNorm.
    ///
    /// # Errors
    /// As [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    pub fn all_reduce_layer_norm<'a, T: Float>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<NormOutput<'a, B, T>>,
        norm: LayerNorm<'a, B, T>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_reduce_layer_norm(stream, input, output, norm)
    }

    /// Enqueues a reduce-scatter by sum of rows, and RMSNorm of each sum. `input` holds as many rows for each rank, one rank's behind the other's;
    /// all other operands are as long as this rank's. In all else as [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    ///
    /// # Errors
    /// As [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    pub fn reduce_scatter_rms_norm<'a, T: Float>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<NormOutput<'a, B, T>>,
        norm: RmsNorm<'a, B, T>,
    ) -> Result<()> {
        self.with(CallOptions::default()).reduce_scatter_rms_norm(stream, input, output, norm)
    }

    /// As [`reduce_scatter_rms_norm`](Self::reduce_scatter_rms_norm), with LayerNorm.
    ///
    /// # Errors
    /// As [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    pub fn reduce_scatter_layer_norm<'a, T: Float>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<NormOutput<'a, B, T>>,
        norm: LayerNorm<'a, B, T>,
    ) -> Result<()> {
        self.with(CallOptions::default()).reduce_scatter_layer_norm(stream, input, output, norm)
    }

    /// Enqueues an all-gather of rows, of which each rank has as many, and RMSNorm of each: all operands but `input` are as long as all ranks' rows. In all
    /// else as [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    ///
    /// # Errors
    /// As [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    pub fn all_gather_rms_norm<'a, T: Float>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<NormOutput<'a, B, T>>,
        norm: RmsNorm<'a, B, T>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_gather_rms_norm(stream, input, output, norm)
    }

    /// As [`all_gather_rms_norm`](Self::all_gather_rms_norm), with LayerNorm.
    ///
    /// # Errors
    /// As [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    pub fn all_gather_layer_norm<'a, T: Float>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<NormOutput<'a, B, T>>,
        norm: LayerNorm<'a, B, T>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_gather_layer_norm(stream, input, output, norm)
    }

    /// Enqueues RMSNorm of rows of this rank, which meets no other for it.
    ///
    /// # Errors
    /// As [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    pub fn rms_norm<'a, T: Float>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<NormOutput<'a, B, T>>,
        norm: RmsNorm<'a, B, T>,
    ) -> Result<()> {
        self.with(CallOptions::default()).rms_norm(stream, input, output, norm)
    }

    /// Enqueues LayerNorm of rows of this rank, which meets no other for it.
    ///
    /// # Errors
    /// As [`all_reduce_rms_norm`](Self::all_reduce_rms_norm).
    pub fn layer_norm<'a, T: Float>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<NormOutput<'a, B, T>>,
        norm: LayerNorm<'a, B, T>,
    ) -> Result<()> {
        self.with(CallOptions::default()).layer_norm(stream, input, output, norm)
    }
}
}
