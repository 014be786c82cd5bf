// One instruction set's variant of all arithmetic; compiled once for each, with the table's name in PACELINE_ISA.
#include <cmath>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "expand.h"
#include "gemm.h"
#include "kernels.h"
#include "quant.h"
#include "vec.h"

namespace {

void gemm(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const auto run = [&](auto* product) { product(g, row_begin, row_end, panel_begin, panel_end); };
  switch (g.format) {
    case FLOAT32: return run(float_gemm<Floats>);
    case BFLOAT16: return run(float_gemm<Halves>);
    case INT8: return run(g.integer ? integer_gemm<false> : float_gemm<Expanded<false>>);
    default: return run(g.integer ? integer_gemm<true> : float_gemm<Expanded<true>>);
  }
}

INLINE void normalise(const float* x, const float* weight, int64_t size, float epsilon, float* y) {
  Vf squares = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const Vf v = load(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (; i < size; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(size) + epsilon);
  for (i = 0; i + LANES <= size; i += LANES) store(y + i, load(x + i) * splat(scale) * load(weight + i));
  for (; i < size; ++i) y[i] = x[i] * scale * weight[i];
}

// x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467).
void rms_norm(const float* x, int64_t stride, const float* weight, int64_t size, float epsilon, float* y,
              int64_t rows) {
  for (int64_t row = 0; row < rows; ++row)
    normalise(x + row * stride, weight, size, epsilon, y + row * stride);
}

static_assert(MAX_ROWS <= LANES);

void pack_rows(const float* x, int64_t stride, int64_t rows, int64_t size, float* packed) {
  for (int64_t k = 0; k < size; k += LANES) {
    Vf tile[LANES] = {};
#pragma GCC unroll 16
    for (int r = 0; r < MAX_ROWS; ++r)
      if (r < rows) tile[r] = load(x + r * stride + k);
    transpose(tile);
    // A store's lanes past the tile's rows are where the next one goes.
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
      if (k + i < size) store(packed + (k + i) * rows, tile[i]);
  }
}

// The pair of a head's halves turned by angles.
template <class V>
INLINE void turn(V& first, V& second, V cosine, V sine) {
  const V turned = first * cosine - second * sine;
  second = second * cosine + first * sine;
  first = turned;
}

INLINE void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    Vf first = load(head + i), second = load(head + half + i);
    turn(first, second, load(cosines + i), load(sines + i));
    store(head + i, first);
    store(head + half + i, second);
  }
  for (; i < half; ++i) turn(head[i], head[half + i], cosines[i], sines[i]);
}

INLINE void assign(const float* from, int64_t count, float* to) { std::memcpy(to, from, sizeof(float) * count); }

INLINE void assign(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

template <class T>
void rope(const Rope& a, int64_t begin, int64_t end) {
  const int64_t half = a.head_dim / 2, width = a.kv_heads * a.head_dim;
  for (int64_t token = begin; token < end; ++token) {
    float* head = a.qkv + token * a.qkv_stride;
    const int64_t angle = a.positions[token] * half;
    for (int64_t h = 0; h < a.heads + a.kv_heads; ++h, head += a.head_dim) {
      const float* norm = h < a.heads ? a.q_norm : a.k_norm;
      if (norm) normalise(head, norm, a.head_dim, a.epsilon, head);
      if (a.cosines) rotate(head, a.cosines + angle, a.sines + angle, half);
    }
    assign(head - width, width, reinterpret_cast<T*>(a.keys) + a.slots[token] * width);
    assign(head, width, reinterpret_cast<T*>(a.values) + a.slots[token] * width);
  }
}

void rope_any(const Rope& a, int64_t begin, int64_t end) {
  a.half ? rope<uint16_t>(a, begin, end) : rope<float>(a, begin, end);
}

void attention(const Attention& a, const AttentionTask& task, const AttentionTask* then, float* scratch) {
  a.half ? attend<uint16_t>(a, task, then, scratch) : attend<float>(a, task, then, scratch);
}

// use(column, first k, w [GROUP]) for each column's groups of a panel; padding is zero. A cache line of each row at a time:
// the source is read in order. Until `use` returns false.
template <class Use>
bool for_each_group(const float* source, const int64_t* row_of, int64_t inner, Use use) {
  for (int64_t first = 0; first < inner; first += GROUP)
    for (int column = 0; column < PANEL; ++column) {
      float w[GROUP] = {};
      const int64_t count = inner - first < GROUP ? inner - first : GROUP;
      if (row_of[column] >= 0) std::memcpy(w, source + row_of[column] * inner + first, sizeof(float) * count);
      if (!use(column, first, w)) return false;
    }
  return true;
}

void pack(int32_t format, const float* source, const int64_t* row_of, int64_t inner, int64_t panel, uint8_t* packed) {
  packed += panel * panel_bytes(format, inner);
  for_each_group(source, row_of, inner, [&](int column, int64_t first, const float(&w)[GROUP]) {
    if (format == INT8 || format == INT4) {
      pack_group(w, format == INT4, column, packed + first / GROUP * panel_bytes(format, GROUP));
      return true;
    }
    for (int64_t k = first; k < inner && k < first + GROUP; ++k) {
      const int64_t at = k * PANEL + column;
      if (format == FLOAT32) reinterpret_cast<float*>(packed)[at] = w[k - first];
      else reinterpret_cast<uint16_t*>(packed)[at] = to_bf16(w[k - first]);
    }
    return true;
  });
}

bool holds(int32_t format, const float* source, const int64_t* row_of, int64_t inner) {
  return for_each_group(source, row_of, inner,
                        [&](int, int64_t, const float(&w)[GROUP]) { return holds_group(format, w); });
}

// Independent chains of acc = acc * b + c, as many as the registers hold.
double multiply_add(int64_t iterations) {
  Vf acc[MAX_ROWS][VECTORS];
  for (int r = 0; r < MAX_ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = splat(static_cast<float>(r * VECTORS + v));
  const Vf b = splat(0.999f), c = splat(1e-3f);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (int r = 0; r < MAX_ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = acc[r][v] * b + c;
  }
  Vf total = {};
  for (const auto& row : acc)
    for (const Vf& v : row) total += v;
  volatile float keep = sum(total);
  (void)keep;
  return 2.0 * MAX_ROWS * PANEL * static_cast<double>(iterations);
}

float read(const uint8_t* data, int64_t bytes) {
  Vf acc[8] = {};
  const float* p = reinterpret_cast<const float*>(data);
  for (int64_t i = 0; i + 8 * LANES <= bytes / 4; i += 8 * LANES) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      __builtin_prefetch(reinterpret_cast<const uint8_t*>(p + i + v * LANES) + 4096, 0, 2);
      acc[v] += load(p + i + v * LANES);
    }
  }
  Vf total = {};
  for (const Vf& v : acc) total += v;
  return sum(total);
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

}  // namespace

#define TABLE_(isa) paceline_kernels_##isa
#define TABLE(isa) TABLE_(isa)

extern "C" const paceline::Kernels* TABLE(PACELINE_ISA)() {
  static const paceline::Kernels table = {
      TEXT(PACELINE_ISA), DIRECT_ROWS, MAX_ROWS, gemm, rms_norm, pack_rows, quantise_rows, rope_any, attention, pack, holds, multiply_add, read};
  return &table;
}
