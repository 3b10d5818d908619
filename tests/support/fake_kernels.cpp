// Kernels for tests of the host library, and the driver that it asks: they run on the CPU, at once,
// and keep the arguments of every launch. Their results show which tensors they were given: rows of
// out are rows of q, k and v in turn; dk and dv are k and v; dq is dout, with lse and dlse added.
// A sink is added to lse, and to what a block adds to dsink.
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "params.h"

using namespace ringfa3;

namespace {

struct Call {
  std::string name, words;
  void* stream;
};

std::mutex mutex;
std::vector<Call> calls;
int failure;
thread_local int64_t handle = 7;
int64_t generation;
thread_local int capturing;
bool without_context;
bool idle;

template <class Args>
int keep(char const* name, Args const* args, void* stream) {
  if (idle) return -1;
  std::lock_guard const lock(mutex);
  calls.push_back({name, {reinterpret_cast<char const*>(args), sizeof *args}, stream});
  return failure;
}

uint16_t* row(Tensor3 const& x, int64_t token, int64_t head) {
  return static_cast<uint16_t*>(x.data) + token * x.token_stride + head * x.head_stride;
}

float number(uint16_t bits) {
  uint32_t const wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

// Units that share keys add, as the product's do; others store.
void gradient(Tensor3 const& to, Tensor3 const& from, bool float32, bool shared) {
  for (int64_t token = 0; token < from.tokens; ++token) {
    for (int64_t head = 0; head < from.heads; ++head) {
      uint16_t const* const x = row(from, token, head);
      for (int c = 0; c < from.head_dim; ++c) {
        int64_t const at = token * to.token_stride + head * to.head_stride + c;
        if (float32) {
          auto* const sum = static_cast<float*>(to.data) + at;
          *sum = (shared ? *sum : 0) + number(x[c]);
        } else {
          static_cast<uint16_t*>(to.data)[at] = x[c];
        }
      }
    }
  }
}

// Rows of a block of a backward's padded rows, as ringfa3/build/units.py has them.
template <int D>
constexpr int kTileM = D == 64 ? 128 : 64;

// Calls with(token, its floats of dQ), for each row of a head.
template <int D, class With>
void each_row(PaddedRows const& grid, int64_t head, With with) {
  for (int64_t block = 0; block < grid.num_blocks; ++block) {
    for (int i = 0; i < grid.blocks[block].rows; ++i) {
      int64_t const place = (head * grid.num_blocks + block) * kTileM<D> + i;
      with(grid.blocks[block].row0 + i, grid.dq + place * D);
    }
  }
}

template <int D>
int forward(ForwardArgs const* a, void* stream) {
  if (int const status = keep("forward", a, stream)) return status < 0 ? 0 : status;
  int64_t const group = a->q.heads / a->k.heads;
  for (int64_t token = 0; token < a->q.tokens; ++token) {
    for (int64_t head = 0; head < a->q.heads; ++head) {
      Tensor3 const* const from[] = {&a->q, &a->k, &a->v};
      for (int c = 0; c < a->out.head_dim; ++c) {
        Tensor3 const& x = *from[c % 3];
        int64_t const at = token % x.tokens;
        row(a->out, token, head)[c] = row(x, at, c % 3 ? head / group : head)[c];
      }
      float const sink = a->sink ? a->sink[head] : 0;
      a->lse[head * a->lse_head_stride + token] = static_cast<float>(token + 1000 * head) + sink;
    }
  }
  return 0;
}

template <int D>
int preprocess(PreprocessArgs const* a, void* stream) {
  if (int const status = keep("preprocess", a, stream)) return status < 0 ? 0 : status;
  for (int64_t head = 0; head < a->dout.heads; ++head) {
    each_row<D>(a->padded, head, [&](int64_t token, float* dq) {
      for (int c = 0; c < D; ++c) {
        dq[c] = c < a->dout.head_dim ? number(row(a->dout, token, head)[c]) : 0;
      }
      dq[0] += a->lse[head * a->lse_head_stride + token];
      if (a->dlse) dq[1] += a->dlse[head * a->dlse_head_stride + token];
      dq[2] += number(row(a->out, token, head)[2]);
    });
    for (int64_t block = 0; a->sink && block < a->padded.num_blocks; ++block) {
      a->dsink[head * a->padded.num_blocks + block] = a->sink[head] + static_cast<float>(block);
    }
  }
  std::memset(a->words, 0, a->num_words * sizeof *a->words);
  return 0;
}

template <int D>
int backward(BackwardArgs const* a, void* stream) {
  if (int const status = keep("backward", a, stream)) return status < 0 ? 0 : status;
  bool shared = false;
  for (int i = 0; i < a->num_work_units; ++i) shared |= (a->work_units[i].flags & kShared) != 0;
  gradient(a->dk, a->k, a->float32_grads, shared);
  gradient(a->dv, a->v, a->float32_grads, shared);
  return 0;
}

template <int D>
int postprocess(PostprocessArgs const* a, void* stream) {
  if (int const status = keep("postprocess", a, stream)) return status < 0 ? 0 : status;
  for (int64_t head = 0; head < a->dq.heads; ++head) {
    each_row<D>(a->padded, head, [&](int64_t token, float const* dq) {
      for (int c = 0; c < a->dq.head_dim; ++c) row(a->dq, token, head)[c] = rounded(dq[c]);
    });
  }
  return 0;
}

// The last kernels compute what those of the product do.
int published_row(PublishedRows const& rows, int64_t token) {
  int const row = rows.position ? rows.position[token] : static_cast<int>(token) - rows.first;
  return 0 <= row && row < rows.count ? row : -1;
}

int publish(PublishArgs const* a, void* stream) {
  if (int const status = keep("publish", a, stream)) return status < 0 ? 0 : status;
  int64_t const d = a->k.head_dim, half = a->k.heads * d;
  for (int64_t token = 0; token < a->k.tokens; ++token) {
    int64_t const places[] = {published_row(a->rows, token), a->gathered ? token : -1};
    void* const targets[] = {a->published, a->gathered};
    for (int n = 0; n < 2; ++n) {
      if (places[n] < 0) continue;
      auto* const to = static_cast<uint16_t*>(targets[n]) + places[n] * 2 * half;
      for (int64_t head = 0; head < a->k.heads; ++head) {
        std::memcpy(to + head * d, row(a->k, token, head), 2 * d);
        std::memcpy(to + half + head * d, row(a->v, token, head), 2 * d);
      }
    }
  }
  return 0;
}

int add_returns(AddReturnsArgs const* a, void* stream) {
  if (int const status = keep("add_returns", a, stream)) return status < 0 ? 0 : status;
  for (int run = 0; run < a->runs.count; ++run) {
    int64_t const floats = a->row_floats;
    for (int64_t i = a->runs.begin[run] * floats; i < a->runs.end[run] * floats; ++i) {
      a->sum[i] += a->returned[i];
    }
  }
  return 0;
}

int round_gradients(RoundGradientsArgs const* a, void* stream) {
  if (int const status = keep("round_gradients", a, stream)) return status < 0 ? 0 : status;
  int64_t const floats = a->row_floats, half = floats / 2;
  for (int64_t token = 0; token < a->tokens; ++token) {
    int const row = a->sum ? published_row(a->rows, token) : -1;
    bool returned = false;
    for (int run = 0; run < a->runs.count; ++run) {
      returned |= a->runs.begin[run] <= row && row < a->runs.end[run];
    }
    for (int64_t i = 0; i < floats; ++i) {
      float x = a->own[token * floats + i];
      if (row >= 0) x += a->sum[row * floats + i];
      if (returned) x += a->returned[row * floats + i];
      static_cast<uint16_t*>(i < half ? a->dk : a->dv)[token * half + i % half] = rounded(x);
    }
  }
  return 0;
}

}  // namespace

// The functions of a unit's library, with its head dim behind their names; tensors may be narrower.
#define UNIT(D)                                                                                  \
  extern "C" int ringfa3_forward_##D(ForwardArgs const* a, void* s) { return forward<D>(a, s); } \
  extern "C" int ringfa3_preprocess_##D(PreprocessArgs const* a, void* s) {                      \
    return preprocess<D>(a, s);                                                                  \
  }                                                                                              \
  extern "C" int ringfa3_backward_##D(BackwardArgs const* a, void* s) {                          \
    return backward<D>(a, s);                                                                    \
  }                                                                                              \
  extern "C" int ringfa3_postprocess_##D(PostprocessArgs const* a, void* s) {                    \
    return postprocess<D>(a, s);                                                                 \
  }                                                                                              \
  extern "C" int ringfa3_publish_##D(PublishArgs const* a, void* s) { return publish(a, s); }    \
  extern "C" int ringfa3_add_returns_##D(AddReturnsArgs const* a, void* s) {                     \
    return add_returns(a, s);                                                                    \
  }                                                                                              \
  extern "C" int ringfa3_round_gradients_##D(RoundGradientsArgs const* a, void* s) {             \
    return round_gradients(a, s);                                                                \
  }
