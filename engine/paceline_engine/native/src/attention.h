// Attention of one tile of query rows over one sequence's paged context, with online softmax.
//
// Context is taken SPAN positions at a time from multiples of SPAN on, and scores and outputs are sums in a fixed order:
// a row's result is the same in a decode step, in a prefill chunk of any size and beside any other sequence. Positions
// outside the context may hold anything, NaN included: their scores are overwritten, their values never read.
// Online softmax: Milakov and Gimelshein, arXiv 1805.02867; tiling: Dao et al., arXiv 2205.14135.
#pragma once

#include <cmath>
#include <utility>

#include "gemm.h"

namespace {

template <int STEP, size_t... I>
INLINE void exchange(Vf& a, Vf& b, std::index_sequence<I...>) {
  const Vi first = {static_cast<int32_t>(I & STEP ? LANES + I - STEP : I)...};
  const Vi second = {static_cast<int32_t>(I & STEP ? LANES + I : I + STEP)...};
  const Vf low = __builtin_shuffle(a, b, first);
  b = __builtin_shuffle(a, b, second);
  a = low;
}

template <int STEP = 1>
INLINE void transpose(Vf (&v)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & STEP)) exchange<STEP>(v[i], v[i + STEP], std::make_index_sequence<LANES>{});
  if constexpr (STEP * 2 < LANES) transpose<STEP * 2>(v);
}

struct Scratch {
  float *queries, *output, *scores, *keys, *values, *most, *total, *factor;
  int64_t query_stride, output_stride, score_stride, value_stride;

  Scratch(float* at, int64_t head_dim) {
    query_stride = head_dim + ROW_PADDING;
    output_stride = panels(head_dim) * PANEL;
    score_stride = SPAN + ROW_PADDING;
    value_stride = panels(head_dim) * PANEL;
    const auto take = [&at](int64_t count) { return std::exchange(at, at + (count + 15) / 16 * 16); };
    keys = take(SPAN * value_stride);
    values = take(SPAN * value_stride);
    output = take(ATTENTION_ROWS * output_stride);
    scores = take(ATTENTION_ROWS * score_stride);
    queries = take(ATTENTION_ROWS * query_stride);
    most = take(ATTENTION_ROWS);
    total = take(ATTENTION_ROWS);
    factor = take(ATTENTION_ROWS);
  }
};

// Where in a pool, in values, the head's rows of `count` positions from `begin` on stand.
INLINE void locate(const Attention& a, const AttentionTask& task, int64_t begin, int64_t count, int64_t (&at)[SPAN]) {
  const int64_t size = a.block_size, heads = a.kv_heads, head_dim = a.head_dim;
  const int64_t* block = task.block_table + begin / size;
  int64_t offset = begin % size;
  for (int64_t i = 0; i < count; ++i, ++offset) {
    if (offset == size) offset = 0, ++block;
    at[i] = ((*block * size + offset) * heads + task.kv_head) * head_dim;
  }
}

// Fetches the lines of one row.
template <class T>
INLINE void fetch(const T* row, int64_t head_dim) {
  const char* line = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < head_dim * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(line + i, 0, 2);
}

// Values as floats [count, stride] in `buffer`; what is past the head is zero.
template <class T>
INLINE void gather(const T* pool, const int64_t (&at)[SPAN], int64_t count, int64_t head_dim, float* buffer,
                   int64_t stride) {
  for (int64_t i = 0; i < count; ++i, buffer += stride) {
    const T* row = pool + at[i];
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) store(buffer + d, load(row + d));
    for (; d < head_dim; ++d) buffer[d] = to_float(row[d]);
    for (; d < stride; ++d) buffer[d] = 0.0f;
  }
}

// Keys as panels [SPAN / PANEL][head_dim][PANEL positions]; columns past `count` hold anything.
template <class T>
INLINE void pack_keys(const T* pool, const int64_t (&at)[SPAN], int64_t count, int64_t head_dim, float* packed) {
  for (int64_t first = 0; first < count; first += LANES) {
    const int64_t rows = count - first < LANES ? count - first : LANES;
    float* panel = packed + first / PANEL * head_dim * PANEL + first % PANEL;
    for (int64_t d = 0; d < head_dim; d += LANES) {
      Vf tile[LANES];
      const int64_t width = head_dim - d < LANES ? head_dim - d : LANES;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        // Past the end a row is taken again.
        const T* row = pool + at[first + (i < rows ? i : 0)] + d;
        if (width == LANES) {
          tile[i] = load(row);
          continue;
        }
        T part[LANES] = {};
        std::memcpy(part, row, sizeof(T) * width);
        tile[i] = load(part);
      }
      transpose(tile);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        if (i < width) store(panel + (d + i) * PANEL, tile[i]);
    }
  }
}

