// y = x W^T for a weight of 2, 3, 4 or 8 bits on scales, with outliers. The layout is in packed.py.
//
//   y[t, i] = row_scale[i] * (sum over groups g of scale[i, g] * sum of (code - zero) * x + sum of outlier * x)
//
// x is scaled by a power of two for each block of 128 columns and rounded to 14 bits and a sign, in a high and a low
// byte. Products with codes are added up exactly, in integers, for as many columns as share both scales; these sums, and
// the outliers apart from them, are added in float32 in the order of the columns. So a token's result does not depend on
// the other tokens, or on the number of threads.
#include "common.h"

constexpr int TILE = 16;     // rows of a tile
constexpr int QUARTER = 32;   // columns whose codes are packed together: 8 vectors of 16 rows x 4 columns
constexpr int VECTORS = 8;
constexpr int BYTES = 64;     // of a vector of codes
constexpr int QUARTERS = BLOCK / QUARTER;
constexpr int X_BITS = 14;
constexpr int REGION = 4096;  // columns that 12 bits of an outlier's entry number

struct Packed {
  const uint8_t *words;         // [tiles, blocks, QUARTERS, bits, BYTES]
  const uint16_t *scales;       // bfloat16 [tiles, groups, TILE]; null for ones
  const float *row_scales;      // [rows], or null
  const int32_t *entry_begins;  // [tiles * regions + 1]; null without outliers
  const uint32_t *entries;      // bfloat16 value << 16 | row of the tile << 12 | column of the region, by column
  int64_t rows, cols, bits, group, midrise;

  int64_t tiles() const { return ceil_div(rows, TILE); }
  int64_t blocks() const { return ceil_div(cols, BLOCK); }
  int64_t columns() const { return blocks() * BLOCK; }
  int64_t regions() const { return ceil_div(cols, REGION); }
  int64_t groups() const { return ceil_div(cols, group); }
  // Columns of a block that share a scale.
  int64_t segment() const { return group >= cols || group % BLOCK == 0 ? BLOCK : group % 64 == 0 ? 64 : QUARTER; }
};

// The activations of M tokens, in the order in which they are read.
struct Tokens {
  int32_t *bytes;  // [columns / 4, M, 2]: the high bytes of four columns, and their low bytes
  float *values;   // [columns, M], for outliers
  int32_t *sums;   // [columns / QUARTER, M]
  float *factors;  // [blocks, M]

  static int64_t size(const Packed &w) { return w.columns() * 6 + w.columns() / QUARTER * 4 + w.blocks() * 4; }
  Tokens(const Packed &w, char *at, int m) {
    bytes = reinterpret_cast<int32_t *>(at);
    values = reinterpret_cast<float *>(at += w.columns() * 2 * m);
    sums = reinterpret_cast<int32_t *>(at += w.columns() * 4 * m);
    factors = reinterpret_cast<float *>(at + w.columns() / QUARTER * 4 * m);
  }
};

// Codes of 8 bits are two of 4 where sums have 16 bits.
template <int BITS> constexpr int PARTS = BITS == 8 && !SUMS_OF_32_BITS ? 2 : 1;

// Unpack vector V of a quarter. A byte has codes from bit 0 up; with 3 bits the last two codes have their low bits in
// bits 6 and 7 of the first two bytes, and their highest bit in bits 6 and 7 of the third.
template <int BITS, int V, int PART = 0> static inline Ints codes(const uint8_t *quarter) {
  if constexpr (BITS == 3 && V >= 6) {
    const Ints low = shift_right16<6>(load(quarter + (V - 6) * BYTES)), high = shift_right16<V - 2>(load(quarter + 2 * BYTES));
    return bit_and(bit_select(splat8(3), low, high), splat8(7));
  } else {
    constexpr int FIELDS = 8 / BITS, SHIFT = BITS == 8 ? (PARTS<BITS> == 2 && PART == 0 ? 4 : 0) : V % FIELDS * BITS;
    const Ints word = load(quarter + V / FIELDS * BYTES);
    if constexpr (BITS == 8 && PARTS<BITS> == 1) return word;
    return bit_and(SHIFT ? shift_right16<SHIFT>(word) : word, splat8(BITS == 8 ? 15 : (1 << BITS) - 1));
  }
}

