// Which of the ways to convolve a layer takes: by its shape alone, so that the same layer is always computed alike.
#pragma once
#include "conv_forward.h"
#include "conv_product.h"
#include "conv_sparse_backward.h"
#include "winograd.h"

namespace fedmoe {

// Examples whose outputs stay in the cache for whatever comes next.
inline int64_t examples_at_once(const Layer& a) { return std::max<int64_t>(1, (128 << 10) / (4 * a.out_size())); }

inline void add_bias_and_cut(const Layer& a, const float* bias, float* y) {
  for (int64_t p = 0; bias && p < a.ch * a.cw; p++)
    for (int64_t o = 0; o < a.oc; o++) y[p * a.oc + o] += bias[o];
  if (a.relu) for (int64_t i = 0; i < a.out_size(); i++) y[i] = y[i] <= 0 ? 0.f : y[i];
}

template <class Convolve, class Done>
void dense_conv_forward(const Layer& a, const Convolve& convolve, const float* bias, int64_t batch, const float* const* x,
                        float* out, int64_t out_stride, const Done& done) {
  std::vector<float*> y(batch);
  for (int64_t n = 0; n < batch; n++) y[n] = out + n * out_stride;
  for (int64_t n = 0; n < batch; n += examples_at_once(a)) {
    int64_t end = std::min(batch, n + examples_at_once(a));
    convolve(end - n, x + n, y.data() + n);
    for (int64_t k = n; k < end; k++) add_bias_and_cut(a, bias, y[k]);
    done(n, end);
  }
}

// `done(begin, end)` is told of examples as soon as their outputs are there.
template <class Done>
void conv_forward(const Layer& a, const float* weight, const float* bias, int64_t batch, const float* const* x, float* out,
                  int64_t out_stride, uint8_t* where, Scratch& scratch, const Done& done) {
  if (a.is_winograd())
    return dense_conv_forward(a, WinogradForward(a, weight, scratch), bias, batch, x, out, out_stride, done);
  if (a.is_dense_conv())
    return dense_conv_forward(a, ProductForward(a, weight, scratch), bias, batch, x, out, out_stride, done);
  direct_forward(a, weight, bias, batch, x, out, out_stride, where, scratch);
  done(0, batch);
}

inline void add_bias_gradient(const Layer& a, const float* dy, double* sums) {
  for (int64_t n = 0; n < a.oc; n += LANES) {
    int lanes = std::min<int64_t>(LANES, a.oc - n);
    vec total = {};
    for (int64_t p = 0; p < a.ch * a.cw; p++) total += load_first(dy + p * a.oc + n, lanes);
    for (int lane = 0; lane < lanes; lane++) sums[n + lane] += total[lane];
  }
}

// `gradient_of(begin, end)` gives where the gradients by the outputs of these examples are, dy_stride apart.
template <class Convolve, class Given>
void dense_conv_backward(const Layer& a, const Convolve& convolve, int64_t batch, const float* const* x,
                         const Given& gradient_of, int64_t dy_stride, float* d_weight, float* d_bias, float* dx,
                         int64_t dx_stride) {
  std::vector<double> sums(a.oc);  // many small terms: float would lose what PyTorch's pairwise sums keep
  std::vector<const float*> up(examples_at_once(a));
  std::vector<float*> down(examples_at_once(a));
  for (int64_t n = 0; n < batch; n += examples_at_once(a)) {
    int64_t count = std::min(batch - n, examples_at_once(a));
    const float* dy = gradient_of(n, n + count);
    for (int64_t k = 0; k < count; k++) {
      up[k] = dy + k * dy_stride, down[k] = dx + (n + k) * dx_stride;
      if (d_bias) add_bias_gradient(a, up[k], sums.data());
    }
    convolve(count, x + n, up.data(), dx ? down.data() : nullptr);
  }
  convolve.finish(d_weight);
  for (int64_t o = 0; d_bias && o < a.oc; o++) d_bias[o] = (float)sums[o];
}

// Gradients of weight and bias, and of the input where it is asked for, to which it is added if `add`.
template <class Given>
void conv_backward(const Layer& a, const float* weight, int64_t batch, const float* const* x, const Given& gradient_of,
                   int64_t dy_stride, const uint8_t* where, float* d_weight, float* d_bias, float* dx, int64_t dx_stride,
                   bool add, Scratch& scratch) {
  if (a.is_winograd())
    return dense_conv_backward(a, WinogradBackward(a, weight, dx, add, scratch), batch, x, gradient_of, dy_stride, d_weight,
                               d_bias, dx, dx_stride);
  if (a.is_dense_conv())
    return dense_conv_backward(a, ProductBackward(a, weight, dx, add, scratch), batch, x, gradient_of, dy_stride, d_weight,
                               d_bias, dx, dx_stride);
  sparse_backward(a, weight, batch, x, gradient_of(0, batch), dy_stride, where, d_weight, d_bias, dx, dx_stride, add,
                  scratch);
}

}  // namespace fedmoe
