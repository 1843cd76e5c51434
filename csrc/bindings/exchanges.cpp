// Flights of lines that Python keeps open.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "ops/line_exchange.h"
#include "transport/group.h"

namespace pyruntime {
namespace {

// Chunks as Python sees them: (first line, number of lines).
py::list pairs_of(const std::vector<Chunk>& chunks) {
  py::list result;
  for (const Chunk& chunk : chunks) result.append(py::make_tuple(chunk.begin, chunk.rows));
  return result;
}

std::vector<Chunk> lines_of(const std::vector<JoinedChunk>& chunks) {
  std::vector<Chunk> result;
  for (const JoinedChunk& chunk : chunks) result.push_back(chunk.lines);
  return result;
}

}  // namespace

void bind_exchanges(py::module_& m) {
  py::class_<LineScatter>(m, "LineScatter", "A reduce-scatter or all-reduce of [lines, width] under way.")
      .def(py::init<const std::string&, int64_t, int64_t, at::ScalarType, const std::string&, bool,
                    const std::optional<std::vector<int64_t>>&>(),
           py::arg("group"), py::arg("lines"), py::arg("width"), py::arg("dtype"), py::arg("device"),
           py::arg("all"), py::arg("some") = py::none(), NoGil())
      .def_static(
          "can_send_some",
          [](const std::string& group, const std::string& device) {
            return LineScatter::can_send_some(group, device);
          },
          py::arg("group"), py::arg("device"), NoGil())
      .def("chunks", [](const LineScatter& scatter) { return pairs_of(lines_of(scatter.chunks())); })
      .def("part", &LineScatter::part, NoGil())
      .def("publish", &LineScatter::publish, NoGil())
      .def("parts_have_come", &LineScatter::parts_have_come)
      .def("reduce", &LineScatter::reduce, NoGil())
      .def("sums_have_come", &LineScatter::sums_have_come)
      .def("finish", &LineScatter::finish, NoGil());
  py::class_<LineGather>(m, "LineGather", "An all-gather of [lines, width] under way.")
      .def(py::init<const std::string&, int64_t, int64_t, at::ScalarType, const std::string&>(),
           py::arg("group"), py::arg("lines"), py::arg("width"), py::arg("dtype"), py::arg("device"), NoGil())
      .def("own_chunks", [](const LineGather& gather) { return pairs_of(gather.own_chunks()); })
      .def("own", &LineGather::own, NoGil())
      .def("publish", &LineGather::publish, NoGil())
      .def("chunks", [](const LineGather& gather) { return pairs_of(lines_of(gather.chunks())); })
      .def("chunk", &LineGather::chunk, NoGil())
      .def("has_come", &LineGather::has_come)
      .def("finish", &LineGather::finish, NoGil());
  py::class_<LineSend>(m, "LineSend", "Lines [lines, width] on their way from one rank to the others.")
      .def(py::init<const std::string&, int64_t, int64_t, at::ScalarType, const std::string&, int, int64_t>(),
           py::arg("group"), py::arg("lines"), py::arg("width"), py::arg("dtype"), py::arg("device"),
           py::arg("source"), py::arg("agreement") = 0, NoGil())
      .def("memory", &LineSend::memory, NoGil())
      .def("publish", &LineSend::publish, NoGil())
      .def("wait", &LineSend::wait, NoGil())
      .def("has_come", &LineSend::has_come)
      .def("finish", &LineSend::finish, NoGil())
      .def("abandon", &LineSend::abandon, NoGil());
  py::class_<LineDeal>(m, "LineDeal", "Lines [lines, width] on their way from each rank to each.")
      .def(py::init([](const std::string& group, std::vector<int64_t> counts, int64_t width,
                       at::ScalarType dtype, const std::string& device) {
             const int ranks = Group::get(group).world_size();
             return std::make_unique<LineDeal>(group, DealtRows(std::move(counts), ranks), width, dtype,
                                               c10::Device(device));
           }),
           py::arg("group"), py::arg("counts"), py::arg("width"), py::arg("dtype"), py::arg("device"),
           NoGil())
      .def("leaving", &LineDeal::leaving, NoGil())
      .def("publish", &LineDeal::publish, NoGil())
      .def("arrived", &LineDeal::arrived, NoGil())
      .def("finish", &LineDeal::finish, NoGil());
}

}  // namespace pyruntime
