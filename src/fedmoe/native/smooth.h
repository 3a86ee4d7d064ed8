// Sigmoid and hyperbolic tangent of whole vectors, each within 3 units in the last place of the exact value.
//
// Beyond 87 (sigmoid) and 20 (tanh) in absolute value the argument is cut: what is left is far below a rounding of 1. NaN
// stays NaN.
#pragma once
#include "vectors.h"

namespace fedmoe {

// exp(x) = 2^n (1 + q) with 2^n in `scale`: the polynomial of Cephes' expf on |x - n log 2| <= log(2) / 2.
template <class V> inline V exp_parts(V x, V& scale) {
  typedef uint32_t Bits __attribute__((vector_size(sizeof(V))));
  const V round = splat<V>(12582912.f);  // 1.5 * 2^23: adding it leaves a whole number in the lowest bits
  V shifted = x * splat<V>(1.44269504088896341f) + round, n = shifted - round;
  V r = x - n * splat<V>(0.693359375f) - n * splat<V>(-2.12194440e-4f);
  V p = splat<V>(1.9875691500e-4f);
  p = p * r + splat<V>(1.3981999507e-3f);
  p = p * r + splat<V>(8.3334519073e-3f);
  p = p * r + splat<V>(4.1665795894e-2f);
  p = p * r + splat<V>(1.6666665459e-1f);
  p = p * r + splat<V>(5.0000001201e-1f);
  scale = (V)(((Bits)shifted << 23) + 0x3f800000u);
  return p * (r * r) + r;
}

template <class V> inline V cut(V x, float most) {
  V high = splat<V>(most), low = splat<V>(-most);
  x = x > high ? high : x;
  return x < low ? low : x;
}

template <class V> inline V sigmoid(V x) {
  V scale, q = exp_parts(cut(-x, 87.f), scale), one = splat<V>(1.f);
  return one / (one + (scale + scale * q));
}

template <class V> inline V hyperbolic_tangent(V x) {
  V scale, q = exp_parts(cut(x + x, 40.f), scale);
  V less_one = scale * q + (scale - splat<V>(1.f));  // exp(2x) - 1, exact for small x too
  return less_one / (less_one + splat<V>(2.f));
}

}  // namespace fedmoe
