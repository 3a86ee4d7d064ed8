// Dense layers in PyTorch's layout: weight (out, in), a row of `in` floats per output.
#pragma once
#include <cstring>
#include "vectors.h"

namespace fedmoe {

// One block of O outputs against B examples: their dot products over the inputs stay in registers.
template <int O, int B>
inline void dot_block(const float* weight, const float* bias, int64_t in, const float* const* x, float* y,
                      int64_t y_stride) {
  vec acc[O][B] = {};
  int64_t i = 0;
  for (; i + LANES <= in; i += LANES) {
    vec w[O];
    for (int o = 0; o < O; o++) w[o] = load<vec>(weight + o * in + i);
    for (int b = 0; b < B; b++) {
      vec v = load<vec>(x[b] + i);
      for (int o = 0; o < O; o++) acc[o][b] += w[o] * v;
    }
  }
  if (int rest = in - i) {
    vec w[O];
    for (int o = 0; o < O; o++) w[o] = load_first(weight + o * in + i, rest);
    for (int b = 0; b < B; b++) {
      vec v = load_first(x[b] + i, rest);
      for (int o = 0; o < O; o++) acc[o][b] += w[o] * v;
    }
  }
  for (int b = 0; b < B; b++)
    for (int o = 0; o < O; o++) y[b * y_stride + o] = sum(acc[o][b]) + (bias ? bias[o] : 0.f);
}

template <int O>
inline void dot_rows(const float* weight, const float* bias, int64_t in, int64_t batch, const float* const* x, float* y,
                     int64_t y_stride) {
  int64_t b = 0;
  for (; b + 5 <= batch; b += 5) dot_block<O, 5>(weight, bias, in, x + b, y + b * y_stride, y_stride);
  for (; b + 2 <= batch; b += 2) dot_block<O, 2>(weight, bias, in, x + b, y + b * y_stride, y_stride);
  for (; b < batch; b++) dot_block<O, 1>(weight, bias, in, x + b, y + b * y_stride, y_stride);
}

inline void dense_forward(const float* weight, const float* bias, int64_t in, int64_t out, int64_t batch,
                          const float* const* x, float* y, int64_t y_stride) {
  constexpr int WIDE = LANES == 16 ? 4 : 2;
  int64_t o = 0;
  for (; o + WIDE <= out; o += WIDE) dot_rows<WIDE>(weight + o * in, bias ? bias + o : bias, in, batch, x, y + o, y_stride);
  for (; o < out; o++) dot_rows<1>(weight + o * in, bias ? bias + o : bias, in, batch, x, y + o, y_stride);
}

// acc_r = sum over n of coefficient[n * step + r * across] * rows[n][0..), the core of both gradients; ADD: to what
// result holds.
template <int R, bool PARTIAL, bool ADD>
inline void combine(const float* coefficient, int64_t step, int64_t across, int64_t n, const float* const* rows,
                    int64_t row_offset, float* const* result, int rest) {
  vec acc[R] = {};
  for (int r = 0; ADD && r < R; r++)
    acc[r] = PARTIAL ? load_first(result[r] + row_offset, rest) : load<vec>(result[r] + row_offset);
  for (int64_t k = 0; k < n; k++) {
    vec v = PARTIAL ? load_first(rows[k] + row_offset, rest) : load<vec>(rows[k] + row_offset);
    for (int r = 0; r < R; r++) acc[r] += splat<vec>(coefficient[k * step + r * across]) * v;
  }
  for (int r = 0; r < R; r++) {
    if (PARTIAL) store_first(result[r] + row_offset, acc[r], rest);
    else store(result[r] + row_offset, acc[r]);
  }
}

template <int R, bool ADD>
inline void combine_rows(const float* coefficient, int64_t step, int64_t across, int64_t n, const float* const* rows,
                         int64_t width, float* const* result) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) combine<R, false, ADD>(coefficient, step, across, n, rows, i, result, 0);
  if (i < width) combine<R, true, ADD>(coefficient, step, across, n, rows, i, result, width - i);
}

// result[r] = sum_n coefficient[n * step + r * across] * rows[n], for r < count; or += that.
template <bool ADD = false>
inline void combine_all(const float* coefficient, int64_t step, int64_t across, int64_t n, const float* const* rows,
                        int64_t width, float* const* result, int64_t count) {
  int64_t r = 0;
  for (; r + 8 <= count; r += 8) combine_rows<8, ADD>(coefficient + r * across, step, across, n, rows, width, result + r);
  for (; r + 4 <= count; r += 4) combine_rows<4, ADD>(coefficient + r * across, step, across, n, rows, width, result + r);
  for (; r + 2 <= count; r += 2) combine_rows<2, ADD>(coefficient + r * across, step, across, n, rows, width, result + r);
  for (; r < count; r++) combine_rows<1, ADD>(coefficient + r * across, step, across, n, rows, width, result + r);
}

// dy (batch, dy_stride) -> gradients of weight and bias, and dx (batch, dx_stride) where it is asked for. `factored`:
// d_weight is (batch, in + out) instead, each example's input and then its dy.
inline void dense_backward(const float* weight, int64_t in, int64_t out, int64_t batch, const float* const* x,
                           const float* dy, int64_t dy_stride, float* d_weight, float* d_bias, float* dx,
                           int64_t dx_stride, const float** rows, float** results, bool factored = false) {
  for (int64_t b = 0; factored && b < batch; b++) {
    memcpy(d_weight + b * (in + out), x[b], in * sizeof(float));
    memcpy(d_weight + b * (in + out) + in, dy + b * dy_stride, out * sizeof(float));
  }
  for (int64_t o = 0; !factored && o < out; o++) results[o] = d_weight + o * in;
  if (!factored) combine_all(dy, dy_stride, 1, batch, x, in, results, out);
  if (d_bias && !factored)
    for (int64_t o = 0; o < out; o++) {
      float total = 0;
      for (int64_t b = 0; b < batch; b++) total += dy[b * dy_stride + o];
      d_bias[o] = total;
    }
  if (!dx) return;
  for (int64_t o = 0; o < out; o++) rows[o] = weight + o * in;
  for (int64_t b = 0; b < batch; b++) results[b] = dx + b * dx_stride;
  combine_all(dy, 1, dy_stride, out, rows, in, results, batch);
}

}  // namespace fedmoe
