// A chain of layers on one batch of one client: forward and backward.
//
// Inputs of images are (height, width, channels); parameters and their gradients are in PyTorch's layout.
#pragma once
#include <algorithm>
#include <cmath>
#include "conv.h"
#include "dense.h"
#include "layer.h"

namespace fedmoe {

// The outputs of all layers for one batch, and where maxima were: what the backward pass needs.
struct Tape {
  float* memory;
  int64_t batch;

  static int64_t size(const Layer* layers, int64_t count, int64_t batch) {  // in floats
    int64_t total = 0;
    for (int64_t l = 0; l < count; l++) total += of_layer(layers[l], batch);
    return total;
  }
  static int64_t of_layer(const Layer& a, int64_t batch) {
    if (!a.remembers_places()) return batch * a.out_stride();
    return batch * a.out_stride() + round_up(batch * a.out_size(), 4) / 4 + 4;  // and a vector of bytes more
  }
  float* output(const Layer* layers, int64_t l) const { return memory + size(layers, l, batch); }
  uint8_t* places(const Layer* layers, int64_t l) const {
    return (uint8_t*)(output(layers, l) + batch * layers[l].out_stride());
  }
};

// What else is known of the gradient by the features, the input of the last layer: `share` times d (batch, their stride).
struct FeatureGradient {
  const float* d = nullptr;
  float share = 0;
};

struct Chain {
  const Layer* layers;
  int64_t count;
  Scratch* scratch;
  bool factored = false;  // gradients of dense weights as factors: see dense_backward

  void forward(const float* const* params, const float* const* x, const Tape& tape) const {
    std::vector<const float*> in(x, x + tape.batch);
    for (int64_t l = 0; l < count; l++) {
      const Layer& a = layers[l];
      float* y = tape.output(layers, l);
      forward_layer(a, params, tape.batch, in.data(), y, tape.places(layers, l));
      for (int64_t b = 0; b < tape.batch; b++) in[b] = y + b * a.out_stride();
    }
  }

  // dy of the last layer is (batch, its out_stride) and is overwritten; dx (batch, in_size) may be null. Layers before
  // `lowest`, which is 0 where dx is asked for, are left out: none of their parameters is trained.
  void backward(const float* const* params, float* const* grads, const float* const* x, const Tape& tape, float* dy,
                float* dx, int64_t lowest = 0, const FeatureGradient& more = {}) const {
    int64_t widest = 0;
    for (int64_t l = 0; l < count; l++) widest = std::max(widest, layers[l].out_stride());
    float* buffers[2] = {scratch->floats(8, tape.batch * widest), scratch->floats(9, tape.batch * widest)};
    std::vector<const float*> in(tape.batch);
    for (int64_t l = count - 1; l >= lowest; l--) {
      bool first = l == 0;
      for (int64_t b = 0; b < tape.batch; b++)
        in[b] = first ? x[b] : tape.output(layers, l - 1) + b * layers[l - 1].out_stride();
      float* down = first ? dx : l == lowest ? nullptr : buffers[l % 2];
      int64_t down_stride = first ? layers[0].in_size() : layers[l - 1].out_stride();
      backward_layer(layers[l], params, grads, tape.batch, in.data(), tape.output(layers, l), tape.places(layers, l), dy,
                     down, down_stride);
      dy = down;
      for (int64_t b = 0; down && more.d && l == count - 1 && b < tape.batch; b++)
        for (int64_t i = 0; i < layers[l].c; i++) dy[b * down_stride + i] += more.share * more.d[b * down_stride + i];
    }
  }

