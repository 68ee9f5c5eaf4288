// Ragged paged attention. Work is cut along four lines, of which only the last two decide how a row is summed:
//
//   tile     a few rows of one sequence: they share every key and value that is read
//   item     what a thread does at a time: some KV heads of a tile, all its keys or one piece of them
//   piece    PIECE key positions, a softmax by itself; a row's pieces are merged in their order
//   block    BLOCK key positions, one update of that softmax
//
//   keys    0         64        128                 512       576                 1024
//   block   |    0    |    1    |    2    |   ...   |    8    |    9    |   ...   |
//   piece   |                   0                   |                   1         |
//
// Pieces and blocks begin at multiples of their size, and a block that a row does not see leaves its sums as they are.
// So a row has the same bits alone, in a chunk, in any batch and on any number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "block.h"

namespace quire {
namespace attention {

constexpr int64_t PIECE = 512, PER_PIECE = PIECE / BLOCK;
constexpr int64_t TILE = 96;          // rows times query heads that a tile wants
constexpr int64_t ITEMS = 8;          // that a thread wants, so that all end together
constexpr int64_t WORTH = 1 << 11;    // keys times rows below which an item is not cut
constexpr int64_t AHEAD = 128 << 10;  // bytes of keys and values of a block, so that two find room in a cache

// What the op was given; shapes as in `quire.ops.attention`. Pointers to what is absent are null.
struct Call {
  int64_t T, N, K, H, V, B, P, S, M;  // V: width of the values
  const void *q, *k, *v;              // bfloat16, or float32 where `wide`
  bool wide;
  void *k_pages, *v_pages;  // without v_pages the values are the first V dimensions of the keys
  float *k_scale, *v_scale;
  const int32_t *positions, *starts, *tables, *slots;
  const float* sinks;
  Scoring scoring;
  void* out;

