// y = x W^T for a weight of the trellis code. The layout is in trellis.py, the code in
// vllm_latq/coding/trellis/code.py.
//
//   y[t, i] = row_scale[i] * sum over units u of factor(rate u) * sum of value * (column_scale * x) + sum of kept * x
//
// The scaled x is multiplied by a power of two for each unit and rounded to 15 bits and a sign. Products with values are
// added up exactly, in integers, in each unit; these sums, and the kept weights apart from them, are added in float32 in
// one order. So a token's result does not depend on the other tokens, or on the number of threads.
#include "common.h"

constexpr int PAIR = 32;    // rows of a pair of ring tiles
constexpr int GROUP = 16;   // columns of a ring tile
constexpr int STRINGS = 8;  // a ring is 8 strings of 16 steps; a step has two weights of one row
constexpr int STEPS = 16;
constexpr int X_BITS = 15;
constexpr int TWO_TERMS_FROM = 6;
constexpr uint32_t MULTIPLIERS[2] = {0xCAB42AC9u, 0x864FB373u};
constexpr float FACTORS[] = {0, 0, 0.009191000834107399f, 0.009382479824125767f, 0.00995691679418087f,
                             0.010722833685576916f, 0.007032681722193956f, 0.007303169462829828f,
                             0.0075736572034657f, 0.007708901073783636f, 0.00784414540976286f,
                             0.008114633150398731f, 0.008114633150398731f};  // by rate

struct Trellis {
  const uint16_t *words;          // for each pair, unit and group of columns: [rate, 2 tiles, STRINGS]
  const int64_t *begins;          // [pairs]: first word of each pair
  const uint8_t *rates;           // [pairs, units]
  const int32_t *rows_of;         // [pairs, 2]: first row in y, and rows
  const float *row_scales;        // [pairs, PAIR]
  const float *column_scales;     // [cols], as stored
  const int32_t *columns;         // [cols]: the column of x of each stored one
  const int32_t *kept_begins;     // [pairs + 1]
  const int32_t *kept_places;     // row of the pair << 26 | stored column
  const uint16_t *kept_values;    // bfloat16
  int64_t rows, cols, pairs;

  int64_t units() const { return ceil_div(cols, BLOCK); }
  int64_t groups(int64_t unit) const { return ceil_div(std::min<int64_t>(BLOCK, cols - unit * BLOCK), GROUP); }
};

// The activations of M tokens, in the order in which they are read.
struct Tokens {
  int32_t *pairs;  // [units * BLOCK / 2, M]: two 16-bit integers
  float *values;   // [cols, M] as stored, for kept weights
  float *factors;  // [units, M]

  static int64_t size(const Trellis &w) { return w.units() * (BLOCK * 6 + 4); }
  Tokens(const Trellis &w, char *at, int m) {
    pairs = reinterpret_cast<int32_t *>(at);
    values = reinterpret_cast<float *>(at += w.units() * BLOCK * 2 * m);
    factors = reinterpret_cast<float *>(at + w.units() * BLOCK * 4 * m);
  }
};

static inline Ints values_of(Ints windows, int term) {
  return alternate_sums(times(windows, splat32(static_cast<int>(MULTIPLIERS[term] * 0x10001u))));
}

// Decode step STEP of each string, and those after it. A word of `seen` is the two last halves of a string.
template <int RATE, int STEP>
static inline __attribute__((always_inline)) void decode_steps(Ints seen, const uint16_t *words, Ints *values) {
  constexpr int END = (STEP + 1) * RATE, WORD = (END - 1) / 16, BEFORE = STEP ? (STEP * RATE - 1) / 16 : -1;
  if constexpr (WORD != BEFORE) seen = bit_or(shift_left(seen, 16), widened(words + WORD * 2 * STRINGS));
  const Ints windows = bit_and(shift_right32<16 * (WORD + 1) - END>(seen), splat32(0xffff));
  values[STEP] = values_of(windows, 0);
  if constexpr (RATE >= TWO_TERMS_FROM) values[STEP] = add16(values[STEP], values_of(windows, 1));
  if constexpr (STEP + 1 < STEPS) decode_steps<RATE, STEP + 1>(seen, words, values);
}

