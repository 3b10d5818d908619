// The decoders, one for each kind of instruction. Each returns what an instruction does, or an
// empty Step if the instruction is of another kind.
#pragma once

#include "machine.h"

namespace emulator {

Step decode_arithmetic(Instruction const& i);
Step decode_bitwise(Instruction const& i);
Step decode_convert(Instruction const& i);
Step decode_load_store(Instruction const& i);
Step decode_mbarrier(Instruction const& i);
Step decode_bulk_copy(Instruction const& i);
Step decode_control(Instruction& i);
Step decode_wgmma(Instruction& i);

}  // namespace emulator
