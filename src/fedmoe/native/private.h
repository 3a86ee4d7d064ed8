// Gradients of single examples, clipped and summed: what DP-SGD adds its noise to.
#pragma once
#include "chain.h"

namespace fedmoe {

static double squared_norm(const float* g, int64_t n) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int64_t k = 0; k < 16; k++) lanes[k] += g[i + k] * g[i + k];
  double total = 0;
  for (; i < n; i++) total += (double)g[i] * g[i];
  for (float lane : lanes) total += lane;
  return total;
}

// sum += what is left of g when it is shortened to `clip`; nothing where its norm is not finite.
static void add_shortened(float* sum, const float* g, int64_t n, double squared, double clip) {
  if (!std::isfinite(squared)) return;
  float scale = squared > clip * clip ? clip / std::sqrt(squared) : 1.0;
  for (int64_t i = 0; i < n; i++) sum[i] += scale * g[i];
}

struct Clipping {
  double norm;
  int64_t per_tensor;      // each parameter by itself, or all of them together
  const uint8_t* trained;  // (parameters): the others count for nothing
};

// One example after another: its gradient is there once, in `gradient`, and is gone with the next one.
static void add_clipped(const Chain& chain, int64_t lowest, const float* const* params, const int64_t* sizes,
                        int64_t num_params, const float* x, const float* d_scores, const Clipping& how, float* gradient,
                        float* const* sums) {
  const Layer& last = chain.layers[chain.count - 1];
  Tape tape{chain.scratch->floats(11, Tape::size(chain.layers, chain.count, 1)), 1};
  std::vector<float*> grads(num_params);
  for (int64_t j = 0; j < num_params; gradient += sizes[j++]) grads[j] = gradient;
  chain.forward(params, &x, tape);
  float* dy = chain.scratch->floats(12, last.out_stride());
  memcpy(dy, d_scores, last.out_size() * sizeof(float));
  clear_embeddings(chain, grads.data(), sizes);
  chain.backward(params, grads.data(), &x, tape, dy, nullptr, lowest);
  std::vector<double> squares(num_params);
  double whole = 0;
  for (int64_t j = 0; j < num_params; j++)
    if (how.trained[j]) whole += squares[j] = squared_norm(grads[j], sizes[j]);
  for (int64_t j = 0; j < num_params; j++)
    if (how.trained[j]) add_shortened(sums[j], grads[j], sizes[j], how.per_tensor ? squares[j] : whole, how.norm);
}

}  // namespace fedmoe
