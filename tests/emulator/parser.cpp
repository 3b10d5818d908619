#include "kernel.h"

#include <algorithm>
#include <stdexcept>

#include "tokens.h"

namespace emulator {

namespace {

int bytes_of(std::string const& type) {  // ".b32"
  return std::max(1, std::stoi(type.substr(2)) / 8);
}

class Parser {
 public:
  explicit Parser(std::string const& ptx) : tokens_(tokens_of(ptx)) {}

  std::map<std::string, std::shared_ptr<Kernel>> module() {
    while (at_ < tokens_.size()) {
      if (peek() == ".entry") {
        next();
        entry();
      } else if (peek() == ".shared") {
        next();
        shared_.push_back(variable());
      } else if (peek() == ".func") {
        throw std::runtime_error("PTX has a function that was not inlined: " + tokens_[at_ + 1]);
      } else {
        next();
      }
    }
    return std::move(kernels_);
  }

 private:
  struct Variable {
    std::string name;
    int align = 1, bytes = 0;  // 0: dynamic shared memory
  };

  std::vector<std::string> tokens_;
  size_t at_ = 0;
  std::map<std::string, std::shared_ptr<Kernel>> kernels_;
  std::vector<Variable> shared_;

  // State of the kernel that is being parsed.
  std::shared_ptr<Kernel> kernel_;
  struct Scope {
    std::map<std::string, int> registers;
    std::map<std::string, int> labels;
    int parent;
  };
  std::vector<Scope> scopes_;
  std::vector<int> scope_of_;  // of each instruction
  std::map<uint64_t, int> constants_;
  std::map<std::string, uint64_t> addresses_;

  std::string const& peek(int ahead = 0) const { return tokens_.at(at_ + ahead); }
  std::string const& next() { return tokens_.at(at_++); }
  void expect(char const* token) {
    if (next() != token) {
      throw std::runtime_error(std::string("PTX: expected ") + token + " before " + peek(-1));
    }
  }

  // Parses a variable after its state space: .align 16 .b8 name[bytes];
  Variable variable() {
    Variable v;
    int width = 1;
    for (; peek()[0] == '.'; next()) {
      if (peek() == ".align") {
        next();
        v.align = std::stoi(peek());
      } else {
        width = bytes_of(peek());
      }
    }
    v.name = next();
    v.bytes = width;
    if (peek() == "[") {
      next();
      v.bytes = peek() == "]" ? 0 : width * std::stoi(next());
      expect("]");
    }
    return v;
  }

  void entry() {
    kernel_ = std::make_shared<Kernel>();
    kernel_->name = next();
    scopes_.assign(1, {{}, {}, -1});
    scope_of_.clear(), constants_.clear(), addresses_.clear();
    expect("(");
    int end = 0;
    while (peek() != ")") {
      next();  // ".param" or ","
      if (peek(-1) != ".param") continue;
      Variable const v = variable();
      int const align = std::max(v.align, std::min(v.bytes, 8));
      end = (end + align - 1) / align * align;
      kernel_->parameters.push_back({end, v.bytes});
      addresses_[v.name] = kParamWindow + end;
      end += v.bytes;
    }
    while (peek() != "{") next();  // directives such as .maxntid
    next();
    std::vector<Variable> statics = shared_;
    body(0, statics);
    place(statics);
    for (size_t i = 0; i < kernel_->code.size(); ++i) resolve(i);
    for (auto& instruction : kernel_->code) instruction.step = decode(instruction);
    kernels_[kernel_->name] = kernel_;
  }

  // Shared variables get their addresses after the whole kernel is parsed. Until then each use is
  // an index into `initial`, by name.
  std::map<std::string, std::vector<size_t>> uses_;

  void place(std::vector<Variable> const& variables) {
    int end = 0;
    std::map<std::string, uint64_t> at;
    for (auto const& v : variables) {
      if (!v.bytes) continue;
      end = (end + v.align - 1) / v.align * v.align;
      at[v.name] = kSharedBase + end;
      end += v.bytes;
    }
    end = (end + 1023) / 1024 * 1024;
    kernel_->static_shared = end;
    for (auto const& v : variables) {
      if (!v.bytes) at[v.name] = kSharedBase + end;
    }
    for (auto const& [name, places] : uses_) {
      for (size_t const place : places) {
        auto const found = at.find(name);
        if (found == at.end()) throw std::runtime_error("PTX: unknown name " + name);
        kernel_->initial[place].value = found->second;
      }
    }
    uses_.clear();
  }

  void body(int scope, std::vector<Variable>& statics) {
    while (peek() != "}") {
      if (peek() == "{") {
        next();
        scopes_.push_back({{}, {}, scope});
        body(static_cast<int>(scopes_.size()) - 1, statics);
      } else if (peek() == ".reg") {
        next();
        next();
        do {
          std::string const name = next();
          if (peek() == "<") {
            int const count = std::stoi(peek(1));
            at_ += 3;
            for (int i = 0; i < count; ++i) declare(scope, name + std::to_string(i));
          } else {
            declare(scope, name);
          }
        } while (next() == ",");
      } else if (peek() == ".shared") {
        next();
        statics.push_back(variable());
        expect(";");
      } else if (peek() == ".local") {
        next();
        Variable const v = variable();
        int& end = kernel_->local_bytes;
        end = (end + v.align - 1) / v.align * v.align;
        addresses_[v.name] = end;
        end += v.bytes;
        expect(";");
      } else if (peek()[0] == '.') {
        while (next() != ";") {
        }
      } else if (peek(1) == ":") {
        scopes_[scope].labels[peek()] = static_cast<int>(kernel_->code.size());
        at_ += 2;
      } else {
        instruction(scope);
      }
    }
    next();
  }