UNIT(64)
UNIT(128)

extern "C" {

int fake_current_stream(int32_t, void** stream) {
  *stream = reinterpret_cast<void*>(handle);
  return 0;
}
int fake_current_context(void** context) {
  *context = without_context ? nullptr : &without_context;
  return 0;
}
int fake_is_capturing(void*, int* status) {
  if (without_context) return 201;  // CUDA_ERROR_INVALID_CONTEXT

  *status = capturing;
  return 0;
}
int fake_stream_id(void* stream, uint64_t* id) {
  *id = reinterpret_cast<uint64_t>(stream) + 1000 * generation;
  return 0;
}

// What tests set: the status of launches; of this thread the stream and whether it is captured;
// whether there is a context.
void fake_fail(int status) { failure = status; }
void fake_stream(int64_t value, int64_t made) { handle = value, generation = made; }
void fake_capture(int status) { capturing = status; }
void fake_without_context(int wanted) { without_context = wanted; }
void fake_idle(int wanted) { idle = wanted; }  // kernels do nothing and keep nothing

// Stands for any function of the driver.
int fake_nothing() { return 0; }

// The launches since the last `fake_forget`. While they are read no thread may launch.
int fake_calls() { return static_cast<int>(calls.size()); }
char const* fake_name(int i) { return calls[i].name.c_str(); }
int fake_bytes(int i) { return static_cast<int>(calls[i].words.size()); }
void const* fake_words(int i) { return calls[i].words.data(); }
int64_t fake_stream_of(int i) { return reinterpret_cast<int64_t>(calls[i].stream); }
void fake_forget() {
  std::lock_guard const lock(mutex);
  calls.clear();
}
}
