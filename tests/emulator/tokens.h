// PTX as a sequence of words.
#pragma once

#include <string>
#include <vector>

namespace emulator {

// Names and numbers, strings, and single characters for the rest; comments are left out.
std::vector<std::string> tokens_of(std::string const& ptx);

std::vector<std::string> split(std::string const& text, char separator);

}  // namespace emulator
