/* Chunks between hosts: csrc/transport/ring/ring.cpp, traffic.cpp, control.cpp, flight.cpp and core/arbiter.cpp
   as far as they wait, signal and use memory again. Bytes, tags, deadlines and failures are left out: none of them makes
   anybody wait.

       rank       an op thread, an arbiter, and for each group and neighbour upstream a receiver
       line       control messages from a neighbour downstream: BEGIN (it has room) and ARRIVED (an acknowledgement)
       notices    NOTICE messages with their data: a receiver waits for them in this order. The arbiter's hands, through
                  which they go in truth, are never tied
       memory     what lies in it is named by the number of the flight that wrote it, and the hosts whose rows or
                  parts are in it

   One transition is what one thread does under one lock, or between two looks at what other threads write. The arbiter
   may send any head that is ready, or wait for one whose window is full and send nothing meanwhile: the model has the
   runs of every policy. PRIORITY makes it the real one.

   HOSTS, LOCAL       hosts, and ranks on each
   STREAMS, PIECES    directions round the ring (1 models half of what more than two hosts do), and pieces in each
   SLOTS, WINDOW      4 and 2 in truth; fewer make both bind in shorter runs
   PROGRAM, OP        what op threads do, below
   COARSE             control messages are taken when they are sent, and a rank writes all its parts of a scatter at
                      once. All that a control message does is to let its taker go on, so one that comes late is like a
                      taker that looks late; what a taker might find changed by then is asserted in runs without COARSE
   MUTANT_*           breaks one rule */

#ifndef HOSTS
#define HOSTS 2
#endif
#ifndef LOCAL
#define LOCAL 1
#endif
#ifndef STREAMS
#if HOSTS > 2
#define STREAMS 2
#else
#define STREAMS 1
#endif
#endif
#ifndef PIECES
#define PIECES 1
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef WINDOW
#define WINDOW 2
#endif
#ifndef COARSE
#define COARSE 0
#endif
#ifndef PRIORITY
#define PRIORITY 0
#endif
#if SLOTS > 2
#error "The arbiter below looks at two slots of each group."
#endif
#if LOCAL > 2 || (LOCAL == 2 && STREAMS == 2)
#error "Hosts of two ranks are modelled with one stream only."
#endif

/* --- programs: what every op thread does, the same on all ranks

   GROUPS, FLIGHTS of each, the KIND of flight n of group g, and the op thread's STEPS. `either` is two orders between
   which each rank chooses for itself. */

#define GATHER 0
#define SCATTER 1
#define ALL_REDUCE 2

#define ONE 1
#define IN_TURN 2
#define BUCKETS 3
#define CROSSED 4
#define ANY_ORDER 5
#define LATE_PUBLISH 6
#define BACKWARD 7
#define TWO_GROUPS 8
#define ONE_BUCKET 9

#define op(g, n) begin(g, n); publish(g, n); consume(g, n)
#define either(a, b) if :: true -> a; b :: true -> b; a fi

#if PROGRAM == ONE
#define GROUPS 1
#define FLIGHTS 1
#define KIND(g, n) OP
#define STEPS op(0, 1)

#elif PROGRAM == IN_TURN
/* One after the other; a fast rank may be a whole slot ahead of a slow one. */
#define GROUPS 1
#define FLIGHTS 3
#define KIND(g, n) OP
#define STEPS op(0, 1); op(0, 2); op(0, 3)

#elif PROGRAM == BUCKETS
/* Two under way at any time, as gradients are reduced under the backward. */
#define GROUPS 1
#define FLIGHTS 3
#define KIND(g, n) OP
#define STEPS \
  begin(0, 1); publish(0, 1); begin(0, 2); publish(0, 2); consume(0, 1); \
  begin(0, 3); publish(0, 3); consume(0, 2); consume(0, 3)

#elif PROGRAM == CROSSED
/* Two in flight, published against the order in which they began. */
#define GROUPS 1
#define FLIGHTS 2
#define KIND(g, n) ((n) == 2 -> SCATTER : GATHER)
#define STEPS begin(0, 1); begin(0, 2); publish(0, 2); publish(0, 1); consume(0, 1); consume(0, 2)

