// The fp8 forward whose sums of P V leave the accumulator, which has about 14 bits, for float32
// registers after every `RINGFA3_PROMOTION` blocks. A tile's last block joins the ones before it.
#pragma once

#include "forward/kernel.cuh"

namespace ringfa3 {

using namespace cute;

// The sums take the registers of exponentials before the wait for P V, and of kept P.
template <class Shapes>
struct Promoting : Shapes {
  static_assert(Shapes::QuantisedV);
  static constexpr ForwardPolicy kPolicy = [] {
    ForwardPolicy policy = Shapes::kPolicy;
    policy.early_elements = 0, policy.keeps_p = false;
    return policy;
  }();
};

template <class Shapes>
struct PromotingConsumer : ForwardConsumer<Shapes, PromotingConsumer<Shapes> > {
  using Base = ForwardConsumer<Shapes, PromotingConsumer>;
  using Base::o, Base::o_empty;
  typename Base::FragmentO sums;  // of O (64, D), without those of the accumulator
  int products = 0;               // whose sum the accumulator holds

  CUTE_DEVICE PromotingConsumer(ForwardParams<Shapes> const& p, typename Base::Shared& smem)
      : Base(p, smem) {
    clear(sums);
  }

  CUTE_DEVICE void start_block() {
    if (!o_empty && ++products >= RINGFA3_PROMOTION) {
      add(o, sums);
      products = 0, o_empty = true;
    }
    Base::start_block();
  }

  // Multiplies row R of O, of the two that a thread holds.
  template <int R>
  CUTE_DEVICE void scale_o(float by) {
    Base::template scale_o<R>(by);
    CUTE_UNROLL
    for (int n = 2 * R; n < size(sums); n += 4) sums(n) *= by, sums(n + 1) *= by;
  }

  // After the last product of a tile.
  CUTE_DEVICE void finish_sums() {
    add(sums, o);
    clear(sums);
    products = 0;
  }

 private:
  template <class Accumulator>
  static CUTE_DEVICE void add(Accumulator const& from, Accumulator& to) {
    CUTE_UNROLL
    for (int n = 0; n < size(to); ++n) to(n) += from(n);
  }
};

// The epilogue of `ForwardConsumer::finish_tile`.
template <class Shapes>
CUTE_DEVICE void store_tile(PromotingConsumer<Shapes>& c, WorkItem& work, bool const (&inside)[2],
                            bool use_row_max, bool early_lse, float (&lse)[2]) {
  c.finish_sums();
  store_tile<PromotingConsumer<Shapes> >(c, work, inside, use_row_max, early_lse, lse);
}

}  // namespace ringfa3
