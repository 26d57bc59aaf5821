// Barriers and operations across a simdgroup. Every lane must reach the same one: Metal defines the reductions over
// active lanes only, but a kernel here that means that is far rarer than one that is wrong.
#pragma once

extern "C" void shim_simd(const void* in, uint in_bytes, void* out, uint out_bytes, const char* operation, uint line,
                          void (*combine)(const void*, void*, uint));
extern "C" void shim_simdgroup_barrier(uint flags, uint line);
extern "C" void shim_threadgroup_barrier(uint flags, uint line);
extern "C" void* shim_threadgroup(uint id, const char* name, ulong bytes, uint element_bytes);
extern "C" void shim_misuse(const char* what, uint line);
struct shim_position { uint x, y, z; };
extern "C" shim_position shim_attribute(uint id);

namespace shim {
template <class A> struct innermost { using type = A; };
template <class A, size_t N> struct innermost<A[N]> : innermost<A> {};
template <class A> inline A& threadgroup_array(uint id, const char* name) SHIM_BODY(
  return *static_cast<A*>(shim_threadgroup(id, name, sizeof(A), sizeof(typename innermost<A>::type)));
)
// What the entry point passes for each parameter of the kernel.
struct pointer { void* at; template <class T> operator T*() const SHIM_BODY(return static_cast<T*>(at);) };
struct reference { void* at; template <class T> operator T&() const SHIM_BODY(return *static_cast<T*>(at);) };
struct attribute {
  shim_position at;
  operator metal::uint3() const { return metal::uint3{at.x, at.y, at.z}; }
  operator metal::uint2() const { return metal::uint2{at.x, at.y}; }
  operator metal::ushort3() const { return metal::ushort3{ushort(at.x), ushort(at.y), ushort(at.z)}; }
  operator metal::ushort2() const { return metal::ushort2{ushort(at.x), ushort(at.y)}; }
  operator uint() const { return at.x; }
  operator ushort() const { return ushort(at.x); }
};

template <class T> constexpr bool exchangeable = !__is_same(element<T>, bool) && sizeof(T) <= 32;
template <class T> constexpr bool reducible = exchangeable<T> && sizeof(element<T>) <= 4;

// combine(in, out, lanes) once for the simdgroup; In and Out are what a lane gives and gets.
template <class Out, class In, class F> SHIM_APART Out exchange(In in, const char* operation, uint line, F) {
  Out out;
  static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64, "too large to exchange between lanes");
  shim_simd(&in, sizeof(In), &out, sizeof(Out), operation, line,
            [](const void* i, void* o, uint lanes) SHIM_PLAIN {
              F()(static_cast<const In*>(i), static_cast<Out*>(o), lanes);
            });
  return out;
}
}  // namespace shim

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
inline void threadgroup_barrier(mem_flags flags, uint line = __builtin_LINE()) { shim_threadgroup_barrier(uint(flags), line); }
inline void simdgroup_barrier(mem_flags flags, uint line = __builtin_LINE()) { shim_simdgroup_barrier(uint(flags), line); }

// Pairwise, as a tree over the lanes; a GPU's order is not documented.
#define SHIM_REDUCE(name, expression)                                                              \
  template <class T> T name(T value, uint line = __builtin_LINE()) {                               \
    static_assert(shim::reducible<T>, #name " takes numbers of at most 32 bits, or vectors of them"); \
    return shim::exchange<T>(value, #name, line, [](const T* in, T* out, uint n) SHIM_PLAIN {      \
      T part[32];                                                                                  \
      for (uint i = 0; i < n; i++) part[i] = in[i];                                                \
      for (uint step = 1; step < n; step *= 2)                                                     \
        for (uint i = 0; i + step < n; i += 2 * step) {                                            \
          const T a = part[i], b = part[i + step];                                                 \
          part[i] = T(expression);                                                                 \
        }                                                                                          \
      for (uint i = 0; i < n; i++) out[i] = part[0];                                               \
    });                                                                                            \
  }
SHIM_REDUCE(simd_sum, a + b)
SHIM_REDUCE(simd_product, a * b)
SHIM_REDUCE(simd_max, functions::max(a, b))
SHIM_REDUCE(simd_min, functions::min(a, b))
SHIM_REDUCE(simd_and, a & b)
SHIM_REDUCE(simd_or, a | b)
SHIM_REDUCE(simd_xor, a ^ b)