#elif PROGRAM == ANY_ORDER
/* Two in flight, published and consumed by each rank in an order of its own. Flight 3 uses the slot of flight 1. */
#define GROUPS 1
#define FLIGHTS 3
#define KIND(g, n) ((n) == 2 -> SCATTER : GATHER)
#define STEPS \
  begin(0, 1); begin(0, 2); \
  either(publish(0, 1), publish(0, 2)); \
  either(consume(0, 1), consume(0, 2)); \
  op(0, 3)

#elif PROGRAM == LATE_PUBLISH
/* Flight 1 is begun first and written last, after flight 2 has come and gone. */
#define GROUPS 1
#define FLIGHTS 3
#define KIND(g, n) ((n) == 1 -> SCATTER : GATHER)
#define STEPS begin(0, 1); op(0, 2); publish(0, 1); consume(0, 1); op(0, 3)

#elif PROGRAM == BACKWARD
/* A column linear's backward, on each rank in either tier: the gather of x and the scatter of dX. Then another op. */
#define GROUPS 1
#define FLIGHTS 3
#define KIND(g, n) ((n) == 2 -> SCATTER : GATHER)
#define STEPS \
  if \
  :: true -> begin(0, 1); publish(0, 1); begin(0, 2); publish(0, 2); consume(0, 1); consume(0, 2) \
  :: true -> op(0, 1); op(0, 2) \
  fi; \
  op(0, 3)

#elif PROGRAM == TWO_GROUPS
/* Group 0 is tp, group 1 dp: two buckets travel under two ops of tp. */
#define GROUPS 2
#define FLIGHTS 2
#define KIND(g, n) ((g) == 1 -> SCATTER : GATHER)
#define STEPS \
  begin(1, 1); publish(1, 1); op(0, 1); begin(1, 2); publish(1, 2); \
  either(op(0, 2), consume(1, 1)); \
  consume(1, 2)

#elif PROGRAM == ONE_BUCKET
#define GROUPS 2
#define FLIGHTS 1
#define KIND(g, n) ((g) == 1 -> SCATTER : GATHER)
#define STEPS begin(1, 1); publish(1, 1); op(0, 1); consume(1, 1)
#endif

/* --- sizes and places */

#define RANKS (HOSTS * LOCAL)
#define SPACES (GROUPS * SLOTS)               /* slots of all groups */
#define HOPS ((HOSTS - 1) * PIECES)           /* of one stream, in one phase */
#define EVERY ((1 << HOSTS) - 1)              /* hosts, as a set */

#define space(g, n) ((g) * SLOTS + (n) % SLOTS)
#define host(r) ((r) / LOCAL)
#define rail(r) ((r) % LOCAL)
#define mate(r, m) (host(r) * LOCAL + (m))
#define along(r, steps) (((host(r) + (steps)) % HOSTS) * LOCAL + rail(r))
#define down(r, d) along(r, ((d) == 0 -> 1 : HOSTS - 1))
#define up(r, d) along(r, ((d) == 0 -> HOSTS - 1 : 1))
/* Whose rows receive i of a gather brings. */
#define origin(r, d, i) host(along(r, ((d) == 0 -> HOSTS - 1 - (i) / PIECES : 1 + (i) / PIECES)))

#define hops(k) ((k) == ALL_REDUCE -> 2 * HOPS : HOPS)
#define at(r, s) ((r) * SPACES + (s))
#define lane(r, s, d) (at(r, s) * STREAMS + (d))
/* What rank r itself wrote into its memory. In a gather its rows, in 0 .. PIECES - 1. In a scatter its part of what the
   rail `owner` sends as hop i, then of the rows that this host's rank on that rail owns, then that rank's sums. */
#define MINE (HOPS + 2 * PIECES)
#define mine(r, s, d, owner, i) mine_[(lane(r, s, d) * LOCAL + (owner)) * MINE + (i)]
#define came(r, s, d, i) came_[lane(r, s, d) * 2 * HOPS + (i)]
#define content(n, hosts) ((n) * 16 + (hosts))

mtype = { BEGIN, ARRIVED };

byte number[RANKS * SPACES];                  /* of the flight in the slot */
byte finished[RANKS * SPACES];                /* what the ranks of the host are told: SlotControl::finished */
bool op_finished[RANKS * SPACES];
byte mine_[RANKS * SPACES * STREAMS * LOCAL * MINE];
byte came_[RANKS * SPACES * STREAMS * 2 * HOPS];

