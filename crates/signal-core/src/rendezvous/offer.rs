//! What ranks send each other when they exchange file descriptors, as bytes. Pure functions over what a peer may have sent.

use crate::error::{Rendezvous as Reason, Result};

use super::secret::random;
use super::wire::Bytes32;

/// Bytes of a [`Parcel`].
pub(super) const PARCEL: usize = 48;

const MAGIC: [u8; 8] = *b"SGFD\x01\0\0\0";
/// Longest name of an abstract socket.
const MAX_NAME: usize = 107;

/// Where a rank listens, and for what: published by a gather.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// The name that it listens at.
    pub(super) name: String,
    /// What a peer must show there.
    pub(super) token: Bytes32,
    count: u64,
    /// Which boot of which machine it runs on, and in which network namespace; zeros where the kernel does not tell.
    machine: [u8; 36],
    network: (u64, u64),
}

impl Offer {
    pub(super) fn new(name: String, count: usize) -> Result<Self> {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let mut machine = [0; 36];
        if let Some(boot) = boot.get(..36) {
            machine.copy_from_slice(boot);
        }
        let network = std::fs::metadata("/proc/self/ns/net").map_or((0, 0), |found| {
            use std::os::linux::fs::MetadataExt;
            (found.st_dev(), found.st_ino())
        });
        Ok(Offer { name, token: random()?, count: count as u64, machine, network })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(self.token);
        bytes.extend(self.machine);
        bytes.extend(self.network.0.to_le_bytes());
        bytes.extend(self.network.1.to_le_bytes());
        bytes.extend(self.name.as_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (count, rest) = rest.split_first_chunk()?;
        let (token, rest) = rest.split_first_chunk()?;
        let (machine, rest) = rest.split_first_chunk()?;
        let (device, rest) = rest.split_first_chunk()?;
        let (inode, rest) = rest.split_first_chunk()?;
        let name = std::str::from_utf8(rest).ok().filter(|name| (1..=MAX_NAME).contains(&name.len()))?;
        (*magic == MAGIC).then(|| Offer {
            name: name.to_owned(),
            token: *token,
            count: u64::from_le_bytes(*count),
            machine: *machine,
            network: (u64::from_le_bytes(*device), u64::from_le_bytes(*inode)),
        })
    }

    /// All ranks' offers, if they fit each other. Every rank has the same and comes to the same end.
    pub(super) fn decode_all(parts: &[Vec<u8>], rank: usize) -> Result<Vec<Self>> {
        let mut offers = Vec::with_capacity(parts.len());
        for (peer, part) in parts.iter().enumerate() {
            let Some(offer) = Offer::decode(part) else {
                let why = "it sent what is no offer of file descriptors".to_owned();
                return Err(Reason::Protocol { rank, peer, why }.into());
            };
            offers.push(offer);
        }
        let Some(first) = offers.first() else { return Ok(offers) };
        for (peer, offer) in offers.iter().enumerate() {
            if offer.count != first.count {
                let (ours, theirs) = (first.count.to_string(), offer.count.to_string());
                let name = "number of file descriptors";
                return Err(Reason::Disagreement { name, first: 0, ours, rank: peer, theirs }.into());
            }
            let why = if offer.machine != first.machine {
                "file descriptors go from process to process on one machine only, and rank 0 is on another"
            } else if offer.network != first.network {
                "it is in another network namespace than rank 0, as containers are unless they share one (run them with the \
                 host's network, or in one pod)"
            } else {
                continue;
            };
            return Err(Reason::Unreachable { rank, peer, why: why.to_owned() }.into());
        }
        Ok(offers)
    }

    /// Whether the kernel told which network namespace this is.
    pub(super) fn knows_network(&self) -> bool {
        self.network != (0, 0)
    }

    /// Whether a peer has shown this rank's token. Takes the same time wherever the first difference is.
    pub(super) fn is_token(&self, shown: &Bytes32) -> bool {
        self.token.iter().zip(shown).fold(0, |all, (ours, theirs)| all | (ours ^ theirs)) == 0
    }
}

/// What comes with descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parcel {
    /// The token of the rank that it is for.
    pub(super) token: Bytes32,
    /// The rank that it is from.
    pub(super) rank: usize,
    /// Its descriptors.
    pub(super) count: usize,
}

impl Parcel {
    pub(super) fn encode(&self) -> [u8; PARCEL] {
        let mut bytes = [0; PARCEL];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..40].copy_from_slice(&self.token);
        bytes[40..44].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes[44..].copy_from_slice(&(self.count as u32).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; PARCEL] = bytes.try_into().ok()?;
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (token, rest) = rest.split_first_chunk()?;
        let (rank, rest) = rest.split_first_chunk()?;
        let (count, _) = rest.split_first_chunk()?;
        (*magic == MAGIC).then_some(Parcel {
            token: *token,
            rank: u32::from_le_bytes(*rank) as usize,
            count: u32::from_le_bytes(*count) as usize,
        })
    }
}
