//! Graphs: the commands of a capture, shared by all their replays.

use std::fmt;

use crate::command::Command;
use crate::device::Device;
use crate::sync::Shared;

/// A captured sequence of work. It keeps the buffers that the work uses; a queued replay keeps the graph.
///
/// Replays may be queued behind each other, on one stream or on several.
pub struct Graph(Shared<Recording>);

pub(crate) struct Recording {
    device: Device,
    commands: Vec<Command>,
    /// Threads of the largest grid.
    threads: usize,
}

impl Graph {
    pub(crate) fn new(device: &Device, commands: Vec<Command>) -> Self {
        let threads = commands.iter().map(Command::threads).max().unwrap_or(1);
        Graph(Shared::new(Recording { device: device.clone(), commands, threads }))
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn recording(&self) -> &Shared<Recording> {
        &self.0
    }
}

impl Recording {
    pub(crate) fn commands(&self) -> &[Command] {
        &self.commands
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("device", &self.0.device)
            .field("commands", &self.0.commands.len())
            .finish_non_exhaustive()
    }
}