// Scores of a span's first `count` positions, of which a row sees [from, to), to unnormalised probabilities; updates the
// row's maximum and total, leaves the factor for what was summed before.
INLINE void soften(float* score, int64_t from, int64_t to, int64_t count, float& most, float& total, float& factor) {
  const int64_t end = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = 0; i < from; ++i) score[i] = -INFINITY;
  for (int64_t i = to; i < end; ++i) score[i] = -INFINITY;
  if (from >= to) {
    for (int64_t i = 0; i < end; i += LANES) store(score + i, Vf{});
    factor = 1.0f;
    return;
  }
  Vf best = load(score);
  for (int64_t i = LANES; i < end; i += LANES) best = maximum(load(score + i), best);
  const float previous = most, now = largest(best);
  most = now > previous ? now : previous;
  Vf added = {};
  for (int64_t i = 0; i < end; i += LANES) {
    const Vf p = exponential(load(score + i) - splat(most));
    store(score + i, p);
    added += p;
  }
  factor = previous == -INFINITY ? 0.0f : exponential(splat(previous - most))[0];
  total = total * factor + sum(added);
}

template <class T>
void attend(const Attention& a, const AttentionTask& task, float* memory) {
  const T *keys = reinterpret_cast<const T*>(a.keys), *values = reinterpret_cast<const T*>(a.values);
  const Scratch s(memory, a.head_dim);
  const int64_t group = a.heads / a.kv_heads, num_rows = (task.end - task.begin) * group;
  const auto position_of = [&](int64_t row) { return a.positions[task.begin + row / group]; };
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* q = a.qkv + (task.begin + row / group) * a.qkv_stride +
                     (task.kv_head * group + row % group) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; ++d) s.queries[row * s.query_stride + d] = q[d] * a.scale;
    s.most[row] = -INFINITY;
    s.total[row] = 0.0f;
  }
  std::memset(s.output, 0, sizeof(float) * num_rows * s.output_stride);
  const int64_t context = position_of(num_rows - 1) + 1;
  const int64_t oldest = a.window ? position_of(0) + 1 - a.window : 0;
  for (int64_t begin = oldest > 0 ? oldest / SPAN * SPAN : 0; begin < context; begin += SPAN) {
    const int64_t count = context - begin < SPAN ? context - begin : SPAN;
    int64_t at[SPAN];
    locate(a, task, begin, count, at);
    for (int64_t i = 0; i < count; ++i) fetch(values + at[i], a.head_dim);
    pack_keys(keys, at, count, a.head_dim, s.keys);
    for (int64_t row = 0; row < num_rows; ++row)
      std::memset(s.scores + row * s.score_stride, 0, sizeof(float) * SPAN);
    for (int64_t first = 0; first < count; first += PANEL)
      multiply(s.queries, s.query_stride, num_rows, a.head_dim, s.keys + first * a.head_dim, PANEL, s.scores + first,
               s.score_stride);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t last = position_of(row) + 1 - begin, start = a.window ? last - a.window : 0;
      soften(s.scores + row * s.score_stride, start > 0 ? (start < count ? start : count) : 0,
             last < count ? (last > 0 ? last : 0) : count, count, s.most[row], s.total[row], s.factor[row]);
    }
    gather(values, at, count, a.head_dim, s.values, s.value_stride);
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t d = 0; d < s.output_stride; d += LANES) {
        float* at = s.output + row * s.output_stride + d;
        store(at, load(at) * splat(s.factor[row]));
      }
    for (int64_t first = 0; first < a.head_dim; first += PANEL)
      multiply(s.scores, s.score_stride, num_rows, count, s.values + first, s.value_stride, s.output + first,
               s.output_stride);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    float* out = a.out + (task.begin + row / group) * a.out_stride +
                 (task.kv_head * group + row % group) * a.head_dim;
    const float inverse = 1.0f / s.total[row];
    for (int64_t d = 0; d < a.head_dim; ++d) out[d] = s.output[row * s.output_stride + d] * inverse;
  }
}

}  // namespace
