// Sampling: from a row of logits to a token, and log-probabilities from the raw logits.
//
//   raw ── bias, bans, penalties ──> adjusted ── temperature, min-p, top-k, top-p ──> weights ── draw ──> token
//
// Rows are not sorted. A row is divided into blocks, of which each has a maximum: the k-th largest maximum is a lower
// bound of the k-th largest logit, so few candidates are left to select from. min-p, top-k and top-p each keep the
// tokens whose logits are not below a floor. Sums run over a row in a fixed order, so results are batch-invariant.
#pragma once

#include "common.h"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace quire {
namespace sampling {

constexpr int64_t BLOCK = 256;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
// In place of a token: the raw logits are NaN, +inf or all -inf; or no token is allowed. As in ops/sampling.
constexpr int32_t BROKEN = -1, BANNED = -2;

// Arguments and results of the op: see `SlotState`, `SamplingInputs` and `Sampled` in Python.
struct SamplingCall {
  // R: rows, V: vocabulary, J: bias rows of a slot, X: bans of a row, K: listed log-probabilities, L: token ids of a
  // slot whose log-probabilities are requested.
  int64_t R, V, J, X, K, L;
  const float *logits, *bias;
  const bool* stop;
  const int32_t* output_counts;
  const bool* prompt;
  const int32_t* logprob_token_ids;
  const int32_t *slots, *bias_rows, *drafted, *positions;
  const uint32_t* seeds;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const bool* ban_stop;
  const int32_t *bans, *targets;
  const bool *is_biased, *wants_logprobs;

  int32_t* tokens;
  float* logprobs;
  int32_t *ranks, *top_ids;
  float *top_logprobs, *token_id_logprobs;
  bool* ok;
};

// Calls run(i, values) for every sixteen of the values from `begin` to `end`; the last vector is padded with -inf.
template <typename Run>
inline void for_each_16(const float* x, int64_t begin, int64_t end, const Run& run) {
  for (; begin + LANES <= end; begin += LANES) run(begin, load(x + begin));
  if (begin == end) return;
  float tail[LANES];
  std::fill(tail, tail + LANES, MINUS_INFINITY);
  std::memcpy(tail, x + begin, (end - begin) * sizeof(float));
  run(begin, load(tail));
}

struct Candidate {
  float logit;
  float weight;
  int32_t token;
};

// The largest logit such that the weights of the candidates that are not below it add up to `target`; the smallest
// logit if there is none. Quickselect; reorders the candidates.
inline float find_threshold(std::vector<Candidate>& candidates, double target) {
  auto first = candidates.begin(), last = candidates.end();
  while (last - first > 1) {
    float a = first->logit, b = (first + (last - first) / 2)->logit, c = (last - 1)->logit;
    float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    auto equal = std::partition(first, last, [&](const Candidate& x) { return x.logit > pivot; });
    auto less = std::partition(equal, last, [&](const Candidate& x) { return x.logit == pivot; });
    double greater_weight = 0, equal_weight = 0;
    for (auto x = first; x != equal; ++x) greater_weight += x->weight;
    for (auto x = equal; x != less; ++x) equal_weight += x->weight;
    if (equal != first && greater_weight >= target) {
      last = equal;
    } else {
      target -= greater_weight + equal_weight;
      if (target <= 0 || less == last) return pivot;
      first = less;
    }
  }
  return first->logit;
}

// One row's logits, and the maximum of each of its blocks.
class Logits {
 public:
  Logits(const float* data, int64_t V, std::vector<float>& buffer) : data(data), V(V), block_max(buffer) {
    block_max.resize((V + BLOCK - 1) / BLOCK);
    i32x16 is_nan{};
    for (size_t b = 0; b < block_max.size(); ++b) {
      f32x16 max_lanes = splat(MINUS_INFINITY);
      for_each_16(data, block_begin(b), block_end(b), [&](int64_t, f32x16 x) {
        max_lanes = select(x > max_lanes, x, max_lanes);
        is_nan |= x != x;
      });
      float array[LANES];
      store(array, max_lanes);
      block_max[b] = *std::max_element(array, array + LANES);
      max_logit = std::max(max_logit, block_max[b]);
    }
    for (int i = 0; i < LANES; ++i) is_invalid |= is_nan[i] != 0;
    is_invalid |= !std::isfinite(max_logit);
  }

