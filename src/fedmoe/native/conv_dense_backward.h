// Gradients of a convolution that is not pooled: nearly every pixel has one, so both are matrix products over all pixels.
#pragma once
#include <utility>
#include <vector>
#include "conv_forward.h"

namespace fedmoe {

constexpr int MOST_ROWS = LANES == 16 ? 12 : 6;  // of a block in registers, beside two vectors

// g[r][n] += sum over pixels of x[pixel + r] * dy[pixel][n], for R floats of a kernel's row and NV vectors of channels; the
// last of these has `rest` lanes. Each example is summed by itself first: two short sums round less than a long one.
template <int R, int NV>
void dense_weight_block(const Layer& a, const float* x, const float* dy, float* g, int64_t channels, int rest) {
  int64_t row = a.padded_width() * a.c, step = a.sw * a.c;
  vec acc[R][NV] = {};
  for (int64_t i = 0; i < a.ch; i++)
    for (int64_t j = 0; j < a.cw; j++) {
      const float *q = x + i * a.sh * row + j * step, *d = dy + (i * a.cw + j) * a.oc;
      vec up[NV];
      for (int n = 0; n + 1 < NV; n++) up[n] = load<vec>(d + n * LANES);
      up[NV - 1] = load_first(d + (NV - 1) * LANES, rest);
      for (int r = 0; r < R; r++) {
        vec value = splat<vec>(q[r]);
        for (int n = 0; n < NV; n++) acc[r][n] += value * up[n];
      }
    }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < NV; n++) {
      float* to = g + r * channels + n * LANES;
      store(to, load<vec>(to) + acc[r][n]);
    }
}

typedef void (*WeightBlock)(const Layer&, const float*, const float*, float*, int64_t, int);

template <int NV, int... R> WeightBlock weight_block_of(int rows, std::integer_sequence<int, R...>) {
  static const WeightBlock blocks[] = {dense_weight_block<R + 1, NV>...};
  return blocks[rows - 1];
}

// g (kh, kw * c, channels) += the gradient by the weights of one example; x with its border.
inline void dense_weight_gradient(const Layer& a, const float* x, const float* dy, float* g) {
  int64_t row = a.padded_width() * a.c, run = a.kw * a.c, channels = a.padded_channels();
  int64_t blocks = (run + MOST_ROWS - 1) / MOST_ROWS, width = (run + blocks - 1) / blocks;
  auto sizes = std::make_integer_sequence<int, MOST_ROWS>();
  for (int64_t n = 0; n < channels; n += 2 * LANES)
    for (int64_t i = 0; i < a.kh; i++)
      for (int64_t t = 0; t < run; t += width) {
        int rows = std::min(width, run - t);
        bool two = n + LANES < channels;
        int rest = std::min<int64_t>(LANES, a.oc - n - (two ? LANES : 0));
        WeightBlock block = two ? weight_block_of<2>(rows, sizes) : weight_block_of<1>(rows, sizes);
        block(a, x + i * row + t, dy + n, g + (i * run + t) * channels + n, channels, rest);
      }
}

// dx[pixel + lanes] += sum over outputs of dy[pixel][o] * w[o], for U pixels of a row and NV vectors of a kernel's row; the
// last of these has `rest` lanes: a zero weight past the end, times infinity, would be NaN in a neighbour.
template <int U, int NV>
void dense_input_block(const Layer& a, const float* dy, const float* w, int64_t w_step, float* dx, int rest) {
  vec acc[U][NV] = {};
  for (int64_t o = 0; o < a.oc; o++) {
    vec weight[NV];
    for (int n = 0; n < NV; n++) weight[n] = load<vec>(w + o * w_step + n * LANES);
    for (int u = 0; u < U; u++) {
      vec value = splat<vec>(dy[u * a.oc + o]);
      for (int n = 0; n < NV; n++) acc[u][n] += value * weight[n];
    }
  }
  for (int u = 0; u < U; u++)
    for (int n = 0; n < NV; n++) {
      float* to = dx + u * a.sw * a.c + n * LANES;
      if (n + 1 < NV) store(to, load<vec>(to) + acc[u][n]);
      else store_first(to, load_first(to, rest) + acc[u][n], rest);
    }
}

