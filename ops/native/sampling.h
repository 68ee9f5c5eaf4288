// Sampling: from a row of logits to a token, with what was asked of the raw logits.
//
//   raw ── bias, bans, penalties ──> adjusted ── temperature, min-p, top-k, top-p ──> weights ── a draw ──> token
//
// No row is sorted. A row is looked at in blocks, each with its best: the k-th best of those is no better than the k-th
// best of all, so few values are left to choose from. What min-p, top-k and top-p keep is what reaches some logit, the
// floor. Sums run over a row alone in a fixed order, so a row's result does not depend on which others are drawn.
#pragma once

#include "common.h"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace quire {
namespace sampling {

constexpr int64_t BLOCK = 256;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
// In place of a token: the raw logits are NaN, +inf or all -inf; or no token is allowed. As in ops/sampling.
constexpr int32_t BROKEN = -1, BANNED = -2;

// What lives as long as a request, and how each row is sampled: see `SlotState` and `SamplingInputs` in Python.
struct Call {
  // Rows, vocabulary, rows that a slot may have, bans a row, listed log-probabilities, wanted ones.
  int64_t R, V, J, X, K, L;
  const float *logits, *bias;
  const bool* stop;
  const int32_t* counts;
  const bool* prompt;
  const int32_t* wanted;
  const int32_t *slots, *bias_rows, *drafted, *positions;
  const uint32_t* seeds;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p, *repetition, *presence, *frequency;
  const bool* ban_stop;
  const int32_t *bans, *targets;
  const bool *biased, *wants_logprobs;

  int32_t* tokens;
  float* logprobs;
  int32_t *ranks, *top_ids;
  float *top_logprobs, *wanted_logprobs;
  bool* ok;
};

// Calls take(i, the sixteen values from i on); what lies past the end is -inf.
template <typename Take>
inline void sixteens(const float* x, int64_t from, int64_t to, const Take& take) {
  for (; from + LANES <= to; from += LANES) take(from, load(x + from));
  if (from == to) return;
  float end[LANES];
  std::fill(end, end + LANES, NOTHING);
  std::memcpy(end, x + from, (to - from) * sizeof(float));
  take(from, load(end));
}

// A value, with what it weighs.
struct Candidate {
  float logit;
  float weight;
  int32_t token;
};

// The best logit such that the weights of the candidates that reach it add up to the need; at worst the least of them.
inline float threshold(std::vector<Candidate>& all, double need) {
  auto first = all.begin(), last = all.end();
  while (last - first > 1) {
    float a = first->logit, b = (first + (last - first) / 2)->logit, c = (last - 1)->logit;
    float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    auto equal = std::partition(first, last, [&](const Candidate& x) { return x.logit > pivot; });
    auto less = std::partition(equal, last, [&](const Candidate& x) { return x.logit == pivot; });
    double above = 0, level = 0;
    for (auto x = first; x != equal; ++x) above += x->weight;
    for (auto x = equal; x != less; ++x) level += x->weight;
    if (equal != first && above >= need) {
      last = equal;
    } else {
      need -= above + level;
      if (need <= 0 || less == last) return pivot;
      first = less;
    }
  }
  return first->logit;
}

// One row's logits, and the best of each of its blocks.
class Logits {
 public:
  Logits(const float* at, int64_t V, std::vector<float>& room) : at(at), V(V), most(room) {
    most.resize((V + BLOCK - 1) / BLOCK);
    i32x16 nan{};
    for (size_t b = 0; b < most.size(); ++b) {
      f32x16 block = splat(NOTHING);
      sixteens(at, start(b), stop(b), [&](int64_t, f32x16 x) {
        block = select(x > block, x, block);
        nan |= x != x;
      });
      float each[LANES];
      store(each, block);
      most[b] = *std::max_element(each, each + LANES);
      best = std::max(best, most[b]);
    }
    for (int i = 0; i < LANES; ++i) broken |= nan[i] != 0;
    broken |= !std::isfinite(best);
  }

  int64_t start(size_t block) const { return static_cast<int64_t>(block) * BLOCK; }
  int64_t stop(size_t block) const { return std::min(V, start(block + 1)); }
  size_t blocks() const { return most.size(); }

  // The first of the best.
  int32_t argmax() const {
    size_t b = 0;
    while (b + 1 < blocks() && most[b] != best) ++b;
    int64_t i = start(b);
    while (i + 1 < V && at[i] != best) ++i;
    return static_cast<int32_t>(i);
  }

  // A floor that at least k logits reach.
  float at_least(int64_t k) const {
    if (k > static_cast<int64_t>(blocks())) return NOTHING;
    std::vector<float> some(most);
    std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<float>());
    return some[k - 1];
  }

  // The logits that reach a floor.
  void gather(float floor, std::vector<Candidate>& into) const {
    into.clear();
    for (size_t b = 0; b < blocks(); ++b)
      if (most[b] >= floor)
        for (int64_t i = start(b); i < stop(b); ++i)
          if (at[i] >= floor) into.push_back({at[i], 1, static_cast<int32_t>(i)});
  }

