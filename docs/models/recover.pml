/* Recovery in the form in which crates/signal-core/src/comm/recover.rs has it: bounded waits; a fault poisons; every rank waits
 * until its kernel has ended and its stores have landed, meets the others, sets memory and abort words to their first state, and
 * meets again. One lane a rank, two ranks. Flag stores are posted: they sit in fly[] until delivered.
 *
 * spin -a recover.pml && gcc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m2000000 -w26
 * No errors, 22,210 states. Broken when the first meeting is left out (-DNO_MEETING), and when a rank that gave up goes on with its next
 * call as if nothing had been (-DCARRY_ON). */
#define N 2
#define W 8
#define T 4
#define NONE 255
byte peer[N*2];        /* peer[owner*2+set], one remote src each */
byte in[N];            /* published data tag */
byte flyv[N], flys[N]; /* posted flag store of rank r to the other */
bool poison[N];        /* host-visible flags, set by its owner's kernel/host */
byte epoch_at[N];      /* out-of-band rendezvous */
byte gen[N];
byte tagof[N];
proctype net(byte me) {
endn: do
  :: flyv[me]!=NONE -> d_step { peer[(1-me)*2+flys[me]]=flyv[me]; flyv[me]=NONE }
  od
}
#define POISONED (poison[0]||poison[1])
inline bar(ok) {
  (flyv[me]==NONE);
  d_step { sc=(sc+1)%W; flyv[me]=sc; flys[me]=sc%2 }
  if
  :: peer[me*2+sc%2]==sc -> ok=1
  :: true -> ok=0                     /* timed out: always possible */
  :: POISONED -> ok=0
  fi
}
proctype rank(byte me) {
  byte sc=0, tag=0; bit ok; byte q; byte rnd=0;
endr: do
  :: true ->
     tag=(tag+1)%T; in[me]=tag;
     bar(ok);
     if :: ok -> assert(in[1-me]==tag); bar(ok) :: else fi;
     if
#ifdef CARRY_ON
     :: ok==0 -> skip
#else
     :: ok==0 ->
        atomic { poison[me]=true };
        (flyv[me]==NONE);            /* every stream of the group has been waited for: stores landed */
#ifndef NO_MEETING
        rnd=(rnd+1)%4; epoch_at[me]=rnd;
        (epoch_at[1-me]==rnd || epoch_at[1-me]==(rnd+1)%4);
#endif
        d_step { sc=0; peer[me*2]=0; peer[me*2+1]=0; tag=0; poison[me]=false };
        rnd=(rnd+1)%4; epoch_at[me]=rnd;
        (epoch_at[1-me]==rnd || epoch_at[1-me]==(rnd+1)%4)
#endif
     :: ok==1 && POISONED -> /* the call itself succeeded here, but the communicator is poisoned: same recovery */
        atomic { poison[me]=true };
        (flyv[me]==NONE);            /* every stream of the group has been waited for: stores landed */
#ifndef NO_MEETING
        rnd=(rnd+1)%4; epoch_at[me]=rnd;
        (epoch_at[1-me]==rnd || epoch_at[1-me]==(rnd+1)%4);
#endif
        d_step { sc=0; peer[me*2]=0; peer[me*2+1]=0; tag=0; poison[me]=false };
        rnd=(rnd+1)%4; epoch_at[me]=rnd;
        (epoch_at[1-me]==rnd || epoch_at[1-me]==(rnd+1)%4)
     :: ok==1 && !POISONED -> skip
     fi
  od
}
init { atomic { flyv[0]=NONE; flyv[1]=NONE; run net(0); run net(1); run rank(0); run rank(1) } }
