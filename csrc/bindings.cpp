// The only file that knows Python: one register call per domain, and the exceptions' Python types.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <malloc.h>

#include "core/arbiter.h"
#include "core/deadline.h"
#include "core/error.h"
#include "core/failure_board.h"
#include "core/late_report.h"
#include "core/peers.h"
#include "cpu/layers/layers.h"
#include "cpu/symmetric_memory.h"
#include "ops/gemm.h"
#include "ops/line_exchange.h"
#include "ops/register.h"
#include "ops/tier.h"
#include "ops/tier_presets.h"
#include "ops/weight_gradient.h"
#include "transport/device_library.h"
#include "transport/group.h"

TORCH_LIBRARY(pyruntime, library) {
  pyruntime::register_primitives(library);
  pyruntime::register_layer_ops(library);
}

namespace {

namespace py = pybind11;

// The Python exception types, by CommErrorKind. They live as long as the interpreter.
PyObject* exception_types[4] = {};

// Keeps its Python type wherever torch turns C++ exceptions into Python ones, in backward() too.
struct PyCommError : public torch::PyTorchError {
  PyCommError(pyruntime::CommErrorKind kind, const std::string& message)
      : torch::PyTorchError(message), type(exception_types[static_cast<int>(kind)]) {}
  PyObject* python_type() override { return type; }
  PyObject* type;
};

void throw_to_python(pyruntime::CommErrorKind kind, const std::string& message) {
  throw PyCommError(kind, message);
}

// Ctrl-C ends a wait on a peer: waits run without the GIL, so Python could not see the signal until they end.
void raise_pending_signal() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Ranks that are late are told of through Python's logging.
void report_to(py::object warn) {
  // Leaked: a wait may report while the interpreter ends.
  auto* callback = new py::object(std::move(warn));
  pyruntime::set_reporter([callback](const std::string& text) {
    const py::gil_scoped_acquire gil;
    try {
      (*callback)(text);
    } catch (py::error_already_set& error) {
      // Ctrl-C while a report is written ends the wait at its next look; a handler that raises is told of.
      if (error.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();
      } else {
        error.discard_as_unraisable("the pyruntime logger");
      }
    }
  });
}

void register_errors(py::object comm_error, py::object timeout, py::object peer_lost) {
  exception_types[static_cast<int>(pyruntime::CommErrorKind::kTimeout)] = timeout.release().ptr();
  exception_types[static_cast<int>(pyruntime::CommErrorKind::kPeerLost)] = peer_lost.release().ptr();
  exception_types[static_cast<int>(pyruntime::CommErrorKind::kBroken)] = comm_error.release().ptr();
  exception_types[static_cast<int>(pyruntime::CommErrorKind::kDisagree)] = PyExc_ValueError;
  pyruntime::set_comm_error_thrower(throw_to_python);
  pyruntime::set_interrupt_check(raise_pending_signal);
  pyruntime::set_failure_check([] { pyruntime::FailureBoard::instance().raise_if_failed(); });
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (PyCommError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
}

void bind_traffic(py::module_& m) {
  using pyruntime::Arbiter;
  m.def("group_stats_by_class", [] {
    py::dict result;
    std::map<pyruntime::TrafficClass, pyruntime::CommStats> all;
    {
      const py::gil_scoped_release unlocked;
      all = pyruntime::Group::all_stats();
    }
    for (const auto& [traffic_class, stats] : all) result[pyruntime::name_of(traffic_class)] = stats;
    return result;
  });
  m.def("traffic", [] {
    py::dict result;
    std::map<pyruntime::TrafficClass, pyruntime::TrafficFigures> all;
    {
      const py::gil_scoped_release unlocked;
      all = Arbiter::instance().figures();
    }
    for (const auto& [traffic_class, figures] : all) {
      py::dict one;
      one["chunks"] = figures.chunks;
      one["bytes"] = figures.bytes;
      one["queued_s"] = figures.queued_s;
      one["transfer_s"] = figures.transfer_s;
      one["recent_queued_s"] = figures.recent_queued_s;
      one["recent_transfer_s"] = figures.recent_transfer_s;
      result[pyruntime::name_of(traffic_class)] = one;
    }
    return result;
  });
  m.def(
      "reset_traffic", [] { Arbiter::instance().reset_figures(); }, py::call_guard<py::gil_scoped_release>());
  m.def("set_arbiter_fifo", [](bool fifo) {
    Arbiter::instance().set_policy(fifo ? Arbiter::Policy::kFifo : Arbiter::Policy::kPriority);
  });
}

// Tiers, and what tuning found of them; presets are (tier, chunks, tiles, [(way, seconds)], date).
void bind_tiers(py::module_& m) {
  using pyruntime::Group;
  using pyruntime::TierKey;
  m.def("explain_tier", [](const std::string& op, int64_t rows, int64_t n, int64_t k, at::ScalarType dtype,
                           const std::string& group, const std::string& device, const std::string& tier) {
    return pyruntime::explain_tier(Group::get(group), {op, rows, n, k, dtype, c10::Device(device)},
                                   pyruntime::way_named(tier));
  });
  m.def("other_ways", [](const std::string& op, int64_t rows, int64_t n, int64_t k, at::ScalarType dtype,
                         const std::string& group, const std::string& device) {
    return pyruntime::other_ways(Group::get(group), {op, rows, n, k, dtype, c10::Device(device)});
  });
  m.def("tier_key",
        [](const std::string& op, int64_t rows, int64_t n, int64_t k, at::ScalarType dtype,
           const std::string& device) { return TierKey{op, rows, n, k, dtype, c10::Device(device)}.text(); });
  using Preset =
      std::tuple<std::string, int, std::string, std::vector<std::pair<std::string, double>>, std::string>;
  m.def("set_tier_presets", [](int world_size, const std::string& transport,
                               const std::map<std::string, Preset>& given) {
    pyruntime::TierPresets presets;
    for (const auto& [key, preset] : given)
      presets[key] = pyruntime::TierPreset{std::get<0>(preset), std::get<1>(preset), std::get<2>(preset),
                                           std::get<3>(preset), std::get<4>(preset)};
    pyruntime::set_tier_presets(world_size, transport, std::move(presets));
  });
  m.def("clear_tier_presets", &pyruntime::clear_tier_presets);
  m.def("tier_preset",
        [](const std::string& op, int64_t rows, int64_t n, int64_t k, at::ScalarType dtype,
           const std::string& group, const std::string& device) -> std::optional<Preset> {
          const auto found =
              pyruntime::find_tier_preset(Group::get(group), {op, rows, n, k, dtype, c10::Device(device)});
          if (!found) return std::nullopt;
          return Preset{found->tier, found->chunks, found->tiles, found->seconds, found->date};
        });
}

// What ranks tell each other beside all ops, and who of them is missing.
void bind_messages(py::module_& m) {
  using pyruntime::Group;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "join_job",
      [](const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Store>& connection,
         int rank,
         int world_size) { pyruntime::FailureBoard::instance().join(store, rank, world_size, connection); },
      NoGil());
  m.def(
      "tell_job",
      [](const std::string& key, const std::string& value, const std::string& doing, double seconds) {
        pyruntime::tell(key, value, {doing, "", seconds});
      },
      NoGil());
  m.def(
      "hear_job",
      [](const std::string& key, int rank, const std::string& doing, double seconds) {
        const auto peer = [rank] { return pyruntime::Peer{rank, "rank " + std::to_string(rank)}; };
        return pyruntime::hear(key, peer, {doing + " waiting for rank " + std::to_string(rank), "", seconds});
      },
      NoGil());
  m.def(
      "raise_for_missing_in_job",
      [](const std::vector<int>& ranks, const std::string& doing, const std::string& cause, double seconds) {
        std::vector<pyruntime::Peer> peers;
        for (const int rank : ranks) peers.push_back({rank, "rank " + std::to_string(rank)});
        pyruntime::raise_for_missing(peers, {doing, "", seconds}, cause);
      },
      NoGil());
  m.def(
      "post_failure",
      [](const std::string& message) {
        pyruntime::FailureBoard::instance().post({pyruntime::CommErrorKind::kPeerLost, message, ""});
      },
      NoGil());
  m.def("raise_if_failed", [] { pyruntime::FailureBoard::instance().raise_if_failed(); }, NoGil());
  m.def("next_meeting", [](const std::string& group) { return Group::get(group).next_meeting(); }, NoGil());
  m.def(
      "tell",
      [](const std::string& group, const std::string& topic, const std::string& value) {
        Group::get(group).tell(topic, value);
      },
      NoGil());
  m.def("hear", [](const std::string& group, int peer, const std::string& topic, const std::string& doing,
                   double seconds, bool while_it_lives) {
    std::string heard;
    {
      const py::gil_scoped_release no_gil;
      heard = Group::get(group).hear(peer, topic, doing, seconds, while_it_lives);
    }
    return py::bytes(heard);
  });
  m.def(
      "raise_for_missing",
      [](const std::string& group, const std::string& doing, const std::string& cause) {
        Group::get(group).raise_for_missing(doing, cause);
      },
      NoGil());
}

void bind_comm(py::module_& m) {
  using pyruntime::Group;
  py::class_<pyruntime::CommStats>(m, "CommStats", "Cumulative figures of one group on this rank.")
      .def_readonly("ops", &pyruntime::CommStats::ops, "flights begun")
      .def_readonly("bytes", &pyruntime::CommStats::bytes, "bytes read from peers")
      .def_readonly("waiting_s", &pyruntime::CommStats::waiting_s, "seconds spent waiting for a peer")
      .def_readonly("moving_s", &pyruntime::CommStats::moving_s, "seconds spent copying and summing");
  m.def("register_errors", &register_errors);
  // Without the GIL wherever a group is looked up: who holds the registry may be waiting for the GIL.
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("stats", [](const std::string& group) { return Group::get(group).stats(); }, NoGil());
  m.def(
      "workspace_bytes", [](const std::string& group) { return Group::get(group).workspace_bytes(); },
      NoGil());
  m.def(
      "set_deadline",
      [](const std::string& group, double seconds) { Group::get(group).set_deadline_seconds(seconds); },
      NoGil());
  m.def("deadline", [](const std::string& group) { return Group::get(group).deadline_seconds(); }, NoGil());
  m.def("report_to", &report_to);
  m.def(
      "configure",
      [](const std::string& group, const std::optional<std::string>& transport,
         const std::optional<std::vector<std::string>>& hosts, std::optional<int64_t> chunk_bytes,
         std::optional<at::ScalarType> wire, const std::optional<std::string>& multicast) {
        pyruntime::GroupSettings settings;
        if (transport) settings.transport = pyruntime::transport_kind_named(*transport);
        if (hosts) settings.hosts = *hosts;
        if (chunk_bytes) settings.ring.chunk_bytes = *chunk_bytes;
        if (wire) settings.ring.wire = *wire;
        if (multicast) settings.multicast = pyruntime::multicast_named(*multicast);
        Group::get(group).configure(std::move(settings));
      },
      NoGil());
  m.def(
      "follow_settings",
      [](const std::string& group, const std::string& other) { Group::get(group).follow(Group::get(other)); },
      NoGil());
  m.def(
      "set_traffic_class",
      [](const std::string& group, const std::string& name) {
        Group::get(group).set_traffic_class(pyruntime::traffic_class_named(name));
      },
      NoGil());
  m.def(
      "use_device_library",
      [](const std::string& device, const std::string& path) {
        pyruntime::DeviceLibrary::use(c10::Device(device).type(), path);
      },
      NoGil());
  m.def(
      "why_no_device_library",
      [](const std::string& device) {
        std::string why_not;
        pyruntime::DeviceLibrary::find(c10::Device(device).type(), why_not);
        return why_not;
      },
      NoGil());
  m.def(
      "transport_description",
      [](const std::string& group) { return Group::get(group).transport_description(); }, NoGil());
  m.def("leave_groups", &Group::leave_all, NoGil());
  m.def(
      "leave_job", [] { pyruntime::FailureBoard::instance().leave(); },
      py::call_guard<py::gil_scoped_release>());
  bind_messages(m);
  bind_traffic(m);
  // Without the GIL: a process group's destructor may join threads that want it.
  m.def("close_group", &Group::close, py::call_guard<py::gil_scoped_release>());
  m.def(
      "free_workspaces", [](const std::string& group) { Group::get(group).free_workspaces(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("set_symmetric_memory_deadline", &pyruntime::cpu::set_symmetric_memory_deadline);
  m.def("symmetric_memory_bytes", &pyruntime::cpu::symmetric_memory_bytes);
  bind_tiers(m);
}

// Chunks as Python sees them: (first line, number of lines).
py::list pairs_of(const std::vector<pyruntime::LineRange>& ranges) {
  py::list result;
  for (const pyruntime::LineRange& range : ranges) result.append(py::make_tuple(range.begin, range.count));
  return result;
}

void bind_data_parallel(py::module_& m) {
  using pyruntime::LineGather;
  using pyruntime::LineScatter;
  using pyruntime::LineSend;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<LineScatter>(m, "LineScatter", "A reduce-scatter or all-reduce of [lines, width] under way.")
      .def(py::init([](const std::string& group, int64_t lines, int64_t width, at::ScalarType dtype,
                       const std::string& device, bool all) {
             return std::make_unique<LineScatter>(group, lines, width, dtype, c10::Device(device), all);
           }),
           py::arg("group"), py::arg("lines"), py::arg("width"), py::arg("dtype"), py::arg("device"),
           py::arg("all"), NoGil())
      .def("chunks", [](const LineScatter& scatter) { return pairs_of(scatter.chunks()); })
      .def("part", &LineScatter::part, NoGil())
      .def("publish", &LineScatter::publish, NoGil())
      .def("parts_have_come", &LineScatter::parts_have_come)
      .def("reduce", &LineScatter::reduce, NoGil())
      .def("sums_have_come", &LineScatter::sums_have_come)
      .def("finish", &LineScatter::finish, NoGil());
  py::class_<LineGather>(m, "LineGather", "An all-gather of [lines, width] under way.")
      .def(py::init([](const std::string& group, int64_t lines, int64_t width, at::ScalarType dtype,
                       const std::string& device) {
             return std::make_unique<LineGather>(group, lines, width, dtype, c10::Device(device));
           }),
           py::arg("group"), py::arg("lines"), py::arg("width"), py::arg("dtype"), py::arg("device"), NoGil())
      .def("own_chunks", [](const LineGather& gather) { return pairs_of(gather.own_chunks()); })
      .def("own", &LineGather::own, NoGil())
      .def("publish", &LineGather::publish, NoGil())
      .def("chunks", [](const LineGather& gather) { return pairs_of(gather.chunks()); })
      .def("chunk", &LineGather::chunk, NoGil())
      .def("has_come", &LineGather::has_come)
      .def("finish", &LineGather::finish, NoGil());
  py::class_<LineSend>(m, "LineSend", "Lines [lines, width] on their way from one rank to the others.")
      .def(py::init([](const std::string& group, int64_t lines, int64_t width, at::ScalarType dtype,
                       const std::string& device, int source, int64_t agreement) {
             return std::make_unique<LineSend>(group, lines, width, dtype, c10::Device(device), source,
                                               agreement);
           }),
           py::arg("group"), py::arg("lines"), py::arg("width"), py::arg("dtype"), py::arg("device"),
           py::arg("source"), py::arg("agreement") = 0, NoGil())
      .def("memory", &LineSend::memory, NoGil())
      .def("publish", &LineSend::publish, NoGil())
      .def("wait", &LineSend::wait, NoGil())
      .def("finish", &LineSend::finish, NoGil())
      .def("abandon", &LineSend::abandon, NoGil());
  // The sink is called in backward(), without the GIL.
  m.def("set_weight_gradient_sink", [](const at::Tensor& weight, const py::object& sink) {
    if (sink.is_none()) return pyruntime::set_weight_gradient_sink(weight, {});
    // Destroyed with the GIL, wherever the last copy goes.
    const std::shared_ptr<py::object> shared(new py::object(sink), [](py::object* object) {
      const py::gil_scoped_acquire gil;
      delete object;
    });
    pyruntime::set_weight_gradient_sink(weight, [shared](const at::Tensor& dy, const at::Tensor& x) {
      const py::gil_scoped_acquire gil;
      (*shared)(dy, x);
    });
  });
  m.def(
      "write_weight_gradient",
      [](const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, bool accumulate) {
        pyruntime::write_linear_wgrad(out, dy, x, accumulate);
      },
      py::arg("out"), py::arg("dy"), py::arg("x"), py::arg("accumulate"), NoGil());
}

// glibc gives large freed buffers back to the system at once and page-faults them in anew on the next
// allocation, which costs a training step 5 to 15 % of its time. Raising both thresholds keeps them.
bool keep_freed_memory() {
#if defined(__GLIBC__)
  constexpr int kKeep = 1 << 30;
  return mallopt(M_MMAP_THRESHOLD, kKeep) == 1 && mallopt(M_TRIM_THRESHOLD, kKeep) == 1 &&
         mallopt(M_TOP_PAD, 64 << 20) == 1;
#else
  return false;
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ core of pyruntime; its operators are in torch.ops.pyruntime.";
  pyruntime::cpu::register_symmetric_memory();
  bind_comm(m);
  bind_data_parallel(m);
  m.def("keep_freed_memory", &keep_freed_memory);
}
