#include "core/ledger/peer_figures.h"

namespace pyruntime {

PeerTable& PeerTable::instance() {
  static auto* table = new PeerTable();  // never destroyed: threads may outlive static destructors
  return *table;
}

void PeerTable::waited(const PeerKey& peer, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  figures_[peer].waiting_s += seconds;
}

void PeerTable::sent(const PeerKey& peer, int64_t bytes, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  PeerFigures& figures = figures_[peer];
  figures.bytes += bytes;
  figures.transfer_s += seconds;
}

std::map<PeerKey, PeerFigures> PeerTable::figures() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return figures_;
}

void PeerTable::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  figures_.clear();
}

}  // namespace pyruntime
