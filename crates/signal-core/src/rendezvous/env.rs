//! Ranks as their launcher describes them in the environment, without linking any launcher's library.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::error::{ApiMisuse, Error, Rendezvous as Reason, Result};
use crate::signal::{check_rank, check_world};

use super::{Rendezvous, TcpRendezvous, UnixRendezvous};

/// Meets the ranks that the environment describes: [`Launch::from_env`] and [`Launch::meet`].
///
/// # Errors
/// Theirs.
pub fn from_env(patience: Duration) -> Result<Box<dyn Rendezvous>> {
    Launch::from_env()?.meet(patience)
}

/// Who this process is among the ranks of its job, and where they meet.
///
/// # Variables
/// The first of these that is set says the rank and the number of ranks:
/// - `SIGNAL_RANK` and `SIGNAL_WORLD`, with `SIGNAL_LOCAL_RANK` and `SIGNAL_LOCAL_WORLD` where they matter;
/// - torchrun's `RANK` and `WORLD_SIZE`, with `LOCAL_RANK` and `LOCAL_WORLD_SIZE`;
/// - Open MPI's `OMPI_COMM_WORLD_RANK` and `_SIZE`, `_LOCAL_RANK` and `_LOCAL_SIZE`;
/// - MPICH's and Intel MPI's `PMI_RANK` and `PMI_SIZE`, `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`;
/// - srun's `SLURM_PROCID` and `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID` and `SLURM_STEP_TASKS_PER_NODE`.
///
/// `SIGNAL_RENDEZVOUS`, the same on all ranks, says where they meet: `unix:NAME` on one machine, or `tcp:HOST:PORT` with a
/// free port of the machine of rank 0. The launcher's own port will not do: its own service listens there. Without it,
/// ranks that a launcher started on one machine meet at a name made of the user and the launcher's identity for the job, so
/// that jobs do not meet each other. `SIGNAL_SECRET`, at least 16 bytes for TCP, says who belongs to the job.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
    /// This rank among those of its machine, where that is known.
    pub local_rank: Option<usize>,
    /// The number of ranks on this machine, where that is known.
    pub local_world: Option<usize>,
    /// What described them, for messages.
    pub launcher: &'static str,
    place: Place,
    secret: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// A name on this machine.
    Unix(String),
    /// An address of rank 0's.
    Tcp(String),
}

/// Variables of one launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
}

/// In the order in which they are looked for: who was started later stands first, as in a torchrun under srun.
const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        name: "SIGNAL_RANK",
        rank: "SIGNAL_RANK",
        world: &["SIGNAL_WORLD"],
        local_rank: &["SIGNAL_LOCAL_RANK"],
        local_world: &["SIGNAL_LOCAL_WORLD"],
    },
    // https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_world: &["LOCAL_WORLD_SIZE"],
    },
    // https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    Launcher {
        name: "mpirun (Open MPI)",
        rank: "OMPI_COMM_WORLD_RANK",
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    // Set by MPICH's launcher, hydra, in src/pm/hydra/proxy/pmip_cb.c, and by Intel's, which is made of it. The second
    // names are those of Cray's, which the plugin mpi/cray_shasta of Slurm lists.
    Launcher {
        name: "mpiexec (MPICH, Intel MPI)",
        rank: "PMI_RANK",
        world: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_world: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
    },
    // https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"
    Launcher {
        name: SRUN,
        rank: "SLURM_PROCID",
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_world: &[],
    },
];
const SRUN: &str = "srun";