  void forward_layer(const Layer& a, const float* const* params, int64_t batch, const float* const* x, float* y,
                     uint8_t* places) const;
  void backward_layer(const Layer& a, const float* const* params, float* const* grads, int64_t batch,
                      const float* const* x, const float* y, const uint8_t* places, float* dy, float* dx,
                      int64_t dx_stride) const;
};

static const float* param(const float* const* params, int64_t index) { return index < 0 ? nullptr : params[index]; }
static float* param(float* const* params, int64_t index) { return index < 0 ? nullptr : params[index]; }

static void max_pool(const Layer& a, const float* x, float* y, uint8_t* places) {
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

static void average_pool(const Layer& a, const float* x, float* y) {
  float share = 1.f / (a.kh * a.kw);
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      for (int64_t c = 0; c < a.c; c++) {
        float total = 0;
        for (int64_t u = 0; u < a.kh * a.kw; u++)
          total += x[((i * a.sh + u / a.kw) * a.w + j * a.sw + u % a.kw) * a.c + c];
        y[(i * a.ow + j) * a.c + c] = total * share;
      }
}

// dx += what each pooled pixel got, at its maximum or spread over its window.
static void pool_backward(const Layer& a, const uint8_t* places, const float* dy, float* dx) {
  memset(dx, 0, a.in_size() * sizeof(float));
  float share = 1.f / (a.kh * a.kw);
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      for (int64_t c = 0; c < a.c; c++) {
        int64_t pixel = (i * a.ow + j) * a.c + c;
        float* window = dx + (i * a.sh * a.w + j * a.sw) * a.c + c;
        for (int64_t u = 0; u < a.kh * a.kw; u++) {
          float part = a.kind == AVERAGE_POOL ? dy[pixel] * share : u == places[pixel] ? dy[pixel] : 0.f;
          window[((u / a.kw) * a.w + u % a.kw) * a.c] += part;
        }
      }
}

static float elementwise(int64_t kind, float x) {
  if (kind == SIGMOID) return 1.f / (1.f + std::exp(-x));
  if (kind == TANH) return std::tanh(x);
  return x <= 0 ? 0.f : x;
}
static float elementwise_slope(int64_t kind, float y) {  // of the output
  if (kind == SIGMOID) return y * (1.f - y);
  if (kind == TANH) return 1.f - y * y;
  return y <= 0 ? 0.f : 1.f;
}

void Chain::forward_layer(const Layer& a, const float* const* params, int64_t batch, const float* const* x, float* y,
                          uint8_t* places) const {
  const float *weight = param(params, a.weight), *bias = param(params, a.bias);
  if (a.kind == CONV) return conv_forward(a, weight, bias, batch, x, y, a.out_stride(), places, *scratch);
  if (a.kind == DENSE) dense_forward(weight, bias, a.c, a.oc, batch, x, y, a.out_stride());
  for (int64_t b = 0; b < batch; b++) {
    float* out = y + b * a.out_stride();
    if (a.kind == DENSE) {
      if (a.relu) for (int64_t i = 0; i < a.oc; i++) out[i] = out[i] <= 0 ? 0.f : out[i];
    } else if (a.kind == MAX_POOL) {
      max_pool(a, x[b], out, places + b * a.out_size());
    } else if (a.kind == AVERAGE_POOL) {
      average_pool(a, x[b], out);
    } else if (a.kind == TO_CHANNELS_FIRST) {
      for (int64_t p = 0; p < a.h * a.w; p++)
        for (int64_t c = 0; c < a.c; c++) out[c * a.h * a.w + p] = x[b][p * a.c + c];
    } else if (a.kind == EMBEDDING_MEAN) {  // x holds c row numbers as floats
      memset(out, 0, a.oc * sizeof(float));
      for (int64_t t = 0; t < a.c; t++)
        for (int64_t i = 0; i < a.oc; i++) out[i] += weight[(int64_t)x[b][t] * a.oc + i];
      for (int64_t i = 0; i < a.oc; i++) out[i] /= a.c;
    } else {
      for (int64_t i = 0; i < a.out_size(); i++) out[i] = elementwise(a.kind, x[b][i]);
    }
  }
}

void Chain::backward_layer(const Layer& a, const float* const* params, float* const* grads, int64_t batch,
                           const float* const* x, const float* y, const uint8_t* places, float* dy, float* dx,
                           int64_t dx_stride) const {
  const float* weight = param(params, a.weight);
  float *d_weight = param(grads, a.weight), *d_bias = param(grads, a.bias);
  int64_t stride = a.out_stride();
  if (a.kind == CONV)
    return conv_backward(a, weight, batch, x, dy, stride, places, d_weight, d_bias, dx, dx_stride, *scratch);
  if (a.kind == DENSE) {
    if (a.relu)
      for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < a.oc; i++) dy[b * stride + i] = y[b * stride + i] <= 0 ? 0.f : dy[b * stride + i];
    int64_t rows = std::max(a.oc, batch);
    return dense_backward(weight, a.c, a.oc, batch, x, dy, stride, d_weight, d_bias, dx, dx_stride, scratch->rows(rows),
                          scratch->results(rows), factored);
  }
  if (a.kind == EMBEDDING_MEAN) {  // its input are words: they have no gradient
    for (int64_t b = 0; b < batch; b++)
      for (int64_t t = 0; t < a.c; t++)
        for (int64_t i = 0; i < a.oc; i++) d_weight[(int64_t)x[b][t] * a.oc + i] += dy[b * stride + i] / a.c;
    return;
  }
  for (int64_t b = 0; b < batch && dx; b++) {
    float *up = dy + b * stride, *down = dx + b * dx_stride;
    if (a.kind == MAX_POOL || a.kind == AVERAGE_POOL) {
      pool_backward(a, places + b * a.out_size(), up, down);
    } else if (a.kind == TO_CHANNELS_FIRST) {
      for (int64_t p = 0; p < a.h * a.w; p++)
        for (int64_t c = 0; c < a.c; c++) down[p * a.c + c] = up[c * a.h * a.w + p];
    } else if (a.kind == RELU) {
      for (int64_t i = 0; i < a.out_size(); i++) down[i] = y[b * stride + i] <= 0 ? 0.f : up[i];
    } else {
      for (int64_t i = 0; i < a.out_size(); i++) down[i] = up[i] * elementwise_slope(a.kind, y[b * stride + i]);
    }
  }
}

static void clear_embeddings(const Chain& chain, float* const* grads, const int64_t* sizes) {
  for (int64_t l = 0; l < chain.count; l++)
    if (chain.layers[l].kind == EMBEDDING_MEAN)
      memset(grads[chain.layers[l].weight], 0, sizes[chain.layers[l].weight] * sizeof(float));
}

}  // namespace fedmoe
