#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace paceline {

namespace {

constexpr int64_t ALIGNMENT = 16;  // floats of a cache line
constexpr int64_t MAX_PANELS_PER_CHUNK = 8;
// Attention tasks of a thread, at least, where whole sequences are tasks.
constexpr int64_t TASKS_PER_THREAD = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t padded(int64_t size) { return ceil_div(size, ALIGNMENT) * ALIGNMENT + ROW_PADDING; }

template <class T>
T* aligned(std::vector<T>& buffer) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.data());
  return reinterpret_cast<T*>((address + 63) / 64 * 64);
}

}  // namespace

Decoder::Decoder(const Model& model, const Kernels& kernels, Pool& pool)
    : model_(model),
      layers_(model.layer, model.layer + model.layers),
      kernels_(kernels),
      pool_(pool),
      epsilon_(static_cast<float>(model.epsilon)),
      hidden_stride_(padded(model.hidden)),
      qkv_stride_(padded((model.heads + 2 * model.kv_heads) * model.head_dim)),
      attended_stride_(padded(model.heads * model.head_dim)),
      inner_stride_(padded(model.inner)),
      widest_(std::max({model.hidden, model.inner, model.heads * model.head_dim})) {
  scratch_.resize(pool.threads());
  for (auto& scratch : scratch_) scratch.resize(attention_scratch(model.head_dim) + 64);
}

void Decoder::reserve(int64_t tokens) {
  const auto grow = [tokens](std::vector<float>& buffer, int64_t stride) {
    if (buffer.size() < static_cast<size_t>(tokens * stride + 64)) buffer.resize(tokens * stride + 64);
  };
  grow(hidden_, hidden_stride_);
  grow(normed_, hidden_stride_);
  grow(qkv_, qkv_stride_);
  grow(attended_, attended_stride_);
  grow(inner_, inner_stride_);
  grow(packed_, packed_rows(1, widest_));
  if (model_.integer) {
    const int64_t groups = ceil_div(widest_, GROUP);
    grow(scales_, groups);
    if (sums_.size() < static_cast<size_t>(tokens * groups)) sums_.resize(tokens * groups);
    if (values_.size() < static_cast<size_t>(tokens * groups * GROUP + 64)) values_.resize(tokens * groups * GROUP + 64);
  }
}

void Decoder::step(const Batch& batch) {
  batch_ = batch;
  reserve(std::max(batch.tokens, batch.logits_rows));
  stages_.clear();
  chunks_.clear();
  plan_attention();
  add_rows({EMBED}, batch.tokens, 16);
  for (int64_t layer = 0; layer < batch.layers; ++layer) plan_layer(layer);
  if (batch.states > 0) add_gather(batch.state_rows, batch.states, batch.state_out, model_.hidden);
  if (batch.logits_rows > 0) {
    add_gather(batch.logits, batch.logits_rows, aligned(normed_), hidden_stride_);
    add_product({aligned(normed_), hidden_stride_, model_.hidden, nullptr}, model_.head, model_.vocab, nullptr,
                batch.out, model_.vocab, batch.logits_rows, STORE, model_.head_format);
  }
  pool_.run(*this, chunks_);
}

// Rows of one packed tile; 0 where a product takes rows as they are.
int64_t Decoder::height_of(int64_t rows) const {
  return rows > kernels_.direct_rows ? ceil_div(rows, ceil_div(rows, kernels_.tile_rows)) : 0;
}

void Decoder::add_rows(Stage stage, int64_t rows, int64_t rows_per_chunk) {
  stage.rows = rows;
  stage.rows_per_chunk = rows_per_chunk;
  stages_.push_back(stage);
  chunks_.push_back(static_cast<int>(ceil_div(rows, rows_per_chunk)));
}

void Decoder::add_gather(const int64_t* row_of, int64_t rows, float* to, int64_t stride) {
  Stage stage{GATHER};
  stage.x = {aligned(hidden_), hidden_stride_, model_.hidden, model_.norm};
  stage.row_of = row_of;
  stage.to = to;
  stage.stride = stride;
  add_rows(stage, rows, 8);
}

