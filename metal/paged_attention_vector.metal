// paged_attention_vector: attention of few queries over pages. A threadgroup has one split of one sequence's visible
// pages and up to QUERIES of the queries (group member, row) that share a kv head, which lie one after the other. Its
// simdgroups take a few keys in turn; a lane has CHANNELS neighbouring channels. Each key and value of the split is
// loaded once.
// Threadgroup (32, 4, 1); groups (splits, tiles of queries, batch * kv_heads).
constexpr int SIMDGROUPS = 4;
constexpr int CHANNELS = D <= 64 ? 2 : D <= 128 ? 4 : 8;
constexpr int KEYS = QUERIES * CHANNELS <= 16 ? 4 : 2;  // loaded together, so that their loads overlap
constexpr bool SCALED = sizeof(S) == 1;

const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int split = int(threadgroup_position_in_grid.x);
const int splits = int(threadgroups_per_grid.x);
const int sequence_head = int(threadgroup_position_in_grid.z);  // batch * kv_heads
const int kv_heads = keys_shape[1];
const size_t slots = size_t(keys_shape[2]);
const int sequence = sequence_head / kv_heads;
const int kv_head = sequence_head % kv_heads;
const int rows = window_queries_shape[2];
const int group_queries = window_queries_shape[1] / kv_heads * rows;
const int first_query = int(threadgroup_position_in_grid.y) * QUERIES;
const int live = min(QUERIES, group_queries - first_query);
const size_t base_query = size_t(sequence_head) * group_queries + first_query;

// Where 32 lanes have more channels than D, the last ones idle: they load channel 0 and multiply it by 0.
const bool idle = lane * CHANNELS >= D;
const int channel = idle ? 0 : lane * CHANNELS;

const Sight sight = sight_of(state + 8 * sequence, rows);
const int per_split = (sight.items + splits - 1) / splits;
const int first_item = min(split * per_split, sight.items);
const int last_item = min(first_item + per_split, sight.items);

float query[QUERIES][CHANNELS];
float attended[QUERIES][CHANNELS];
float maximum[QUERIES];
float total[QUERIES];
int row_position[QUERIES];
UNROLL
for (int q = 0; q < QUERIES; q++) {
  UNROLL
  for (int e = 0; e < CHANNELS; e++) {
    query[q][e] = 0.0f;
    attended[q][e] = 0.0f;
  }
  maximum[q] = HIDDEN;
  total[q] = 0.0f;
  row_position[q] = sight.first + (first_query + q) % rows;
}

for (int item = first_item; item < last_item; item++) {
  const Run run = run_of(sight, item);
  if (item == first_item || item == sight.sink_items) {
    const device float* queries = run.sinks ? sink_queries : window_queries;
    UNROLL
    for (int q = 0; q < QUERIES; q++) {
      if (q < live && !idle) {
        load_floats<CHANNELS>(queries + (base_query + q) * D + channel, query[q]);
      }
    }
  }
  const size_t first_slot = size_t(kv_head) * slots + size_t(pages[sequence * pages_shape[1] + run.index]) * PAGE;
  for (int start = run.begin + simdgroup * KEYS; start < run.end; start += SIMDGROUPS * KEYS) {
    float key[KEYS][CHANNELS];
    float value[KEYS][CHANNELS];
    float key_scale[KEYS];
    float value_scale[KEYS];
    UNROLL
    for (int t = 0; t < KEYS; t++) {
      const size_t slot = first_slot + min(start + t, run.end - 1);  // past the end, the last key again
      load_floats<CHANNELS>(keys + slot * D + channel, key[t]);
      load_floats<CHANNELS>(values + slot * D + channel, value[t]);
      key_scale[t] = SCALED ? float(key_scales[slot]) : 1.0f;
      value_scale[t] = SCALED ? float(value_scales[slot]) : 1.0f;
    }
    UNROLL
    for (int q = 0; q < QUERIES; q++) {
      if (q < live) {
        float score[KEYS];
        float highest = maximum[q];
        UNROLL
        for (int t = 0; t < KEYS; t++) {
          float product = 0.0f;
          UNROLL
          for (int e = 0; e < CHANNELS; e++) {
            product += query[q][e] * key[t][e];
          }
          product = simd_sum(product) * key_scale[t];
          const int offset = start + t;
          const bool seen = offset < run.end && sees(sight, row_position[q], run.position + offset, run.sinks);
          score[t] = seen ? product : HIDDEN;
          highest = max(highest, score[t]);
        }
        const float shrink = fast::exp(maximum[q] - highest);
        maximum[q] = highest;
        total[q] *= shrink;
        UNROLL
        for (int e = 0; e < CHANNELS; e++) {
          attended[q][e] *= shrink;
        }
        UNROLL
        for (int t = 0; t < KEYS; t++) {
          const float weight = score[t] > HIDDEN ? fast::exp(score[t] - highest) : 0.0f;
          total[q] += weight;
          UNROLL
          for (int e = 0; e < CHANNELS; e++) {
            attended[q][e] += weight * value_scale[t] * value[t][e];
          }
        }
      }
    }
  }
}

// Merge the simdgroups.
threadgroup float gathered[SIMDGROUPS * QUERIES * D];
threadgroup float gathered_maximum[SIMDGROUPS * QUERIES];
threadgroup float gathered_total[SIMDGROUPS * QUERIES];
UNROLL
for (int q = 0; q < QUERIES; q++) {
  const int place = simdgroup * QUERIES + q;
  if (!idle) {
    UNROLL
    for (int e = 0; e < CHANNELS; e++) {
      gathered[place * D + channel + e] = attended[q][e];
    }
  }
  if (lane == 0) {
    gathered_maximum[place] = maximum[q];
    gathered_total[place] = total[q];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = simdgroup * 32 + lane; i < live * D; i += 32 * SIMDGROUPS) {
  const int q = i / D;
  const size_t part = (base_query + q) * splits + split;
  float highest = HIDDEN;
  UNROLL
  for (int j = 0; j < SIMDGROUPS; j++) {
    highest = max(highest, gathered_maximum[j * QUERIES + q]);
  }
  float sum = 0.0f;
  float sum_of_weights = 0.0f;
  UNROLL
  for (int j = 0; j < SIMDGROUPS; j++) {
    const float weight = fast::exp(gathered_maximum[j * QUERIES + q] - highest);
    sum += weight * gathered[j * QUERIES * D + i];
    sum_of_weights += weight * gathered_total[j * QUERIES + q];
  }
  partials[part * D + i % D] = sum;
  if (i % D == 0) {
    maxima[part] = highest;
    sums[part] = sum_of_weights;
  }
}
