// Adapters of random sizes without XLA, in buffers of exact size: results are compared with loops in double precision,
// and the results of single rows with the results of the batch.
#include <cmath>
#include <cstdio>
#include <random>

#include "adapter.h"
#include "native_pool.h"

using namespace quire;

int main(int argc, char** argv) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  int rounds = 20 * (argc > 1 ? std::atoi(argv[1]) : 20);
  for (int round = 0; round < rounds; ++round) {
    const bool is_float32 = below(2);
    const int64_t T = 1 + below(9), D = 1 + below(70), R = 1 + below(40), P = 1 + below(3);
    const int64_t slots = 1 + below(4), stack_size = 1 + below(2);
    std::vector<int32_t> bounds, adapter_slots;
    for (int64_t p = 0, end = 0; p < P; ++p) bounds.push_back(end), bounds.push_back(end += 1 + below(600));
    const int64_t O = bounds.back(), selected = below(stack_size);
    for (int64_t t = 0; t < T; ++t) adapter_slots.push_back(below(slots + 1));
    // A random array in float32 or bfloat16, and its values.
    struct RandomArray {
      std::vector<float> values;
      std::vector<uint16_t> halves;
      const char* data(bool is_float32) const {
        return is_float32 ? reinterpret_cast<const char*>(values.data()) : reinterpret_cast<const char*>(halves.data());
      }
    };
    auto random_array = [&](int64_t size) {
      RandomArray array;
      for (int64_t i = 0; i < size; ++i) {
        float v = normal(random);
        array.halves.push_back(float_to_bf16(v));
        array.values.push_back(is_float32 ? v : bf16_to_float(array.halves.back()));
      }
      return array;
    };
    const int64_t matrices = slots * stack_size;
    RandomArray x = random_array(T * D), down = random_array(matrices * D * P * R), up = random_array(matrices * R * O);
    RandomArray dora_gain = random_array(matrices * O), y = random_array(T * O);
    auto run_rows = [&](int64_t t, int64_t count, float* out) {
      Adapter a{count, D, O, x.data(is_float32) + t * D * (is_float32 ? 4 : 2), is_float32,
                adapter_slots.data() + t, slots, stack_size, selected,
                {down.data(is_float32), is_float32, D, P * R}, {up.data(is_float32), is_float32, R, O},
                dora_gain.values.data(), bounds.data(), P, out};
      Pool pool;
      is_float32 ? a.run<true>(pool) : a.run<false>(pool);
    };
    std::vector<float> out = y.values;
    run_rows(0, T, out.data());
    for (int64_t t = 0; t < T; ++t) {
      std::vector<float> alone(y.values.begin() + t * O, y.values.begin() + (t + 1) * O);
      run_rows(t, 1, alone.data());
      if (std::memcmp(alone.data(), &out[t * O], O * sizeof(float)))
        return std::printf("round %d: other bits alone\n", round);
      for (int64_t p = 0; p < P; ++p)
        for (int64_t o = bounds[2 * p]; o < bounds[2 * p + 1]; ++o) {
          double expected = y.values[t * O + o], magnitude = 1;
          if (adapter_slots[t] < slots) {
            int64_t matrix = adapter_slots[t] * stack_size + selected;
            expected += dora_gain.values[matrix * O + o] * expected;
            for (int64_t r = 0; r < R; ++r) {
              double inner = 0;
              for (int64_t d = 0; d < D; ++d)
                inner += double(x.values[t * D + d]) * down.values[(matrix * D + d) * P * R + p * R + r];
              double delta = inner * up.values[(matrix * R + r) * O + o];
              expected += delta, magnitude += std::abs(delta);
            }
          }
          if (std::abs(out[t * O + o] - expected) > 1e-5 * magnitude)
            return std::printf("round %d: row %d is wrong\n", round, int(t));
        }
    }
  }
  return 0;
}
