// Functions of numbers. float is computed by the C library, half and bfloat in float and rounded once, so the last
// bits differ from a GPU's; fast:: and precise:: are the same here. Overloads are as in Metal: min(1, 2u) or exp(3)
// does not compile here either.
#pragma once

namespace metal {
namespace functions {
#define SHIM_UNARY(name, expression)                                                               \
  inline float name(float x) { return expression; }                                                \
  inline half name(half h) { const float x = float(h); return half(expression); }                  \
  inline bfloat name(bfloat b) { const float x = float(b); return bfloat(expression); }            \
  template <class V> requires(shim::vector<V> && shim::floating<shim::element<V>>) V name(V v) {   \
    for (int i = 0; i < shim::traits<V>::size; i++) v[i] = name(shim::element<V>(v[i]));           \
    return v;                                                                                      \
  }
#define SHIM_BINARY(name, expression)                                                              \
  inline float name(float x, float y) { return expression; }                                       \
  inline half name(half a, half b) { const float x = float(a), y = float(b); return half(expression); }          \
  inline bfloat name(bfloat a, bfloat b) { const float x = float(a), y = float(b); return bfloat(expression); }  \
  template <class V> requires(shim::vector<V> && shim::floating<shim::element<V>>) V name(V a, V b) {            \
    for (int i = 0; i < shim::traits<V>::size; i++) a[i] = name(shim::element<V>(a[i]), shim::element<V>(b[i])); \
    return a;                                                                                      \
  }
#define SHIM_C(name) SHIM_UNARY(name, __builtin_##name##f(x))
SHIM_C(exp) SHIM_C(exp2) SHIM_C(log) SHIM_C(log2) SHIM_C(log10) SHIM_C(sin) SHIM_C(cos) SHIM_C(tan) SHIM_C(asin)
SHIM_C(acos) SHIM_C(atan) SHIM_C(sinh) SHIM_C(cosh) SHIM_C(tanh) SHIM_C(sqrt) SHIM_C(floor) SHIM_C(ceil) SHIM_C(trunc)
SHIM_C(round) SHIM_C(rint) SHIM_C(fabs)
SHIM_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))
SHIM_UNARY(exp10, __builtin_powf(10.0f, x))
SHIM_UNARY(fract, x - __builtin_floorf(x))
SHIM_UNARY(saturate, x < 0 ? 0.0f : x > 1 ? 1.0f : x == x ? x : 0.0f)
SHIM_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x == x ? x : 0.0f)
SHIM_BINARY(pow, __builtin_powf(x, y))
SHIM_BINARY(powr, __builtin_powf(x, y))
SHIM_BINARY(fmin, __builtin_fminf(x, y))
SHIM_BINARY(fmax, __builtin_fmaxf(x, y))
SHIM_BINARY(fmod, __builtin_fmodf(x, y))
SHIM_BINARY(atan2, __builtin_atan2f(x, y))
SHIM_BINARY(copysign, __builtin_copysignf(x, y))
SHIM_BINARY(divide, x / y)
SHIM_BINARY(step, y < x ? 0.0f : 1.0f)

template <class T> requires(shim::floating<T>) T fma(T a, T b, T c) { return T(__builtin_fmaf(float(a), float(b), float(c))); }
template <class T> requires(__is_integral(T)) T abs(T x) { return x < 0 ? T(-x) : x; }
template <class T> requires(shim::floating<shim::element<T>>) T abs(T x) { return fabs(x); }

// A NaN loses against a number, as with fmin and fmax.
template <class T> requires(!shim::vector<T>) T min(T a, T b) {
  if constexpr (shim::floating<T>) return fmin(a, b); else return b < a ? b : a;
}
template <class T> requires(!shim::vector<T>) T max(T a, T b) {
  if constexpr (shim::floating<T>) return fmax(a, b); else return a < b ? b : a;
}
template <class T> requires(!shim::vector<T>) T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> requires(shim::floating<T>) T mix(T a, T b, T t) { return T(a + (b - a) * t); }
template <shim::vector V> V min(V a, V b) {
  for (int i = 0; i < shim::traits<V>::size; i++) a[i] = min(shim::element<V>(a[i]), shim::element<V>(b[i]));
  return a;
}
template <shim::vector V> V max(V a, V b) {
  for (int i = 0; i < shim::traits<V>::size; i++) a[i] = max(shim::element<V>(a[i]), shim::element<V>(b[i]));
  return a;
}
template <shim::vector V> V clamp(V x, V low, V high) { return min(max(x, low), high); }
template <shim::vector V> V fma(V a, V b, V c) {
  for (int i = 0; i < shim::traits<V>::size; i++)
    a[i] = fma(shim::element<V>(a[i]), shim::element<V>(b[i]), shim::element<V>(c[i]));
  return a;
}
template <shim::vector V> V clamp(V x, shim::element<V> low, shim::element<V> high) {
  return clamp(x, shim::make<V>(low), shim::make<V>(high));
}
template <shim::vector V> shim::element<V> dot(V a, V b) {
  shim::element<V> sum = shim::element<V>(a[0] * b[0]);
  for (int i = 1; i < shim::traits<V>::size; i++) sum = shim::element<V>(sum + a[i] * b[i]);
  return sum;
}
template <shim::vector V> shim::element<V> length(V a) { return sqrt(dot(a, a)); }
}  // namespace functions
using namespace functions;
namespace fast { using namespace functions; }
namespace precise { using namespace functions; }

// select(no, yes, condition)
template <class T> requires(!shim::vector<T>) T select(T no, T yes, bool condition) { return condition ? yes : no; }
template <shim::vector V, shim::vector C> V select(V no, V yes, C condition) {
  for (int i = 0; i < shim::traits<V>::size; i++) no[i] = condition[i] ? yes[i] : no[i];
  return no;
}
template <shim::vector V> bool all(V v) { bool r = true; for (int i = 0; i < shim::traits<V>::size; i++) r &= v[i] != 0; return r; }
template <shim::vector V> bool any(V v) { bool r = false; for (int i = 0; i < shim::traits<V>::size; i++) r |= v[i] != 0; return r; }
template <class T> requires(shim::floating<T>) bool isnan(T x) { return __builtin_isnan(float(x)); }
template <class T> requires(shim::floating<T>) bool isinf(T x) { return __builtin_isinf(float(x)); }
template <class T> requires(shim::floating<T>) bool isfinite(T x) { return __builtin_isfinite(float(x)); }
template <class T> requires(__is_integral(T)) T popcount(T x) {
  return T(__builtin_popcountl(ulong(x) & (~0ul >> (64 - 8 * sizeof(T)))));
}
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
inline int mulhi(int a, int b) { return int((long(a) * b) >> 32); }
inline uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
template <class T> requires(__is_integral(T)) T extract_bits(T x, uint offset, uint bits) {
  const uint width = 8 * sizeof(T);
  return bits == 0 ? T(0) : T(T(x << (width - offset - bits)) >> (width - bits));
}
}  // namespace metal
