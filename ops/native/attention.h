// Ragged paged attention. Work is partitioned at four levels, of which only the last two determine how a row is summed:
//
//   tile     a few rows of one sequence, which share the loads of keys and values
//   item     a thread's unit of work: some KV heads of a tile, with all its keys or one split of them
//   split    SPLIT key positions with a softmax of their own; a row's splits are merged in order
//   block    BLOCK key positions, one update of that softmax
//
//   keys    0         64        128                 512       576                 1024
//   block   |    0    |    1    |    2    |   ...   |    8    |    9    |   ...   |
//   split   |                   0                   |                   1         |
//
// Splits and blocks begin at multiples of their size, and a block that a row does not see leaves its sums unchanged. So
// results are batch-invariant, and depend neither on chunked prefill nor on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "block.h"

namespace quire {
namespace attention {

constexpr int64_t SPLIT = 512, SPLIT_BLOCKS = SPLIT / BLOCK;
constexpr int64_t TILE_SIZE = 96;               // rows times query heads per KV head of a tile
constexpr int64_t ITEMS_PER_THREAD = 8;         // for load balance
constexpr int64_t MIN_ITEM_COST = 1 << 11;      // in keys times rows; smaller items are not split
constexpr int64_t MAX_BLOCK_BYTES = 128 << 10;  // of keys and values, so that two blocks fit into the cache

// Arguments of the op, with the shapes of `quire.ops.attention`. Pointers to arrays that are absent are null.
struct AttentionCall {
  int64_t T, N, K, H, V, B, P, S, M;  // V: width of the values
  const void *q, *k, *v;
  bool is_float32;          // type of q, k, v and out; else bfloat16
  void *k_pages, *v_pages;  // without v_pages the values are the first V dimensions of the keys
  float *k_scale, *v_scale;
  const int32_t *positions, *starts, *tables, *slots;
  const int32_t* sees;  // the last position that each row sees, rising within a sequence; null: its own
  const float* sinks;
  Scoring scoring;
  void* out;

