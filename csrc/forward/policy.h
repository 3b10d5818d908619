// The forward's choices that depend on the head dim.
#pragma once

namespace ringfa3 {

// stages            of K and V: one block is read while the next one is loaded.
// q_stages          of Q: two load the next tile's Q during this tile; d256 has no room for two.
// boxed_o           O leaves through shared memory by TMA, where shared memory has room for it.
// early_elements    of a thread's S: they become P before the wait for P V of the block before.
//                   Registers limit it. Measured at d64: 0 is 3-5% faster than 16, which also
//                   spilled 20 to 46 bytes.
// steady_rest       Unmasked blocks that the loop of unmasked blocks leaves to the other loop. With
//                   0 it must look for what follows. Measured, one run: 1 is up to 2% faster at 16k
//                   tokens at d64 and d128; 0 is 0.4-2% faster on short rows at d256.
// releases_q_early, looks_ahead
//                   release Q, and look up the next tile, before the softmax of a tile's last block
//                   and not behind it. Measured: both pay where tiles are short or wait for Q.
// sums_rounded      O is divided by the sum of rounded P, not of P: the rounding of a dominant P
//                   cancels. Measured: less than 2% of speed at d256, 13% and more below.
// opaque_operands   The descriptors of Q and K are recomputed instead of spilled.
struct ForwardPolicy {
  int stages, q_stages;
  bool boxed_o;
  int early_elements;
  int steady_rest;
  bool releases_q_early, looks_ahead;
  bool sums_rounded, opaque_operands;
};

// clang-format off
template <int HeadDim> constexpr ForwardPolicy kForwardPolicy{};
template <> constexpr ForwardPolicy kForwardPolicy<64>{2, 2, true, 0, 1, true, true, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<128>{2, 2, true, 48, 1, false, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<256>{2, 1, false, 16, 0, true, false, true, true};
// clang-format on

// Registers of a thread: a CTA has 65,536, of which two or three consumer warpgroups take most.
struct RegisterSplit {
  int producer, consumer;
};
constexpr RegisterSplit register_split(int consumers) {
  return consumers == 2 ? RegisterSplit{24, 240} : RegisterSplit{32, 160};
}

}  // namespace ringfa3