  void declare(int scope, std::string const& name) {
    scopes_[scope].registers[name] = kernel_->slots++;
  }

  void instruction(int scope) {
    Instruction i;
    size_t const begin = at_;
    if (peek() == "@") {
      next();
      if (peek() == "!") {
        next();
        i.guard_negated = true;
      }
      i.guard = name_slot(scope, next());
    }
    i.words = split(next(), '.');
    while (peek() != ";") {
      if (peek() == ",") next();
      i.operands.push_back(operand(scope));
      if (peek() == "|") {  // a second destination: d|p
        next();
        i.operands.push_back(operand(scope));
      }
    }
    for (size_t t = begin; t < at_; ++t) i.text += tokens_[t] + (t + 1 < at_ ? " " : "");
    next();
    for (auto const& o : i.operands) collect(o, i.slots);
    kernel_->code.push_back(std::move(i));
    scope_of_.push_back(scope);
  }

  static void collect(Operand const& o, std::vector<int>& slots) {
    if (o.slot >= 0) slots.push_back(o.slot);
    for (int part : o.parts) {
      if (part >= 0) slots.push_back(part);
    }
    for (auto const& inner : o.inside) collect(inner, slots);
  }

  Operand operand(int scope) {
    Operand o;
    if (peek() == "{") {
      next();
      o.kind = Operand::Vector;
      while (peek() != "}") {
        if (peek() == ",") next();
        Operand const part = operand(scope);
        o.parts.push_back(part.slot);
      }
      next();
    } else if (peek() == "[") {
      next();
      o.kind = Operand::Memory;
      Operand const base = operand(scope);
      o.slot = base.slot;
      if (peek() == "+") {
        next();
        o.offset = integer();
      }
      while (peek() == ",") {
        next();
        o.inside.push_back(operand(scope));
      }
      expect("]");
    } else if (peek() == "_") {
      next();
    } else if (peek() == "-" || std::isdigit(peek()[0])) {
      o.kind = Operand::Register;
      o.slot = constant(number());
    } else if (scopes_[0].registers.count(peek()) || local_slot(scope, peek()) >= 0) {
      o.kind = Operand::Register;
      o.slot = name_slot(scope, next());
    } else if (peek()[0] == '%') {
      o.kind = Operand::Register;
      o.slot = kernel_->slots++;
      kernel_->initial.push_back({o.slot, 0, next()});
    } else if (addresses_.count(peek())) {
      o.kind = Operand::Register;
      o.slot = constant(addresses_[next()]);
    } else if (is_label(peek())) {
      o.kind = Operand::Label;
      o.label = next();
    } else {  // a shared variable
      o.kind = Operand::Register;
      o.slot = kernel_->slots++;
      uses_[next()].push_back(kernel_->initial.size());
      kernel_->initial.push_back({o.slot, 0, ""});
    }
    return o;
  }

  // Only branches have label operands.
  bool is_label(std::string const&) const {
    for (size_t t = at_; t-- > 0;) {
      if (tokens_[t] == ";" || tokens_[t] == "{" || tokens_[t] == "}" || tokens_[t] == ":") break;
      if (tokens_[t] == "bra" || tokens_[t] == "bra.uni") return true;
    }
    return false;
  }

  int64_t integer() {
    bool const negative = peek() == "-";
    if (negative) next();
    int64_t const value = std::stoll(next(), nullptr, 0);
    return negative ? -value : value;
  }

  uint64_t number() {
    std::string const& text = peek();
    if (text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F')) {
      return std::stoul(next().substr(2), nullptr, 16);
    }
    if (text.size() > 2 && text[0] == '0' && (text[1] == 'd' || text[1] == 'D')) {
      return std::stoull(next().substr(2), nullptr, 16);
    }
    if (text == "-") return static_cast<uint64_t>(integer());
    return std::stoull(next(), nullptr, 0);
  }

  int constant(uint64_t value) {
    auto const [found, fresh] = constants_.try_emplace(value, kernel_->slots);
    if (fresh) kernel_->initial.push_back({kernel_->slots++, value, ""});
    return found->second;
  }

  int local_slot(int scope, std::string const& name) const {
    for (; scope >= 0; scope = scopes_[scope].parent) {
      auto const found = scopes_[scope].registers.find(name);
      if (found != scopes_[scope].registers.end()) return found->second;
    }
    return -1;
  }

  int name_slot(int scope, std::string const& name) const {
    int const slot = local_slot(scope, name);
    if (slot < 0) throw std::runtime_error("PTX: unknown register " + name);
    return slot;
  }

  void resolve(size_t index) {
    Instruction& i = kernel_->code[index];
    for (auto const& o : i.operands) {
      if (o.kind != Operand::Label) continue;
      for (int scope = scope_of_[index]; scope >= 0; scope = scopes_[scope].parent) {
        auto const found = scopes_[scope].labels.find(o.label);
        if (found == scopes_[scope].labels.end()) continue;
        i.target = found->second;
        break;
      }
      if (i.target < 0) throw std::runtime_error("PTX: unknown label " + o.label);
    }
  }
};

}  // namespace

bool Instruction::has(std::string const& word) const {
  return std::find(words.begin(), words.end(), word) != words.end();
}

int Instruction::slot(size_t operand) const {
  if (operand >= operands.size() || operands[operand].kind != Operand::Register) {
    throw std::runtime_error("PTX: operand " + std::to_string(operand) + " of " + text);
  }
  return operands[operand].slot;
}

std::map<std::string, std::shared_ptr<Kernel>> parse(std::string const& ptx) {
  return Parser(ptx).module();
}

}  // namespace emulator