impl Launch {
    /// What the environment says.
    ///
    /// # Errors
    /// [`ApiMisuse::Setting`] with a variable that is set to what it cannot mean, or that contradicts another, and
    /// [`Launch`](Reason::Launch) where variables are missing: with all that was looked for, if none is set.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// What variables say that do not come from the environment.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        Self::read(get, hydra_proxy)
    }

    /// What `get` says of variables, and `proxy` of the process that started this one for MPICH.
    fn read(get: impl Fn(&str) -> Option<String>, proxy: impl Fn() -> Option<String>) -> Result<Self> {
        let vars = Variables(&|name| get(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty()));
        let place = vars.get("SIGNAL_RENDEZVOUS").map(|value| Place::parse(&value)).transpose()?;
        let secret = vars.get("SIGNAL_SECRET").unwrap_or_default().into_bytes();
        let launcher = vars.launcher()?;

        let (rank_value, rank) = vars.required(launcher, &[launcher.rank])?;
        let (world_value, world) = vars.required(launcher, launcher.world)?;
        check_world(world).map_err(|_| bad(world_value, world, "a communicator has 1 to 8 ranks"))?;
        let why = format!("ranks are below {world_value}, which is {world}");
        check_rank(rank, world).map_err(|_| bad(rank_value, rank, &why))?;
        let (mut local_rank, mut local_world) =
            (vars.number(launcher.local_rank)?, vars.number(launcher.local_world)?.or(vars.slurm_tasks(launcher)?));
        if let Some((name, local)) = local_world.filter(|(_, local)| *local > world || *local == 0) {
            return Err(bad(
                name,
                local,
                &format!("at least 1 and at most {world_value}, which is {world}, is possible"),
            ));
        }
        if let (Some((name, local)), Some((limit, all))) = (local_rank, local_world)
            && local >= all
        {
            return Err(bad(name, local, &format!("local ranks are below {limit}, which is {all}")));
        }
        if let (Some(Place::Unix(_)), None, None) = (&place, local_rank, local_world) {
            // Who meets there is on one machine.
            (local_rank, local_world) = (Some((rank_value, rank)), Some((world_value, world)));
        }
        let (local_rank, local_world) = (local_rank.map(|(_, n)| n), local_world.map(|(_, n)| n));

        let place = match place {
            Some(place) => place,
            None if world == 1 => Place::Unix("alone".to_owned()),
            None => vars.default_place(launcher, world, local_world, &proxy)?,
        };
        if world > 1 && secret.is_empty() && matches!(place, Place::Tcp(_)) {
            let why = "SIGNAL_RENDEZVOUS=tcp:... needs SIGNAL_SECRET: at least 16 bytes, the same on all ranks, that nobody \
                       else in the network can guess";
            return Err(Reason::Launch(why.to_owned()).into());
        }
        Ok(Launch { rank, world, local_rank, local_world, launcher: launcher.name, place, secret })
    }

    /// Meets the other ranks. Collective; the n-th call of a rank meets the n-th of the others, so several communicators
    /// can be made one after the other. A call that failed does not count.
    ///
    /// # Errors
    /// Those of [`UnixRendezvous::new`] and [`TcpRendezvous::new`].
    pub fn meet(&self, patience: Duration) -> Result<Box<dyn Rendezvous>> {
        let Launch { rank, world, place, secret, .. } = self;
        Ok(match place {
            Place::Unix(name) => {
                let turn = Turn::take(name, *rank);
                let name = format!("{name}#{}", turn.number);
                let met = UnixRendezvous::new(&name, secret, *rank, *world, patience)?;
                turn.keep();
                Box::new(met)
            }
            // One port for all of them: rank 0 stops listening before anybody is told to go on.
            Place::Tcp(address) if *world > 1 => {
                Box::new(TcpRendezvous::new(address, secret, *rank, *world, patience)?)
            }
            Place::Tcp(_) => Box::new(UnixRendezvous::new("alone", b"", 0, 1, patience)?),
        })
    }
}

/// Without the secret.
impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Launch { rank, world, local_rank, local_world, launcher, place, secret: _ } = self;
        f.debug_struct("Launch")
            .field("rank", rank)
            .field("world", world)
            .field("local_rank", local_rank)
            .field("local_world", local_world)
            .field("launcher", launcher)
            .field("place", place)
            .finish_non_exhaustive()
    }
}

