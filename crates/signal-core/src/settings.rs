//! What a user may set. Every setting that ranks must share is compared when a communicator is created (P4).
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{ApiMisuse, Result};
use crate::kernel::Algorithm;
use crate::tuning::Tuning;

/// Settings of one rank. [`Default`] gives the defaults; [`from_env`](Self::from_env) the environment's.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Settings {
    /// `SIGNAL_TIMEOUT`, in seconds: the longest wait at one barrier. Default 300 s: it must exceed every legitimate skew
    /// between ranks, such as one rank compiling kernels while the others wait.
    pub timeout: Duration,
    /// `SIGNAL_SCRATCH`, in bytes with an optional K, M or G: peer-visible scratch of each rank. Default 64 MiB.
    pub scratch_bytes: usize,
    /// `SIGNAL_DOMAINS`, 0 or 1: allow domains above 0. Each domain then has an eighth of the scratch, and its calls an eighth of the
    /// blocks that fit.
    pub domains: bool,
    /// `SIGNAL_ALGO`: use this algorithm for every call that does not choose one, and that it can take.
    pub algorithm: Option<Algorithm>,
    /// `SIGNAL_EARLY_LAUNCH`, 0 or 1 (default): let a call be launched while the kernel before it on its stream still
    /// runs, on devices that can. Off if a kernel of yours stands between two calls that is itself launched early and does
    /// not wait for the kernels before it (`griddepcontrol.wait`).
    pub early_launch: bool,
    /// `SIGNAL_ORDERED`, 0 (default) or 1: every barrier releases and acquires at system scope, also where the protocol does
    /// not need it. To compare, and to rule a suspicion out.
    pub ordered_barriers: bool,
    /// `SIGNAL_P2P`, 0 or 1: whether what ranks share lies in the memory of their devices. Unset: where all devices reach each other, and else
    /// in pinned memory of the host, with a warning; slower, and with the same results. 0: in the host's in any case. 1: in the devices', or creation fails
    /// with [`Error::Peer`](crate::Error::Peer).
    pub peer_to_peer: Option<bool>,
    /// `SIGNAL_CHECK`, 0 (default) or 1: before each call the ranks compare what they call, and a difference is
    /// [`Error::RankMismatch`](crate::Error::RankMismatch) on all of them instead of a wrong result or a timeout. Costs a
    /// kernel and two barriers a call.
    pub check: bool,
    /// `SIGNAL_MAX_BLOCKS`: the most blocks of a call's grid, where more would fit: to leave room on the device to whatever else runs
    /// there, such as another communicator. Calls that choose more, and a `SIGNAL_BLOCKS` above it, are
    /// [`ApiMisuse::Grid`]. A [split](crate::Communicator::split) divides it as all that fits.
    pub max_blocks: Option<u32>,
    /// `SIGNAL_TUNING`, a file that `signal tune` wrote: plans that come before the library's own, the same on all ranks. A communicator is refused
    /// on devices of another family or architecture than they were measured on; for a link or a world size that was not measured, the library's own serve.
    pub tuning: Option<Arc<Tuning>>,
    /// `SIGNAL_TRACE`, a file: a timeline of all calls in the Chrome trace format, to which ranks and processes append. Each call is preceded by a meeting
    /// of its ranks, and takes two small kernels more. On all ranks or none.
    pub trace: Option<PathBuf>,
    /// `SIGNAL_BLOCKS`: blocks of every call that does not choose.
    pub blocks: Option<u32>,
    /// `SIGNAL_THREADS`: threads a block of every call that does not choose.
    pub threads: Option<u32>,
}

impl Settings {
    /// Least [`scratch_bytes`](Self::scratch_bytes): 8 KiB for each domain.
    pub const MIN_SCRATCH_BYTES: usize = 64 << 10;
    /// Most [`scratch_bytes`](Self::scratch_bytes): 32 GiB, so that kernels count the packs of a window in 32 bits.
    pub const MAX_SCRATCH_BYTES: usize = 32 << 30;

    /// The defaults, overridden by the `SIGNAL_*` variables that are set.
    ///
    /// # Errors
    /// [`ApiMisuse::Setting`] with the variable's name.
    pub fn from_env() -> Result<Self> {
        Self::parse(|name| std::env::var(name).ok())
    }