template <int BITS, int M, int PART, int V = 0>
static inline __attribute__((always_inline)) void add_vectors(Ints *high, Ints *low, const uint8_t *quarter,
                                                              const int32_t *bytes) {
  const Ints code = codes<BITS, V, PART>(quarter);
#pragma GCC unroll 8
  for (int t = 0; t < M; ++t) add_bytes(high[t], low[t], code, bytes + 2 * (V * M + t));
  if constexpr (V + 1 < VECTORS) add_vectors<BITS, M, PART, V + 1>(high, low, quarter, bytes);
}

// Add the codes' products for LANES rows from `lane` on: sums[t * TILE + row].
template <int BITS, int M> static void add_codes(const Packed &w, const Tokens &x, int64_t tile, int lane, float *sums) {
  const int64_t blocks = w.blocks(), segment = w.segment(), quarters = segment / QUARTER, groups = w.groups();
  const int half = w.midrise, zero = ((1 << (BITS - 1)) << half) - half;  // codes are doubled where the grid is mid-rise
  const uint8_t *words = w.words + tile * blocks * (QUARTERS * BITS * BYTES) + lane * 4;
  const uint16_t *scales = w.scales ? w.scales + tile * groups * TILE + lane : nullptr;
  const int32_t *bytes = x.bytes, *columns = x.sums;
  const Ints none = splat32(0);
  Floats sum[M];
  std::fill_n(sum, M, splat(0));
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t first = block * BLOCK; first < (block + 1) * BLOCK; first += segment) {
      Ints total[M], high[M], low[M];
      int32_t zeros[M] = {};
      std::fill_n(total, M, none), std::fill_n(high, M, none), std::fill_n(low, M, none);
      for (int q = 0; q < quarters; ++q) {
        if constexpr (SUMS_OF_32_BITS) {
          add_vectors<BITS, M, 0>(high, low, words, bytes);
        } else {
          std::fill_n(high, M, none), std::fill_n(low, M, none);
          add_vectors<BITS, M, 0>(high, low, words, bytes);
          for (int t = 0; t < M; ++t) {
            const Ints some = joined(high[t], low[t]);
            total[t] = add(total[t], PARTS<BITS> == 2 ? shift_left(some, 4) : some);
          }
          if constexpr (PARTS<BITS> == 2) {
            std::fill_n(high, M, none), std::fill_n(low, M, none);
            add_vectors<BITS, M, 1>(high, low, words, bytes);
            for (int t = 0; t < M; ++t) total[t] = add(total[t], joined(high[t], low[t]));
          }
        }
        for (int t = 0; t < M; ++t) zeros[t] += columns[t];
        words += BITS * BYTES, bytes += 2 * VECTORS * M, columns += M;
      }
      const Floats scale = scales ? bfloats(scales + std::min(first / w.group, groups - 1) * TILE) : splat(1);
      for (int t = 0; t < M; ++t) {
        if constexpr (SUMS_OF_32_BITS) total[t] = joined(high[t], low[t]);
        const Ints exact = add(shift_left(total[t], half), splat32(-zero * zeros[t]));
        sum[t] = fma(floats(exact), mul(scale, splat(x.factors[block * M + t])), sum[t]);
      }
    }
  for (int t = 0; t < M; ++t) store(sums + t * TILE + lane, sum[t]);
}