typedef void (*InputBlock)(const Layer&, const float*, const float*, int64_t, float*, int);

template <int NV, int... U> InputBlock input_block_of(int pixels, std::integer_sequence<int, U...>) {
  static const InputBlock blocks[] = {dense_input_block<U + 1, NV>...};
  return blocks[pixels - 1];
}

// dx, with its border, += the gradient by the input of one example; w (oc, kh, k_row).
inline void dense_input_gradient(const Layer& a, const float* dy, const float* w, int64_t k_row, float* dx) {
  int64_t row = a.padded_width() * a.c, run = a.kw * a.c;
  int64_t blocks = (a.cw + MOST_ROWS - 1) / MOST_ROWS, width = (a.cw + blocks - 1) / blocks;
  auto sizes = std::make_integer_sequence<int, MOST_ROWS>();
  for (int64_t r = 0; r < a.kh; r++)
    for (int64_t v = 0; v < k_row; v += 2 * LANES) {
      bool two = v + LANES < k_row;
      int rest = std::min<int64_t>(LANES, run - v - (two ? LANES : 0));
      for (int64_t i = 0; i < a.ch; i++)
        for (int64_t j = 0; j < a.cw; j += width) {
          int pixels = std::min(width, a.cw - j);
          InputBlock block = two ? input_block_of<2>(pixels, sizes) : input_block_of<1>(pixels, sizes);
          block(a, dy + (i * a.cw + j) * a.oc, w + r * k_row + v, a.kh * k_row,
                dx + (i * a.sh + r) * row + j * a.sw * a.c + v, rest);
        }
    }
}

inline void add_bias_gradient(const Layer& a, const float* dy, double* sums) {
  for (int64_t n = 0; n < a.oc; n += LANES) {
    int lanes = std::min<int64_t>(LANES, a.oc - n);
    vec total = {};
    for (int64_t p = 0; p < a.ch * a.cw; p++) total += load_first(dy + p * a.oc + n, lanes);
    for (int lane = 0; lane < lanes; lane++) sums[n + lane] += total[lane];
  }
}

inline void dense_conv_backward(const Layer& a, const float* weight, int64_t batch, const float* const* x, const float* dy,
                                int64_t dy_stride, float* d_weight, float* dx, int64_t dx_stride, bool add,
                                Scratch& scratch) {
  int64_t run = a.kw * a.c, channels = a.padded_channels(), k_row = round_up(run, LANES);
  float* g = scratch.floats(1, a.kh * run * channels);
  float* w = scratch.floats(0, a.oc * a.kh * k_row);
  float* border = scratch.floats(2, a.padded_size() + LANES);
  float* padded_dx = scratch.floats(3, a.padded_size() + LANES);
  memset(g, 0, a.kh * run * channels * sizeof(float));
  memset(w, 0, a.oc * a.kh * k_row * sizeof(float));
  for (int64_t o = 0; dx && o < a.oc; o++)
    for (int64_t c = 0; c < a.c; c++)
      for (int64_t i = 0; i < a.kh; i++)
        for (int64_t j = 0; j < a.kw; j++)
          w[(o * a.kh + i) * k_row + j * a.c + c] = weight[((o * a.c + c) * a.kh + i) * a.kw + j];
  for (int64_t n = 0; n < batch; n++) {
    dense_weight_gradient(a, with_border(a, x[n], border), dy + n * dy_stride, g);
    if (!dx) continue;
    memset(padded_dx, 0, a.padded_size() * sizeof(float));
    dense_input_gradient(a, dy + n * dy_stride, w, k_row, padded_dx);
    without_border(a, padded_dx, dx + n * dx_stride, add);
  }
  for (int64_t o = 0; o < a.oc; o++)
    for (int64_t c = 0; c < a.c; c++)
      for (int64_t i = 0; i < a.kh; i++)
        for (int64_t j = 0; j < a.kw; j++)
          d_weight[((o * a.c + c) * a.kh + i) * a.kw + j] = g[(i * run + j * a.c + c) * channels + o];
}

}  // namespace fedmoe
