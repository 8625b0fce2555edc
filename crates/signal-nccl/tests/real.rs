//! Against the library itself, where there is one: `cargo test -p signal-nccl --test real -- --ignored`, with `SIGNAL_NCCL` or `SIGNAL_RCCL` where the loader does not
//! find it.
#![allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]

use signal_nccl::{Library, UniqueId, Vendor, Version};

#[test]
#[ignore = "needs NCCL or RCCL"]
fn it_opens_and_makes_ids() {
    let opened: Vec<_> = Vendor::ALL.into_iter().map(Library::open).collect();
    let libraries: Vec<&Library> = opened.iter().filter_map(|opened| opened.as_ref().ok()).collect();
    assert!(!libraries.is_empty(), "{opened:?}");
    for library in libraries {
        println!("{} {}", library.vendor(), library.version());
        assert!(library.version() >= Version::NEEDED);
        let ids = [UniqueId::new(library).unwrap(), UniqueId::new(library).unwrap()];
        assert_ne!(ids[0], ids[1]);
        assert_eq!(UniqueId::from_bytes(ids[0].to_bytes()), ids[0]);
        // An empty group.
        library.group(|| Ok::<(), signal_nccl::Error>(())).unwrap();
    }
}