  int64_t block_begin(size_t block) const { return static_cast<int64_t>(block) * BLOCK; }
  int64_t block_end(size_t block) const { return std::min(V, block_begin(block + 1)); }
  size_t num_blocks() const { return block_max.size(); }

  // The first token with the largest logit.
  int32_t argmax() const {
    size_t b = 0;
    while (b + 1 < num_blocks() && block_max[b] != max_logit) ++b;
    int64_t i = block_begin(b);
    while (i + 1 < V && data[i] != max_logit) ++i;
    return static_cast<int32_t>(i);
  }

  // A lower bound of the k-th largest logit.
  float top_k_bound(int64_t k) const {
    if (k > static_cast<int64_t>(num_blocks())) return MINUS_INFINITY;
    std::vector<float> sorted(block_max);
    std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), std::greater<float>());
    return sorted[k - 1];
  }

  // Collects the tokens whose logits are not below `floor`.
  void collect(float floor, std::vector<Candidate>& candidates) const {
    candidates.clear();
    for (size_t b = 0; b < num_blocks(); ++b)
      if (block_max[b] >= floor)
        for (int64_t i = block_begin(b); i < block_end(b); ++i)
          if (data[i] >= floor) candidates.push_back({data[i], 1, static_cast<int32_t>(i)});
  }

  const float* const data;
  const int64_t V;
  float max_logit = MINUS_INFINITY;
  bool is_invalid = false;  // some are NaN or +inf, or all are -inf

 private:
  std::vector<float>& block_max;
};

// Unnormalised probabilities of the tokens, and their sum in each block.
class Weights {
 public:
  Weights(const Logits& logits, float temperature, float floor, std::vector<float>& buffer,
          std::vector<double>& block_sums)
      : logits(logits), weights(buffer), block_sums(block_sums) {
    weights.resize((logits.V + LANES - 1) / LANES * LANES);
    float inverse_temperature = 1 / temperature;
    compute([&](int64_t, f32x16 logit) {
      f32x16 weight = exp((logit - logits.max_logit) * inverse_temperature);
      return select(logit >= floor, weight, f32x16{});
    });
  }

  // Removes the tokens whose logits are below `floor`.
  void keep_above(float floor) {
    compute([&](int64_t i, f32x16 logit) { return select(logit >= floor, load(weights.data() + i), f32x16{}); });
  }

  // Collects the tokens of nonzero weights that are at least `min_weight`.
  void collect(double min_weight, std::vector<Candidate>& candidates) const {
    candidates.clear();
    for (size_t b = 0; b < block_sums.size(); ++b)
      if (block_sums[b] >= min_weight)
        for (int64_t i = logits.block_begin(b); i < logits.block_end(b); ++i)
          if (weights[i] > 0 && weights[i] >= min_weight)
            candidates.push_back({logits.data[i], weights[i], static_cast<int32_t>(i)});
  }

  // Inverse transform sampling: the token at `quantile`, from 0 to below 1, of the cumulative distribution.
  int32_t draw(double quantile) const {
    double target = quantile * total, cumulative = 0;
    size_t block = 0;
    for (size_t b = 0; b < block_sums.size(); ++b) {  // the last nonzero block if rounding errors leave none
      if (block_sums[b] == 0) continue;
      block = b;
      if (cumulative + block_sums[b] > target) break;
      cumulative += block_sums[b];
    }
    int64_t token = logits.block_begin(block);
    for (int64_t i = token; i < logits.block_end(block); ++i) {
      if (weights[i] == 0) continue;
      token = i;
      cumulative += weights[i];
      if (cumulative > target) break;
    }
    return static_cast<int32_t>(token);
  }

  double total = 0;

 private:
  // Sets the weights to weight_of(i, logits), sixteen at a time, and sums them.
  template <typename WeightOf>
  void compute(const WeightOf& weight_of) {
    block_sums.resize(logits.num_blocks());
    total = 0;
    for (size_t b = 0; b < block_sums.size(); ++b) {
      f32x16 sum_lanes{};
      for_each_16(logits.data, logits.block_begin(b), logits.block_end(b), [&](int64_t i, f32x16 logit) {
        f32x16 weight = weight_of(i, logit);
        store(weights.data() + i, weight);
        sum_lanes += weight;
      });
      double sum = 0;
      float array[LANES];
      store(array, sum_lanes);
      for (float value : array) sum += value;
      total += block_sums[b] = sum;
    }
  }

