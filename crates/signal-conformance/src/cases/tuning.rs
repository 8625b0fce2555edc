//! Plans from a table that was measured (P4).

use std::sync::Arc;

use signal_core::{
    Algorithm, ApiMisuse, Backend, Collective, Communicator, DeviceInfo, Dtype, Error, Link, Plan, ReduceOp, Settings,
    Tuning, TuningRow, TuningTable,
};

use crate::exchange::Exchange;
use crate::place::Place;
use crate::rig::{Rig, settings};
use crate::world::{World, options};

/// Up to this size the table speaks.
const BYTES: u64 = 4 << 10;

/// A table with a plan of one block for two ranks.
fn tuning(info: &DeviceInfo, link: Link, plans: &[(Collective, Algorithm)]) -> Tuning {
    let mut tuning = Tuning::new(info);
    for (collective, algorithm) in plans {
        let mut table = TuningTable::new(*collective, link, 2, "a test".to_owned());
        // The second is for what calls the first does not take.
        let second = if *collective == Collective::AllReduce { Algorithm::OneStage } else { Algorithm::Pull };
        for algorithm in [*algorithm, second] {
            table.rows.push(TuningRow::new(*collective, 2, BYTES, Plan::new(algorithm, 1, 96), 1.0));
        }
        tuning.add(table).unwrap();
    }
    tuning
}

/// Calls take the plans of the table, where it has any, and are right.
pub fn tuning_gives_plans<B: Backend>(rig: &Rig<B>) {
    let plain = rig.world(2);
    let (link, info) = (plain.comms[0].link(), B::describe(plain.comms[0].device()));
    for (reduce, gather) in [(Algorithm::TwoStage, Algorithm::Push), (Algorithm::Lamport, Algorithm::Lines)] {
        let plans = [(Collective::AllReduce, reduce), (Collective::AllGather, gather)];
        let tuning = tuning(&info, link, &plans);
        let read = Tuning::parse(&tuning.to_toml()).unwrap();
        assert_eq!(read, tuning);
        let builder = Communicator::<B>::builder().settings(settings()).share_devices(true).tuning(read);
        let built = builder.all_local(&rig.devices_for(2)).unwrap();
        let mut world = World::new(built);
        for comm in &world.comms {
            let count = BYTES as usize / 4;
            let of = |dtype: Dtype, op| comm.plan(BYTES as usize / dtype.bytes(), dtype, op).algorithm;
            assert_eq!(of(Dtype::F32, ReduceOp::Sum), reduce);
            // Which Lamport's algorithm does not take.
            let other = if reduce == Algorithm::Lamport { Algorithm::OneStage } else { reduce };
            assert_eq!(of(Dtype::I32, ReduceOp::Max), other);
            assert_eq!(comm.plan(count, Dtype::F32, ReduceOp::Sum).blocks, 1);
            assert_eq!(comm.plan_of(Collective::AllGather, BYTES).algorithm, gather);
            // Beyond what was measured, and what was not.
            let plain = &plain.comms[0];
            let [here, there] = [comm, plain].map(|comm| comm.plan(count + 1, Dtype::F32, ReduceOp::Sum));
            assert_eq!(here, there);
            let [here, there] = [comm, plain].map(|comm| comm.plan_of(Collective::Broadcast, BYTES));
            assert_eq!(here, there);
        }
        for count in [1, 1000, 1024, 5000] {
            Exchange::<B, f32>::random(&mut world, count, 1, options(|_| ()), &[Place::symmetric(); 2])
                .run(&mut world, 0);
        }
    }
}

/// Another device's table, and one that not all ranks have.
pub fn tuning_refused<B: Backend>(rig: &Rig<B>) {
    let plain = rig.world(2);
    let (link, info) = (plain.comms[0].link(), B::describe(plain.comms[0].device()));
    let plans = [(Collective::AllReduce, Algorithm::TwoStage)];
    let right = tuning(&info, link, &plans);
    let elsewhere = DeviceInfo { arch: "sm_12".to_owned(), ..info.clone() };
    let wrong = tuning(&elsewhere, link, &plans);
    let with = |tuning: Option<&Tuning>| {
        let mut settings = settings();
        settings.tuning = tuning.cloned().map(Arc::new);
        settings
    };
    let create = |ranks: [Settings; 2]| {
        let pairs: Vec<_> = rig.devices_for(2).into_iter().zip(ranks).collect();
        Communicator::<B>::builder().share_devices(true).all_local_with(&pairs).map(drop)
    };
    match create([with(Some(&wrong)), with(Some(&wrong))]) {
        Err(Error::ApiMisuse(ApiMisuse::Tuning { why, .. })) => {
            assert!(why.contains("sm_12") && why.contains(&info.arch), "{why}");
        }
        other => panic!("{other:?}"),
    }
    for ranks in [[Some(&right), None], [None, Some(&right)], [Some(&right), Some(&wrong)]] {
        match create(ranks.map(with)) {
            Err(Error::Rendezvous(signal_core::error::Rendezvous::Disagreement { name, .. })) => {
                assert_eq!(name, "SIGNAL_TUNING");
            }
            other => panic!("{other:?}"),
        }
    }
    create([with(Some(&right)), with(Some(&right))]).unwrap();
}
