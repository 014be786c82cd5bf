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

// Where keys and values of one span stand in a pool, in values: the task's heads of `count` positions from `begin` on.
struct Span {
  int64_t begin, count, at[SPAN];
};

INLINE void locate(const Attention& a, const AttentionTask& task, int64_t begin, Span& span) {
  const int64_t context = a.positions[task.end - 1] + 1, size = a.block_size;
  const int64_t* block = task.block_table + begin / size;
  int64_t offset = begin % size;
  span.begin = begin;
  span.count = context - begin < SPAN ? context - begin : SPAN;
  for (int64_t i = 0; i < span.count; ++i, ++offset) {
    if (offset == size) offset = 0, ++block;
    span.at[i] = ((*block * size + offset) * a.kv_heads + task.first_head) * a.head_dim;
  }
}

INLINE void locate_first(const Attention& a, const AttentionTask& task, Span& span) {
  const int64_t oldest = a.window ? a.positions[task.begin] + 1 - a.window : 0;
  locate(a, task, oldest > 0 ? oldest / SPAN * SPAN : 0, span);
}

// A span's rows to fetch into the second-level cache, a few at a time: memory works while another span is computed with.
template <class T>
struct Fetch {
  const T* pool;
  const Span& span;
  int64_t width, row = 0;

  // Up to row `end`, if there are so many.
  INLINE void reach(int64_t end) {
    for (; row < end && row < span.count; ++row) {
      const char* line = reinterpret_cast<const char*>(pool + span.at[row]);
      for (int64_t i = 0; i < width * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(line + i, 0, 2);
    }
  }
};

// One head's values of a span as floats [count, stride] in `buffer`; what is past the head is zero. Fetches up to row
// `end` meanwhile.
template <class T>
INLINE void gather(const T* pool, const Span& span, int64_t head_dim, float* buffer, int64_t stride, Fetch<T>& fetch,
                   int64_t end) {
  const int64_t fetched = fetch.row;
  for (int64_t i = 0; i < span.count; ++i, buffer += stride) {
    const T* row = pool + span.at[i];
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) store(buffer + d, load(row + d));
    for (; d < head_dim; ++d) buffer[d] = to_float(row[d]);
    for (; d < stride; ++d) buffer[d] = 0.0f;
    fetch.reach(fetched + (end - fetched) * (i + 1) / span.count);
  }
}

// One head's keys as panels [SPAN / PANEL][head_dim][PANEL positions]; columns past the span's hold anything. Fetches up
// to row `end` meanwhile.
template <class T>
INLINE void pack_keys(const T* pool, const Span& span, int64_t head_dim, float* packed, Fetch<T>& fetch, int64_t end) {
  const int64_t fetched = fetch.row, tiles = (span.count + LANES - 1) / LANES * ((head_dim + LANES - 1) / LANES);
  int64_t done = 0;
  for (int64_t first = 0; first < span.count; first += LANES) {
    const int64_t rows = span.count - first < LANES ? span.count - first : LANES;
    float* panel = packed + first / PANEL * head_dim * PANEL + first % PANEL;
    for (int64_t d = 0; d < head_dim; d += LANES) {
      Vf tile[LANES];
      const int64_t width = head_dim - d < LANES ? head_dim - d : LANES;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        // Past the end a row is taken again.
        const T* row = pool + span.at[first + (i < rows ? i : 0)] + d;
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
      fetch.reach(fetched + (end - fetched) * ++done / tiles);
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
void attend(const Attention& a, const AttentionTask& task, const AttentionTask* then, float* memory) {
  const T *keys = reinterpret_cast<const T*>(a.keys), *values = reinterpret_cast<const T*>(a.values);
  const Scratch s(memory, a.head_dim);
  const int64_t group = a.heads / a.kv_heads, rows = (task.end - task.begin) * group, num_rows = rows * task.num_heads;
  const auto position_of = [&](int64_t row) { return a.positions[task.begin + row / group]; };
  // Where a row's head stands in its token's row: rows are the first head's tokens by heads of the group, then the next's.
  const auto place_of = [&](int64_t row, int64_t stride) {
    const int64_t head = (task.first_head + row / rows) * group + row % group;
    return (task.begin + row % rows / group) * stride + head * a.head_dim;
  };
  for (int64_t row = 0; row < num_rows; ++row) {
    scale(a.qkv + place_of(row, a.qkv_stride), a.scale, a.head_dim, s.queries + row * s.query_stride);
    s.most[row] = -INFINITY;
    s.total[row] = 0.0f;
  }
  std::memset(s.output, 0, sizeof(float) * num_rows * s.output_stride);
  const int64_t context = position_of(rows - 1) + 1;
  Span spans[2];
  locate_first(a, task, spans[0]);
  for (int64_t index = 0, more = 1; more; ++index) {
    const Span& span = spans[index % 2];
    Span& next = spans[(index + 1) % 2];
    const int64_t begin = span.begin, count = span.count;
    more = begin + count < context;
    next.count = 0;
    if (more) locate(a, task, begin + SPAN, next);
    else if (then) locate_first(a, *then, next);
    const int64_t width = (more || !then ? task : *then).num_heads * a.head_dim;
    Fetch<T> next_keys{keys, next, width}, next_values{values, next, width};
    for (int64_t head = 0; head < task.num_heads; ++head) {
      const int64_t first_row = head * rows, fetched = next.count * (head + 1) / task.num_heads;
      float* scores = s.scores;
      pack_keys(keys + head * a.head_dim, span, a.head_dim, s.keys, next_keys, fetched);
      for (int64_t row = 0; row < rows; ++row) std::memset(scores + row * s.score_stride, 0, sizeof(float) * SPAN);
      for (int64_t first = 0; first < count; first += PANEL)
        multiply(s.queries + first_row * s.query_stride, s.query_stride, rows, a.head_dim, s.keys + first * a.head_dim,
                 PANEL, scores + first, s.score_stride);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t last = position_of(row) + 1 - begin, start = a.window ? last - a.window : 0;
        soften(scores + row * s.score_stride, start > 0 ? (start < count ? start : count) : 0,
               last < count ? (last > 0 ? last : 0) : count, count, s.most[first_row + row], s.total[first_row + row],
               s.factor[row]);
      }
      gather(values + head * a.head_dim, span, a.head_dim, s.values, s.value_stride, next_values, fetched);
      float* output = s.output + first_row * s.output_stride;
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t d = 0; d < s.output_stride; d += LANES) {
          float* at = output + row * s.output_stride + d;
          store(at, load(at) * splat(s.factor[row]));
        }
      for (int64_t first = 0; first < a.head_dim; first += PANEL)
        multiply(scores, s.score_stride, rows, count, s.values + first, s.value_stride, output + first,
                 s.output_stride);
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    scale(s.output + row * s.output_stride, 1.0f / s.total[row], a.head_dim, a.out + place_of(row, a.out_stride));
  }
}

}  // namespace
