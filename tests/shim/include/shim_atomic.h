// Atomics, relaxed order only, as Metal has it. Between atomics there is no race; an atomic and a plain access can race.
#pragma once

extern "C" void shim_access(const void* address, uint bytes, uint alignment, uint write, uint is_atomic);

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T shim_value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;

}  // namespace metal
namespace shim {
template <class T, class F> __attribute__((noinline, no_sanitize("thread"))) T change(volatile void* at, T value, F f) {
  shim_access(const_cast<void*>(at), sizeof(T), sizeof(T), 1, 1);
  T* object = static_cast<T*>(const_cast<void*>(at));
  const T before = *object;
  *object = f(before, value);
  return before;
}
template <class T> __attribute__((noinline, no_sanitize("thread"))) T atomic_get(const volatile void* at) {
  shim_access(const_cast<const void*>(at), sizeof(T), sizeof(T), 0, 1);
  return *static_cast<const T*>(const_cast<const void*>(at));
}
template <class T> __attribute__((noinline, no_sanitize("thread"))) void atomic_set(volatile void* at, T value) {
  shim_access(const_cast<void*>(at), sizeof(T), sizeof(T), 2, 1);
  *static_cast<T*>(const_cast<void*>(at)) = value;
}
}  // namespace shim
namespace metal {
#define SHIM_FETCH(space, name, expression)                                                                    \
  template <class T, class M> T atomic_##name##_explicit(volatile space atomic<T>* at, M value, memory_order)  \
      SHIM_BODY(return shim::change<T>(at, T(value), [](T a, T b) SHIM_PLAIN { return T(expression); });)
#define SHIM_ATOMIC(space)                                                                                     \
  SHIM_FETCH(space, fetch_add, a + b) SHIM_FETCH(space, fetch_sub, a - b) SHIM_FETCH(space, fetch_or, a | b)   \
  SHIM_FETCH(space, fetch_and, a & b) SHIM_FETCH(space, fetch_xor, a ^ b)                                      \
  SHIM_FETCH(space, fetch_max, a < b ? b : a) SHIM_FETCH(space, fetch_min, b < a ? b : a)                      \
  SHIM_FETCH(space, exchange, b)                                                                               \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>* at, memory_order)                  \
      SHIM_BODY(return shim::atomic_get<T>(at);)                                                               \
  template <class T, class M> void atomic_store_explicit(volatile space atomic<T>* at, M value, memory_order)  \
      SHIM_BODY(shim::atomic_set<T>(at, T(value));)
SHIM_SPACES(SHIM_ATOMIC)
}  // namespace metal
