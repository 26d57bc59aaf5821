// paged_attention_tile: attention of up to 64 queries (32 for D above 128) per threadgroup over pages. Keys and values
// of a block go to threadgroup memory once and meet all queries there, as 8x8 matrices. A simdgroup has eight of the
// queries (group member, row) that share a kv head, which lie one after the other; for D above 128 two simdgroups have
// the same eight, with half of the channels each. Which lane holds which element of a matrix is nowhere assumed: rows
// are masked and weighted in threadgroup memory, and the sums are scaled by a product with a diagonal matrix.
// Threadgroup (32, simdgroups, 1), at most 8 of them; groups (splits, tiles of queries, batch * kv_heads).
typedef typename Staged<S>::type M;
constexpr int SIMDGROUPS = 8;
constexpr int SHARES = D > 128 ? 2 : 1;                        // simdgroups per eight queries
constexpr int WIDTH = D / SHARES;                              // channels of a simdgroup
constexpr int KEYS = (sizeof(M) == 2 ? 32 : 16) / SHARES;      // in a block
constexpr int PITCH = D + 8;                                   // of a key in threadgroup memory
constexpr int STRIP = 8 * (KEYS + 4);                          // scores of eight queries
constexpr bool SCALED = sizeof(S) == 1;

threadgroup vec<M, 4> key_block[KEYS * PITCH / 4];
threadgroup vec<M, 4> value_block[KEYS * PITCH / 4];
threadgroup float key_scale[KEYS];
threadgroup float value_scale[KEYS];
threadgroup float strips[SIMDGROUPS * STRIP * SHARES];
threadgroup float diagonals[SIMDGROUPS * 64];

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int simdgroups = int(threads_per_threadgroup.y);
const int split = int(threadgroup_position_in_grid.x);
const int splits = int(threadgroups_per_grid.x);
const int sequence_head = int(threadgroup_position_in_grid.z);  // batch * kv_heads
const int kv_heads = keys_shape[1];
const size_t slots = size_t(keys_shape[2]);
const int sequence = sequence_head / kv_heads;
const int kv_head = sequence_head % kv_heads;
const int rows = window_queries_shape[2];
const int group_queries = window_queries_shape[1] / kv_heads * rows;
const int share = simdgroup % SHARES;
const int first_query = (int(threadgroup_position_in_grid.y) * simdgroups + simdgroup) / SHARES * 8;
const int live = clamp(group_queries - first_query, 0, 8);
const size_t base_query = size_t(sequence_head) * group_queries + first_query;

const Sight sight = sight_of(state + 8 * sequence, rows);
const int per_split = (sight.items + splits - 1) / splits;
const int first_item = min(split * per_split, sight.items);
const int last_item = min(first_item + per_split, sight.items);

// Four neighbouring lanes have one query: its scores, its maximum, its sum.
const int row = lane / 4;
const int quarter = lane % 4;
const int row_position = sight.first + (first_query + row) % rows;
float maximum = HIDDEN;
float total = 0.0f;  // this lane's part

// A simdgroup's own strip of weights; with two shares, scores are summed from two other strips first.
threadgroup float* weights = strips + simdgroup * STRIP;
threadgroup float* scores = weights + (SHARES - 1) * SIMDGROUPS * STRIP;
threadgroup float* other_scores = strips + (simdgroup ^ 1) * STRIP + (SHARES - 1) * SIMDGROUPS * STRIP;
threadgroup float* diagonal = diagonals + simdgroup * 64;
const threadgroup M* staged_keys = (const threadgroup M*)(key_block) + share * WIDTH;
const threadgroup M* staged_values = (const threadgroup M*)(value_block) + share * WIDTH;
diagonal[lane] = 0.0f;
diagonal[lane + 32] = 0.0f;

