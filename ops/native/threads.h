// Work that is spread over XLA's own threads.
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
  const char* at = nullptr;
  int64_t bytes = 0;
};

using Clock = std::chrono::steady_clock;

// Chunks of work that threads claim one at a time.
struct Job {
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<int64_t> room{0};     // for so many helpers more
  std::atomic<int64_t> fetched{0};  // bytes of what comes after it that helpers have asked for
  int64_t chunks;
  bool early;  // whether a thread claims its next chunk before it does one: coarse work would end unevenly
  void (*run)(const void*, int64_t, int64_t);
  const void* what;
  Span reads;

  int64_t claim() { return next.fetch_add(1, std::memory_order_relaxed); }

  // Does chunks until there are no more or it is so late; returns how many.
  int64_t work(Clock::time_point until = Clock::time_point::max()) {
    int64_t mine = 0;
    for (int64_t chunk = claim(); chunk < chunks; ++mine) {
      bool late = until < Clock::time_point::max() && until < Clock::now();
      int64_t upcoming = early && !late ? claim() : chunks;
      run(what, chunk, upcoming);
      chunk = early || late ? upcoming : claim();
    }
    if (mine) done.fetch_add(mine, std::memory_order_release);
    return mine;
  }
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// For a few instructions.
class Lock {
 public:
  void lock() {
    while (busy.test_and_set(std::memory_order_acquire)) pause();
  }
  void unlock() { busy.clear(std::memory_order_release); }

 private:
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
};

// Where a helper that has finished waits a moment for the next job, and reads ahead for it.
//
//   caller   product ─┐ small operations, attention ┌─ product ─┐ ...      a step is dozens of products
//   helper   product ─┴── next weights into cache ──┴─ product ─┴ ...      some ten to a hundred microseconds apart
//
// A thread that slept in between would take as long to wake, and memory would rest. Which weights come next is what
// came next the last time; a wrong guess costs nothing but the reading.
class Desk {
 public:
  // Offers a job to the threads that wait; returns how many do.
  int64_t post(const std::shared_ptr<Job>& job) {
    if (job->reads.at) remember(job->reads);
    std::lock_guard<Lock> held(lock);
    if (!waiting) return 0;
    laid_out = job;
    posted.fetch_add(1, std::memory_order_release);
    return waiting;
  }

  void help(std::shared_ptr<Job> job) {
    for (; job && job->room.fetch_sub(1, std::memory_order_relaxed) > 0; job = wait(*job)) job->work();
  }

 private:
  struct Link {
    std::atomic<const char*> from{nullptr}, to{nullptr};
    std::atomic<int64_t> bytes{0};
  };

  Link& after(const char* from) { return links[(reinterpret_cast<uintptr_t>(from) >> 6) % LINKS]; }

  void remember(Span reads) {
    const char* from = last.exchange(reads.at, std::memory_order_relaxed);
    Link& link = after(from);
    link.from = from, link.to = reads.at, link.bytes = reads.bytes;
  }

  // The next job, or null where none comes.
  std::shared_ptr<Job> wait(Job& before) {
    Link& link = after(before.reads.at);
    bool known = before.reads.at && link.from == before.reads.at;
    const char* ahead = link.to;
    int64_t stop = known ? std::min<int64_t>(link.bytes, AHEAD) : 0;
    lock.lock();
    int64_t seen = posted.load(std::memory_order_relaxed);
    ++waiting;
    lock.unlock();
    auto until = Clock::now() + PATIENCE;
    while (posted.load(std::memory_order_acquire) == seen && Clock::now() < until) {
      int64_t at = stop ? before.fetched.fetch_add(PIECE, std::memory_order_relaxed) : 0;
      if (at >= stop) stop = 0, pause();
      for (int64_t line = at; line < std::min(stop, at + PIECE); line += 64) __builtin_prefetch(ahead + line);
    }
    std::lock_guard<Lock> held(lock);
    --waiting;
    return posted.load(std::memory_order_relaxed) == seen ? nullptr : laid_out;
  }

  static constexpr std::chrono::microseconds PATIENCE{100};
  static constexpr int64_t AHEAD = 1 << 20;  // bytes, what a second-level cache holds
  static constexpr int64_t PIECE = 1 << 10;  // between looks at what is laid out
  static constexpr uintptr_t LINKS = 1021;

