// Bulk copies with and without tensor maps, and the proxy fence that orders them after stores.
#include "decode.h"
#include "mbarrier.h"
#include "tensor_map.h"

namespace emulator {

namespace {

TensorMap map_at(Warp& w, int lane, uint64_t address) {
  TensorMap map;
  std::memcpy(&map, w.cta.at(w, lane, address, sizeof map, false), sizeof map);
  if (map.magic != TensorMap::kMagic) throw std::runtime_error("no tensor map is there");
  return map;
}

// Splits a box into chunks of at most 16 bytes and calls f(shared offset, global address, bytes)
// for each. The address is 0 for a chunk outside the tensor. Coordinates in `corner` may be
// negative.
template <class Function>
void for_each_chunk(TensorMap const& map, std::vector<int32_t> const& corner, uint32_t shared,
                    Function const& f) {
  uint32_t const row = map.box[0] * map.element_bytes;
  uint32_t rows = 1;
  for (uint32_t d = 1; d < map.rank; ++d) rows *= map.box[d];
  for (uint32_t r = 0; r < rows; ++r) {
    bool inside = true;
    uint64_t from = map.address;
    uint32_t rest = r;
    for (uint32_t d = 1; d < map.rank; ++d) {
      int64_t const at = corner[d] + static_cast<int64_t>(rest % map.box[d]);
      rest /= map.box[d];
      inside &= at >= 0 && at < map.extent[d];
      from += static_cast<uint64_t>(at) * map.stride[d];
    }
    for (uint32_t b = 0; b < row; b += 16) {
      int64_t const first = corner[0] + b / map.element_bytes;
      int64_t const last = first + 16 / map.element_bytes;
      uint64_t const to = swizzled(shared + r * row + b, static_cast<int>(map.swizzle));
      if (inside && first >= 0 && last <= map.extent[0]) {
        f(to, from + static_cast<uint64_t>(first) * map.element_bytes, 16);
        continue;
      }
      for (uint32_t e = 0; e < 16; e += map.element_bytes) {
        int64_t const at = first + e / map.element_bytes;
        bool const here = inside && at >= 0 && at < map.extent[0];
        f(to + e, here ? from + static_cast<uint64_t>(at) * map.element_bytes : 0,
          map.element_bytes);
      }
    }
  }
}

template <class T>
void add(char* to, char const* from, size_t bytes) {
  for (size_t n = 0; n < bytes; n += sizeof(T)) {
    T a, b;
    std::memcpy(&a, to + n, sizeof(T)), std::memcpy(&b, from + n, sizeof(T));
    a = static_cast<T>(a + b);
    std::memcpy(to + n, &a, sizeof(T));
  }
}

// Writes `from` to global memory. Adds it instead if `type` is "f32" or an integer type.
void write_global(Cta& cta, uint64_t to, char const* from, size_t bytes, std::string const& type) {
  cta.grid.memory.check(to, bytes, "bulk write");
  auto* const there = reinterpret_cast<char*>(to);
  if (type.empty())
    std::memcpy(there, from, bytes);
  else if (type == "f32")
    add<float>(there, from, bytes);
  else
    add<uint32_t>(there, from, bytes);
}

// The type that a cp.reduce adds, "map" if the tensor map gives it, empty for a plain copy. Only
// additions are supported.
std::string reduction_type(Instruction const& i) {
  if (i.words[1] != "reduce") return "";
  if (!i.has("add")) throw std::runtime_error("PTX: only additions: " + i.text);
  std::string const& type = i.words.back();
  return type == "f32" || type == "u32" || type == "s32" ? type : "map";
}

Step tensor_copy(Instruction const& i) {
  bool const loads = i.operands[0].inside.empty();
  Operand const shared = i.operands[loads ? 0 : 1], global = i.operands[loads ? 1 : 0];
  Operand const barrier = loads ? i.operands[2] : Operand{};
  auto const coordinates = global.inside.at(0).parts;
  std::string const reduced = reduction_type(i);
  if (i.has("im2col") || i.has("multicast::cluster")) throw std::runtime_error("PTX: " + i.text);
  return [=](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      TensorMap const map = map_at(w, l, w.reg(global.slot)[l] + global.offset);
      std::vector<int32_t> corner;
      for (int slot : coordinates) corner.push_back(static_cast<int32_t>(w.reg(slot)[l]));
      if (corner.size() != map.rank) throw std::runtime_error("tensor map of another rank");
      uint32_t const at = shared_offset(shared, w, l);
      if (at % 128) throw std::runtime_error("bulk copies need 128-byte aligned shared memory");
      Cta& cta = w.cta;
      if (loads) {
        uint32_t const word = shared_offset(barrier, w, l);
        cta.loads.push_back([&cta, map, corner, at, word] {
          uint32_t total = 0;
          for_each_chunk(map, corner, at, [&](uint64_t to, uint64_t from, uint32_t bytes) {
            char* const there = cta.shared(to, bytes);
            cta.check_fenced(to, bytes, "a bulk load");
            total += bytes;
            if (!from) {
              std::memset(there, 0, bytes);
              return;
            }
            cta.grid.memory.check(from, bytes, "bulk read");
            std::memcpy(there, reinterpret_cast<char const*>(from), bytes);
          });
          update_mbarrier(cta, word, [&](Mbarrier& b) { b.bytes -= total; });
        });
        return;
      }
      auto copied = std::make_shared<std::vector<char>>();
      std::string const type = reduced.empty() ? "" : map.is_float ? "f32" : "u32";
      w.stores[l].back().push_back(
          {[&cta, map, corner, at, copied] {
             for_each_chunk(map, corner, at, [&](uint64_t from, uint64_t, uint32_t bytes) {
               cta.check_fenced(from, bytes, "a bulk store");
               char const* const there = cta.shared(from, bytes);
               copied->insert(copied->end(), there, there + bytes);
             });
           },
           [&cta, map, corner, at, copied, type] {
             size_t done = 0;
             for_each_chunk(map, corner, at, [&](uint64_t, uint64_t to, uint32_t bytes) {
               if (to) write_global(cta, to, copied->data() + done, bytes, type);
               done += bytes;
             });
           }});
    });
    return Next::Advance;
  };
}

