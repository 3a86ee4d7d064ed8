// Small matrix products that stay in registers, of panels: (columns / LANES, rows, LANES), where `block` is the room for
// rows. So a row is a constant away from the next, and a broadcast needs no address of its own.
#pragma once
#include "vectors.h"

namespace fedmoe {

// Which example, row and column the next of a batch's pixels or tiles has: divisions cost as much as the work on one.
struct Cursor {
  int64_t down, across, n, i, j;
  Cursor(int64_t down, int64_t across, int64_t at)
      : down(down), across(across), n(at / (down * across)), i(at / across % down), j(at % across) {}
  void advance() {
    if (++j < across) return;
    j = 0;
    if (++i == down) i = 0, n++;
  }
};

// m (T rows, NV vectors of o) = v (T, c) u (c, o).
template <int T, int NV>
inline void panel_product(int64_t block, const float* v, int64_t c, const float* u, int64_t o, float* m) {
  vec acc[T][NV] = {};
  for (int64_t k = 0; k < c; k += LANES, v += block * LANES)
    for (int64_t lane = 0; lane < LANES; lane++, u += o) {
      vec weight[NV];
      for (int n = 0; n < NV; n++) weight[n] = load<vec>(u + n * LANES);
      for (int t = 0; t < T; t++) {
        vec value = splat<vec>(v[t * LANES + lane]);
        for (int n = 0; n < NV; n++) acc[t][n] += value * weight[n];
      }
    }
  for (int n = 0; n < NV; n++)
    for (int t = 0; t < T; t++) store(m + (n * block + t) * LANES, acc[t][n]);
}

inline void panel_products(int64_t count, int64_t block, const float* v, int64_t c, const float* u, int64_t o, float* m) {
  constexpr int WIDE = LANES == 16 ? 8 : 4;
  int64_t n = 0;
  for (; n + 2 * LANES <= o; n += 2 * LANES)
    for (int64_t t = 0; t < count; t += WIDE)
      panel_product<WIDE, 2>(block, v + t * LANES, c, u + n, o, m + n * block + t * LANES);
  if (n < o)
    for (int64_t t = 0; t < count; t += 2 * WIDE)
      panel_product<2 * WIDE, 1>(block, v + t * LANES, c, u + n, o, m + n * block + t * LANES);
}

// g (C rows, NV vectors of o) += v^T d over the rows of both. They are summed by themselves first: two short sums round
// less than a long one.
template <int C, int NV>
inline void panel_outer(int64_t count, int64_t block, const float* v, const float* d, int64_t o, float* g) {
  vec acc[C][NV] = {};
  for (int64_t t = 0; t < count; t++) {
    vec weight[NV];
    for (int n = 0; n < NV; n++) weight[n] = load<vec>(d + (n * block + t) * LANES);
    for (int k = 0; k < C; k++) {
      vec value = splat<vec>(v[t * LANES + k]);
      for (int n = 0; n < NV; n++) acc[k][n] += value * weight[n];
    }
  }
  for (int k = 0; k < C; k++)
    for (int n = 0; n < NV; n++) {
      float* to = g + k * o + n * LANES;
      store(to, load<vec>(to) + acc[k][n]);
    }
}

inline void panel_outers(int64_t count, int64_t block, const float* v, int64_t c, const float* d, int64_t o, float* g) {
  constexpr int WIDE = LANES == 16 ? 8 : 4;
  int64_t pairs = o / (2 * LANES) * 2 * LANES;  // and one vector more, or none
  for (int64_t k = 0; k < c; k += WIDE)
    for (int64_t n = 0; n < pairs; n += 2 * LANES)
      panel_outer<WIDE, 2>(count, block, v + k / LANES * LANES * block + k % LANES, d + n * block, o, g + k * o + n);
  for (int64_t k = 0; pairs < o && k < c; k += LANES)
    panel_outer<LANES, 1>(count, block, v + k * block, d + pairs * block, o, g + k * o + pairs);
}

}  // namespace fedmoe
