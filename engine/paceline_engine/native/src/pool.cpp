#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <stdexcept>

namespace paceline {

namespace {

// Stages are microseconds apart, steps a scheduler's turn: a longer spin would only heat a neighbour's CPU.
constexpr auto STAGE_SPIN = std::chrono::microseconds(60);
constexpr auto STEP_SPIN = std::chrono::microseconds(30);
constexpr uint32_t EPOCH_MASK = (1u << 24) - 1;
constexpr uint32_t CHUNK_MASK = (1u << 20) - 1;

uint32_t* low_word(std::atomic<uint64_t>& word) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  return reinterpret_cast<uint32_t*>(&word);
}

void futex_wait(uint32_t* at, uint32_t expected) {
  syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(uint32_t* at) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True as soon as `ready()` is, false when `limit` has passed.
template <class Ready>
bool spin(Ready ready, std::chrono::microseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

Pool::Pool(int threads) : stages_(new Stage[MAX_STAGES]), ranges_(new Range[MAX_STAGES * threads]) {
  // All are there before the first looks at their number.
  workers_.reserve(threads - 1);
  num_threads_ = threads;
  for (int i = 1; i < threads; ++i) workers_.emplace_back(&Pool::work, this, i);
}

Pool::~Pool() {
  stop_ = true;
  epoch_.fetch_add(1);
  futex_wake(reinterpret_cast<uint32_t*>(&epoch_));
  for (auto& worker : workers_) worker.join();
}

void Pool::run(Work& work, const std::vector<int>& chunks) {
  if (chunks.size() > MAX_STAGES) throw std::length_error("a run has too many stages");
  uint32_t epoch = (epoch_.load() + 1) & EPOCH_MASK;
  if (epoch == 0) epoch = 1;
  work_ = &work;
  num_stages_ = static_cast<int>(chunks.size());
  for (size_t s = 0; s < chunks.size(); ++s) {
    const uint64_t count = chunks[s], threads = num_threads_;
    stages_[s].chunks.store(count, std::memory_order_relaxed);
    stages_[s].done.store(static_cast<uint64_t>(epoch) << 32, std::memory_order_release);
    for (uint64_t t = 0; t < threads; ++t)
      ranges_[s * threads + t].next.store(
          static_cast<uint64_t>(epoch) << 40 | count * (t + 1) / threads << 20 | count * t / threads,
          std::memory_order_release);
  }
  epoch_.store(epoch);
  if (idle_.load() > 0) futex_wake(reinterpret_cast<uint32_t*>(&epoch_));
  walk(epoch, 0);
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  while (!stop_) {
    const auto changed = [&] { return epoch_.load() != seen; };
    if (!spin(changed, STEP_SPIN)) {
      idle_.fetch_add(1);
      while (!changed()) futex_wait(reinterpret_cast<uint32_t*>(&epoch_), seen);
      idle_.fetch_sub(1);
    }
    seen = epoch_.load();
    if (!stop_) walk(seen, thread);
  }
}

// Runs chunks of one range until it is empty; how many, or -1 if the range belongs to another run.
int Pool::take(int stage, int range, uint32_t epoch, int thread) {
  std::atomic<uint64_t>& word = ranges_[stage * num_threads_ + range].next;
  uint64_t value = word.load(std::memory_order_acquire);
  for (int taken = 0;;) {
    if (value >> 40 != epoch) return -1;
    const uint32_t next = static_cast<uint32_t>(value) & CHUNK_MASK;
    if (next >= (static_cast<uint32_t>(value >> 20) & CHUNK_MASK)) return taken;
    if (!word.compare_exchange_weak(value, value + 1, std::memory_order_acq_rel)) continue;
    // The run can't end while this chunk is held, so work_ is this epoch's.
    work_->run(stage, static_cast<int>(next), thread);
    ++taken;
    value = word.load(std::memory_order_acquire);
  }
}

void Pool::walk(uint32_t epoch, int thread) {
  for (int s = 0; s < num_stages_.load(std::memory_order_acquire); ++s) {
    Stage& stage = stages_[s];
    uint32_t finished = 0;
    for (int i = 0; i < num_threads_; ++i) {
      const int taken = take(s, (thread + i) % num_threads_, epoch, thread);
      // Chunks that this thread holds keep the run alive, so this can't happen after the first was taken.
      if (taken < 0) return;
      finished += taken;
    }
    const uint32_t chunks = stage.chunks.load(std::memory_order_acquire);
    if (finished > 0) {
      const uint64_t before = stage.done.fetch_add(finished);
      if (static_cast<uint32_t>(before) + finished == chunks && sleepers_.load() > 0) futex_wake(low_word(stage.done));
    }
    if (!wait_done(stage, epoch, chunks)) return;
  }
}

bool Pool::wait_done(Stage& stage, uint32_t epoch, uint32_t chunks) {
  uint64_t value = 0;
  const auto over = [&] {
    value = stage.done.load();
    return value >> 32 != epoch || static_cast<uint32_t>(value) >= chunks;
  };
  if (!spin(over, STAGE_SPIN)) {
    sleepers_.fetch_add(1);
    while (!over()) futex_wait(low_word(stage.done), static_cast<uint32_t>(value));
    sleepers_.fetch_sub(1);
  }
  return value >> 32 == epoch;
}

}  // namespace paceline