bool posted[RANKS * SPACES * STREAMS];        /* receives are posted, and the lane is added */
bool credit[RANKS * SPACES * STREAMS];
byte sent[RANKS * SPACES * STREAMS];
byte acknowledged[RANKS * SPACES * STREAMS];
byte arrived[RANKS * SPACES * STREAMS];

byte window[RANKS * STREAMS];                 /* by destination, which differs from stream to stream */
bool early[RANKS * STREAMS * GROUPS * (FLIGHTS + 1)];
#define early_begin(r, d, g, n) early[(((r) * STREAMS + (d)) * GROUPS + (g)) * (FLIGHTS + 1) + (n)]
bool closed[RANKS];

/* That there is always room is asserted, so a line holds a round of BEGINs for each group and a window of ARRIVEDs. */
#if COARSE == 0
chan line[RANKS * STREAMS] = [GROUPS * SLOTS + WINDOW] of { mtype, byte, byte };      /* group, flight */
#endif
chan notices[GROUPS * RANKS * STREAMS] = [WINDOW] of { byte, byte, byte };            /* flight, hop, content */
#define notices_of(g, r, d) notices[((g) * RANKS + (r)) * STREAMS + (d)]

/* --- messages, from a rank to `r`, its neighbour upstream on stream d */

inline take_begin(r, d, g, n) {
  assert(!closed[r]);
  if
  :: number[at(r, space(g, n))] == n -> credit[lane(r, space(g, n), d)] = true
#ifdef MUTANT_EARLY_BEGIN_LOST
  :: else
#else
  :: else -> assert(number[at(r, space(g, n))] < n); early_begin(r, d, g, n) = true
#endif
  fi
}

inline take_arrived(r, d, g, n) {
  assert(!closed[r]);
  assert(number[at(r, space(g, n))] == n);
  window[(r) * STREAMS + d]--;
  acknowledged[lane(r, space(g, n), d)]++
}

#if COARSE
inline tell(r, d, what, g, n) {
  if
  :: what == BEGIN -> take_begin(r, d, g, n)
  :: else -> take_arrived(r, d, g, n)
  fi
}
#else
inline tell(r, d, what, g, n) {
  assert(nfull(line[(r) * STREAMS + d]));
  line[(r) * STREAMS + d] ! what, g, n
}
#endif

/* --- op thread */

#define left(r, s, n, d) (acknowledged[lane(r, s, d)] == hops(KIND((s) / SLOTS, n)))
#if STREAMS == 1
#define all_left(r, s, n) left(r, s, n, 0)
#define all_came(r, s, count) (arrived[lane(r, s, 0)] >= (count))
#else
#define all_left(r, s, n) (left(r, s, n, 0) && left(r, s, n, 1))
#define all_came(r, s, count) (arrived[lane(r, s, 0)] >= (count) && arrived[lane(r, s, 1)] >= (count))
#endif
#if LOCAL == 1
#define mates_finished(r, s, n) true
#define mates_parts(r, s, i, n) true
#define mates_rows(r, s, n) true
#define mates_sums(r, s, n) true
#define parts_there(r, s, d, i, n) (mine(r, s, d, 0, i) >= (n))
#define parts_are(r, s, d, i, n) (mine(r, s, d, 0, i) == (n))
#elif LOCAL == 2
#define other(r) mate(r, 1 - rail(r))
#define mates_finished(r, s, n) (finished[at(other(r), s)] >= (n))
#define mates_parts(r, s, i, n) (mine(other(r), s, 0, rail(r), i) >= (n))
#define mates_rows(r, s, n) (mine(other(r), s, 0, rail(other(r)), 0) >= (n) && number[at(other(r), s)] == (n) && \
                             all_came(other(r), s, HOPS))
#define mates_sums(r, s, n) (mine(other(r), s, 0, rail(other(r)), HOPS + PIECES) >= (n) && \
                             number[at(other(r), s)] == (n) && all_came(other(r), s, 2 * HOPS))
#define parts_there(r, s, d, i, n) \
  (mine(mate(r, 0), s, d, rail(r), i) >= (n) && mine(mate(r, 1), s, d, rail(r), i) >= (n))
#define parts_are(r, s, d, i, n) \
  (mine(mate(r, 0), s, d, rail(r), i) == (n) && mine(mate(r, 1), s, d, rail(r), i) == (n))
#endif

#ifdef MUTANT_EARLY_REUSE
#define has_left(r, s, n) true
#else
#define has_left(r, s, n) all_left(r, s, n)
#endif

