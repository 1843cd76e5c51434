// What a C++ test needs:
//
//     TEST(name_of_the_behaviour) {
//       EXPECT(condition);
//       EXPECT_EQ(seen, expected);
//       EXPECT_THROWS(expression, "words of the message");
//     }
//
// A failed expectation prints where and what and lets the test go on; the program, whose main() is in
// check.cpp, then ends with exit code 1.
#pragma once

#include <exception>
#include <functional>
#include <sstream>
#include <string>

namespace check {

// Registers a test that the program's main() runs; returns a value so that a global can be initialised by it.
bool add(const char* name, void (*body)());

// Counts a failure against the running test and prints it, unless there were many before. Any thread.
void fail(const char* file, int line, const std::string& message);

// Runs body(rank) in `ranks` forked processes. A failed check, an exception or a signal in any of them, or
// one that takes longer than `seconds`, fails the running test.
void in_ranks(int ranks, const std::function<void(int)>& body, double seconds = 30.0);

template <typename Seen, typename Expected>
void equal(const char* file, int line, const char* what, const Seen& seen, const Expected& expected) {
  if (seen == expected) return;
  std::ostringstream text;
  text << what << " is " << seen << ", expected " << expected;
  fail(file, line, text.str());
}

void throws(const char* file, int line, const char* what, const std::string& words,
            const std::function<void()>& run);

}  // namespace check

#define TEST(name)                                                           \
  static void name();                                                        \
  [[maybe_unused]] static const bool name##_added = check::add(#name, name); \
  static void name()

#define EXPECT(condition) ((condition) ? void() : check::fail(__FILE__, __LINE__, #condition " is false"))
#define EXPECT_EQ(seen, expected) check::equal(__FILE__, __LINE__, #seen, seen, expected)
#define EXPECT_THROWS(expression, words) \
  check::throws(__FILE__, __LINE__, #expression, words, [&] { static_cast<void>(expression); })
