use super::*;

type Pairs<'a> = &'a [(&'a str, &'a str)];

fn read_with(pairs: Pairs<'_>, proxy: Option<&str>) -> Result<Launch> {
    Launch::read(
        |name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()),
        || proxy.map(str::to_owned),
    )
}

fn read(pairs: Pairs<'_>) -> Result<Launch> {
    read_with(pairs, None)
}

fn with<'a>(pairs: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let changed = |(name, _): &&(&str, &str)| more.iter().all(|(other, _)| other != name);
    pairs.iter().filter(changed).chain(more).copied().collect()
}

const TORCHRUN: Pairs<'_> = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "3"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "localhost"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
];
const OPEN_MPI: Pairs<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-node-4711@1"),
];
const MPICH: Pairs<'_> =
    &[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("PMI_FD", "9"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "2")];
const SLURM: Pairs<'_> = &[
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_LOCALID", "5"),
    ("SLURM_NODEID", "0"),
    ("SLURM_STEP_TASKS_PER_NODE", "8"),
    ("SLURM_JOB_ID", "77"),
    ("SLURM_STEP_ID", "2"),
];
const OWN: Pairs<'_> = &[("SIGNAL_RANK", "1"), ("SIGNAL_WORLD", "3"), ("SIGNAL_RENDEZVOUS", "unix:mine")];

#[test]
fn every_launcher_is_understood() {
    let cases: [(Pairs<'_>, &str, [usize; 4], &str); 5] = [
        (OWN, "SIGNAL_RANK", [1, 3, 1, 3], "unix:mine"),
        (TORCHRUN, "torchrun", [3, 4, 3, 4], "torchrun:none|localhost|29500|0"),
        (OPEN_MPI, "mpirun (Open MPI)", [1, 2, 1, 2], "mpirun (Open MPI):prterun-node-4711@1"),
        (MPICH, "mpiexec (MPICH, Intel MPI)", [0, 2, 0, 2], "mpiexec (MPICH, Intel MPI):12@34"),
        (SLURM, "srun", [5, 8, 5, 8], "srun:77.2"),
    ];
    for (pairs, launcher, [rank, world, local_rank, local_world], name) in cases {
        let expected = Launch {
            rank,
            world,
            local_rank: Some(local_rank),
            local_world: Some(local_world),
            launcher,
            place: Place::Unix(name.to_owned()),
            secret: Vec::new(),
        };
        assert_eq!(read_with(pairs, Some("12@34")), Ok(expected));
    }
}

/// What was started by another launcher has its variables as well.
#[test]
fn the_innermost_launcher_counts() {
    let mut pairs = Vec::new();
    for (more, launcher) in [(SLURM, "srun"), (MPICH, "mpiexec (MPICH, Intel MPI)"), (OPEN_MPI, "mpirun (Open MPI)")] {
        pairs.splice(0..0, more.iter().copied());
        assert_eq!(read_with(&pairs, Some("1@1")).unwrap().launcher, launcher);
    }
    pairs.extend(TORCHRUN);
    assert_eq!(read(&pairs).unwrap().launcher, "torchrun");
    pairs.extend(OWN);
    assert_eq!(read(&pairs).unwrap().launcher, "SIGNAL_RANK");
    // A batch script of Slurm is no rank, though it has variables that look like it.
    let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "1"), ("SLURM_LOCALID", "0")];
    assert!(matches!(read(&batch), Err(Error::Rendezvous(Reason::Launch(_)))));
    assert_eq!(read(&with(&batch, OPEN_MPI)).unwrap().launcher, "mpirun (Open MPI)");
    // Somebody's RANK alone does not hide another launcher.
    assert_eq!(read(&with(OPEN_MPI, &[("RANK", "7")])).unwrap().rank, 1);
}