template <int M> static void add_outliers(const Packed &w, const Tokens &x, int64_t tile, float *sums) {
  float own[TILE * M] = {};
  for (int64_t region = 0; region < w.regions(); ++region) {
    const int32_t *begins = w.entry_begins + tile * w.regions() + region;
    const float *values = x.values + region * REGION * M;
    for (int32_t e = begins[0]; e < begins[1]; ++e) {
      const uint32_t entry = w.entries[e];
      const float value = float_of(entry & 0xffff0000);
      float *to = own + (entry >> 12 & 15) * M;
      const float *at = values + (entry & 4095) * M;
      if constexpr (M == 8)
        _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_set1_ps(value), _mm256_loadu_ps(at), _mm256_loadu_ps(to)));
      else if constexpr (M == 4)
        _mm_storeu_ps(to, _mm_fmadd_ps(_mm_set1_ps(value), _mm_loadu_ps(at), _mm_loadu_ps(to)));
      else
        for (int t = 0; t < M; ++t) to[t] = fmaf(value, at[t], to[t]);
    }
  }
  for (int t = 0; t < M; ++t)
    for (int r = 0; r < TILE; ++r) sums[t * TILE + r] += own[r * M + t];
}

static void prepare(const Packed &w, const void *from, int64_t begin, int m, int t, const Tokens &x, int kind) {
  for (int64_t block = 0; block < w.blocks(); ++block) {
    alignas(32) float v[BLOCK] = {};
    const int64_t first = block * BLOCK, some = std::min<int64_t>(BLOCK, w.cols - first);
    for (int i = 0; i < some; ++i) v[i] = read_number(from, begin + first + i, kind);
    if (w.entry_begins)
      for (int i = 0; i < BLOCK; ++i) x.values[(first + i) * m + t] = v[i];
    // Where the grid is mid-rise, sums are of doubled codes.
    x.factors[block * m + t] = scale_block(v, X_BITS) * (w.midrise ? 0.5f : 1.0f);
    for (int64_t quarter = 0; quarter < QUARTERS; ++quarter) {
      __m256i total = _mm256_setzero_si256();
      for (int64_t i = quarter * QUARTER; i < (quarter + 1) * QUARTER; i += 8) {
        const __m256i z = _mm256_cvtps_epi32(_mm256_load_ps(v + i));
        const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(z, 24), 24);
        const __m256i words = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_sub_epi32(z, low), 8), low);
        const __m256i bytes = _mm256_packs_epi16(words, words);
        int32_t *to = x.bytes + ((first + i) / 4 * m + t) * 2;
        _mm_storel_epi64(reinterpret_cast<__m128i *>(to), _mm256_castsi256_si128(bytes));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(to + 2 * m), _mm256_extracti128_si256(bytes, 1));
        total = _mm256_add_epi32(total, z);
      }
      alignas(32) int32_t parts[8];
      _mm256_store_si256(reinterpret_cast<__m256i *>(parts), total);
      int32_t sum = 0;
      for (int part : parts) sum += part;
      x.sums[(block * QUARTERS + quarter) * m + t] = sum;
    }
  }
}

template <int BITS>
static void multiply(const Packed &w, const void *x, int64_t begin, int64_t tokens, void *y, int kind, int threads) {
  const Scratch scratch(tokens, Tokens::size(w));
  parallel(tokens * w.cols < 1 << 15 ? 1 : threads, [&](int thread, int of) {
    in_tiles(tokens, [&](int64_t first, auto m) {
      const Tokens tile(w, scratch.at(first), m);
      for (int t = 0; t < m; ++t)
        if ((first + t) % of == thread) prepare(w, x, (begin + first + t) * w.cols, m, t, tile, kind);
    });
  });
  parallel(threads, [&](int thread, int of) {
    share(w.tiles(), thread, of, [&](int64_t tile) {
      const int64_t row = tile * TILE, rows = std::min<int64_t>(TILE, w.rows - row);
      in_tiles(tokens, [&](int64_t first, auto m) {
        constexpr int M = decltype(m)::value;
        const Tokens some(w, scratch.at(first), M);
        alignas(64) float sums[M * TILE];
        for (int lane = 0; lane < TILE; lane += LANES) add_codes<BITS, M>(w, some, tile, lane, sums);
        if (w.entry_begins) add_outliers<M>(w, some, tile, sums);
        for (int t = 0; t < M; ++t) {
          if (w.row_scales)
            for (int r = 0; r < rows; ++r) sums[t * TILE + r] *= w.row_scales[row + r];
          write_numbers(y, (begin + first + t) * w.rows + row, sums + t * TILE, rows, kind);
        }
      });
    });
  });
}

