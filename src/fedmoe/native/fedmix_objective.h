// FedMix's objective for one batch of one client, and its gradient: minus eq. 6 of Reisser et al. (2021) without H(q); and
// the client's own q(z|s) of their appendix B in closed form.
//
// The same formulas as in models/expert_mixture.py, with its letters: K experts of which the client holds H, R values that
// q is conditioned on, F features, C classes, B examples.
#pragma once
#include <limits>
#include "dense.h"
#include "layer.h"
#include "losses.h"

namespace fedmoe {

// Where the parts beside the experts start in a client's flat vector, and the sizes; `FedMixObjective` in trainer.py.
struct FedMixObjective {
  int64_t posterior, gate_weight, gate_bias;
  int64_t R, K, F;  // R is 1, and there is no phi, where every client has a q of its own
  double damping;   // of that q
};

constexpr float TINY = std::numeric_limits<float>::min();

// What a client knows of its experts.
struct FedMixInputs {
  const int64_t* condition;  // of each row: which value of R it has
  const int64_t* expert_ids; // (H) of K
  const uint8_t* in_use;     // (H): 0 where Algorithm 2 prunes; such an expert is not computed at all
  const float* shares;       // (R): how often each value occurs here
  float* usage;              // (K): the client's own q(z|s), else null; it has all of its experts in use then
};

// What the experts say of a batch. `scores[h]` (B, score_stride) become their gradients.
struct Answers {
  int64_t H, B, C;
  std::vector<float*> scores;
  std::vector<const float*> features;  // (B, feature_stride)
  int64_t score_stride, feature_stride;
};

// q(z|.) (R, K), q' of Algorithm 2 (R, H) and the shares q'(z|s) (H) by which features are pooled (eq. 9).
struct Posterior {
  std::vector<float> q, kept, pooling;
  float usage_in_use = 0;

