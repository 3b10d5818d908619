// Lets a plain C++ compiler read the headers of this folder: tests compare them with the plan.
#pragma once

#ifdef __CUDACC__
#define RINGFA3_DEVICE __forceinline__ __device__
#else
#include <algorithm>
#define RINGFA3_DEVICE inline
namespace ringfa3 {
using std::max;
using std::min;
}  // namespace ringfa3
#endif
