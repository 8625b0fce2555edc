//! Peer access between devices.

use cudarc::driver::sys::{self, CUdevice_P2PAttribute, CUresult};
use signal_core::error::{Error, Result};
use signal_core::{Link, PeerAccess};

use crate::device::Device;
use crate::driver::check;
use crate::shared;

pub(crate) fn access(from: &Device, to: &Device) -> Result<PeerAccess> {
    if from == to {
        return Ok(PeerAccess { link: Link::SameDevice, refusal: None });
    }
    let mut can = 0;
    // SAFETY: writes one integer, which outlives the call.
    let result = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, from.handle(), to.handle()) };
    check("cuDeviceCanAccessPeer", result)?;
    let mut atomics = 0;
    let attribute = CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    // SAFETY: as above.
    let result = unsafe { sys::cuDeviceGetP2PAttribute(&raw mut atomics, attribute, from.handle(), to.handle()) };
    check("cuDeviceGetP2PAttribute", result)?;
    // NVLink carries atomics natively, PCIe between GPUs does not.
    let link = if atomics != 0 { Link::NvLink } else { Link::Pcie };
    let refusal = (can == 0).then(|| "the driver reports no peer access for this pair".to_owned());
    Ok(PeerAccess { link, refusal })
}

pub(crate) fn enable(from: &Device, to: &Device) -> Result<()> {
    if from == to {
        return Ok(());
    }
    let context = to.context()?;
    let _current = from.enter()?;
    // SAFETY: both contexts are primary ones, retained for the rest of the program.
    let enabled = match unsafe { sys::cuCtxEnablePeerAccess(context, 0) } {
        CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        result => check("cuCtxEnablePeerAccess", result),
    };
    enabled.and_then(|()| shared::admit(to, from)).map_err(|error| Error::Peer {
        from: from.info().name.clone(),
        to: to.info().name.clone(),
        why: error.to_string(),
    })
}
