// Parts of messages, and names that users write.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <string>

namespace pyruntime {

// "1.5 s"
inline std::string seconds_text(double seconds) {
  if (seconds >= 100) return std::to_string(std::llround(seconds)) + " s";
  std::ostringstream text;
  text.precision(3);
  text << seconds << " s";
  return text.str();
}

// The sentence of an exception's text; the rest is its origin in the code.
inline std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// The enum value with this name; `names` are in the enum's order. Raises ValueError(`error`) for another
// name.
template <class Enum, size_t kCount>
Enum named(const char* const (&names)[kCount], const std::string& name, const std::string& error) {
  const auto found = std::find(std::begin(names), std::end(names), name);
  TORCH_CHECK_VALUE(found != std::end(names), error);
  return static_cast<Enum>(found - std::begin(names));
}

}  // namespace pyruntime
