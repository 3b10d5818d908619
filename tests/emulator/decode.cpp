#include "decode.h"

#include <stdexcept>

namespace emulator {

Step decode(Instruction& i) {
  for (auto const decoder : {&decode_mbarrier, &decode_bulk_copy, &decode_load_store,
                             &decode_convert, &decode_arithmetic, &decode_bitwise}) {
    if (auto step = decoder(i)) return step;
  }
  for (auto const decoder : {&decode_control, &decode_wgmma}) {
    if (auto step = decoder(i)) return step;
  }
  throw std::runtime_error("PTX: unknown instruction: " + i.text);
}

}  // namespace emulator
