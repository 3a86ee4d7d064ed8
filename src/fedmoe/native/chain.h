// A network on one batch of one client: its layers one after another, forward and backward.
//
// Inputs of images are (height, width, channels); parameters and their gradients are in PyTorch's layout.
#pragma once
#include <algorithm>
#include "conv.h"
#include "dense.h"
#include "layer.h"
#include "lstm.h"
#include "norm.h"
#include "simple_layers.h"
#include "tape.h"

namespace fedmoe {

struct Chain {
  const Layer* layers;
  int64_t count;
  Scratch* scratch;
  bool factored = false;  // gradients of dense weights as factors: see dense_backward

  void forward(const float* const* params, const float* const* x, const Tape& tape) const {
    std::vector<const float*> in(tape.batch), added(tape.batch);
    for (int64_t l = 0; l < count; l++) {
      outputs_of(layers[l].source, x, tape, in.data());
      bool with_norm = l + 1 < count && is_normed(l);
      int64_t second = layers[l + with_norm].second;
      if (second != NONE) outputs_of(second, x, tape, added.data());
      if (layers[l].kind == CONV) conv_layer(l, with_norm, params, in.data(), added.data(), tape);
      else forward_layer(layers[l], params, tape.batch, in.data(), added.data(), tape.output(layers, l), tape.notes(layers, l));
      l += with_norm;
    }
  }

  // dy of the last layer is (batch, its out_stride) and is overwritten; dx (batch, in_size) may be null. Layers before
  // `lowest`, which is 0 where dx is asked for, are left out: none of their parameters is trained.
  void backward(const float* const* params, float* const* grads, const float* const* x, const Tape& tape, float* dy,
                float* dx, int64_t lowest = 0, const FeatureGradient& more = {}) const {
    Gradients d(layers, count, tape.batch, lowest, dy, dx, *scratch);
    std::vector<const float*> in(tape.batch);
    for (int64_t l = count - 1; l >= lowest; l--) {
      const Layer& a = layers[l];
      float* up = d.of_layer(l);
      outputs_of(a.source, x, tape, in.data());
      if (a.kind == ADD) {
        if (a.relu) cut_by_relu(tape.batch * a.out_stride(), tape.output(layers, l), up);
        bool kept = d.pass_on(l, up, a.source, true);
        kept |= d.pass_on(l, up, a.second, !kept);
        if (!kept) d.release(up);
        continue;
      }
      bool with_conv = l > lowest && is_normed(l - 1) && !d.of_layer(l - 1);  // else somebody else reads it too
      if (with_conv) {
        normed_conv_backward(l, params, grads, x, tape, in.data(), up, d.sink(layers[l - 1].source));
      } else {
        Sink down = d.sink(a.source);
        bool aside = down.to && down.add && a.kind != GROUP_NORM && a.kind != CONV;
        float* to = aside ? d.take() : down.to;
        backward_layer(a, params, grads, tape.batch, in.data(), tape.output(layers, l), tape.notes(layers, l), up,
                       {to, down.stride, down.add});
        for (int64_t b = 0; aside && b < tape.batch; b++)
          Gradients::move(to + b * down.stride, a.in_size(), down.to + b * down.stride, true);
        if (aside) d.release(to);
        if (more.d && l == count - 1 && down.to) add_feature_gradient(more, tape.batch, down);
      }
      if (a.second == NONE || !d.pass_on(l, up, a.second, true)) d.release(up);
      l -= with_conv;
    }
  }

 private:
  void outputs_of(int64_t source, const float* const* x, const Tape& tape, const float** out) const {
    const float* y = source == INPUT ? nullptr : tape.output(layers, source);
    for (int64_t b = 0; b < tape.batch; b++) out[b] = y ? y + b * layers[source].out_stride() : x[b];
  }
  void add_feature_gradient(const FeatureGradient& more, int64_t batch, const Sink& down) const {
    for (int64_t b = 0; b < batch; b++)
      for (int64_t i = 0; i < layers[count - 1].c; i++)
        down.to[b * down.stride + i] += more.share * more.d[b * down.stride + i];
  }
  // Whether a convolution is followed by its norm: both then run on a few examples at a time, which stay in the cache.
  bool is_normed(int64_t l) const {
    const Layer &a = layers[l], &next = layers[l + 1];
    return a.is_dense_conv() && !a.relu && next.kind == GROUP_NORM && next.source == l && next.second != l;
  }