  const Logits& logits;
  std::vector<float>& weights;
  std::vector<double>& block_sums;
};

// Threefry-2x32 with twenty rounds, as `jax.random.fold_in` calls it; the first of its two words.
inline uint32_t threefry(const uint32_t* key, uint32_t data) {
  constexpr int ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bdau};
  uint32_t x = keys[0], y = data + keys[1];
  for (uint32_t round = 0; round < 5; ++round) {
    for (int rotation : ROTATIONS[round % 2]) {
      x += y;
      y = (y << rotation | y >> (32 - rotation)) ^ x;
    }
    x += keys[(round + 1) % 3];
    y += keys[(round + 2) % 3] + round + 1;
  }
  return x;
}

// Buffers for sampling a row. Each thread keeps them between calls.
struct Scratch {
  std::vector<float> adjusted, block_max, adjusted_block_max, weights;
  std::vector<double> block_sums;
  std::vector<int32_t> counts;
  std::vector<Candidate> candidates;
};

struct RowSampler {
  const SamplingCall& a;
  const int64_t r;
  Scratch& scratch;

  int64_t slot(int64_t num_slots) const { return std::clamp<int64_t>(a.slots[r], 0, num_slots - 1); }

  bool has_mask() const {
    const int32_t* bans = a.bans + r * a.X;
    return a.is_biased[r] || a.ban_stop[r] || std::any_of(bans, bans + a.X, [](int32_t ban) { return ban >= 0; });
  }
  bool has_penalties() const {
    return a.repetition_penalty[r] != 1 || a.presence_penalty[r] != 0 || a.frequency_penalty[r] != 0;
  }

  // Applies the bias and the bans.
  void apply_mask(float* x, int64_t slot) const {
    const float* bias = a.bias + (slot * a.J + std::clamp<int64_t>(a.bias_rows[r], 0, a.J - 1)) * a.V;
    const bool* stop = a.stop + slot * a.V;
    if (a.is_biased[r])
      for (int64_t i = 0; i < a.V; ++i) x[i] += bias[i];
    if (a.ban_stop[r])
      for (int64_t i = 0; i < a.V; ++i) x[i] = stop[i] ? MINUS_INFINITY : x[i];
    for (int64_t i = r * a.X; i < (r + 1) * a.X; ++i)
      if (a.bans[i] >= 0 && a.bans[i] < a.V) x[a.bans[i]] = MINUS_INFINITY;
  }

  void apply_penalties(float* x, int64_t slot) const {
    const int32_t* counts = a.output_counts + slot * a.V;
    const bool* prompt = a.prompt + slot * a.V;
    const int32_t* drafted = a.drafted + r * a.J;
    if (std::any_of(drafted, drafted + a.J, [](int32_t token) { return token >= 0; })) {
      scratch.counts.assign(counts, counts + a.V);
      for (int64_t j = 0; j < a.J; ++j)
        if (drafted[j] >= 0 && drafted[j] < a.V) ++scratch.counts[drafted[j]];
      counts = scratch.counts.data();
    }
    auto penalise = [&](int64_t i, auto num_lanes) {
      F logit{};
      I count{};
      uint8_t in_prompt[W] = {};
      std::memcpy(&logit, x + i, num_lanes * sizeof(float));
      std::memcpy(&count, counts + i, num_lanes * sizeof(int32_t));
      std::memcpy(in_prompt, prompt + i, num_lanes);
      F repeated = logit > 0.0f ? logit / a.repetition_penalty[r] : logit * a.repetition_penalty[r];
      I in_output = count > 0, occurs = in_output | (load_bytes(in_prompt) != 0.0f);
      logit = (occurs ? repeated : logit) - a.frequency_penalty[r] * __builtin_convertvector(count, F);
      logit -= in_output ? F{} + a.presence_penalty[r] : F{};
      std::memcpy(x + i, &logit, num_lanes * sizeof(float));
    };
    int64_t vector_end = a.V / W * W;
    for (int64_t i = 0; i < vector_end; i += W) penalise(i, std::integral_constant<int64_t, W>());
    penalise(vector_end, a.V - vector_end);
  }

