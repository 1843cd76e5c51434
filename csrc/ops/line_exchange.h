// Reduce-scatter, all-gather, send and deal of lines.
//
// A line is `width` elements. All ranks together have [lines, width], cut as torch.tensor_split cuts lines,
// except in a deal; if the number of ranks divides them, every rank has equally many. An exchange is a flight
// that its owner keeps open: others of the group may begin and end meanwhile, in the same order on every
// rank.
//
// On devices, chunks that follow one another are joined to one if their memory does too: a launch for each of
// them costs more than it gains, as streams wait and not this thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/flights.h"
#include "transport/group.h"
#include "transport/inside.h"

namespace pyruntime {

// A reduce-scatter or all-reduce: every rank writes its part of all lines; each owner gets its own sums.
class LineScatter {
 public:
  // `all`: every rank will read all sums; all ranks must agree on this. `some`: the lines that travel,
  // ascending, the same on all ranks and numbered anew from 0. Each goes to the same rank as among all lines,
  // and is summed in the same order. Raises RuntimeError if the group's transport for the device sends no
  // chunks, or cannot send `some`: see can_send_some().
  LineScatter(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
              c10::Device device, bool all, const std::optional<std::vector<int64_t>>& some = {});
  // Whether that group can send only some lines.
  static bool can_send_some(const std::string& group, c10::Device device);

  // The chunks in the order in which others wait for them.
  const std::vector<JoinedChunk>& chunks() const { return chunks_; }
  // The memory of this rank's part of that chunk, [lines.rows, width].
  at::Tensor part(size_t chunk) { return flight_->part(chunks_.at(chunk).lines).select(0, 0); }
  void publish(size_t chunk) { flight_->publish_together(chunks_.at(chunk).chunks); }
  // Whether all parts of this rank's lines have arrived; false also if that is unknown.
  bool parts_have_come() const { return flight_->parts_have_come(); }
  // Waits for the parts and sums them; without this call finish() does it.
  void reduce();
  // After reduce(): whether finish() would not wait; false also if that is unknown.
  bool sums_have_come() const;
  // The sums of this rank's lines, or with `all` of all, [*, width] in new memory; ends the flight.
  at::Tensor finish();

 private:
  // A new tensor in the form of the flight, [1, lines, width].
  at::Tensor empty(int64_t lines) const;

  Transport& transport_;
  Op op_;
  int64_t lines_, width_;  // of all lines that travel
  at::TensorOptions options_;
  bool all_;
  double begun_;
  bool reduced_ = false;
  at::Tensor own_sums_;  // unless all_
  std::unique_ptr<ScatterFlight> flight_;
  std::vector<JoinedChunk> chunks_;
};

// An all-gather: every rank offers its lines, and any rank reads any other's.
class LineGather {
 public:
  // `lines`: over all ranks.
  LineGather(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
             c10::Device device);

  // This rank's chunks as they leave, and where to write each before it is published, [chunk.rows, width].
  std::vector<Chunk> own_chunks() const { return flight_->own(); }
  at::Tensor own(size_t chunk) { return flight_->memory(flight_->own().at(chunk)).select(0, 0); }
  void publish(size_t chunk) { flight_->publish_together({flight_->own().at(chunk)}); }

  // The others' chunks in the order of expected arrival.
  const std::vector<JoinedChunk>& chunks() const { return chunks_; }
  // Waits for the lines of that chunk, [lines.rows, width], and returns them in the transport's memory.
  at::Tensor chunk(size_t chunk);
  // Whether chunk() would not wait for any chunk; false also if that is unknown.
  bool has_come() const;
  // Ends the flight: the lines have been read.
  void finish() { flight_->finish(); }

 private:
  Transport& transport_;
  c10::Device device_;
  double begun_;
  std::unique_ptr<GatherFlight> flight_;
  std::vector<JoinedChunk> chunks_;
};

// A send: the lines of one rank travel to all others of its group; in a group of two, to the other one.
class LineSend {
 public:
  // `source`: the rank whose lines travel. `agreement`: a number that must be the same on all ranks.
  LineSend(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype, c10::Device device,
           int source, int64_t agreement);

  // The lines in the transport's memory, [lines, width]. The source writes them before publish(); on another
  // rank they are valid after wait() and until finish().
  at::Tensor memory() { return flight().memory(all_).select(0, 0); }
  // Sends the lines. Only the source.
  void publish();
  // Waits until the lines have arrived. Any other rank.
  void wait();
  // Whether wait() would return at once; false also if that is unknown. Any other rank.
  bool has_come();
  // Ends the flight: the lines have been read, or, on the source, published.
  void finish() { flight().finish(); }
  // Forgets the flight before the group's memory is freed: nothing may be called afterwards.
  void abandon() { flight_.reset(); }

 private:
  // Raises RuntimeError if the flight was abandoned.
  GatherFlight& flight();

  Transport& transport_;
  Chunk all_;
  c10::Device device_;
  double begun_;
  std::unique_ptr<GatherFlight> flight_;
};

// A deal: each rank sends lines to each rank, within one op.
class LineDeal {
 public:
  // Raises RuntimeError if the group's transport for the device cannot deal, ValueError for the wrong
  // `counts`: see DealtRows.
  LineDeal(const std::string& group, DealtRows counts, int64_t width, c10::ScalarType dtype,
           c10::Device device);

  // The memory for this rank's lines, by receiver, [lines, width]; to be written before publish().
  at::Tensor leaving() { return flight_->leaving().select(0, 0); }
  void publish() { flight_->publish(); }
  // Waits for the lines that come to this rank and returns them in the transport's memory, by sender, [lines,
  // width]. Only once.
  at::Tensor arrived();
  // Ends the flight: the lines have been read.
  void finish();

 private:
  Transport& transport_;
  c10::Device device_;
  Inside inside_;
  double begun_;
  int64_t from_others_;  // lines
  std::unique_ptr<DealFlight> flight_;
};

}  // namespace pyruntime
