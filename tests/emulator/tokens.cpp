#include "tokens.h"

#include <cctype>
#include <cstring>

namespace emulator {

namespace {

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_$%.", c);
}

std::string without_comments(std::string const& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 2, "//") == 0) {
      while (i < text.size() && text[i] != '\n') ++i;
      out += '\n';
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

std::vector<std::string> tokens_of(std::string const& ptx) {
  std::string const text = without_comments(ptx);
  std::vector<std::string> tokens;
  for (size_t i = 0; i < text.size();) {
    if (std::isspace(static_cast<unsigned char>(text[i]))) {
      ++i;
    } else if (text[i] == '"') {
      size_t const end = text.find('"', i + 1);
      tokens.push_back(text.substr(i, end - i + 1));
      i = end + 1;
    } else if (is_name(text[i])) {
      size_t end = i;
      while (end < text.size() && (is_name(text[end]) || text.compare(end, 2, "::") == 0)) {
        end += text[end] == ':' ? 2 : 1;
      }
      tokens.push_back(text.substr(i, end - i));
      i = end;
    } else {
      tokens.emplace_back(1, text[i++]);
    }
  }
  return tokens;
}

std::vector<std::string> split(std::string const& text, char separator) {
  std::vector<std::string> words(1);
  for (char c : text) {
    if (c == separator)
      words.emplace_back();
    else
      words.back() += c;
  }
  return words;
}

}  // namespace emulator