void Decoder::add_product(Rows x, const uint8_t* weights, int64_t columns, const float* bias, float* y,
                          int64_t y_stride, int64_t rows, Epilogue epilogue, int64_t format) {
  const QuantisedRows quantised{aligned(values_), scales_.data(), sums_.data()};
  const bool integer = model_.integer && (format == INT8 || format == INT4);
  const int64_t height = integer ? 0 : height_of(rows), unit = height ? height : 1;
  // Who lays the rows out for the product normalises them, too; where nobody does, that is a stage of its own.
  if (x.norm || height || integer) {
    Stage stage{integer ? QUANTISE : height ? PACK : NORM};
    stage.x = x;
    stage.gemm.quantised = quantised;
    add_rows(stage, rows, height ? height : 8);
  }
  Stage stage{GEMM};
  const float* input = height ? aligned(packed_) : x.norm ? aligned(normed_) : x.at;
  stage.gemm = Gemm{input, x.stride, height, quantised, weights, static_cast<int32_t>(format), integer, x.size,
                    columns, bias, y, y_stride, epilogue};
  stage.rows = rows;
  const int64_t row_chunks = ceil_div(rows, GEMM_ROWS / unit * unit);
  stage.rows_per_chunk = ceil_div(ceil_div(rows, unit), row_chunks) * unit;
  const int64_t count = panels(columns);
  stage.panels_per_chunk = std::clamp<int64_t>(count / (pool_.threads() * 16), 1, MAX_PANELS_PER_CHUNK);
  stage.panel_chunks = ceil_div(count, stage.panels_per_chunk);
  stages_.push_back(stage);
  chunks_.push_back(static_cast<int>(row_chunks * stage.panel_chunks));
}

void Decoder::plan_layer(int64_t index) {
  const Layer& layer = layers_[index];
  const int64_t tokens = batch_.tokens, heads = model_.heads * model_.head_dim;
  float *hidden = aligned(hidden_), *qkv = aligned(qkv_), *inner = aligned(inner_);
  add_product({hidden, hidden_stride_, model_.hidden, layer.input_norm}, layer.qkv,
              heads + 2 * model_.kv_heads * model_.head_dim, layer.qkv_bias, qkv, qkv_stride_, tokens, STORE,
              layer.qkv_format);
  if (!rotates_in_attention_) {
    Stage rope{ROPE};
    rope.layer = index;
    add_rows(rope, tokens, 4);
  }
  Stage attend{ATTEND};
  attend.layer = index;
  add_rows(attend, static_cast<int64_t>(tasks_.size()), 1);
  add_product({aligned(attended_), attended_stride_, heads, nullptr}, layer.output, model_.hidden, layer.output_bias,
              hidden, hidden_stride_, tokens, ADD, layer.output_format);
  add_product({hidden, hidden_stride_, model_.hidden, layer.post_norm}, layer.gate_up, 2 * model_.inner,
              layer.gate_up_bias, inner, inner_stride_, tokens, GLU, layer.gate_up_format);
  add_product({inner, inner_stride_, model_.inner, nullptr}, layer.down, model_.hidden, layer.down_bias, hidden,
              hidden_stride_, tokens, ADD, layer.down_format);
}

void Decoder::plan_attention() {
  tasks_.clear();
  const int64_t group = model_.heads / model_.kv_heads, most = std::max<int64_t>(1, ATTENTION_ROWS / group);
  rotates_in_attention_ = true;
  // Of tokens [begin, end) of a sequence, under one head.
  const auto cost = [this](int64_t begin, int64_t end) { return (batch_.positions[end - 1] + 1) * (end - begin); };
  int64_t all = 0;
  for (int64_t s = 0; s < batch_.sequences; ++s) all += cost(batch_.sequence_begins[s], batch_.sequence_begins[s + 1]);
  for (int64_t s = 0; s < batch_.sequences; ++s) {
    const int64_t begin = batch_.sequence_begins[s], end = batch_.sequence_begins[s + 1];
    const int64_t tiles = ceil_div(end - begin, most), height = tiles ? ceil_div(end - begin, tiles) : 0;
    // A position's heads are neighbours in memory: one task takes them all, if it is small among a thread's others.
    const bool together = (end - begin) * model_.heads <= ATTENTION_ROWS &&
                          cost(begin, end) * pool_.threads() * TASKS_PER_THREAD <= all;
    const int64_t heads = together ? model_.kv_heads : 1;
    rotates_in_attention_ &= together;
    for (int64_t at = begin; at < end; at += height)
      for (int64_t head = 0; head < model_.kv_heads; head += heads)
        tasks_.push_back({batch_.block_tables + s * batch_.table_stride, static_cast<int32_t>(at),
                          static_cast<int32_t>(std::min(at + height, end)), static_cast<int32_t>(head),
                          static_cast<int32_t>(heads)});
  }
  // The longest first: none is left to run alone at the end.
  const auto of = [&](const AttentionTask& task) { return cost(task.begin, task.end) * task.num_heads; };
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [&](const AttentionTask& a, const AttentionTask& b) { return of(a) > of(b); });
}

const uint8_t* Decoder::pool_of(int64_t layer, int64_t value) const {
  const int64_t elements = batch_.num_blocks * batch_.block_size * model_.kv_heads * model_.head_dim;
  return batch_.kv + (layer * 2 + value) * elements * (batch_.half_kv ? 2 : 4);
}