  const float* const at;
  const int64_t V;
  float best = NOTHING;
  bool broken = false;  // not a number, infinite, or nothing but -inf

 private:
  std::vector<float>& most;
};

// What each token weighs in a draw, with a sum for each block.
class Weights {
 public:
  Weights(const Logits& x, float temperature, float floor, std::vector<float>& room, std::vector<double>& sums)
      : x(x), w(room), sums(sums) {
    w.resize((x.V + LANES - 1) / LANES * LANES);
    float sharpness = 1 / temperature;
    sum([&](int64_t, f32x16 logit) {
      f32x16 weight = exp((logit - x.best) * sharpness);
      return select(logit >= floor, weight, f32x16{});
    });
  }

  // Leaves the tokens that reach the floor.
  void keep(float floor) {
    sum([&](int64_t i, f32x16 logit) { return select(logit >= floor, load(w.data() + i), f32x16{}); });
  }

  // Those that weigh something, and this at least.
  void gather(double least, std::vector<Candidate>& into) const {
    into.clear();
    for (size_t b = 0; b < sums.size(); ++b)
      if (sums[b] >= least)
        for (int64_t i = x.start(b); i < x.stop(b); ++i)
          if (w[i] > 0 && w[i] >= least) into.push_back({x.at[i], w[i], static_cast<int32_t>(i)});
  }

  // The token in whose part of the whole the share, from 0 to below 1, falls.
  int32_t draw(double share) const {
    double target = share * total, before = 0;
    size_t block = 0;
    for (size_t b = 0; b < sums.size(); ++b) {  // rounding may leave no block for the very end: then the last
      if (sums[b] == 0) continue;
      block = b;
      if (before + sums[b] > target) break;
      before += sums[b];
    }
    int64_t token = x.start(block);
    for (int64_t i = token; i < x.stop(block); ++i) {
      if (w[i] == 0) continue;
      token = i;
      before += w[i];
      if (before > target) break;
    }
    return static_cast<int32_t>(token);
  }

  double total = 0;

 private:
  template <typename Weigh>
  void sum(const Weigh& weigh) {
    sums.resize(x.blocks());
    total = 0;
    for (size_t b = 0; b < sums.size(); ++b) {
      f32x16 lanes{};
      sixteens(x.at, x.start(b), x.stop(b), [&](int64_t i, f32x16 logit) {
        f32x16 weight = weigh(i, logit);
        store(w.data() + i, weight);
        lanes += weight;
      });
      double all = 0;
      float each[LANES];
      store(each, lanes);
      for (float one : each) all += one;
      total += sums[b] = all;
    }
  }

  const Logits& x;
  std::vector<float>& w;
  std::vector<double>& sums;
};

// Threefry with twenty rounds, as `jax.random.fold_in` calls it; the first of its two words.
inline uint32_t threefry(const uint32_t* key, uint32_t data) {
  constexpr int TURNS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bdau};
  uint32_t x = keys[0], y = data + keys[1];
  for (uint32_t round = 0; round < 5; ++round) {
    for (int turn : TURNS[round % 2]) {
      x += y;
      y = (y << turn | y >> (32 - turn)) ^ x;
    }
    x += keys[(round + 1) % 3];
    y += keys[(round + 2) % 3] + round + 1;
  }
  return x;
}

// What rows need to be worked on in; each thread keeps its own.
struct Scratch {
  std::vector<float> adjusted, most, most_adjusted, weights;
  std::vector<double> sums;
  std::vector<int32_t> counts;
  std::vector<Candidate> candidates;
};

struct Row {
  const Call& a;
  const int64_t r;
  Scratch& room;

  int64_t slot(int64_t size) const { return std::clamp<int64_t>(a.slots[r], 0, size - 1); }

  bool masked() const {
    const int32_t* bans = a.bans + r * a.X;
    return a.biased[r] || a.ban_stop[r] || std::any_of(bans, bans + a.X, [](int32_t ban) { return ban >= 0; });
  }
  bool penalised() const { return a.repetition[r] != 1 || a.presence[r] != 0 || a.frequency[r] != 0; }

  void mask(float* x, int64_t slot) const {
    const float* bias = a.bias + (slot * a.J + std::clamp<int64_t>(a.bias_rows[r], 0, a.J - 1)) * a.V;
    const bool* stop = a.stop + slot * a.V;
    if (a.biased[r])
      for (int64_t i = 0; i < a.V; ++i) x[i] += bias[i];
    if (a.ban_stop[r])
      for (int64_t i = 0; i < a.V; ++i) x[i] = stop[i] ? NOTHING : x[i];
    for (int64_t i = r * a.X; i < (r + 1) * a.X; ++i)
      if (a.bans[i] >= 0 && a.bans[i] < a.V) x[a.bans[i]] = NOTHING;
  }

