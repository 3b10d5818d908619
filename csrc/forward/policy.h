// The forward's choices that depend on the head dim, the number of consumer warpgroups, and the
// precision.
#pragma once

namespace ringfa3 {

// The dtypes of the operands. Native: the dtype of Q, K and V. Fp8: e4m3 Q, K, P and V. Int8:
// 8-bit integers for Q and K; P and V have the dtype of V.
enum class Precision { Native, Fp8, Int8 };

// stages            Stages of K and V: one block is read while the next one is loaded. Measured
//                   with 8 bits, full mask: at d64 four are 6% (fp8) and 4% (int8) faster than two;
//                   at d128 more than four change nothing.
// q_stages          Stages of Q: two load the next tile's Q during this tile. D256 has room for
//                   two only with 8-bit Q, K and V.
// splits_q          Each warpgroup's rows of Q have their own barriers. Measured on short causal
//                   rows: 0.5-1% faster at d256; with two stages of Q 0.5-3% slower.
// boxed_o           O leaves through shared memory by TMA, where shared memory has room for it.
// early_elements    Elements of a thread's S that become P before the wait for P V of the block
//                   before. Registers limit it. Measured at d64: 0 is 3-5% faster than 16, which
//                   also spilled 20 to 46 bytes, with three consumers; with two, 48 are 1-8% faster
//                   than 0 from 1k tokens on.
// unmasked_rest     Unmasked blocks that `unmasked_loop` leaves to the general loop. With 1 it
//                   never looks up the next span or tile; with 0 it calls `next_block` itself.
//                   Measured, one run: 1 is up to 2% faster at 16k tokens at d64 and d128; 0 is
//                   0.4-2% faster on short rows at d256.
// releases_q_early, looks_ahead
//                   Release Q, and look up the next tile, before the softmax of a tile's last block
//                   and not after it. Measured: both pay where tiles are short or wait for Q.
// sums_rounded      O is divided by the sum of rounded P, not of P: the rounding of a dominant P
//                   cancels. Measured: it costs less than 2% of speed at d256, 13% and more below.
// narrow_keys       Keys of a narrow span at most, see narrow_span.cuh; 0: none is.
// opaque_operands   The descriptors of Q and K are recomputed instead of spilled.
// keeps_p           E4M3 P stays in registers until its sums are checked. Where they are out of
//                   range, P is multiplied instead of computed again. Registers limit it: with
//                   three consumers at d128 it spills 88 bytes, and is 3% faster at sigma 4 nats.
// ping_pong         Warpgroups issue their products in one order, see `WarpgroupOrder`. Measured
//                   at d64 fp8, sigma 4 nats: 3-5% faster without; elsewhere slower, at least in
//                   some rows.
struct ForwardPolicy {
  int stages, q_stages;
  bool splits_q = false, boxed_o = false;
  int early_elements = 0;
  int unmasked_rest = 0;
  bool releases_q_early = false, looks_ahead = false;
  bool sums_rounded = false, opaque_operands = false;
  int narrow_keys = 0;
  bool keeps_p = false;
  bool ping_pong = true;
};

// clang-format off
template <int HeadDim, int Consumers, Precision P>
constexpr ForwardPolicy kForwardPolicy{};
template <>
constexpr ForwardPolicy kForwardPolicy<64, 3, Precision::Native>{
    .stages = 2, .q_stages = 2, .boxed_o = true, .unmasked_rest = 1, .releases_q_early = true,
    .looks_ahead = true, .narrow_keys = 16};
template <>
constexpr ForwardPolicy kForwardPolicy<64, 2, Precision::Native>{
    .stages = 2, .q_stages = 2, .boxed_o = true, .early_elements = 48, .unmasked_rest = 1,
    .releases_q_early = true, .looks_ahead = true, .narrow_keys = 16};
template <>
constexpr ForwardPolicy kForwardPolicy<128, 2, Precision::Native>{
    .stages = 2, .q_stages = 2, .boxed_o = true, .early_elements = 48, .unmasked_rest = 1,
    .narrow_keys = 16};
template <>
constexpr ForwardPolicy kForwardPolicy<192, 2, Precision::Native>{
    .stages = 2, .q_stages = 1, .splits_q = true, .early_elements = 48, .unmasked_rest = 1,
    .releases_q_early = true, .opaque_operands = true};
template <>
constexpr ForwardPolicy kForwardPolicy<256, 2, Precision::Native>{
    .stages = 2, .q_stages = 1, .splits_q = true, .early_elements = 16,
    .releases_q_early = true, .sums_rounded = true, .opaque_operands = true};
template <>
constexpr ForwardPolicy kForwardPolicy<64, 3, Precision::Fp8>{
    .stages = 4, .q_stages = 2, .boxed_o = true, .unmasked_rest = 1, .releases_q_early = true,
    .looks_ahead = true, .ping_pong = false};
template <>
constexpr ForwardPolicy kForwardPolicy<128, 2, Precision::Fp8>{
    .stages = 2, .q_stages = 2, .boxed_o = true, .early_elements = 48, .unmasked_rest = 1,
    .keeps_p = true};
template <>
constexpr ForwardPolicy kForwardPolicy<128, 3, Precision::Fp8>{
    .stages = 4, .q_stages = 2, .boxed_o = true, .unmasked_rest = 1, .releases_q_early = true,
    .looks_ahead = true};
template <>
constexpr ForwardPolicy kForwardPolicy<256, 2, Precision::Fp8>{
    .stages = 2, .q_stages = 2, .unmasked_rest = 1};
template <>
constexpr ForwardPolicy kForwardPolicy<64, 3, Precision::Int8>{
    .stages = 4, .q_stages = 2, .boxed_o = true, .unmasked_rest = 1, .releases_q_early = true,
    .looks_ahead = true};
template <>
constexpr ForwardPolicy kForwardPolicy<128, 3, Precision::Int8>{
    .stages = 4, .q_stages = 2, .boxed_o = true, .unmasked_rest = 1, .releases_q_early = true,
    .looks_ahead = true};
template <>
constexpr ForwardPolicy kForwardPolicy<256, 2, Precision::Int8>{
    .stages = 2, .q_stages = 1, .unmasked_rest = 1, .releases_q_early = true};
// clang-format on

// Registers of a thread. A CTA has 65,536; its two or three consumer warpgroups take most of them.
struct RegisterSplit {
  int producer, consumer;
};
constexpr RegisterSplit register_split(int consumers) {
  return consumers == 2 ? RegisterSplit{24, 240} : RegisterSplit{32, 160};
}
// Whether a CTA has so many registers at its launch, a multiple of 8 for each thread (168 of 384
// threads). With fewer, `setmaxnreg` blocks for ever.
constexpr bool registers_suffice(RegisterSplit split, int producers, int consumers) {
  int const warpgroups = producers + consumers;
  int const at_launch = 65536 / (128 * warpgroups) / 8 * 8;
  return split.producer * producers + split.consumer * consumers <= at_launch * warpgroups;
}

}  // namespace ringfa3