    fn parse(get: impl Fn(&'static str) -> Option<String>) -> Result<Self> {
        let mut settings = Settings::default();
        let value = |name| get(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        if let Some(v) = value("SIGNAL_TIMEOUT") {
            settings.timeout = v
                .parse()
                .ok()
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .ok_or_else(|| bad("SIGNAL_TIMEOUT", &v, "a number of seconds is needed"))?;
        }
        if let Some(v) = value("SIGNAL_SCRATCH") {
            settings.scratch_bytes =
                parse_bytes(&v).ok_or_else(|| bad("SIGNAL_SCRATCH", &v, "bytes are needed, such as 64M"))?;
        }
        let switch = |name| match value(name).as_deref() {
            None => Ok(None),
            Some("0") => Ok(Some(false)),
            Some("1") => Ok(Some(true)),
            Some(v) => Err(bad(name, v, "0 or 1 is needed")),
        };
        for (name, setting) in [
            ("SIGNAL_DOMAINS", &mut settings.domains),
            ("SIGNAL_EARLY_LAUNCH", &mut settings.early_launch),
            ("SIGNAL_ORDERED", &mut settings.ordered_barriers),
            ("SIGNAL_CHECK", &mut settings.check),
        ] {
            *setting = switch(name)?.unwrap_or(*setting);
        }
        settings.peer_to_peer = switch("SIGNAL_P2P")?;
        if let Some(v) = value("SIGNAL_ALGO").filter(|v| v != "auto") {
            let names = Algorithm::ALL.map(Algorithm::name).join(", ");
            let algorithm = Algorithm::from_name(&v);
            settings.algorithm =
                Some(algorithm.ok_or_else(|| bad("SIGNAL_ALGO", &v, &format!("auto, {names} are known")))?);
        }
        let numbers = [
            ("SIGNAL_MAX_BLOCKS", &mut settings.max_blocks),
            ("SIGNAL_BLOCKS", &mut settings.blocks),
            ("SIGNAL_THREADS", &mut settings.threads),
        ];
        for (name, setting) in numbers {
            if let Some(v) = value(name) {
                let number = v.parse().map_err(|_| bad(name, &v, "a positive number is needed"))?;
                *setting = Some(number);
            }
        }
        if let Some(v) = value("SIGNAL_TUNING") {
            settings.tuning = Some(Arc::new(Tuning::read(Path::new(&v))?));
        }
        settings.trace = value("SIGNAL_TRACE").map(PathBuf::from);
        settings.validate()?;
        Ok(settings)
    }

    /// Checks each value by itself.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.timeout < Duration::from_millis(1) {
            let value = format!("{:?}", self.timeout);
            return Err(bad("SIGNAL_TIMEOUT", &value, "at least one millisecond is needed").into());
        }
        if self.timeout > Duration::from_secs(1 << 32) {
            let value = format!("{:?}", self.timeout);
            return Err(bad("SIGNAL_TIMEOUT", &value, "at most 136 years are possible").into());
        }
        if !(Self::MIN_SCRATCH_BYTES..=Self::MAX_SCRATCH_BYTES).contains(&self.scratch_bytes) {
            let why = format!("{} to {} bytes are possible", Self::MIN_SCRATCH_BYTES, Self::MAX_SCRATCH_BYTES);
            return Err(bad("SIGNAL_SCRATCH", &self.scratch_bytes.to_string(), &why).into());
        }
        let numbers =
            [("SIGNAL_MAX_BLOCKS", self.max_blocks), ("SIGNAL_BLOCKS", self.blocks), ("SIGNAL_THREADS", self.threads)];
        for (name, value) in numbers {
            if value == Some(0) {
                return Err(bad(name, "0", "a positive number is needed").into());
            }
        }
        Ok(())
    }

    /// The settings by name, for comparison between ranks.
    pub(crate) fn entries(&self) -> [(&'static str, String); 13] {
        let number = |n: Option<u32>| n.map_or_else(|| "auto".to_owned(), |n| n.to_string());
        let tuning = self.tuning.as_ref();
        [
            ("SIGNAL_TIMEOUT", format!("{:?}", self.timeout)),
            ("SIGNAL_SCRATCH", self.scratch_bytes.to_string()),
            ("SIGNAL_DOMAINS", u32::from(self.domains).to_string()),
            ("SIGNAL_ALGO", self.algorithm.map_or("auto", Algorithm::name).to_owned()),
            ("SIGNAL_EARLY_LAUNCH", u32::from(self.early_launch).to_string()),
            ("SIGNAL_ORDERED", u32::from(self.ordered_barriers).to_string()),
            ("SIGNAL_P2P", self.peer_to_peer.map_or("auto", |on| if on { "1" } else { "0" }).to_owned()),
            ("SIGNAL_CHECK", u32::from(self.check).to_string()),
            ("SIGNAL_MAX_BLOCKS", number(self.max_blocks)),
            (
                "SIGNAL_TUNING",
                tuning.map_or_else(|| "none".to_owned(), |tuning| format!("{:016x}", tuning.fingerprint())),
            ),
            ("SIGNAL_TRACE", if self.trace.is_some() { "on" } else { "off" }.to_owned()),
            ("SIGNAL_BLOCKS", number(self.blocks)),
            ("SIGNAL_THREADS", number(self.threads)),
        ]
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            timeout: Duration::from_secs(300),
            scratch_bytes: 64 << 20,
            domains: false,
            algorithm: None,
            early_launch: true,
            ordered_barriers: false,
            peer_to_peer: None,
            check: false,
            max_blocks: None,
            tuning: None,
            trace: None,
            blocks: None,
            threads: None,
        }
    }
}