// Decode groups of columns, for LANES / STRINGS tiles: lane s of values[2 p + b] has columns 2 p and 2 p + 1 of row
// s + 8 b of a tile, as 16-bit integers.
template <int RATE> static void decode(const uint16_t *words, int64_t groups, Ints *values) {
  for (; groups--; words += RATE * 2 * STRINGS, values += STEPS)
    decode_steps<RATE, 0>(rotated(widened(words + (RATE - 1) * 2 * STRINGS)), words, values);
}

using Decode = void (*)(const uint16_t *, int64_t, Ints *);
constexpr Decode DECODE[] = {nullptr,   nullptr,   decode<2>, decode<3>,  decode<4>,  decode<5>, decode<6>,
                             decode<7>, decode<8>, decode<9>, decode<10>, decode<11>, decode<12>};

// Add the products of the rows of LANES / STRINGS tiles, from `lane` on: sums[t * PAIR + row].
//
// decoded: the values of all units; null to decode them here.
template <int M>
static void add_values(const Trellis &w, const Tokens &x, int64_t pair, int lane, const Ints *decoded, float *sums) {
  const uint16_t *words = w.words + w.begins[pair] + lane;
  const int32_t *xs = x.pairs;
  Floats sum[2][M];
  std::fill_n(sum[0], 2 * M, splat(0));
  alignas(64) Ints own[BLOCK];
  for (int64_t unit = 0; unit < w.units(); ++unit) {
    const int rate = w.rates[pair * w.units() + unit];
    const int64_t groups = w.groups(unit);
    const Ints *values = decoded ? decoded + unit * BLOCK : own;
    if (!decoded) DECODE[rate](words, groups, own);
    Ints total[2][M];
    std::fill_n(total[0], 2 * M, splat32(0));
    for (int64_t p = 0; p < groups * GROUP / 2; ++p, xs += M)
#pragma GCC unroll 8
      for (int t = 0; t < M; ++t) {
        total[0][t] = add_pairs(total[0][t], values[2 * p], xs[t]);
        total[1][t] = add_pairs(total[1][t], values[2 * p + 1], xs[t]);
      }
    for (int t = 0; t < M; ++t) {
      const Floats factor = splat(FACTORS[rate] * x.factors[unit * M + t]);
      for (int b = 0; b < 2; ++b) sum[b][t] = fma(floats(total[b][t]), factor, sum[b][t]);
    }
    words += groups * rate * 2 * STRINGS;
  }
  for (int t = 0; t < M; ++t)
    for (int b = 0; b < 2; ++b) {
      float rows[LANES];
      store(rows, sum[b][t]);
      for (int i = 0; i < LANES; ++i) sums[t * PAIR + (lane + i) / STRINGS * 16 + b * 8 + i % STRINGS] = rows[i];
    }
}

template <int M> static void add_kept(const Trellis &w, const Tokens &x, int64_t pair, float *sums) {
  float own[PAIR * M] = {};
  for (int32_t e = w.kept_begins[pair]; e < w.kept_begins[pair + 1]; ++e) {
    float *to = own + (w.kept_places[e] >> 26) * M;
    const float *at = x.values + (w.kept_places[e] & 0x3ffffff) * static_cast<int64_t>(M);
    for (int t = 0; t < M; ++t) to[t] = fmaf(from_bfloat(w.kept_values[e]), at[t], to[t]);
  }
  for (int t = 0; t < M; ++t)
    for (int r = 0; r < PAIR; ++r) sums[t * PAIR + r] = fmaf(sums[t * PAIR + r], w.row_scales[pair * PAIR + r], own[r * M + t]);
}

