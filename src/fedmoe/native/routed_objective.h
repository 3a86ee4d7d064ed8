// A mixture of the experts that a client was sent, weighed by a router that reads embeddings (Dun et al. 2023): its loss for
// one batch of one client, and the gradients by the experts' scores and the router.
//
// Letters: M experts of which the client received H, F values of an embedding, D hidden units of the router, C classes, B
// examples.
#pragma once
#include "dense.h"
#include "layer.h"
#include "losses.h"

namespace fedmoe {

// Where the router's two layers lie in its vector, and the sizes; `RoutedSettings` in training/routed_experts.py.
struct RoutedSettings {
  int64_t first_weight, first_bias, second_weight, second_bias;
  int64_t M, F, D, size;  // size: of the router's vector
  int64_t over_sent;      // whether g sums to 1 over the experts that the client received; else over all M
  double rate;            // of its plain SGD
};

// In the order of `RoutedKernel.bind` in training/routed_experts.py.
struct RoutedInputs {
  const int64_t* expert_ids;  // (H) of M
  const float* embedding;     // (examples, F)
  float* router;              // (size), trained in place
};

// The router on one batch: two dense layers with a ReLU between.
struct Router {
  const RoutedSettings& at;
  float* weights;
  Scratch& scratch;
  std::vector<const float*> embedding, hidden;
  float *units = nullptr, *logits = nullptr;  // (B, D), (B, M)

  void forward(const RoutedInputs& inputs, const int64_t* order, int64_t B) {
    units = scratch.floats(13, B * at.D), logits = scratch.floats(14, B * at.M);
    embedding.resize(B), hidden.resize(B);
    for (int64_t b = 0; b < B; b++) embedding[b] = inputs.embedding + order[b] * at.F, hidden[b] = units + b * at.D;
    dense_forward(weights + at.first_weight, weights + at.first_bias, at.F, at.D, B, embedding.data(), units, at.D);
    for (int64_t i = 0; i < B * at.D; i++) units[i] = units[i] < 0 ? 0.f : units[i];
    dense_forward(weights + at.second_weight, weights + at.second_bias, at.D, at.M, B, hidden.data(), logits, at.M);
  }

  // `logits` hold their gradients by now; one step of SGD follows.
  void descend(int64_t B) {
    float *gradient = scratch.floats(15, at.size), *d_units = scratch.floats(16, B * at.D);
    int64_t wide = std::max({at.M, at.D, B});
    dense_backward(weights + at.second_weight, at.D, at.M, B, hidden.data(), logits, at.M, gradient + at.second_weight,
                   gradient + at.second_bias, d_units, at.D, scratch.rows(wide), scratch.results(wide));
    for (int64_t i = 0; i < B * at.D; i++) d_units[i] = units[i] > 0 ? d_units[i] : 0.f;
    dense_backward(weights + at.first_weight, at.F, at.D, B, embedding.data(), d_units, at.D, gradient + at.first_weight,
                   gradient + at.first_bias, nullptr, 0, scratch.rows(wide), scratch.results(wide));
    float rate = at.rate;
    for (int64_t i = 0; i < at.size; i++) weights[i] -= rate * gradient[i];
  }
};

// A softmax of `logits` is then one over the H experts alone. `room` (H) is room to work in.
static void leave_sent(float* logits, float* room, const int64_t* expert_ids, int64_t H, int64_t M) {
  for (int64_t h = 0; h < H; h++) room[h] = logits[expert_ids[h]];
  std::fill(logits, logits + M, -INFINITY);
  for (int64_t h = 0; h < H; h++) logits[expert_ids[h]] = room[h];
}

// -log sum_h g_h f_h(y) of one example, g being the softmax of `logits`. `scores[h]` and `logits` become the gradients of
// `share` times it; `joint` (H) is room to work in.
static float routed_mixture(float* const* scores, float* logits, float* joint, const int64_t* expert_ids, int64_t H,
                            int64_t M, int64_t classes, int64_t label, float share) {
  log_softmax(logits, M);
  float largest = -INFINITY, sum = 0;
  for (int64_t h = 0; h < H; h++) {
    log_softmax(scores[h], classes);
    joint[h] = logits[expert_ids[h]] + scores[h][label];
    largest = joint[h] > largest || joint[h] != joint[h] ? joint[h] : largest;
  }
  for (int64_t h = 0; h < H; h++) sum += std::exp(joint[h] - largest);
  float log_mixed = std::isinf(largest) ? largest : largest + std::log(sum);
  for (int64_t m = 0; m < M; m++) logits[m] = share * std::exp(logits[m]);
  for (int64_t h = 0; h < H; h++) {
    float responsibility = std::exp(joint[h] - log_mixed);
    logits[expert_ids[h]] -= share * responsibility;
    softmax_gradient(scores[h], classes, label, share * responsibility);
  }
  return -log_mixed;
}

}  // namespace fedmoe