  int64_t G() const { return N / K; }
  // The last position that a row sees.
  int64_t seen_by(int64_t sequence, int64_t position) const {
    if (!scoring.ahead) return position;
    return std::min<int64_t>(position + scoring.ahead, positions[starts[sequence + 1] - 1]);
  }
  // Where a slot's scale lies: those of a page's head are side by side.
  int64_t scale_at(int64_t slot, int64_t head) const { return (slot / S * K + head) * S + slot % S; }
};

// x as signed bytes; the scale is what it returns. XLA rounds the same quotient and products.
template <typename X>
float quantise(const X* x, int64_t H, int8_t* to) {
  float most = 0, poison = 0;
  for (int64_t i = 0; i < H; ++i) {
    float value = convert<float>(x[i]);
    most = std::max(most, std::fabs(value));
    poison += value * 0.0f;
  }
  float inverse = most > 0 && poison == 0 ? 127.0f / most : 0.0f;
  for (int64_t i = 0; i < H; ++i)
    to[i] = inverse == 0 ? 0 : static_cast<int8_t>(std::nearbyint(convert<float>(x[i]) * inverse));
  return most * (1.0f / 127.0f) + poison;
}

// The same as codes of four bits. What is farthest from 0 becomes -8, with the scale's sign as that takes.
inline float quantise(const float* x, int64_t H, Pair* to) {
  float most = 0, least = 0, poison = 0;
  for (int64_t i = 0; i < H; ++i)
    most = std::max(most, std::fabs(x[i])), least = std::min(least, x[i]), poison += x[i] * 0.0f;
  bool fits = most > 0x1p-100f && poison == 0;
  float whole = least == -most ? most : -most, inverse = fits ? 8.0f / whole : 0.0f;
  auto code = [&](float value) {
    return static_cast<int>(std::clamp(fits ? std::nearbyint(value * inverse) : 0.0f, -8.0f, 7.0f)) + 8;
  };
  for (int64_t i = 0; i < H; i += 2) to[i / 2].codes = static_cast<uint8_t>(code(x[i]) | code(x[i + 1]) << 4);
  return fits ? whole * 0.125f : poison;
}

// Each block of the largest power of two that divides H times a Hadamard matrix. XLA adds in the same order.
inline void rotate(float* x, int64_t H) {
  int64_t block = H & -H;
  for (int64_t step = 1; step < block; step *= 2)
    for (int64_t from = 0; from < H; from += 2 * step)
      for (int64_t i = from; i < from + step; ++i) {
        float first = x[i], second = x[i + step];
        x[i] = first + second, x[i + step] = first - second;
      }
  float length = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
  for (int64_t i = 0; i < H; ++i) x[i] *= length;
}

// Keys of four bits are rotated: see `quire.ops.attention.four_bits`.
template <typename Page, typename X>
void write(const Call& a, const void* from, int64_t row, int64_t slot, int64_t H, void* pages, float* scale) {
  const X* x = static_cast<const X*>(from) + row * a.K * H;
  Page* to = static_cast<Page*>(pages) + slot * a.K * H / EACH<Page>;
  if constexpr (std::is_same_v<Page, Pair>) {
    std::vector<float> head(H);
    for (int64_t k = 0; k < a.K; ++k, x += H, to += H / 2) {
      std::transform(x, x + H, head.begin(), convert<float, X>);
      if (pages == a.k_pages) rotate(head.data(), H);
      scale[a.scale_at(slot, k)] = quantise(head.data(), H, to);
    }
  } else if constexpr (std::is_same_v<Page, int8_t>)
    for (int64_t k = 0; k < a.K; ++k) scale[a.scale_at(slot, k)] = quantise(x + k * H, H, to + k * H);
  else
    for (int64_t i = 0; i < a.K * H; ++i) to[i] = convert<Page>(x[i]);
}

// Writes each row's key and value to their slot. Padding, and page 0, which no sequence owns, are not written.
template <typename Page, typename X, typename Spread>
void append(const Call& a, const Spread& spread) {
  int64_t rows = std::max<int64_t>(1, (1 << 17) / (a.K * a.H)), T = a.starts[a.B];
  spread((T + rows - 1) / rows, [&](int64_t chunk) {
    for (int64_t row = chunk * rows; row < std::min(T, (chunk + 1) * rows); ++row) {
      int64_t slot = a.slots[row];
      if (slot < a.S || slot >= a.P * a.S) continue;
      write<Page, X>(a, a.k, row, slot, a.H, a.k_pages, a.k_scale);
      if (a.v_pages) write<Page, X>(a, a.v, row, slot, a.V, a.v_pages, a.v_scale);
    }
  });
}

// The rows of one sequence that are computed together, and the positions that they see.
struct Tile {
  int64_t sequence, row, rows;
  int64_t oldest, newest;  // positions of the rows
  int64_t sees;            // the last that the oldest sees
  int64_t first, last;     // of the keys; none where last < first
  float* partial;          // sums of [head][piece], if it is cut into pieces

  int64_t pieces() const { return last < first ? 0 : last / PIECE - first / PIECE + 1; }
};

// Some heads of a tile and its blocks begin..end; if it is cut, these are one piece.
struct Item {
  int64_t tile, head, heads, begin, end, cost;
  bool cut;
};

template <typename T>
struct OnLines {  // memory that begins at a cache line
  using value_type = T;
  OnLines() = default;
  template <typename Other>
  OnLines(const OnLines<Other>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const OnLines&) const { return true; }
  bool operator!=(const OnLines&) const { return false; }
};

// A worker's memory; each thread keeps its own from call to call.
struct Scratch {
  template <typename T>
  using List = std::vector<T, OnLines<T>>;
  List<float> q, rows, s, weights, totals, wide, nothing, unpaired, k_scale, v_scale, part, whole, head;
  List<uint32_t> keys, codes;
  List<int32_t> position, sees;