#define SHIM_SCAN(name, op, start, inclusive)                                                      \
  template <class T> T name(T value, uint line = __builtin_LINE()) {                               \
    static_assert(shim::reducible<T>, #name " takes numbers of at most 32 bits, or vectors of them"); \
    return shim::exchange<T>(value, #name, line, [](const T* in, T* out, uint n) SHIM_PLAIN {      \
      T sum = T(start);                                                                            \
      for (uint i = 0; i < n; i++) {                                                               \
        const T before = sum;                                                                      \
        sum = T(sum op in[i]);                                                                     \
        out[i] = inclusive ? sum : before;                                                         \
      }                                                                                            \
    });                                                                                            \
  }
SHIM_SCAN(simd_prefix_inclusive_sum, +, 0, true)
SHIM_SCAN(simd_prefix_exclusive_sum, +, 0, false)
SHIM_SCAN(simd_prefix_inclusive_product, *, 1, true)
SHIM_SCAN(simd_prefix_exclusive_product, *, 1, false)

}  // namespace metal

namespace shim {
template <class T> struct sent { T value; uint number; };
template <class T> struct sent_with_fill { T value, fill; uint number; };
inline SHIM_PLAIN uint same(uint a, uint b) {
  if (a != b) shim_misuse("a lane argument that must be the same in all lanes differs", 0);
  return a;
}
inline SHIM_PLAIN uint existing(uint lane, uint lanes) {
  if (lane >= lanes) shim_misuse("a value is taken from a lane that does not exist", 0);
  return lane;
}
}  // namespace shim

namespace metal {
#define SHIM_SHUFFLE(name, from)                                                                   \
  template <class T> T name(T value, ushort number, uint line = __builtin_LINE()) {                \
    static_assert(shim::exchangeable<T>, #name " takes a number or a vector, not a bool");         \
    return shim::exchange<T>(shim::sent<T>{value, number}, #name, line,                            \
                             [](const shim::sent<T>* in, T* out, uint n) SHIM_PLAIN {              \
                               for (uint i = 0; i < n; i++) {                                      \
                                 const uint k = in[i].number, first = in[0].number;                \
                                 out[i] = in[from].value;                                          \
                                 (void)first;                                                      \
                               }                                                                   \
                             });                                                                   \
  }
SHIM_SHUFFLE(simd_shuffle, shim::existing(k, n))
SHIM_SHUFFLE(simd_shuffle_xor, shim::existing(i ^ shim::same(k, first), n))
SHIM_SHUFFLE(simd_broadcast, shim::existing(shim::same(k, first), n))
// Lanes past the end keep their own value.
SHIM_SHUFFLE(simd_shuffle_down, i + shim::same(k, first) < n ? i + k : i)
SHIM_SHUFFLE(simd_shuffle_up, i >= shim::same(k, first) ? i - k : i)
SHIM_SHUFFLE(simd_shuffle_rotate_down, (i + shim::same(k, first)) % n)
SHIM_SHUFFLE(simd_shuffle_rotate_up, (i + n - shim::same(k, first) % n) % n)
template <class T> T simd_broadcast_first(T value, uint line = __builtin_LINE()) { return simd_broadcast(value, 0, line); }

inline uint shim_ballot(bool value, const char* operation, uint line) {
  return shim::exchange<uint>(uint(value), operation, line, [](const uint* in, uint* out, uint n) SHIM_PLAIN {
    uint bits = 0;
    for (uint i = 0; i < n; i++) bits |= (in[i] & 1) << i;
    for (uint i = 0; i < n; i++) out[i] = bits;
  });
}
inline uint shim_lanes() {
  const uint left = shim_attribute(4).x * shim_attribute(4).y * shim_attribute(4).z - 32 * shim_attribute(10).x;
  return left < 32 ? (1u << left) - 1 : ~0u;
}
inline bool simd_any(bool value, uint line = __builtin_LINE()) { return shim_ballot(value, "simd_any", line) != 0; }
inline bool simd_all(bool value, uint line = __builtin_LINE()) { return shim_ballot(value, "simd_all", line) == shim_lanes(); }
inline bool simd_is_first() { return shim_attribute(8).x == 0; }
}  // namespace metal