inline begin(g, n) {
  atomic {
    /* await_slot(), then the host's workspace */
    n <= SLOTS || (has_left(me, space(g, n), n - SLOTS) && mates_finished(me, space(g, n), n - SLOTS));
    number[at(me, space(g, n))] = n;
    op_finished[at(me, space(g, n))] = false;
    d = 0;
    do
    :: d < STREAMS ->
       credit[lane(me, space(g, n), d)] = false;
       posted[lane(me, space(g, n), d)] = false;
       sent[lane(me, space(g, n), d)] = 0;
       acknowledged[lane(me, space(g, n), d)] = 0;
       arrived[lane(me, space(g, n), d)] = 0;
       d++
    :: else -> d = 0; break
    od
  }
  atomic {
    /* post_receives(), introduce(), add_lanes() */
    do
    :: d < STREAMS ->
       posted[lane(me, space(g, n), d)] = true;
       if
       :: early_begin(me, d, g, n) -> early_begin(me, d, g, n) = false; credit[lane(me, space(g, n), d)] = true
       :: else
       fi;
       tell(up(me, d), d, BEGIN, g, n);
       d++
    :: else -> d = 0; break
    od
  }
}

/* Writes and publishes: its rows at once, its parts one after the other as ring_scatter_order() has them. */
inline publish(g, n) {
  if
  :: KIND(g, n) == GATHER ->
     atomic {
       do
       :: d < STREAMS ->
          i = 0;
          do
          :: i < PIECES -> mine(me, space(g, n), d, rail(me), i) = n; i++
          :: else -> break
          od;
          d++
       :: else -> d = 0; i = 0; break
       od
     }
  :: else ->
#if COARSE
     atomic {
#endif
     do
     :: atomic { i < HOPS + PIECES ->
          do
          :: d < STREAMS ->
             j = 0;
             do
             :: j < LOCAL -> mine(me, space(g, n), d, j, i) = n; j++
             :: else -> break
             od;
             d++
          :: else -> d = 0; j = 0; break
          od;
          i++
        }
     :: atomic { i == HOPS + PIECES -> i = 0; break }
     od
#if COARSE
     }
#endif
  fi
}

/* Looked at as late as can be, when the op finishes: who overwrites them too early is found out. */
inline look_at_rows(r, g, n) {
  do
  :: d < STREAMS ->
     assert(mine(r, space(g, n), d, rail(r), 0) == n);
     do
     :: i < HOPS -> assert(came(r, space(g, n), d, i) == content(n, 1 << origin(r, d, i))); i++
     :: else -> i = 0; break
     od;
     d++
  :: else -> d = 0; break
  od
}

inline look_at_sums(r, g, n) {
  do
  :: d < STREAMS ->
     assert(mine(r, space(g, n), d, rail(r), HOPS + PIECES) == n);
     do
     :: i < HOPS -> assert(came(r, space(g, n), d, HOPS + i) == content(n, EVERY)); i++
     :: else -> i = 0; break
     od;
     d++
  :: else -> d = 0; break
  od
}

inline consume(g, n) {
  if
  :: KIND(g, n) == GATHER ->
#ifndef MUTANT_FINISH_UNREAD
     all_came(me, space(g, n), HOPS) && mates_rows(me, space(g, n), n);
#endif
     atomic {
       j = 0;
#ifndef MUTANT_FINISH_UNREAD
       do
       :: j < LOCAL -> look_at_rows(mate(me, j), g, n); j++
       :: else -> j = 0; break
       od;
#endif
       finish(g, n)
     }
  :: else ->
     atomic {
       all_came(me, space(g, n), HOPS) && mates_parts(me, space(g, n), HOPS, n);
       d = 0;
       do
       :: d < STREAMS ->
          i = 0;
          do
          :: i < PIECES ->
             assert(came(me, space(g, n), d, HOPS - PIECES + i) == content(n, EVERY - (1 << host(me))));
             assert(parts_are(me, space(g, n), d, HOPS + i, n));
             mine(me, space(g, n), d, rail(me), HOPS + PIECES + i) = n;   /* the sum, published */
             i++
          :: else -> break
          od;
          d++
       :: else -> d = 0; i = 0; break
       od
     }
     atomic {
       KIND(g, n) == SCATTER || (all_came(me, space(g, n), 2 * HOPS) && mates_sums(me, space(g, n), n));
       if
       :: KIND(g, n) == ALL_REDUCE ->
          do
          :: j < LOCAL -> look_at_sums(mate(me, j), g, n); j++
          :: else -> j = 0; break
          od
       :: else
       fi;
       finish(g, n)
     }
  fi
}

