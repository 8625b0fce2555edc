/* The advance of the Lamport state inside the kernel, with B blocks a rank and one pack a block, as kernels/signal/lamport.h has it:
 * a block arrives once it has read the state, and the last to arrive advances at its own end (-DADV=4).
 * Others for comparison: -DADV=0 arrive at the end; 1 block 0 advances without counting, broken; 3 the first to arrive advances,
 * broken. -DPDL: blocks of the next call start before this one has ended, that is without the wait: broken with each.
 *
 * spin -a -DADV=4 advance.pml && gcc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m2000000 -w26
 * No errors: 505,515 states with B=2, 31,416,022 with B=3. */
#ifndef N
#define N 2
#endif
#ifndef B
#define B 2
#endif
#ifndef CAP
#define CAP B
#endif
#ifndef ADV
#define ADV 0
#endif
#define GENS 3
#define T 4
#define EMPTY 255
#define SL(o,g,s,k) slot[(((o)*GENS+(g))*N+(s))*B+(k)]
byte slot[N*GENS*N*B];
byte flag[N], prev[N], arrival[N], entered[N], resident[N];
byte go[N*2*B];                 /* 0 idle, else call tag+1; two kernel instances per rank */
proctype block(byte me; byte b; byte inst) {
  byte g, cg, pv, i, c; bit last;
endb: do
  :: go[(me*2+inst)*B+b]!=0 ->
  atomic { c=go[(me*2+inst)*B+b]-1; g=flag[me]%GENS; cg=(g+GENS-1)%GENS; pv=prev[me]; entered[me]++ }
  i=1; do :: i<N -> atomic { SL((me+i)%N,g,me,b)=c; i++ } :: i==N -> break od;
  i=1; do :: i<N -> atomic { if :: pv>0 -> SL(me,cg,(me+i)%N,b)=EMPTY :: else fi; i++ } :: i==N -> break od;
#if ADV==4
  atomic { arrival[me]++; last=(arrival[me]==B) };
#endif
  i=1; do :: atomic { i<N && SL(me,g,(me+i)%N,b)!=EMPTY -> assert(SL(me,g,(me+i)%N,b)==c); i++ } :: i==N -> break od;
#if ADV==0
  atomic { arrival[me]++; if :: arrival[me]==B -> arrival[me]=0; entered[me]=0; flag[me]=(flag[me]+1)%12; prev[me]=1 :: else fi };
#elif ADV==4
  if :: last -> atomic { arrival[me]=0; entered[me]=0; flag[me]=(flag[me]+1)%12; prev[me]=1 } :: else fi;
#elif ADV==1
  if :: b==0 -> atomic { entered[me]=0; flag[me]=(flag[me]+1)%12; prev[me]=1 } :: else fi;
#elif ADV==2
  if :: b==0 -> atomic { entered[me]==B -> entered[me]=0; flag[me]=(flag[me]+1)%12; prev[me]=1 } :: else fi;
#elif ADV==3
  atomic { arrival[me]++; if :: arrival[me]==1 -> entered[me]=0; flag[me]=(flag[me]+1)%12; prev[me]=1 :: else fi; if :: arrival[me]==B -> arrival[me]=0 :: else fi };
#endif
  atomic { go[(me*2+inst)*B+b]=0; resident[me]--; i=0; g=0; cg=0; pv=0; c=0; last=0 }
  od
}
#ifdef PDL
#define NEXTOK (todo==0 && go[(me*2+1-inst)*B]==0 && go[(me*2+1-inst)*B+B-1]==0)
#define CAPX (2*B)
#define FLIP inst=1-inst
#else
#define NEXTOK (todo==0 && resident[me]==0)
#define CAPX CAP
#define FLIP skip
#endif
#ifdef ANYORDER
#define ORD(m) true
#else
#define ORD(m) (!(todo & (m)))
#endif
#define START(k,m) :: atomic { (todo & (m)) && ORD((m)-1) && resident[me]<CAPX -> todo=todo-(m); resident[me]++; go[(me*2+inst)*B+k]=c+1 }
proctype stream(byte me) {
  byte c=0, todo=0, inst=0;
ends: do
  :: atomic { NEXTOK -> FLIP; c=(c+1)%T; todo=(1<<B)-1 }
  START(0,1)
  START(1,2)
#if B>2
  START(2,4)
#endif
  od
}
init { byte i,j; atomic { i=0; do :: i<N*GENS*N*B -> slot[i]=EMPTY; i++ :: else -> break od;
   i=0; do :: i<N -> run stream(i); j=0; do :: j<B -> run block(i,j,0);
#ifdef PDL
     run block(i,j,1);
#endif
     j++ :: else -> break od; i++ :: else -> break od } }
