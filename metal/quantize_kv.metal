// quantize_kv: keys rotated and divided by their channels' divisors, then keys and values to INT8 with one scale each.
// One simdgroup per row and kv head, those of a threadgroup for one row: they share its angles. A lane has every 32nd
// channel. keys, values (batch, kv_heads, n, D).
// Threadgroup (32, simdgroups, 1); groups (1, enough for all kv heads, batch * n).
constexpr int CHANNELS = (D + 31) / 32;  // per lane
const int lane = int(thread_index_in_simdgroup);
const int kv_heads = keys_shape[1];
const int rows = keys_shape[2];
const int kv_head = int(thread_position_in_grid.y);
if (kv_head >= kv_heads) {
  return;
}
const int sequence = int(thread_position_in_grid.z) / rows;
const int row = int(thread_position_in_grid.z) % rows;
const size_t token = (size_t(sequence) * kv_heads + kv_head) * rows + row;
const size_t angles = (size_t(sequence) * rows + row) * D;
const size_t channels = size_t(kv_head) * D;

float key[CHANNELS];
float value[CHANNELS];
float largest_key = 0.0f;
float largest_value = 0.0f;
UNROLL
for (int e = 0; e < CHANNELS; e++) {
  const int channel = lane + 32 * e;
  key[e] = 0.0f;
  value[e] = 0.0f;
  if (channel < D) {
    const int other = INTERLEAVED ? (channel ^ 1) : channel < D / 2 ? channel + D / 2 : channel - D / 2;
    const float turned = rotated(
        float(keys[token * D + channel]), cosines[angles + channel],
        float(keys[token * D + other]), sines[angles + channel]);
    key[e] = turned / divisors[channels + channel];
    value[e] = float(values[token * D + channel]);
  }
  largest_key = max(largest_key, fabs(key[e]));
  largest_value = max(largest_value, fabs(value[e]));
}
const half key_scale = half(min(simd_max(largest_key) / 127.0f, 65504.0f));
const half value_scale = half(min(simd_max(largest_value) / 127.0f, 65504.0f));
UNROLL
for (int e = 0; e < CHANNELS; e++) {
  const int channel = lane + 32 * e;
  if (channel < D) {
    quantized_keys[token * D + channel] = rounded(key[e], key_scale);
    quantized_values[token * D + channel] = rounded(value[e], value_scale);
  }
}
if (lane == 0) {
  key_scales[token] = key_scale;
  value_scales[token] = value_scale;
}
