//! Timelines: what was called, when it ran, and who was waited for.

use std::path::PathBuf;
use std::time::Duration;

use signal_core::{Algorithm, Backend, ReduceOp};

use crate::exchange::{random_inputs, sum, works};
use crate::rig::Rig;
use crate::world::{World, options};

/// A span on a track, in microseconds.
struct Event {
    name: String,
    track: String,
    at: f64,
    lasts: f64,
}

/// A file of this process's own, not there yet.
fn fresh_file(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("signal-{name}-{}.json", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

/// The events of a file, which goes.
fn events(path: &PathBuf) -> Vec<Event> {
    let text = std::fs::read_to_string(path).unwrap();
    std::fs::remove_file(path).unwrap();
    let text = text.strip_prefix("[\n").unwrap();
    let text_of = |line: &str, key: &str| {
        let from = line.split_once(&format!("\"{key}\":\"")).unwrap().1;
        from.split_once('"').unwrap().0.to_owned()
    };
    let number_of = |line: &str, key: &str| -> f64 {
        let from = line.split_once(&format!("\"{key}\":")).unwrap().1;
        from[..from.find([',', '}']).unwrap()].parse().unwrap()
    };
    let named = |line: &&str| line.contains("\"thread_name\"");
    let names: Vec<(f64, String)> = text
        .lines()
        .filter(named)
        .map(|line| {
            let behind = line.split_once("\"args\"").unwrap().1;
            (number_of(line, "tid"), text_of(behind, "name"))
        })
        .collect();
    let spans = text.lines().filter(|line| line.contains("\"ph\":\"X\""));
    let event = |line: &str| {
        let track = number_of(line, "tid");
        Event {
            name: text_of(line, "name"),
            track: names.iter().find(|(number, _)| *number == track).unwrap().1.clone(),
            at: number_of(line, "ts"),
            lasts: number_of(line, "dur"),
        }
    };
    spans.map(event).collect()
}

fn on<'a>(events: &'a [Event], track: &str) -> Vec<&'a Event> {
    events.iter().filter(|event| event.track == track).collect()
}

/// Calls that are enqueued and calls of graphs, on every rank, one behind the other.
pub fn trace_tells_of_every_call<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 2, 3] {
        let path = fresh_file(&format!("trace-of-{ranks}"));
        let mut world: World<B> = rig.world_with(ranks, |s| s.trace = Some(path.clone()));
        let inputs = random_inputs::<f32>(ranks, 7, 1000);
        let (mut data, mut outputs) = (world.alloc::<f32>(1000), world.local::<f32>(1000));
        for ((data, input), stream) in data.iter_mut().zip(&inputs).zip(&world.streams) {
            data.write(stream, input).unwrap();
        }
        let call = options(|o| o.algorithm = Some(Algorithm::OneStage));
        world.each(|rank, comm, stream| {
            comm.barrier(stream)?;
            comm.with(call).all_reduce(stream, &data[rank], &mut outputs[rank], ReduceOp::Sum)?;
            comm.broadcast(stream, &mut outputs[rank], 0)
        });
        let mut graphs = Vec::new();
        world.each(|rank, comm, stream| {
            B::begin_capture(stream)?;
            comm.with(call).all_reduce(stream, &data[rank], &mut outputs[rank], ReduceOp::Sum)?;
            comm.with(call).all_reduce(stream, &data[rank], &mut outputs[rank], ReduceOp::Sum)?;
            graphs.push(B::end_capture(stream)?);
            Ok(())
        });
        for _ in 0..3 {
            world.each(|rank, _, stream| B::replay(&graphs[rank], stream));
        }
        world.wait();
        for (output, stream) in outputs.iter().zip(&world.streams) {
            assert_eq!(output.read(stream).unwrap(), sum(&inputs));
        }
        works(&mut world);
        drop(graphs);
        drop(world);
        let events = events(&path);
        for rank in 0..ranks {
            let device = on(&events, &format!("rank {rank} of {ranks}: device"));
            let reduces =
                device.iter().filter(|event| event.name.starts_with("all-reduce of 1000 f32 (sum, one-stage)"));
            assert_eq!(reduces.count(), 1 + 2 * 3, "rank {rank} of {ranks}");
            assert!(device[0].name.starts_with("barrier") && device[2].name.starts_with("broadcast of 4000 bytes"));
            for pair in device.windows(2) {
                assert!(
                    pair[0].lasts > 0.0 && pair[0].at + pair[0].lasts <= pair[1].at + 0.002,
                    "rank {rank} of {ranks}"
                );
            }
            let host = on(&events, &format!("rank {rank} of {ranks}: host"));
            let captures = host.iter().filter(|event| event.name.starts_with("capture all-reduce"));
            assert_eq!(captures.count(), 2);
            assert!(host[0].name.starts_with("enqueue barrier") && host[1].name.starts_with("enqueue all-reduce"));
            // Nothing runs before it was enqueued, as far as the clocks can be compared.
            assert!(host[0].at < device[0].at + 5000.0, "{} {}", host[0].at, device[0].at);
            for peer in (0..ranks).filter(|peer| *peer != rank) {
                let waits = on(&events, &format!("rank {rank} of {ranks}: waits for rank {peer}"));
                // A broadcast is between each rank and the root alone.
                let with_root = [rank, peer].contains(&0);
                assert!(waits.len() == device.len() || (!with_root && waits.len() + 1 == device.len()));
            }
        }
    }
}

/// A rank that is late shows in the waits of the others for it, and of nobody else.
pub fn trace_names_who_was_late<B: Backend>(rig: &Rig<B>) {
    const LATE: Duration = Duration::from_millis(80);
    let path = fresh_file("trace-late");
    let mut world: World<B> = rig.world_with(3, |s| s.trace = Some(path.clone()));
    world.each(|_, comm, stream| comm.barrier(stream));
    world.wait();
    world.each(|rank, comm, stream| {
        if rank == 2 {
            std::thread::sleep(LATE);
        }
        comm.barrier(stream)
    });
    world.wait();
    drop(world);
    let events = events(&path);
    let waited = |rank: usize, peer: usize| {
        let waits = on(&events, &format!("rank {rank} of 3: waits for rank {peer}"));
        assert_eq!(waits.len(), 2);
        waits[1].lasts
    };
    let late = LATE.as_secs_f64() * 1e6;
    for rank in [0, 1] {
        assert!(waited(rank, 2) > 0.8 * late, "rank {rank} waited {} us", waited(rank, 2));
        assert!(waited(2, rank) < 0.5 * late, "rank 2 waited {} us", waited(2, rank));
    }
    // Where one thread stands for all peers, it sees the second one after the first.
    assert!(waited(0, 1) < 0.5 * late, "rank 0 waited {} us", waited(0, 1));
}