  void conv_layer(int64_t l, bool with_norm, const float* const* params, const float* const* x, const float* const* added,
                  const Tape& tape) const;
  void normed_conv_backward(int64_t l, const float* const* params, float* const* grads, const float* const* x,
                            const Tape& tape, const float* const* conv_outputs, float* dy, const Sink& down) const;
  void forward_layer(const Layer& a, const float* const* params, int64_t batch, const float* const* x,
                     const float* const* added, float* y, float* notes) const;
  void backward_layer(const Layer& a, const float* const* params, float* const* grads, int64_t batch,
                      const float* const* x, const float* y, const float* notes, float* dy, const Sink& down) const;
};

static const float* param(const float* const* params, int64_t index) { return index < 0 ? nullptr : params[index]; }
static float* param(float* const* params, int64_t index) { return index < 0 ? nullptr : params[index]; }

static void embedding_mean(const Layer& a, const float* weight, const float* words, float* y) {  // row numbers as floats
  memset(y, 0, a.oc * sizeof(float));
  for (int64_t t = 0; t < a.c; t++)
    for (int64_t i = 0; i < a.oc; i++) y[i] += weight[(int64_t)words[t] * a.oc + i];
  for (int64_t i = 0; i < a.oc; i++) y[i] /= a.c;
}

inline void Chain::conv_layer(int64_t l, bool with_norm, const float* const* params, const float* const* x,
                              const float* const* added, const Tape& tape) const {
  const Layer &a = layers[l], &norm = layers[l + with_norm];
  float *y = tape.output(layers, l), *normed = tape.output(layers, l + with_norm);
  float* statistics = tape.notes(layers, l + with_norm);
  conv_forward(a, param(params, a.weight), param(params, a.bias), tape.batch, x, y, a.out_stride(),
               (uint8_t*)tape.notes(layers, l), *scratch, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; with_norm && b < end; b++)
      norm_forward(norm, param(params, norm.weight), param(params, norm.bias), y + b * a.out_stride(),
                   norm.second == NONE ? nullptr : added[b], normed + b * norm.out_stride(),
                   statistics + 2 * b * norm.groups, *scratch);
  });
}

inline void Chain::normed_conv_backward(int64_t l, const float* const* params, float* const* grads, const float* const* x,
                                        const Tape& tape, const float* const* conv_outputs, float* dy,
                                        const Sink& down) const {
  const Layer &norm = layers[l], &a = layers[l - 1];
  NormBackward back(norm, param(params, norm.weight), conv_outputs, tape.output(layers, l), tape.notes(layers, l), dy,
                    *scratch);
  int64_t stride = a.out_stride();
  float* between = scratch->floats(6, examples_at_once(a) * stride);
  std::vector<const float*> in(tape.batch);
  outputs_of(a.source, x, tape, in.data());
  auto gradient_of = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) back.example(b, between + (b - begin) * stride, false);
    return between;
  };
  conv_backward(a, param(params, a.weight), tape.batch, in.data(), gradient_of, stride, nullptr, param(grads, a.weight),
                param(grads, a.bias), down.to, down.stride, down.add, *scratch);
  back.finish(param(grads, norm.weight), param(grads, norm.bias));
}

