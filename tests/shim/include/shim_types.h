// Qualifiers, scalars, vectors, limits, type traits.
#pragma once

#ifdef SHIM_SYNTAX
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define SHIM_SPACES(M) M(device) M(threadgroup)
#define SHIM_BODY(...) ;
#else
#define device
#define constant const
#define threadgroup
#define SHIM_SPACES(M) M(device)
#define SHIM_BODY(...) { __VA_ARGS__ }
#endif
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
#define SHIM_PLAIN __attribute__((no_sanitize("thread")))
// A function that takes and gives numbers in registers: the caller's variables need no address, so no checks either.
#define SHIM_APART __attribute__((noinline, no_sanitize("thread")))

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned int uint32_t, uint;
typedef long int64_t;
typedef unsigned long uint64_t, ulong;
typedef _Float16 half;

#ifdef SHIM_SYNTAX
typedef __bf16 bfloat;
#else
// As in Metal: to float without a word, from float only when asked (static_cast or a constructor).
// Rounds to nearest, ties to even; a NaN stays a NaN.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  constexpr explicit bfloat(float value) : bits(0) {
    const uint32_t u = __builtin_bit_cast(uint32_t, value);
    bits = value != value ? uint16_t((u >> 16) | 64) : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  template <class T> requires(__is_arithmetic(T) && !__is_same(T, float))
  constexpr explicit bfloat(T value) : bfloat(float(value)) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
#define SHIM_OPERATOR(op)                                                                                     \
  friend constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }            \
  template <class T> constexpr bfloat& operator op##=(T b) { return *this = bfloat(float(*this) op float(b)); }
  SHIM_OPERATOR(+) SHIM_OPERATOR(-) SHIM_OPERATOR(*) SHIM_OPERATOR(/)
#undef SHIM_OPERATOR
  friend constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }
};
#endif

namespace shim {
template <class T, int N> struct vector_of { using type = T __attribute__((ext_vector_type(N))); };
template <class T, int N> struct packed_of {
  typedef typename vector_of<T, N>::type type __attribute__((aligned(sizeof(T))));
};
#ifndef SHIM_SYNTAX
// A struct where the compiler has no vector: bfloat, and packed vectors of three.
template <class T, int N, int Alignment> struct alignas(Alignment) plain_vector {
  T items[N];
  constexpr T& operator[](int i) { return items[i]; }
  constexpr const T& operator[](int i) const { return items[i]; }
  operator typename vector_of<T, N>::type() const requires(!__is_same(T, bfloat)) {
    typename vector_of<T, N>::type v;
    for (int i = 0; i < N; i++) v[i] = items[i];
    return v;
  }
};
template <int Alignment> struct alignas(Alignment) plain_vector<bfloat, 4, Alignment> {
  bfloat x, y, z, w;
  bfloat& operator[](int i) { return (&x)[i]; }
  const bfloat& operator[](int i) const { return (&x)[i]; }
};
template <int Alignment> struct alignas(Alignment) plain_vector<bfloat, 2, Alignment> {
  bfloat x, y;
  bfloat& operator[](int i) { return (&x)[i]; }
  const bfloat& operator[](int i) const { return (&x)[i]; }
};
template <int N> struct vector_of<bfloat, N> { using type = plain_vector<bfloat, N, N == 2 ? 4 : 8>; };
template <int N> struct packed_of<bfloat, N> { using type = plain_vector<bfloat, N, 2>; };
template <class T> struct packed_of<T, 3> { using type = plain_vector<T, 3, alignof(T)>; };
template <> struct packed_of<bfloat, 3> { using type = plain_vector<bfloat, 3, 2>; };
#endif

template <class V> struct traits { static constexpr int size = 1; using element = V; };
template <class T, int N> struct traits<T __attribute__((ext_vector_type(N)))> { static constexpr int size = N; using element = T; };
#ifndef SHIM_SYNTAX
template <class T, int N, int A> struct traits<plain_vector<T, N, A>> { static constexpr int size = N; using element = T; };
#endif
template <class V> using element = typename traits<V>::element;
template <class V> concept vector = (traits<V>::size > 1);
template <class T> concept floating = __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat);

