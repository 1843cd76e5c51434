// Errors of communication. Every failure between ranks is raised here, with a sentence that names who, what
// and where.
#pragma once

#include <stdexcept>
#include <string>

namespace pyruntime {

enum class CommErrorKind {
  kTimeout,   // a peer did not answer within the deadline
  kPeerLost,  // a peer's process is gone
  kBroken,    // the group failed earlier and its ranks are out of step
  kDisagree,  // ranks called different ops, or the same with different shapes; a ValueError under Python
};

// The exception without Python. Under Python the bindings install a thrower whose exceptions keep their
// Python type (CommTimeout, PeerLost, CommError, ValueError), also when they cross the autograd engine.
class CommError : public std::runtime_error {
 public:
  CommError(CommErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  CommErrorKind kind() const { return kind_; }

 private:
  CommErrorKind kind_;
};

using CommErrorThrower = void (*)(CommErrorKind, const std::string&);

// Replaces how errors are thrown; called once, by the bindings.
void set_comm_error_thrower(CommErrorThrower thrower);

[[noreturn]] void raise_comm_error(CommErrorKind kind, const std::string& message);

}  // namespace pyruntime
