// What the kernels of this folder share: the columns of a sequence's state, which runs of slots its rows can see, and
// loads that widen to float. MLX has no include path for custom kernels: this text is put before each body.
//
// A sequence's rows are the last ones of `length` positions. Row p sees position j if
// j <= p and (j < sinks or j > p - window). Its table lists the pages it still has, in order; between the first
// `head_pages` of them and the rest, `dropped` pages are gone.

#define UNROLL _Pragma("clang loop unroll(full)")

static constant constexpr int PAGE = 64;
// Score of what a row must not see. Finite: fast mathematics knows no infinities, and their difference is no number.
static constant constexpr float HIDDEN = -1e30f;

// What the rows of one sequence see, as a list of items: first the pages that hold sinks, then those of the window.
// A page that holds both is in the list twice, each time with only its own slots, so no key is visited twice.
struct Sight {
  int length, sinks, window, head_pages, dropped;
  int first;         // position of the first row
  int from;          // first position, not a sink, that any row sees
  int sink_items;
  int first_page;    // index in the table of the first page of the window
  int items;
};

inline int table_index(int page, int head_pages, int dropped) {
  return page < head_pages ? page : max(head_pages, page - dropped);
}

inline Sight sight_of(const device int* state, int rows) {
  Sight sight;
  sight.length = state[0];
  sight.sinks = state[1];
  sight.window = state[2];
  sight.head_pages = state[3];
  sight.dropped = state[4];
  sight.first = sight.length - rows;
  sight.from = max(max(sight.sinks, 0), sight.first - sight.window + 1);
  const int pages = (sight.length + PAGE - 1) / PAGE - sight.dropped;  // in the table
  sight.sink_items = min(pages, (min(sight.sinks, sight.length) + PAGE - 1) / PAGE);
  sight.first_page = table_index(sight.from / PAGE, sight.head_pages, sight.dropped);
  sight.items = sight.sink_items + max(0, pages - sight.first_page);
  return sight;
}

// One item: the slots [begin, end) of a page, the first slot of which is at `position`.
struct Run {
  int index;  // in the table
  int position, begin, end;
  bool sinks;
};

inline Run run_of(Sight sight, int item) {
  Run run;
  run.sinks = item < sight.sink_items;
  run.index = run.sinks ? item : item - sight.sink_items + sight.first_page;
  run.position = (run.index < sight.head_pages ? run.index : run.index + sight.dropped) * PAGE;
  run.begin = run.sinks ? 0 : max(0, sight.from - run.position);
  run.end = min(PAGE, (run.sinks ? min(sight.sinks, sight.length) : sight.length) - run.position);
  return run;
}

inline bool sees(Sight sight, int row_position, int position, bool sink) {
  return position <= row_position && (sink || position > row_position - sight.window);
}

inline float4 load4(const device float* from) { return *(const device float4*)(from); }
inline float4 load4(const device half* from) { return float4(*(const device half4*)(from)); }
inline float4 load4(const device int8_t* from) { return float4(*(const device char4*)(from)); }
inline float4 load4(const device bfloat16_t* from) {
  return as_type<float4>(uint4(*(const device ushort4*)(from)) << uint4(16));
}
inline float2 load2(const device float* from) { return *(const device float2*)(from); }
inline float2 load2(const device half* from) { return float2(*(const device half2*)(from)); }
inline float2 load2(const device int8_t* from) { return float2(*(const device char2*)(from)); }
inline float2 load2(const device bfloat16_t* from) {
  return as_type<float2>(uint2(*(const device ushort2*)(from)) << uint2(16));
}

// N neighbouring elements as float; N is 2 or a multiple of 4, and `from` a multiple of min(N, 4) elements.
template <int N, typename S>
inline void load_floats(const device S* from, thread float* to) {
  if (N == 2) {
    const float2 pair = load2(from);
    to[0] = pair.x;
    to[1] = pair.y;
  } else {
    UNROLL
    for (int i = 0; i < N / 4; i++) {
      const float4 four = load4(from + 4 * i);
      to[4 * i] = four.x;
      to[4 * i + 1] = four.y;
      to[4 * i + 2] = four.z;
      to[4 * i + 3] = four.w;
    }
  }
}

// How keys and values are held in threadgroup memory: half where that is exact, as it is for INT8 before its scale.
template <typename S> struct Staged { typedef float type; };
template <> struct Staged<half> { typedef half type; };
template <> struct Staged<int8_t> { typedef half type; };

// One channel of a rotated pair, each product rounded by itself as in the reference.
inline float rotated(float x, float cosine, float other, float sine) {
#pragma clang fp contract(off)
  const float a = x * cosine;
  const float b = other * sine;
  return a + b;
}

// INT8 of x / scale, x when the scale is 0; ties to even.
inline int8_t rounded(float x, half scale) {
  const float divisor = scale > half(0) ? float(scale) : 1.0f;
  return int8_t(clamp(rint(x / divisor), -127.0f, 127.0f));
}
