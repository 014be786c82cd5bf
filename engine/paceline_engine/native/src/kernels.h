// What the instruction-set variants of the arithmetic offer to the decoder: one table of functions each.
//
// Every output is one chain of multiply-adds over K in order, whatever the number of rows: a row's result doesn't
// depend on the batch that it is in.
#pragma once

#include <cstdint>

namespace paceline {

// Columns of a packed panel of weights: K rows of PANEL values stand one after the other.
constexpr int PANEL = 32;
// Values that share one scale in the quantised formats.
constexpr int GROUP = 32;
// Positions of context that attention takes at once; fixed, so that the order of summation is.
constexpr int SPAN = 64;
// Query rows (tokens times heads of a group) of one attention task.
constexpr int ATTENTION_ROWS = 96;
// Rows of one call of `gemm`, at most: their activations stay in a core's second-level cache beside a panel.
constexpr int GEMM_ROWS = 96;
// Activations' rows are padded by this many floats: a stride that is a multiple of 4 KiB would thrash one cache set.
constexpr int ROW_PADDING = 16;

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

inline int64_t panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

// Bytes of one packed panel of `inner` rows; a quantised group is PANEL half-precision scales, with INT4 as many minima,
// then its values.
inline int64_t panel_bytes(int32_t format, int64_t inner) {
  const int64_t groups = (inner + GROUP - 1) / GROUP;
  switch (format) {
    case FLOAT32: return inner * PANEL * 4;
    case BFLOAT16: return inner * PANEL * 2;
    case INT8: return groups * (PANEL * 2 + PANEL * GROUP);
    default: return groups * (PANEL * 4 + PANEL * GROUP / 2);
  }
}

// Activations quantised for the integer formats: a row's values, the scale of each group and the sum of its values.
struct QuantisedRows {
  int8_t* values;  // [rows, groups * GROUP]
  float* scales;   // [rows, groups]
  int32_t* sums;   // [rows, groups]
};

// STORE: y = xW (+ bias). ADD: y += xW (+ bias). GLU: panels hold 16 gates, then their 16 ups; y = silu(gate) * up.
enum Epilogue : int32_t { STORE = 0, ADD = 1, GLU = 2 };

// Floats from one tile of `height` packed rows to the next. Packing writes whole vectors, so a tile ends in room for one.
inline int64_t packed_rows(int64_t height, int64_t inner) { return height * inner + 16; }

struct Gemm {
  // [rows, inner], row stride x_stride floats; with a height, tiles of so many rows (the last may have fewer), each
  // [inner, rows of the tile].
  const float* x;
  int64_t x_stride, height;
  QuantisedRows quantised;  // instead of x
  const uint8_t* weights;   // packed panels
  int32_t format;
  bool integer;            // compute with `quantised`; else with x, whatever the format
  int64_t inner, columns;  // columns counts W's, so twice y's under GLU
  const float* bias;       // [columns] or null; under GLU all gates' biases, then all ups'
  float* y;                // [rows, columns], row stride y_stride floats
  int64_t y_stride;
  int32_t epilogue;
};

struct Attention {
  const float* qkv;  // [tokens, heads + 2 kv_heads, head_dim], row stride qkv_stride floats; queries are rotated
  int64_t qkv_stride;
  float* out;  // [tokens, heads, head_dim], row stride out_stride floats
  int64_t out_stride;
  const int64_t* positions;  // [tokens]
  const uint8_t* keys;       // a layer's [blocks, block_size, kv_heads, head_dim]
  const uint8_t* values;
  bool half;  // the pool is bfloat16, else float32
  int64_t block_size, heads, kv_heads, head_dim;
  int64_t window;  // positions that a query sees, its own included; 0 is all
  float scale;
};

// Query rows of tokens [begin, end) of one sequence under KV heads [first_head, first_head + num_heads).
struct AttentionTask {
  const int64_t* block_table;
  int32_t begin, end, first_head, num_heads;
};

struct Rope {
  float* qkv;
  int64_t qkv_stride;
  const float* cosines;  // [positions, head_dim / 2]; null leaves queries and keys as they are
  const float* sines;
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens], flat slot of each in the pool
  const float* q_norm;       // [head_dim] or null
  const float* k_norm;
  float epsilon;
  uint8_t* keys;
  uint8_t* values;
  bool half;
  int64_t heads, kv_heads, head_dim;
};

struct Kernels {
  const char* name;
  // More rows than direct_rows are to be packed for a product, in tiles of at most tile_rows.
  int64_t direct_rows, tile_rows;
  void (*gemm)(const Gemm&, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);
  void (*rms_norm)(const float* x, int64_t stride, const float* weight, int64_t size, float epsilon, float* y,
                   int64_t rows);
  // Rows of one tile in the layout that Gemm wants with a height.
  void (*pack_rows)(const float* x, int64_t stride, int64_t rows, int64_t size, float* packed);
  void (*quantise)(const float* x, int64_t stride, int64_t size, const QuantisedRows&, int64_t begin, int64_t end);
  // Normalise and rotate queries and keys of tokens [begin, end), write keys and values to the pool.
  void (*rope)(const Rope&, int64_t begin, int64_t end);
  // then: the task that this thread is likely to take next, or null; its context is fetched.
  void (*attention)(const Attention&, const AttentionTask&, const AttentionTask* then, float* scratch);
  // Panel `panel` of W, whose column i is row_of(i) of a row-major [columns, inner] matrix, -1 for padding.
  void (*pack)(int32_t format, const float* source, const int64_t* row_of, int64_t inner, int64_t panel,
               uint8_t* packed);
  // Whether that panel's weights are exactly the source's.
  bool (*holds)(int32_t format, const float* source, const int64_t* row_of, int64_t inner);
  // Roofs: multiply-adds of independent chains (returns flops done), and bytes read.
  double (*multiply_add)(int64_t iterations);
  float (*read)(const uint8_t* data, int64_t bytes);
};

// Floats of scratch that one attention task needs.
inline int64_t attention_scratch(int64_t head_dim) {
  const int64_t padded = panels(head_dim) * PANEL;
  return ATTENTION_ROWS * (head_dim + ROW_PADDING)  // queries
         + ATTENTION_ROWS * (padded + SPAN + ROW_PADDING)  // output and scores
         + 2 * SPAN * padded + SPAN * head_dim + 4 * ATTENTION_ROWS + 256;
}

const Kernels* best_kernels(const char* wanted);

}  // namespace paceline
