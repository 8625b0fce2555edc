/* The Lamport region of kernels/signal/lamport.h: GENS generations x N slots x up to P packs a rank, calls without end (all counters
 * wrap). A rank's kernel is three lanes that run in any interleaving (send to peers, clear the generation of the call before, receive),
 * joined at the end of the kernel, behind which the state advances. The size of each call is chosen freely in 1..P, the same on all
 * ranks. As in the code a call of more than MOST packs clears those above by itself, right after reading them, and leaves MOST to the
 * next call; the generation is the flag modulo GENS, and the flag wraps at FW, which GENS must divide.
 *   -DN -DP -DMOST -DGENS=2|3|4 -DFW
 *   -DGENS=2        stuck
 *   -DFW=11         the flag wraps where it should not: stale data
 *   -DCLEAR_CUR     clears as much as this call sends instead of the one before: stale data
 *   -DBCAST         only rank 0 sends (a one-way collective): wrong data
 *   -DZERO          nobody sends to rank N-1 (an empty shard), which still sends: wrong data
 *   -DLAZYCLEAR     the clears may land as late as during the next call (an early launch without its wait): stuck
 *   -DCLEAR_FIRST   all clears before the first send
 *
 * spin -a -DP=2 -DMOST=1 lamport.pml && gcc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m2000000 -w24 */
#ifndef N
#define N 2
#endif
#ifndef P
#define P 2
#endif
#ifndef GENS
#define GENS 3
#endif
#ifndef FW
#define FW 12
#endif
#ifndef MOST
#define MOST P
#endif
#define T 4
#define EMPTY 255
#define SL(o,g,s,k) slot[(((o)*GENS+(g))*N+(s))*P+(k)]
#define PEER(i) ((me+1+(i))%N)
#if defined(BCAST)
#define SENDS(a,b) ((a)==0)
#elif defined(ZERO)
#define SENDS(a,b) ((b)!=N-1)
#else
#define SENDS(a,b) true
#endif
#ifdef CLEAR_FIRST
#define SENDOK (cl==clend)
#else
#define SENDOK true
#endif
#ifdef CLEAR_CUR
#define CLEXT sz
#else
#define CLEXT prev
#endif
/* Packs from MOST on are cleared by whoever has read them, in the same call. */
#define LEFT(s) ((s)<MOST -> (s) : MOST)
byte slot[N*GENS*N*P];
byte size[T];
#ifdef LAZYCLEAR
byte jobext[N], jobgen[N];      /* outstanding clear of each rank */
proctype clearer(byte me) {
  byte k;
endc: do
  :: jobext[me]!=0 -> k=0;
     do :: k<(N-1)*jobext[me] -> atomic { SL(me,jobgen[me],PEER(k/jobext[me]),k%jobext[me])=EMPTY; k++ }
        :: k==(N-1)*jobext[me] -> break od;
     atomic { jobext[me]=0; jobgen[me]=0; k=0 }
  od
}
#define CLEARSTEP cl<clend && jobext[me]==0 -> atomic { jobext[me]=CLEXT; jobgen[me]=cg; cl=clend }
#else
#define CLEARSTEP cl<clend -> atomic { SL(me,cg,PEER(cl/CLEXT),cl%CLEXT)=EMPTY; cl++ }
#endif
proctype rank(byte me) {
  byte flag=0, prev=0, c=0, sz=0, s=0, cl=0, r=0, end=0, clend=0, g=0, cg=0;
endr: do
  :: atomic { true ->
     c=(c+1)%T; sz=size[c]; g=flag%GENS; cg=(flag+GENS-1)%GENS;
     s=0; cl=0; r=0; end=(N-1)*sz; clend=(N-1)*CLEXT };
     do
     :: s<end && SENDOK -> atomic {
          if :: SENDS(me,PEER(s/sz)) -> SL(PEER(s/sz),g,me,s%sz) = c :: else -> skip fi;
          s++; if :: s==end -> s=255 :: else fi }
     :: CLEARSTEP
     :: r<end && (!SENDS(PEER(r/sz),me) || SL(me,g,PEER(r/sz),r%sz)!=EMPTY) -> atomic {
          if :: SENDS(PEER(r/sz),me) -> assert(SL(me,g,PEER(r/sz),r%sz)==c) :: else -> skip fi;
          if :: r%sz>=MOST -> SL(me,g,PEER(r/sz),r%sz)=EMPTY :: else -> skip fi;
          r++ }
     :: atomic { s==255 && cl==clend && r==end -> break }
     od;
     atomic { prev=LEFT(sz); flag=(flag+1)%FW; s=0;cl=0;r=0;end=0;clend=0;g=0;cg=0;sz=0 }
  od
}
init { byte i;
  atomic {
    i=0; do :: i<N*GENS*N*P -> slot[i]=EMPTY; i++ :: else -> break od;
    i=0; do :: i<T -> if
#if P>2
      :: size[i]=3
#endif
#if P>1
      :: size[i]=2
#endif
      :: size[i]=1 fi; i++ :: else -> break od;
    i=0; do :: i<N -> run rank(i);
#ifdef LAZYCLEAR
      run clearer(i);
#endif
      i++ :: else -> break od } }