  template <typename T>
  static T* take(List<T>& list, int64_t size) {
    if (static_cast<int64_t>(list.size()) < size) list.resize(size);
    return list.data();
  }
};

// Of which types queries, new keys and results can be where they meet such pages as X.
template <typename X>
constexpr bool MAY_BE_WIDE = sizeof(X) == 4;
template <typename Page, typename X>
constexpr bool MAY_BE_NARROW = sizeof(X) == 2 || sizeof(Page) == 4;

// Computes items, the keys of one block at a time for all rows of a tile. Keys meet queries as X: bfloat16 or floats.
template <typename Page, typename X>
class Worker {
 public:
  Worker(const Call& a, Scratch& scratch, const Tile* tiles, int64_t heads, int64_t most)
      : a(a), tiles(tiles), H(padded(a.H, CODED ? 32 : 16 / sizeof(X))), V(width(a)) {
    q = reinterpret_cast<Query<X>*>(Scratch::take(scratch.q, heads * most * H));
    rows = reinterpret_cast<Key*>(Scratch::take(scratch.rows, (BLOCK + 1) * H));
    zeros = std::fill_n(rows, H, Key{}) - H, rows += H;
    keys = Scratch::take(scratch.keys, BLOCK * H);
    if (UNPAIRS<X>) unpaired = Scratch::take(scratch.unpaired, BLOCK * H);
    if (CODED) codes = Scratch::take(scratch.codes, H / 8 * W), line = Scratch::take(scratch.head, a.H);
    s = Scratch::take(scratch.s, most * BLOCK);
    weights = reinterpret_cast<Weight*>(PAIRS<X> ? Scratch::take(scratch.weights, most * BLOCK / 2) : s);
    nothing = reinterpret_cast<const Page*>(Scratch::take(scratch.nothing, V));
    totals = Scratch::take(scratch.totals, heads * most * W);
    wide = reinterpret_cast<Wide*>(Scratch::take(scratch.wide, BLOCK * COLS * W));
    k_scale = Scratch::take(scratch.k_scale, BLOCK), v_scale = Scratch::take(scratch.v_scale, BLOCK);
    position = Scratch::take(scratch.position, most), sees = Scratch::take(scratch.sees, most);
    part = Scratch::take(scratch.part, heads * Sums::size(most, V));
    whole = Scratch::take(scratch.whole, heads * Sums::size(most, V));
  }

  static int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
  static int64_t width(const Call& a) { return padded(a.V, UNIT<Page>); }

  // `next` is the item that this thread is likely to do then, or null.
  void run(const Item& item, const Item* next) {
    const Tile& t = tiles[item.tile];
    R = t.rows * a.G();
    for (int64_t r = 0; r < R; ++r) {
      position[r] = a.positions[t.row + r / a.G()];
      sees[r] = static_cast<int32_t>(a.seen_by(t.sequence, position[r]));
    }
    auto all = [&](int64_t h) { return Sums(whole + h * Sums::size(R, V), R, V); };
    auto sums = [&](int64_t h) {
      return Sums(item.cut ? partial(t, item.head + h, item.begin / PER_PIECE) : part + h * Sums::size(R, V), R, V);
    };
    for (int64_t h = 0; h < item.heads; ++h) {
      read_queries(t, item.head + h, q + h * R * H);
      start(all(h), item.head + h);
    }
    Block block, after;
    if (item.begin < item.end) find(t, item.begin, block);
    for (int64_t b = item.begin; b < item.end; ++b, block = after) {
      const Item* soon = b + 1 < item.end ? &item : next;
      Ahead ahead(soon ? soon->heads * a.H * sizeof(Page) / EACH<Page> : 64);
      if (soon) find(tiles[soon->tile], soon == next ? next->begin : b + 1, after);
      for (int j = after.lo; soon && j < after.hi; ++j) {
        ahead.add(key_at(after.slot[j], soon->head));
        if (a.v_pages) ahead.add(value_at(after.slot[j], soon->head));
      }
      for (int64_t h = 0; h < item.heads; ++h) {
        float* row_totals = totals + h * R * W;
        if (b == item.begin || b % PER_PIECE == 0) {
          sums(h).clear(R, V);
          std::fill_n(row_totals, R * W, 0.0f);
        }
        step(t, block, item.head + h, q + h * R * H, row_totals, sums(h), ahead);
        if (b + 1 == item.end || (b + 1) % PER_PIECE == 0) {
          for (int64_t r = 0; r < R; ++r) sums(h).total[r] = sum(load(row_totals + r * W));
          if (!item.cut) merge(all(h), sums(h), R, V);
        }
      }
      ahead.fetch_rest();
    }
    for (int64_t h = 0; h < item.heads && !item.cut; ++h) finish(t, item.head + h, all(h));
  }