/* Whether this rank's arbiter will not read the parts of the host's ranks any more: it sums them when it sends. */
#define parts_read(r, s, n) \
  (KIND((s) / SLOTS, n) == GATHER || (sent[lane(r, s, 0)] >= HOPS && sent[lane(r, s, STREAMS - 1)] >= HOPS))

inline finish(g, n) {
  op_finished[at(me, space(g, n))] = true;
  if
#ifndef MUTANT_FINISH_WITHOUT_ARBITER
  :: !parts_read(me, space(g, n), n)
#endif
  :: else -> finished[at(me, space(g, n))] = n
  fi
}

proctype Op(byte me) {
  byte d, i, j;
  STEPS;
  /* flush(), then the group is closed. */
  atomic {
    do
    :: i < SPACES && number[at(me, i)] > 0 -> all_left(me, i, number[at(me, i)]); i++
    :: i < SPACES && number[at(me, i)] == 0 -> i++
    :: else -> i = 0; break
    od;
    closed[me] = true
  }
}

/* --- arbiter */

#define kind_in(r, s) KIND((s) / SLOTS, number[at(r, s)])
#define head(r, s, d) sent[lane(r, s, d)]
#define chained(r, s, d) (arrived[lane(r, s, d)] > head(r, s, d) - PIECES)
#define is_there(r, s, d) ( \
  kind_in(r, s) == GATHER -> \
    (head(r, s, d) < PIECES -> mine(r, s, d, rail(r), head(r, s, d)) >= number[at(r, s)] : chained(r, s, d)) : \
  (head(r, s, d) < HOPS -> \
    (parts_there(r, s, d, head(r, s, d), number[at(r, s)]) && (head(r, s, d) < PIECES || chained(r, s, d))) : \
    (head(r, s, d) < HOPS + PIECES -> mine(r, s, d, rail(r), head(r, s, d) + PIECES) >= number[at(r, s)] : \
      chained(r, s, d))))

#ifdef MUTANT_NO_CREDIT
#define has_credit(r, s, d) true
#else
#define has_credit(r, s, d) credit[lane(r, s, d)]
#endif
#define ready(r, s, d) \
  (posted[lane(r, s, d)] && has_credit(r, s, d) && head(r, s, d) < hops(kind_in(r, s)) && is_there(r, s, d))
#define fits(r, d) (window[(r) * STREAMS + (d)] < WINDOW)

inline send(s, d) {
  n = number[at(me, s)];
  i = head(me, s, d);
  /* There is room, and what leaves is of this flight. */
  assert(number[at(down(me, d), s)] == n && posted[lane(down(me, d), s, d)]);
  if
  :: kind_in(me, s) == GATHER && i < PIECES ->
     assert(mine(me, s, d, rail(me), i) == n);
     v = content(n, 1 << host(me))
  :: kind_in(me, s) != GATHER && i < HOPS ->
     assert(parts_are(me, s, d, i, n));
     if
     :: i < PIECES -> v = content(n, 1 << host(me))
     :: else -> v = came(me, s, d, i - PIECES) | (1 << host(me))
     fi
  :: kind_in(me, s) != GATHER && i >= HOPS && i < HOPS + PIECES -> v = content(n, EVERY)
  :: else -> v = came(me, s, d, i - PIECES)
  fi;
  window[me * STREAMS + d]++;
  assert(nfull(notices_of(s / SLOTS, down(me, d), d)));
  notices_of(s / SLOTS, down(me, d), d) ! n, i, v;
  sent[lane(me, s, d)]++;
  if
  :: op_finished[at(me, s)] && parts_read(me, s, n) -> finished[at(me, s)] = n
  :: else
  fi;
  n = 0; i = 0; v = 0
}

#if COARSE == 0
inline take_message(d) {
  if
  :: line[me * STREAMS + d] ? BEGIN, g, n -> take_begin(me, d, g, n)
  :: line[me * STREAMS + d] ? ARRIVED, g, n -> take_arrived(me, d, g, n)
  fi;
  g = 0; n = 0
}
#endif

