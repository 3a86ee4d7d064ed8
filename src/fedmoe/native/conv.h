// Which of the ways to convolve a layer takes: by its shape alone, so that the same layer is always computed alike.
#pragma once
#include "conv_dense_backward.h"
#include "conv_forward.h"
#include "conv_sparse_backward.h"
#include "winograd.h"

namespace fedmoe {

inline void conv_forward(const Layer& a, const float* weight, const float* bias, int64_t batch, const float* const* x,
                         float* out, int64_t out_stride, uint8_t* where, Scratch& scratch) {
  if (a.is_winograd()) return winograd_forward(a, weight, bias, batch, x, out, out_stride, scratch);
  direct_forward(a, weight, bias, batch, x, out, out_stride, where, scratch);
}

// Gradients of weight and bias, and of the input where it is asked for, to which it is added if `add`.
inline void conv_backward(const Layer& a, const float* weight, int64_t batch, const float* const* x, const float* dy,
                          int64_t dy_stride, const uint8_t* where, float* d_weight, float* d_bias, float* dx,
                          int64_t dx_stride, bool add, Scratch& scratch) {
  if (!a.is_dense_conv())
    return sparse_backward(a, weight, batch, x, dy, dy_stride, where, d_weight, d_bias, dx, dx_stride, add, scratch);
  auto backward = a.is_winograd() ? winograd_backward : dense_conv_backward;
  backward(a, weight, batch, x, dy, dy_stride, d_weight, dx, dx_stride, add, scratch);
  if (!d_bias) return;
  std::vector<double> sums(a.oc);  // many small terms: float would lose what PyTorch's pairwise sums keep
  for (int64_t n = 0; n < batch; n++) add_bias_gradient(a, dy + n * dy_stride, sums.data());
  for (int64_t o = 0; o < a.oc; o++) d_bias[o] = (float)sums[o];
}

}  // namespace fedmoe