// From shared memory to that of a CTA of the cluster. Operands: [to], [from], bytes, [mbarrier].
Step shared_copy(Instruction const& i) {
  Operand const to = i.operands[0], from = i.operands[1], barrier = i.operands[3];
  int const size = i.slot(2);
  return [=](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      Cta& cta = w.cta;
      auto const bytes = static_cast<uint32_t>(w.reg(size)[l]);
      uint64_t const source = shared_offset(from, w, l), place = shared_offset(to, w, l);
      uint32_t const word = shared_offset(barrier, w, l);
      if (bytes % 16 || source % 16 || place % 16) {
        throw std::runtime_error("bulk copies go by 16 bytes");
      }
      cta.loads.push_back([&cta, source, place, bytes, word] {
        uint64_t offset = place;
        Cta& owner = cta.owner(offset);
        cta.check_fenced(source, bytes, "a bulk copy");
        owner.check_fenced(offset, bytes, "a bulk copy");
        std::memcpy(owner.shared(offset, bytes), cta.shared(source, bytes), bytes);
        update_mbarrier(cta, word, [&](Mbarrier& b) { b.bytes -= bytes; });
      });
    });
    return Next::Advance;
  };
}

// Operands: [to], [from], bytes[, mbarrier].
Step flat_copy(Instruction const& i) {
  bool const loads = i.has("mbarrier::complete_tx::bytes");
  if (loads && !i.has("global")) return shared_copy(i);
  Operand const to = i.operands[0], from = i.operands[1];
  int const size = i.slot(2);
  Operand const barrier = loads ? i.operands[3] : Operand{};
  std::string const type = reduction_type(i);
  return [=](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      Cta& cta = w.cta;
      auto const bytes = static_cast<uint32_t>(w.reg(size)[l]);
      uint32_t const shared = shared_offset(loads ? to : from, w, l);
      Operand const& other = loads ? from : to;
      uint64_t const global = w.reg(other.slot)[l] + other.offset;
      if (bytes % 16 || shared % 16 || global % 16) {
        throw std::runtime_error("bulk copies go by 16 bytes");
      }
      if (loads) {
        uint32_t const word = shared_offset(barrier, w, l);
        cta.loads.push_back([&cta, shared, global, bytes, word] {
          cta.grid.memory.check(global, bytes, "bulk read");
          cta.check_fenced(shared, bytes, "a bulk load");
          std::memcpy(cta.shared(shared, bytes), reinterpret_cast<char const*>(global), bytes);
          update_mbarrier(cta, word, [&](Mbarrier& b) { b.bytes -= bytes; });
        });
        return;
      }
      auto copied = std::make_shared<std::vector<char>>();
      w.stores[l].back().push_back({[&cta, shared, bytes, copied] {
                                      cta.check_fenced(shared, bytes, "a bulk store");
                                      char const* const there = cta.shared(shared, bytes);
                                      copied->assign(there, there + bytes);
                                    },
                                    [&cta, global, copied, type] {
                                      write_global(cta, global, copied->data(), copied->size(),
                                                   type);
                                    }});
    });
    return Next::Advance;
  };
}

// Runs the stores of a group: only their reads of shared memory, or also their writes.
void finish(BulkGroup& group, bool only_read) {
  for (auto& store : group) {
    if (!store.was_read) store.read();
    store.was_read = true;
    if (!only_read) store.write();
  }
  if (!only_read) group.clear();
}

Step wait_group(Instruction const& i) {
  bool const only_read = i.has("read");
  int const left = i.slot(0);
  return [=](Warp& w, Lanes lanes) {
    for_each_lane(lanes, [&](int l) {
      auto& groups = w.stores[l];  // the last group is not committed yet
      auto const waited = static_cast<std::ptrdiff_t>(groups.size()) - 1 -
                          static_cast<std::ptrdiff_t>(w.reg(left)[l]);
      for (std::ptrdiff_t n = 0; n < waited; ++n) finish(groups[n], only_read);
      while (groups.size() > 1 && groups.front().empty()) groups.pop_front();
    });
    w.cta.grid.progress();
    return Next::Advance;
  };
}

}  // namespace

Step decode_bulk_copy(Instruction const& i) {
  std::string const& op = i.words[0];
  if (op == "fence") {
    bool const fences = i.has("async") && !i.has("global");
    return [fences](Warp& w, Lanes) {
      if (fences) w.cta.fence(w);
      return Next::Advance;
    };
  }
  if (op != "cp" || !i.has("bulk")) return {};
  if (i.has("prefetch")) return [](Warp&, Lanes) { return Next::Advance; };
  if (i.has("commit_group")) {
    return [](Warp& w, Lanes lanes) {
      for_each_lane(lanes, [&](int l) { w.stores[l].emplace_back(); });
      return Next::Advance;
    };
  }
  if (i.has("wait_group")) return wait_group(i);
  return i.has("tensor") ? tensor_copy(i) : flat_copy(i);
}

}  // namespace emulator
