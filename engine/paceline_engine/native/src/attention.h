// Attention of one tile of query rows over one sequence's paged context, with online softmax.
//
// Context is taken SPAN positions at a time from multiples of SPAN on, and scores and outputs are sums in a fixed order:
// a row's result is the same in a decode step, in a prefill chunk of any size and beside any other sequence. Positions
// outside the context may hold anything, NaN included; they're replaced by zeros before any arithmetic.
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

// Rows of `count` positions from `begin` on of a sequence's keys or values, as floats [SPAN, stride] in `buffer`; what is
// past the context or the head is zero.
template <class T>
INLINE void gather(const Attention& a, const AttentionTask& task, const uint8_t* pool, int64_t begin, int64_t count,
                   float* buffer, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = begin + i, block = task.block_table[position / a.block_size];
    const int64_t slot = block * a.block_size + position % a.block_size;
    const T* row = reinterpret_cast<const T*>(pool) + (slot * a.kv_heads + task.kv_head) * a.head_dim;
    float* copy = buffer + i * stride;
    int64_t d = 0;
    for (; d + LANES <= a.head_dim; d += LANES) store(copy + d, load(row + d));
    for (; d < a.head_dim; ++d) copy[d] = to_float(row[d]);
    for (; d < stride; ++d) copy[d] = 0.0f;
  }
  std::memset(buffer + count * stride, 0, sizeof(float) * (SPAN - count) * stride);
}

// Keys as panels [SPAN / PANEL][head_dim][PANEL positions].
INLINE void pack_keys(const float* rows, int64_t stride, int64_t head_dim, float* packed) {
  for (int64_t first = 0; first < SPAN; first += LANES) {
    float* panel = packed + first / PANEL * head_dim * PANEL + first % PANEL;
    for (int64_t d = 0; d < head_dim; d += LANES) {
      Vf tile[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) tile[i] = load(rows + (first + i) * stride + d);
      transpose(tile);
      const int64_t count = head_dim - d < LANES ? head_dim - d : LANES;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        if (i < count) store(panel + (d + i) * PANEL, tile[i]);
    }
  }
}

// Scores to unnormalised probabilities; updates a row's maximum and total, leaves the factor for what was summed before.
INLINE void soften(float* score, int64_t from, int64_t to, float& most, float& total, float& factor) {
  for (int64_t i = 0; i < from; ++i) score[i] = -INFINITY;
  for (int64_t i = to; i < SPAN; ++i) score[i] = -INFINITY;
  if (from >= to) {
    for (int i = 0; i < SPAN; i += LANES) store(score + i, Vf{});
    factor = 1.0f;
    return;
  }
  Vf best = load(score);
  for (int i = LANES; i < SPAN; i += LANES) best = maximum(load(score + i), best);
  const float previous = most;
  most = largest(best) > previous ? largest(best) : previous;
  Vf added = {};
  for (int i = 0; i < SPAN; i += LANES) {
    const Vf p = exponential(load(score + i) - splat(most));
    store(score + i, p);
    added += p;
  }
  factor = previous == -INFINITY ? 0.0f : exponential(splat(previous - most))[0];
  total = total * factor + sum(added);
}

template <class T>
void attend(const Attention& a, const AttentionTask& task, float* memory) {
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
    gather<T>(a, task, a.keys, begin, count, s.values, s.value_stride);
    pack_keys(s.values, s.value_stride, a.head_dim, s.keys);
    for (int64_t row = 0; row < num_rows; ++row)
      std::memset(s.scores + row * s.score_stride, 0, sizeof(float) * SPAN);
    for (int64_t first = 0; first < count; first += PANEL)
      multiply(s.queries, s.query_stride, num_rows, a.head_dim, s.keys + first * a.head_dim, PANEL, s.scores + first,
               s.score_stride);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t last = position_of(row) + 1 - begin, start = a.window ? last - a.window : 0;
      soften(s.scores + row * s.score_stride, start > 0 ? (start < SPAN ? start : SPAN) : 0,
             last < SPAN ? (last > 0 ? last : 0) : SPAN, s.most[row], s.total[row], s.factor[row]);
    }
    gather<T>(a, task, a.values, begin, count, s.values, s.value_stride);
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
