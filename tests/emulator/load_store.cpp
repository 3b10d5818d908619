// Loads, stores, atomic operations, and conversions between generic and state-space addresses.
#include "decode.h"
#include "mbarrier.h"
#include "number_formats.h"

namespace emulator {

namespace {

uint64_t window(Instruction const& i) {
  if (i.has("shared") || i.has("shared::cta") || i.has("shared::cluster")) return kSharedWindow;
  if (i.has("local")) return kLocalWindow;
  return 0;  // global and generic, and parameters, whose addresses are generic already
}

int vector_length(Instruction const& i) {
  for (int n : {2, 4, 8}) {
    if (i.has("v" + std::to_string(n))) return n;
  }
  return 1;
}

// Whether another thread or copy may write the value: a loop around such a load polls.
bool polls(Instruction const& i) {
  return (i.has("acquire") || i.has("relaxed") || i.has("volatile")) && window(i) == 0;
}

Step load(Instruction const& i) {
  int const count = vector_length(i), bytes = bytes_of_type(i.words.back());
  bool const is_signed = i.words.back()[0] == 's', later = polls(i);
  Operand const& from = i.operands[1];
  std::vector<int> const to =
      count > 1 ? i.operands[0].parts : std::vector<int>{i.operands[0].slot};
  return [=, base = window(i), slot = from.slot, offset = from.offset](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      uint64_t const address =
          (base ? base + static_cast<uint32_t>(w.reg(slot)[l]) : w.reg(slot)[l]) + offset;
      char const* const there = w.cta.at(w, l, address, static_cast<size_t>(count) * bytes, false);
      for (int n = 0; n < count; ++n) {
        uint64_t value = 0;
        std::memcpy(&value, there + n * bytes, bytes);
        if (is_signed && bytes < 8 && value >> (8 * bytes - 1) & 1) value |= ~0ull << (8 * bytes);
        if (to[n] >= 0) w.reg(to[n])[l] = value;
      }
    });
    return later ? Next::Yield : Next::Advance;
  };
}

Step store(Instruction const& i) {
  int const count = vector_length(i), bytes = bytes_of_type(i.words.back());
  Operand const& to = i.operands[0];
  std::vector<int> const from =
      count > 1 ? i.operands[1].parts : std::vector<int>{i.operands[1].slot};
  return [=, base = window(i), slot = to.slot, offset = to.offset](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      uint64_t const address =
          (base ? base + static_cast<uint32_t>(w.reg(slot)[l]) : w.reg(slot)[l]) + offset;
      char value[64];
      for (int n = 0; n < count; ++n) std::memcpy(value + n * bytes, &w.reg(from[n])[l], bytes);
      w.cta.store(w, l, address, value, static_cast<size_t>(count) * bytes);
    });
    w.cta.grid.progress();
    return Next::Advance;
  };
}

template <class T>
T combined(std::string const& op, T old, T value, T other) {
  if (op == "exch") return value;
  if (op == "add") return static_cast<T>(old + value);
  if (op == "min") return std::min(old, value);
  if (op == "max") return std::max(old, value);
  if (op == "inc") return old >= value ? T{0} : static_cast<T>(old + 1);
  if (op == "cas") return old == value ? other : old;
  if constexpr (std::is_integral_v<T>) {
    if (op == "and") return old & value;
    if (op == "or") return old | value;
    if (op == "xor") return old ^ value;
  }
  throw std::runtime_error("PTX: unknown atomic operation " + op);
}

// atom and red.
Step atomic(Instruction const& i) {
  bool const returns = i.words[0] == "atom";
  std::string op;
  for (auto const* name : {"exch", "add", "min", "max", "inc", "cas", "and", "or", "xor"}) {
    if (i.has(name)) op = name;
  }
  size_t const at = returns ? 1 : 0;
  int const count = vector_length(i);
  std::vector<int> const values =
      count > 1 ? i.operands[at + 1].parts : std::vector<int>{i.slot(at + 1)};
  if (returns && count > 1) throw std::runtime_error("PTX: a vector atom: " + i.text);
  int const other = i.operands.size() > at + 2 ? i.slot(at + 2) : values[0];
  int const result = returns ? i.operands[0].slot : -1;
  Operand const& to = i.operands[at];
  return with_type(i.words.back(), [&](auto t) -> Step {
    using T = decltype(t);
    return [=, base = window(i), slot = to.slot, offset = to.offset](Warp& w, Lanes lanes) {
      for_each_lane(lanes, [&](int l) {
        uint64_t const address =
            (base ? base + static_cast<uint32_t>(w.reg(slot)[l]) : w.reg(slot)[l]) + offset;
        char* const there = w.cta.at(w, l, address, sizeof(T) * values.size(), true);
        for (size_t n = 0; n < values.size(); ++n) {
          T old;
          std::memcpy(&old, there + n * sizeof(T), sizeof(T));
          T const fresh = combined(op, old, get<T>(w.reg(values[n])[l]), get<T>(w.reg(other)[l]));
          std::memcpy(there + n * sizeof(T), &fresh, sizeof(T));
          if (result >= 0) w.reg(result)[l] = bits(old);
        }
      });
      w.cta.grid.progress();
      return op == "cas" ? Next::Yield : Next::Advance;
    };
  });
}

// st.async: operands [to], value, [mbarrier], whose bytes the store completes.
Step async_store(Instruction const& i) {
  if (vector_length(i) > 1) throw std::runtime_error("PTX: a vector st.async: " + i.text);
  int const bytes = bytes_of_type(i.words.back()), value = i.slot(1);
  Operand const to = i.operands[0], barrier = i.operands[2];
  return [=](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      Cta& cta = w.cta;
      uint64_t const word = shared_offset(barrier, w, l), bits = w.reg(value)[l];
      cta.loads.push_back([&cta, at = uint64_t{shared_offset(to, w, l)}, word, bits, bytes] {
        uint64_t offset = at;
        std::memcpy(cta.owner(offset).shared(offset, bytes), &bits, bytes);
        update_mbarrier(cta, word, [&](Mbarrier& b) { b.bytes -= bytes; });
      });
    });
    return Next::Advance;
  };
}

// mapa: the shared::cluster address of an address in the CTA of a rank.
Step map_address(Instruction const& i) {
  int const d = i.slot(0), a = i.slot(1), rank = i.slot(2);
  return [=](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      uint64_t const place = w.reg(a)[l] & ((1u << kRankBit) - 1);
      w.reg(d)[l] = place | (static_cast<uint32_t>(w.reg(rank)[l]) + 1) << kRankBit;
    });
    return Next::Advance;
  };
}

// Between generic addresses and those of a state space.
Step address(Instruction const& i) {
  uint64_t const base = window(i);
  bool const to = i.has("to");
  int const d = i.slot(0), a = i.slot(1);
  return [=](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      uint64_t const x = w.reg(a)[l];
      w.reg(d)[l] = to ? x - base : x + base;
    });
    return Next::Advance;
  };
}

}  // namespace

Step decode_load_store(Instruction const& i) {
  std::string const& op = i.words[0];
  if (op == "ld" || op == "ldu") return load(i);
  if (op == "st") return i.has("async") ? async_store(i) : store(i);
  if (op == "mapa") return map_address(i);
  if (op == "atom" || op == "red") return atomic(i);
  if (op == "cvta") return address(i);
  return {};
}

}  // namespace emulator
