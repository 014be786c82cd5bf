// Products of a few rows of activations with packed panels of weights.
#pragma once

#include <array>
#include <utility>

#include "kernels.h"
#include "vec.h"

namespace {

using namespace paceline;

constexpr int VECTORS = PANEL / LANES;  // of one panel row

// Rows whose sums fit in the registers beside a panel row.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 3;
#elif defined(__aarch64__)
constexpr int MAX_ROWS = 2;
#else
constexpr int MAX_ROWS = 1;
#endif

// Rows that are computed straight from packed weights of any format; more of them are packed too.
#if defined(__AVX512F__)
constexpr int DIRECT_ROWS = 8;
#else
constexpr int DIRECT_ROWS = 1;
#endif

// Weights to fetch into the second-level cache while others are computed with: `step` bytes from `at` on for each k.
// One panel's computation fetches the next panel, so that memory and arithmetic work at the same time.
struct Ahead {
  const uint8_t* at;
  int64_t step;
};

// The part of the panel at `next` that pass `pass` of `passes` over the present one fetches in `iterations` steps.
INLINE Ahead ahead_of(const uint8_t* next, int64_t bytes, int64_t pass, int64_t passes, int64_t iterations) {
  return {next + bytes * pass / passes, bytes / passes / iterations};
}

template <class T>
INLINE void load_row(const T* w, Vf (&b)[VECTORS]) {
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) b[v] = load(w + v * LANES);
}

