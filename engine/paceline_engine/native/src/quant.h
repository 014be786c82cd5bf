// The same products with 8-bit or 4-bit weights and 8-bit activations, exact in integers within each group of GROUP.
//
// Weights are unsigned and activations signed, as the CPUs' dot products want them. 8 bits: scale * (q - 128). 4 bits:
// scale * q + minimum, the form of GGUF's Q4_1, whose weights it holds exactly. The sum of a group's activations gives
// what 128 and the minimum add.
#pragma once

#include <cmath>

#include "gemm.h"

namespace {

#if defined(__AVX512F__)
constexpr int MAX_QUANTISED_ROWS = 6;
#elif defined(__AVX2__)
constexpr int MAX_QUANTISED_ROWS = 1;
#else
constexpr int MAX_QUANTISED_ROWS = 1;
#endif

constexpr int QUADS = GROUP / 4;

// acc[lane] += sum over 4 bytes of w[lane] (unsigned) * x (signed). SMALL: w < 16.
template <bool SMALL>
INLINE Vi dot(Vi acc, Vi w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  const __m256i a = (__m256i)w, b = _mm256_set1_epi32(x);
  if constexpr (SMALL) {
    const __m256i pairs = _mm256_maddubs_epi16(a, b);
    return acc + (Vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  // maddubs would saturate: products of even and odd bytes are taken in 16 bits.
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return acc + (Vi)_mm256_add_epi32(even, odd);
#else
  for (int i = 0; i < LANES; ++i)
    for (int byte = 0; byte < 4; ++byte)
      acc[i] += static_cast<int32_t>(static_cast<uint32_t>(w[i]) >> (8 * byte) & 255) *
                static_cast<int8_t>(static_cast<uint32_t>(x) >> (8 * byte));
  return acc;
#endif
}

INLINE Vi load_bytes(const uint8_t* p) {
  Vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// One group: integer sums of ROWS rows with one panel's group.
template <int ROWS, bool SMALL>
INLINE void group_sums(const int8_t* x, int64_t stride, const uint8_t* w, Vi (&acc)[ROWS][VECTORS]) {
  const auto quad_of = [&](int r, int quad) {
    int32_t packed;
    std::memcpy(&packed, x + r * stride + 4 * quad, 4);
    return packed;
  };
#pragma GCC unroll 8
  for (int quad = 0; quad < (SMALL ? QUADS / 2 : QUADS); ++quad) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const Vi bytes = load_bytes(w + (quad * PANEL + v * LANES) * 4);
      if constexpr (SMALL) {
        const Vi low = bytes & 0x0f0f0f0f, high = (bytes >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          acc[r][v] = dot<true>(acc[r][v], low, quad_of(r, quad));
          acc[r][v] = dot<true>(acc[r][v], high, quad_of(r, quad + QUADS / 2));
        }
      } else {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) acc[r][v] = dot<false>(acc[r][v], bytes, quad_of(r, quad));
      }
    }
  }
}

// Sums of ROWS rows with one panel, [ROWS, PANEL].
template <int ROWS, bool SMALL>
__attribute__((noinline)) void integer_tile(const QuantisedRows& x, int64_t row, int64_t groups, const uint8_t* w,
                                            float* y, Ahead ahead) {
  constexpr int64_t head = SMALL ? PANEL * 4 : PANEL * 2;
  constexpr int64_t group_bytes = head + (SMALL ? PANEL * GROUP / 2 : PANEL * GROUP);
  const int64_t stride = groups * GROUP;
  const int8_t* values = x.values + row * stride;
  Vf acc[ROWS][VECTORS] = {};
  for (int64_t group = 0; group < groups; ++group, w += group_bytes, values += GROUP, ahead.at += ahead.step) {
    for (int64_t i = 0; i < ahead.step; i += 64) __builtin_prefetch(ahead.at + i, 0, 2);
    Vi sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const int32_t zero = SMALL ? 0 : -128 * x.sums[(row + r) * groups + group];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = zero - Vi{};
    }
    group_sums<ROWS, SMALL>(values, stride, w + head, sums);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const Vf scale = load_half(reinterpret_cast<const uint16_t*>(w) + v * LANES);
      const Vf minimum = SMALL ? load_half(reinterpret_cast<const uint16_t*>(w) + PANEL + v * LANES) : Vf{};
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const int64_t at = (row + r) * groups + group;
        Vf value = __builtin_convertvector(sums[r][v], Vf) * scale;
        if constexpr (SMALL) value += minimum * splat(static_cast<float>(x.sums[at]));
        acc[r][v] += value * splat(x.scales[at]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(y + r * PANEL + v * LANES, acc[r][v]);
}

using IntegerTile = void (*)(const QuantisedRows&, int64_t, int64_t, const uint8_t*, float*, Ahead);

template <bool SMALL, int... N>
constexpr auto integer_table(std::integer_sequence<int, N...>) {
  return std::array<IntegerTile, sizeof...(N)>{integer_tile<N + 1, SMALL>...};
}

template <bool SMALL>
constexpr auto INTEGER_TILES = integer_table<SMALL>(std::make_integer_sequence<int, MAX_QUANTISED_ROWS>{});

template <bool SMALL>
void integer_gemm(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const int64_t groups = (g.inner + GROUP - 1) / GROUP;
  const int64_t bytes = panel_bytes(SMALL ? INT4 : INT8, g.inner);
  const int64_t passes = (row_end - row_begin + MAX_QUANTISED_ROWS - 1) / MAX_QUANTISED_ROWS;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const uint8_t* w = g.weights + panel * bytes;
    int64_t pass = 0;
    for (int64_t row = row_begin, count; row < row_end; row += count, ++pass) {
      count = next_rows(row_end - row, MAX_QUANTISED_ROWS);
      float sums[MAX_QUANTISED_ROWS * PANEL];
      INTEGER_TILES<SMALL>[count - 1](g.quantised, row, groups, w, sums,
                                      ahead_of(w + bytes, bytes, pass, passes, groups));
      finish(g, row, count, panel, sums);
    }
  }
}

// Symmetric, group by group: scale = largest magnitude / 127.
void quantise_rows(const float* x, int64_t x_stride, int64_t size, const QuantisedRows& to, int64_t begin,
                   int64_t end) {
  const int64_t groups = (size + GROUP - 1) / GROUP;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t group = 0; group < groups; ++group) {
      float values[GROUP] = {};
      const int64_t count = size - group * GROUP < GROUP ? size - group * GROUP : GROUP;
      std::memcpy(values, x + row * x_stride + group * GROUP, sizeof(float) * count);
      Vf most = {};
      for (int i = 0; i < GROUP; i += LANES) {
        const Vf v = load(values + i);
        most = maximum(most, maximum(v, -v));
      }
      const float magnitude = largest(most), scale = magnitude / 127.0f;
      // A row that isn't finite must not come out as zeros: its scale carries the NaN or infinity on.
      float probe = 0.0f;
      for (int i = 0; i < GROUP; ++i) probe += values[i] * 0.0f;
      const float inverse = magnitude > 0.0f && probe == 0.0f ? 127.0f / magnitude : 0.0f;
      int8_t* q = to.values + (row * groups + group) * GROUP;
      int32_t total = 0;
      for (int i = 0; i < GROUP; ++i) {
        const float shifted = values[i] * inverse + 12582912.0f;  // Rounds to the nearest integer, as in vec.h.
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        q[i] = static_cast<int8_t>(bits & 255);
        total += q[i];
      }
      to.scales[row * groups + group] = probe == 0.0f ? scale : probe;
      to.sums[row * groups + group] = total;
    }
}