Rope Decoder::rope_of(int64_t index) const {
  const Layer& layer = layers_[index];
  Rope rope{};
  rope.qkv = aligned(const_cast<std::vector<float>&>(qkv_));
  rope.qkv_stride = qkv_stride_;
  rope.cosines = layer.cosines;
  rope.sines = layer.sines;
  rope.positions = batch_.positions;
  rope.slots = batch_.slots;
  rope.q_norm = layer.q_norm;
  rope.k_norm = layer.k_norm;
  rope.epsilon = epsilon_;
  rope.keys = const_cast<uint8_t*>(pool_of(index, 0));
  rope.values = const_cast<uint8_t*>(pool_of(index, 1));
  rope.half = batch_.half_kv != 0;
  rope.heads = model_.heads;
  rope.kv_heads = model_.kv_heads;
  rope.head_dim = model_.head_dim;
  return rope;
}

Attention Decoder::attention_of(int64_t index) const {
  Attention attention{};
  attention.qkv = aligned(const_cast<std::vector<float>&>(qkv_));
  attention.qkv_stride = qkv_stride_;
  attention.out = aligned(const_cast<std::vector<float>&>(attended_));
  attention.out_stride = attended_stride_;
  attention.positions = batch_.positions;
  attention.keys = pool_of(index, 0);
  attention.values = pool_of(index, 1);
  attention.half = batch_.half_kv != 0;
  attention.block_size = batch_.block_size;
  attention.heads = model_.heads;
  attention.kv_heads = model_.kv_heads;
  attention.head_dim = model_.head_dim;
  attention.window = layers_[index].window;
  attention.scale = static_cast<float>(model_.scale);
  return attention;
}

// A stage's rows [begin, end), normalised if they are to be; where the first stands.
const float* Decoder::input(const Stage& stage, int64_t begin, int64_t end) {
  const float* x = stage.x.at + begin * stage.x.stride;
  if (!stage.x.norm) return x;
  float* normed = aligned(normed_) + begin * hidden_stride_;
  kernels_.rms_norm(x, hidden_stride_, stage.x.norm, stage.x.size, epsilon_, normed, end - begin);
  return normed;
}

void Decoder::attend(const Stage& stage, int64_t index, float* scratch) {
  const AttentionTask &task = tasks_[index], *then = index + 1 < stage.rows ? &tasks_[index + 1] : nullptr;
  if (rotates_in_attention_) kernels_.rope(rope_of(stage.layer), task.begin, task.end);
  kernels_.attention(attention_of(stage.layer), task, then, scratch);
}

void Decoder::embed(int64_t begin, int64_t end) {
  float* hidden = aligned(hidden_);
  for (int64_t row = begin; row < end; ++row) {
    float* to = hidden + row * hidden_stride_;
    const int64_t first = batch_.token_ids[row] * model_.hidden;
    if (!model_.half_embedding) {
      std::memcpy(to, reinterpret_cast<const float*>(model_.embedding) + first, sizeof(float) * model_.hidden);
      continue;
    }
    const uint16_t* from = reinterpret_cast<const uint16_t*>(model_.embedding) + first;
    for (int64_t i = 0; i < model_.hidden; ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(to + i, &bits, 4);
    }
  }
}

void Decoder::run(int index, int chunk, int thread) {
  const Stage& stage = stages_[index];
  // Neighbouring chunks share rows, whose activations stay in the cache while panels stream by.
  const int64_t row_chunk = stage.kind == GEMM ? chunk / stage.panel_chunks : chunk;
  const int64_t begin = row_chunk * stage.rows_per_chunk;
  const int64_t end = std::min(begin + stage.rows_per_chunk, stage.rows);
  switch (stage.kind) {
    case EMBED: return embed(begin, end);
    case NORM: input(stage, begin, end); return;
    case PACK: {
      float* tile = aligned(packed_) + row_chunk * packed_rows(stage.rows_per_chunk, stage.x.size);
      return kernels_.pack_rows(input(stage, begin, end), stage.x.stride, end - begin, stage.x.size, tile);
    }
    case QUANTISE: {
      const float* first = input(stage, begin, end) - begin * stage.x.stride;
      return kernels_.quantise(first, stage.x.stride, stage.x.size, stage.gemm.quantised, begin, end);
    }
    case GEMM: {
      const int64_t first = chunk % stage.panel_chunks * stage.panels_per_chunk;
      const int64_t last = std::min(first + stage.panels_per_chunk, panels(stage.gemm.columns));
      return kernels_.gemm(stage.gemm, begin, end, first, last);
    }
    case ROPE: return kernels_.rope(rope_of(stage.layer), begin, end);
    case ATTEND: return attend(stage, begin, aligned(scratch_[thread]));
    case GATHER:
      for (int64_t row = begin; row < end; ++row)
        kernels_.rms_norm(stage.x.at + stage.row_of[row] * stage.x.stride, stage.x.stride, stage.x.norm, stage.x.size,
                          epsilon_, stage.to + row * stage.stride, 1);
  }
}

}  // namespace paceline