// y[r, 0:PANEL] += sum over k in order of x[r, k] * w[k, 0:PANEL]. Out of line: each height is compiled once.
template <int ROWS, class T>
__attribute__((noinline)) void tile(const float* x, int64_t x_stride, int64_t inner, const T* w, int64_t w_stride,
                                    float* y, int64_t y_stride, Ahead ahead) {
  Vf acc[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(y + r * y_stride + v * LANES);
#pragma GCC unroll 2
  for (int64_t k = 0; k < inner; ++k, w += w_stride, ahead.at += ahead.step) {
    __builtin_prefetch(ahead.at, 0, 2);
    __builtin_prefetch(ahead.at + 64, 0, 2);
    Vf b[VECTORS];
    load_row(w, b);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Vf a = splat(x[r * x_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) acc[r][v] += a * b[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(y + r * y_stride + v * LANES, acc[r][v]);
}

// The same of rows packed as [inner][ROWS], so that few registers address many rows; sums are [ROWS, PANEL].
template <int ROWS>
__attribute__((noinline)) void packed_tile(const float* x, int64_t inner, const float* w, float* sums, Ahead ahead) {
  Vf acc[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(sums + r * PANEL + v * LANES);
#pragma GCC unroll 4
  for (int64_t k = 0; k < inner; ++k, w += PANEL, x += ROWS, ahead.at += ahead.step) {
    __builtin_prefetch(ahead.at, 0, 2);
    Vf b[VECTORS];
    load_row(w, b);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Vf a = splat(x[r]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) acc[r][v] += a * b[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(sums + r * PANEL + v * LANES, acc[r][v]);
}

template <class T>
using Tile = void (*)(const float*, int64_t, int64_t, const T*, int64_t, float*, int64_t, Ahead);

template <class T, int... N>
constexpr auto tile_table(std::integer_sequence<int, N...>) {
  return std::array<Tile<T>, sizeof...(N)>{tile<N + 1, T>...};
}

// Entry n - 1 takes n rows.
template <class T>
constexpr auto TILES = tile_table<T>(std::make_integer_sequence<int, MAX_ROWS>{});

using PackedTile = void (*)(const float*, int64_t, const float*, float*, Ahead);

template <int... N>
constexpr auto packed_tile_table(std::integer_sequence<int, N...>) {
  return std::array<PackedTile, sizeof...(N)>{packed_tile<N + 1>...};
}

constexpr auto PACKED_TILES = packed_tile_table(std::make_integer_sequence<int, MAX_ROWS>{});

// Height of the next tile when `left` rows remain: tiles of nearly equal height, each at most `limit`.
INLINE int64_t next_rows(int64_t left, int64_t limit) {
  const int64_t tiles = (left + limit - 1) / limit;
  return (left + tiles - 1) / tiles;
}

// y [rows, PANEL] += x [rows, inner] w [inner, PANEL].
template <class T>
INLINE void multiply(const float* x, int64_t x_stride, int64_t rows, int64_t inner, const T* w, int64_t w_stride,
                     float* y, int64_t y_stride) {
  for (int64_t row = 0, count; row < rows; row += count) {
    count = next_rows(rows - row, MAX_ROWS);
    TILES<T>[count - 1](x + row * x_stride, x_stride, inner, w, w_stride, y + row * y_stride, y_stride,
                        {reinterpret_cast<const uint8_t*>(w), 0});
  }
}

// From the sums of one panel [rows, PANEL] to y's rows [row, row + rows).
INLINE void finish(const Gemm& g, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  const bool glu = g.epilogue == GLU;
  const int64_t width = glu ? PANEL / 2 : PANEL, columns = glu ? g.columns / 2 : g.columns;
  const int64_t first = panel * width, count = columns - first < width ? columns - first : width;
  float bias[PANEL] = {};
  if (g.bias) std::memcpy(bias, g.bias + first, sizeof(float) * count);
  if (g.bias && glu) std::memcpy(bias + PANEL / 2, g.bias + columns + first, sizeof(float) * count);
  for (int64_t r = 0; r < rows; ++r, sums += PANEL) {
    float* y = g.y + (row + r) * g.y_stride + first;
    float edge[PANEL] = {};
    float* target = count == width ? y : edge;
    if (g.epilogue == ADD && target == edge) std::memcpy(edge, y, sizeof(float) * count);
    for (int64_t i = 0; i < width; i += LANES) {
      Vf value = load(sums + i) + load(bias + i);
      if (glu) value = silu(value) * (load(sums + i + PANEL / 2) + load(bias + i + PANEL / 2));
      store(target + i, g.epilogue == ADD ? load(target + i) + value : value);
    }
    if (target == edge) std::memcpy(y, edge, sizeof(float) * count);
  }
}

// Activations of these many k and the weights of as many stay in the first-level cache while rows go by.
constexpr int64_t BLOCK = 192;
// Rows of one call of `gemm`: their sums stay in the first-level cache.
static_assert(GEMM_ROWS * PANEL * sizeof(float) <= 16384);

// Weights in the format that they are computed in: nothing to expand.
struct Floats {
  static const float* expand(const uint8_t* panel, int64_t begin, int64_t, float*) {
    return reinterpret_cast<const float*>(panel) + begin * PANEL;
  }
  static void direct(const Gemm& g, int64_t row, int64_t rows, const uint8_t* panel, float* sums, Ahead ahead) {
    TILES<float>[rows - 1](g.x + row * g.x_stride, g.x_stride, g.inner, reinterpret_cast<const float*>(panel), PANEL,
                           sums, PANEL, ahead);
  }
};

struct Halves {
  static const float* expand(const uint8_t* panel, int64_t begin, int64_t count, float* block) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(panel) + begin * PANEL;
    for (int64_t i = 0; i < count * PANEL; i += LANES) store(block + i, load(w + i));
    return block;
  }
  static void direct(const Gemm& g, int64_t row, int64_t rows, const uint8_t* panel, float* sums, Ahead ahead) {
    TILES<uint16_t>[rows - 1](g.x + row * g.x_stride, g.x_stride, g.inner, reinterpret_cast<const uint16_t*>(panel),
                              PANEL, sums, PANEL, ahead);
  }
};

// A panel's sums for all rows of the call. Few rows are computed straight from the packed weights; for more, a block of
// weights at a time becomes floats that all rows then use. Either way a sum is the same chain of multiply-adds.
template <class Weights>
void float_gemm(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const int64_t bytes = panel_bytes(g.format, g.inner), rows = row_end - row_begin;
  alignas(64) float block[BLOCK * PANEL];
  alignas(64) float sums[GEMM_ROWS * PANEL];
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const uint8_t *w = g.weights + panel * bytes, *next = w + bytes;
    std::memset(sums, 0, sizeof(float) * rows * PANEL);
    if (!g.height) {
      Weights::direct(g, row_begin, rows, w, sums, {next, bytes / g.inner});
      finish(g, row_begin, rows, panel, sums);
      continue;
    }
    // Rounded up: a line that isn't fetched ahead costs more than one that is fetched twice.
    const int64_t fetches = g.inner * ((rows + g.height - 1) / g.height), step = (bytes + fetches - 1) / fetches;
    for (int64_t k = 0; k < g.inner; k += BLOCK) {
      const int64_t count = g.inner - k < BLOCK ? g.inner - k : BLOCK;
      const float* expanded = Weights::expand(w, k, count, block);
      for (int64_t row = 0; row < rows; row += g.height, next += step * count) {
        const int64_t height = rows - row < g.height ? rows - row : g.height;
        const float* x = g.x + (row_begin + row) / g.height * packed_rows(g.height, g.inner) + k * height;
        PACKED_TILES[height - 1](x, count, expanded, sums + row * PANEL, {next, step});
      }
    }
    finish(g, row_begin, rows, panel, sums);
  }
}

}  // namespace
