//! What stands between a rank's process and the one that has started it: a socket in the place of standard input.
//!
//! The rank says on it with which error it ends; its parent, why all have to end. It closes with the process at its other end,
//! however that ends: so the parent sees a rank go, and a rank whose parent has gone goes too.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use super::together::Word;

/// How long the parent's word may take where a peer has gone: it sees that at about the same time.
const NEWS: Duration = Duration::from_millis(500);

/// A rank's end.
#[derive(Clone)]
pub(super) struct Line {
    socket: Arc<UnixStream>,
    news: Arc<(Mutex<News>, Condvar)>,
}

#[derive(Default)]
struct News {
    /// Why this rank has to end.
    cause: Option<Word>,
    /// Makes it end.
    stop: Option<Box<dyn Fn() + Send>>,
}

impl Line {
    /// Takes standard input. Ends this process when the parent does.
    pub(super) fn take() -> io::Result<Self> {
        let socket = Arc::new(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?));
        let line = Line { socket, news: Arc::default() };
        let watching = line.clone();
        thread::spawn(move || watching.watch());
        Ok(line)
    }

    /// Tells the parent with which error this rank ends.
    pub(super) fn report(&self, word: &Word) {
        // A parent that has gone needs no word, and its going has ended this process.
        let _ = say(&self.socket, word);
    }

    /// What to do, from another thread, when this rank has to end. Until there is something to do, it ends at once.
    pub(super) fn on_stop(&self, stop: impl Fn() + Send + 'static) {
        self.lock().stop = Some(Box::new(stop));
    }

    /// Why this rank has to end, if the parent says so now or in a moment.
    pub(super) fn cause(&self) -> Option<Word> {
        let waited = self.news.1.wait_timeout_while(self.lock(), NEWS, |news| news.cause.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.cause.clone()
    }

    fn watch(&self) {
        for line in BufReader::new(&*self.socket).lines().map_while(io::Result::ok) {
            let Ok(word) = serde_json::from_str(&line) else { break };
            let mut news = self.lock();
            let Some(stop) = &news.stop else {
                // So that this end does not look like the cause of what it is a consequence of.
                self.report(&word);
                break;
            };
            stop();
            news.cause = Some(word);
            self.news.1.notify_all();
        }
        // Nobody is left to tell, and an orderly exit may wait for kernels that wait for peers.
        let _ = kill_process(getpid(), Signal::KILL);
    }

    fn lock(&self) -> MutexGuard<'_, News> {
        self.news.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends one word.
pub(super) fn say(mut socket: &UnixStream, word: &Word) -> io::Result<()> {
    let mut text = serde_json::to_string(word)?;
    text.push('\n');
    socket.write_all(text.as_bytes())
}

/// Waits until the other end has gone; gives the word that it has left, if any.
pub(super) fn last_word(socket: &UnixStream) -> Option<Word> {
    // A reset is an end like any other.
    let last = BufReader::new(socket).lines().map_while(io::Result::ok).last();
    last.and_then(|line| serde_json::from_str(&line).ok())
}
