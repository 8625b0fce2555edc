//! Checked mode: what a call is, in two words that ranks exchange and compare before it moves data.
#![forbid(unsafe_code)]

use std::fmt;

use crate::collective::Collective;
use crate::dtype::{Dtype, ReduceOp};
use crate::kernel::{Algorithm, RowFormat};
use crate::layout::MAX_GPUS;
use crate::plan::Plan;

/// A call, as far as two ranks must agree on it.
///
/// ```text
/// word 0: bits 0..4 kind, 4..8 dtype, 8..12 operator, 12..16 algorithm, 16..32 blocks, 32..48 threads, 48..52 root, 52..56 collective
/// word 1: bits 0..61 elements of a reduction, else bytes; of a ragged call a hash of all ranks' counts; with counts on the device the
///         room in elements << 16, and the bytes of one; of normed rows their number << 32, and the elements of one
/// ```
/// Of normed rows the operator is the format, and the root 1 for LayerNorm, and 2 more for a fast one.
/// Of a user's kernel: a hash of its name in bits 4..16 and 48..61 of word 0, and in word 1 what the user says of the call.
/// Of sends and receives: the bytes from the lower to the higher rank in word 0 from bit 4 on, those of the other way in word 1.
/// Bits 61 to 63 of both stay clear, as the kernel asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Description([u64; 2]);

const BARRIER: u64 = 1;
const COLLECTIVE: u64 = 2;
/// A call without elements, which launches nothing but its check.
const NOTHING: u64 = 3;
const RAGGED: u64 = 4;
const SEND_RECV: u64 = 5;
const COUNTED: u64 = 6;
const ROWS: u64 = 7;
const USER: u64 = 8;

/// The bits of a word that may be set.
const BITS: u64 = u64::MAX >> 3;

/// What is moved or reduced, as far as a description tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amount {
    /// Elements of a type, combined by an operator.
    Elements(usize, Dtype, ReduceOp),
    /// Bytes for each rank.
    Bytes(u64),
    /// A hash of the bytes for each rank.
    Ragged(u64),
    /// So many rows of so many elements of a type, and what becomes of them.
    Rows(u32, u32, Dtype, Normed),
    /// Room for so many elements of so many bytes for each rank, of which the device tells how many there are.
    Counted(u64, u64),
}

/// What becomes of rows, as far as ranks must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Normed {
    pub(crate) format: RowFormat,
    pub(crate) is_layer: bool,
    pub(crate) is_fast: bool,
}

impl Description {
    pub(crate) fn barrier(blocks: u32, threads: u32) -> Self {
        Description([BARRIER | grid(blocks, threads), 0])
    }

    /// `root` is 0 for a collective that has none.
    pub(crate) fn collective(collective: Collective, plan: &Plan, root: usize, amount: Amount) -> Self {
        let (kind, amount) = match amount {
            Amount::Elements(0, ..) | Amount::Bytes(0) => return Description([NOTHING | (collective as u64) << 52, 0]),
            Amount::Elements(count, dtype, op) => (COLLECTIVE | (dtype as u64) << 4 | (op as u64) << 8, count as u64),
            Amount::Bytes(bytes) => (COLLECTIVE, bytes),
            Amount::Ragged(hash) => (RAGGED, hash),
            Amount::Rows(0, ..) => return Description([NOTHING | (collective as u64) << 52, 0]),
            Amount::Rows(rows, elements, dtype, normed) => {
                let how = u64::from(normed.is_layer) | u64::from(normed.is_fast) << 1;
                let kind = ROWS | (dtype as u64) << 4 | (normed.format as u64) << 8 | how << 48;
                (kind, u64::from(rows) << 32 | u64::from(elements))
            }
            Amount::Counted(room, bytes) => (COUNTED, room << 16 | bytes & 0xffff),
        };
        let kind = kind | (plan.algorithm as u64) << 12 | (root as u64) << 48 | (collective as u64) << 52;
        Description([kind | grid(plan.blocks, plan.threads), amount & BITS])
    }

