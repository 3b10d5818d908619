// csrc/hopper/launch.cuh with a runtime that notes what it is asked for; see test_allow_shared.py.
#include <atomic>
#include <cstdint>

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
using cudaStream_t = void*;
struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned count = 1) : x(count), y(1), z(1) {}
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      int x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  int dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};

constexpr int kDevices = 70, kKernels = 2;
thread_local int device = 0;
std::atomic<int> asked[kKernels][kDevices];
std::atomic<bool> refuses{false};

inline cudaError_t cudaGetDevice(int* current) {
  *current = device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaSuccess; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute, int bytes) {
  ++asked[kernel(0)][device];
  return refuses || bytes > 227 * 1024 ? cudaErrorInvalidValue : cudaSuccess;
}

#include "hopper/launch.cuh"

// Two kernels of one type, as those of one `Shapes` are; each returns its number.
template <int kNumber>
int kernel(int) {
  return kNumber;
}

extern "C" int fake_allow(int number, int on, int bytes) {
  device = on;
  return number ? ringfa3::allow_shared<kernel<1>>(bytes) : ringfa3::allow_shared<kernel<0>>(bytes);
}
extern "C" int fake_asked(int number, int on) { return asked[number][on]; }
extern "C" void fake_refuse(int on) { refuses = on != 0; }
