// A kernel as the compiler's PTX has it: instructions, labels resolved, registers numbered.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

class Warp;
using Lanes = uint32_t;  // a bit for each lane of a warp

// What the warp does after an instruction.
enum class Next {
  Go,       // to the next instruction
  Jump,     // active lanes go to the instruction's target
  Exit,     // active lanes end
  Wait,     // the same instruction again, later
  GoLater,  // to the next instruction, after other warps: this one polls
};
using Step = std::function<Next(Warp&, Lanes)>;

struct Operand {
  enum Kind { Register, Memory, Vector, Label, None } kind = None;
  int slot = -1;                // Register; Memory: of the address
  int64_t offset = 0;           // Memory
  std::vector<int> parts;       // Vector: slots, -1 for those that are thrown away
  std::vector<Operand> inside;  // Memory with coordinates: [map, {x, y, z}]
  std::string label;
};

struct Instruction {
  std::string text;                // for messages
  std::vector<std::string> words;  // the opcode between its dots
  std::vector<Operand> operands;
  int guard = -1;  // predicate that active lanes need
  bool guard_negated = false;
  int target = -1;         // of a branch
  bool converged = false;  // needs all its lanes at once
  std::vector<int> slots;  // registers that it reads or writes
  Step step;

  bool has(std::string const& word) const;
  int slot(size_t operand) const;  // of a Register operand
};

// Values of registers before the first instruction: the same in all lanes, or one for each.
struct Initial {
  int slot;
  uint64_t value;       // of all lanes, unless
  std::string special;  // "%tid.x" and so on
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Initial> initial;
  int slots = 0;
  struct Parameter {
    int offset, bytes;
  };
  std::vector<Parameter> parameters;
  int static_shared = 0;  // bytes; dynamic shared memory follows
  int local_bytes = 0;    // of each thread
};

// Where a module's variables and parameters lie, as generic addresses.
constexpr uint64_t kSharedWindow = 1ull << 56;
constexpr uint64_t kLocalWindow = 1ull << 57;
constexpr uint64_t kParamWindow = 1ull << 58;
constexpr uint32_t kSharedBase = 1024;  // the first bytes belong to the system

// All kernels of a PTX text. Throws std::runtime_error on what it does not know.
std::map<std::string, std::shared_ptr<Kernel>> parse(std::string const& ptx);

// The meaning of an instruction. Throws std::runtime_error on an opcode that it does not know.
Step decode(Instruction& instruction);

}  // namespace emulator