    pub(crate) fn user(name: &str, blocks: u32, threads: u32, word: u64) -> Self {
        // FNV-1a.
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let (low, high) = (hash >> 20 & 0xfff, hash >> 32 & 0x1fff);
        Description([USER | low << 4 | grid(blocks, threads) | high << 48, word & BITS])
    }

    pub(crate) fn send_recv(to_higher: u64, to_lower: u64) -> Self {
        Description([(SEND_RECV | to_higher << 4) & BITS, to_lower & BITS])
    }

    /// From a fault record: the low half of each word first.
    pub(crate) fn from_words(words: [u32; MAX_GPUS]) -> Self {
        let word = |i: usize| u64::from(words[i]) | u64::from(words[i + 1]) << 32;
        Description([word(0), word(2)])
    }

    pub(crate) fn words(self) -> [u64; 2] {
        self.0
    }

    fn bits(self, from: u32, len: u32) -> u64 {
        self.0[0] >> from & ((1 << len) - 1)
    }
}

fn grid(blocks: u32, threads: u32) -> u64 {
    u64::from(blocks & 0xffff) << 16 | u64::from(threads & 0xffff) << 32
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |found: Option<&'static str>| found.unwrap_or("unknown");
        let kind = self.bits(0, 4);
        match kind {
            BARRIER => f.write_str("a barrier")?,
            COLLECTIVE | RAGGED | COUNTED | ROWS | NOTHING => {
                let found = Collective::ALL.get(self.bits(52, 4) as usize).copied();
                let collective = name(found.map(Collective::name));
                let article = if collective.starts_with(['a', 'u']) { "an" } else { "a" };
                write!(f, "{article} {collective} of ")?;
                if kind == NOTHING {
                    return f.write_str("nothing");
                }
                let algorithm = name(Algorithm::ALL.get(self.bits(12, 4) as usize).map(|algorithm| algorithm.name()));
                if kind == RAGGED {
                    write!(f, "ragged pieces ({algorithm}, sizes {:x})", self.0[1])?;
                } else if kind == COUNTED {
                    let (room, bytes) = (self.0[1] >> 16, self.0[1] & 0xffff);
                    write!(f, "up to {room} elements of {bytes} bytes ({algorithm})")?;
                } else if kind == ROWS {
                    let dtype = name(Dtype::ALL.get(self.bits(4, 4) as usize).map(|dtype| dtype.name()));
                    let (rows, elements) = (self.0[1] >> 32, self.0[1] & 0xffff_ffff);
                    let norm = if self.bits(48, 1) == 1 { "LayerNorm" } else { "RMSNorm" };
                    let fast = if self.bits(49, 1) == 1 { "fast " } else { "" };
                    let format = name(RowFormat::ALL.get(self.bits(8, 4) as usize).map(|format| format.name()));
                    write!(f, "{rows} rows of {elements} {dtype} with {fast}{norm} to {format} ({algorithm})")?;
                } else if found.is_some_and(Collective::reduces) {
                    let dtype = name(Dtype::ALL.get(self.bits(4, 4) as usize).map(|dtype| dtype.name()));
                    let op = name(ReduceOp::ALL.get(self.bits(8, 4) as usize).map(|op| op.name()));
                    write!(f, "{} {dtype} ({op}, {algorithm})", self.0[1])?;
                } else {
                    write!(f, "{} bytes ({algorithm})", self.0[1])?;
                }
                if found.is_some_and(Collective::has_root) {
                    write!(f, " with root {}", self.bits(48, 4))?;
                }
            }
            USER => {
                let hash = self.bits(48, 13) << 12 | self.bits(4, 12);
                write!(f, "a user's kernel (name {hash:07x}, description {:#x})", self.0[1])?;
            }
            SEND_RECV => {
                let (to_higher, to_lower) = (self.0[0] >> 4, self.0[1]);
                return write!(f, "a send-recv of {to_higher} bytes to the higher rank and {to_lower} to the lower");
            }
            _ => return f.write_str("an unknown collective"),
        }
        write!(f, " on {} x {} threads", self.bits(16, 16), self.bits(32, 16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { algorithm: Algorithm::TwoStage, blocks: 1024, threads: 512 };

    fn described(collective: Collective, algorithm: Algorithm, root: usize, amount: Amount) -> String {
        let call = Description::collective(collective, &Plan { algorithm, ..PLAN }, root, amount);
        let [a, b] = call.words();
        let words = [a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32, 0, 0, 0, 0];
        assert_eq!(Description::from_words(words), call);
        call.to_string()
    }

    #[test]
    fn descriptions_read_back() {
        let sum = |count| Amount::Elements(count, Dtype::Bf16, ReduceOp::Sum);
        let found = described(Collective::AllReduce, Algorithm::TwoStage, 0, sum(123_456_789_012));
        assert_eq!(found, "an all-reduce of 123456789012 bf16 (sum, two-stage) on 1024 x 512 threads");
        let found = described(Collective::Reduce, Algorithm::Pull, 7, Amount::Elements(5, Dtype::I8, ReduceOp::Max));
        assert_eq!(found, "a reduce of 5 i8 (max, pull) with root 7 on 1024 x 512 threads");
        let found = described(Collective::Broadcast, Algorithm::Pull, 3, Amount::Bytes(17));
        assert_eq!(found, "a broadcast of 17 bytes (pull) with root 3 on 1024 x 512 threads");
        let found = described(Collective::AllGather, Algorithm::Pull, 0, Amount::Ragged(0xabc));
        assert_eq!(found, "an all-gather of ragged pieces (pull, sizes abc) on 1024 x 512 threads");
        let found = described(Collective::AllToAll, Algorithm::Pull, 0, Amount::Counted(77, 12));
        assert_eq!(found, "an all-to-all of up to 77 elements of 12 bytes (pull) on 1024 x 512 threads");
        let rows =
            |normed| described(Collective::AllReduce, Algorithm::Lamport, 0, Amount::Rows(7, 99, Dtype::Bf16, normed));
        let found = rows(Normed { format: RowFormat::Plain, is_layer: false, is_fast: false });
        assert_eq!(found, "an all-reduce of 7 rows of 99 bf16 with RMSNorm to plain (lamport) on 1024 x 512 threads");
        let found = rows(Normed { format: RowFormat::Nvfp4, is_layer: true, is_fast: true });
        let expected =
            "an all-reduce of 7 rows of 99 bf16 with fast LayerNorm to nvfp4 (lamport) on 1024 x 512 threads";
        assert_eq!(found, expected);
        assert_eq!(described(Collective::AllReduce, Algorithm::Lamport, 0, sum(0)), "an all-reduce of nothing");
        assert_eq!(Description::barrier(2, 32).to_string(), "a barrier on 2 x 32 threads");
        let user = Description::user("my_kernel", 3, 64, 0x1234);
        assert!(user.to_string().starts_with("a user's kernel (name "), "{user}");
        assert!(user.to_string().ends_with(", description 0x1234) on 3 x 64 threads"), "{user}");
        assert_ne!(user, Description::user("my_kerne1", 3, 64, 0x1234));
        let both = Description::send_recv(123, 45).to_string();
        assert_eq!(both, "a send-recv of 123 bytes to the higher rank and 45 to the lower");
        assert_eq!(Description([0, 0]).to_string(), "an unknown collective");
    }

    #[test]
    fn the_three_highest_bits_stay_clear() {
        let plan = Plan { algorithm: Algorithm::Pull, blocks: u32::MAX, threads: u32::MAX };
        let amounts = [
            Amount::Elements(usize::MAX, Dtype::E5m2, ReduceOp::Avg),
            Amount::Bytes(u64::MAX),
            Amount::Ragged(u64::MAX),
        ];
        for amount in amounts {
            let call = Description::collective(Collective::SendRecv, &plan, 7, amount);
            assert!(call.words().iter().all(|word| word >> 61 == 0));
        }
        assert!(Description::user("name", u32::MAX, u32::MAX, u64::MAX).words().iter().all(|word| word >> 61 == 0));
        assert!(Description::send_recv(u64::MAX, u64::MAX).words().iter().all(|word| word >> 61 == 0));
    }
}
