/* The barrier of kernels/signal/barrier.h, by counters or by lines: SETS words for each peer, chosen by the value's lowest bit, waited
 * for with equality. Unbounded runs: all counters wrap modulo W, data tags modulo T, so a finished search covers every run length. One
 * process a rank, which is one block; its N lanes are the N threads that each handle one peer, joined by the block's barrier.
 *   -DN=2|3 -DSETS=1|2; two sets hold, one deadlocks
 *   -DGE       waits for "not behind" instead of "equal": one set would do then
 *   -DNO_END   no exit barrier: wrong data
 *   -DRELAXED  the signal may overtake the data that it publishes: wrong data
 *   -DW=7      counters that wrap at an odd number, so that the sets do not take turns: deadlock
 *
 * spin -a -DN=3 -DW=6 barrier.pml && gcc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m2000000 -w24 */
#ifndef N
#define N 2
#endif
#ifndef SETS
#define SETS 2
#endif
#ifndef W
#define W 8
#endif
#define T 4
byte peer[N*SETS*N];
byte selfc[N*N];
byte in[N];          /* what peers can see */
byte pend[N];        /* 255 = nothing in flight */
#define PC(o,s,src) peer[((o)*SETS+(s))*N+(src)]
#define SC(r,p)     selfc[(r)*N+(p)]
#ifdef GE
#define OK(a,v) (((a)-(v)+W)%W < W/2)
#else
#define OK(a,v) ((a)==(v))
#endif
#ifdef RELAXED
#define FLUSHED(r) true
#else
#define FLUSHED(r) (pend[r]==255)
#endif
#define LANE(p) \
  :: lane[p]==0 && FLUSHED(me) -> atomic { SC(me,p) = (SC(me,p)+1)%W; PC(p,SC(me,p)%SETS,me) = SC(me,p); lane[p]=1 } \
  :: lane[p]==1 && OK(PC(me,SC(me,p)%SETS,p),SC(me,p)) -> lane[p]=2
inline bar() {
  d_step { lane[0]=0; lane[1]=0; lane[N-1]=0 }
  do
  LANE(0)
  LANE(1)
#if N>2
  LANE(2)
#endif
  :: lane[0]==2 && lane[1]==2 && lane[N-1]==2 -> break
  od
}
proctype mem(byte me) {            /* store buffer of one GPU */
endm: do
  :: pend[me]!=255 -> d_step { in[me]=pend[me]; pend[me]=255 }
  od
}
proctype rank(byte me) {
  byte lane[N]; byte tag=0; byte q;
end: do
  :: true ->
     tag = (tag+1)%T;
     (pend[me]==255) -> pend[me] = tag;    /* producer kernel writes input */
     bar();                                /* start barrier */
     q=0;
     do
     :: q<N && q!=me -> assert(in[q]==tag); q++
     :: q<N && q==me -> q++
     :: q==N -> break
     od;
#ifndef NO_END
     bar();                                /* end barrier */
#endif
  od
}
init { byte i; atomic { i=0; do :: i<N -> pend[i]=255; run mem(i); run rank(i); i++ :: else -> break od } }
