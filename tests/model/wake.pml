/* How threads wake the arbiter: csrc/core/arbiter.cpp, wake() and sleep(). A change that nobody tells of again must not
   be slept over, although only the first of many wakers writes to the eventfd.

   Macros: WAKERS, CHANGES (by each); MUTANT_CLEARED_AFTER_LOOKING also stands for a store that the processor performs
   after the loads behind it, which is why the flag is cleared by an exchange. */

#ifndef WAKERS
#define WAKERS 3
#endif
#ifndef CHANGES
#define CHANGES 2
#endif

byte eventfd;
bool woken;
byte changed[WAKERS];       /* how often */
byte seen[WAKERS];

proctype Waker(byte me) {
  byte k;
  bool before;
  do
  :: k < CHANGES ->
     changed[me]++;
     atomic { before = woken; woken = true }
     if
     :: !before -> eventfd++
     :: else
     fi;
     before = false;
     k++
  :: else -> break
  od
}

proctype Sleeper() {
  byte k;
  do
  :: k == WAKERS && seen[0] == CHANGES && seen[WAKERS - 1] == CHANGES && seen[WAKERS / 2] == CHANGES -> break
  :: else ->
     eventfd > 0;
     eventfd = 0;
#ifndef MUTANT_CLEARED_AFTER_LOOKING
     woken = false;
#endif
     k = 0;
     do
     :: k < WAKERS -> seen[k] = changed[k]; k++
     :: else -> break
     od;
#ifdef MUTANT_CLEARED_AFTER_LOOKING
     woken = false;
#endif
  od
}

init {
  byte r;
  atomic {
    run Sleeper();
    do
    :: r < WAKERS -> run Waker(r); r++
    :: else -> r = 0; break
    od
  }
}