#define NOTHING 255
#if PRIORITY
/* next_to_leave(): of the ready heads the most urgent, where it fits; where not, one of the same urgency that does. */
#ifdef MUTANT_NO_PRIORITY
#define nothing_more_urgent(s, d) true
#else
#define nothing_more_urgent(s, d) (urgent(s, d) || !some_urgent)
#endif
#define urgent(s, d) ((s) / SLOTS == 0 || aged[(s) * STREAMS + (d)])
#define urgent_head(s, d) (urgent(s, d) && ready(me, s, d))
#if GROUPS == 2 && SLOTS == 2 && STREAMS == 1
#define some_urgent (urgent_head(0, 0) || urgent_head(1, 0) || urgent_head(2, 0) || urgent_head(3, 0))
#define tp_could_leave ((ready(me, 0, 0) || ready(me, 1, 0)) && fits(me, 0))
#endif
#define offered(s, d) \
  :: atomic { ready(me, s, d) && fits(me, d) && nothing_more_urgent(s, d) -> \
       assert(urgent(s, d) || !tp_could_leave); \
       aged[(s) * STREAMS + (d)] = false; \
       send(s, d) } \
  :: atomic { (s) / SLOTS > 0 && ready(me, s, d) && !aged[(s) * STREAMS + (d)] -> aged[(s) * STREAMS + (d)] = true }
#else
/* A head may leave, or be waited for while it does not fit: nothing else leaves then. */
#define offered(s, d) \
  :: atomic { held == NOTHING && ready(me, s, d) && fits(me, d) -> send(s, d) } \
  :: atomic { held == NOTHING && ready(me, s, d) && !fits(me, d) -> held = (s) * STREAMS + (d) } \
  :: atomic { held == (s) * STREAMS + (d) && fits(me, d) -> held = NOTHING; send(s, d) }
#endif

#if STREAMS == 1
#define each_stream(s) offered(s, 0)
#else
#define each_stream(s) offered(s, 0) offered(s, 1)
#endif

proctype Arbiter(byte me) {
  byte n, i, v, g;
#if PRIORITY
  bool aged[SPACES * STREAMS];
#else
  byte held = NOTHING;
#endif
end:
  do
  each_stream(0)
#if SPACES > 1
  each_stream(1)
#endif
#if SPACES > 2
  each_stream(2)
  each_stream(3)
#endif
#if COARSE == 0
  :: atomic { nempty(line[me * STREAMS]) -> take_message(0) }
#if STREAMS == 2
  :: atomic { nempty(line[me * STREAMS + 1]) -> take_message(1) }
#endif
#endif
  od
}

/* --- receiver */

proctype Receiver(byte me, g, d) {
  byte n, i, v;
#ifdef MUTANT_INORDER_RECEIVE
  byte expected = 1;
#endif
end:
  do
#ifdef MUTANT_INORDER_RECEIVE
  :: atomic { notices_of(g, me, d) ?? [eval(expected), i, v] ->
       notices_of(g, me, d) ?? eval(expected), i, v;
       n = expected;
#else
  :: atomic { notices_of(g, me, d) ? n, i, v;
#endif
       assert(!closed[me]);
       /* The flight has begun here, and on the other side its memory is still what the link reads. */
       assert(number[at(me, space(g, n))] == n && posted[lane(me, space(g, n), d)]);
       assert(number[at(up(me, d), space(g, n))] == n);
       assert(i == arrived[lane(me, space(g, n), d)]);
       came(me, space(g, n), d, i) = v;
       arrived[lane(me, space(g, n), d)]++;
       tell(up(me, d), d, ARRIVED, g, n);
#ifdef MUTANT_INORDER_RECEIVE
       if
       :: arrived[lane(me, space(g, n), d)] == hops(KIND(g, n)) -> expected++
       :: else
       fi;
#endif
       n = 0; i = 0; v = 0
     }
  od
}

init {
  byte r, g, d;
  atomic {
    do
    :: r < RANKS ->
       run Op(r);
       run Arbiter(r);
       g = 0;
       do
       :: g < GROUPS ->
          d = 0;
          do
          :: d < STREAMS -> run Receiver(r, g, d); d++
          :: else -> break
          od;
          g++
       :: else -> break
       od;
       r++
    :: else -> r = 0; g = 0; d = 0; break
    od
  }
}
