#include <stdexcept>

#include "decode.h"

namespace emulator {

Step decode(Instruction& i) {
  for (auto const family : {&bulk, &memory, &arithmetic, &bitwise}) {
    if (auto step = family(i)) return step;
  }
  for (auto const family : {&warpwide, &product}) {
    if (auto step = family(i)) return step;
  }
  throw std::runtime_error("PTX: unknown instruction: " + i.text);
}

}  // namespace emulator