static void prepare(const Trellis &w, const void *from, int64_t begin, int m, int t, const Tokens &x, int kind) {
  for (int64_t unit = 0; unit < w.units(); ++unit) {
    alignas(32) float v[BLOCK] = {};
    const int64_t first = unit * BLOCK, some = std::min<int64_t>(BLOCK, w.cols - first);
    for (int i = 0; i < some; ++i) {
      const float value = read_number(from, begin + w.columns[first + i], kind);
      x.values[(first + i) * m + t] = value;
      v[i] = value * w.column_scales[first + i];
    }
    x.factors[unit * m + t] = scale_block(v, X_BITS);
    for (int64_t i = 0; i < BLOCK; i += 8) {
      const __m256i z = _mm256_cvtps_epi32(_mm256_load_ps(v + i));
      const __m256i packed = _mm256_packs_epi32(z, z);
      int32_t *to = x.pairs + (first + i) / 2 * m + t;
      to[0] = _mm256_extract_epi32(packed, 0), to[m] = _mm256_extract_epi32(packed, 1);
      to[2 * m] = _mm256_extract_epi32(packed, 4), to[3 * m] = _mm256_extract_epi32(packed, 5);
    }
  }
}

static void decode_pair(const Trellis &w, int64_t pair, int lane, Ints *values) {
  const uint16_t *words = w.words + w.begins[pair] + lane;
  for (int64_t unit = 0; unit < w.units(); ++unit) {
    const int rate = w.rates[pair * w.units() + unit];
    DECODE[rate](words, w.groups(unit), values + unit * BLOCK);
    words += w.groups(unit) * rate * 2 * STRINGS;
  }
}

static void multiply(const Trellis &w, const void *x, int64_t begin, int64_t tokens, void *y, int kind, int threads) {
  const Scratch scratch(tokens, Tokens::size(w));
  const bool once = tokens > 8;  // decode a pair once for all tiles of tokens
  const Scratch decoded(once ? threads : 0, w.units() * BLOCK * sizeof(Ints) * 2 * STRINGS / LANES);
  parallel(tokens * w.cols < 1 << 15 ? 1 : threads, [&](int thread, int of) {
    in_tiles(tokens, [&](int64_t first, auto m) {
      const Tokens tile(w, scratch.at(first), m);
      for (int t = 0; t < m; ++t)
        if ((first + t) % of == thread) prepare(w, x, (begin + first + t) * w.cols, m, t, tile, kind);
    });
  });
  parallel(threads, [&](int thread, int of) {
    Ints *values = once ? reinterpret_cast<Ints *>(decoded.at(thread)) : nullptr;
    share(w.pairs, thread, of, [&](int64_t pair) {
      if (once)
        for (int lane = 0; lane < 2 * STRINGS; lane += LANES)
          decode_pair(w, pair, lane, values + lane / LANES * w.units() * BLOCK);
      in_tiles(tokens, [&](int64_t first, auto m) {
        constexpr int M = decltype(m)::value;
        const Tokens some(w, scratch.at(first), M);
        float sums[M * PAIR];
        for (int lane = 0; lane < 2 * STRINGS; lane += LANES)
          add_values<M>(w, some, pair, lane, once ? values + lane / LANES * w.units() * BLOCK : nullptr, sums);
        add_kept<M>(w, some, pair, sums);
        const int32_t row = w.rows_of[2 * pair], rows = w.rows_of[2 * pair + 1];
        for (int t = 0; t < M; ++t) write_numbers(y, (begin + first + t) * w.rows + row, sums + t * PAIR, rows, kind);
      });
    });
  });
}

// x: [tokens, cols] and y: [tokens, rows] of one kind, contiguous. Returns whether there was memory for the scratch.
extern "C" int latq_trellis_product(const Trellis *w, const void *x, int64_t tokens, void *y, int kind, int threads) {
  return in_bands(tokens, [&](int64_t begin, int64_t count) { multiply(*w, x, begin, count, y, kind, threads); });
}
