// Vectors of floats as wide as the machine's registers, by the vector extensions of GCC and Clang: no intrinsics but
// for loading and storing the last, partly filled vector of a row.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fedmoe {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

template <int N> struct Lanes {
  typedef float type __attribute__((vector_size(4 * N)));
  typedef int32_t ints __attribute__((vector_size(4 * N)));
  typedef uint8_t bytes __attribute__((vector_size(N)));
};
typedef Lanes<LANES>::type vec;

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class V> inline V splat(float f) { return f - V{}; }
template <class V> inline V load(const float* p) {  // from any address
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> inline void store(float* p, V v) { memcpy(p, &v, sizeof v); }

inline vec load_first(const float* p, int n) {  // the rest is zero; reads nothing beyond
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif defined(__AVX2__)
  static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  return (vec)_mm256_maskload_ps(p, _mm256_loadu_si256((const __m256i*)(ones + 8 - n)));
#else
  vec v = {};
  memcpy(&v, p, 4 * n);
  return v;
#endif
}

inline void store_first(float* p, vec v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  memcpy(p, &v, 4 * n);
#endif
}

inline float sum(vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int lane = 0; lane < LANES; lane++) total += v[lane];
  return total;
#endif
}

inline float sum(const float* p, int64_t n) {
  vec total = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) total += load<vec>(p + i);
  if (i < n) total += load_first(p + i, n - i);
  return sum(total);
}

// A zero gradient may be skipped only where it would multiply finite numbers: 0 times infinity is NaN.
inline bool all_finite(const float* p, int64_t n) {
  vec odd = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) { vec v = load<vec>(p + i); odd += v - v; }
  float rest = sum(odd);
  for (; i < n; i++) rest += p[i] - p[i];
  return rest == 0;
}

}  // namespace fedmoe