  // What the pieces of a head have come to, put together.
  void join(const Tile& t, int64_t head) {
    R = t.rows * a.G();
    Sums all(whole, R, V);
    start(all, head);
    for (int64_t piece = t.first / PIECE; piece <= t.last / PIECE; ++piece)
      merge(all, Sums(partial(t, head, piece), R, V), R, V);
    finish(t, head, all);
  }

 private:
  static constexpr bool CODED = std::is_same_v<Page, Pair>;
  using Key = std::conditional_t<CODED, Pair, X>;  // what rows of keys are turned as
  using Weight = Query<X>;
  using Wide = std::conditional_t<PAIRS<X>, uint32_t, float>;  // values, or pairs of them
  static constexpr int TOGETHER = PAIRS<X> ? 2 : 1;            // keys whose values are mixed at once

  float* partial(const Tile& t, int64_t head, int64_t piece) const {
    return t.partial + (head * t.pieces() + piece - t.first / PIECE) * Sums::size(t.rows * a.G(), V);
  }

  // A sink is one more score in the softmax that carries no value.
  void start(Sums sums, int64_t head) {
    sums.clear(R, V);
    for (int64_t r = 0; a.sinks && r < R; ++r) {
      sums.best[r] = a.sinks[head * a.G() + r % a.G()] * LOG2E;
      sums.total[r] = 1;
    }
  }

  // Where row r of a tile lies in queries or results of `size` dimensions.
  int64_t place(const Tile& t, int64_t head, int64_t r, int64_t size) const {
    return ((t.row + r / a.G()) * a.N + head * a.G() + r % a.G()) * size;
  }

  // A row of `a.H` dimensions in another type, its end filled up with zeros.
  template <typename To, typename From>
  To* copy(const From* from, To* to) const {
    for (int64_t h = 0; h < a.H / EACH<To>; ++h) to[h] = convert<To>(from[h]);
    std::fill(to + a.H / EACH<To>, to + H / EACH<To>, To{});
    return to;
  }

  void read_queries(const Tile& t, int64_t head, Query<X>* to) {
    for (int64_t r = 0; r < R; ++r, to += H) {
      int64_t from = place(t, head, r, a.H);
      if constexpr (CODED) {
        if (a.wide)
          std::copy_n(static_cast<const float*>(a.q) + from, a.H, line);
        else
          for (int64_t h = 0; h < a.H; ++h) line[h] = bf16_to_float(static_cast<const uint16_t*>(a.q)[from + h]);
        rotate(line, a.H);
        std::fill_n(to, H, Query<X>{});
        for (int64_t h = 0; h < a.H; ++h) to[place_of<X>(h)] = convert<Query<X>>(line[h]);
        continue;
      }
      if constexpr (MAY_BE_WIDE<X>)
        if (a.wide) copy(static_cast<const float*>(a.q) + from, to);
      if constexpr (MAY_BE_NARROW<Page, X>)
        if (!a.wide) copy(static_cast<const uint16_t*>(a.q) + from, to);
    }
  }

  void find(const Tile& t, int64_t number, Block& b) const {
    b.base = number * BLOCK;
    b.lo = static_cast<int>(std::max<int64_t>(t.first - b.base, 0));
    b.hi = static_cast<int>(std::min(t.last + 1 - b.base, BLOCK));
    const int32_t* table = a.tables + t.sequence * a.M;
    int64_t page = (b.base + b.lo) / a.S, offset = (b.base + b.lo) % a.S;
    for (int j = b.lo; j < b.hi; ++page, offset = 0) {
      int64_t slot = std::clamp<int64_t>(table[page], 0, a.P - 1) * a.S;
      for (; offset < a.S && j < b.hi; ++offset, ++j) b.slot[j] = slot + offset, b.scale[j] = slot * a.K + offset;
    }
  }

