// A Llama-family decoder's step over a flat batch of tokens, on packed weights and a paged KV pool.
//
// The structs are the library's interface: library.py mirrors them field by field. Pointers stay the caller's.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace paceline {

struct Layer {
  const float* input_norm;
  const uint8_t* qkv;
  const float* qkv_bias;
  const float* q_norm;
  const float* k_norm;
  const uint8_t* output;
  const float* output_bias;
  const float* post_norm;
  const uint8_t* gate_up;
  const float* gate_up_bias;
  const uint8_t* down;
  const float* down_bias;
  const float* cosines;  // [positions, head_dim / 2], null for a layer without positions
  const float* sines;
  int64_t window;  // positions that a token sees, its own included; 0 is all
  int64_t qkv_format, output_format, gate_up_format, down_format;
};

struct Model {
  int64_t vocab, hidden, inner, layers, heads, kv_heads, head_dim;
  int64_t head_format;
  int64_t integer;         // activations are quantised for products with quantised weights
  int64_t half_embedding;  // the embedding is bfloat16, else float32
  double epsilon, scale;
  const uint8_t* embedding;  // [vocab, hidden], not packed
  const float* norm;
  const uint8_t* head;
  const Layer* layer;  // [layers]
};

struct Batch {
  int64_t tokens, sequences, logits_rows, layers;  // layers to run, at most the model's
  const int64_t* token_ids;                        // [tokens]
  const int64_t* positions;                        // [tokens], ascending by one within a sequence
  const int64_t* slots;                            // [tokens]
  const int64_t* sequence_begins;                  // [sequences + 1]
  const int64_t* block_tables;                     // [sequences, table_stride]
  int64_t table_stride;
  const int64_t* logits;  // [logits_rows], tokens whose logits are wanted
  float* out;             // [logits_rows, vocab]
  uint8_t* kv;            // [layers, 2, blocks, block_size, kv_heads, head_dim]
  int64_t num_blocks, block_size, half_kv;
  int64_t states;             // tokens whose hidden states behind the last norm are wanted
  const int64_t* state_rows;  // [states]
  float* state_out;           // [states, hidden]
};

class Decoder : public Work {
 public:
  Decoder(const Model& model, const Kernels& kernels, Pool& pool);
  void step(const Batch& batch);
  void run(int stage, int chunk, int thread) override;

 private:
  enum Kind { EMBED, NORM, PACK, QUANTISE, GEMM, ROPE, ATTEND, GATHER };
  // Rows of `size` values, to be normalised with weights `norm` unless that is null.
  struct Rows {
    const float* at = nullptr;
    int64_t stride = 0, size = 0;
    const float* norm = nullptr;
  };
  struct Stage {
    Kind kind;
    int64_t rows_per_chunk = 0, panels_per_chunk = 0, panel_chunks = 0, layer = 0, rows = 0;
    Rows x{};                         // NORM, PACK, QUANTISE, GATHER
    const int64_t* row_of = nullptr;  // GATHER: which rows of x
    float* to = nullptr;              // GATHER
    int64_t stride = 0;               // GATHER: of `to`
    Gemm gemm{};
  };

  void plan_layer(int64_t layer);
  void plan_attention();
  void add_rows(Stage stage, int64_t rows, int64_t rows_per_chunk);
  void add_gather(const int64_t* row_of, int64_t rows, float* to, int64_t stride);
  void add_product(Rows x, const uint8_t* weights, int64_t columns, const float* bias, float* y, int64_t y_stride,
                   int64_t rows, Epilogue epilogue, int64_t format);
  void reserve(int64_t tokens);
  int64_t height_of(int64_t rows) const;
  const float* input(const Stage& stage, int64_t begin, int64_t end);
  void attend(const Stage& stage, int64_t task, float* scratch);
  void embed(int64_t begin, int64_t end);
  Rope rope_of(int64_t layer) const;
  Attention attention_of(int64_t layer) const;
  const uint8_t* pool_of(int64_t layer, int64_t value) const;

  Model model_;
  std::vector<Layer> layers_;
  const Kernels& kernels_;
  Pool& pool_;
  Batch batch_{};
  std::vector<Stage> stages_;
  std::vector<int> chunks_;
  std::vector<AttentionTask> tasks_;
  bool rotates_in_attention_ = false;  // Each task has all heads of all of its sequence's tokens.
  float epsilon_;
  int64_t hidden_stride_, qkv_stride_, attended_stride_, inner_stride_, widest_;
  std::vector<float> hidden_, normed_, packed_, qkv_, attended_, inner_, scales_;
  std::vector<int8_t> values_;
  std::vector<int32_t> sums_;
  std::vector<std::vector<float>> scratch_;
};

}  // namespace paceline
