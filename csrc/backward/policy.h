// The backward's choices that depend on the head dim.
#pragma once

namespace ringfa3 {

// role_split     one warpgroup computes P and dV, the other dS and dK, because a tile has only 64
//                keys; otherwise each warpgroup has 64 keys of a tile of 128.
// q_stages, dout_stages
//                of Q with LSE, and of dO with D: as many as shared memory holds beside K and V.
// ds_stages      of dS: how many turns lie between a warpgroup's store and the other's last read.
// reads_ahead    LSE and D are read into registers while the products that need them still run.
// looks_ahead    a block's flags are read while the softmax of the block before it runs, where a
//                register is left.
struct BackwardPolicy {
  bool role_split;
  int q_stages, dout_stages, ds_stages;
  bool reads_ahead, looks_ahead;
};

// clang-format off
template <int HeadDim> constexpr BackwardPolicy kBackwardPolicy{};
template <> constexpr BackwardPolicy kBackwardPolicy< 64>{false, 2, 2, 3, false, true};
template <> constexpr BackwardPolicy kBackwardPolicy<128>{false, 3, 2, 3, true,  false};
template <> constexpr BackwardPolicy kBackwardPolicy<256>{true,  2, 1, 2, true,  false};
// clang-format on

// Registers of a thread, with one producer and two consumer warpgroups.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

}  // namespace ringfa3
