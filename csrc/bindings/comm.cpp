// Groups, messages, tiers, the ledger and traffic, and the exceptions' Python types.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "core/arbiter.h"
#include "core/deadline.h"
#include "core/error.h"
#include "core/host_process.h"
#include "core/job/failure_board.h"
#include "core/job/job_ranks.h"
#include "core/job/peers.h"
#include "core/late_report.h"
#include "core/ledger/ledger.h"
#include "core/ledger/peer_figures.h"
#include "core/ledger/stream_clock.h"
#include "cpu/symmetric_memory.h"
#include "ops/tier/route.h"
#include "ops/tier/tuned.h"
#include "symm_mem/operators.h"
#include "transport/device/hosts/pairs.h"
#include "transport/device/library.h"
#include "transport/group.h"
#include "transport/inside.h"

namespace pyruntime {
namespace {

// Releases the GIL where a group is looked up: the holder of the registry's lock may wait for the GIL.
template <typename Function>
void def_unlocked(py::module_& m, const char* name, Function&& function) {
  m.def(name, std::forward<Function>(function), NoGil());
}

// The Python exception types, by CommErrorKind. They live as long as the interpreter.
PyObject* exception_types[4] = {};

// Keeps its Python type wherever torch turns C++ exceptions into Python ones, also in backward().
struct PyCommError : public torch::PyTorchError {
  PyCommError(CommErrorKind kind, const std::string& message)
      : torch::PyTorchError(message), type(exception_types[static_cast<int>(kind)]) {}
  PyObject* python_type() override { return type; }
  PyObject* type;
};

void throw_to_python(CommErrorKind kind, const std::string& message) {
  throw PyCommError(kind, message);
}

// Ctrl-C ends a wait on a peer: waits run without the GIL, so Python could not see the signal until they end.
void raise_pending_signal() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Late ranks are reported through Python's logging.
void report_to(py::object warn) {
  // Leaked: a wait may report while the interpreter ends.
  auto* callback = new py::object(std::move(warn));
  set_reporter([callback](const std::string& text) {
    const py::gil_scoped_acquire gil;
    try {
      (*callback)(text);
    } catch (py::error_already_set& error) {
      // Ctrl-C while a report is written ends the wait soon; a handler's exception is reported.
      if (error.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();
      } else {
        error.discard_as_unraisable("the pyruntime logger");
      }
    }
  });
}

void register_errors(py::object comm_error, py::object timeout, py::object peer_lost) {
  exception_types[static_cast<int>(CommErrorKind::kTimeout)] = timeout.release().ptr();
  exception_types[static_cast<int>(CommErrorKind::kPeerLost)] = peer_lost.release().ptr();
  exception_types[static_cast<int>(CommErrorKind::kBroken)] = comm_error.release().ptr();
  exception_types[static_cast<int>(CommErrorKind::kDisagree)] = PyExc_ValueError;
  set_comm_error_thrower(throw_to_python);
  set_interrupt_check(raise_pending_signal);
  set_failure_check([] { FailureBoard::instance().raise_if_failed(); });
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (PyCommError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
}

// Calls find() without the GIL and convert()s the figures of each class to Python; by the name of the class.
template <typename Find, typename Convert>
py::dict by_class(const Find& find, const Convert& convert) {
  const auto found = [&] {
    const py::gil_scoped_release unlocked;
    return find();
  }();
  py::dict result;
  for (const auto& [traffic_class, figures] : found) result[name_of(traffic_class)] = convert(figures);
  return result;
}

void bind_traffic(py::module_& m) {
  m.def("group_stats_by_class", [] {
    return by_class(
        [] {
          auto stats = Group::all_stats();
          for (const auto& [of, seconds] : StreamClock::instance().waited_by_class()) {
            stats[of].waiting_s += seconds;
          }
          return stats;
        },
        [](const CommStats& stats) { return py::cast(stats); });
  });
  // Without the waits of a device's stream.
  def_unlocked(m, "waiting_on_host_s", [] {
    double seconds = 0;
    for (const auto& [of, stats] : Group::all_stats()) seconds += stats.waiting_s;
    return seconds;
  });
  m.def("traffic", [] {
    return by_class([] { return Arbiter::instance().figures(); },
                    [](const TrafficFigures& figures) {
                      py::dict one;
                      one["chunks"] = figures.chunks;
                      one["bytes"] = figures.bytes;
                      one["queued_s"] = figures.queued_s;
                      one["transfer_s"] = figures.transfer_s;
                      one["recent_queued_s"] = figures.recent_queued_s;
                      one["recent_transfer_s"] = figures.recent_transfer_s;
                      return one;
                    });
  });
  // (process group, class, rank of that group): (waiting_s, bytes, transfer_s)
  def_unlocked(m, "peer_figures", [] {
    std::map<std::tuple<std::string, std::string, int>, std::tuple<double, int64_t, double>> result;
    for (const auto& [peer, figures] : PeerTable::instance().figures()) {
      result[{peer.process_group, name_of(peer.traffic_class), peer.rank}] = {
          figures.waiting_s, figures.bytes, figures.transfer_s};
    }
    return result;
  });
  def_unlocked(m, "reset_traffic", [] { Arbiter::instance().reset_figures(); });
  m.def("set_arbiter_fifo", [](bool fifo) {
    Arbiter::instance().set_policy(fifo ? Arbiter::Policy::kFifo : Arbiter::Policy::kPriority);
  });
}

// Entries as rows of doubles, which represent all of their numbers exactly: kind, axis, name, layer, peer,
// thread, bytes, begin, wanted, end, from, left, arrived.
at::Tensor rows_of(const std::vector<pyruntime::LedgerEntry>& entries) {
  at::Tensor rows = at::empty({static_cast<int64_t>(entries.size()), 13}, at::kDouble);
  double* row = rows.mutable_data_ptr<double>();
  for (const pyruntime::LedgerEntry& entry : entries) {
    for (const double figure :
         {static_cast<double>(entry.kind), static_cast<double>(entry.axis), static_cast<double>(entry.name),
          static_cast<double>(entry.layer), static_cast<double>(entry.peer),
          static_cast<double>(entry.thread), static_cast<double>(entry.bytes), entry.begin, entry.wanted,
          entry.end, static_cast<double>(entry.from), entry.left, entry.arrived}) {
      *row++ = figure;
    }
  }
  return rows;
}

void bind_stream_clock(py::module_& m) {
  def_unlocked(m, "stream_clock_start",
               [](const std::string& device) { StreamClock::instance().start(c10::Device(device)); });
  def_unlocked(m, "stream_clock_stop", [] { StreamClock::instance().stop(); });
  m.def("stream_clock_mark", [] { return StreamClock::instance().mark(); });
  m.def("stream_clock_has_passed", [](int64_t point) { return StreamClock::instance().has_passed(point); });
  // For each point (seconds of time.monotonic, seconds waited until then).
  def_unlocked(m, "stream_clock_read", [](const std::vector<int64_t>& points) {
    std::vector<std::pair<double, double>> result;
    for (const auto& reading : StreamClock::instance().read(points)) {
      result.emplace_back(reading.at, reading.waited);
    }
    return result;
  });
}

void bind_ledger(py::module_& m) {
  using pyruntime::Ledger;
  m.def("ledger_start", [](size_t capacity, const std::string& device) {
    return Ledger::instance().start(capacity, c10::Device(device));
  });
  m.def("ledger_stop", [] { Ledger::instance().stop(); });
  m.def("ledger_take", [] {
    const Ledger::Taken taken = Ledger::instance().take();
    return py::make_tuple(rows_of(taken.entries), taken.lost);
  });
  m.def("ledger_enter", [](int32_t kind, const std::string& axis, const std::string& name, int32_t peer,
                           int64_t bytes, double begin, double end) {
    if (!Ledger::is_on()) return;
    pyruntime::LedgerEntry entry{static_cast<pyruntime::Entered>(kind)};
    entry.axis = static_cast<int32_t>(pyruntime::traffic_class_named(axis));
    entry.name = Ledger::instance().number_of(name);
    entry.peer = peer;
    entry.bytes = bytes;
    entry.begin = entry.wanted = begin;
    entry.end = end;
    Ledger::instance().enter(entry);
  });
  m.def("ledger_names", [] { return Ledger::instance().names(); });
  m.def("ledger_number_of", [](const std::string& name) { return Ledger::instance().number_of(name); });
  m.def("ledger_set_layer", &Ledger::set_layer);
}

// A TierKey in Python: (op, rows, n, k, dtype, kind of device).
using KeyTuple = std::tuple<std::string, int64_t, int64_t, int64_t, at::ScalarType, std::string>;

TierKey key_of(const KeyTuple& key) {
  const auto& [op, rows, n, k, dtype, device] = key;
  return {op, rows, n, k, dtype, c10::Device(device).type()};
}

// Tiers, and their tuned choices: (tier, chunks, tiles, [(choice, seconds)], date).
void bind_tiers(py::module_& m) {
  using TunedTuple =
      std::tuple<std::string, int, std::string, std::vector<std::pair<std::string, double>>, std::string>;
  m.def("explain_tier", [](const KeyTuple& key, const std::string& group, const std::string& tier) {
    return explain_tier(Group::get(group), key_of(key), c10::Device(std::get<5>(key)), tier_named(tier));
  });
  m.def("other_choices", [](const KeyTuple& key, const std::string& group) {
    return other_choices(Group::get(group), key_of(key), c10::Device(std::get<5>(key)));
  });
  m.def("set_tuned_tiers", [](int world_size, const std::string& transport,
                              const std::vector<std::pair<KeyTuple, TunedTuple>>& given) {
    TunedTiers tiers;
    for (const auto& [key, tuned] : given) tiers[key_of(key)] = std::make_from_tuple<TunedTier>(tuned);
    set_tuned_tiers(world_size, transport, std::move(tiers));
  });
  m.def("clear_tuned_tiers", &clear_tuned_tiers);
}

// Messages between ranks beside all ops, and the search for missing ranks.
void bind_messages(py::module_& m) {
  def_unlocked(
      m, "join_job",
      [](const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Store>& connection,
         int rank, int world_size,
         int served_by) { FailureBoard::instance().join(store, rank, world_size, connection, served_by); });
  def_unlocked(m, "tell_job",
               [](const std::string& key, const std::string& value, const std::string& doing,
                  double seconds) { tell(key, value, {doing, "", seconds}); });
  def_unlocked(m, "hear_job", [](const std::string& key, int rank, const std::string& doing, double seconds) {
    return hear(key, rank, {doing + " waiting for " + JobRanks::instance().name(rank), "", seconds});
  });
  def_unlocked(m, "raise_for_missing_in_job",
               [](const std::vector<int>& ranks, const std::string& doing, const std::string& cause,
                  double seconds) { raise_for_missing(ranks, {doing, "", seconds}, cause); });
  def_unlocked(m, "post_failure", [](const std::string& message) {
    FailureBoard::instance().post({CommErrorKind::kPeerLost, message, ""});
  });
  def_unlocked(m, "raise_for_ended",
               [](const std::string& doing, double seconds) { raise_for_ended({doing, "", seconds}); });
  def_unlocked(m, "raise_if_failed", [] { FailureBoard::instance().raise_if_failed(); });
  def_unlocked(m, "next_exchange",
               [](const std::string& group) { return Group::get(group).rendezvous().next_exchange(); });
  def_unlocked(m, "tell", [](const std::string& group, const std::string& topic, const std::string& value) {
    Group::get(group).rendezvous().tell(topic, value);
  });
  m.def("hear", [](const std::string& group, int peer, const std::string& topic, const std::string& doing,
                   double seconds, bool while_it_lives) {
    std::string heard;
    {
      const py::gil_scoped_release no_gil;
      heard = Group::get(group).rendezvous().hear(peer, topic, doing, seconds, while_it_lives);
    }
    return py::bytes(heard);
  });
  def_unlocked(m, "raise_for_missing",
               [](const std::string& group, const std::string& doing, const std::string& cause) {
                 Group::get(group).rendezvous().raise_for_missing(doing, cause);
               });
}

}  // namespace

void bind_comm(py::module_& m) {
  py::class_<CommStats>(m, "CommStats", "Cumulative figures of one group on this rank.")
      .def_readonly("ops", &CommStats::ops, "flights begun")
      .def_readonly("bytes", &CommStats::bytes, "bytes read from peers")
      .def_readonly("waiting_s", &CommStats::waiting_s, "seconds spent waiting for a peer")
      .def_readonly("moving_s", &CommStats::moving_s, "seconds spent copying and summing");
  m.def("register_errors", &register_errors);
  def_unlocked(m, "stats", [](const std::string& group) {
    CommStats stats = Group::get(group).stats();
    stats.waiting_s += StreamClock::instance().waited_in(group);
    return stats;
  });
  // begin: seconds of time.monotonic().
  def_unlocked(m, "count_all_to_all", [](const std::string& group, int64_t bytes, double begin) {
    Group::get(group).count_collective(pyruntime::Op::kAllToAll, bytes, begin);
  });
  def_unlocked(m, "workspace_bytes",
               [](const std::string& group) { return Group::get(group).workspace_bytes(); });
  def_unlocked(m, "set_deadline", [](const std::string& group, double seconds) {
    Group::get(group).set_deadline_seconds(seconds);
  });
  def_unlocked(m, "deadline", [](const std::string& group) { return Group::get(group).deadline_seconds(); });
  m.def("report_to", &report_to);
  def_unlocked(m, "configure",
               [](const std::string& group, const std::optional<std::string>& transport,
                  const std::optional<std::vector<std::string>>& hosts, std::optional<int64_t> chunk_bytes,
                  std::optional<at::ScalarType> wire, const std::optional<std::string>& multicast,
                  const std::optional<std::vector<std::vector<int>>>& rings) {
                 GroupSettings settings;
                 if (transport) settings.transport = transport_kind_named(*transport);
                 if (hosts) settings.hosts = *hosts;
                 if (chunk_bytes) settings.ring.chunk_bytes = *chunk_bytes;
                 if (wire) settings.ring.wire = *wire;
                 if (multicast) settings.multicast = multicast_named(*multicast);
                 if (rings) settings.rings = Rings(*rings);
                 Group::get(group).configure(std::move(settings));
               });
  def_unlocked(m, "make_companion",
               [](const std::string& group, const std::string& traffic_class,
                  const std::optional<std::pair<int, int>>& edge, int within) {
                 return Group::companion(group, traffic_class_named(traffic_class), edge, within);
               });
  def_unlocked(m, "note_failed_pass", [](const std::string& group) { Group::get(group).note_failed_pass(); });
  m.def("set_thread_namer", [](py::object namer) {
    auto* held = new py::object(std::move(namer));  // leaked: ops may run while the interpreter ends
    set_thread_namer([held](pid_t thread) {
      const py::gil_scoped_acquire gil;
      return py::cast<std::string>((*held)(thread));
    });
  });
  def_unlocked(m, "set_traffic_class", [](const std::string& group, const std::string& name) {
    Group::get(group).set_traffic_class(traffic_class_named(name));
  });
  m.def("set_torch_is_for_rocm", &DeviceLibrary::set_torch_is_for_rocm);
  def_unlocked(m, "use_device_library", [](const std::string& device, const std::string& path) {
    DeviceLibrary::use(c10::Device(device).type(), path);
  });
  def_unlocked(m, "why_no_device_library", [](const std::string& device) {
    std::string why_not;
    DeviceLibrary::find(c10::Device(device).type(), why_not);
    return why_not;
  });
  def_unlocked(m, "transport_description",
               [](const std::string& group) { return Group::get(group).transport_description(); });
  def_unlocked(m, "crosses_hosts", [](const std::string& group, const std::string& device) {
    return Group::get(group).crosses_hosts(c10::Device(device));
  });
  def_unlocked(m, "leave_groups", &Group::leave_all);
  def_unlocked(m, "leave_job", [] {
    FailureBoard::instance().leave();
    JobRanks::instance().forget();
    PeerTable::instance().forget();
  });
  bind_messages(m);
  bind_traffic(m);
  // Without the GIL: a process group's destructor may join threads that want it.
  def_unlocked(m, "close_group", [](const std::string& group) {
    Group::close(group);
    StreamClock::instance().forget(group);
  });
  def_unlocked(m, "forget_destroyed_groups", &Group::forget_destroyed);
  m.def("set_job_ranks_finder", [](py::object finder) {
    auto* held = new py::object(std::move(finder));  // leaked: ops may run while the interpreter ends
    JobRanks::instance().set_finder([held](const std::string& process_group, int size) {
      const py::gil_scoped_acquire gil;
      return py::cast<std::vector<int>>((*held)(process_group, size));
    });
  });
  m.def("set_coordinates", [](std::vector<std::string> coordinates) {
    JobRanks::instance().set_coordinates(std::move(coordinates));
  });
  m.def("host_identity", &host_identity);
  m.def("name_of_rank", [](int rank) { return JobRanks::instance().name_and_place(rank); });
  m.def("on_new_group", [](py::object hook) {
    auto* held = new py::object(std::move(hook));  // leaked: ops may run while the interpreter ends
    Group::on_new([held](const std::string& name) {
      const py::gil_scoped_acquire gil;
      (*held)(name);
    });
  });
  m.def("set_pair_maker", [](py::object maker) {
    auto* held = new py::object(std::move(maker));  // leaked: ops may run while the interpreter ends
    set_pair_maker([held](const std::string& name, const GroupContext& context, c10::Device device) {
      const py::gil_scoped_acquire gil;
      (*held)(name, context.name, context.process_group, context.job_ranks, context.rank,
              c10::DeviceTypeName(device.type(), /*lower_case=*/true));
    });
  });
  def_unlocked(m, "free_workspaces", [](const std::string& group) { Group::get(group).free_workspaces(); });
  m.def("set_symmetric_memory_deadline", &cpu::set_symmetric_memory_deadline);
  m.def("symmetric_memory_bytes", &cpu::symmetric_memory_bytes);
  m.def("use_symm_mem_operators",
        [](const std::string& device) { use_symm_mem_operators(c10::Device(device).type()); });
  bind_tiers(m);
  bind_ledger(m);
  bind_stream_clock(m);
}

}  // namespace pyruntime
