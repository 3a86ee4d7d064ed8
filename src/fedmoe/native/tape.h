// What is kept of a network's way forward, and of its way back.
#pragma once
#include <algorithm>
#include <vector>
#include "layer.h"
#include "lstm.h"

namespace fedmoe {

// The outputs of all layers for one batch, and what else the backward pass needs: where maxima were, means and spreads.
struct Tape {
  float* memory;
  int64_t batch;

  static int64_t size(const Layer* layers, int64_t count, int64_t batch) {  // in floats
    int64_t total = 0;
    for (int64_t l = 0; l < count; l++) total += of_layer(layers[l], batch);
    return total;
  }
  static int64_t of_layer(const Layer& a, int64_t batch) {
    int64_t notes = 0;
    if (a.remembers_places()) notes = (batch * a.out_size() + 3) / 4 + 4;  // and a vector of bytes more
    if (a.kind == GROUP_NORM) notes = 2 * batch * a.groups;
    if (a.kind == LSTM) notes = Recurrent(a).tape_size(batch);
    return batch * a.out_stride() + round_up(notes, 16);
  }
  float* output(const Layer* layers, int64_t l) const { return memory + size(layers, l, batch); }
  float* notes(const Layer* layers, int64_t l) const { return output(layers, l) + batch * layers[l].out_stride(); }
};

// What else is known of the gradient by the features, the input of the last layer: `share` times d (batch, their stride).
struct FeatureGradient {
  const float* d = nullptr;
  float share = 0;
};

// Where a layer's gradient by its input goes: null for nowhere; `add` where another reader of that input came before.
struct Sink {
  float* to;
  int64_t stride;
  bool add;
};

// The gradients by the outputs of layers, on the way back: each is there from its last reader to the layer itself.
class Gradients {
 public:
  Gradients(const Layer* layers, int64_t count, int64_t batch, int64_t lowest, float* dy, float* dx, Scratch& scratch)
      : layers(layers), batch(batch), lowest(lowest), given(dy), dx(dx), scratch(scratch), of(count) {
    for (int64_t l = 0; l < count; l++) widest = std::max(widest, layers[l].out_stride());
    of[count - 1] = dy;
  }
  float* of_layer(int64_t l) const { return of[l]; }

  float* take() {
    if (!free.empty()) {
      float* buffer = free.back();
      free.pop_back();
      return buffer;
    }
    return scratch.gradients(made++, batch * widest);
  }
  void release(float* buffer) {
    if (buffer != given) free.push_back(buffer);
  }

  Sink sink(int64_t source) {
    if (source == INPUT) {
      Sink to{dx, layers[0].in_size(), dx_begun};
      dx_begun = true;
      return to;
    }
    if (source < lowest) return {nullptr, 0, false};
    bool add = of[source];
    if (!add) of[source] = take();
    return {of[source], layers[source].out_stride(), add};
  }

  // The gradient `d` of layer l is also that of `source`; true where its buffer now belongs to `source`, if that may be.
  bool pass_on(int64_t l, float* d, int64_t source, bool may_keep) {
    if (may_keep && source >= lowest && source != INPUT && !of[source]) {
      of[source] = d;
      return true;
    }
    Sink to = sink(source);
    for (int64_t b = 0; to.to && b < batch; b++)
      move(d + b * layers[l].out_stride(), layers[l].out_size(), to.to + b * to.stride, to.add);
    return false;
  }

  static void move(const float* from, int64_t n, float* to, bool add) {
    if (!add) memcpy(to, from, n * sizeof(float));
    else for (int64_t i = 0; i < n; i++) to[i] += from[i];
  }

 private:
  const Layer* layers;
  int64_t batch, lowest, widest = 0;
  float *given, *dx;
  bool dx_begun = false;
  int made = 0;
  Scratch& scratch;
  std::vector<float*> of, free;
};

}  // namespace fedmoe
