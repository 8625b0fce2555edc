//! One connection: bytes in, bytes out, never blocking, with as much buffered as one frame needs.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use crate::error::{Rendezvous, Result};

use super::wire::{Frame, Malformed};

/// Bytes that are read at once, and that stay allocated.
const CHUNK: usize = 16 << 10;

/// The end of a wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    began: Instant,
    /// How long in all.
    pub(super) patience: Duration,
}

impl Deadline {
    pub(super) fn new(patience: Duration) -> Self {
        Deadline { began: Instant::now(), patience }
    }

    pub(super) fn left(&self) -> Duration {
        self.patience.saturating_sub(self.began.elapsed())
    }

    pub(super) fn passed(&self) -> bool {
        self.left().is_zero()
    }
}

/// Waits until one of `fds` is ready, at most for `limit`. May return early; callers look for themselves.
pub(super) fn wait(fds: &mut [PollFd<'_>], limit: Duration) -> Result<()> {
    // An hour at a time: no caller minds being woken, and no kernel minds the number.
    let limit = limit.min(Duration::from_secs(3600));
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) as _ };
    match poll(fds, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(Rendezvous::System { why: format!("poll failed: {error}") }.into()),
    }
}

/// A connection to a peer.
pub(super) struct Conn {
    fd: OwnedFd,
    input: Vec<u8>,
    /// Bytes of `input` that were taken already.
    taken: usize,
    output: VecDeque<Arc<[u8]>>,
    /// Bytes of the first of `output` that were sent already.
    sent: usize,
    /// The peer sends no more.
    ended: bool,
    /// The peer takes no more.
    deaf: bool,
}

impl Conn {
    /// Of a socket that does not block.
    pub(super) fn new(fd: OwnedFd) -> Self {
        Conn { fd, input: Vec::new(), taken: 0, output: VecDeque::new(), sent: 0, ended: false, deaf: false }
    }

    /// Sends as much of `bytes` as the peer takes now, and the rest on later calls of [`flush`](Self::flush).
    pub(super) fn send(&mut self, bytes: impl Into<Arc<[u8]>>) {
        self.output.push_back(bytes.into());
        self.flush();
    }

    pub(super) fn flush(&mut self) {
        while let Some(first) = self.output.front().filter(|_| !self.deaf) {
            // Without NOSIGNAL a peer that has gone would end this process by SIGPIPE, where that is not ignored.
            match send(&self.fd, &first[self.sent..], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => {
                    self.sent += count;
                    if self.sent == first.len() {
                        self.output.pop_front();
                        self.sent = 0;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // What the peer sent before it went is still to be read.
                Err(_) => self.deaf = true,
            }
        }
        if self.deaf {
            self.output.clear();
        }
    }

    /// Whether something waits to be sent.
    pub(super) fn is_sending(&self) -> bool {
        !self.output.is_empty()
    }

    /// Takes in what there is, up to one frame of `limit` bytes.
    fn fill(&mut self, limit: usize) {
        while !self.ended && self.input.len() - self.taken < limit {
            if self.taken > 0 {
                self.input.drain(..self.taken);
                self.taken = 0;
            }
            let held = self.input.len();
            // Grows with what has come, not with what was announced.
            self.input.resize(held + CHUNK.min(limit - held), 0);
            let result = recv(&self.fd, &mut self.input[held..], RecvFlags::DONTWAIT);
            let count = result.map_or(0, |(count, _)| count);
            self.input.truncate(held + count);
            match result {
                Ok((0, _)) => self.ended = true,
                Ok(_) => {}
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.ended = true,
            }
        }
    }

    /// The next frame of at most `limit` bytes, or nothing while it has not come.
    pub(super) fn next(&mut self, limit: usize) -> Result<Option<Frame>, Malformed> {
        self.fill(limit);
        let Some((frame, size)) = Frame::decode(&self.input[self.taken..], limit)? else { return Ok(None) };
        self.taken += size;
        if self.taken == self.input.len() {
            self.input.clear();
            self.taken = 0;
            // One large message must not hold its memory for the group's life.
            self.input.shrink_to(CHUNK);
        }
        Ok(Some(frame))
    }

    /// Whether the peer has gone, and all that it sent was taken or is half a frame.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// What to wait for: input, and room for output while there is some.
    pub(super) fn interest(&self) -> PollFd<'_> {
        let output = if self.is_sending() && !self.deaf { PollFlags::OUT } else { PollFlags::empty() };
        PollFd::new(&self.fd, PollFlags::IN | output)
    }

    /// Room for output only. The peer may be ahead, and what it has sent already is for later.
    pub(super) fn interest_to_send(&self) -> PollFd<'_> {
        PollFd::new(&self.fd, PollFlags::OUT)
    }

    /// Bytes of memory for what the peer sends.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.input.capacity()
    }

    /// Lets the peer know that nothing more comes, after what was sent.
    pub(super) fn finish(&mut self) {
        self.deaf = true;
        // Fails where the peer has gone already, which is as well.
        let _ = shutdown(&self.fd, Shutdown::Write);
    }
}

/// Without what is under way, which may be large.
impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Conn { fd, ended, deaf, .. } = self;
        f.debug_struct("Conn").field("fd", fd).field("ended", ended).field("deaf", deaf).finish_non_exhaustive()
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
