// Gradients of single examples, clipped and summed: what DP-SGD adds its noise to.
//
// A dense layer's gradient is the outer product of its output's gradient and its input: its norm is the product of
// their norms, and the clipped sum over examples is one matrix product with rescaled rows. It is never formed. The
// other layers' gradients are, for one example at a time.
#pragma once
#include "chain.h"
#include "losses.h"

namespace fedmoe {

constexpr int64_t TOGETHER = 64;  // examples whose inputs and gradients by outputs are held at a time

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

struct Clipping {
  double norm;
  int64_t per_tensor;      // each parameter by itself, or all of them together
  const uint8_t* trained;  // (parameters): the others count for nothing

  // What is left of a gradient of this squared norm; nothing where it is not finite.
  float share(double squared) const {
    if (!std::isfinite(squared)) return 0.f;
    return squared > norm * norm ? norm / std::sqrt(squared) : 1.0;
  }
};

// The gradients by the scores of each example are given, or follow from its label: those of the cross-entropy.
struct Targets {
  const float* d_scores;  // (examples, outputs), or null
  const int64_t* labels;
  const float* offset;  // (outputs) that are added to the scores, or null
};

class ClippedSums {
 public:
  ClippedSums(const Chain& plain, int64_t lowest, const int64_t* sizes, int64_t num_params, const Clipping& how)
      : chain(plain), lowest(lowest), sizes(sizes), num_params(num_params), how(how), offsets(num_params, -1) {
    chain.factored = true;
    for (int64_t l = 0; l < chain.count; l++) {
      const Layer& a = chain.layers[l];
      if (a.kind != DENSE) continue;
      offsets[a.weight] = records;
      if (a.bias >= 0) offsets[a.bias] = records;
      records += TOGETHER * (a.c + a.oc);
    }
    for (int64_t j = 0; j < num_params; j++)
      if (offsets[j] < 0) formed += sizes[j];
    step = formed ? 1 : TOGETHER;
  }

  // sums (parameters) += the clipped gradients of the examples with these numbers.
  void add(const float* const* params, const std::vector<int64_t>& examples, const float* x, const Targets& targets,
           float* const* sums) {
    int64_t n = examples.size();
    for (int64_t begin = 0; begin < n; begin += TOGETHER) {
      int64_t together = std::min(TOGETHER, n - begin);
      for (int64_t slot = 0; slot < together; slot += step) {
        int64_t batch = std::min(step, together - slot);
        differentiate(params, slot, batch, examples.data() + begin + slot, x, targets);
        for (int64_t b = slot; b < slot + batch; b++) rescale(b, sums);
      }
      add_dense(together, sums);
    }
  }

 private:
  void differentiate(const float* const* params, int64_t slot, int64_t batch, const int64_t* examples,
                     const float* inputs, const Targets& targets) {
    Scratch& scratch = *chain.scratch;
    const Layer& last = chain.layers[chain.count - 1];
    Tape tape{scratch.floats(11, Tape::size(chain.layers, chain.count, batch)), batch};
    float* dy = scratch.floats(12, batch * last.out_stride());
    std::vector<const float*> x(batch);
    for (int64_t b = 0; b < batch; b++) x[b] = inputs + examples[b] * chain.layers[0].in_size();
    chain.forward(params, x.data(), tape);
    for (int64_t b = 0; b < batch; b++) {
      float* d = dy + b * last.out_stride();
      int64_t outputs = last.out_size();
      if (targets.d_scores) {
        memcpy(d, targets.d_scores + examples[b] * outputs, outputs * sizeof(float));
        continue;
      }
      memcpy(d, tape.output(chain.layers, chain.count - 1) + b * last.out_stride(), outputs * sizeof(float));
      for (int64_t c = 0; targets.offset && c < outputs; c++) d[c] += targets.offset[c];
      cross_entropy(&d, outputs, targets.labels[examples[b]], 1.f);
    }
    std::vector<float*> grads(num_params);
    float* gradient = scratch.floats(10, formed);
    for (int64_t j = 0; j < num_params; j++) {
      grads[j] = gradient;
      if (offsets[j] < 0) gradient += sizes[j];
    }
    for (int64_t l = 0; l < chain.count; l++)
      if (chain.layers[l].kind == DENSE) grads[chain.layers[l].weight] = record(chain.layers[l], slot);
    clear_embeddings(chain, grads.data(), sizes);
    chain.backward(params, grads.data(), x.data(), tape, dy, nullptr, lowest);
  }

