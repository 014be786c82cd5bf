// Vectors of floats as wide as the instruction set this file is compiled for, and the few functions on them.
//
// Written with the compiler's vector extensions, so that one source serves AVX-512, AVX2 and any other CPU. Included by
// kernels.cpp alone: everything here is in an anonymous namespace, one copy an instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vf __attribute__((vector_size(LANES * 4)));
typedef int32_t Vi __attribute__((vector_size(LANES * 4)));
typedef uint16_t Vh __attribute__((vector_size(LANES * 2)));

#define INLINE inline __attribute__((always_inline))

INLINE Vf load(const float* p) {
  Vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

INLINE void store(float* p, Vf v) { std::memcpy(p, &v, sizeof v); }

INLINE Vf splat(float x) { return x - Vf{}; }

// bfloat16 is the upper half of a float32.
INLINE Vf load(const uint16_t* p) {
  Vh h;
  std::memcpy(&h, p, sizeof h);
  Vi wide = __builtin_convertvector(h, Vi) << 16;
  return (Vf)wide;
}

INLINE float to_float(float x) { return x; }

INLINE float to_float(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// Round to nearest even, as torch does; NaN stays NaN.
INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// IEEE half precision, for the scales of quantised groups.
INLINE Vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vf v;
  for (int i = 0; i < LANES; ++i) {
    _Float16 h;
    std::memcpy(&h, p + i, sizeof h);
    v[i] = static_cast<float>(h);
  }
  return v;
#endif
}

INLINE Vf maximum(Vf a, Vf b) { return a > b ? a : b; }

// to[i] = from[i] * factor
INLINE void scale(const float* from, float factor, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i) * splat(factor));
  for (; i < count; ++i) to[i] = from[i] * factor;
}

// The vector with lane i + WIDTH in place of lane i.
template <int WIDTH, size_t... I>
INLINE Vf shifted(Vf v, std::index_sequence<I...>) {
  const Vi from = {static_cast<int32_t>((I + WIDTH) % LANES)...};
  return __builtin_shuffle(v, from);
}

// Lane 0 holds the lanes combined in a fixed tree, so a result depends on their values alone.
template <int WIDTH = LANES / 2, class Combine>
INLINE float folded(Vf v, Combine combine) {
  v = combine(v, shifted<WIDTH>(v, std::make_index_sequence<LANES>{}));
  if constexpr (WIDTH > 1) return folded<WIDTH / 2>(v, combine);
  else return v[0];
}

INLINE float sum(Vf v) {
  return folded(v, [](Vf a, Vf b) { return a + b; });
}

INLINE float largest(Vf v) {
  return folded(v, [](Vf a, Vf b) { return maximum(a, b); });
}

// e^x within 2 units in the last place; 0 below the smallest normal result. Cephes' polynomial (S. Moshier) after
// x = n ln 2 + r, |r| <= ln 2 / 2. NaN gives NaN.
INLINE Vf exponential(Vf x) {
  const Vf low = splat(-87.3f), high = splat(88.7f);
  Vi tiny = x < low;
  x = x > high ? high : x;
  x = tiny ? low : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that stands in the low bits.
  Vf shifted = x * 1.44269504088896341f + magic;
  Vf n = shifted - magic;
  Vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Vf y = p * (r * r) + r + 1.0f;
  Vi bits = (Vi)y + ((Vi)shifted << 23);
  return tiny ? Vf{} : (Vf)bits;
}

INLINE Vf silu(Vf x) { return x / (1.0f + exponential(-x)); }

}  // namespace
