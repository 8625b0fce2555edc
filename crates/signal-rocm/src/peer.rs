//! Peer access between devices.

use signal_core::error::{Error, Result};
use signal_core::{Link, PeerAccess};

use crate::device::Device;
use crate::sys;

pub(crate) fn access(from: &Device, to: &Device) -> Result<PeerAccess> {
    if from == to {
        return Ok(PeerAccess { link: Link::SameDevice, refusal: None });
    }
    let driver = from.driver();
    let mut can = 0;
    // SAFETY: writes one integer, which outlives the call.
    let result = unsafe { (driver.hipDeviceCanAccessPeer)(&raw mut can, from.number(), to.number()) };
    driver.check("hipDeviceCanAccessPeer", result)?;
    let (mut kind, mut hops) = (0, 0);
    // SAFETY: writes two integers, which outlive the call.
    let result =
        unsafe { (driver.hipExtGetLinkTypeAndHopCount)(from.number(), to.number(), &raw mut kind, &raw mut hops) };
    // Where the driver does not know the way it is the slow one.
    let link =
        if result == sys::hipSuccess && kind == sys::HSA_AMD_LINK_INFO_TYPE_XGMI { Link::Xgmi } else { Link::Pcie };
    let refusal = (can == 0).then(|| {
        "the HIP runtime reports no peer access for this pair; over PCI Express the host needs large BARs, and an IOMMU off or \
         in passthrough"
            .to_owned()
    });
    Ok(PeerAccess { link, refusal })
}

pub(crate) fn enable(from: &Device, to: &Device) -> Result<()> {
    if from == to {
        return Ok(());
    }
    let _current = from.enter()?;
    let driver = from.driver();
    // SAFETY: no preconditions.
    match unsafe { (driver.hipDeviceEnablePeerAccess)(to.number(), 0) } {
        sys::hipErrorPeerAccessAlreadyEnabled => Ok(()),
        result => driver.check("hipDeviceEnablePeerAccess", result).map_err(|error| Error::Peer {
            from: from.info().name.clone(),
            to: to.info().name.clone(),
            why: error.to_string(),
        }),
    }
}