template <int BITS, int V = 0> static void unpack(const uint8_t *quarter, uint8_t *to) {
  for (int lane = 0; lane < TILE; lane += LANES) {
    Ints code = codes<BITS, V>(quarter + lane * 4);
    if constexpr (PARTS<BITS> == 2) code = load(quarter + V * BYTES + lane * 4);
    store(to + V * BYTES + lane * 4, code);
  }
  if constexpr (V + 1 < VECTORS) unpack<BITS, V + 1>(quarter, to);
}

template <int BITS> static void dequantize_rows(const Packed &w, int64_t tile, int64_t first_row, void *to, int kind) {
  const int64_t row = tile * TILE, rows = std::min<int64_t>(TILE, w.rows - row), groups = w.groups();
  const float zero = (1 << (BITS - 1)) - 0.5f * w.midrise;
  int32_t entry = 0;
  for (int64_t block = 0; block < w.blocks(); ++block) {
    float weights[TILE][BLOCK];
    for (int64_t q = 0; q < QUARTERS; ++q) {
      uint8_t unpacked[VECTORS * BYTES];
      unpack<BITS>(w.words + ((tile * w.blocks() + block) * QUARTERS + q) * BITS * BYTES, unpacked);
      const int64_t group = std::min<int64_t>((block * BLOCK + q * QUARTER) / w.group, groups - 1);
      for (int r = 0; r < TILE; ++r) {
        uint8_t code[QUARTER];
        for (int v = 0; v < VECTORS; ++v) memcpy(code + 4 * v, unpacked + v * BYTES + r * 4, 4);
        const float scale = w.scales ? from_bfloat(w.scales[(tile * groups + group) * TILE + r]) : 1;
        for (int i = 0; i < QUARTER; ++i) weights[r][q * QUARTER + i] = (code[i] - zero) * scale;
      }
    }
    if (w.entry_begins) {
      const int64_t region = block * BLOCK / REGION, first = block * BLOCK - region * REGION;
      const int32_t *begins = w.entry_begins + tile * w.regions() + region;
      if (first == 0) entry = begins[0];
      for (; entry < begins[1] && (w.entries[entry] & 4095) < first + BLOCK; ++entry)
        weights[w.entries[entry] >> 12 & 15][(w.entries[entry] & 4095) - first] += float_of(w.entries[entry] & 0xffff0000);
    }
    for (int r = 0; r < rows; ++r) {
      if (w.row_scales)
        for (float &weight : weights[r]) weight *= w.row_scales[row + r];
      write_numbers(to, (row + r - first_row) * w.cols + block * BLOCK, weights[r],
                    std::min<int64_t>(BLOCK, w.cols - block * BLOCK), kind);
    }
  }
}

// x: [tokens, cols] and y: [tokens, rows] of one kind, contiguous. Returns whether there was memory for the scratch.
extern "C" int latq_packed_product(const Packed *w, const void *x, int64_t tokens, void *y, int kind, int threads) {
  const auto run = w->bits == 2 ? multiply<2> : w->bits == 3 ? multiply<3> : w->bits == 4 ? multiply<4> : multiply<8>;
  return in_bands(tokens, [&](int64_t begin, int64_t count) { run(*w, x, begin, count, y, kind, threads); });
}

// Write rows of the dense weight to `to`, [.., cols], each number computed in float32 and rounded once. The first row is
// that of a tile.
extern "C" void latq_packed_rows(const Packed *w, int64_t first_row, int64_t rows, void *to, int kind, int threads) {
  const auto write = w->bits == 2   ? dequantize_rows<2>
                     : w->bits == 3 ? dequantize_rows<3>
                     : w->bits == 4 ? dequantize_rows<4>
                                    : dequantize_rows<8>;
  parallel(threads, [&](int thread, int of) {
    share(ceil_div(rows, TILE), thread, of,
          [&](int64_t tile) { write(*w, first_row / TILE + tile, first_row, to, kind); });
  });
}
