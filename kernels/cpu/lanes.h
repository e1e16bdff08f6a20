// Vectors of the CPU: 16 lanes of 32 bits with AVX512-VNNI, 8 with AVX2. A lane is a row of the weight.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr int LANES = 16;
constexpr bool SUMS_OF_32_BITS = true;  // `add_bytes` keeps its sums in 32 bits
using Ints = __m512i;
using Floats = __m512;

static inline Ints load(const uint8_t *from) { return _mm512_loadu_si512(from); }
static inline void store(uint8_t *to, Ints a) { _mm512_storeu_si512(to, a); }
static inline void store(float *to, Floats a) { _mm512_storeu_ps(to, a); }
static inline Ints splat8(int value) { return _mm512_set1_epi8(value); }
static inline Ints splat32(int value) { return _mm512_set1_epi32(value); }
static inline Floats splat(float value) { return _mm512_set1_ps(value); }
static inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
static inline Ints add16(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
static inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
static inline Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
static inline Ints bit_select(Ints mask, Ints a, Ints b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xCA); }
static inline Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
static inline Ints shift_left(Ints a, int bits) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
template <int BITS> static inline Ints shift_right16(Ints a) { return _mm512_srli_epi16(a, BITS); }
template <int BITS> static inline Ints shift_right32(Ints a) { return _mm512_srli_epi32(a, BITS); }
static inline Floats floats(Ints a) { return _mm512_cvtepi32_ps(a); }
static inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// The bfloat16 numbers, and the unsigned 16-bit integers, at an address.
static inline Ints widened(const uint16_t *from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
static inline Floats bfloats(const uint16_t *from) { return _mm512_castsi512_ps(_mm512_slli_epi32(widened(from), 16)); }
// Rotate each group of eight lanes by one.
static inline Ints rotated(Ints a) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6, 15, 8, 9, 10, 11, 12, 13, 14), a);
}
// high += the four unsigned bytes of `codes` times the signed ones of x[0], in each lane; low the same with x[1].
static inline void add_bytes(Ints &high, Ints &low, Ints codes, const int32_t *x) {
  high = _mm512_dpbusd_epi32(high, codes, splat32(x[0]));
  low = _mm512_dpbusd_epi32(low, codes, splat32(x[1]));
}
static inline Ints joined(Ints high, Ints low) { return add(_mm512_slli_epi32(high, 8), low); }
// total + the two 16-bit integers of `pairs` times those of x, in each lane.
static inline Ints add_pairs(Ints total, Ints pairs, int32_t x) { return _mm512_dpwssd_epi32(total, pairs, splat32(x)); }
// The signed bytes 0 and 2 of each lane added, and 1 and 3, as 16-bit integers.
static inline Ints alternate_sums(Ints a) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  return _mm512_maddubs_epi16(splat8(1), _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(order)));
}

#else

constexpr int LANES = 8;
constexpr bool SUMS_OF_32_BITS = false;
using Ints = __m256i;
using Floats = __m256;

static inline Ints load(const uint8_t *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
static inline void store(uint8_t *to, Ints a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), a); }
static inline void store(float *to, Floats a) { _mm256_storeu_ps(to, a); }
static inline Ints splat8(int value) { return _mm256_set1_epi8(value); }
static inline Ints splat32(int value) { return _mm256_set1_epi32(value); }
static inline Floats splat(float value) { return _mm256_set1_ps(value); }
static inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
static inline Ints add16(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
static inline Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
static inline Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
static inline Ints bit_select(Ints mask, Ints a, Ints b) { return bit_or(bit_and(mask, a), _mm256_andnot_si256(mask, b)); }
static inline Ints times(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
static inline Ints shift_left(Ints a, int bits) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
template <int BITS> static inline Ints shift_right16(Ints a) { return _mm256_srli_epi16(a, BITS); }
template <int BITS> static inline Ints shift_right32(Ints a) { return _mm256_srli_epi32(a, BITS); }
static inline Floats floats(Ints a) { return _mm256_cvtepi32_ps(a); }
static inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline Ints widened(const uint16_t *from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
static inline Floats bfloats(const uint16_t *from) { return _mm256_castsi256_ps(_mm256_slli_epi32(widened(from), 16)); }
static inline Ints rotated(Ints a) { return _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6)); }
// Sums of pairs of products, in 16 bits: for codes up to 15 and eight calls they do not overflow.
static inline void add_bytes(Ints &high, Ints &low, Ints codes, const int32_t *x) {
  high = add16(high, _mm256_maddubs_epi16(codes, splat32(x[0])));
  low = add16(low, _mm256_maddubs_epi16(codes, splat32(x[1])));
}
static inline Ints joined(Ints high, Ints low) {
  return add(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
}
static inline Ints add_pairs(Ints total, Ints pairs, int32_t x) {
  return add(total, _mm256_madd_epi16(pairs, splat32(x)));
}
static inline Ints alternate_sums(Ints a) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  return _mm256_maddubs_epi16(splat8(1), _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(order)));
}

#endif
