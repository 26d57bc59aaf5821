// paged_attention_combine: merges what the splits of the context contributed to each query. Each split's part is
// sum(exp(score - maximum) * value), with its maximum and its sum of exp(score - maximum).
// One threadgroup per query; its simdgroups take splits in turn, a lane has every 32nd channel.
constexpr int SIMDGROUPS = 4;
constexpr int CHANNELS = (D + 31) / 32;  // per lane
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const size_t query = size_t(threadgroup_position_in_grid.z);
const int splits = maxima_shape[3];

float maximum = HIDDEN;
for (int split = lane; split < splits; split += 32) {
  maximum = max(maximum, maxima[query * splits + split]);
}
maximum = simd_max(maximum);
float total = 0.0f;
for (int split = lane; split < splits; split += 32) {
  total += sums[query * splits + split] * fast::exp(maxima[query * splits + split] - maximum);
}
total = simd_sum(total);

float merged[CHANNELS];
UNROLL
for (int e = 0; e < CHANNELS; e++) {
  merged[e] = 0.0f;
}
for (int split = simdgroup; split < splits; split += SIMDGROUPS) {
  const size_t part = query * splits + split;
  const float weight = fast::exp(maxima[part] - maximum);
  UNROLL
  for (int e = 0; e < CHANNELS; e++) {
    const int channel = lane + 32 * e;
    if (channel < D) {
      merged[e] += weight * partials[part * D + channel];
    }
  }
}

threadgroup float gathered[SIMDGROUPS * D];
UNROLL
for (int e = 0; e < CHANNELS; e++) {
  const int channel = lane + 32 * e;
  if (channel < D) {
    gathered[simdgroup * D + channel] = merged[e];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int channel = simdgroup * 32 + lane; channel < D; channel += 32 * SIMDGROUPS) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < SIMDGROUPS; i++) {
    sum += gathered[i * D + channel];
  }
  attended[query * D + channel] = T(total > 0.0f ? sum / total : 0.0f);
}