  Posterior(const float* flat, const FedMixObjective& at, const FedMixInputs& mine, int64_t H)
      : q(at.R * at.K), kept(at.R * H), pooling(H) {
    for (int64_t i = 0; i < at.R * at.K; i++)
      q[i] = mine.usage ? std::log(std::max(mine.usage[i], TINY)) : flat[at.posterior + i];
    for (int64_t r = 0; r < at.R; r++) {
      float *row = &q[r * at.K], *own = &kept[r * H];
      if (!mine.usage) log_softmax(row, at.K);
      for (int64_t h = 0; h < H; h++) own[h] = mine.in_use[h] ? row[mine.expert_ids[h]] : -INFINITY;
      log_softmax(own, H);
      for (int64_t h = 0; h < H; h++) own[h] = std::exp(own[h]);
      for (int64_t k = 0; k < at.K; k++) row[k] = std::exp(row[k]);
      float share = mine.usage ? 1.f : mine.shares[r];
      for (int64_t h = 0; h < H; h++) pooling[h] += mine.in_use[h] ? share * row[mine.expert_ids[h]] : 0.f;
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
static void pool_features(const Answers& a, const std::vector<float>& pooling, int64_t F, float* pooled) {
  memset(pooled, 0, a.B * a.feature_stride * sizeof(float));
  for (int64_t h = 0; h < a.H; h++)
    for (int64_t b = 0; pooling[h] && b < a.B; b++)
      for (int64_t f = 0; f < F; f++)
        pooled[b * a.feature_stride + f] += pooling[h] * a.features[h][b * a.feature_stride + f];
}

// phi is reached through q of the gate's term, q' of the experts' term, and q(z|s) that pools the features.
static void posterior_gradient(const FedMixObjective& at, const FedMixInputs& mine, const Posterior& p, std::vector<float>& d_q,
                               const std::vector<float>& d_kept, const std::vector<float>& d_pooling, float* d_logits) {
  int64_t H = d_pooling.size();
  float mean = 0;
  for (int64_t h = 0; h < H; h++) mean += p.pooling[h] * d_pooling[h];
  memset(d_logits, 0, at.R * at.K * sizeof(float));
  for (int64_t r = 0; r < at.R; r++) {
    for (int64_t h = 0; h < H; h++)
      if (mine.in_use[h]) d_q[r * at.K + mine.expert_ids[h]] += mine.shares[r] * (d_pooling[h] - mean) / p.usage_in_use;
    through_softmax(&p.q[r * at.K], &d_q[r * at.K], at.K, nullptr, d_logits + r * at.K);
    through_softmax(&p.kept[r * H], &d_kept[r * H], H, mine.expert_ids, d_logits + r * at.K);
  }
}

// Eq. 13 with damping: q(z|s) moves towards the softmax of the mean of log p(y, z|x), of which `joint` (H) is the sum.
static void move_usage(const FedMixObjective& at, const FedMixInputs& mine, std::vector<float>& joint, int64_t B) {
  for (float& sum : joint) sum /= B;
  log_softmax(joint.data(), joint.size());
  for (int64_t k = 0; k < at.K; k++) mine.usage[k] *= at.damping;
  for (size_t h = 0; h < joint.size(); h++) mine.usage[mine.expert_ids[h]] += (1 - at.damping) * std::exp(joint[h]);
}

// The mean loss of the batch. Gradients: of phi and the gate in `gradient`, of the scores in their place, and of the pooled
// features in `d_pooled` (B, feature_stride); expert h's own features get p.pooling[h] of the latter.
static double bound_gradient(const FedMixObjective& at, const FedMixInputs& mine, const Posterior& p, Answers& a, const int64_t* rows,
                             const int64_t* y, const float* flat, float* gradient, float* d_pooled, Scratch& scratch) {
  float *pooled = scratch.floats(13, a.B * a.feature_stride), *gate = scratch.floats(14, a.B * at.K);
  std::vector<const float*> inputs(a.B);
  pool_features(a, p.pooling, at.F, pooled);
  for (int64_t b = 0; b < a.B; b++) inputs[b] = pooled + b * a.feature_stride;
  dense_forward(flat + at.gate_weight, flat + at.gate_bias, at.F, at.K, a.B, inputs.data(), gate, at.K);

  std::vector<float> d_q(at.R * at.K), d_kept(at.R * a.H), d_pooling(a.H), joint(a.H);
  double loss = 0;
  float share = 1.f / a.B;
  for (int64_t b = 0; b < a.B; b++) {
    int64_t r = mine.usage ? 0 : mine.condition[rows[b]], label = y[rows[b]];
    const float *q = &p.q[r * at.K], *kept = &p.kept[r * a.H];
    float* log_gate = gate + b * at.K;
    log_softmax(log_gate, at.K);
    for (int64_t h = 0; h < a.H; h++) joint[h] += log_gate[mine.expert_ids[h]];
    for (int64_t k = 0; k < at.K; k++) {
      loss -= q[k] * log_gate[k];
      d_q[r * at.K + k] -= share * log_gate[k];
      log_gate[k] = share * (std::exp(log_gate[k]) - q[k]);
    }
    for (int64_t h = 0; h < a.H; h++) {
      if (!mine.in_use[h]) continue;
      float* scores = a.scores[h] + b * a.score_stride;
      log_softmax(scores, a.C);
      loss -= kept[h] * scores[label];
      d_kept[r * a.H + h] -= share * scores[label];
      joint[h] += scores[label];
      softmax_gradient(scores, a.C, label, share * kept[h]);
    }
  }
  int64_t wide = std::max(at.K, a.B);
  dense_backward(flat + at.gate_weight, at.F, at.K, a.B, inputs.data(), gate, at.K, gradient + at.gate_weight,
                 gradient + at.gate_bias, d_pooled, a.feature_stride, scratch.rows(wide), scratch.results(wide));
  if (mine.usage) {
    move_usage(at, mine, joint, a.B);
    return loss / a.B;
  }
  for (int64_t h = 0; h < a.H; h++)
    for (int64_t b = 0; mine.in_use[h] && b < a.B; b++)
      for (int64_t f = 0; f < at.F; f++)
        d_pooling[h] += d_pooled[b * a.feature_stride + f] * a.features[h][b * a.feature_stride + f];
  posterior_gradient(at, mine, p, d_q, d_kept, d_pooling, gradient + at.posterior);
  return loss / a.B;
}

}  // namespace fedmoe
