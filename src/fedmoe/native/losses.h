// The losses of one example, and their gradients by the scores of the networks.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fedmoe {

// Scores become log-probabilities.
static void log_softmax(float* z, int64_t classes) {
  float largest = z[0], sum = 0;
  for (int64_t c = 1; c < classes; c++) largest = z[c] > largest || z[c] != z[c] ? z[c] : largest;
  for (int64_t c = 0; c < classes; c++) sum += std::exp(z[c] - largest);
  float log_sum = std::log(sum) + largest;
  for (int64_t c = 0; c < classes; c++) z[c] -= log_sum;
}

// Log-probabilities become the gradient of minus `weight` times the one at the label.
static void softmax_gradient(float* z, int64_t classes, int64_t label, float weight) {
  for (int64_t c = 0; c < classes; c++) z[c] = weight * (std::exp(z[c]) - (c == label ? 1.f : 0.f));
}

static float log_sigmoid(float t) { return std::min(t, 0.f) - std::log1p(std::exp(-std::fabs(t))); }

// One example's loss; `scores` of each network become the gradient of `share` times it.
static float cross_entropy(float* const* scores, int64_t classes, int64_t label, float share) {
  log_softmax(scores[0], classes);
  float loss = -scores[0][label];
  softmax_gradient(scores[0], classes, label, share);
  return loss;
}

// -log(h first + (1 - h) second) at the label with h = sigmoid(gate): networks are (first, gate) with the second's
// log-probability given, or (first, gate, second).
static float mixture(float* const* scores, int64_t classes, int64_t label, const float* second_given, float share) {
  float t = scores[1][0];
  log_softmax(scores[0], classes);
  if (!second_given) log_softmax(scores[2], classes);
  float first = log_sigmoid(t) + scores[0][label];
  float second = log_sigmoid(-t) + (second_given ? *second_given : scores[2][label]);
  float larger = first > second || first != first ? first : second;
  float log_mixed = std::isinf(larger) ? larger : larger + std::log1p(std::exp(-std::fabs(first - second)));
  float responsibility = std::exp(first - log_mixed), h = 1.f / (1.f + std::exp(-t));
  softmax_gradient(scores[0], classes, label, share * responsibility);
  scores[1][0] = share * (h - responsibility);
  if (!second_given) softmax_gradient(scores[2], classes, label, share * (1 - responsibility));
  return -log_mixed;
}

}  // namespace fedmoe