  const Page* key_at(int64_t slot, int64_t head) const {
    return static_cast<const Page*>(a.k_pages) + (slot * a.K + head) * a.H / EACH<Page>;
  }
  const Page* value_at(int64_t slot, int64_t head) const {
    if (!a.v_pages) return key_at(slot, head);
    return static_cast<const Page*>(a.v_pages) + (slot * a.K + head) * a.V / EACH<Page>;
  }

  void step(const Tile& t, const Block& b, int64_t head, const Query<X>* q, float* totals, Sums sums, Ahead& ahead) {
    const Key* key[BLOCK];
    std::fill(key + b.first() * W, key + b.stop() * W, zeros);
    for (int j = b.lo; j < b.hi; ++j)
      if (std::is_same_v<Page, Key> && H == a.H)
        key[j] = reinterpret_cast<const Key*>(key_at(b.slot[j], head));
      else
        key[j] = copy(key_at(b.slot[j], head), rows + j * H);
    if (a.k_scale) {
      const float* v_from = a.v_pages ? a.v_scale : a.k_scale;
      std::fill_n(k_scale, BLOCK, 0.0f), std::fill_n(v_scale, BLOCK, 0.0f);
      for (int j = b.lo; j < b.hi; ++j) k_scale[j] = a.k_scale[b.scale[j] + head * a.S];
      for (int j = b.lo; j < b.hi; ++j) v_scale[j] = v_from[b.scale[j] + head * a.S];
    }

    auto turned = [&](int g) { return keys + g * W * H / (4 / sizeof(X)); };
    for (int g = b.first(); g < b.stop(); ++g)
      if constexpr (CODED)
        turn(key + g * W, H / 2, codes, ahead), widen_codes<X>(codes, H / 8, turned(g));
      else
        turn(key + g * W, H, turned(g), ahead);
    // The first rows may all come before these keys, and the last may have lost sight of them.
    int64_t from = 0, stop = R;
    while (from < R && sees[from] < b.base + b.lo) ++from;
    while (stop > from && a.scoring.hidden(position[stop - 1]) >= b.base + b.hi - 1) --stop;
    if (UNPAIRS<X> && stop - from > 2 * ROWS) {
      for (int g = b.first(); g < b.stop(); ++g) unpair(turned(g), H / 2, unpaired + g * W * H);
      if constexpr (UNPAIRS<X>) score<float>(b, from, stop, q, reinterpret_cast<const uint32_t*>(unpaired), ahead);
    } else {
      score<X>(b, from, stop, q, keys, ahead);
    }
    bool masked = b.base + BLOCK - 1 > t.sees || b.base <= a.scoring.hidden(t.newest);
    if (masked || a.k_scale || a.scoring.soft_cap)
      finish_scores(a.scoring, b, a.k_scale ? k_scale : nullptr, masked, position, sees, from, stop, s);
    weigh(a.scoring.unit(), from, stop, s, a.k_scale ? v_scale : nullptr, weights, sums, totals, V);

    int lo = b.lo / TOGETHER * TOGETHER, hi = (b.hi + TOGETHER - 1) / TOGETHER * TOGETHER;
    const Page* value[BLOCK];
    std::fill(value + lo, value + hi, nothing);
    for (int j = b.lo; j < b.hi; ++j) value[j] = value_at(b.slot[j], head);
    bool direct = a.V == V && (stop - from <= 2 * ROWS || sizeof(Page) == 4);
    for (int64_t at = 0; at < V; at += COLS * W) {
      int64_t vectors = std::min<int64_t>(COLS, (V - at) / W);
      const Wide* widened[BLOCK];
      int64_t size = std::min(a.V - at, vectors * W);
      for (int j = lo; !direct && j < hi; j += TOGETHER)
        widened[j] = widened[j + TOGETHER - 1] = widen_values(value + j, at, size, wide + j / TOGETHER * COLS * W);
      each_rows(from, stop, [&](int64_t r, auto count) {
        constexpr int COUNT = decltype(count)::value, STEP = UNIT<Page> / W;
        const Weight* row = weights + r * BLOCK;
        float* out = sums.out + r * V + at;
        if (direct)
          mix_any<COUNT, STEP>(vectors, row, value, at, lo, hi, out, V, ahead);
        else
          mix_any<COUNT, STEP>(vectors, row, widened, 0, lo, hi, out, V, ahead);
      });
    }
  }

