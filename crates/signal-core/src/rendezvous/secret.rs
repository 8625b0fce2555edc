//! What ranks of one group know and strangers do not. It is proven, never sent: each side signs both sides' nonces.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};

use crate::error::{Error, Rendezvous, Result};

use super::wire::Bytes32;

/// A group's secret.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret(Bytes32);

impl Secret {
    /// Of a secret of any length.
    pub(super) fn new(bytes: &[u8]) -> Self {
        Secret(digest(&[b"signal secret", bytes]))
    }

    /// A rank's proof that it knows the secret.
    pub(super) fn prove_rank(&self, hello: &Bytes32, challenge: &Bytes32, rank: u32, world: u32) -> Bytes32 {
        self.proof(b"signal rank", hello, challenge, rank, world).finalize().into_bytes().into()
    }

    /// Rank 0's proof. Its label differs, so that a rank's proof cannot be sent back as rank 0's.
    pub(super) fn prove_hub(&self, hello: &Bytes32, challenge: &Bytes32, rank: u32, world: u32) -> Bytes32 {
        self.proof(b"signal hub", hello, challenge, rank, world).finalize().into_bytes().into()
    }

    /// Whether a rank's proof is of this secret; takes the same time wherever the first difference is.
    pub(super) fn is_rank(&self, hello: &Bytes32, challenge: &Bytes32, rank: u32, world: u32, mac: &Bytes32) -> bool {
        self.proof(b"signal rank", hello, challenge, rank, world).verify_slice(mac).is_ok()
    }

    /// Whether rank 0's proof is of this secret.
    pub(super) fn is_hub(&self, hello: &Bytes32, challenge: &Bytes32, rank: u32, world: u32, mac: &Bytes32) -> bool {
        self.proof(b"signal hub", hello, challenge, rank, world).verify_slice(mac).is_ok()
    }

    fn proof(&self, label: &[u8], hello: &Bytes32, challenge: &Bytes32, rank: u32, world: u32) -> Hmac<Sha256> {
        // HMAC fills a shorter key with zeros up to the block of the hash, which is 64 bytes; given whole, it cannot fail.
        let mut key = [0; 64];
        key[..32].copy_from_slice(&self.0);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&key.into());
        mac.update(&[label.len() as u8]);
        mac.update(label);
        mac.update(hello);
        mac.update(challenge);
        mac.update(&rank.to_le_bytes());
        mac.update(&world.to_le_bytes());
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Random bytes from the kernel.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                let why = format!("no random bytes from the kernel: {error}");
                return Err(Error::from(Rendezvous::System { why }));
            }
        }
    }
    Ok(bytes)
}

/// SHA-256 over parts that cannot run into each other.
pub(super) fn digest(parts: &[&[u8]]) -> Bytes32 {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