#[test]
fn jobs_have_names_of_their_own() {
    let name = |pairs: &[(&str, &str)], proxy| match read_with(pairs, proxy).unwrap().place {
        Place::Unix(name) => name,
        other => panic!("{other:?}"),
    };
    // Two jobs, ranks started again, and two ranks of one job.
    assert_ne!(name(TORCHRUN, None), name(&with(TORCHRUN, &[("MASTER_PORT", "29501")]), None));
    assert_ne!(name(TORCHRUN, None), name(&with(TORCHRUN, &[("TORCHELASTIC_RESTART_COUNT", "1")]), None));
    assert_eq!(name(TORCHRUN, None), name(&with(TORCHRUN, &[("RANK", "0"), ("LOCAL_RANK", "0")]), None));
    assert_ne!(name(SLURM, None), name(&with(SLURM, &[("SLURM_STEP_ID", "3")]), None));
    assert_ne!(name(SLURM, None), name(&with(SLURM, &[("SLURM_JOB_ID", "78")]), None));
    let old = [("OMPI_MCA_ess_base_jobid", "123"), ("PMIX_NAMESPACE", "")];
    assert!(name(&with(OPEN_MPI, &old), None).ends_with(":123"));
    assert_ne!(name(MPICH, Some("1@1")), name(MPICH, Some("1@2")));
    for job in ["I_MPI_HYDRA_UUID", "PMI_JOBID", "PALS_APID"] {
        assert!(name(&with(MPICH, &[(job, "x")]), None).ends_with(":x"));
    }
    assert!(name(&with(MPICH, &[("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "8")]), None).ends_with(":7.8"));
}

#[test]
fn tasks_per_node_are_counted() {
    let local = |list, node| {
        let pairs = with(SLURM, &[("SLURM_STEP_TASKS_PER_NODE", list), ("SLURM_NODEID", node), ("SLURM_LOCALID", "0")]);
        let pairs = with(&pairs, &[("SIGNAL_RENDEZVOUS", "tcp:a:1"), ("SIGNAL_SECRET", "0123456789abcdef")]);
        read(&pairs).map(|launch| launch.local_world.unwrap())
    };
    assert_eq!(local("2(x3),1", "0"), Ok(2));
    assert_eq!(local("2(x3),1", "2"), Ok(2));
    assert_eq!(local("2(x3),1", "3"), Ok(1));
    assert_eq!(local("4,3", "1"), Ok(3));
    for (list, node) in [("2(x3),1", "4"), ("2", "x"), ("2(x", "0"), ("(x2)", "0"), ("many", "0")] {
        assert!(local(list, node).is_err(), "{list} on node {node}");
    }
}

#[test]
fn several_machines_need_an_address() {
    let two_machines = with(TORCHRUN, &[("WORLD_SIZE", "8")]);
    let Err(Error::Rendezvous(Reason::Launch(why))) = read(&two_machines) else { panic!("no error") };
    assert!(why.contains("4 of 8 ranks") && why.contains("SIGNAL_RENDEZVOUS"), "{why}");
    let secret = "0123456789abcdef";
    let tcp = with(&two_machines, &[("SIGNAL_RENDEZVOUS", "tcp:node0:4000"), ("SIGNAL_SECRET", secret)]);
    assert_eq!(read(&tcp).unwrap().place, Place::Tcp("node0:4000".to_owned()));
    assert!(!format!("{:?}", read(&tcp)).contains(secret));
    let Err(Error::Rendezvous(Reason::Launch(why))) = read(&with(&tcp, &[("SIGNAL_SECRET", "")])) else {
        panic!("no error")
    };
    assert!(why.contains("SIGNAL_SECRET"), "{why}");
    // Nor is it known whether there are several, or which job this is.
    for missing in [("LOCAL_WORLD_SIZE", ""), ("TORCHELASTIC_RUN_ID", "")] {
        let pairs = with(TORCHRUN, &[missing, ("MASTER_PORT", "")]);
        let Err(Error::Rendezvous(Reason::Launch(why))) = read(&pairs) else { panic!("no error") };
        assert!(why.contains("SIGNAL_RENDEZVOUS"), "{why}");
    }
    assert!(matches!(read(MPICH), Err(Error::Rendezvous(Reason::Launch(_)))));
    // Alone there is nobody to meet.
    assert_eq!(read(&[("SIGNAL_RANK", "0"), ("SIGNAL_WORLD", "1")]).unwrap().world, 1);
}

#[test]
fn bad_variables_are_named() {
    let cases: [(Pairs<'_>, (&str, &str)); 14] = [
        (TORCHRUN, ("RANK", "4")),
        (TORCHRUN, ("RANK", "-1")),
        (TORCHRUN, ("RANK", "one")),
        (TORCHRUN, ("WORLD_SIZE", "0")),
        (TORCHRUN, ("WORLD_SIZE", "9")),
        (TORCHRUN, ("LOCAL_RANK", "4")),
        (TORCHRUN, ("LOCAL_WORLD_SIZE", "5")),
        (OPEN_MPI, ("OMPI_COMM_WORLD_SIZE", "18446744073709551616")),
        (MPICH, ("PMI_RANK", "2")),
        (SLURM, ("SLURM_STEP_TASKS_PER_NODE", "x")),
        (SLURM, ("SLURM_STEP_NUM_TASKS", "1e1")),
        (OWN, ("SIGNAL_RANK", "3")),
        (OWN, ("SIGNAL_RENDEZVOUS", "tcp:node0")),
        (OWN, ("SIGNAL_RENDEZVOUS", "/tmp/socket")),
    ];
    for (pairs, bad) in cases {
        match read(&with(pairs, &[bad])) {
            Err(Error::ApiMisuse(ApiMisuse::Setting { name, value, .. })) => assert_eq!((name, &*value), bad),
            other => panic!("{bad:?} gave {other:?}"),
        }
    }
    for (pairs, missing) in [
        (TORCHRUN, "RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (MPICH, "PMI_SIZE"),
        (OWN, "SIGNAL_WORLD"),
        (OWN, "SIGNAL_RANK"),
        (&[("RANK", "0")], "WORLD_SIZE"),
    ] {
        let Err(Error::Rendezvous(Reason::Launch(why))) = read(&with(pairs, &[(missing, "")])) else {
            panic!("no error without {missing}")
        };
        assert!(why.contains(missing), "{why}");
    }
}

#[test]
fn an_empty_environment_is_told_what_was_looked_for() {
    let Err(Error::Rendezvous(Reason::Launch(why))) = read(&[]) else { panic!("no error") };
    for launcher in &LAUNCHERS {
        assert!(why.contains(launcher.rank) && why.contains(launcher.world[0]), "{why}");
    }
}

#[test]
fn the_nth_meeting_of_a_rank_meets_the_nth_of_the_others() {
    let patience = Duration::from_secs(30);
    let name = format!("turns-{}", std::process::id());
    let launch = |rank: &str| {
        let place = format!("unix:{name}");
        read(&with(OWN, &[("SIGNAL_RENDEZVOUS", &place), ("SIGNAL_WORLD", "2"), ("SIGNAL_RANK", rank)])).unwrap()
    };
    // A call that fails is no meeting.
    let failed = launch("1").meet(Duration::from_millis(20));
    assert!(matches!(failed, Err(Error::Rendezvous(Reason::Absent { .. }))));
    std::thread::scope(|scope| {
        for rank in ["0", "1"] {
            scope.spawn(move || {
                let mut groups: Vec<_> = (0..3).map(|_| launch(rank).meet(patience).unwrap()).collect();
                for (turn, group) in groups.iter_mut().enumerate() {
                    assert_eq!(group.gather(&[turn as u8], patience).unwrap(), vec![vec![turn as u8]; 2]);
                }
            });
        }
    });
    assert_eq!(Turn::take(&format!("unix:{name}"), 0).number, 3);
    assert_eq!(Turn::take(&format!("unix:{name}"), 1).number, 3);
}

/// This process is no rank of MPICH's, and the walk up to the first process ends.
#[test]
fn the_process_table_is_read() {
    assert_eq!(hydra_proxy(), None);
}