  // The products of rows and a block's keys, which lie as Y.
  template <typename Y>
  void score(const Block& b, int64_t from, int64_t stop, const Query<Y>* q, const uint32_t* keys, Ahead& ahead) {
    auto at = [&](int g) { return keys + g * W * H / (4 / sizeof(Y)); };
    each_rows(from, stop, [&](int64_t r, auto count) {
      constexpr int COUNT = decltype(count)::value;
      float* to = s + r * BLOCK;
      int g = b.first();
      for (; g + COLS <= b.stop(); g += COLS) dots<Y, COUNT, COLS>(q + r * H, at(g), H, to + g * W, ahead);
      for (; g < b.stop(); ++g) dots<Y, COUNT, 1>(q + r * H, at(g), H, to + g * W, ahead);
    });
  }

  // `size` values from the `at`-th on of the keys that are mixed together.
  static const Wide* widen_values(const Page* const* value, int64_t at, int64_t size, Wide* to) {
    constexpr int STEP = UNIT<Page>;
    for (int64_t i = 0; i < size; i += STEP) {
      Page ends[TOGETHER][STEP / EACH<Page>] = {};
      const Page* from[TOGETHER];
      for (int k = 0; k < TOGETHER; ++k) {
        from[k] = value[k] + (at + i) / EACH<Page>;
        if (size - i < STEP) from[k] = copy_end(from[k], size - i, ends[k]);
      }
      if constexpr (PAIRS<X>) {
        U v[STEP / W];
        load_pairs(from[0], from[1], v);
        std::memcpy(to + i, v, sizeof(v));
      } else {
        F v[STEP / W];
        load_values(from[0], v);
        std::memcpy(to + i, v, sizeof(v));
      }
    }
    return to;
  }

  static const Page* copy_end(const Page* from, int64_t size, Page* to) {
    std::memcpy(to, from, size / EACH<Page> * sizeof(Page));
    return to;
  }

  void finish(const Tile& t, int64_t head, Sums sums) {
    if constexpr (MAY_BE_WIDE<X>)
      if (a.wide) finish(t, head, sums, static_cast<float*>(a.out));
    if constexpr (MAY_BE_NARROW<Page, X>)
      if (!a.wide) finish(t, head, sums, static_cast<uint16_t*>(a.out));
  }

  template <typename Y>
  void finish(const Tile& t, int64_t head, Sums sums, Y* out) {
    constexpr int STEP = UNIT<Page>;
    for (int64_t r = 0; r < R; ++r) {
      float inverse = sums.total[r] == 0 ? 1 : 1 / sums.total[r];
      for (int64_t i = 0; i < a.V; i += STEP) {
        F v[STEP / W];  // no negative zeros: a key that was not seen may have made one positive
        for (int n = 0; n < STEP / W; ++n) v[n] = load(sums.out + r * V + i + n * W) * inverse + 0.0f;
        store_results<Page>(out + place(t, head, r, a.V) + i, v, std::min<int64_t>(STEP, a.V - i));
      }
    }
  }

