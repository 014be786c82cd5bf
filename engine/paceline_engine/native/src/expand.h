// The quantised formats as floats: what a checkpoint's 4- or 8-bit weights stand for, exactly.
//
// Every scale has 11 bits and every integer at most 8, so their product is exact and a minimum adds one rounding: the
// same float that dequantising the checkpoint gives.
#pragma once

#include "gemm.h"
#include "quant.h"

namespace {

// The lowest 4 (SMALL) or 8 bits of each lane as a float; bits above are ignored.
template <bool SMALL>
INLINE Vf low_bits(Vi v) {
#if defined(__AVX512F__)
  if constexpr (SMALL) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (Vf)_mm512_permutexvar_ps((__m512i)v, numbers);
  }
#endif
  return __builtin_convertvector(v & (SMALL ? 15 : 255), Vf);
}

// use(k, w) for each k of a group in order; w is the group's row k of the panel.
template <bool SMALL, class Use>
INLINE void for_each_row(const uint8_t* group, Use use) {
  const uint8_t* values = group + (SMALL ? PANEL * 4 : PANEL * 2);
  Vf scale[VECTORS], minimum[VECTORS];
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) {
    scale[v] = load_half(reinterpret_cast<const uint16_t*>(group) + v * LANES);
    minimum[v] = SMALL ? load_half(reinterpret_cast<const uint16_t*>(group) + PANEL + v * LANES) : scale[v] * -128.0f;
  }
#pragma GCC unroll 8
  for (int quad = 0; quad < QUADS; ++quad) {
    Vi bytes[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const int place = SMALL ? quad % (QUADS / 2) : quad;
      bytes[v] = load_bytes(values + (place * PANEL + v * LANES) * 4) >> (SMALL && quad >= QUADS / 2 ? 4 : 0);
    }
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; ++byte) {
      Vf w[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) w[v] = low_bits<SMALL>(bytes[v] >> 8 * byte) * scale[v] + minimum[v];
      use(4 * quad + byte, w);
    }
  }
}

template <bool SMALL>
constexpr int64_t GROUP_BYTES = SMALL ? PANEL * 4 + PANEL * GROUP / 2 : PANEL * 2 + PANEL * GROUP;

// Sums [ROWS, PANEL] of x's rows with a panel.
template <int ROWS, bool SMALL>
__attribute__((noinline)) void expanded_tile(const float* x, int64_t x_stride, int64_t inner, const uint8_t* w,
                                             float* y, Ahead ahead) {
  Vf acc[ROWS][VECTORS] = {};
  for (int64_t first = 0; first < inner; first += GROUP, w += GROUP_BYTES<SMALL>, ahead.at += ahead.step) {
    for (int64_t i = 0; i < ahead.step; i += 64) __builtin_prefetch(ahead.at + i, 0, 2);
    const auto add = [&](int k, const Vf(&row)[VECTORS]) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const Vf a = splat(x[r * x_stride + first + k]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) acc[r][v] += a * row[v];
      }
    };
    if (inner - first >= GROUP) {
      for_each_row<SMALL>(w, add);
      continue;
    }
    for_each_row<SMALL>(w, [&](int k, const Vf(&row)[VECTORS]) {
      if (k < inner - first) add(k, row);
    });
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(y + r * PANEL + v * LANES, acc[r][v]);
}

using ExpandedTile = void (*)(const float*, int64_t, int64_t, const uint8_t*, float*, Ahead);

template <bool SMALL, int... N>
constexpr auto expanded_table(std::integer_sequence<int, N...>) {
  return std::array<ExpandedTile, sizeof...(N)>{expanded_tile<N + 1, SMALL>...};
}

template <bool SMALL>
constexpr auto EXPANDED_TILES = expanded_table<SMALL>(std::make_integer_sequence<int, DIRECT_ROWS>{});

// Weights for float_gemm.
template <bool SMALL>
struct Expanded {
  static const float* expand(const uint8_t* panel, int64_t begin, int64_t count, float* block) {
    for (int64_t first = 0; first < count; first += GROUP)
      for_each_row<SMALL>(panel + (begin + first) / GROUP * GROUP_BYTES<SMALL>, [&](int k, const Vf(&row)[VECTORS]) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(block + (first + k) * PANEL + v * LANES, row[v]);
      });
    return block;
  }
  static void direct(const Gemm& g, int64_t row, int64_t rows, const uint8_t* panel, float* sums, Ahead ahead) {
    EXPANDED_TILES<SMALL>[rows - 1](g.x + row * g.x_stride, g.x_stride, g.inner, panel, sums,
                                    {ahead.at, ahead.step * GROUP});
  }
};

// Whether a packed group of this format stands for exactly these weights of a column.
inline bool holds_group(int32_t format, const float (&w)[GROUP]) {
  if (format == FLOAT32) return true;
  if (format == BFLOAT16) {
    for (float x : w)
      if (to_float(to_bf16(x)) != x) return false;
    return true;
  }
  uint8_t group[GROUP_BYTES<false>];
  float expanded[GROUP * PANEL];
  pack_group(w, format == INT4, 0, group);
  const auto keep = [&](int k, const Vf(&row)[VECTORS]) { store(expanded + k * PANEL, row[0]); };
  format == INT4 ? for_each_row<true>(group, keep) : for_each_row<false>(group, keep);
  for (int k = 0; k < GROUP; ++k)
    if (expanded[k * PANEL] != w[k]) return false;
  return true;
}

}  // namespace
