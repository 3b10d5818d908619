// mbarrier instructions: init, arrive, expect and complete bytes, wait for a phase.
#include "mbarrier.h"

#include "decode.h"

namespace emulator {

namespace {

void arrive(Mbarrier& b, uint64_t count) {
  if (b.pending < count) throw std::runtime_error("more arrivals than an mbarrier expects");
  b.pending -= count;
}

}  // namespace

Step decode_mbarrier(Instruction const& i) {
  if (i.words[0] != "mbarrier") return {};
  std::string const& what = i.words[1];
  if (what == "init") {
    Operand const at = i.operands[0];
    int const count = i.slot(1);
    return [=](Warp& w, Lanes lanes) {
      for_each_lane(lanes, [&](int l) {
        Mbarrier b{};
        b.expected = b.pending = w.reg(count)[l];
        uint32_t const address = shared_offset(at, w, l);
        std::memcpy(w.cta.shared(address, 8), &b, 8);
      });
      return Next::Advance;
    };
  }
  if (what == "arrive" || what == "expect_tx" || what == "complete_tx") {
    bool const arrives = what == "arrive";
    bool const expects = i.has("expect_tx");
    if (i.has("noComplete")) throw std::runtime_error("PTX: " + i.text);
    size_t const first = arrives && i.operands[0].kind != Operand::Memory ? 1 : 0;
    Operand const at = i.operands[first];
    int const number = i.operands.size() > first + 1 ? i.slot(first + 1) : -1;
    return [=](Warp& w, Lanes lanes) {
      for_each_lane(lanes, [&](int l) {
        auto const n =
            number >= 0 ? static_cast<int64_t>(static_cast<uint32_t>(w.reg(number)[l])) : 1;
        uint32_t const address = shared_offset(at, w, l);
        if (arrives && !(address >> kRankBit)) w.cta.release(w, w.cta.mbarrier(address));
        update_mbarrier(w.cta, address, [&](Mbarrier& b) {
          if (expects) b.bytes += n;
          if (!expects && !arrives) b.bytes -= n;
          if (arrives) arrive(b, expects ? 1 : n);
        });
      });
      return Next::Advance;
    };
  }
  if (what == "try_wait" || what == "test_wait") {
    if (!i.has("parity")) throw std::runtime_error("PTX: only waits by parity: " + i.text);
    int const d = i.slot(0), parity = i.slot(2);
    Operand const at = i.operands[1];
    return [=](Warp& w, Lanes lanes) {
      bool all = true;
      for_each_lane(lanes, [&](int l) {
        Mbarrier b;
        uint32_t const address = shared_offset(at, w, l);
        std::memcpy(&b, w.cta.shared(address, 8), 8);
        bool const over = b.phase != (w.reg(parity)[l] & 1);
        if (over) w.cta.acquire(w, w.cta.mbarrier(address));
        w.reg(d)[l] = over;
        all &= over;
      });
      return all ? Next::Advance : Next::Yield;
    };
  }
  if (what == "inval") return [](Warp&, Lanes) { return Next::Advance; };
  throw std::runtime_error("PTX: " + i.text);
}

}  // namespace emulator
