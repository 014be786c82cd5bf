// Threads that run a step's stages in order, each stage's chunks by whoever is free.
//
// Work is claimed, not assigned: each thread begins with a range of its own and then takes from the others', so one that
// the operating system has put aside delays only the chunk it holds. So an engine keeps going, slower, when its CPUs are shared. Idle threads spin for a moment,
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
  static constexpr int MAX_STAGES = 4096;

  explicit Pool(int threads);  // The caller of run() is one of them.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return num_threads_; }
  // Stage s has chunks[s] chunks; all of a stage is done before the next begins. One caller at a time.
  void run(Work& work, const std::vector<int>& chunks);

 private:
  // The words hold the run's epoch in the upper bits, so that a thread that wakes up late can't touch a later run.
  // A range, one for each thread: epoch << 40 | end << 20 | next chunk. done: epoch << 32 | finished chunks.
  struct alignas(64) Range {
    std::atomic<uint64_t> next{0};
  };
  struct alignas(64) Stage {
    std::atomic<uint64_t> done{0};
    std::atomic<uint32_t> chunks{0};
  };

  void work(int thread);
  void walk(uint32_t epoch, int thread);
  int take(int stage, int range, uint32_t epoch, int thread);
  bool wait_done(Stage& stage, uint32_t epoch, uint32_t chunks);

  std::unique_ptr<Stage[]> stages_;
  std::unique_ptr<Range[]> ranges_;  // [stage][thread]
  int num_threads_ = 1;
  std::atomic<int> num_stages_{0};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};  // In wait_done.
  std::atomic<int> idle_{0};      // Asleep between runs.
  std::atomic<bool> stop_{false};
  Work* work_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace paceline
