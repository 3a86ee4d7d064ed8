// FedMix's objective for one batch of one client, and its gradient: minus eq. 6 of Reisser et al. (2021) without H(q); and
// the client's own q(z|s) of their appendix B in closed form.
//
// The same formulas as in models/expert_mixture.py, with its letters: K experts of which the client received H, R values
// that q is conditioned on, F features, C classes, B examples.
#pragma once
#include <limits>
#include "dense.h"
#include "layer.h"
#include "losses.h"

namespace fedmoe {

// Where the parts beside the experts start in a client's flat vector, and the sizes; `FedMixSettings` in
// algorithms/fedmix/kernel_inputs.py.
struct FedMixSettings {
  int64_t posterior, gate_weight, gate_bias;
  int64_t R, K, F;  // R is 1, and there is no phi, where every client has a q of its own
  double damping;   // of that q
};

constexpr float TINY = std::numeric_limits<float>::min();

// What a client knows of its experts; in the order of `FedMixKernel.bind` in algorithms/fedmix/kernel_inputs.py.
struct FedMixInputs {
  const int64_t* condition;  // of each row: which value of R it has
  const int64_t* expert_ids;  // (H) of K
  const uint8_t* in_use;     // (H): 0 where Algorithm 2 prunes; such an expert is not computed at all
  const float* shares;       // (R): how often each value occurs here
  float* usage;              // (K): the client's own q(z|s), else null; it has all of its experts in use then
};

// The experts' outputs for a batch. `scores[h]` (B, score_stride) become their gradients.
struct ExpertOutputs {
  int64_t H, B, C;
  std::vector<float*> scores;
  std::vector<const float*> features;  // (B, feature_stride)
  int64_t score_stride, feature_stride;
};

// q(z|.) (R, K), q' of Algorithm 2 (R, H) and the shares q'(z|s) (H) by which features are pooled (eq. 9).
struct Posterior {
  std::vector<float> q, pruned_q, pooling;
  float usage_in_use = 0;