  int32_t draw(const Logits& x) const {
    // At least the smallest normal float, since weights would be 0 / 0.
    float temperature = std::max(a.temperature[r], std::numeric_limits<float>::min());
    // The floor of min-p 0 is -inf.
    float floor = std::min(x.max_logit, x.max_logit + temperature * std::log(a.min_p[r]));
    if (int64_t k = a.top_k[r]; k > 0 && k < a.V) {
      x.collect(std::max(floor, x.top_k_bound(k)), scratch.candidates);
      floor = std::max(floor, find_threshold(scratch.candidates, static_cast<double>(k)));
    }
    Weights weights(x, temperature, floor, scratch.weights, scratch.block_sums);
    if (float p = a.top_p[r]; p < 1) {
      // The tokens below this weight add up to less than half of the mass that top-p may remove.
      weights.collect((1.0 - p) * weights.total / static_cast<double>(2 * a.V), scratch.candidates);
      weights.keep_above(std::max(floor, find_threshold(scratch.candidates, p * weights.total)));
    }
    uint32_t bits = threefry(a.seeds + 2 * r, static_cast<uint32_t>(a.positions[r]));
    return weights.draw((bits >> 8) * 0x1p-24);
  }

  // Returns the token, or BROKEN or BANNED.
  int32_t choose_token(const Logits& raw, int64_t slot) const {
    bool adjusts = has_mask() || has_penalties();
    if (!adjusts) return a.temperature[r] > 0 ? draw(raw) : raw.argmax();
    scratch.adjusted.assign(raw.data, raw.data + a.V);
    if (has_mask()) apply_mask(scratch.adjusted.data(), slot);
    if (has_penalties()) apply_penalties(scratch.adjusted.data(), slot);
    Logits x(scratch.adjusted.data(), a.V, scratch.adjusted_block_max);
    if (x.is_invalid) return x.max_logit == MINUS_INFINITY ? BANNED : BROKEN;
    return a.temperature[r] > 0 ? draw(x) : x.argmax();
  }

  // Writes the log-probabilities and the rank of the token.
  void write_logprobs(const Logits& raw, int32_t token, int64_t slot) const {
    Weights weights(raw, 1, MINUS_INFINITY, scratch.weights, scratch.block_sums);
    float log_sum = static_cast<float>(raw.max_logit + std::log(weights.total)), token_logit = raw.data[token];
    i32x16 num_greater{};
    for_each_16(raw.data, 0, a.V, [&](int64_t, f32x16 x) { num_greater -= x > token_logit; });
    int32_t rank = 1;
    for (int i = 0; i < LANES; ++i) rank += num_greater[i];
    a.logprobs[r] = token_logit - log_sum, a.ranks[r] = rank;
    for (int64_t l = 0; l < a.L; ++l) {
      int64_t i = std::clamp<int64_t>(a.logprob_token_ids[slot * a.L + l], 0, a.V - 1);
      a.token_id_logprobs[r * a.L + l] = raw.data[i] - log_sum;
    }

    auto& top = scratch.candidates;
    raw.collect(raw.top_k_bound(a.K), top);
    std::partial_sort(top.begin(), top.begin() + a.K, top.end(), [](const Candidate& x, const Candidate& y) {
      return x.logit != y.logit ? x.logit > y.logit : x.token < y.token;
    });
    for (int64_t k = 0; k < a.K; ++k)
      a.top_ids[r * a.K + k] = top[k].token, a.top_logprobs[r * a.K + k] = top[k].logit - log_sum;
  }

  void run(int64_t num_slots) const {
    Logits raw(a.logits + r * a.V, a.V, scratch.block_max);
    bool has_target = a.targets[r] >= 0;
    int32_t token = raw.is_invalid ? BROKEN
                    : has_target   ? std::min<int64_t>(a.targets[r], a.V - 1)
                                   : choose_token(raw, slot(num_slots));
    a.ok[r] = token >= 0;
    a.tokens[r] = token;
    if (a.ok[r] && a.wants_logprobs[r]) return write_logprobs(raw, token, slot(num_slots));
    a.logprobs[r] = 0, a.ranks[r] = 0;
    std::fill_n(a.top_ids + r * a.K, a.K, 0);
    std::fill_n(a.top_logprobs + r * a.K, a.K, 0.0f);
    std::fill_n(a.token_id_logprobs + r * a.L, a.L, 0.0f);
  }
};

}  // namespace sampling
}  // namespace quire
