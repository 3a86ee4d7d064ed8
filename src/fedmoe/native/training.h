// Whole local training of one client: batches, forward, loss, backward and optimizer step.
#pragma once
#include "fedmix_objective.h"
#include "chain.h"
#include "losses.h"

namespace fedmoe {

struct Optimizer {
  double rate, momentum, beta1, beta2, epsilon;
  int64_t adam;
};

static void descend(const Optimizer& o, float* p, const float* g, float* mean, float* square, int64_t n, int64_t step) {
  if (o.adam) {
    float b1 = o.beta1, b2 = o.beta2, c1 = 1 - o.beta1, c2 = 1 - o.beta2, epsilon = o.epsilon;
    float rate = o.rate / (1 - std::pow(o.beta1, step)), correction = std::sqrt(1 - std::pow(o.beta2, step));
    for (int64_t i = 0; i < n; i++) {
      mean[i] = b1 * mean[i] + c1 * g[i];
      square[i] = b2 * square[i] + c2 * g[i] * g[i];
      p[i] -= rate * mean[i] / (std::sqrt(square[i]) / correction + epsilon);
    }
  } else {
    float rate = o.rate, momentum = o.momentum;
    if (!momentum) for (int64_t i = 0; i < n; i++) p[i] -= rate * g[i];
    else for (int64_t i = 0; i < n; i++) p[i] -= rate * (mean[i] = momentum * mean[i] + g[i]);
  }
}

// One network among those that a client trains together: its parameters start at `offsets` of the flat vector.
struct Net {
  const Layer* layers;
  int64_t count;
  const int64_t* offsets;
  const int64_t* sizes;
  int64_t num_params;
};

// One client's part in a call. `flat` (P) and the optimizer's slots are changed in place; `order` holds the row numbers of
// all batches, `ends` where each batch ends in it; `given` is the frozen second expert's log-probability at each row's
// label, where there is one.
struct Client {
  const float* x;
  const int64_t* y;
  const float* given;
  float *flat, *mean, *square;
  FedMixInputs holding;  // of a client that trains a bound
  const int64_t *order, *ends;
  int64_t steps, steps_before;
};

// One network at work on one batch after another of one client.
struct Member {
  const Net& net;
  Chain chain;
  int which;
  std::vector<const float*> params;
  std::vector<float*> grads;
  Tape tape{};
  float* scores = nullptr;  // (batch, stride()); their gradients, once the loss is known

  Member(const Net& net, int which, const float* flat, float* gradient, Scratch& scratch)
      : net(net), chain{net.layers, net.count, &scratch}, which(which) {
    for (int64_t j = 0; j < net.num_params; j++) {
      params.push_back(flat + net.offsets[j]);
      grads.push_back(gradient + net.offsets[j]);
    }
  }
  const Layer& last() const { return net.layers[net.count - 1]; }
  int64_t stride() const { return last().out_stride(); }
  const float* features() const { return tape.output(net.layers, net.count - 2); }

  void forward(const std::vector<const float*>& rows) {
    int64_t batch = rows.size();
    tape = Tape{chain.scratch->floats(20 + 2 * which, Tape::size(net.layers, net.count, batch)), batch};
    chain.forward(params.data(), rows.data(), tape);
    scores = chain.scratch->floats(21 + 2 * which, batch * stride());
    memcpy(scores, tape.output(net.layers, net.count - 1), batch * stride() * sizeof(float));
  }
  void backward(const std::vector<const float*>& rows, const FeatureGradient& more = {}) {
    clear_embeddings(chain, grads.data(), net.sizes);
    chain.backward(params.data(), grads.data(), rows.data(), tape, scores, nullptr, more);
  }
  void stand_still() {
    for (int64_t j = 0; j < net.num_params; j++) memset(grads[j], 0, net.sizes[j] * sizeof(float));
  }
};

// Cross-entropy of one network, or a mixture of two, over a batch.
static double plain_step(std::vector<Member>& nets, const Client& client, const int64_t* order,
                         const std::vector<const float*>& rows) {
  int64_t batch = rows.size(), classes = nets[0].last().out_size();
  std::vector<float*> scores(nets.size());
  for (Member& net : nets) net.forward(rows);
  double loss = 0;
  for (int64_t b = 0; b < batch; b++) {
    for (size_t m = 0; m < nets.size(); m++) scores[m] = nets[m].scores + b * nets[m].stride();
    const float* given = client.given ? client.given + order[b] : nullptr;
    loss += nets.size() == 1 ? cross_entropy(scores.data(), classes, client.y[order[b]], 1.f / batch)
                             : mixture(scores.data(), classes, client.y[order[b]], given, 1.f / batch);
  }
  for (Member& net : nets) net.backward(rows);
  return loss / batch;
}

// FedMix's experts, gate and q together over a batch; an expert that is not in use neither answers nor learns.
static double bound_step(const FedMixObjective& at, std::vector<Member>& experts, const Client& client, const int64_t* order,
                         const std::vector<const float*>& rows, float* gradient, Scratch& scratch) {
  const Layer &last = experts[0].last(), &before = experts[0].net.layers[experts[0].net.count - 2];
  Answers answers{(int64_t)experts.size(), (int64_t)rows.size(), last.out_size(), {}, {}, last.out_stride(),
                  before.out_stride()};
  for (size_t h = 0; h < experts.size(); h++) {
    if (client.holding.in_use[h]) experts[h].forward(rows);
    answers.scores.push_back(experts[h].scores);
    answers.features.push_back(client.holding.in_use[h] ? experts[h].features() : nullptr);
  }
  Posterior posterior(client.flat, at, client.holding, answers.H);
  float* d_pooled = scratch.floats(15, answers.B * answers.feature_stride);
  double loss = bound_gradient(at, client.holding, posterior, answers, order, client.y, client.flat, gradient, d_pooled,
                               scratch);
  for (size_t h = 0; h < experts.size(); h++) {
    if (client.holding.in_use[h]) experts[h].backward(rows, {d_pooled, posterior.pooling[h]});
    else experts[h].stand_still();
  }
  return loss;
}

static double train_one(const Net* nets, int64_t num_nets, const FedMixObjective* bound, const Client& client, int64_t num_weights,
                        const Optimizer& optimizer) {
  static thread_local Scratch scratch;
  float* gradient = scratch.floats(10, num_weights);
  std::vector<Member> members;
  for (int64_t m = 0; m < num_nets; m++) members.emplace_back(nets[m], m, client.flat, gradient, scratch);
  std::vector<const float*> rows;
  double total = 0;
  for (int64_t step = 0, begin = 0; step < client.steps; begin = client.ends[step++]) {
    const int64_t* order = client.order + begin;
    rows.resize(client.ends[step] - begin);
    for (size_t b = 0; b < rows.size(); b++) rows[b] = client.x + order[b] * nets[0].layers[0].in_size();
    total += bound ? bound_step(*bound, members, client, order, rows, gradient, scratch)
                   : plain_step(members, client, order, rows);
    descend(optimizer, client.flat, gradient, client.mean, client.square, num_weights, client.steps_before + step + 1);
  }
  return total;
}

}  // namespace fedmoe
