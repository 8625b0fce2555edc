//! Memory for other processes. Its descriptor is given to whoever asks for it by the exporter's process number and the address: a thread
//! of each process that exports waits for that, as long as the process lives.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::OnceLock;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

fn name_of(process: u32) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("signal-hip-abi/{process}"))
}

/// Answers whoever asks from now on: `find` gives the descriptor for an address.
pub(crate) fn serve(find: fn(u64) -> Option<OwnedFd>) -> std::io::Result<()> {
    static SERVED: OnceLock<()> = OnceLock::new();
    if SERVED.get().is_some() {
        return Ok(());
    }
    let listener = UnixListener::bind_addr(&name_of(std::process::id())?)?;
    std::thread::spawn(move || {
        for asker in listener.incoming().flatten() {
            // Who does not ask properly hears nothing.
            let _ = answer(asker, find);
        }
    });
    let _ = SERVED.set(());
    Ok(())
}

fn answer(mut asker: UnixStream, find: fn(u64) -> Option<OwnedFd>) -> std::io::Result<()> {
    let mut address = [0; 8];
    asker.read_exact(&mut address)?;
    let Some(descriptor) = find(u64::from_le_bytes(address)) else { return Ok(()) };
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(&asker, &[IoSlice::new(&[1])], &mut ancillary, SendFlags::empty())?;
    Ok(())
}

/// The descriptor for an address of another process.
pub(crate) fn fetch(process: u32, address: u64) -> std::io::Result<Option<OwnedFd>> {
    let mut exporter = UnixStream::connect_addr(&name_of(process)?)?;
    exporter.write_all(&address.to_le_bytes())?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(&exporter, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut found = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            found = found.or(descriptors.last());
        }
    }
    Ok(found)
}
