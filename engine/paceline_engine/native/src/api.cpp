// The library's C interface, called from library.py. Nothing here throws across it: errors are null or a number.
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <vector>

#include "decoder.h"
#include "kernels.h"
#include "pool.h"

using namespace paceline;

extern "C" {
const Kernels* paceline_kernels_generic();
#if defined(__x86_64__)
const Kernels* paceline_kernels_avx2();
const Kernels* paceline_kernels_avx512();
#endif
}

namespace paceline {

// The widest variant that this CPU runs, or the one named; null if it can't run that one.
const Kernels* best_kernels(const char* wanted) {
  const auto take = [wanted](const char* name, bool able) { return able && (!*wanted || !std::strcmp(wanted, name)); };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (take("avx512", avx512)) return paceline_kernels_avx512();
  if (take("avx2", avx2)) return paceline_kernels_avx2();
#endif
  return take("generic", true) ? paceline_kernels_generic() : nullptr;
}

}  // namespace paceline

namespace {

struct Engine {
  Pool pool;
  const Kernels& kernels;
  Decoder decoder;
  Engine(const Model& model, const Kernels& k, int threads) : pool(threads), kernels(k), decoder(model, k, pool) {}
};

struct Packing : Work {
  const Kernels* kernels;
  int32_t format;
  const float* source;
  const int64_t* row_of;
  int64_t inner;
  uint8_t* packed;  // Null to look only whether `format` holds the source.
  std::atomic<bool> held{true};
  void run(int, int chunk, int) override {
    const int64_t* columns = row_of + static_cast<int64_t>(chunk) * PANEL;
    if (packed) kernels->pack(format, source, columns, inner, chunk, packed);
    else if (held && !kernels->holds(format, source, columns, inner)) held = false;
  }
};

bool run_packing(int32_t format, const float* source, const int64_t* row_of, int64_t columns, int64_t inner,
                 uint8_t* packed, int32_t threads) {
  Pool pool(threads);
  Packing packing;
  packing.kernels = best_kernels("");
  packing.format = format;
  packing.source = source;
  packing.row_of = row_of;
  packing.inner = inner;
  packing.packed = packed;
  pool.run(packing, {static_cast<int>(panels(columns))});
  return packing.held;
}

struct Roof : Work {
  const Kernels* kernels;
  const uint8_t* data;
  int64_t bytes, iterations;
  void run(int, int chunk, int) override {
    if (data) kernels->read(data + chunk * bytes, bytes);
    else kernels->multiply_add(iterations);
  }
};

double seconds_of(Pool& pool, Work& work, int chunks) {
  const auto begin = std::chrono::steady_clock::now();
  pool.run(work, {chunks});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

extern "C" {

const char* paceline_isa(const char* wanted) {
  const Kernels* kernels = best_kernels(wanted);
  return kernels ? kernels->name : nullptr;
}

int64_t paceline_packed_bytes(int32_t format, int64_t columns, int64_t inner) {
  return panels(columns) * panel_bytes(format, inner);
}

void paceline_pack(int32_t format, const float* source, const int64_t* row_of, int64_t columns, int64_t inner,
                   uint8_t* packed, int32_t threads) {
  run_packing(format, source, row_of, columns, inner, packed, threads);
}

// Whether packing in that format loses no bit of a float32 matrix.
int32_t paceline_holds(int32_t format, const float* source, const int64_t* row_of, int64_t columns, int64_t inner,
                       int32_t threads) {
  return run_packing(format, source, row_of, columns, inner, nullptr, threads);
}

void* paceline_create(const Model* model, const char* wanted, int32_t threads) {
  const Kernels* kernels = best_kernels(wanted);
  if (!kernels) return nullptr;
  try {
    return new Engine(*model, *kernels, threads);
  } catch (const std::exception&) {  // No memory, or no more threads.
    return nullptr;
  }
}

void paceline_destroy(void* engine) { delete static_cast<Engine*>(engine); }

// 0, or 1 when there is no memory for the batch's activations.
int32_t paceline_step(void* engine, const Batch* batch) {
  try {
    static_cast<Engine*>(engine)->decoder.step(*batch);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// Bytes a second that `threads` threads read from memory.
double paceline_read_roof(const uint8_t* data, int64_t bytes, int32_t threads) {
  Pool pool(threads);
  Roof roof;
  roof.kernels = best_kernels("");
  roof.data = data;
  const int chunks = threads * 64;
  roof.bytes = bytes / chunks;
  return static_cast<double>(roof.bytes) * chunks / seconds_of(pool, roof, chunks);
}

// Floating-point operations a second of `threads` threads, all in registers.
double paceline_multiply_add_roof(int64_t iterations, int32_t threads) {
  Pool pool(threads);
  Roof roof;
  roof.kernels = best_kernels("");
  roof.data = nullptr;
  roof.iterations = iterations;
  const int chunks = threads * 64;
  const double seconds = seconds_of(pool, roof, chunks);
  return roof.kernels->multiply_add(1) * static_cast<double>(iterations) * chunks / seconds;
}

}  // extern "C"