INLINE uint16_t half_bits(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}

INLINE float half_value(uint16_t bits) {
  _Float16 h;
  std::memcpy(&h, &bits, 2);
  return static_cast<float>(h);
}

struct Scale {
  float scale, minimum;
};

// Squared error of a group under `tried`.
inline float error_of(const float (&w)[GROUP], Scale tried) {
  float error = 0.0f;
  for (float x : w) {
    const float q = std::fmin(15.0f, std::fmax(0.0f, std::nearbyint((x - tried.minimum) / tried.scale)));
    const float off = x - (q * tried.scale + tried.minimum);
    error += off * off;
  }
  return error;
}

// What q = 0 ... 15 stand for: from the smallest to the largest weight, or a somewhat narrower range if that has the
// smaller squared error. Weights that were dequantised from GGUF's Q4_1, or from its Q4_0, where the largest magnitude
// is -8, are found again.
inline Scale four_bit_scale(const float (&w)[GROUP]) {
  float low = w[0], high = w[0];
  for (float x : w) low = std::fmin(low, x), high = std::fmax(high, x);
  Scale best{0.0f, half_value(half_bits(low))};
  float least = INFINITY;
  const auto take = [&](Scale tried) {
    const float error = tried.scale != 0.0f ? error_of(w, tried) : INFINITY;
    if (error < least) least = error, best = tried;
  };
  take({half_value(half_bits((high - low) / 15.0f)), half_value(half_bits(low))});
  const float largest = -low > high ? low : high;
  if (least > 0.0f) take({half_value(half_bits(largest / -8.0f)), half_value(half_bits(largest))});
  for (int step = 1; step <= 6 && least > 0.0f; ++step) {
    const float cut = 0.02f * step * (high - low);
    take({half_value(half_bits((high - low - 2 * cut) / 15.0f)), half_value(half_bits(low + cut))});
  }
  return best;
}

// One column's group of weights into its place in a packed group.
inline void pack_group(const float (&w)[GROUP], bool small, int column, uint8_t* group) {
  float magnitude = 0.0f;
  for (float x : w) magnitude = std::fmax(magnitude, std::fabs(x));
  const Scale fit = small ? four_bit_scale(w) : Scale{half_value(half_bits(magnitude / 127.0f)), 0.0f};
  const uint16_t scale = half_bits(fit.scale), minimum = half_bits(fit.minimum);
  std::memcpy(group + 2 * column, &scale, 2);
  if (small) std::memcpy(group + 2 * (PANEL + column), &minimum, 2);
  uint8_t* values = group + (small ? PANEL * 4 : PANEL * 2);
  for (int k = 0; k < GROUP; ++k) {
    const float exact = fit.scale != 0.0f ? std::nearbyint((w[k] - fit.minimum) / fit.scale) : 0.0f;
    const int quad = k / 4, byte = k % 4;
    if (small) {
      const int q = static_cast<int>(std::fmin(15.0f, std::fmax(0.0f, exact)));
      uint8_t& at = values[((quad % (QUADS / 2)) * PANEL + column) * 4 + byte];
      at = static_cast<uint8_t>(quad < QUADS / 2 ? (at & 0xf0) | q : (at & 0x0f) | q << 4);
    } else {
      values[(quad * PANEL + column) * 4 + byte] =
          static_cast<uint8_t>(static_cast<int>(std::fmin(127.0f, std::fmax(-127.0f, exact))) + 128);
    }
  }
}

}  // namespace
