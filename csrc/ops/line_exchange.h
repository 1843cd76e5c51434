// The two movements of rows for operands that are not activations: lines of parameters and of their
// gradients.
//
// A line is `width` elements. What all ranks hold together is [lines, width], cut as torch.tensor_split cuts
// lines; where the ranks' number divides them, every rank has as many. An exchange is a flight that its owner
// keeps open: others of the group may begin and end meanwhile, in the same order on every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/group.h"

namespace pyruntime {

// Every rank writes its part of all lines, chunk by chunk; each owner gets the sum of its own.
class LineScatter {
 public:
  // `all`: every rank will ask for all sums, in which all agree. `some`: the lines that travel, ascending,
  // the same on all ranks and numbered anew from 0; each goes to the rank that it would go to among all, and
  // is summed in the same order. Raises RuntimeError where the group has no transport for the device, or it
  // cannot: see can_send_some().
  LineScatter(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
              c10::Device device, bool all, const std::optional<std::vector<int64_t>>& some = {});
  // Whether some lines can travel alone in that group.
  static bool can_send_some(const std::string& group, c10::Device device);

  // Chunks in the order in which others wait for them.
  const std::vector<Chunk>& chunks() const { return flight_->order(); }
  // Where this rank writes its part of that chunk, [chunk.rows, width].
  at::Tensor part(size_t chunk) { return flight_->part(chunks().at(chunk)).select(0, 0); }
  void publish(size_t chunk) { flight_->publish(chunks().at(chunk)); }
  // Whether all parts of this rank's lines have come; false also where that cannot be told.
  bool parts_have_come() const { return flight_->parts_have_come(); }
  // Sums them, which finish() does otherwise; waits for them.
  void reduce();
  // After reduce(): whether finish() would not wait; false also where that cannot be told.
  bool sums_have_come() const;
  // The sums of this rank's lines, or of all where `all`, [*, width] in new memory; ends the flight.
  at::Tensor finish();

 private:
  // In the form of the flight, [1, lines, width].
  at::Tensor empty(int64_t lines) const;

  Transport& transport_;
  Op op_;
  double begun_ = monotonic_seconds();
  int64_t lines_, width_;  // of all that travel
  at::TensorOptions options_;
  bool all_;
  bool reduced_ = false;
  at::Tensor own_sums_;  // unless all_
  std::unique_ptr<ScatterFlight> flight_;
};

// Every rank shows its lines; any rank reads any other's.
class LineGather {
 public:
  // `lines` over all ranks.
  LineGather(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
             c10::Device device);

  // This rank's chunks as they leave, and where each is to be written before it is published, [chunk.rows,
  // width].
  std::vector<Chunk> own_chunks() const { return flight_->own(); }
  at::Tensor own(size_t chunk) { return flight_->memory(flight_->own().at(chunk)).select(0, 0); }
  void publish(size_t chunk) { flight_->publish(flight_->own().at(chunk)); }

  // The others' chunks in the order in which they are expected.
  std::vector<Chunk> chunks() const;
  // The lines of that chunk where the transport has them, [chunk.rows, width]; waits for them.
  at::Tensor chunk(size_t chunk);
  // Whether chunk() would wait for none of them; false also where that cannot be told.
  bool has_come() const;
  // They have been read.
  void finish() { flight_->finish(); }

 private:
  Transport& transport_;
  double begun_ = monotonic_seconds();
  std::unique_ptr<GatherFlight> flight_;
};

// The lines of one rank go to the others of its group; in a group of two, from one to the other.
class LineSend {
 public:
  // `source`: the rank whose lines they are. `agreement`: a number that must be the same on all ranks.
  LineSend(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype, c10::Device device,
           int source, int64_t agreement);

  // The lines where the transport has them, [lines, width]. Of the source, to be written before publish(); of
  // another rank, valid after wait() and until finish().
  at::Tensor memory() { return flight().memory(all_).select(0, 0); }
  // They leave. Of the source.
  void publish();
  // They have come. Of any other rank.
  void wait();
  // Whether wait() would return at once; false also where that cannot be told. Of any other rank.
  bool has_come();
  // They have been read; the source calls it when it has published.
  void finish() { flight().finish(); }
  // Before what the group holds is freed: nothing may be done with it afterwards.
  void abandon() { flight_.reset(); }

 private:
  // Raises RuntimeError where it was abandoned.
  GatherFlight& flight();

  Transport& transport_;
  double begun_ = monotonic_seconds();
  Chunk all_;
  std::unique_ptr<GatherFlight> flight_;
};

}  // namespace pyruntime