impl Place {
    fn parse(value: &str) -> Result<Self> {
        let why = "unix:NAME or tcp:HOST:PORT is needed";
        match value.split_once(':') {
            Some(("unix", name)) if !name.is_empty() => Ok(Place::Unix(format!("unix:{name}"))),
            Some(("tcp", address)) => match address.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse().is_ok_and(|port: u16| port != 0) => {
                    Ok(Place::Tcp(address.to_owned()))
                }
                _ => Err(bad("SIGNAL_RENDEZVOUS", value, why)),
            },
            _ => Err(bad("SIGNAL_RENDEZVOUS", value, why)),
        }
    }
}

/// The environment, or what stands for it. Empty variables are unset ones.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    fn first(&self, names: &[&str]) -> Option<String> {
        names.iter().find_map(|name| self.get(name))
    }

    /// The first launcher that has left traces.
    fn launcher(&self) -> Result<&'static Launcher> {
        let set = |name| self.get(name).is_some();
        let started = |launcher: &&Launcher| match launcher.name {
            // Names that others use too: both of them, or that of torchrun itself.
            "torchrun" => set("TORCHELASTIC_RUN_ID") || set("RANK") && set("WORLD_SIZE"),
            // A batch script has SLURM_PROCID=0 as well, but is no step.
            SRUN => set("SLURM_STEP_ID") && set("SLURM_PROCID"),
            _ => set(launcher.rank) || launcher.world.iter().any(|name| set(name)),
        };
        if let Some(launcher) = LAUNCHERS.iter().find(started) {
            return Ok(launcher);
        }
        for (name, other) in [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")] {
            if let Some(value) = self.get(name) {
                return Err(Reason::Launch(format!("{name}={value} is set, but {other} is not")).into());
            }
        }
        let looked =
            LAUNCHERS.map(|launcher| format!("{} and {} ({})", launcher.rank, launcher.world[0], launcher.name));
        let why = format!("nothing in the environment says which rank this is; looked for {}", looked.join(", "));
        Err(Reason::Launch(why).into())
    }

    /// The first of these variables that is set.
    fn number(&self, names: &[&'static str]) -> Result<Option<(&'static str, usize)>> {
        for name in names {
            if let Some(value) = self.get(name) {
                let number = value.parse().map_err(|_| bad(name, &value, "a number is needed"))?;
                return Ok(Some((name, number)));
            }
        }
        Ok(None)
    }

    fn required(&self, launcher: &Launcher, names: &[&'static str]) -> Result<(&'static str, usize)> {
        let missing = || Reason::Launch(format!("{} is used, but {} is not set", launcher.name, names[0]));
        self.number(names)?.ok_or_else(|| missing().into())
    }

    /// Tasks of a step on this node: "2(x3),1" are three nodes with 2 and one with 1.
    fn slurm_tasks(&self, launcher: &Launcher) -> Result<Option<(&'static str, usize)>> {
        const NAME: &str = "SLURM_STEP_TASKS_PER_NODE";
        let (SRUN, Some(list)) = (launcher.name, self.get(NAME)) else { return Ok(None) };
        let mut node = self.number(&["SLURM_NODEID"])?.map_or(0, |(_, node)| node);
        for item in list.split(',') {
            let (tasks, nodes) = match item.split_once("(x") {
                Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')').and_then(|nodes| nodes.parse().ok())),
                None => (item, Some(1)),
            };
            let (Ok(tasks), Some(nodes)) = (tasks.parse(), nodes) else {
                return Err(bad(NAME, &list, "a list such as 2(x3),1 is needed"));
            };
            if node < nodes {
                return Ok(Some((NAME, tasks)));
            }
            node -= nodes;
        }
        Err(bad(NAME, &list, "it has no entry for SLURM_NODEID"))
    }

    /// Where ranks meet that were not told where.
    fn default_place(
        &self,
        launcher: &Launcher,
        world: usize,
        local_world: Option<usize>,
        proxy: &dyn Fn() -> Option<String>,
    ) -> Result<Place> {
        let ask = |why: String| {
            let name = launcher.name;
            let why = format!("{name}: {why}; set SIGNAL_RENDEZVOUS to unix:NAME on one machine, or to tcp:HOST:PORT");
            Err(Reason::Launch(why).into())
        };
        match local_world {
            Some(local) if local == world => {}
            Some(local) => return ask(format!("{local} of {world} ranks are on this machine")),
            None => return ask(format!("nothing says whether all {world} ranks are on one machine")),
        }
        match self.job(launcher, proxy) {
            Some(job) => Ok(Place::Unix(format!("{}:{job}", launcher.name))),
            None => ask("nothing tells this job from another".to_owned()),
        }
    }

    /// What tells a launcher's job from its others on this machine.
    fn job(&self, launcher: &Launcher, proxy: &dyn Fn() -> Option<String>) -> Option<String> {
        match launcher.rank {
            // The run id is "none" unless it is asked for; then the port of the launcher's store tells jobs apart. Ranks
            // that were started again must not meet those from before.
            "RANK" => {
                let parts = ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"];
                let parts = parts.map(|name| self.get(name));
                (parts[0].is_some() || parts[2].is_some()).then(|| parts.map(Option::unwrap_or_default).join("|"))
            }
            // PMIx names jobs since Open MPI 5; before, the runtime's module "ess" had the number as a parameter.
            "OMPI_COMM_WORLD_RANK" => {
                self.first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"])
            }
            // MPICH sets nothing that tells jobs apart, but one process of its own starts all ranks of a machine. It is
            // asked first: the variables may be left from what mpiexec itself was started by.
            "PMI_RANK" => proxy()
                .or_else(|| self.first(&["I_MPI_HYDRA_UUID", "PMI_JOBID", "PALS_APID"]))
                .or_else(|| self.slurm_step()),
            "SLURM_PROCID" => self.slurm_step(),
            _ => None,
        }
    }

    fn slurm_step(&self) -> Option<String> {
        // The old names are still set beside the new ones.
        let job = self.first(&["SLURM_JOB_ID", "SLURM_JOBID"])?;
        Some(format!("{job}.{}", self.first(&["SLURM_STEP_ID", "SLURM_STEPID"])?))
    }
}

