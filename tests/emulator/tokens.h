// Splits PTX into tokens.
#pragma once

#include <string>
#include <vector>

namespace emulator {

// Tokens are names, numbers, strings and single characters. Comments are dropped.
std::vector<std::string> tokens_of(std::string const& ptx);

std::vector<std::string> split(std::string const& text, char separator);

}  // namespace emulator
