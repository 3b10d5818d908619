// The forward kernel without one of its parts, Table 2 of the paper, or with another pipeline,
// tile, way of V or promotion of its sums. Variants have defines, see `VARIANTS` in
// ringfa3/build/units.py.
#if defined(RINGFA3_UNSPECIALISED)
#include "unspecialised.cuh"
#elif defined(RINGFA3_WITHOUT_OVERLAP)
#include "sequential.cuh"
#elif defined(RINGFA3_THREE_STAGES)
#include "three_stages.cuh"
#elif defined(RINGFA3_IN_KERNEL_TRANSPOSE)
#include "transpose.cuh"
#elif defined(RINGFA3_PROMOTION)
#include "promotion.cuh"
#else
#include "forward/kernel.cuh"
#endif

namespace ringfa3 {

template <class Shapes>
struct WithoutPingPong : Shapes {
  static constexpr ForwardPolicy kPolicy = [] {
    ForwardPolicy policy = Shapes::kPolicy;
    policy.ping_pong = false;
    return policy;
  }();
};

}  // namespace ringfa3

using Shapes = ringfa3::ForwardShapes<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM, RINGFA3_TILE_N,
                                      RINGFA3_TILE_M / 64, ringfa3::Precision::RINGFA3_PRECISION>;

extern "C" int ringfa3_forward(Shapes::Args const* args, void* stream) {
  auto const on = static_cast<cudaStream_t>(stream);
#if defined(RINGFA3_UNSPECIALISED)
  return ringfa3::launch_unspecialised<Shapes>(*args, on);
#elif defined(RINGFA3_WITHOUT_OVERLAP)
  using Consumer = ringfa3::SequentialConsumer<Shapes>;
  return ringfa3::launch_forward<Shapes, ringfa3::forward_kernel<Shapes, Consumer> >(*args, on);
#elif defined(RINGFA3_WITHOUT_PING_PONG)
  return ringfa3::launch_forward<ringfa3::WithoutPingPong<Shapes> >(*args, on);
#elif defined(RINGFA3_THREE_STAGES)
  using Consumer = ringfa3::ThreeStageConsumer<Shapes>;
  return ringfa3::launch_forward<Shapes, ringfa3::forward_kernel<Shapes, Consumer> >(*args, on);
#elif defined(RINGFA3_IN_KERNEL_TRANSPOSE)
  return ringfa3::launch_transposing<Shapes>(*args, on);
#elif defined(RINGFA3_PROMOTION)
  using With = ringfa3::Promoting<Shapes>;
  using Consumer = ringfa3::PromotingConsumer<With>;
  return ringfa3::launch_forward<With, ringfa3::forward_kernel<With, Consumer> >(*args, on);
#else
  return ringfa3::launch_forward<Shapes>(*args, on);
#endif
}