/// The nearest process above this one that is hydra's proxy, which starts the ranks of one job on one machine: its number
/// and its start, since numbers come again.
fn hydra_proxy() -> Option<String> {
    let mut process = "self".to_owned();
    // Bounds the walk, should the table change under it.
    for _ in 0..64 {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // proc_pid_stat(5): the name is in parentheses and may hold any character; after it the state, the parent, and,
        // 20th from there, the start.
        let (head, tail) = stat.rsplit_once(") ")?;
        let (number, name) = head.split_once(" (")?;
        let fields: Vec<_> = tail.split(' ').collect();
        if name.starts_with("hydra_pmi_prox") {
            return Some(format!("{number}@{}", fields.get(19)?));
        }
        process = (*fields.get(1)?).to_owned();
        if process == "0" {
            return None;
        }
    }
    None
}

/// How many meetings each rank of this process has had at a name.
static TURNS: Mutex<BTreeMap<(String, usize), u64>> = Mutex::new(BTreeMap::new());

/// A meeting's number; given back unless it is kept.
struct Turn {
    key: (String, usize),
    number: u64,
    kept: bool,
}

impl Turn {
    fn take(name: &str, rank: usize) -> Self {
        let key = (name.to_owned(), rank);
        let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        let next = turns.entry(key.clone()).or_default();
        *next += 1;
        Turn { key, number: *next - 1, kept: false }
    }

    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(next) = turns.get_mut(&self.key).filter(|next| !self.kept && **next == self.number + 1) {
            *next = self.number;
        }
    }
}

fn bad(name: &'static str, value: impl ToString, why: &str) -> Error {
    ApiMisuse::Setting { name, value: value.to_string(), why: why.to_owned() }.into()
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