simdgroup_matrix<float, 8, 8> query[WIDTH / 8];
simdgroup_matrix<float, 8, 8> attended[WIDTH / 8];
UNROLL
for (int c = 0; c < WIDTH / 8; c++) {
  query[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  attended[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int item = first_item; item < last_item; item++) {
  const Run run = run_of(sight, item);
  if (live > 0 && (item == first_item || item == sight.sink_items)) {
    const device float* queries = run.sinks ? sink_queries : window_queries;
    UNROLL
    for (int c = 0; c < WIDTH / 8; c++) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL
      for (int e = 0; e < 2; e++) {
        const int channel = 2 * quarter + e;
        weights[8 * row + channel] =
            row < live ? queries[(base_query + row) * D + share * WIDTH + 8 * c + channel] : 0.0f;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_load(query[c], weights, 8);
    }
  }
  const size_t first_slot = size_t(kv_head) * slots + size_t(pages[sequence * pages_shape[1] + run.index]) * PAGE;
  for (int start = run.begin; start < run.end; start += KEYS) {
    const int count = min(KEYS, run.end - start);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the block before has been used
    for (int i = simdgroup * 32 + lane; i < KEYS * D / 4; i += 32 * simdgroups) {
      const int key = i / (D / 4);
      const int channel = i % (D / 4) * 4;
      float4 four_keys = float4(0.0f);
      float4 four_values = float4(0.0f);
      if (key < count) {
        const size_t from = (first_slot + start + key) * D + channel;
        four_keys = load4(keys + from);
        four_values = load4(values + from);
      }
      key_block[(key * PITCH + channel) / 4] = vec<M, 4>(four_keys);
      value_block[(key * PITCH + channel) / 4] = vec<M, 4>(four_values);
    }
    if (SCALED && simdgroup == 0 && lane < KEYS) {
      key_scale[lane] = lane < count ? float(key_scales[first_slot + start + lane]) : 0.0f;
      value_scale[lane] = lane < count ? float(value_scales[first_slot + start + lane]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (live > 0) {
      UNROLL
      for (int k = 0; k < KEYS / 8; k++) {
        simdgroup_matrix<float, 8, 8> product = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        UNROLL
        for (int c = 0; c < WIDTH / 8; c++) {
          simdgroup_matrix<M, 8, 8> transposed_keys;
          simdgroup_load(transposed_keys, staged_keys + 8 * k * PITCH + 8 * c, PITCH, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(product, query[c], transposed_keys, product);
        }
        simdgroup_store(product, scores + 8 * k, KEYS + 4);
      }
    }
    if (SHARES == 2) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (live > 0) {
      float score[KEYS / 4];
      float highest = maximum;
      UNROLL
      for (int e = 0; e < KEYS / 4; e++) {
        const int key = quarter + 4 * e;
        const int place = row * (KEYS + 4) + key;
        float sum = scores[place];
        if (SHARES == 2) {
          sum += other_scores[place];
        }
        if (SCALED) {
          sum *= key_scale[key];
        }
        const int position = run.position + start + key;
        const bool seen = key < count && sees(sight, row_position, position, run.sinks);
        score[e] = seen ? sum : HIDDEN;
        highest = max(highest, score[e]);
      }
      highest = max(highest, simd_shuffle_xor(highest, ushort(1)));
      highest = max(highest, simd_shuffle_xor(highest, ushort(2)));
      const float shrink = fast::exp(maximum - highest);
      maximum = highest;
      total *= shrink;
      UNROLL
      for (int e = 0; e < KEYS / 4; e++) {
        const int key = quarter + 4 * e;
        const float weight = score[e] > HIDDEN ? fast::exp(score[e] - highest) : 0.0f;
        total += weight;
        weights[row * (KEYS + 4) + key] = SCALED ? weight * value_scale[key] : weight;
      }
      const bool shrinks = !simd_all(shrink == 1.0f);
      if (quarter == 0) {
        diagonal[9 * row] = shrink;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (shrinks) {
        simdgroup_matrix<float, 8, 8> scaling;
        simdgroup_load(scaling, diagonal, 8);
        UNROLL
        for (int c = 0; c < WIDTH / 8; c++) {
          simdgroup_multiply(attended[c], scaling, attended[c]);
        }
      }
      UNROLL
      for (int k = 0; k < KEYS / 8; k++) {
        simdgroup_matrix<float, 8, 8> weight;
        simdgroup_load(weight, weights + 8 * k, KEYS + 4);
        UNROLL
        for (int c = 0; c < WIDTH / 8; c++) {
          simdgroup_matrix<M, 8, 8> value;
          simdgroup_load(value, staged_values + 8 * k * PITCH + 8 * c, PITCH);
          simdgroup_multiply_accumulate(attended[c], weight, value, attended[c]);
        }
      }
    }
  }
}

if (live > 0) {
  UNROLL
  for (int c = 0; c < WIDTH / 8; c++) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_store(attended[c], weights, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int e = 0; e < 2; e++) {
      const int channel = 2 * quarter + e;
      if (row < live) {
        const size_t part = (base_query + row) * splits + split;
        partials[part * D + share * WIDTH + 8 * c + channel] = weights[8 * row + channel];
      }
    }
  }
  total += simd_shuffle_xor(total, ushort(1));
  total += simd_shuffle_xor(total, ushort(2));
  if (row < live && quarter == 0 && share == 0) {
    const size_t part = (base_query + row) * splits + split;
    maxima[part] = maximum;
    sums[part] = total;
  }
}
