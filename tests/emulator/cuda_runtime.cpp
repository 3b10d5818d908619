// The functions of the CUDA runtime that a kernel's launcher calls. Launches are queued until the
// caller asks for an error.
//
// Device memory is host memory. A kernel library registers itself; its PTX is read from its fatbin.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <mutex>

#include "tensor_map.h"
#include "machine.h"

namespace emulator {

namespace {

struct Fatbin {  // the layout that nvcc writes
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatbinEntry {
  uint16_t kind, flags;
  uint32_t header_bytes;
  uint64_t bytes;
};
constexpr uint16_t kPtx = 1;

struct Runtime {
  std::map<void const*, std::shared_ptr<Kernel>> kernels;  // by host function
  Memory memory;
  Settings settings;
  std::deque<Work> queue;
  std::string error;

  std::string const& finish() {
    try {
      if (error.empty()) run_in_order(queue, memory, settings);
    } catch (std::exception const& failure) {
      error = failure.what();
    }
    queue.clear();
    return error;
  }
};

Runtime& runtime() {
  static Runtime r;
  return r;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local Configuration pushed;

// The kernels of a library by name.
using Library = std::map<std::string, std::shared_ptr<Kernel>>;

Library read(Fatbin const* fatbin) {
  auto const* at = reinterpret_cast<char const*>(fatbin) + fatbin->header_bytes;
  auto const* const end = at + fatbin->bytes;
  while (at < end) {
    FatbinEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    if (entry.kind == kPtx) return parse(std::string(at + entry.header_bytes, entry.bytes).c_str());
    at += entry.header_bytes + entry.bytes;
  }
  throw std::runtime_error("the library has no PTX");
}

cudaError_t launch(void const* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                   bool programmatic = false, size_t cluster = 1) {
  Runtime& r = runtime();
  auto const found = r.kernels.find(function);
  if (found == r.kernels.end()) return cudaErrorInvalidDeviceFunction;
  auto launch = std::make_unique<Launch>(Launch{found->second,
                                                {grid.x, grid.y, grid.z},
                                                {block.x, block.y, block.z},
                                                static_cast<int>(shared),
                                                programmatic,
                                                cluster,
                                                {}});
  auto const& parameters = launch->kernel->parameters;
  if (!parameters.empty()) {
    launch->params.resize(parameters.back().offset + parameters.back().bytes);
  }
  for (size_t n = 0; n < parameters.size(); ++n) {
    std::memcpy(launch->params.data() + parameters[n].offset, arguments[n], parameters[n].bytes);
  }
  r.queue.push_back({std::move(launch), {}});
  return cudaSuccess;
}

CUresult encode_tiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      cuuint64_t const* extent, cuuint64_t const* strides, cuuint32_t const* box,
                      cuuint32_t const* steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  static constexpr uint32_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  if (static_cast<size_t>(type) >= std::size(kBytes) || rank < 1 || rank > 5 || interleave) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap map{};
  map.magic = TensorMap::kMagic;
  map.address = reinterpret_cast<uint64_t>(address);
  map.rank = rank;
  map.element_bytes = kBytes[type];
  map.is_float = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  map.swizzle = static_cast<uint32_t>(swizzle);
  bool valid = map.address % 16 == 0 && map.swizzle <= 3;
  for (uint32_t d = 0; d < rank; ++d) {
    map.box[d] = box[d];
    map.extent[d] = static_cast<uint32_t>(extent[d]);
    map.stride[d] = d ? strides[d - 1] : map.element_bytes;
    valid &= extent[d] > 0 && extent[d] <= 1ull << 32 && box[d] > 0 && box[d] <= 256;
    valid &= steps[d] == 1 && (d == 0 || (map.stride[d] % 16 == 0 && map.stride[d] < 1ull << 40));
  }
  uint32_t const row = map.box[0] * map.element_bytes;
  valid &= row % 16 == 0 && (map.swizzle == 0 || row <= 16u << map.swizzle);
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace

}  // namespace emulator

using emulator::runtime;

extern "C" {

// Called by the tests.

// Allows kernels to access [address, address + bytes).
void emulator_allow(void* address, size_t bytes) {
  runtime().memory.allow(reinterpret_cast<uint64_t>(address), bytes);
}

// Sets how the next launches run. Clears the allowed memory, the queue and the error.
void emulator_reset(uint64_t seed, double async_chance, double deadlock_s, size_t resident_ctas) {
  runtime().memory.clear();
  runtime().settings = {seed, async_chance, deadlock_s, resident_ctas};
  runtime().queue.clear();
  runtime().error.clear();
}

// Runs the queue. Returns the error, empty if there is none.
char const* emulator_finish() { return runtime().finish().c_str(); }

// Queues the only kernel of a PTX text; `params` is its parameter block. Returns the error or "".
char const* emulator_launch(char const* ptx, unsigned ctas, unsigned threads, int shared,
                            int programmatic, unsigned cluster, char const* params, size_t bytes) {
  try {
    auto const kernels = emulator::parse(ptx);
    auto launch = std::make_unique<emulator::Launch>(
        emulator::Launch{kernels.begin()->second,
                         {ctas, 1, 1},
                         {threads, 1, 1},
                         shared,
                         programmatic != 0,
                         cluster,
                         std::vector<char>(params, params + bytes)});
    runtime().queue.push_back({std::move(launch), {}});
  } catch (std::exception const& error) {
    runtime().error = error.what();
  }
  return runtime().error.c_str();
}

// Called by kernel libraries.

void** __cudaRegisterFatBinary(void* wrapper) {
  struct {
    int magic, version;
    emulator::Fatbin const* data;
  } w;
  std::memcpy(&w, wrapper, sizeof w);
  auto* const library = new emulator::Library;
  try {
    *library = emulator::read(w.data);
  } catch (std::exception const& error) {
    runtime().error = error.what();
  }
  return reinterpret_cast<void**>(library);
}

void __cudaRegisterFunction(void** library, char const* host, char*, char const* name, int, void*,
                            void*, void*, void*, int*) {
  auto const& kernels = *reinterpret_cast<emulator::Library*>(library);
  auto const found = kernels.find(name);
  if (found != kernels.end()) runtime().kernels[host] = found->second;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  emulator::pushed = {grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = emulator::pushed.grid, *block = emulator::pushed.block;
  *shared = emulator::pushed.shared;
  *static_cast<void**>(stream) = emulator::pushed.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t) {
  return emulator::launch(kernel, grid, block, arguments, shared);
}

cudaError_t cudaLaunchKernel(void const* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t) {
  return emulator::launch(function, grid, block, arguments, shared);
}

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* c, void const* function,
                                void** arguments) {
  bool programmatic = false;
  size_t cluster = 1;
  for (unsigned n = 0; n < c->numAttrs; ++n) {
    programmatic |= c->attrs[n].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
                    c->attrs[n].val.programmaticStreamSerializationAllowed;
    if (c->attrs[n].id == cudaLaunchAttributeClusterDimension) {
      cluster = c->attrs[n].val.clusterDim.x;
    }
  }
  return emulator::launch(function, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes,
                          programmatic, cluster);
}

cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t) { return emulator_finish(); }
char const* cudaGetErrorName(cudaError_t) { return "emulated"; }

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  runtime().queue.push_back({nullptr, [=] { std::memset(address, value, bytes); }});
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = 3;  // as `PROCESSORS` of tests/support/emulation.py
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  bool const known = std::string(symbol) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&emulator::encode_tiled) : nullptr;
  if (found) {
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return known ? cudaSuccess : cudaErrorSymbolNotFound;
}

}  // extern "C"