  void penalise(float* x, int64_t slot) const {
    const int32_t* counts = a.counts + slot * a.V;
    const bool* prompt = a.prompt + slot * a.V;
    const int32_t* drafted = a.drafted + r * a.J;
    if (std::any_of(drafted, drafted + a.J, [](int32_t token) { return token >= 0; })) {
      room.counts.assign(counts, counts + a.V);
      for (int64_t j = 0; j < a.J; ++j)
        if (drafted[j] >= 0 && drafted[j] < a.V) ++room.counts[drafted[j]];
      counts = room.counts.data();
    }
    auto some = [&](int64_t i, auto lanes) {
      F logit{};
      I count{};
      uint8_t given[W] = {};
      std::memcpy(&logit, x + i, lanes * sizeof(float));
      std::memcpy(&count, counts + i, lanes * sizeof(int32_t));
      std::memcpy(given, prompt + i, lanes);
      F repeated = logit > 0.0f ? logit / a.repetition[r] : logit * a.repetition[r];
      I written = count > 0, seen = written | (load_bytes(given) != 0.0f);
      logit = (seen ? repeated : logit) - a.frequency[r] * __builtin_convertvector(count, F);
      logit -= written ? F{} + a.presence[r] : F{};
      std::memcpy(x + i, &logit, lanes * sizeof(float));
    };
    int64_t whole = a.V / W * W;
    for (int64_t i = 0; i < whole; i += W) some(i, std::integral_constant<int64_t, W>());
    some(whole, a.V - whole);
  }

  int32_t draw(const Logits& x) const {
    // Not below the smallest normal number: 0 / 0 is no weight.
    float temperature = std::max(a.temperature[r], std::numeric_limits<float>::min());
    float floor = std::min(x.best, x.best + temperature * std::log(a.min_p[r]));  // min-p 0 is a floor of -inf
    if (int64_t k = a.top_k[r]; k > 0 && k < a.V) {
      x.gather(std::max(floor, x.at_least(k)), room.candidates);
      floor = std::max(floor, threshold(room.candidates, static_cast<double>(k)));
    }
    Weights weights(x, temperature, floor, room.weights, room.sums);
    if (float p = a.top_p[r]; p < 1) {
      // Tokens that weigh less than this come to less than half of what may be left out.
      weights.gather((1.0 - p) * weights.total / static_cast<double>(2 * a.V), room.candidates);
      weights.keep(std::max(floor, threshold(room.candidates, p * weights.total)));
    }
    uint32_t bits = threefry(a.seeds + 2 * r, static_cast<uint32_t>(a.positions[r]));
    return weights.draw((bits >> 8) * 0x1p-24);
  }

  // The token, or why there is none.
  int32_t choose(const Logits& raw, int64_t slot) const {
    bool adjusts = masked() || penalised();
    if (!adjusts) return a.temperature[r] > 0 ? draw(raw) : raw.argmax();
    room.adjusted.assign(raw.at, raw.at + a.V);
    if (masked()) mask(room.adjusted.data(), slot);
    if (penalised()) penalise(room.adjusted.data(), slot);
    Logits x(room.adjusted.data(), a.V, room.most_adjusted);
    if (x.broken) return x.best == NOTHING ? BANNED : BROKEN;
    return a.temperature[r] > 0 ? draw(x) : x.argmax();
  }

  void score(const Logits& raw, int32_t token, int64_t slot) const {
    Weights weights(raw, 1, NOTHING, room.weights, room.sums);
    float whole = static_cast<float>(raw.best + std::log(weights.total)), own = raw.at[token];
    i32x16 better{};
    sixteens(raw.at, 0, a.V, [&](int64_t, f32x16 x) { better -= x > own; });
    int32_t rank = 1;
    for (int i = 0; i < LANES; ++i) rank += better[i];
    a.logprobs[r] = own - whole, a.ranks[r] = rank;
    for (int64_t l = 0; l < a.L; ++l) {
      int64_t i = std::clamp<int64_t>(a.wanted[slot * a.L + l], 0, a.V - 1);
      a.wanted_logprobs[r * a.L + l] = raw.at[i] - whole;
    }

    auto& best = room.candidates;
    raw.gather(raw.at_least(a.K), best);
    std::partial_sort(best.begin(), best.begin() + a.K, best.end(), [](const Candidate& x, const Candidate& y) {
      return x.logit != y.logit ? x.logit > y.logit : x.token < y.token;
    });
    for (int64_t k = 0; k < a.K; ++k)
      a.top_ids[r * a.K + k] = best[k].token, a.top_logprobs[r * a.K + k] = best[k].logit - whole;
  }

  void run(int64_t num_slots) const {
    Logits raw(a.logits + r * a.V, a.V, room.most);
    bool scored = a.targets[r] >= 0;
    int32_t token = raw.broken ? BROKEN
                    : scored   ? std::min<int64_t>(a.targets[r], a.V - 1)
                               : choose(raw, slot(num_slots));
    a.ok[r] = token >= 0;
    a.tokens[r] = token;
    if (a.ok[r] && a.wants_logprobs[r]) return score(raw, token, slot(num_slots));
    a.logprobs[r] = 0, a.ranks[r] = 0;
    std::fill_n(a.top_ids + r * a.K, a.K, 0);
    std::fill_n(a.top_logprobs + r * a.K, a.K, 0.0f);
    std::fill_n(a.wanted_logprobs + r * a.L, a.L, 0.0f);
  }
};

}  // namespace sampling
}  // namespace quire