template <class V, class A> constexpr void put(V& v, int& at, A a) {
  if constexpr (traits<A>::size == 1) {
    v[at++] = static_cast<element<V>>(a);
  } else {
    for (int i = 0; i < traits<A>::size; i++) v[at++] = static_cast<element<V>>(static_cast<element<A>>(a[i]));
  }
}
// float4(x), float4(half4), float4(float2, float2): the source's constructor calls are rewritten to this.
template <class V, class... A> constexpr V make(A... a) {
  constexpr int given = (0 + ... + traits<A>::size);
  if constexpr (traits<V>::size == 1) {
    return V(a...);
  } else {
    static_assert(given == traits<V>::size || (sizeof...(A) == 1 && given == 1), "wrong number of elements for a vector");
    V v{};
    int at = 0;
    if constexpr (given == 1) {
      for (int i = 0; i < traits<V>::size; i++) (put(v, at, a), ...);
    } else {
      (put(v, at, a), ...);
    }
    return v;
  }
}
}  // namespace shim

namespace metal {
template <class T, int N> using vec = typename shim::vector_of<T, N>::type;
#define SHIM_VECTORS(T, N) typedef vec<T, N> T##N; typedef typename shim::packed_of<T, N>::type packed_##T##N;
#define SHIM_ALL(N)                                                                                           \
  SHIM_VECTORS(char, N) SHIM_VECTORS(uchar, N) SHIM_VECTORS(short, N) SHIM_VECTORS(ushort, N) SHIM_VECTORS(int, N) \
  SHIM_VECTORS(uint, N) SHIM_VECTORS(long, N) SHIM_VECTORS(ulong, N) SHIM_VECTORS(half, N) SHIM_VECTORS(float, N)  \
  SHIM_VECTORS(bfloat, N) typedef vec<bool, N> bool##N;
SHIM_ALL(2) SHIM_ALL(3) SHIM_ALL(4)

template <class To, class From> constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  return __builtin_bit_cast(To, from);
}

template <class T> struct numeric_limits;
#define SHIM_INTEGER(T, low, high)                                        \
  template <> struct numeric_limits<T> {                                  \
    static constexpr bool is_integer = true;                              \
    static constexpr T min() { return low; }                              \
    static constexpr T max() { return high; }                             \
    static constexpr T lowest() { return low; }                           \
  };
SHIM_INTEGER(bool, false, true)
SHIM_INTEGER(int8_t, -128, 127) SHIM_INTEGER(char, -128, 127) SHIM_INTEGER(uint8_t, 0, 255)
SHIM_INTEGER(int16_t, -32768, 32767) SHIM_INTEGER(uint16_t, 0, 65535)
SHIM_INTEGER(int32_t, -2147483647 - 1, 2147483647) SHIM_INTEGER(uint32_t, 0, 4294967295u)
SHIM_INTEGER(int64_t, -9223372036854775807l - 1, 9223372036854775807l) SHIM_INTEGER(uint64_t, 0, ~0ul)
#define SHIM_FLOAT(T, Bits, smallest, highest, infinite, nan, step)                              \
  template <> struct numeric_limits<T> {                                                         \
    static constexpr bool is_integer = false;                                                    \
    static constexpr T of(Bits bits) { return __builtin_bit_cast(T, bits); }                     \
    static constexpr T min() { return of(smallest); }                                            \
    static constexpr T max() { return of(highest); }                                             \
    static constexpr T lowest() { return of(Bits(highest | Bits(Bits(1) << (8 * sizeof(T) - 1)))); } \
    static constexpr T infinity() { return of(infinite); }                                       \
    static constexpr T quiet_NaN() { return of(nan); }                                           \
    static constexpr T epsilon() { return of(step); }                                            \
  };
SHIM_FLOAT(float, uint32_t, 0x00800000u, 0x7f7fffffu, 0x7f800000u, 0x7fc00000u, 0x34000000u)
SHIM_FLOAT(half, uint16_t, 0x0400, 0x7bff, 0x7c00, 0x7e00, 0x1400)
SHIM_FLOAT(bfloat, uint16_t, 0x0080, 0x7f7f, 0x7f80, 0x7fc0, 0x3c00)

template <class T, T v> struct integral_constant { static constexpr T value = v; using type = integral_constant; };
template <bool v> using bool_constant = integral_constant<bool, v>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <class A, class B> struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B> constexpr bool is_same_v = __is_same(A, B);
template <class A, class B> constexpr bool is_convertible_v = __is_convertible(A, B);
template <class T> constexpr bool is_integral_v = __is_integral(T);
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> constexpr bool is_floating_point_v = shim::floating<T>;
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <bool b, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool b, class A, class B> using conditional_t = typename conditional<b, A, B>::type;
template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define HUGE_VALH (metal::numeric_limits<half>::infinity())
#define MAXFLOAT 3.40282346638528859812e+38f
#define FLT_MAX MAXFLOAT
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#define HALF_MAX (metal::numeric_limits<half>::max())
#define MAXHALF HALF_MAX
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_SQRT2_F 1.41421356237309504880f
