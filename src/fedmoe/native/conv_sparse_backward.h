// Gradients of a convolution with its ReLU and max pooling: a pooled output has its gradient at one pixel of its window, and
// ReLU cuts more, so both gradients visit only the pixels that survive.
#pragma once
#include <utility>
#include <vector>
#include "conv_forward.h"

namespace fedmoe {

// The pixels of the convolution's output that have a gradient, of one example and one channel.
struct Survivors {
  int64_t count;
  int32_t* at;   // offset in the (padded) image of the window that the pixel saw
  float* value;  // its gradient
};

inline void find_survivors(const Layer& a, int64_t o, const float* dy, const uint8_t* where, const int32_t* base,
                           const int32_t* offset, Survivors& s) {
  s.count = 0;
  for (int64_t p = 0; p < a.oh * a.ow; p++) {
    uint8_t u = where[p * a.oc + o];
    s.at[s.count] = base[p] + offset[u];
    s.value[s.count] = u == DEAD ? 0.f : dy[p * a.oc + o];
    s.count += u != DEAD;
  }
}

// The same with every pixel, zeros too: where they multiply what is not finite.
inline void find_all(const Layer& a, int64_t o, const float* dy, const uint8_t* where, Survivors& s) {
  int64_t row = a.padded_width() * a.c;
  s.count = a.ch * a.cw;
  for (int64_t p = 0; p < s.count; p++) {
    s.at[p] = (p / a.cw) * a.sh * row + (p % a.cw) * a.sw * a.c;
    s.value[p] = 0.f;
  }
  for (int64_t p = 0; p < a.oh * a.ow; p++) {
    int64_t u = where[p * a.oc + o];
    if (u == DEAD) continue;
    s.value[((p / a.ow) * a.rh + u / a.qw) * a.cw + (p % a.ow) * a.rw + u % a.qw] += dy[p * a.oc + o];
  }
}

// g[r][v] += sum over survivors of value * x[at + r * row + v * LANES]: sums stay in registers. Each example is summed by
// itself first: two short sums round less than a long one.
template <int R, int V> void add_weight_gradient(const Survivors& s, const float* x, int64_t row, float* g, int64_t g_row) {
  vec acc[R][V] = {};
  for (int64_t k = 0; k < s.count; k++) {
    vec value = splat<vec>(s.value[k]);
    const float* q = x + s.at[k];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] += value * load<vec>(q + r * row + v * LANES);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(g + r * g_row + v * LANES, load<vec>(g + r * g_row + v * LANES) + acc[r][v]);
}

// dx[at + r * row + v * LANES] += value * w[r][v]: the weights stay in registers.
template <int R, int V> void add_input_gradient(const Survivors& s, const float* w, int64_t w_row, int64_t row, float* dx) {
  vec weight[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) weight[r][v] = load<vec>(w + r * w_row + v * LANES);
  for (int64_t k = 0; k < s.count; k++) {
    vec value = splat<vec>(s.value[k]);
    float* q = dx + s.at[k];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(q + r * row + v * LANES, load<vec>(q + r * row + v * LANES) + value * weight[r][v]);
  }
}

// The same without lanes past the end of a row: a zero weight there times infinity would be NaN in a neighbour.
inline void add_input_gradient_exactly(const Survivors& s, const float* w, int64_t w_row, int64_t rows, int64_t run,
                                       int64_t row, float* dx) {
  for (int64_t k = 0; k < s.count; k++)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < run; t++) dx[s.at[k] + r * row + t] += s.value[k] * w[r * w_row + t];
}

// Both work on blocks of R rows and V vectors of the kernel, so that a block fits the registers.
template <int R, class Block> void over_vectors(int64_t vectors, const Block& block) {
  int64_t v = 0;
  for (; v + 2 <= vectors; v += 2) block(std::integral_constant<int, R>(), std::integral_constant<int, 2>(), v);
  if (v < vectors) block(std::integral_constant<int, R>(), std::integral_constant<int, 1>(), v);
}
template <class Block> void over_kernel(int64_t rows, int64_t vectors, const Block& block) {
  int64_t r = 0;
  auto at = [&](int64_t start) { return [&block, start](auto R, auto V, int64_t v) { block(R, V, start, v); }; };
  for (; r + 5 <= rows; r += 5) over_vectors<5>(vectors, at(r));
  for (; r + 3 <= rows; r += 3) over_vectors<3>(vectors, at(r));
  for (; r < rows; r++) over_vectors<1>(vectors, at(r));
}

