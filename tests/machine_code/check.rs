//! What the protocol asks of the instructions of a kernel (DESIGN P1, P2, P7, P10, P14), on gfx90a and gfx942: LLVM's memory model
//! for AMD GPUs says what each ordering is made of.

use super::listing::{Instruction, Kernel};

/// How an architecture spells the accesses of system scope.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spelling {
    /// What its system-scope loads carry.
    load: &'static str,
    /// What its system-scope stores carry; nothing on gfx90a, where stores go through all caches that others may look past.
    store: &'static str,
    /// What writes the caches back, for a release.
    write_back: (&'static str, &'static str),
    /// What invalidates them, for an acquire.
    invalidate: (&'static str, &'static str),
}

impl Spelling {
    pub(crate) fn of(arch: &str) -> Option<Self> {
        // A target may carry features behind a colon.
        match arch.split(':').next().unwrap_or(arch) {
            "gfx90a" => Some(Spelling {
                load: "glc",
                store: "",
                write_back: ("buffer_wbl2", ""),
                invalidate: ("buffer_invl2", ""),
            }),
            "gfx942" => Some(Spelling {
                load: "sc0 sc1",
                store: "sc0 sc1",
                write_back: ("buffer_wbl2", "sc0 sc1"),
                invalidate: ("buffer_inv", "sc0 sc1"),
            }),
            _ => None,
        }
    }

    /// Whether stores show their scope.
    pub(crate) fn has_scoped_stores(&self) -> bool {
        !self.store.is_empty()
    }

    fn is_system_load(&self, i: &Instruction) -> bool {
        i.name.starts_with("global_load") && i.operands.contains(self.load)
    }

    fn is_system_store(&self, i: &Instruction) -> bool {
        i.name.starts_with("global_store") && i.operands.contains(self.store)
    }
}

fn is(i: &Instruction, (name, operands): (&str, &str)) -> bool {
    i.name == name && i.operands.contains(operands)
}

/// Whether it waits until all that the wave has asked memory for is done.
fn waits(i: &Instruction) -> bool {
    i.name == "s_waitcnt" && i.operands.contains("vmcnt(0)")
}

/// Whether it touches memory that others see, or meets the block, or goes elsewhere.
fn acts(i: &Instruction) -> bool {
    ["global_", "flat_", "buffer_", "s_barrier", "s_branch", "s_cbranch", "s_endpgm", "s_setpc"]
        .iter()
        .any(|begin| i.name.starts_with(begin))
}

/// How often a kernel does what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Stores of system scope right behind a write-back that was waited for.
    pub(crate) released_stores: usize,
    /// Block barriers right behind one.
    pub(crate) released_barriers: usize,
    /// Invalidations right behind a system-scope load that was waited for.
    pub(crate) acquires: usize,
    /// Loads of system scope.
    pub(crate) system_loads: usize,
    /// Of those, of 64 bits, those that nothing is acquired behind.
    pub(crate) polls_64: usize,
    /// Stores of system scope, of 64 bits, that release nothing.
    pub(crate) sends_64: usize,
    /// Loads and stores of 128 bits.
    pub(crate) wide_loads: usize,
    pub(crate) wide_stores: usize,
    /// Accesses that first find out which memory an address is in.
    pub(crate) flat: usize,
}

impl Tally {
    pub(crate) fn of(kernel: &Kernel, spelling: Spelling) -> Self {
        let code = &kernel.instructions;
        let mut t = Tally::default();
        for (at, i) in code.iter().enumerate() {
            t.flat += usize::from(i.name.starts_with("flat_"));
            t.wide_loads += usize::from(i.name == "global_load_dwordx4");
            t.wide_stores += usize::from(i.name == "global_store_dwordx4");
            t.system_loads += usize::from(spelling.is_system_load(i));
            if i.name == "global_load_dwordx2" && spelling.is_system_load(i) {
                let next = code[at + 1..].iter().find(|i| acts(i));
                t.polls_64 += usize::from(!next.is_some_and(|next| is(next, spelling.invalidate)));
            }
            if i.name == "global_store_dwordx2" && spelling.is_system_store(i) {
                let last = code[..at].iter().rfind(|i| acts(i));
                t.sends_64 += usize::from(!last.is_some_and(|last| is(last, spelling.write_back)));
            }
            if is(i, spelling.write_back) {
                let behind = &code[at + 1..];
                let next = behind.iter().position(acts).unwrap_or(behind.len());
                if let (true, Some(next)) = (behind[..next].iter().any(waits), behind.get(next)) {
                    t.released_stores += usize::from(spelling.is_system_store(next));
                    t.released_barriers += usize::from(next.name == "s_barrier");
                }
            }
            if is(i, spelling.invalidate) {
                let before = &code[..at];
                let last = before.iter().rposition(acts);
                let waited =
                    |last: usize| before[last + 1..].iter().any(waits) && spelling.is_system_load(&before[last]);
                t.acquires += usize::from(last.is_some_and(waited));
            }
        }
        t
    }
}

/// What is wrong with a kernel; nothing if all is as it should be.
pub(crate) fn faults(name: &str, kernel: &Kernel, spelling: Spelling) -> Vec<&'static str> {
    let t = Tally::of(kernel, spelling);
    let begins = |names: &[&str]| names.iter().any(|begin| name.starts_with(begin));
    let waits_for_peers =
        !begins(&["signal_peer_probe", "signal_rms_norm", "signal_norm_rows", "signal_norm_narrow_rows"]);
    // Flags that stand for data: they are released to peers, behind what the whole block has written, and acquired. Those of `signal_trace` stand for none.
    let by_barriers = begins(&[
        "signal_barrier",
        "signal_check",
        "signal_all_reduce_one_stage",
        "signal_all_reduce_two_stage",
        "signal_reduce_scatter",
        "signal_move",
        "signal_norm_two_stage",
    ]);
    let moves_packs = begins(&["signal_all_reduce", "signal_reduce_scatter", "signal_move"]);
    // Data that is its own flag, in halves of packs or lines.
    let by_words = begins(&[
        "signal_all_reduce_lamport",
        "signal_all_reduce_two_shot",
        "signal_all_reduce_norm",
        "signal_all_reduce_rms_norm",
        "signal_lines",
    ]);

    let mut faults = Vec::new();
    let mut ask = |holds: bool, what: &'static str| {
        if !holds {
            faults.push(what);
        }
    };
    // The record of a fault is released to the host, in each kernel that may report one.
    ask(!waits_for_peers || t.released_stores >= 1, "the status is not released");
    ask(!by_barriers || t.released_stores >= 2, "a flag is not released");
    ask(!by_barriers || t.released_barriers >= 1, "waves do not release what they wrote");
    ask(!by_barriers || t.acquires >= 1, "a flag is not acquired");
    ask(!waits_for_peers || t.system_loads >= 3, "polls are not of system scope");
    ask(!by_words || t.polls_64 >= 2, "words are not polled in halves of system scope");
    ask(!by_words || t.sends_64 >= 2, "words are not sent in halves of system scope");
    ask(!moves_packs || (t.wide_loads >= 1 && t.wide_stores >= 1), "packs are not single accesses");
    ask(t.flat == 0, "accesses are flat");
    ask(kernel.scratch == 0 && kernel.spills == 0, "registers went to scratch memory");
    faults
}
