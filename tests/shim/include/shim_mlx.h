// The part of what MLX puts before every custom kernel (its kernels/utils.h) that a kernel here may use. MLX's file
// itself needs methods overloaded by address space, which C++ does not have; tests compare the two for Limits.
#pragma once
#include <metal_stdlib>

using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;

// Literals such as 0.5h.
constexpr half operator""h(long double value) { return half(float(value)); }
constexpr half operator""H(long double value) { return half(float(value)); }
constexpr bfloat operator""bf(long double value) { return bfloat(float(value)); }

template <class T> struct Limits {
  static constexpr T max = numeric_limits<T>::max(), min = numeric_limits<T>::min();
  static constexpr T finite_max = max, finite_min = min;
};
template <class T> requires(shim::floating<T>) struct Limits<T> {
  static constexpr T max = numeric_limits<T>::infinity();
  static constexpr T min = T(-float(numeric_limits<T>::infinity()));
  static constexpr T finite_max = numeric_limits<T>::max(), finite_min = numeric_limits<T>::lowest();
};

template <class T, class U> inline T ceildiv(T n, U m) { return (n + m - 1) / m; }

template <class I = int64_t> METAL_FUNC I elem_to_loc(I index, constant int* shape, constant int64_t* strides, int dimensions) {
  I location = 0;
  for (int d = dimensions - 1; d >= 0 && index > 0; d--) {
    location += (index % shape[d]) * I(strides[d]);
    index /= shape[d];
  }
  return location;
}
