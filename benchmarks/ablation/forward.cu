// The forward kernel without one of its parts: Table 2 of the paper. Each variant has a define, see
// `VARIANTS` in ringfa3/build/units.py.
#if defined(RINGFA3_UNSPECIALISED)
#include "unspecialised.cuh"
#else
#include "forward/kernel.cuh"
#endif

namespace ringfa3 {

template <class Traits>
struct WithoutOverlap : Traits {
  static constexpr bool Overlap = false;
};

template <class Traits>
struct WithoutPingPong : Traits {
  static constexpr bool PingPong = false;
};

}  // namespace ringfa3

extern "C" int ringfa3_forward(ringfa3::ForwardArgs const* args, void* stream) {
  using Traits = ringfa3::ForwardTraits<RINGFA3_ELEMENT, RINGFA3_HEAD_DIM, RINGFA3_TILE_N,
                                        RINGFA3_TILE_M / 64>;
  auto const on = static_cast<cudaStream_t>(stream);
#if defined(RINGFA3_UNSPECIALISED)
  return ringfa3::launch_unspecialised<Traits>(*args, on);
#elif defined(RINGFA3_WITHOUT_OVERLAP)
  return ringfa3::launch_forward<ringfa3::WithoutOverlap<Traits> >(*args, on);
#elif defined(RINGFA3_WITHOUT_PING_PONG)
  return ringfa3::launch_forward<ringfa3::WithoutPingPong<Traits> >(*args, on);
#endif
}
