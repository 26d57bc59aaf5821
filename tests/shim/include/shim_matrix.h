// 8x8 matrices held by a simdgroup. Which lane holds which element is not documented by Metal; here it is a made-up
// scramble, and reading it through thread_elements() is an error. Products are summed in float and rounded once.
#pragma once

extern "C" void shim_lane_layout(uint line);
extern "C" uint shim_lane();
extern "C" void shim_matrix_access(const volatile void* at, ulong stride, uint transposed, uint element_bytes, uint write);
extern "C" void shim_product(const float* a, const float* b, const float* c, float* out);

namespace shim {
constexpr METAL_FUNC uint matrix_place(uint lane, uint item) { return ((2 * lane + item) * 37 + 11) % 64; }  // row * 8 + column
struct matrix_call { const volatile void* at; ulong stride; uint transposed; };
template <class T> struct matrix_values { T held[2]; };
template <class T> struct matrix_store { matrix_call call; matrix_values<T> values; };
inline SHIM_PLAIN void agree(matrix_call a, matrix_call b) {
  if (a.at != b.at || a.stride != b.stride || a.transposed != b.transposed)
    shim_misuse("the arguments of a simdgroup matrix operation differ between lanes", 0);
}
// Where the i-th of the 64 elements that the lanes hold is in memory.
inline SHIM_PLAIN ulong matrix_offset(matrix_call call, uint i) {
  const uint place = matrix_place(i / 2, i % 2);
  return call.transposed ? place % 8 * call.stride + place / 8 : place / 8 * call.stride + place % 8;
}
template <class T, class A, class B> struct matrix_factors { A a[2]; B b[2]; T c[2]; };
// The memory is checked and counted as if each lane accessed what it holds, but at once.
template <class T>
SHIM_APART matrix_values<T> load_matrix(const volatile T* at, ulong stride, bool transposed, uint line) {
  const matrix_call call{at, stride, transposed};
  const auto combine = [](const matrix_call* in, matrix_values<T>* out, uint n) SHIM_PLAIN {
    if (n != 32) shim_misuse("a simdgroup matrix needs all 32 lanes", 0);
    for (uint i = 1; i < n; i++) agree(in[i], in[0]);
    const T* from = const_cast<const T*>(static_cast<const volatile T*>(in[0].at));
    shim_matrix_access(from, in[0].stride, in[0].transposed, sizeof(T), 0);
    for (uint i = 0; i < 64; i++) out[i / 2].held[i % 2] = from[matrix_offset(in[0], i)];
  };
  return exchange<matrix_values<T>>(call, "simdgroup_load", line, combine);
}
template <class T>
SHIM_APART void store_matrix(volatile T* at, ulong stride, bool transposed, T first, T second, uint line) {
  const matrix_store<T> given{{at, stride, transposed}, {first, second}};
  const auto combine = [](const matrix_store<T>* in, uint* out, uint n) SHIM_PLAIN {
    if (n != 32) shim_misuse("a simdgroup matrix needs all 32 lanes", 0);
    for (uint i = 1; i < n; i++) agree(in[i].call, in[0].call);
    T* to = const_cast<T*>(static_cast<const volatile T*>(in[0].call.at));
    shim_matrix_access(to, in[0].call.stride, in[0].call.transposed, sizeof(T), 1);
    for (uint i = 0; i < 64; i++) to[matrix_offset(in[0].call, i)] = in[i / 2].values.held[i % 2];
    for (uint i = 0; i < n; i++) out[i] = 0;
  };
  exchange<uint>(given, "simdgroup_store", line, combine);
}
template <class T, class A, class B>
SHIM_APART matrix_values<T> multiply_matrices(A a0, A a1, B b0, B b1, T c0, T c1, uint line) {
  using factors = matrix_factors<T, A, B>;
  return exchange<matrix_values<T>>(
      factors{{a0, a1}, {b0, b1}, {c0, c1}}, "simdgroup_multiply_accumulate", line,
      [](const factors* in, matrix_values<T>* out, uint n) SHIM_PLAIN {
        if (n != 32) shim_misuse("a simdgroup matrix needs all 32 lanes", 0);
        float a[64], b[64], c[64], d[64];
        for (uint i = 0; i < 64; i++) {
          const uint place = matrix_place(i / 2, i % 2);
          a[place] = float(in[i / 2].a[i % 2]), b[place] = float(in[i / 2].b[i % 2]), c[place] = float(in[i / 2].c[i % 2]);
        }
        shim_product(a, b, c, d);
        for (uint i = 0; i < 64; i++) out[i / 2].held[i % 2] = T(d[matrix_place(i / 2, i % 2)]);
      });
}
}  // namespace shim

namespace metal {
template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8 by 8");
  static_assert(shim::floating<T>, "simdgroup matrices hold float, half or bfloat");
  T shim_held[2];
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (uint i = 0; i < 2; i++) shim_held[i] = shim::matrix_place(shim_lane(), i) % 9 == 0 ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements(uint line = __builtin_LINE()) {
    shim_lane_layout(line);
    return *reinterpret_cast<vec<T, 2>*>(shim_held);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.shim_held[0] = m.shim_held[1] = value;
  return m;
}
template <class T, int C, int R> simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, C, R>(value);
}

// Element (row, column) is at (origin.y + row) * elements_per_row + origin.x + column.
#define SHIM_MATRIX_MEMORY(space)                                                                                       \
  template <class T, int C, int R>                                                                                      \
  METAL_FUNC void simdgroup_load(simdgroup_matrix<T, C, R>& m, const space T* from, ulong elements_per_row = C,                    \
                      ulong2 origin = ulong2{0, 0}, bool transposed = false, uint line = __builtin_LINE()) SHIM_BODY(   \
    if (transposed && (origin.x || origin.y)) shim_misuse("transposed simdgroup_load from an origin is not known", line); \
    from += origin.y * elements_per_row + origin.x;                                                                     \
    const auto values = shim::load_matrix<T>(from, elements_per_row, transposed, line);                                 \
    m.shim_held[0] = values.held[0];                                                                                    \
    m.shim_held[1] = values.held[1];                                                                                    \
  )                                                                                                                     \
  template <class T, int C, int R>                                                                                      \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, C, R> m, space T* to, ulong elements_per_row = C,                            \
                       ulong2 origin = ulong2{0, 0}, bool transposed = false, uint line = __builtin_LINE()) SHIM_BODY(  \
    if (transposed && (origin.x || origin.y)) shim_misuse("transposed simdgroup_store to an origin is not known", line); \
    to += origin.y * elements_per_row + origin.x;                                                                       \
    shim::store_matrix<T>(to, elements_per_row, transposed, m.shim_held[0], m.shim_held[1], line);                      \
  )
SHIM_SPACES(SHIM_MATRIX_MEMORY)

// d = a b + c. Mixed element types are accepted here; that Apple's compiler takes them too has not been checked.
template <class T, class A, class B>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                                   simdgroup_matrix<T, 8, 8> c, uint line = __builtin_LINE()) {
  const auto product = shim::multiply_matrices<T, A, B>(a.shim_held[0], a.shim_held[1], b.shim_held[0], b.shim_held[1],
                                                        c.shim_held[0], c.shim_held[1], line);
  d.shim_held[0] = product.held[0];
  d.shim_held[1] = product.held[1];
}
template <class T, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                        uint line = __builtin_LINE()) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<T, 8, 8>(T(0)), line);
}
}  // namespace metal