  int64_t G() const { return N / K; }
  // The last position that a row sees.
  int64_t last_visible(int64_t sequence, int64_t row) const {
    if (sees) return sees[row];
    if (!scoring.lookahead) return positions[row];
    return std::min<int64_t>(positions[row] + scoring.lookahead, positions[starts[sequence + 1] - 1]);
  }
  // The index of a slot's scale: scales of a page are [head][slot].
  int64_t scale_index(int64_t slot, int64_t head) const { return (slot / S * K + head) * S + slot % S; }
};

// Quantises x to int8 and returns the scale. XLA rounds the same quotient and products.
template <typename X>
float quantise(const X* x, int64_t H, int8_t* out) {
  float max_abs = 0, nan_check = 0;
  for (int64_t i = 0; i < H; ++i) {
    float value = convert<float>(x[i]);
    max_abs = std::max(max_abs, std::fabs(value));
    nan_check += value * 0.0f;
  }
  float inverse = max_abs > 0 && nan_check == 0 ? 127.0f / max_abs : 0.0f;
  for (int64_t i = 0; i < H; ++i)
    out[i] = inverse == 0 ? 0 : static_cast<int8_t>(std::nearbyint(convert<float>(x[i]) * inverse));
  return max_abs * (1.0f / 127.0f) + nan_check;
}

// Quantises x to int4 and returns the scale, whose sign makes the value with the largest magnitude -8.
inline float quantise(const float* x, int64_t H, Int4Pair* out) {
  float max_abs = 0, minimum = 0, nan_check = 0;
  for (int64_t i = 0; i < H; ++i)
    max_abs = std::max(max_abs, std::fabs(x[i])), minimum = std::min(minimum, x[i]), nan_check += x[i] * 0.0f;
  bool is_valid = max_abs > 0x1p-100f && nan_check == 0;
  float full_scale = minimum == -max_abs ? max_abs : -max_abs;  // the value of -8, negated
  float inverse = is_valid ? 8.0f / full_scale : 0.0f;
  auto code = [&](float value) {
    return static_cast<int>(std::clamp(is_valid ? std::nearbyint(value * inverse) : 0.0f, -8.0f, 7.0f)) + 8;
  };
  for (int64_t i = 0; i < H; i += 2) out[i / 2].codes = static_cast<uint8_t>(code(x[i]) | code(x[i + 1]) << 4);
  return is_valid ? full_scale * 0.125f : nan_check;
}

// Hadamard rotation: multiplies each block of x with an orthonormal Hadamard matrix. The size of a block is the largest
// power of two that divides H. XLA adds in the same order.
inline void rotate(float* x, int64_t H) {
  int64_t block = H & -H;
  for (int64_t step = 1; step < block; step *= 2)
    for (int64_t start = 0; start < H; start += 2 * step)
      for (int64_t i = start; i < start + step; ++i) {
        float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  float factor = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
  for (int64_t i = 0; i < H; ++i) x[i] *= factor;
}

// Writes a row of new keys or values of type X to a slot of the pages. int4 keys are rotated, see
// `quire.ops.attention.four_bits`.
template <typename Page, typename X>
void write_slot(const AttentionCall& a, const void* new_rows, int64_t row, int64_t slot, int64_t H, void* pages,
                float* scale) {
  const X* x = static_cast<const X*>(new_rows) + row * a.K * H;
  Page* out = static_cast<Page*>(pages) + slot * a.K * H / ELEMENT_DIMS<Page>;
  if constexpr (std::is_same_v<Page, Int4Pair>) {
    std::vector<float> head(H);
    for (int64_t k = 0; k < a.K; ++k, x += H, out += H / 2) {
      std::transform(x, x + H, head.begin(), convert<float, X>);
      if (pages == a.k_pages) rotate(head.data(), H);
      scale[a.scale_index(slot, k)] = quantise(head.data(), H, out);
    }
  } else if constexpr (std::is_same_v<Page, int8_t>)
    for (int64_t k = 0; k < a.K; ++k) scale[a.scale_index(slot, k)] = quantise(x + k * H, H, out + k * H);
  else
    for (int64_t i = 0; i < a.K * H; ++i) out[i] = convert<Page>(x[i]);
}

// Writes the new keys and values of all rows to their slots, except of padding and of page 0, which no sequence owns.
template <typename Page, typename X, typename RunParallel>
void append(const AttentionCall& a, const RunParallel& run_parallel) {
  int64_t chunk_rows = std::max<int64_t>(1, (1 << 17) / (a.K * a.H)), T = a.starts[a.B];
  run_parallel((T + chunk_rows - 1) / chunk_rows, [&](int64_t chunk) {
    for (int64_t row = chunk * chunk_rows; row < std::min(T, (chunk + 1) * chunk_rows); ++row) {
      int64_t slot = a.slots[row];
      if (slot < a.S || slot >= a.P * a.S) continue;
      write_slot<Page, X>(a, a.k, row, slot, a.H, a.k_pages, a.k_scale);
      if (a.v_pages) write_slot<Page, X>(a, a.v, row, slot, a.V, a.v_pages, a.v_scale);
    }
  });
}

// Rows of one sequence that are computed together, and the key positions that they see.
struct Tile {
  int64_t sequence, first_row, num_rows;
  int64_t oldest, newest;       // smallest and largest position of the rows
  int64_t first_sees;           // the first of the last keys that rows see
  int64_t first_key, last_key;  // of all rows; last_key < first_key if there are none
  float* partial;               // softmax states [head][split], if the tile is split

  int64_t num_splits() const { return last_key < first_key ? 0 : last_key / SPLIT - first_key / SPLIT + 1; }
};

// Some KV heads of a tile and a range of its blocks; if the tile is split, this range is one split.
struct WorkItem {
  int64_t tile, first_head, num_heads, begin_block, end_block, cost;
  bool is_split;
};

// Allocates memory that begins at a cache line.
template <typename T>
struct CacheLineAllocator {
  using value_type = T;
  CacheLineAllocator() = default;
  template <typename U>
  CacheLineAllocator(const CacheLineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const CacheLineAllocator&) const { return true; }
  bool operator!=(const CacheLineAllocator&) const { return false; }
};

// Buffers of a worker. Each thread keeps them between calls.
struct Scratch {
  template <typename T>
  using Buffer = std::vector<T, CacheLineAllocator<T>>;
  Buffer<float> q, key_rows, scores, weights, weight_sum_lanes, values, zero_value, unpacked, k_scale, v_scale,
      split_states, total_states, q_row;
  Buffer<uint32_t> keys, codes;
  Buffer<int32_t> position, last_visible;

  template <typename T>
  static T* reserve(Buffer<T>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
    return buffer.data();
  }
};

// Whether queries, new keys and results may be float32 or bfloat16, for keys that are multiplied as X.
template <typename X>
constexpr bool ALLOWS_FLOAT32 = sizeof(X) == 4;
template <typename Page, typename X>
constexpr bool ALLOWS_BF16 = sizeof(X) == 2 || sizeof(Page) == 4;

// Computes work items, one block of keys at a time for all rows of a tile. X is the type of keys as they are multiplied
// with queries: bfloat16 or float.
template <typename Page, typename X>
class Worker {
 public:
  Worker(const AttentionCall& a, Scratch& scratch, const Tile* tiles, int64_t num_heads, int64_t max_rows)
      : a(a), tiles(tiles), H(round_up(a.H, IS_INT4 ? 32 : 16 / sizeof(X))), V(padded_width(a)) {
    q = reinterpret_cast<Query<X>*>(Scratch::reserve(scratch.q, num_heads * max_rows * H));
    key_rows = reinterpret_cast<Key*>(Scratch::reserve(scratch.key_rows, (BLOCK + 1) * H));
    zero_key = std::fill_n(key_rows, H, Key{}) - H, key_rows += H;
    keys = Scratch::reserve(scratch.keys, BLOCK * H);
    if (UNPACKS_KEYS<X>) unpacked = Scratch::reserve(scratch.unpacked, BLOCK * H);
    if (IS_INT4) codes = Scratch::reserve(scratch.codes, H / 8 * W), q_row = Scratch::reserve(scratch.q_row, a.H);
    scores = Scratch::reserve(scratch.scores, max_rows * BLOCK);
    weights = reinterpret_cast<Weight*>(USES_BF16_PAIRS<X> ? Scratch::reserve(scratch.weights, max_rows * BLOCK / 2)
                                                           : scores);
    zero_value = reinterpret_cast<const Page*>(Scratch::reserve(scratch.zero_value, V));
    weight_sum_lanes = Scratch::reserve(scratch.weight_sum_lanes, num_heads * max_rows * W);
    converted = reinterpret_cast<Value*>(Scratch::reserve(scratch.values, BLOCK * TILE_VECTORS * W));
    k_scale = Scratch::reserve(scratch.k_scale, BLOCK), v_scale = Scratch::reserve(scratch.v_scale, BLOCK);
    position = Scratch::reserve(scratch.position, max_rows);
    last_visible = Scratch::reserve(scratch.last_visible, max_rows);
    split_states = Scratch::reserve(scratch.split_states, num_heads * SoftmaxState::size(max_rows, V));
    total_states = Scratch::reserve(scratch.total_states, num_heads * SoftmaxState::size(max_rows, V));
  }

  static int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
  static int64_t padded_width(const AttentionCall& a) { return round_up(a.V, VALUE_STEP<Page>); }

  // Computes an item. `next` is the item that this thread will probably compute next, for prefetching, or null.
  void run(const WorkItem& item, const WorkItem* next) {
    const Tile& t = tiles[item.tile];
    R = t.num_rows * a.G();
    for (int64_t r = 0; r < R; ++r) {
      int64_t row = t.first_row + r / a.G();
      position[r] = a.positions[row];
      last_visible[r] = static_cast<int32_t>(a.last_visible(t.sequence, row));
    }
    auto total_state = [&](int64_t h) { return SoftmaxState(total_states + h * SoftmaxState::size(R, V), R, V); };
    auto split_state = [&](int64_t h) {
      return SoftmaxState(item.is_split ? partial_state(t, item.first_head + h, item.begin_block / SPLIT_BLOCKS)
                                        : split_states + h * SoftmaxState::size(R, V),
                          R, V);
    };
    for (int64_t h = 0; h < item.num_heads; ++h) {
      read_queries(t, item.first_head + h, q + h * R * H);
      start(total_state(h), item.first_head + h);
    }
    KeyBlock block, next_block;
    if (item.begin_block < item.end_block) find_block(t, item.begin_block, block);
    for (int64_t b = item.begin_block; b < item.end_block; ++b, block = next_block) {
      const WorkItem* next_block_item = b + 1 < item.end_block ? &item : next;
      Prefetcher prefetcher(next_block_item ? next_block_item->num_heads * a.H * sizeof(Page) / ELEMENT_DIMS<Page>
                                            : 64);
      if (next_block_item)
        find_block(tiles[next_block_item->tile], next_block_item == next ? next->begin_block : b + 1, next_block);
      for (int j = next_block.begin; next_block_item && j < next_block.end; ++j) {
        prefetcher.add_range(key_address(next_block.slot[j], next_block_item->first_head));
        if (a.v_pages) prefetcher.add_range(value_address(next_block.slot[j], next_block_item->first_head));
      }
      for (int64_t h = 0; h < item.num_heads; ++h) {
        float* head_sum_lanes = weight_sum_lanes + h * R * W;
        if (b == item.begin_block || b % SPLIT_BLOCKS == 0) {
          split_state(h).clear(R, V);
          std::fill_n(head_sum_lanes, R * W, 0.0f);
        }
        process_block(t, block, item.first_head + h, q + h * R * H, head_sum_lanes, split_state(h), prefetcher);
        if (b + 1 == item.end_block || (b + 1) % SPLIT_BLOCKS == 0) {
          for (int64_t r = 0; r < R; ++r) split_state(h).weight_sum[r] = sum_lanes(load(head_sum_lanes + r * W));
          if (!item.is_split) merge(total_state(h), split_state(h), R, V);
        }
      }
      prefetcher.finish();
    }
    for (int64_t h = 0; h < item.num_heads && !item.is_split; ++h) finish(t, item.first_head + h, total_state(h));
  }

  // Merges the splits of a head and writes its results.
  void merge_splits(const Tile& t, int64_t head) {
    R = t.num_rows * a.G();
    SoftmaxState total(total_states, R, V);
    start(total, head);
    for (int64_t split = t.first_key / SPLIT; split <= t.last_key / SPLIT; ++split)
      merge(total, SoftmaxState(partial_state(t, head, split), R, V), R, V);
    finish(t, head, total);
  }

 private:
  static constexpr bool IS_INT4 = std::is_same_v<Page, Int4Pair>;
  using Key = std::conditional_t<IS_INT4, Int4Pair, X>;  // keys as they are transposed
  using Weight = Query<X>;
  using Value = std::conditional_t<USES_BF16_PAIRS<X>, uint32_t, float>;  // converted values, or pairs of them
  static constexpr int KEY_STEP = USES_BF16_PAIRS<X> ? 2 : 1;             // keys whose values are added at once

  float* partial_state(const Tile& t, int64_t head, int64_t split) const {
    return t.partial +
           (head * t.num_splits() + split - t.first_key / SPLIT) * SoftmaxState::size(t.num_rows * a.G(), V);
  }

  // Initialises a softmax. An attention sink is one more score, which carries no value.
  void start(SoftmaxState state, int64_t head) {
    state.clear(R, V);
    for (int64_t r = 0; a.sinks && r < R; ++r) {
      state.max_score[r] = a.sinks[head * a.G() + r % a.G()] * LOG2E;
      state.weight_sum[r] = 1;
    }
  }

  // The index of row r of a tile in queries or results of `size` dimensions.
  int64_t row_index(const Tile& t, int64_t head, int64_t r, int64_t size) const {
    return ((t.first_row + r / a.G()) * a.N + head * a.G() + r % a.G()) * size;
  }

  // Converts a row of a.H dimensions and pads it with zeros to H.
  template <typename To, typename From>
  To* copy(const From* in, To* out) const {
    for (int64_t h = 0; h < a.H / ELEMENT_DIMS<To>; ++h) out[h] = convert<To>(in[h]);
    std::fill(out + a.H / ELEMENT_DIMS<To>, out + H / ELEMENT_DIMS<To>, To{});
    return out;
  }

  void read_queries(const Tile& t, int64_t head, Query<X>* out) {
    for (int64_t r = 0; r < R; ++r, out += H) {
      int64_t index = row_index(t, head, r, a.H);
      if constexpr (IS_INT4) {
        if (a.is_float32)
          std::copy_n(static_cast<const float*>(a.q) + index, a.H, q_row);
        else
          for (int64_t h = 0; h < a.H; ++h) q_row[h] = bf16_to_float(static_cast<const uint16_t*>(a.q)[index + h]);
        rotate(q_row, a.H);
        std::fill_n(out, H, Query<X>{});
        for (int64_t h = 0; h < a.H; ++h) out[query_position<X>(h)] = convert<Query<X>>(q_row[h]);
        continue;
      }
      if constexpr (ALLOWS_FLOAT32<X>)
        if (a.is_float32) copy(static_cast<const float*>(a.q) + index, out);
      if constexpr (ALLOWS_BF16<Page, X>)
        if (!a.is_float32) copy(static_cast<const uint16_t*>(a.q) + index, out);
    }
  }

  // Looks up the slots of a block's keys in the page table.
  void find_block(const Tile& t, int64_t index, KeyBlock& b) const {
    b.base = index * BLOCK;
    b.begin = static_cast<int>(std::max<int64_t>(t.first_key - b.base, 0));
    b.end = static_cast<int>(std::min(t.last_key + 1 - b.base, BLOCK));
    const int32_t* table = a.tables + t.sequence * a.M;
    int64_t page = (b.base + b.begin) / a.S, offset = (b.base + b.begin) % a.S;
    for (int j = b.begin; j < b.end; ++page, offset = 0) {
      int64_t first_slot = std::clamp<int64_t>(table[page], 0, a.P - 1) * a.S;
      for (; offset < a.S && j < b.end; ++offset, ++j)
        b.slot[j] = first_slot + offset, b.scale_index[j] = first_slot * a.K + offset;
    }
  }

  const Page* key_address(int64_t slot, int64_t head) const {
    return static_cast<const Page*>(a.k_pages) + (slot * a.K + head) * a.H / ELEMENT_DIMS<Page>;
  }
  const Page* value_address(int64_t slot, int64_t head) const {
    if (!a.v_pages) return key_address(slot, head);
    return static_cast<const Page*>(a.v_pages) + (slot * a.K + head) * a.V / ELEMENT_DIMS<Page>;
  }

  // Updates the softmax of a head's rows with one block of keys.
  void process_block(const Tile& t, const KeyBlock& b, int64_t head, const Query<X>* head_q, float* head_sum_lanes,
                     SoftmaxState state, Prefetcher& prefetcher) {
    const Key* key[BLOCK];
    std::fill(key + b.first_vector() * W, key + b.end_vector() * W, zero_key);
    for (int j = b.begin; j < b.end; ++j)
      if (std::is_same_v<Page, Key> && H == a.H)
        key[j] = reinterpret_cast<const Key*>(key_address(b.slot[j], head));
      else
        key[j] = copy(key_address(b.slot[j], head), key_rows + j * H);
    if (a.k_scale) {
      const float* value_scales = a.v_pages ? a.v_scale : a.k_scale;
      std::fill_n(k_scale, BLOCK, 0.0f), std::fill_n(v_scale, BLOCK, 0.0f);
      for (int j = b.begin; j < b.end; ++j) k_scale[j] = a.k_scale[b.scale_index[j] + head * a.S];
      for (int j = b.begin; j < b.end; ++j) v_scale[j] = value_scales[b.scale_index[j] + head * a.S];
    }

    auto transposed = [&](int g) { return keys + g * W * H / (4 / sizeof(X)); };
    for (int g = b.first_vector(); g < b.end_vector(); ++g)
      if constexpr (IS_INT4)
        transpose_keys(key + g * W, H / 2, codes, prefetcher), decode_keys<X>(codes, H / 8, transposed(g));
      else
        transpose_keys(key + g * W, H, transposed(g), prefetcher);
    // Skips the first rows if they come before these keys, and the last rows if the keys have left their windows.
    int64_t first_row = 0, end_row = R;
    while (first_row < R && last_visible[first_row] < b.base + b.begin) ++first_row;
    while (end_row > first_row && a.scoring.last_hidden(position[end_row - 1]) >= b.base + b.end - 1) --end_row;
    if (UNPACKS_KEYS<X> && end_row - first_row > 2 * TILE_ROWS) {
      for (int g = b.first_vector(); g < b.end_vector(); ++g) unpack_pairs(transposed(g), H / 2, unpacked + g * W * H);
      if constexpr (UNPACKS_KEYS<X>)
        compute_scores<float>(b, first_row, end_row, head_q, reinterpret_cast<const uint32_t*>(unpacked), prefetcher);
    } else {
      compute_scores<X>(b, first_row, end_row, head_q, keys, prefetcher);
    }
    bool is_masked = b.base + BLOCK - 1 > t.first_sees || b.base <= a.scoring.last_hidden(t.newest);
    if (is_masked || a.k_scale || a.scoring.soft_cap)
      finish_scores(a.scoring, b, a.k_scale ? k_scale : nullptr, is_masked, position, last_visible, first_row, end_row,
                    scores);
    compute_weights(a.scoring.log2_scale(), first_row, end_row, scores, a.k_scale ? v_scale : nullptr, weights, state,
                    head_sum_lanes, V);

    int begin = b.begin / KEY_STEP * KEY_STEP, end = (b.end + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
    const Page* value[BLOCK];
    std::fill(value + begin, value + end, zero_value);
    for (int j = b.begin; j < b.end; ++j) value[j] = value_address(b.slot[j], head);
    bool reads_pages = a.V == V && (end_row - first_row <= 2 * TILE_ROWS || sizeof(Page) == 4);
    for (int64_t dim = 0; dim < V; dim += TILE_VECTORS * W) {
      int64_t num_vectors = std::min<int64_t>(TILE_VECTORS, (V - dim) / W);
      const Value* converted_value[BLOCK];
      int64_t size = std::min(a.V - dim, num_vectors * W);
      for (int j = begin; !reads_pages && j < end; j += KEY_STEP)
        converted_value[j] = converted_value[j + KEY_STEP - 1] =
            convert_values(value + j, dim, size, converted + j / KEY_STEP * TILE_VECTORS * W);
      for_each_row_tile(first_row, end_row, [&](int64_t r, auto count) {
        constexpr int COUNT = decltype(count)::value, STEP = VALUE_STEP<Page> / W;
        const Weight* row_weights = weights + r * BLOCK;
        float* out = state.values + r * V + dim;
        if (reads_pages)
          dispatch_values<COUNT, STEP>(num_vectors, row_weights, value, dim, begin, end, out, V, prefetcher);
        else
          dispatch_values<COUNT, STEP>(num_vectors, row_weights, converted_value, 0, begin, end, out, V, prefetcher);
      });
    }
  }

  // Products of rows and a block's transposed keys of type Y.
  template <typename Y>
  void compute_scores(const KeyBlock& b, int64_t first_row, int64_t end_row, const Query<Y>* head_q,
                      const uint32_t* keys, Prefetcher& prefetcher) {
    auto vector_keys = [&](int g) { return keys + g * W * H / (4 / sizeof(Y)); };
    for_each_row_tile(first_row, end_row, [&](int64_t r, auto count) {
      constexpr int COUNT = decltype(count)::value;
      float* out = scores + r * BLOCK;
      int g = b.first_vector();
      for (; g + TILE_VECTORS <= b.end_vector(); g += TILE_VECTORS)
        score_tile<Y, COUNT, TILE_VECTORS>(head_q + r * H, vector_keys(g), H, out + g * W, prefetcher);
      for (; g < b.end_vector(); ++g)
        score_tile<Y, COUNT, 1>(head_q + r * H, vector_keys(g), H, out + g * W, prefetcher);
    });
  }

  // Converts `size` dimensions, from `dim` on, of the values of KEY_STEP keys to float or to bfloat16 pairs.
  static const Value* convert_values(const Page* const* value, int64_t dim, int64_t size, Value* out) {
    constexpr int STEP = VALUE_STEP<Page>;
    for (int64_t i = 0; i < size; i += STEP) {
      Page tail[KEY_STEP][STEP / ELEMENT_DIMS<Page>] = {};
      const Page* source[KEY_STEP];
      for (int k = 0; k < KEY_STEP; ++k) {
        source[k] = value[k] + (dim + i) / ELEMENT_DIMS<Page>;
        if (size - i < STEP) source[k] = copy_tail(source[k], size - i, tail[k]);
      }
      if constexpr (USES_BF16_PAIRS<X>) {
        U v[STEP / W];
        load_pairs(source[0], source[1], v);
        std::memcpy(out + i, v, sizeof(v));
      } else {
        F v[STEP / W];
        load_values(source[0], v);
        std::memcpy(out + i, v, sizeof(v));
      }
    }
    return out;
  }

  static const Page* copy_tail(const Page* in, int64_t size, Page* out) {
    std::memcpy(out, in, size / ELEMENT_DIMS<Page> * sizeof(Page));
    return out;
  }

  // Divides a head's sums by the sums of weights and writes the results.
  void finish(const Tile& t, int64_t head, SoftmaxState state) {
    if constexpr (ALLOWS_FLOAT32<X>)
      if (a.is_float32) finish(t, head, state, static_cast<float*>(a.out));
    if constexpr (ALLOWS_BF16<Page, X>)
      if (!a.is_float32) finish(t, head, state, static_cast<uint16_t*>(a.out));
  }

  template <typename Y>
  void finish(const Tile& t, int64_t head, SoftmaxState state, Y* out) {
    constexpr int STEP = VALUE_STEP<Page>;
    for (int64_t r = 0; r < R; ++r) {
      float inverse = state.weight_sum[r] == 0 ? 1 : 1 / state.weight_sum[r];
      for (int64_t i = 0; i < a.V; i += STEP) {
        F v[STEP / W];  // + 0.0f: adding zero weights turns negative zeros positive in some batches only
        for (int n = 0; n < STEP / W; ++n) v[n] = load(state.values + r * V + i + n * W) * inverse + 0.0f;
        store_results<Page>(out + row_index(t, head, r, a.V) + i, v, std::min<int64_t>(STEP, a.V - i));
      }
    }
  }

  const AttentionCall& a;
  const Tile* tiles;
  const int64_t H, V;  // padded dimensions of keys and values
  int64_t R;           // rows of the tile times query heads per KV head
  Query<X>* q;
  Key *key_rows, *zero_key;
  Weight* weights;
  Value* converted;
  const Page* zero_value;  // for keys that no row sees
  float *scores, *weight_sum_lanes, *k_scale, *v_scale, *split_states, *total_states, *q_row = nullptr,
      *unpacked = nullptr;
  uint32_t *keys, *codes = nullptr;
  int32_t *position, *last_visible;
};

// Appends the new keys and values, then computes attention. `run_parallel(chunks, run)` calls run(0) .. run(chunks - 1)
// on up to `num_threads` threads.
template <typename Page, typename X, typename RunParallel>
void attend(const AttentionCall& a, int64_t num_threads, const RunParallel& run_parallel) {
  if constexpr (ALLOWS_FLOAT32<X>)
    if (a.k && a.is_float32) append<Page, float>(a, run_parallel);
  if constexpr (ALLOWS_BF16<Page, X>)
    if (a.k && !a.is_float32) append<Page, uint16_t>(a, run_parallel);
  int64_t used = a.starts[a.B] * a.N * a.V, value_bytes = a.is_float32 ? 4 : 2;
  char* out = static_cast<char*>(a.out);
  std::fill(out + used * value_bytes, out + a.T * a.N * a.V * value_bytes, 0);

  int64_t tile_rows = std::max<int64_t>(1, TILE_SIZE / a.G()), total_cost = 0;
  std::vector<Tile> tiles;
  auto cost = [&](const Tile& t, int64_t num_keys) {
    return std::max<int64_t>(num_keys, 1) * (t.num_rows * a.G() + TILE_ROWS);
  };
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t row = a.starts[b]; row < a.starts[b + 1]; row += tile_rows) {
      Tile t{b, row, std::min(tile_rows, a.starts[b + 1] - row), 0, 0, 0, 0, 0, nullptr};
      auto range = std::minmax_element(a.positions + row, a.positions + row + t.num_rows);
      t.oldest = *range.first, t.newest = *range.second;
      int64_t last_seen = t.first_sees = a.last_visible(b, row);
      for (int64_t r = row + 1; r < row + t.num_rows; ++r) {
        t.first_sees = std::min(t.first_sees, a.last_visible(b, r));
        last_seen = std::max(last_seen, a.last_visible(b, r));
      }
      t.first_key = std::max<int64_t>(0, a.scoring.last_hidden(t.oldest) + 1);
      t.last_key = std::min(last_seen, a.M * a.S - 1);
      total_cost += cost(t, t.last_key - t.first_key + 1) * a.K;
      tiles.push_back(t);
    }

  int64_t item_cost = std::max(total_cost / (num_threads * ITEMS_PER_THREAD), MIN_ITEM_COST);
  int64_t block_bytes = BLOCK * (a.H + a.V) * sizeof(Page) / ELEMENT_DIMS<Page>;
  std::vector<WorkItem> items;
  std::vector<std::vector<float>> partials;
  for (size_t i = 0; i < tiles.size(); ++i) {
    Tile& t = tiles[i];
    int64_t tile = static_cast<int64_t>(i), head_cost = cost(t, t.last_key - t.first_key + 1);
    int64_t begin = t.first_key / BLOCK, end = t.last_key < t.first_key ? begin : t.last_key / BLOCK + 1;
    if (num_threads > 1 && head_cost > item_cost && t.num_splits() > 1) {
      partials.emplace_back(t.num_splits() * a.K *
                            SoftmaxState::size(t.num_rows * a.G(), Worker<Page, X>::padded_width(a)));
      t.partial = partials.back().data();
      for (int64_t k = 0; k < a.K; ++k)
        for (int64_t b = begin / SPLIT_BLOCKS * SPLIT_BLOCKS; b < end; b += SPLIT_BLOCKS)
          items.push_back({tile, k, 1, std::max(begin, b), std::min(end, b + SPLIT_BLOCKS), cost(t, SPLIT), true});
    } else {
      int64_t heads = std::clamp<int64_t>(std::min(item_cost / head_cost, MAX_BLOCK_BYTES / block_bytes), 1, a.K);
      for (int64_t k = 0; k < a.K; k += heads)
        items.push_back({tile, k, std::min(heads, a.K - k), begin, end, head_cost * heads, false});
    }
  }
  std::sort(items.begin(), items.end(), [](const WorkItem& x, const WorkItem& y) {
    return x.cost != y.cost ? x.cost > y.cost : x.tile != y.tile ? x.tile < y.tile : x.first_head < y.first_head;
  });

  std::unique_ptr<std::atomic<int64_t>[]> splits_done(new std::atomic<int64_t>[tiles.size() * a.K]());
  int64_t num_items = static_cast<int64_t>(items.size());
  run_parallel(num_items, [&](int64_t index) {
    static thread_local Scratch scratch;
    const WorkItem& item = items[index];
    const WorkItem* next = index + num_threads < num_items ? &items[index + num_threads] : nullptr;
    Worker<Page, X> worker(a, scratch, tiles.data(), item.num_heads, tile_rows * a.G());
    worker.run(item, next && next->begin_block < next->end_block ? next : nullptr);
    const Tile& t = tiles[item.tile];
    if (item.is_split &&
        splits_done[item.tile * a.K + item.first_head].fetch_add(1, std::memory_order_acq_rel) == t.num_splits() - 1)
      worker.merge_splits(t, item.first_head);
  });
}

}  // namespace attention
}  // namespace quire