inline void Chain::forward_layer(const Layer& a, const float* const* params, int64_t batch, const float* const* x,
                                 const float* const* added, float* y, float* notes) const {
  const float *weight = param(params, a.weight), *bias = param(params, a.bias);
  if (a.kind == LSTM) return lstm_forward(a, params, batch, x, y, notes, *scratch);
  if (a.kind == DENSE) dense_forward(weight, bias, a.c, a.oc, batch, x, y, a.out_stride());
  for (int64_t b = 0; b < batch; b++) {
    float* out = y + b * a.out_stride();
    switch (a.kind) {
      case DENSE:
        if (a.relu) for (int64_t i = 0; i < a.oc; i++) out[i] = out[i] <= 0 ? 0.f : out[i];
        break;
      case MAX_POOL: max_pool(a, x[b], out, (uint8_t*)notes + b * a.out_size()); break;
      case AVERAGE_POOL: average_pool(a, x[b], out); break;
      case TO_CHANNELS_FIRST: to_channels_first(a, x[b], out); break;
      case EMBEDDING_MEAN: embedding_mean(a, weight, x[b], out); break;
      case GROUP_NORM:
        norm_forward(a, weight, bias, x[b], a.second == NONE ? nullptr : added[b], out, notes + 2 * b * a.groups, *scratch);
        break;
      case ADD: add(a, x[b], added[b], out); break;
      case SUBSAMPLE: subsample(a, x[b], out); break;
      default:
        for (int64_t i = 0; i < a.out_size(); i++) out[i] = elementwise(a.kind, x[b][i]);
    }
  }
}

inline void Chain::backward_layer(const Layer& a, const float* const* params, float* const* grads, int64_t batch,
                                  const float* const* x, const float* y, const float* notes, float* dy,
                                  const Sink& down) const {
  const float* weight = param(params, a.weight);
  float *d_weight = param(grads, a.weight), *d_bias = param(grads, a.bias);
  int64_t stride = a.out_stride();
  if (a.relu && (a.kind == DENSE || a.is_dense_conv())) cut_by_relu(batch * stride, y, dy);
  if (a.kind == CONV)
    return conv_backward(a, weight, batch, x, [&](int64_t begin, int64_t) { return dy + begin * stride; }, stride,
                         (const uint8_t*)notes, d_weight, d_bias, down.to, down.stride, down.add, *scratch);
  if (a.kind == LSTM) return lstm_backward(a, params, grads, batch, x, notes, dy, down.to, down.stride, *scratch);
  if (a.kind == DENSE) {
    int64_t rows = std::max(a.oc, batch);
    return dense_backward(weight, a.c, a.oc, batch, x, dy, stride, d_weight, d_bias, down.to, down.stride,
                          scratch->rows(rows), scratch->results(rows), factored);
  }
  if (a.kind == GROUP_NORM) {
    NormBackward norm(a, weight, x, y, notes, dy, *scratch);
    for (int64_t b = 0; b < batch; b++) norm.example(b, down.to ? down.to + b * down.stride : nullptr, down.add);
    return norm.finish(d_weight, d_bias);
  }
  if (a.kind == EMBEDDING_MEAN) {  // its input are words: they have no gradient
    for (int64_t b = 0; b < batch; b++)
      for (int64_t t = 0; t < a.c; t++)
        for (int64_t i = 0; i < a.oc; i++) d_weight[(int64_t)x[b][t] * a.oc + i] += dy[b * stride + i] / a.c;
    return;
  }
  for (int64_t b = 0; b < batch && down.to; b++) {
    float *up = dy + b * stride, *dx = down.to + b * down.stride;
    switch (a.kind) {
      case MAX_POOL: case AVERAGE_POOL: pool_backward(a, (const uint8_t*)notes + b * a.out_size(), up, dx); break;
      case TO_CHANNELS_FIRST: from_channels_first(a, up, dx); break;
      case SUBSAMPLE: subsample_backward(a, up, dx); break;
      default: elementwise_backward(a, y + b * stride, up, dx);
    }
  }
}

static void clear_embeddings(const Chain& chain, float* const* grads, const int64_t* sizes) {
  for (int64_t l = 0; l < chain.count; l++)
    if (chain.layers[l].reads_words())
      memset(grads[chain.layers[l].weight], 0, sizes[chain.layers[l].weight] * sizeof(float));
}

}  // namespace fedmoe
