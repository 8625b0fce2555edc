//! What a program hands to its ranks so that they find each other.

use std::fmt;

use crate::error::{Rendezvous, Result};

use super::secret::{Secret, digest, hex, random};

/// 128 bytes by which ranks find each other, as NCCL's unique id: made anywhere, sent to all ranks by whatever the program
/// has, used by each of them ([`UnixRendezvous::from_id`](super::UnixRendezvous::from_id)).
///
/// Who has the id can join the group, so it is to be kept as a secret is.
//  0  magic, 8 bytes
//  8  version, u32
//  12 zero, 4 bytes
//  16 secret, 32 bytes
//  48 name, 32 hexadecimal digits
//  80 zero, 40 bytes
// 120 the first 8 bytes of a hash of all before
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Id([u8; Id::BYTES]);

const MAGIC: &[u8; 8] = b"SIGNALID";
const VERSION: u32 = 1;
const CHECKED: usize = 120;

impl Id {
    /// Bytes of an id.
    pub const BYTES: usize = 128;

    /// A new one, from the kernel's random numbers.
    ///
    /// # Errors
    /// [`Rendezvous::System`] if there are none.
    pub fn new() -> Result<Self> {
        Ok(Self::of(random()?))
    }

    fn of(secret: [u8; 32]) -> Self {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..48].copy_from_slice(&secret);
        bytes[48..80].copy_from_slice(name_of(&secret).as_bytes());
        let sum = digest(&[b"signal id", &bytes[..CHECKED]]);
        bytes[CHECKED..].copy_from_slice(&sum[..8]);
        Id(bytes)
    }

    /// The bytes, to be sent to other ranks.
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// An id that another process made.
    ///
    /// # Errors
    /// [`Rendezvous::NotAnId`] unless it was one of this version, whole.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<Self> {
        let not = |why| Err(Rendezvous::NotAnId(why).into());
        if bytes[..8] != MAGIC[..] {
            return not("it does not begin as one");
        }
        if bytes[8..12] != VERSION.to_le_bytes() {
            return not("it is of another version of this library");
        }
        let mut secret = [0; 32];
        secret.copy_from_slice(&bytes[16..48]);
        let id = Id::of(secret);
        if id.0 != *bytes {
            return not("some of its bytes were changed");
        }
        Ok(id)
    }

    /// The bytes as 256 hexadecimal digits, for an environment or a file. Whoever reads them can join the group.
    pub fn to_hex(&self) -> String {
        hex(&self.0)
    }

    /// An id from what [`to_hex`](Self::to_hex) gave.
    ///
    /// # Errors
    /// As [`from_bytes`](Self::from_bytes).
    pub fn from_hex(text: &str) -> Result<Self> {
        let not = || Rendezvous::NotAnId("it is not 256 hexadecimal digits");
        if text.len() != 2 * Self::BYTES || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(not().into());
        }
        let mut bytes = [0; Self::BYTES];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|_| not())?;
        }
        Self::from_bytes(&bytes)
    }

    /// The name at which ranks meet.
    pub(super) fn name(&self) -> &str {
        // Both constructors have written digits there.
        std::str::from_utf8(&self.0[48..80]).unwrap_or_default()
    }

    pub(super) fn secret(&self) -> Secret {
        Secret::new(&self.0[16..48])
    }
}

/// The secret cannot be found from it.
fn name_of(secret: &[u8; 32]) -> String {
    hex(&digest(&[b"signal id name", secret])[..16])
}

/// Its name only: what is printed ends in logs.
impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Id").field(&self.name()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn an_id_survives_its_bytes() {
        let id = Id::new().unwrap();
        assert_eq!(Id::from_bytes(id.as_bytes()), Ok(id));
        let text = id.to_hex();
        assert_eq!(Id::from_hex(&text), Ok(id));
        for wrong in ["", &text[1..], &text[2..], &format!("{text}0"), &format!("+{}", &text[1..]), &"é".repeat(128)] {
            let expected = Rendezvous::NotAnId("it is not 256 hexadecimal digits");
            assert_eq!(Id::from_hex(wrong), Err(Error::Rendezvous(expected)), "{wrong}");
        }
        assert_ne!(Id::new().unwrap(), id);
        assert_eq!(size_of::<Id>(), 128);
    }

    #[test]
    fn a_changed_byte_is_found() {
        let id = Id::new().unwrap();
        for at in 0..Id::BYTES {
            let mut bytes = *id.as_bytes();
            bytes[at] ^= 1;
            let result = Id::from_bytes(&bytes);
            assert!(matches!(result, Err(Error::Rendezvous(Rendezvous::NotAnId(_)))), "byte {at} gave {result:?}");
        }
        assert!(Id::from_bytes(&[0; 128]).is_err());
    }

    #[test]
    fn what_is_printed_is_no_secret() {
        let id = Id::new().unwrap();
        let printed = format!("{id:?} {:?}", id.secret());
        assert!(!printed.contains(&hex(&id.0[16..20])), "{printed}");
        assert!(printed.contains(id.name()));
    }
}
