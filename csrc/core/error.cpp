#include "core/error.h"

namespace pyruntime {

namespace {
CommErrorThrower installed_thrower = nullptr;
}

void set_comm_error_thrower(CommErrorThrower thrower) {
  installed_thrower = thrower;
}

void raise_comm_error(CommErrorKind kind, const std::string& message) {
  if (installed_thrower != nullptr) installed_thrower(kind, message);
  throw CommError(kind, message);
}

}  // namespace pyruntime
