// Layers without parameters, one example at a time: poolings, activations, changes of layout.
#pragma once
#include <cmath>
#include "layer.h"

namespace fedmoe {

inline void max_pool(const Layer& a, const float* x, float* y, uint8_t* places) {
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      for (int64_t c = 0; c < a.c; c++) {
        const float* window = x + (i * a.sh * a.w + j * a.sw) * a.c + c;
        float best = window[0];
        int64_t at = 0;
        for (int64_t u = 1; u < a.kh * a.kw; u++) {
          float v = window[((u / a.kw) * a.w + u % a.kw) * a.c];
          if (v > best || v != v) { best = v; at = u; }
        }
        y[(i * a.ow + j) * a.c + c] = best;
        places[(i * a.ow + j) * a.c + c] = (uint8_t)at;
      }
}

inline void average_pool(const Layer& a, const float* x, float* y) {
  float share = 1.f / (a.kh * a.kw);
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++) {
      float* out = y + (i * a.ow + j) * a.c;
      memset(out, 0, a.c * sizeof(float));
      for (int64_t u = 0; u < a.kh * a.kw; u++) {
        const float* pixel = x + ((i * a.sh + u / a.kw) * a.w + j * a.sw + u % a.kw) * a.c;
        for (int64_t c = 0; c < a.c; c++) out[c] += pixel[c];
      }
      for (int64_t c = 0; c < a.c; c++) out[c] *= share;
    }
}

// dx = what each pooled pixel got, at its maximum or spread over its window.
inline void pool_backward(const Layer& a, const uint8_t* places, const float* dy, float* dx) {
  memset(dx, 0, a.in_size() * sizeof(float));
  float share = 1.f / (a.kh * a.kw);
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      for (int64_t u = 0; u < a.kh * a.kw; u++) {
        int64_t pixel = (i * a.ow + j) * a.c;
        float* to = dx + ((i * a.sh + u / a.kw) * a.w + j * a.sw + u % a.kw) * a.c;
        if (a.kind == AVERAGE_POOL) for (int64_t c = 0; c < a.c; c++) to[c] += dy[pixel + c] * share;
        else for (int64_t c = 0; c < a.c; c++) to[c] += u == places[pixel + c] ? dy[pixel + c] : 0.f;
      }
}

// Every sh-th row and sw-th column, with ph channels of zeros in front and the others that the output has more behind.
inline void subsample(const Layer& a, const float* x, float* y) {
  memset(y, 0, a.out_size() * sizeof(float));
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      memcpy(y + (i * a.ow + j) * a.oc + a.ph, x + (i * a.sh * a.w + j * a.sw) * a.c, a.c * sizeof(float));
}

inline void subsample_backward(const Layer& a, const float* dy, float* dx) {
  memset(dx, 0, a.in_size() * sizeof(float));
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      memcpy(dx + (i * a.sh * a.w + j * a.sw) * a.c, dy + (i * a.ow + j) * a.oc + a.ph, a.c * sizeof(float));
}

inline void to_channels_first(const Layer& a, const float* x, float* y) {
  for (int64_t p = 0; p < a.h * a.w; p++)
    for (int64_t c = 0; c < a.c; c++) y[c * a.h * a.w + p] = x[p * a.c + c];
}

inline void from_channels_first(const Layer& a, const float* dy, float* dx) {
  for (int64_t p = 0; p < a.h * a.w; p++)
    for (int64_t c = 0; c < a.c; c++) dx[p * a.c + c] = dy[c * a.h * a.w + p];
}

inline float elementwise(int64_t kind, float x) {
  if (kind == SIGMOID) return 1.f / (1.f + std::exp(-x));
  if (kind == TANH) return std::tanh(x);
  return x <= 0 ? 0.f : x;
}
inline float elementwise_slope(int64_t kind, float y) {  // of the output
  if (kind == SIGMOID) return y * (1.f - y);
  if (kind == TANH) return 1.f - y * y;
  return y <= 0 ? 0.f : 1.f;
}

inline void elementwise_backward(const Layer& a, const float* y, const float* dy, float* dx) {
  if (a.kind == RELU) for (int64_t i = 0; i < a.out_size(); i++) dx[i] = y[i] <= 0 ? 0.f : dy[i];
  else for (int64_t i = 0; i < a.out_size(); i++) dx[i] = dy[i] * elementwise_slope(a.kind, y[i]);
}

inline void add(const Layer& a, const float* x, const float* more, float* y) {
  for (int64_t i = 0; i < a.out_size(); i++) y[i] = x[i] + more[i];
  if (a.relu) for (int64_t i = 0; i < a.out_size(); i++) y[i] = y[i] <= 0 ? 0.f : y[i];
}

// The gradient behind a ReLU becomes that before it.
inline void cut_by_relu(int64_t n, const float* y, float* dy) {
  for (int64_t i = 0; i < n; i++) dy[i] = y[i] <= 0 ? 0.f : dy[i];
}

}  // namespace fedmoe
