// One step of SGD, momentum, Adam or AdamW on the stretches of a client's vector that it moves.
#pragma once
#include <cmath>
#include "client.h"
#include "moved_ranges.h"

namespace fedmoe {

static void decay(const Optimizer& o, float* p, float* g, int64_t n, double at_rate) {
  float share = o.decoupled ? at_rate * o.weight_decay : o.weight_decay;
  if (o.decoupled) for (int64_t i = 0; i < n; i++) p[i] -= share * p[i];
  else for (int64_t i = 0; i < n; i++) g[i] += share * p[i];
}

// The numbers of one step of Adam. The correction of the second moment is in the rate and in epsilon, as Kingma and Ba
// (2015, end of Section 2) advise: one division less for each weight.
struct AdamStep {
  float b1, b2, c1, c2, epsilon, rate;

  AdamStep(const Optimizer& o, int64_t step, double at_rate)
      : b1(o.beta1), b2(o.beta2), c1(1 - o.beta1), c2(1 - o.beta2) {
    double correction = std::sqrt(1 - std::pow(o.beta2, step));
    epsilon = o.epsilon * correction;
    rate = at_rate * correction / (1 - std::pow(o.beta1, step));
  }

  void move(float* p, const float* g, float* mean, float* square, int64_t n) const {
    for (int64_t i = 0; i < n; i++) {
      mean[i] = b1 * mean[i] + c1 * g[i];
      square[i] = b2 * square[i] + c2 * g[i] * g[i];
      p[i] -= rate * mean[i] / (std::sqrt(square[i]) + epsilon);
    }
  }
};

static void move_by_sgd(const Optimizer& o, float* p, const float* g, float* mean, int64_t n, double at_rate) {
  float rate = at_rate, momentum = o.momentum;
  if (!momentum) for (int64_t i = 0; i < n; i++) p[i] -= rate * g[i];
  else for (int64_t i = 0; i < n; i++) p[i] -= rate * (mean[i] = momentum * mean[i] + g[i]);
}

// The pull towards the anchor, and the constant. Neither is part of the loss that is reported.
static void correct_gradient(const Client& client, double proximal, float* gradient, int64_t begin, int64_t end) {
  float strength = proximal;
  if (client.anchor)
    for (int64_t i = begin; i < end; i++) gradient[i] += strength * (client.flat[i] - client.anchor[i]);
  if (client.gradient_offset)
    for (int64_t i = begin; i < end; i++) gradient[i] += client.gradient_offset[i];
}

// As torch.nn.utils.clip_grad_norm_, over all that is trained.
static void clip_by_norm(double max_norm, const Ranges& ranges, float* gradient) {
  double squares = 0;
  for (const Range& r : ranges)
    for (int64_t i = r.begin; i < r.end; i++) squares += (double)gradient[i] * gradient[i];
  float scale = max_norm / (std::sqrt(squares) + 1e-6);
  if (scale >= 1) return;  // not so for NaN, which travels on
  for (const Range& r : ranges)
    for (int64_t i = r.begin; i < r.end; i++) gradient[i] *= scale;
}

static void move_weights(const Client& client, const Optimizer& o, const Ranges& ranges, float* gradient, int64_t step,
                         double rate) {
  for (const Range& r : ranges) correct_gradient(client, o.proximal, gradient, r.begin, r.end);
  if (o.max_norm) clip_by_norm(o.max_norm, ranges, gradient);
  AdamStep adam(o, step, rate);
  for (const Range& r : ranges) {
    float *p = client.flat + r.begin, *g = gradient + r.begin;
    float* mean = client.mean ? client.mean + r.begin : nullptr;
    if (o.weight_decay) decay(o, p, g, r.end - r.begin, rate);
    if (o.adam) adam.move(p, g, mean, client.square + r.begin, r.end - r.begin);
    else move_by_sgd(o, p, g, mean, r.end - r.begin, rate);
  }
}

}  // namespace fedmoe
