// A kernel parsed from PTX: its instructions with labels resolved and registers numbered.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

class Warp;
using Lanes = uint32_t;  // bit l for lane l of a warp

// What the warp does after an instruction.
enum class Next {
  Advance,  // goes to the next instruction
  Jump,     // active lanes go to the instruction's target
  Exit,     // active lanes end
  Retry,    // runs the same instruction again later
  Yield,    // goes to the next instruction once other warps have run: this one polls
};
using Step = std::function<Next(Warp&, Lanes)>;

struct Operand {
  enum Kind { Register, Memory, Vector, Label, None } kind = None;
  int slot = -1;                // Register; Memory: of the address
  int64_t offset = 0;           // Memory
  std::vector<int> parts;       // Vector: slots, -1 for a result that is discarded
  std::vector<Operand> inside;  // Memory with coordinates: [map, {x, y, z}]
  std::string label;
};

struct Instruction {
  std::string text;                // for messages
  std::vector<std::string> words;  // the opcode, split at its dots
  std::vector<Operand> operands;
  int guard = -1;  // slot of the predicate of active lanes, -1 for none
  bool guard_negated = false;
  int target = -1;         // of a branch
  bool converged = false;  // all running lanes of the warp execute it together
  std::vector<int> slots;  // registers that the instruction reads or writes
  Step step;

  bool has(std::string const& word) const;
  int slot(size_t operand) const;  // of a Register operand
};

// The value of a register before the first instruction.
struct InitialValue {
  int slot;
  uint64_t value;       // in all lanes, unless `special` names
  std::string special;  // a special register such as "%tid.x"
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<InitialValue> initial;
  int slots = 0;
  struct Parameter {
    int offset, bytes;
  };
  std::vector<Parameter> parameters;
  int static_shared = 0;  // bytes, before dynamic shared memory
  int local_bytes = 0;    // of each thread
};

// Generic addresses of the state spaces.
constexpr uint64_t kSharedWindow = 1ull << 56;
constexpr uint64_t kLocalWindow = 1ull << 57;
constexpr uint64_t kParamWindow = 1ull << 58;
constexpr uint32_t kSharedBase = 1024;  // CUDA reserves the first KiB of a CTA

// All kernels of a PTX text, by name. Throws std::runtime_error for unsupported syntax.
std::map<std::string, std::shared_ptr<Kernel>> parse(std::string const& ptx);

// What an instruction does. Throws std::runtime_error for an unsupported opcode.
Step decode(Instruction& instruction);

}  // namespace emulator