  const Call& a;
  const Tile* tiles;
  const int64_t H, V;  // dimensions of a key and floats of a value, filled up
  int64_t R;
  Query<X>* q;
  Key *rows, *zeros;
  Weight* weights;
  Wide* wide;
  const Page* nothing;  // values of a key that no row sees
  float *s, *totals, *k_scale, *v_scale, *part, *whole, *line = nullptr, *unpaired = nullptr;
  uint32_t *keys, *codes = nullptr;
  int32_t *position, *sees;
};

// Append, then attend. `spread(chunks, run)` calls run(0) .. run(chunks - 1), on up to `threads` threads.
template <typename Page, typename X, typename Spread>
void attend(const Call& a, int64_t threads, const Spread& spread) {
  if constexpr (MAY_BE_WIDE<X>)
    if (a.k && a.wide) append<Page, float>(a, spread);
  if constexpr (MAY_BE_NARROW<Page, X>)
    if (a.k && !a.wide) append<Page, uint16_t>(a, spread);
  int64_t used = a.starts[a.B] * a.N * a.V, size = a.wide ? 4 : 2;
  char* results = static_cast<char*>(a.out);
  std::fill(results + used * size, results + a.T * a.N * a.V * size, 0);

  int64_t most = std::max<int64_t>(1, TILE / a.G()), total = 0;
  std::vector<Tile> tiles;
  auto cost = [&](const Tile& t, int64_t keys) { return std::max<int64_t>(keys, 1) * (t.rows * a.G() + ROWS); };
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t row = a.starts[b]; row < a.starts[b + 1]; row += most) {
      Tile t{b, row, std::min(most, a.starts[b + 1] - row), 0, 0, 0, 0, 0, nullptr};
      auto ends = std::minmax_element(a.positions + row, a.positions + row + t.rows);
      t.oldest = *ends.first, t.newest = *ends.second, t.sees = a.seen_by(b, t.oldest);
      t.first = std::max<int64_t>(0, a.scoring.hidden(t.oldest) + 1);
      t.last = std::min(a.seen_by(b, t.newest), a.M * a.S - 1);
      total += cost(t, t.last - t.first + 1) * a.K;
      tiles.push_back(t);
    }

  int64_t share = std::max(total / (threads * ITEMS), WORTH), bytes = BLOCK * (a.H + a.V) * sizeof(Page) / EACH<Page>;
  std::vector<Item> items;
  std::vector<std::vector<float>> partials;
  for (size_t i = 0; i < tiles.size(); ++i) {
    Tile& t = tiles[i];
    int64_t tile = static_cast<int64_t>(i), one = cost(t, t.last - t.first + 1);
    int64_t begin = t.first / BLOCK, end = t.last < t.first ? begin : t.last / BLOCK + 1;
    if (threads > 1 && one > share && t.pieces() > 1) {
      partials.emplace_back(t.pieces() * a.K * Sums::size(t.rows * a.G(), Worker<Page, X>::width(a)));
      t.partial = partials.back().data();
      for (int64_t k = 0; k < a.K; ++k)
        for (int64_t p = begin / PER_PIECE * PER_PIECE; p < end; p += PER_PIECE)
          items.push_back({tile, k, 1, std::max(begin, p), std::min(end, p + PER_PIECE), cost(t, PIECE), true});
    } else {
      int64_t heads = std::clamp<int64_t>(std::min(share / one, AHEAD / bytes), 1, a.K);
      for (int64_t k = 0; k < a.K; k += heads)
        items.push_back({tile, k, std::min(heads, a.K - k), begin, end, one * heads, false});
    }
  }
  std::sort(items.begin(), items.end(), [](const Item& x, const Item& y) {
    return x.cost != y.cost ? x.cost > y.cost : x.tile != y.tile ? x.tile < y.tile : x.head < y.head;
  });

  std::unique_ptr<std::atomic<int64_t>[]> done(new std::atomic<int64_t>[tiles.size() * a.K]());
  int64_t count = static_cast<int64_t>(items.size());
  spread(count, [&](int64_t number) {
    static thread_local Scratch scratch;
    const Item& item = items[number];
    const Item* next = number + threads < count ? &items[number + threads] : nullptr;
    Worker<Page, X> worker(a, scratch, tiles.data(), item.heads, most * a.G());
    worker.run(item, next && next->begin < next->end ? next : nullptr);
    const Tile& t = tiles[item.tile];
    if (item.cut && done[item.tile * a.K + item.head].fetch_add(1, std::memory_order_acq_rel) == t.pieces() - 1)
      worker.join(t, item.head);
  });
}

}  // namespace attention
}  // namespace quire
