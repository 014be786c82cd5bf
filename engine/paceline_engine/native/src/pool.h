// Threads that run a step's stages in order, each stage's chunks by whoever is free.
//
// Work is claimed, not assigned: a thread that the operating system has put aside delays only the chunk it holds, and the
// others take the rest. So an engine keeps going, slower, when its CPUs are shared. Idle threads spin for a moment,
// since the next stage is microseconds away, and then sleep on a futex, so that neighbours get the CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace paceline {

class Work {
 public:
  virtual ~Work() = default;
  // `thread` < number of threads of the pool; calls with equal `thread` never overlap.
  virtual void run(int stage, int chunk, int thread) = 0;
};

class Pool {
 public:
  static constexpr int MAX_STAGES = 8192;

  explicit Pool(int threads);  // The caller of run() is one of them.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Stage s has chunks[s] chunks; all of a stage is done before the next begins. One caller at a time.
  void run(Work& work, const std::vector<int>& chunks);

 private:
  // Both words hold the run's epoch in the upper bits, so that a thread that wakes up late can't touch a later run.
  // claim: epoch << 40 | chunks << 20 | next chunk. done: epoch << 32 | finished chunks.
  struct alignas(64) Stage {
    std::atomic<uint64_t> claim{0};
    alignas(64) std::atomic<uint64_t> done{0};
  };

  void work(int thread);
  void walk(uint32_t epoch, int thread);
  bool wait_done(Stage& stage, uint32_t epoch, uint32_t chunks);

  std::unique_ptr<Stage[]> stages_;
  std::atomic<int> num_stages_{0};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};  // In wait_done.
  std::atomic<int> idle_{0};      // Asleep between runs.
  std::atomic<bool> stop_{false};
  Work* work_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace paceline