  Lock lock;
  std::shared_ptr<Job> laid_out;
  std::atomic<int64_t> posted{0};
  int64_t waiting = 0;
  std::atomic<const char*> last{nullptr};
  Link links[LINKS];
};

// One for all libraries of kernels: the linker makes them share what is inline and visible. It is never taken down, as
// threads may still work while the process ends.
__attribute__((visibility("default"))) inline Desk& desk = *new Desk;

// How many helpers a job asks for. On a busy machine another process takes a helper's core amid a chunk, and the caller
// waits for a slice of the scheduler's time, in which it could have done several jobs alone. Where such waits take more
// than a part of the time, jobs begin with a helper less; and after a while, longer each time that was in vain, with one
// more.
class Company {
 public:
  int64_t of(int64_t helpers, Clock::time_point now) {
    std::lock_guard<Lock> held(lock);
    if (fewer && now > again) --fewer, again = now + rest, lost = {};
    return std::max<int64_t>(helpers - fewer, 0);
  }

  // A job with helpers began, the caller had no more to do at `idle`, after chunks of so long each, and it ended now.
  void had(int64_t helpers, Clock::time_point began, Clock::time_point idle, Clock::time_point now, Clock::duration chunk) {
    std::lock_guard<Lock> held(lock);
    lost = std::max<Clock::duration>(lost - (now - began) / PART, {});
    if (now - idle > std::max<Clock::duration>(LATE, 4 * chunk)) lost += now - idle;
    if (lost < ENOUGH) return;
    rest = now - again < RECENT ? std::min<Clock::duration>(2 * rest, MOST) : LEAST;
    again = now + rest, lost = {};
    if (fewer < helpers) ++fewer;
  }

 private:
  static constexpr int64_t PART = 8;
  static constexpr std::chrono::microseconds LATE{500};
  static constexpr std::chrono::milliseconds ENOUGH{6}, LEAST{64}, MOST{512}, RECENT{3000};

  Lock lock;
  int64_t fewer = 0;
  Clock::time_point again;         // when one more is tried
  Clock::duration rest{}, lost{};  // how long until then, and what was waited beyond the part
};

__attribute__((visibility("default"))) inline Company& company = *new Company;

constexpr std::chrono::milliseconds LONG{2};  // then a job asks for the helpers, too, that it began without

// Calls run(chunk) for every chunk, on the caller and on whatever threads of the pool are free. The caller can do them
// all: it never waits for a helper that has not begun, for the pool's threads may all be parked in a collective of
// another device. The pool is XLA's; tests bring one of their own.
template <typename Pool, typename Run>
void parallel(Pool& pool, int64_t chunks, const Run& run, Span reads = {}) {
  // Through a pointer, so that the compiler makes one copy of the work.
  constexpr bool EARLY = std::is_invocable_v<Run, int64_t, int64_t>;
  auto call = [](const void* what, int64_t chunk, int64_t upcoming) {
    const Run& run = *static_cast<const Run*>(what);
    if constexpr (EARLY)
      run(chunk, upcoming);
    else
      run(chunk);
  };
  int64_t helpers = std::min<int64_t>(chunks, pool.num_threads()) - 1;
  if (helpers < 1) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) call(&run, chunk, chunk + 1);
    return;
  }
  auto job = std::make_shared<Job>();
  job->chunks = chunks, job->early = EARLY, job->run = call, job->what = &run, job->reads = reads;
  auto ask = [&](int64_t more) {
    job->room.fetch_add(more, std::memory_order_relaxed);
    for (int64_t there = desk.post(job); there < more; ++there) pool.Schedule([job] { desk.help(job); });
  };
  Clock::time_point began = Clock::now();
  int64_t first = company.of(helpers, began), mine = 0;
  if (first) ask(first);
  if (first < helpers) {
    mine = job->work(began + LONG);
    if (job->next.load(std::memory_order_relaxed) < chunks) ask(helpers - first);
  }
  mine += job->work();
  Clock::time_point idle = Clock::now();
  for (int looks = 0; job->done.load(std::memory_order_acquire) < chunks; ++looks)
    looks < 100 ? pause() : std::this_thread::yield();  // a helper whose core was taken away may need this one
  if (mine && mine < chunks) company.had(helpers, began, idle, Clock::now(), (idle - began) / mine);
}

}  // namespace quire
