// The backward's choices that depend on the head dim.
#pragma once

namespace ringfa3 {

// Q, K and V as the caller gives them, or as an 8-bit forward has rounded them: see
// `BackwardShapes`.
enum class BackwardOperands { Native, Dequantised };

// role_split     a pair of CTAs shares a tile of 128 keys, of which each has 64. One of its
//                warpgroups computes P and dV, the other dS and dK. Otherwise a CTA has the whole
//                tile, and each of its warpgroups 64 keys.
// q_stages, dout_stages
//                Stages of Q with LSE, and of dO with D: as many as fit into shared memory with K
//                and V.
// ds_stages      Stages of dS.
// awaits_q_early Q of the next block is awaited before dQ is handed to its writer. Pays where Q has
//                three stages.
// looks_ahead    a block's flags are read while the softmax of the block before it runs, where a
//                register is left.
struct BackwardPolicy {
  bool role_split;
  int q_stages, dout_stages, ds_stages;
  bool awaits_q_early, looks_ahead;
};

// clang-format off
template <int HeadDim> constexpr BackwardPolicy kBackwardPolicy{};
template <> constexpr BackwardPolicy kBackwardPolicy< 64>{false, 2, 2, 2, false, true};
template <> constexpr BackwardPolicy kBackwardPolicy<128>{false, 3, 2, 2, true,  false};
template <> constexpr BackwardPolicy kBackwardPolicy<192>{true,  2, 2, 2, false, false};
template <> constexpr BackwardPolicy kBackwardPolicy<256>{true,  2, 1, 2, false, false};
// clang-format on

// Registers of a thread, with one producer and two consumer warpgroups.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

}  // namespace ringfa3
