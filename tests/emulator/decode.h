// The families of instructions. Each gives the meaning of one of its own, or an empty step.
#pragma once

#include "machine.h"

namespace emulator {

Step arithmetic(Instruction const& i);
Step bitwise(Instruction const& i);
Step memory(Instruction const& i);
Step warpwide(Instruction& i);
Step bulk(Instruction const& i);
Step product(Instruction& i);

}  // namespace emulator