  // An example's input of a dense layer, and behind it the gradient by its output.
  float* record(const Layer& a, int64_t slot) const {
    return chain.scratch->floats(13, records) + offsets[a.weight] + slot * (a.c + a.oc);
  }

  // Once its norm is known: what was formed is added, and what will be a row of a product is shortened.
  void rescale(int64_t slot, float* const* sums) {
    std::vector<double> squares(num_params);
    double whole = 0;
    float* gradient = chain.scratch->floats(10, formed);
    for (int64_t j = 0; j < num_params; gradient += offsets[j] < 0 ? sizes[j] : 0, j++)
      if (how.trained[j] && offsets[j] < 0) whole += squares[j] = squared_norm(gradient, sizes[j]);
    for (int64_t l = lowest; l < chain.count; l++) {
      const Layer& a = chain.layers[l];
      if (a.kind != DENSE) continue;
      const float* x = record(a, slot);
      double of_output = squared_norm(x + a.c, a.oc);
      if (how.trained[a.weight]) whole += squares[a.weight] = of_output * squared_norm(x, a.c);
      if (a.bias >= 0 && how.trained[a.bias]) whole += squares[a.bias] = of_output;
    }
    gradient = chain.scratch->floats(10, formed);
    for (int64_t j = 0; j < num_params; gradient += offsets[j] < 0 ? sizes[j] : 0, j++) {
      if (!how.trained[j] || offsets[j] >= 0) continue;
      float share = how.share(how.per_tensor ? squares[j] : whole);
      for (int64_t i = 0; share && i < sizes[j]; i++) sums[j][i] += share * gradient[i];
    }
    for (int64_t l = lowest; l < chain.count; l++) {
      const Layer& a = chain.layers[l];
      if (a.kind != DENSE) continue;
      float *x = record(a, slot), *d = x + a.c;
      float of_bias = a.bias >= 0 && how.trained[a.bias] ? how.share(how.per_tensor ? squares[a.bias] : whole) : 0.f;
      for (int64_t o = 0; of_bias && o < a.oc; o++) sums[a.bias][o] += of_bias * d[o];
      float share = how.trained[a.weight] ? how.share(how.per_tensor ? squares[a.weight] : whole) : 0.f;
      if (!share) memset(x, 0, (a.c + a.oc) * sizeof(float));  // 0 times infinity would be NaN
      for (int64_t o = 0; share < 1.f && o < a.oc; o++) d[o] *= share;
    }
  }

  void add_dense(int64_t together, float* const* sums) {
    std::vector<const float*> inputs(together);
    std::vector<float*> rows;
    for (int64_t l = lowest; l < chain.count; l++) {
      const Layer& a = chain.layers[l];
      if (a.kind != DENSE || !how.trained[a.weight]) continue;
      for (int64_t b = 0; b < together; b++) inputs[b] = record(a, b);
      rows.resize(a.oc);
      for (int64_t o = 0; o < a.oc; o++) rows[o] = sums[a.weight] + o * a.c;
      combine_all<true>(inputs[0] + a.c, a.c + a.oc, 1, together, inputs.data(), a.c, rows.data(), a.oc);
    }
  }

  Chain chain;
  int64_t lowest;
  const int64_t* sizes;
  int64_t num_params;
  Clipping how;
  std::vector<int64_t> offsets;  // of a dense layer's records; -1 where the gradient is formed
  int64_t records = 0, formed = 0, step;
};

}  // namespace fedmoe
