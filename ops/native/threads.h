// Parallel loops on XLA's threads: jobs whose chunks threads claim, a queue where helpers spin for the next job and
// prefetch its weights, and a limit of the number of helpers on a busy machine.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

// Memory that a product reads once, from its beginning.
struct Span {
  const char* data = nullptr;
  int64_t bytes = 0;
};

using Clock = std::chrono::steady_clock;

// A parallel loop: chunks of work that threads claim one at a time.
struct Job {
  std::atomic<int64_t> next_chunk{0}, num_done{0};
  std::atomic<int64_t> helper_slots{0};      // helpers that may still join
  std::atomic<int64_t> prefetched_bytes{0};  // of the next job's weights
  int64_t num_chunks;
  bool claims_early;  // whether a thread claims its next chunk before it runs one; coarse chunks would balance badly
  void (*run)(const void*, int64_t, int64_t);
  const void* context;
  Span weights;

  int64_t claim() { return next_chunk.fetch_add(1, std::memory_order_relaxed); }

  // Runs chunks until none is left or the deadline has passed; returns their number.
  int64_t work(Clock::time_point deadline = Clock::time_point::max()) {
    int64_t count = 0;
    for (int64_t chunk = claim(); chunk < num_chunks; ++count) {
      bool is_late = deadline < Clock::time_point::max() && deadline < Clock::now();
      int64_t upcoming = claims_early && !is_late ? claim() : num_chunks;
      run(context, chunk, upcoming);
      chunk = claims_early || is_late ? upcoming : claim();
    }
    if (count) num_done.fetch_add(count, std::memory_order_release);
    return count;
  }
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A spin lock for a few instructions.
class Lock {
 public:
  void lock() {
    while (is_locked.test_and_set(std::memory_order_acquire)) pause();
  }
  void unlock() { is_locked.clear(std::memory_order_release); }

 private:
  std::atomic_flag is_locked = ATOMIC_FLAG_INIT;
};

// A queue of one job. A helper that has finished a job spins here for the next one, and meanwhile prefetches its
// weights.
//
//   caller   product ─┐ small operations, attention ┌─ product ─┐ ...      a step is dozens of products
//   helper   product ─┴── next weights into cache ──┴─ product ─┴ ...      some ten to a hundred microseconds apart
//
// A thread that slept between jobs would take as long to wake up, and memory would be idle. The weights that followed
// last time are expected to follow again; a wrong guess only costs memory reads.
class HelperQueue {
 public:
  // Offers a job to the waiting helpers; returns their number.
  int64_t post(const std::shared_ptr<Job>& job) {
    if (job->weights.data) record_successor(job->weights);
    std::lock_guard<Lock> guard(lock);
    if (!num_waiting) return 0;
    current_job = job;
    num_posted.fetch_add(1, std::memory_order_release);
    return num_waiting;
  }

  // Works on a job and on those that follow, until no job comes within WAIT_TIME.
  void help(std::shared_ptr<Job> job) {
    for (; job && job->helper_slots.fetch_sub(1, std::memory_order_relaxed) > 0; job = wait(*job)) job->work();
  }

 private:
  // The weights that were used after other weights.
  struct Successor {
    std::atomic<const char*> previous{nullptr}, next{nullptr};
    std::atomic<int64_t> bytes{0};
  };

  Successor& successor(const char* data) {
    return successors[(reinterpret_cast<uintptr_t>(data) >> 6) % NUM_SUCCESSORS];
  }

  void record_successor(Span weights) {
    const char* previous = last_weights.exchange(weights.data, std::memory_order_relaxed);
    Successor& entry = successor(previous);
    entry.previous = previous, entry.next = weights.data, entry.bytes = weights.bytes;
  }

  // Prefetches and waits for the next job; returns null if none comes.
  std::shared_ptr<Job> wait(Job& previous_job) {
    Successor& entry = successor(previous_job.weights.data);
    bool is_known = previous_job.weights.data && entry.previous == previous_job.weights.data;
    const char* weights = entry.next;
    int64_t prefetch_end = is_known ? std::min<int64_t>(entry.bytes, MAX_PREFETCH) : 0;
    lock.lock();
    int64_t posted_before = num_posted.load(std::memory_order_relaxed);
    ++num_waiting;
    lock.unlock();
    auto deadline = Clock::now() + WAIT_TIME;
    while (num_posted.load(std::memory_order_acquire) == posted_before && Clock::now() < deadline) {
      int64_t start =
          prefetch_end ? previous_job.prefetched_bytes.fetch_add(PREFETCH_STEP, std::memory_order_relaxed) : 0;
      if (start >= prefetch_end) prefetch_end = 0, pause();
      for (int64_t line = start; line < std::min(prefetch_end, start + PREFETCH_STEP); line += 64)
        __builtin_prefetch(weights + line);
    }
    std::lock_guard<Lock> guard(lock);
    --num_waiting;
    return num_posted.load(std::memory_order_relaxed) == posted_before ? nullptr : current_job;
  }

  static constexpr std::chrono::microseconds WAIT_TIME{100};
  static constexpr int64_t MAX_PREFETCH = 1 << 20;   // bytes, about a second-level cache
  static constexpr int64_t PREFETCH_STEP = 1 << 10;  // bytes between checks for a job
  static constexpr uintptr_t NUM_SUCCESSORS = 1021;

