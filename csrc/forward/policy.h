// The forward's choices that depend on the head dim, the number of consumer warpgroups, and the
// precision.
#pragma once

namespace ringfa3 {

// What the products read. Native: the dtype of Q, K and V. Fp8: e4m3 Q, K, P and V. Int8: 8-bit
// integers Q and K, and P and V in the dtype of V.
enum class Precision { Native, Fp8, Int8 };

// stages            of K and V: one block is read while the next one is loaded. Measured with
//                   8 bits, full mask: at d64 four are 6% (fp8) and 4% (int8) faster than two; at
//                   d128 more than four change nothing.
// q_stages          of Q: two load the next tile's Q during this tile; d256 has no room for two,
//                   unless Q, K and V have 8 bits.
// splits_q          Each warpgroup's rows of Q come and go alone. Measured on short causal
//                   rows: 0.5-1% faster at d256; with two stages of Q 0.5-3% slower.
// boxed_o           O leaves through shared memory by TMA, where shared memory has room for it.
// early_elements    of a thread's S: they become P before the wait for P V of the block before.
//                   Registers limit it. Measured at d64: 0 is 3-5% faster than 16, which also
//                   spilled 20 to 46 bytes, with three consumers; with two, 48 are 1-8% faster than
//                   0 from 1k tokens on.
// unmasked_rest       Unmasked blocks that the loop of unmasked blocks leaves to the other loop.
// With
//                   0 it must look for what follows. Measured, one run: 1 is up to 2% faster at 16k
//                   tokens at d64 and d128; 0 is 0.4-2% faster on short rows at d256.
// releases_q_early, looks_ahead
//                   release Q, and look up the next tile, before the softmax of a tile's last block
//                   and not behind it. Measured: both pay where tiles are short or wait for Q.
// sums_rounded      O is divided by the sum of rounded P, not of P: the rounding of a dominant P
//                   cancels. Measured: less than 2% of speed at d256, 13% and more below.
// opaque_operands   The descriptors of Q and K are recomputed instead of spilled.
// keeps_p           E4M3 P stays in registers until its sums are checked: where they do not fit,
//                   it is multiplied instead of computed again. Registers limit it: with three
//                   consumers at d128 it spills 88 bytes, and is 3% faster at sigma 4 nats.
// ping_pong       Warpgroups issue their products in turns (ping-pong). Measured at d64 fp8, at
//                   sigma 4 nats: 3-5% faster without; elsewhere slower, at least in some rows.
// promotion_interval
//                   Sums of P V with e4m3 V leave the accumulator, which has about 14 bits, for
//                   float32 registers behind every so many blocks, those of a tile's last block
//                   with the ones before it; 0: at the end of a tile.
struct ForwardPolicy {
  int stages, q_stages;
  bool splits_q, boxed_o;
  int early_elements;
  int unmasked_rest;
  bool releases_q_early, looks_ahead;
  bool sums_rounded, opaque_operands;
  bool keeps_p;
  bool ping_pong = true;
  int promotion_interval = 0;
};

// clang-format off
template <int HeadDim, int Consumers, Precision P> constexpr ForwardPolicy kForwardPolicy{};
template <> constexpr ForwardPolicy kForwardPolicy<64, 3, Precision::Native>{2, 2, false, true, 0, 1, true, true, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<64, 2, Precision::Native>{2, 2, false, true, 48, 1, true, true, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<128, 2, Precision::Native>{2, 2, false, true, 48, 1, false, false, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<256, 2, Precision::Native>{2, 1, true, false, 16, 0, true, false, true, true, false};
template <> constexpr ForwardPolicy kForwardPolicy<64, 3, Precision::Fp8>{4, 2, false, true, 0, 1, true, true, false, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<128, 2, Precision::Fp8>{2, 2, false, true, 48, 1, false, false, false, false, true};
template <> constexpr ForwardPolicy kForwardPolicy<128, 3, Precision::Fp8>{4, 2, false, true, 0, 1, true, true, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<256, 2, Precision::Fp8>{2, 2, false, false, 0, 1, false, false, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<64, 3, Precision::Int8>{4, 2, false, true, 0, 1, true, true, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<128, 3, Precision::Int8>{4, 2, false, true, 0, 1, true, true, false, false, false};
template <> constexpr ForwardPolicy kForwardPolicy<256, 2, Precision::Int8>{2, 1, false, false, 0, 1, true, false, false, false, false};
// clang-format on

// Registers of a thread: a CTA has 65,536, of which two or three consumer warpgroups take most.
struct RegisterSplit {
  int producer, consumer;
};
constexpr RegisterSplit register_split(int consumers) {
  return consumers == 2 ? RegisterSplit{24, 240} : RegisterSplit{32, 160};
}
// Whether a CTA has as many registers at its launch, a multiple of 8 for each thread (168 of 384
// threads): where it has not, `setmaxnreg` blocks for ever.
constexpr bool registers_suffice(RegisterSplit split, int producers, int consumers) {
  int const warpgroups = producers + consumers;
  int const at_launch = 65536 / (128 * warpgroups) / 8 * 8;
  return split.producer * producers + split.consumer * consumers <= at_launch * warpgroups;
}

}  // namespace ringfa3
