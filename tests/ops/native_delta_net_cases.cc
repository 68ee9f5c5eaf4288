// The gated delta rule in random cases without XLA, on threads: against a loop in double precision.
#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "delta_net.h"

using namespace quire;

int main(int argc, char** argv) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  auto random_values = [&](int64_t size, float low, float high) {
    std::vector<float> x(size);
    for (auto& value : x) value = low + (high - low) * static_cast<float>(below(1000)) / 1000;
    return x;
  };
  int rounds = 10 * (argc > 1 ? std::atoi(argv[1]) : 20);
  for (int round = 0; round < rounds; ++round) {
    constexpr int64_t SIZES[] = {1, 5, 16, 33, 48, 80};
    const int64_t B = 3, num_slots = 4;
    const int64_t K = 1 + below(2), N = K * (1 + below(3)), H = 1 + below(20), V = SIZES[below(6)];
    const bool by_key = below(2), corrects = below(2);
    std::vector<int32_t> starts{0}, slots{2, 0, static_cast<int32_t>(num_slots)}, is_first_step(B), num_kept(B);
    for (int64_t b = 0; b < B; ++b) {
      int64_t rows = below(6);
      starts.push_back(starts.back() + static_cast<int32_t>(rows));
      is_first_step[b] = static_cast<int32_t>(below(2)), num_kept[b] = static_cast<int32_t>(below(rows + 2));
    }
    const int64_t T = starts.back() + 2;
    auto q = random_values(T * K * H, -1, 1), k = random_values(T * K * H, -0.3f, 0.3f);
    auto v = random_values(T * N * V, -1, 1);
    auto decay = random_values(T * N * (by_key ? H : 1), 0.5f, 1), beta = random_values(T * N, 0, 1);
    auto memory = random_values(num_slots * N * H * V, -1, 1);
    const auto old_memory = memory;
    std::vector<float> out(T * N * V);
    delta::DeltaCall a{T, K, H, N, V, num_slots, q.data(), k.data(), v.data(), decay.data(), beta.data(), starts.data(),
                       slots.data(), is_first_step.data(), num_kept.data(), memory.data(), out.data(), corrects,
                       by_key};
    std::vector<std::thread> threads;
    for (int64_t thread_id = 0; thread_id < 3; ++thread_id)
      threads.emplace_back([&, thread_id] {
        for (int64_t item = thread_id; item < B * N * delta::items_per_head(a); item += 3) delta::process_item(a, item);
      });
    for (auto& thread : threads) thread.join();
    for (int64_t b = 0; b < B; ++b)
      for (int64_t n = 0; n < N && slots[b] < num_slots; ++n) {
        std::vector<double> m(H * V);
        for (int64_t i = 0; i < H * V && !is_first_step[b]; ++i) m[i] = old_memory[(slots[b] * N + n) * H * V + i];
        for (int64_t t = starts[b]; t < starts[b + 1]; ++t)
          for (int64_t c = 0; c < V; ++c) {
            const int64_t g = (t * K + n / (N / K)) * H;
            double predicted = 0, expected = 0;
            for (int64_t h = 0; h < H; ++h) {
              m[h * V + c] *= decay[(t * N + n) * (by_key ? H : 1) + (by_key ? h : 0)];
              predicted += m[h * V + c] * k[g + h];
            }
            const double error = (v[(t * N + n) * V + c] - (corrects ? predicted : 0)) * beta[t * N + n];
            for (int64_t h = 0; h < H; ++h) expected += (m[h * V + c] += error * k[g + h]) * q[g + h];
            if (std::abs(expected - out[(t * N + n) * V + c]) > 1e-4)
              return std::printf("round %d: row %d of head %d is wrong\n", round, int(t), int(n));
          }
      }
    for (int64_t other_slot = 0; other_slot < num_slots; ++other_slot)
      for (int64_t i = 0; i < N * H * V && other_slot != slots[0] && other_slot != slots[1]; ++i)
        if (memory[other_slot * N * H * V + i] != old_memory[other_slot * N * H * V + i])
          return std::printf("round %d: the memory of another slot has changed\n", round);
  }
  return 0;
}
