// Shared by both products: numbers of 16 bits, activations as integers, threads, and tokens in tiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "lanes.h"

// The OpenMP library that torch has loaded: its threads are the ones that vLLM binds to cores.
extern "C" void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

constexpr int BLOCK = 128;  // columns whose activations share a scale

// Number formats of x, of y, and of a dequantized weight.
enum Kind { BFLOAT16, FLOAT16, FLOAT32 };

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float from_bfloat(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

static inline uint16_t to_bfloat(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 64 : rounded;  // NaN stays NaN
}

static inline float read_number(const void *from, int64_t at, int kind) {
  if (kind == FLOAT32) return static_cast<const float *>(from)[at];
  const uint16_t value = static_cast<const uint16_t *>(from)[at];
  return kind == BFLOAT16 ? from_bfloat(value) : _cvtsh_ss(value);
}

static inline void write_numbers(void *to, int64_t at, const float *from, int64_t count, int kind) {
  if (kind == FLOAT32) {
    std::copy_n(from, count, static_cast<float *>(to) + at);
  } else if (kind == FLOAT16) {
    for (int64_t i = 0; i < count; ++i) static_cast<uint16_t *>(to)[at + i] = _cvtss_sh(from[i], _MM_FROUND_CUR_DIRECTION);
  } else {
    for (int64_t i = 0; i < count; ++i) static_cast<uint16_t *>(to)[at + i] = to_bfloat(from[i]);
  }
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Scale a block of x by a power of two, to magnitudes below 2^bits; return the inverse factor, or NaN if x has an
// infinite number or NaN.
static inline float scale_block(float *x, int bits) {
  uint32_t most = 0;
  for (int i = 0; i < BLOCK; ++i) most = std::max(most, bits_of(x[i]) & 0x7fffffff);
  const bool finite = most < 0x7f800000;
  const int exponent = std::max<int>(most >> 23, 64) - bits + 1;  // smaller blocks than 2^-63 lose bits
  const float up = float_of(static_cast<uint32_t>(254 - exponent) << 23);
  for (int i = 0; i < BLOCK; ++i) x[i] = finite ? x[i] * up : 0;
  return finite ? float_of(static_cast<uint32_t>(exponent) << 23) : NAN;
}

// Call work(thread, threads) on every thread.
template <class Work> static void parallel(int threads, Work work) {
  if (threads == 1) return work(0, 1);
  GOMP_parallel([](void *given) { (*static_cast<Work *>(given))(omp_get_thread_num(), omp_get_num_threads()); }, &work,
                threads, 0);
}

// Call work(i) for the share of a thread of 0 .. count - 1.
template <class Work> static void share(int64_t count, int thread, int threads, Work work) {
  for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i) work(i);
}

// Call work(first token, std::integral_constant of a number of tokens) for tiles of 8, 4, 2 and 1 tokens.
template <class Work> static void in_tiles(int64_t tokens, Work work) {
  int64_t first = 0;
  for (; tokens - first >= 8; first += 8) work(first, std::integral_constant<int, 8>());
  if (tokens - first >= 4) work(first, std::integral_constant<int, 4>()), first += 4;
  if (tokens - first >= 2) work(first, std::integral_constant<int, 2>()), first += 2;
  if (tokens - first >= 1) work(first, std::integral_constant<int, 1>());
}

// Call work(first token, tokens) for bands of tokens, which bound the scratch; return whether there was memory for it.
template <class Work> static int in_bands(int64_t tokens, Work work) {
  constexpr int64_t BAND = 512;
  try {
    for (int64_t first = 0; first < tokens; first += BAND) work(first, std::min(BAND, tokens - first));
  } catch (const std::bad_alloc &) {
    return 0;
  }
  return 1;
}

// Scratch of `bytes` for each token; a tile of tokens begins at a multiple of 64 bytes.
class Scratch {
 public:
  Scratch(int64_t tokens, int64_t bytes) : each(ceil_div(bytes, 64) * 64), memory(new char[tokens * each + 64]) {}
  char *at(int64_t token) const {
    const auto begin = reinterpret_cast<uintptr_t>(memory.get());
    return reinterpret_cast<char *>(ceil_div(begin, 64) * 64 + token * each);
  }

 private:
  int64_t each;
  std::unique_ptr<char[]> memory;
};
