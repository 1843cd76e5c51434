/* Chunks inside a host: csrc/transport/symmetric_workspace.cpp and one_host.cpp. A rank is its op thread alone; each
   word has one writer, and a number in it only grows.

   A byte of memory stands for a chunk and holds the number of the flight that wrote it. Writing and publishing are two
   steps, and so are seeing a flag and reading: another rank may come between.

   Macros: RANKS, SLOTS, PROGRAM, FLIGHTS; MUTANT_* break one rule each. */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef SLOTS
#define SLOTS 2
#endif

/* --- programs: what every op thread does */

#define GATHER 0
#define SCATTER 1
#define ALL_REDUCE 2

#define IN_TURN 1
#define CROSSED 2

#ifndef FLIGHTS
#define FLIGHTS 3
#endif
#define op(n) begin(n); publish(n); consume(n)

#if PROGRAM == IN_TURN
#define KIND(n) ((n) == 1 -> SCATTER : ((n) == 2 -> ALL_REDUCE : GATHER))
#if FLIGHTS == 2
#define STEPS op(1); op(2)
#else
#define STEPS op(1); op(2); op(3)
#endif

#elif PROGRAM == CROSSED
/* Two in flight; each rank publishes them in an order of its own. */
#define KIND(n) ((n) == 2 -> SCATTER : GATHER)
#define STEPS \
  begin(1); begin(2); \
  if :: true -> publish(1); publish(2) :: true -> publish(2); publish(1) fi; \
  consume(1); begin(3); consume(2); publish(3); consume(3)
#endif

/* Whether flight n needs more memory than its slot has: flight 1 finds none, flight 3 too little. */
#define grows(n) ((n) == 1 || (n) == 3)

/* --- what the ranks share */

#define slot(n) ((n) % SLOTS)
#define CHUNKS (RANKS + 1)                    /* parts by owner, or rows in 0; and this rank's sums */
#define at(r, s) ((r) * SLOTS + (s))
#define chunk(r, s, c) (at(r, s) * CHUNKS + (c))

byte begun[RANKS * SLOTS];
byte descriptor[RANKS * SLOTS];
byte finished[RANKS * SLOTS];
byte ready[RANKS * SLOTS * CHUNKS];
byte memory[RANKS * SLOTS * CHUNKS];
byte joined[FLIGHTS + 1];                     /* ranks that have come to the rendezvous of the flight's slot */

#ifdef MUTANT_FLAGS_WITHOUT_NUMBERS
#define is_ready(r, n, c) (ready[chunk(r, slot(n), c)] > 0)
#else
#define is_ready(r, n, c) (ready[chunk(r, slot(n), c)] >= (n))
#endif

inline meet(p, n) {
  atomic { begun[at(p, slot(n))] >= n; assert(descriptor[at(p, slot(n))] == n) }
}

inline begin(n) {
#ifndef MUTANT_SLOT_NOT_AWAITED
  if
  :: n > SLOTS ->
     do
     :: p < RANKS -> finished[at(p, slot(n))] >= n - SLOTS; p++
     :: else -> p = 0; break
     od
  :: else
  fi;
#endif
  descriptor[at(me, slot(n))] = n;
  begun[at(me, slot(n))] = n;
  if
  :: grows(n) ->
     do
     :: p < RANKS -> meet(p, n); p++
     :: else -> p = 0; break
     od;
     /* The old memory is dropped, then all ranks map the new. */
     atomic {
       do
       :: c < CHUNKS -> memory[chunk(me, slot(n), c)] = 0; c++
       :: else -> c = 0; break
       od;
       joined[n]++
     }
     joined[n] == RANKS
  :: else
  fi
}

inline set_flag(n, c) {
#ifdef MUTANT_PUBLISHED_BEFORE_WRITTEN
  ready[chunk(me, slot(n), c)] = n;
  memory[chunk(me, slot(n), c)] = n;
#else
  memory[chunk(me, slot(n), c)] = n;
  ready[chunk(me, slot(n), c)] = n;
#endif
}

inline publish(n) {
  if
  :: KIND(n) == GATHER -> set_flag(n, 0)
  :: else ->
     do
     :: c < RANKS -> set_flag(n, (me + 1 + c) % RANKS); c++
     :: else -> c = 0; break
     od
  fi
}

/* Waits for the peer's chunk and reads it. */
inline read(p, n, c) {
  meet(p, n);
  is_ready(p, n, c);
  assert(memory[chunk(p, slot(n), c)] == n)
}

inline read_from_all(n, c) {
  do
  :: p + 1 < RANKS -> read((me + 1 + p) % RANKS, n, c); p++
  :: else -> p = 0; break
  od
}

inline consume(n) {
  if
  :: KIND(n) == GATHER -> read_from_all(n, 0)
  :: else ->
     read_from_all(n, me);
     if
     :: KIND(n) == ALL_REDUCE -> set_flag(n, RANKS); read_from_all(n, RANKS)
     :: else
     fi
  fi;
  finished[at(me, slot(n))] = n
}

active [RANKS] proctype Op() {
  byte me = _pid;
  byte p, c;
  STEPS
}
