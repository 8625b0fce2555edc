//! What ranks send each other, as bytes. Pure functions: everything here may come from a stranger, and every length is
//! checked before memory is taken for it.
//!
//! A frame is a header and a payload. The header is the same in every version, so that ranks of different versions can
//! name the difference: magic u32, version u16, kind u16, length u32, all little-endian.

use std::time::Duration;

use crate::error::{Error, Rendezvous};
use crate::layout::MAX_GPUS;

/// Most bytes of one rank's part of a gather.
pub(super) const MAX_MESSAGE: usize = 1 << 20;
/// Bytes of a header.
pub(super) const HEADER: usize = 12;
/// Most bytes of a frame before its sender has proven that it knows the secret.
pub(super) const MAX_GREETING: usize = HEADER + 64;
/// Most bytes of a frame.
pub(super) const MAX_FRAME: usize = HEADER + PREFIX + MAX_MESSAGE;
/// Version of the frames and of the order in which they are sent.
pub(super) const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"SGRV";
/// Bytes of a part before the rank's own.
const PREFIX: usize = 12;

/// A nonce, a MAC or a secret.
pub(super) type Bytes32 = [u8; 32];

/// A set of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranks(u64);

impl Ranks {
    pub(super) fn of(ranks: impl IntoIterator<Item = usize>) -> Self {
        Ranks(ranks.into_iter().filter(|rank| *rank < MAX_GPUS).fold(0, |set, rank| set | 1 << rank))
    }

    /// These and one more, if there is one.
    pub(super) fn and(self, rank: Option<usize>) -> Self {
        Ranks(self.0 | Ranks::of(rank).0)
    }

    pub(super) fn contains(self, rank: usize) -> bool {
        rank < MAX_GPUS && self.0 >> rank & 1 == 1
    }

    pub(super) fn to_vec(self) -> Vec<usize> {
        (0..MAX_GPUS).filter(|rank| self.contains(*rank)).collect()
    }

    /// Whether it names at least one rank, and none that a world of this size lacks.
    pub(super) fn fits(self, world: usize) -> bool {
        self.0 != 0 && self.0 >> world.min(63) == 0
    }
}

/// Why a group has ended, as one rank tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// These did not come within that time.
    Absent { missing: Ranks, after: Duration },
    /// These have died or left.
    Lost { missing: Ranks },
    /// This rank knows the secret, but of a world of another size.
    World { rank: u32, world: u32 },
}

impl Verdict {
    /// The error of `rank` in a group of `world`.
    pub(super) fn error(self, rank: usize, world: usize) -> Error {
        match self {
            Verdict::Absent { missing, after } => Rendezvous::Absent { rank, missing: missing.to_vec(), after },
            Verdict::Lost { missing } => Rendezvous::Lost { rank, missing: missing.to_vec() },
            Verdict::World { rank, world: theirs } => Rendezvous::Disagreement {
                name: "world size",
                first: 0,
                ours: world.to_string(),
                rank: rank as usize,
                theirs: theirs.to_string(),
            },
        }
        .into()
    }

    /// What an error says of ranks that are missing.
    pub(super) fn of(error: &Error) -> Option<Self> {
        let ranks = |missing: &Vec<usize>| Ranks::of(missing.iter().copied());
        match error {
            Error::Rendezvous(Rendezvous::Absent { missing, after, .. }) => {
                Some(Verdict::Absent { missing: ranks(missing), after: *after })
            }
            Error::Rendezvous(Rendezvous::Lost { missing, .. }) => Some(Verdict::Lost { missing: ranks(missing) }),
            _ => None,
        }
    }

    /// Whether it can be said in a group of `world`.
    pub(super) fn fits(self, world: usize) -> bool {
        match self {
            Verdict::Absent { missing, .. } | Verdict::Lost { missing } => missing.fits(world),
            Verdict::World { .. } => true,
        }
    }
}

/// Why rank 0 does not take a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Its proof is of another secret.
    Secret,
    /// It speaks another version; the header says which one rank 0 speaks.
    Version,
    /// It has another world size than rank 0, whose is this.
    World(u32),
    /// Its rank is there already.
    Duplicate,
    /// There is no such rank in a world of this size.
    Rank,
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// A rank's first: something that was never signed before.
    Hello { nonce: Bytes32 },
    /// Rank 0's answer, likewise.
    Challenge { nonce: Bytes32 },
    /// Who the rank is, signed with the secret over both nonces.
    Proof { rank: u32, world: u32, mac: Bytes32 },
    /// Rank 0's own signature: the rank is taken.
    Welcome { mac: Bytes32 },
    /// The rank is not taken.
    Refuse(Refused),
    /// Rank 0 is at work and has heard from these.
    Waiting { present: Ranks },
    /// All ranks are there.
    Start,
    /// A rank's part of a gather, to rank 0.
    Give { sequence: u64, bytes: Vec<u8> },
    /// A rank's part of a gather, from rank 0.
    Part { sequence: u64, rank: u32, bytes: Vec<u8> },
    /// The group has ended.
    Fail(Verdict),
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("what it sends is not of this library")]
    Magic,
    #[error("it speaks version {0} of the rendezvous, this rank speaks {VERSION}")]
    Version(u16),
    #[error("it sent a frame of the unknown kind {0}")]
    Kind(u16),
    #[error("it sent a frame of kind {kind} with {length} bytes")]
    Length { kind: u16, length: u32 },
    #[error("it sent a frame of kind {0} with an impossible value")]
    Value(u16),
}

impl Frame {
    /// A rank's part for all: written once and sent to each.
    pub(super) fn part(sequence: u64, rank: usize, bytes: &[u8]) -> Vec<u8> {
        let mut payload = Vec::with_capacity(PREFIX + bytes.len());
        payload.extend(sequence.to_le_bytes());
        payload.extend((rank as u32).to_le_bytes());
        payload.extend(bytes);
        frame(9, &payload)
    }

