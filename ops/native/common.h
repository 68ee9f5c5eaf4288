// What the kernels share: vectors of sixteen, number formats, and work spread over XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Whether the machine multiplies pairs of bfloat16 and adds both products to a float.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUIRE_BF16_PAIRS 1
#endif

namespace quire {

constexpr int LANES = 16;

// GCC and Clang turn these into whatever vectors the machine has: one of AVX-512, two of AVX2, four of NEON.
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef float f32x16u __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16u __attribute__((vector_size(64), aligned(4)));

typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

// And as many as a vector of the machine holds, for loops that keep sums in registers: wider ones GCC leaves in memory.
#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t U16 __attribute__((vector_size(2 * W)));
typedef uint8_t U8 __attribute__((vector_size(W)));
typedef int8_t I8 __attribute__((vector_size(W)));

template <typename Vector>
Vector lanes(const void* p) {
  Vector x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// acc + the products of each lane's pair of bfloat16 with one pair; each rounding is to an odd last bit where it is not exact.
inline F dot_pair(F acc, U w, const uint16_t* x) {
  uint32_t pair;
  std::memcpy(&pair, x, 4);
  return (F)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x8_t)vdupq_n_u32(pair));
}
#endif

inline f32x16 load(const float* p) { return *reinterpret_cast<const f32x16u*>(p); }
inline void store(float* p, f32x16 x) { *reinterpret_cast<f32x16u*>(p) = x; }
inline u32x16 load_bits(const void* p) { return *reinterpret_cast<const u32x16u*>(p); }
inline f32x16 splat(float x) { return f32x16{} + x; }

inline float widen(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Sixteen bfloat16 from a 32-byte vector, and back.
inline f32x16 load_wide(const uint16_t* p) {
  u16x16 bits;
  std::memcpy(&bits, p, 32);
  return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

inline void store_narrow(uint16_t* p, f32x16 x) {
  u32x16 bits = (u32x16)x;
  u32x16 nan = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : u32x16{};
  u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  u16x16 half = __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, u16x16);
  std::memcpy(p, &half, 32);
}

// e to the x, within two units in the last place; 0 below -87.3, infinite above 88.7.
inline f32x16 exp(f32x16 x) {
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  f32x16 y = x < -87.3f ? splat(-87.3f) : x;
  y = y > 88.7f ? splat(88.7f) : y;
  f32x16 shifted = y * 1.44269504f + round;
  f32x16 n = shifted - round;
  f32x16 r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i32x16 power = ((i32x16)shifted - 0x4b400000 + 127) << 23;
  p = p * (f32x16)power;
  return x < -87.3f ? f32x16{} : p;
}

inline f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// Memory that a product reads once, from its beginning.
struct Span {
  const char* at = nullptr;
  int64_t bytes = 0;
};

// Chunks of work that threads claim one at a time.
struct Job {
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<int64_t> fetched{0};  // bytes of what comes after it that helpers have asked for
  int64_t chunks;
  bool early;  // whether a thread claims its next chunk before it does one: coarse work would end unevenly
  void (*run)(const void*, int64_t, int64_t);
  const void* what;
  Span reads;

  int64_t claim() { return next.fetch_add(1, std::memory_order_relaxed); }

  void work() {
    int64_t mine = 0;
    for (int64_t chunk = claim(); chunk < chunks; ++mine) {
      int64_t upcoming = early ? claim() : chunks;
      run(what, chunk, upcoming);
      chunk = early ? upcoming : claim();
    }
    if (mine) done.fetch_add(mine, std::memory_order_release);
  }
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

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
    std::lock_guard<Desk> held(*this);
    if (!waiting) return 0;
    laid_out = job;
    posted.fetch_add(1, std::memory_order_release);
    return waiting;
  }

  void help(std::shared_ptr<Job> job) {
    for (; job; job = wait(*job)) job->work();
  }

  void lock() {
    while (busy.test_and_set(std::memory_order_acquire)) pause();
  }
  void unlock() { busy.clear(std::memory_order_release); }

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
    lock();
    int64_t seen = posted.load(std::memory_order_relaxed);
    ++waiting;
    unlock();
    auto until = std::chrono::steady_clock::now() + PATIENCE;
    while (posted.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until) {
      int64_t at = stop ? before.fetched.fetch_add(PIECE, std::memory_order_relaxed) : 0;
      if (at >= stop) stop = 0, pause();
      for (int64_t line = at; line < std::min(stop, at + PIECE); line += 64) __builtin_prefetch(ahead + line);
    }
    std::lock_guard<Desk> held(*this);
    --waiting;
    return posted.load(std::memory_order_relaxed) == seen ? nullptr : laid_out;
  }

  static constexpr std::chrono::microseconds PATIENCE{100};
  static constexpr int64_t AHEAD = 1 << 20;  // bytes, what a second-level cache holds
  static constexpr int64_t PIECE = 1 << 10;  // between looks at what is laid out
  static constexpr uintptr_t LINKS = 1021;

  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::shared_ptr<Job> laid_out;
  std::atomic<int64_t> posted{0};
  int64_t waiting = 0;
  std::atomic<const char*> last{nullptr};
  Link links[LINKS];
};

// One for all libraries of kernels: the linker makes them share what is inline and visible. It is never taken down, as
// threads may still work while the process ends.
__attribute__((visibility("default"))) inline Desk& desk = *new Desk;

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
  for (int64_t there = desk.post(job); there < helpers; ++there) pool.Schedule([job] { desk.help(job); });
  job->work();
  for (int looks = 0; job->done.load(std::memory_order_acquire) < chunks; ++looks)
    looks < 100 ? pause() : std::this_thread::yield();  // a helper whose core was taken away may need this one
}

}  // namespace quire
