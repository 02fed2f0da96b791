// Reads a launch from a file, runs it, writes its arrays back.
//
// The file: a Header, the kernel's arguments, then for each array its size, its misalignment, its
// bytes. Pointers in the arguments are replaced as the fixups say, which follow the header.
#pragma once

#include <tuple>

#include "sim.h"

namespace sim {

// Each argument begins at a multiple of this.
constexpr size_t kArgumentAlignment = 64;

template <class Argument>
constexpr size_t kArgumentSize =
    (sizeof(Argument) + kArgumentAlignment - 1) / kArgumentAlignment * kArgumentAlignment;

template <class Argument>
Argument take_argument(const unsigned char*& from) {
  Argument argument;
  std::memcpy(static_cast<void*>(&argument), from, sizeof argument);
  from += kArgumentSize<Argument>;
  return argument;
}

// Makes what a thread runs of the bytes of the arguments.
using Bind = std::function<std::function<void()>(const unsigned char*)>;

int run_launch(const char* name, int argc, char** argv, size_t arguments_size, const Bind& bind);

template <class... Arguments>
int main_of(const char* name, int argc, char** argv, void (*kernel)(Arguments...)) {
  const auto bind = [kernel](const unsigned char* from) -> std::function<void()> {
    const std::tuple<Arguments...> arguments{take_argument<Arguments>(from)...};
    return [=] { std::apply(kernel, arguments); };
  };
  return run_launch(name, argc, argv, (kArgumentSize<Arguments> + ...), bind);
}

}  // namespace sim