    /// A rank's part for rank 0.
    pub(super) fn give(sequence: u64, bytes: &[u8]) -> Vec<u8> {
        let mut payload = Vec::with_capacity(PREFIX + bytes.len());
        payload.extend(sequence.to_le_bytes());
        payload.extend(bytes);
        frame(8, &payload)
    }

    /// The frame's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::new();
        let kind = match self {
            Frame::Hello { nonce } => {
                payload.extend(nonce);
                1
            }
            Frame::Challenge { nonce } => {
                payload.extend(nonce);
                2
            }
            Frame::Proof { rank, world, mac } => {
                payload.extend(rank.to_le_bytes());
                payload.extend(world.to_le_bytes());
                payload.extend(mac);
                3
            }
            Frame::Welcome { mac } => {
                payload.extend(mac);
                4
            }
            Frame::Refuse(why) => {
                let (code, value): (u32, u32) = match why {
                    Refused::Secret => (1, 0),
                    Refused::Version => (2, 0),
                    Refused::World(world) => (3, *world),
                    Refused::Duplicate => (4, 0),
                    Refused::Rank => (5, 0),
                };
                payload.extend(code.to_le_bytes());
                payload.extend(value.to_le_bytes());
                5
            }
            Frame::Waiting { present } => {
                payload.extend(present.0.to_le_bytes());
                6
            }
            Frame::Start => 7,
            Frame::Give { sequence, bytes } => return Self::give(*sequence, bytes),
            Frame::Part { sequence, rank, bytes } => return Self::part(*sequence, *rank as usize, bytes),
            Frame::Fail(verdict) => {
                let (code, first, second): (u32, u64, u64) = match verdict {
                    Verdict::Absent { missing, after } => (1, missing.0, after.as_millis().min(u64::MAX.into()) as u64),
                    Verdict::Lost { missing } => (2, missing.0, 0),
                    Verdict::World { rank, world } => (3, u64::from(*rank), u64::from(*world)),
                };
                payload.extend(code.to_le_bytes());
                payload.extend(first.to_le_bytes());
                payload.extend(second.to_le_bytes());
                10
            }
        };
        frame(kind, &payload)
    }

    /// The first frame of `bytes` and the bytes that it takes, or nothing while it is not complete. A frame longer than
    /// `limit` is refused by its header.
    pub(super) fn decode(bytes: &[u8], limit: usize) -> Result<Option<(Frame, usize)>, Malformed> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err(Malformed::Magic);
        }
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let [_, _, _, _, v0, v1, k0, k1, l0, l1, l2, l3] = *header;
        let (version, kind, length) =
            (u16::from_le_bytes([v0, v1]), u16::from_le_bytes([k0, k1]), u32::from_le_bytes([l0, l1, l2, l3]));
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        let possible = match kind {
            1 | 2 | 4 => 32..=32,
            3 => 40..=40,
            5 | 6 => 8..=8,
            7 => 0..=0,
            8 => 8..=8 + MAX_MESSAGE,
            9 => PREFIX..=PREFIX + MAX_MESSAGE,
            10 => 20..=20,
            _ => return Err(Malformed::Kind(kind)),
        };
        let size = usize::try_from(length).unwrap_or(usize::MAX);
        if !possible.contains(&size) || size > limit.saturating_sub(HEADER) {
            return Err(Malformed::Length { kind, length });
        }
        let Some(payload) = rest.get(..size) else { return Ok(None) };
        let frame = Frame::parse(kind, payload).ok_or(Malformed::Value(kind))?;
        Ok(Some((frame, HEADER + size)))
    }

    fn parse(kind: u16, payload: &[u8]) -> Option<Frame> {
        let mut rest = payload;
        let frame = match kind {
            1 => Frame::Hello { nonce: take(&mut rest)? },
            2 => Frame::Challenge { nonce: take(&mut rest)? },
            3 => Frame::Proof { rank: word(&mut rest)?, world: word(&mut rest)?, mac: take(&mut rest)? },
            4 => Frame::Welcome { mac: take(&mut rest)? },
            5 => Frame::Refuse(match (word(&mut rest)?, word(&mut rest)?) {
                (1, _) => Refused::Secret,
                (2, _) => Refused::Version,
                (3, world) => Refused::World(world),
                (4, _) => Refused::Duplicate,
                (5, _) => Refused::Rank,
                _ => return None,
            }),
            6 => Frame::Waiting { present: Ranks(long(&mut rest)?) },
            7 => Frame::Start,
            8 => Frame::Give { sequence: long(&mut rest)?, bytes: rest.to_vec() },
            9 => Frame::Part { sequence: long(&mut rest)?, rank: word(&mut rest)?, bytes: rest.to_vec() },
            10 => Frame::Fail(match (word(&mut rest)?, long(&mut rest)?, long(&mut rest)?) {
                (1, missing, after) => Verdict::Absent { missing: Ranks(missing), after: Duration::from_millis(after) },
                (2, missing, _) => Verdict::Lost { missing: Ranks(missing) },
                (3, rank, world) => Verdict::World { rank: rank.try_into().ok()?, world: world.try_into().ok()? },
                _ => return None,
            }),
            _ => return None,
        };
        Some(frame)
    }
}

fn frame(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    // Who sends more than MAX_MESSAGE is refused before it gets here.
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

fn word(rest: &mut &[u8]) -> Option<u32> {
    take(rest).map(u32::from_le_bytes)
}

fn long(rest: &mut &[u8]) -> Option<u64> {
    take(rest).map(u64::from_le_bytes)
}