  Lock lock;
  std::shared_ptr<Job> current_job;
  std::atomic<int64_t> num_posted{0};
  int64_t num_waiting = 0;
  std::atomic<const char*> last_weights{nullptr};
  Successor successors[NUM_SUCCESSORS];
};

// The queue of all kernel libraries: the dynamic linker merges inline variables with default visibility. It is never
// destroyed, since threads may still work while the process ends.
__attribute__((visibility("default"))) inline HelperQueue& desk = *new HelperQueue;

// Limits the number of helpers of a job. On a busy machine the system preempts a helper in the middle of a chunk, and
// the caller waits for a time slice, in which it could have done several jobs alone. If such waits exceed a fraction of
// the time, jobs start with one helper less. One helper more is tried after a delay, which doubles if that fails soon.
class HelperLimit {
 public:
  // The number of helpers to ask for, of those that are available.
  int64_t num_helpers(int64_t available, Clock::time_point now) {
    std::lock_guard<Lock> guard(lock);
    if (num_dropped && now > retry_time) --num_dropped, retry_time = now + retry_delay, excess_wait = {};
    return std::max<int64_t>(available - num_dropped, 0);
  }

  // Records a job that started with helpers at `start`, whose caller had run out of chunks at `idle_start`, and that
  // ended at `now`. `chunk_time` is the mean time of a chunk.
  void record_job(int64_t helpers, Clock::time_point start, Clock::time_point idle_start, Clock::time_point now,
                  Clock::duration chunk_time) {
    std::lock_guard<Lock> guard(lock);
    excess_wait = std::max<Clock::duration>(excess_wait - (now - start) / WAIT_DIVISOR, {});
    if (now - idle_start > std::max<Clock::duration>(LATE, 4 * chunk_time)) excess_wait += now - idle_start;
    if (excess_wait < MAX_EXCESS_WAIT) return;
    retry_delay = now - retry_time < RECENT ? std::min<Clock::duration>(2 * retry_delay, MAX_DELAY) : MIN_DELAY;
    retry_time = now + retry_delay, excess_wait = {};
    if (num_dropped < helpers) ++num_dropped;
  }

 private:
  static constexpr int64_t WAIT_DIVISOR = 8;  // waits may take this part of the time
  static constexpr std::chrono::microseconds LATE{500};
  static constexpr std::chrono::milliseconds MAX_EXCESS_WAIT{6}, MIN_DELAY{64}, MAX_DELAY{512}, RECENT{3000};

  Lock lock;
  int64_t num_dropped = 0;
  Clock::time_point retry_time;  // when one more helper is tried
  Clock::duration retry_delay{};
  Clock::duration excess_wait{};  // waits beyond the allowed part of the time
};

// The limit of all kernel libraries, shared in the same way.
__attribute__((visibility("default"))) inline HelperLimit& company = *new HelperLimit;

constexpr std::chrono::milliseconds LONG_JOB{2};  // after this time a job asks for the helpers that it started without

// Calls run(chunk), or run(chunk, upcoming chunk), for every chunk, on the caller and on free threads of the pool. The
// caller never waits for a helper that has not started, since all threads of the pool may be blocked in a collective of
// another device; so it may have to run all chunks. The pool is XLA's, except in tests.
template <typename Pool, typename Run>
void parallel(Pool& pool, int64_t chunks, const Run& run, Span weights = {}) {
  // A function pointer, so that the compiler does not inline a copy of the work at each call.
  constexpr bool CLAIMS_EARLY = std::is_invocable_v<Run, int64_t, int64_t>;
  auto call = [](const void* context, int64_t chunk, int64_t upcoming) {
    const Run& run = *static_cast<const Run*>(context);
    if constexpr (CLAIMS_EARLY)
      run(chunk, upcoming);
    else
      run(chunk);
  };
  int64_t max_helpers = std::min<int64_t>(chunks, pool.num_threads()) - 1;
  if (max_helpers < 1) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) call(&run, chunk, chunk + 1);
    return;
  }
  auto job = std::make_shared<Job>();
  job->num_chunks = chunks;
  job->claims_early = CLAIMS_EARLY;
  job->run = call;
  job->context = &run;
  job->weights = weights;
  auto request_helpers = [&](int64_t count) {
    job->helper_slots.fetch_add(count, std::memory_order_relaxed);
    for (int64_t waiting = desk.post(job); waiting < count; ++waiting) pool.Schedule([job] { desk.help(job); });
  };
  Clock::time_point start = Clock::now();
  int64_t num_helpers = company.num_helpers(max_helpers, start), num_own_chunks = 0;
  if (num_helpers) request_helpers(num_helpers);
  if (num_helpers < max_helpers) {
    num_own_chunks = job->work(start + LONG_JOB);
    if (job->next_chunk.load(std::memory_order_relaxed) < chunks) request_helpers(max_helpers - num_helpers);
  }
  num_own_chunks += job->work();
  Clock::time_point idle_start = Clock::now();
  for (int polls = 0; job->num_done.load(std::memory_order_acquire) < chunks; ++polls)
    polls < 100 ? pause() : std::this_thread::yield();  // a preempted helper may need this core
  if (num_own_chunks && num_own_chunks < chunks)
    company.record_job(max_helpers, start, idle_start, Clock::now(), (idle_start - start) / num_own_chunks);
}

}  // namespace quire