/// Parses a number of bytes with an optional binary suffix K, M or G.
pub fn parse_bytes(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: usize = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "K" | "KB" | "KIB" => 1 << 10,
        "M" | "MB" | "MIB" => 1 << 20,
        "G" | "GB" | "GIB" => 1 << 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}

fn bad(name: &'static str, value: &str, why: &str) -> ApiMisuse {
    ApiMisuse::Setting { name, value: value.to_owned(), why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Settings> {
        Settings::parse(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn the_environment_overrides_the_defaults() {
        assert_eq!(parse(&[]), Ok(Settings::default()));
        let settings = parse(&[
            ("SIGNAL_TIMEOUT", "0.25"),
            ("SIGNAL_SCRATCH", "2M"),
            ("SIGNAL_DOMAINS", "1"),
            ("SIGNAL_ALGO", "two-stage"),
            ("SIGNAL_EARLY_LAUNCH", "0"),
            ("SIGNAL_ORDERED", "1"),
            ("SIGNAL_P2P", "0"),
            ("SIGNAL_CHECK", "1"),
            ("SIGNAL_MAX_BLOCKS", "24"),
            ("SIGNAL_TRACE", "trace.json"),
            ("SIGNAL_BLOCKS", "3"),
            ("SIGNAL_THREADS", " 4 "),
        ]);
        let expected = Settings {
            timeout: Duration::from_millis(250),
            scratch_bytes: 2 << 20,
            domains: true,
            algorithm: Some(Algorithm::TwoStage),
            early_launch: false,
            ordered_barriers: true,
            peer_to_peer: Some(false),
            check: true,
            max_blocks: Some(24),
            tuning: None,
            trace: Some("trace.json".into()),
            blocks: Some(3),
            threads: Some(4),
        };
        assert_eq!(settings, Ok(expected));
        assert_eq!(parse(&[("SIGNAL_ALGO", "auto")]), Ok(Settings::default()));
    }

    #[test]
    fn bad_values_are_named() {
        for (name, value) in [
            ("SIGNAL_TIMEOUT", "soon"),
            ("SIGNAL_TIMEOUT", "-1"),
            ("SIGNAL_TIMEOUT", "0"),
            ("SIGNAL_TIMEOUT", "nan"),
            ("SIGNAL_TIMEOUT", "1e18"),
            ("SIGNAL_SCRATCH", "1K"),
            ("SIGNAL_SCRATCH", "64Q"),
            ("SIGNAL_SCRATCH", "99999999999G"),
            ("SIGNAL_DOMAINS", "yes"),
            ("SIGNAL_EARLY_LAUNCH", "2"),
            ("SIGNAL_ORDERED", "on"),
            ("SIGNAL_P2P", "maybe"),
            ("SIGNAL_CHECK", "true"),
            ("SIGNAL_ALGO", "ring"),
            ("SIGNAL_MAX_BLOCKS", "0"),
            ("SIGNAL_MAX_BLOCKS", "many"),
            ("SIGNAL_BLOCKS", "0"),
            ("SIGNAL_THREADS", "-4"),
        ] {
            match parse(&[(name, value)]) {
                Err(crate::Error::ApiMisuse(ApiMisuse::Setting { name: found, .. })) => assert_eq!(found, name),
                other => panic!("{name}={value} gave {other:?}"),
            }
        }
        let absent = parse(&[("SIGNAL_TUNING", "no/such.toml")]).unwrap_err().to_string();
        assert!(absent.starts_with("SIGNAL_TUNING: no/such.toml: "), "{absent}");
    }
}