inline void sparse_backward(const Layer& a, const float* weight, int64_t batch, const float* const* x, const float* dy,
                          int64_t dy_stride, const uint8_t* where, float* d_weight, float* d_bias, float* dx,
                          int64_t dx_stride, bool add, Scratch& scratch) {
  int64_t run = a.kw * a.c, vectors = round_up(run, LANES) / LANES, k_row = vectors * LANES, k_size = a.kh * k_row;
  int64_t row = a.padded_width() * a.c, pixels = a.ch * a.cw + a.oh * a.ow;
  float* w = scratch.floats(0, a.oc * k_size);  // (oc, kh, kw * c padded)
  float* g = scratch.floats(1, a.oc * k_size);
  float* border = scratch.floats(2, a.padded_size() + 2 * LANES);
  float* padded_dx = scratch.floats(3, a.padded_size() + 2 * LANES);
  float* value = scratch.floats(4, pixels + 1);
  int32_t* at = scratch.ints(0, pixels + 1);
  int32_t* base = scratch.ints(1, a.oh * a.ow);
  int32_t offset[256] = {};
  for (int64_t u = 0; u < a.qh * a.qw; u++) offset[u] = (u / a.qw) * a.sh * row + (u % a.qw) * a.sw * a.c;
  for (int64_t p = 0; p < a.oh * a.ow; p++)
    base[p] = (p / a.ow) * a.rh * a.sh * row + (p % a.ow) * a.rw * a.sw * a.c;
  memset(g, 0, a.oc * k_size * sizeof(float));
  memset(w, 0, a.oc * k_size * sizeof(float));
  bool weight_finite = true;
  if (dx) {
    weight_finite = all_finite(weight, a.oc * a.c * a.kh * a.kw);
    for (int64_t o = 0; o < a.oc; o++)
      for (int64_t c = 0; c < a.c; c++)
        for (int64_t i = 0; i < a.kh; i++)
          for (int64_t j = 0; j < a.kw; j++)
            w[o * k_size + i * k_row + j * a.c + c] = weight[((o * a.c + c) * a.kh + i) * a.kw + j];
  }
  std::vector<double> bias_sums(a.oc);  // many small terms: float would lose what PyTorch's pairwise sums keep
  for (int64_t n = 0; n < batch; n++) {
    const float* image = with_border(a, x[n], border);
    bool finite = weight_finite && all_finite(x[n], a.in_size());
    bool exact = !weight_finite || !all_finite(dy + n * dy_stride, a.out_size());
    if (dx) memset(padded_dx, 0, a.padded_size() * sizeof(float));
    for (int64_t o = 0; o < a.oc; o++) {
      Survivors s{0, at, value};
      if (finite) find_survivors(a, o, dy + n * dy_stride, where + n * a.out_size(), base, offset, s);
      else find_all(a, o, dy + n * dy_stride, where + n * a.out_size(), s);
      bias_sums[o] += sum(s.value, s.count);
      over_kernel(a.kh, vectors, [&](auto R, auto V, int64_t r, int64_t v) {
        add_weight_gradient<R, V>(s, image + r * row + v * LANES, row, g + o * k_size + r * k_row + v * LANES, k_row);
      });
      if (dx && exact) add_input_gradient_exactly(s, w + o * k_size, k_row, a.kh, run, row, padded_dx);
      else if (dx) over_kernel(a.kh, vectors, [&](auto R, auto V, int64_t r, int64_t v) {
        add_input_gradient<R, V>(s, w + o * k_size + r * k_row + v * LANES, k_row, row, padded_dx + r * row + v * LANES);
      });
    }
    if (dx) without_border(a, padded_dx, dx + n * dx_stride, add);
  }
  for (int64_t o = 0; d_bias && o < a.oc; o++) d_bias[o] = (float)bias_sums[o];
  for (int64_t o = 0; o < a.oc; o++)
    for (int64_t c = 0; c < a.c; c++)
      for (int64_t i = 0; i < a.kh; i++)
        for (int64_t j = 0; j < a.kw; j++)
          d_weight[((o * a.c + c) * a.kh + i) * a.kw + j] = g[o * k_size + i * k_row + j * a.c + c];
}

}  // namespace fedmoe