  Posterior(const float* flat, const FedMixSettings& at, const FedMixInputs& inputs, int64_t H)
      : q(at.R * at.K), pruned_q(at.R * H), pooling(H) {
    for (int64_t i = 0; i < at.R * at.K; i++)
      q[i] = inputs.usage ? std::log(std::max(inputs.usage[i], TINY)) : flat[at.posterior + i];
    for (int64_t r = 0; r < at.R; r++) {
      float *row = &q[r * at.K], *own = &pruned_q[r * H];
      if (!inputs.usage) log_softmax(row, at.K);
      for (int64_t h = 0; h < H; h++) own[h] = inputs.in_use[h] ? row[inputs.expert_ids[h]] : -INFINITY;
      log_softmax(own, H);
      for (int64_t h = 0; h < H; h++) own[h] = std::exp(own[h]);
      for (int64_t k = 0; k < at.K; k++) row[k] = std::exp(row[k]);
      float share = inputs.usage ? 1.f : inputs.shares[r];
      for (int64_t h = 0; h < H; h++) pooling[h] += inputs.in_use[h] ? share * row[inputs.expert_ids[h]] : 0.f;
    }
    for (float usage : pooling) usage_in_use += usage;
    usage_in_use = std::max(usage_in_use, TINY);
    for (float& usage : pooling) usage /= usage_in_use;
  }
};

// Through p = softmax(logits): d_logits += p * (d_p - p . d_p).
static void through_softmax(const float* p, const float* d_p, int64_t n, const int64_t* where, float* d_logits) {
  float mean = 0;
  for (int64_t i = 0; i < n; i++) mean += p[i] * d_p[i];
  for (int64_t i = 0; i < n; i++) d_logits[where ? where[i] : i] += p[i] * (d_p[i] - mean);
}

// h_s(x) of eq. 9: pooled (B, feature_stride).
static void pool_features(const ExpertOutputs& a, const std::vector<float>& pooling, int64_t F, float* pooled) {
  memset(pooled, 0, a.B * a.feature_stride * sizeof(float));
  for (int64_t h = 0; h < a.H; h++)
    for (int64_t b = 0; pooling[h] && b < a.B; b++)
      for (int64_t f = 0; f < F; f++)
        pooled[b * a.feature_stride + f] += pooling[h] * a.features[h][b * a.feature_stride + f];
}

// phi is reached through q of the gate's term, q' of the experts' term, and q(z|s) that pools the features.
static void posterior_gradient(const FedMixSettings& at, const FedMixInputs& inputs, const Posterior& p,
                               std::vector<float>& d_q, const std::vector<float>& d_pruned_q,
                               const std::vector<float>& d_pooling, float* d_logits) {
  int64_t H = d_pooling.size();
  float mean = 0;
  for (int64_t h = 0; h < H; h++) mean += p.pooling[h] * d_pooling[h];
  memset(d_logits, 0, at.R * at.K * sizeof(float));
  for (int64_t r = 0; r < at.R; r++) {
    for (int64_t h = 0; h < H; h++)
      if (inputs.in_use[h])
        d_q[r * at.K + inputs.expert_ids[h]] += inputs.shares[r] * (d_pooling[h] - mean) / p.usage_in_use;
    through_softmax(&p.q[r * at.K], &d_q[r * at.K], at.K, nullptr, d_logits + r * at.K);
    through_softmax(&p.pruned_q[r * H], &d_pruned_q[r * H], H, inputs.expert_ids, d_logits + r * at.K);
  }
}

// Eq. 13 with damping: q(z|s) moves towards the softmax of the mean of log p(y, z|x), of which `joint` (H) is the sum.
static void move_usage(const FedMixSettings& at, const FedMixInputs& inputs, std::vector<float>& joint, int64_t B) {
  for (float& sum : joint) sum /= B;
  log_softmax(joint.data(), joint.size());
  for (int64_t k = 0; k < at.K; k++) inputs.usage[k] *= at.damping;
  for (size_t h = 0; h < joint.size(); h++) inputs.usage[inputs.expert_ids[h]] += (1 - at.damping) * std::exp(joint[h]);
}

// The mean loss of the batch. Gradients: of phi and the gate in `gradient`, of the scores in their place, and of the pooled
// features in `d_pooled` (B, feature_stride); expert h's own features get p.pooling[h] of the latter.
static double fedmix_gradient(const FedMixSettings& at, const FedMixInputs& inputs, const Posterior& p,
                              ExpertOutputs& a, const int64_t* rows, const int64_t* y, const float* flat,
                              float* gradient, float* d_pooled, Scratch& scratch) {
  float *pooled = scratch.floats(13, a.B * a.feature_stride), *gate = scratch.floats(14, a.B * at.K);
  std::vector<const float*> pooled_rows(a.B);
  pool_features(a, p.pooling, at.F, pooled);
  for (int64_t b = 0; b < a.B; b++) pooled_rows[b] = pooled + b * a.feature_stride;
  dense_forward(flat + at.gate_weight, flat + at.gate_bias, at.F, at.K, a.B, pooled_rows.data(), gate, at.K);

  std::vector<float> d_q(at.R * at.K), d_pruned_q(at.R * a.H), d_pooling(a.H), joint(a.H);
  double loss = 0;
  float share = 1.f / a.B;
  for (int64_t b = 0; b < a.B; b++) {
    int64_t r = inputs.usage ? 0 : inputs.condition[rows[b]], label = y[rows[b]];
    const float *q = &p.q[r * at.K], *pruned_q = &p.pruned_q[r * a.H];
    float* log_gate = gate + b * at.K;
    log_softmax(log_gate, at.K);
    for (int64_t h = 0; h < a.H; h++) joint[h] += log_gate[inputs.expert_ids[h]];
    for (int64_t k = 0; k < at.K; k++) {
      loss -= q[k] * log_gate[k];
      d_q[r * at.K + k] -= share * log_gate[k];
      log_gate[k] = share * (std::exp(log_gate[k]) - q[k]);
    }
    for (int64_t h = 0; h < a.H; h++) {
      if (!inputs.in_use[h]) continue;
      float* scores = a.scores[h] + b * a.score_stride;
      log_softmax(scores, a.C);
      loss -= pruned_q[h] * scores[label];
      d_pruned_q[r * a.H + h] -= share * scores[label];
      joint[h] += scores[label];
      softmax_gradient(scores, a.C, label, share * pruned_q[h]);
    }
  }
  int64_t wide = std::max(at.K, a.B);
  dense_backward(flat + at.gate_weight, at.F, at.K, a.B, pooled_rows.data(), gate, at.K, gradient + at.gate_weight,
                 gradient + at.gate_bias, d_pooled, a.feature_stride, scratch.rows(wide), scratch.results(wide));
  if (inputs.usage) {
    move_usage(at, inputs, joint, a.B);
    return loss / a.B;
  }
  for (int64_t h = 0; h < a.H; h++)
    for (int64_t b = 0; inputs.in_use[h] && b < a.B; b++)
      for (int64_t f = 0; f < at.F; f++)
        d_pooling[h] += d_pooled[b * a.feature_stride + f] * a.features[h][b * a.feature_stride + f];
  posterior_gradient(at, inputs, p, d_q, d_pruned_q, d_pooling, gradient + at.posterior);
  return loss / a.B;
}

}  // namespace fedmoe
