//! Peer access. All memory is one memory, so every device reaches every other, except where the configuration says
//! that it shall not.

use signal_core::backend::{Link, PeerAccess};
use signal_core::error::{Error, Result};

use crate::device::Device;

pub(crate) fn access(from: &Device, to: &Device) -> PeerAccess {
    let link = if from == to { Link::SameDevice } else { Link::Host };
    let blocked = from.host().config.blocked_peers.contains(&(from.index(), to.index()));
    let refusal =
        blocked.then(|| "the host configuration blocks this direction (HostConfig::blocked_peers)".to_string());
    PeerAccess { link, refusal }
}

/// There is nothing to switch on, so this only refuses.
pub(crate) fn enable(from: &Device, to: &Device) -> Result<()> {
    match access(from, to).refusal {
        None => Ok(()),
        Some(why) => Err(Error::Peer { from: from.name(), to: to.name(), why }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::IMAGE;
    use crate::{Host, HostConfig};
    use signal_core::backend::Backend;

    #[test]
    fn a_blocked_direction_is_refused_with_the_reason() {
        let config = HostConfig { devices: 3, blocked_peers: vec![(0, 2)], ..HostConfig::default() };
        let host = Host::open(IMAGE, config).unwrap();
        let d = host.devices().unwrap();
        assert_eq!(Host::peer_access(&d[1], &d[1]).unwrap(), PeerAccess { link: Link::SameDevice, refusal: None });
        assert_eq!(Host::peer_access(&d[2], &d[0]).unwrap(), PeerAccess { link: Link::Host, refusal: None });
        let refused = Host::peer_access(&d[0], &d[2]).unwrap();
        assert_eq!(refused.link, Link::Host);
        let why = refused.refusal.unwrap();
        assert!(why.contains("blocked_peers"));
        for _ in 0..2 {
            assert_eq!(Host::enable_peer(&d[2], &d[0]), Ok(()));
            let (from, to, why) = ("CPU 0".to_string(), "CPU 2".to_string(), why.clone());
            assert_eq!(Host::enable_peer(&d[0], &d[2]), Err(Error::Peer { from, to, why }));
        }
    }
}
