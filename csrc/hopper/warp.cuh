// Sizes of warps and warpgroups, and constants of base-2 exponentials.
#pragma once

namespace ringfa3 {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kWarpRows = 16;  // rows of a wgmma accumulator that one warp holds
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace ringfa3
