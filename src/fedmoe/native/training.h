// Whole local training of one client: batches, forward, loss, backward and optimizer step.
#pragma once
#include "chain.h"
#include "fedmix_objective.h"
#include "losses.h"
#include "moved_ranges.h"
#include "optimizer.h"
#include "routed_objective.h"

namespace fedmoe {

// One network at work on one batch after another of one client.
struct Member {
  const Net& net;
  Chain chain;
  int which;
  std::vector<const float*> params;
  std::vector<float*> grads;
  Tape tape{};
  float* scores = nullptr;  // (batch, stride()); their gradients, once the loss is known

  // `unused` has room for the gradient of any frozen parameter: nobody reads it.
  Member(const Net& net, int which, const float* flat, float* gradient, float* unused, Scratch& scratch)
      : net(net), chain{net.layers, net.count, &scratch}, which(which) {
    for (int64_t j = 0; j < net.num_params; j++) {
      bool frozen = net.offsets[j] < 0;
      params.push_back(frozen ? net.constants[j] : flat + net.offsets[j]);
      grads.push_back(frozen ? unused : gradient + net.offsets[j]);
    }
  }
  const Layer& last() const { return net.layers[net.count - 1]; }
  int64_t stride() const { return last().out_stride(); }
  const float* features() const { return tape.output(net.layers, last().source); }

  void forward(const std::vector<const float*>& rows) {
    int64_t batch = rows.size();
    tape = Tape{chain.scratch->floats(20 + 2 * which, Tape::size(net.layers, net.count, batch)), batch};
    chain.forward(params.data(), rows.data(), tape);
    scores = chain.scratch->floats(21 + 2 * which, batch * stride());
    memcpy(scores, tape.output(net.layers, net.count - 1), batch * stride() * sizeof(float));
  }
  void backward(const std::vector<const float*>& rows, const FeatureGradient& more = {}) {
    chain.backward(params.data(), grads.data(), rows.data(), tape, scores, nullptr, net.lowest, more);
  }
  void zero_gradient() {
    for (int64_t j = 0; j < net.num_params; j++) memset(grads[j], 0, net.sizes[j] * sizeof(float));
  }
};

// What a step works on: the batch's row numbers, where its examples are, and where the gradient goes.
struct Batch {
  const int64_t* order;
  const std::vector<const float*>& rows;
  float* gradient;
  Scratch& scratch;
};

// Cross-entropy of one network, or a mixture of two, over a batch.
struct ClassifierStep {
  double operator()(std::vector<Member>& nets, const Client& client, const Batch& at) const {
    int64_t batch = at.rows.size(), classes = nets[0].last().out_size();
    std::vector<float*> scores(nets.size());
    for (Member& net : nets) net.forward(at.rows);
    double loss = 0;
    for (int64_t b = 0; b < batch; b++) {
      for (size_t m = 0; m < nets.size(); m++) scores[m] = nets[m].scores + b * nets[m].stride();
      for (int64_t c = 0; client.logit_offset && c < classes; c++) scores[0][c] += client.logit_offset[c];
      const float* of_row = client.score_offset ? client.score_offset + at.order[b] * classes : nullptr;
      for (int64_t c = 0; of_row && c < classes; c++) scores[0][c] += of_row[c];
      const float* second = client.second ? client.second + at.order[b] : nullptr;
      int64_t label = client.y[at.order[b]];
      float weight = client.class_weight ? client.class_weight[label] : 1.f;
      loss += weight * (nets.size() == 1 ? cross_entropy(scores.data(), classes, label, weight / batch)
                                         : mixture(scores.data(), classes, label, second, weight / batch));
    }
    for (Member& net : nets) net.backward(at.rows);
    return loss / batch;
  }
};

struct MixedWeightsSettings {
  int64_t with_model;  // whether w is trained too
};

// Two copies of one network: v, a client's own, and w. The cross-entropy of the weights alpha v + (1 - alpha) w moves v,
// that of w moves w.
struct MixedWeightsStep {
  const MixedWeightsSettings& settings;

  double operator()(std::vector<Member>& nets, const Client& client, const Batch& at) const {
    float alpha = **(const float* const*)client.inputs;
    mix(nets[0], nets[1].net, client.flat, alpha, at.scratch);
    double loss = gradient_of(nets[0], client, at, alpha);
    return settings.with_model ? loss + gradient_of(nets[1], client, at, 1.f) : loss;
  }

  // From now on `own` computes with the mixed weights; its gradient still goes where v is.
  static void mix(Member& own, const Net& model, const float* flat, float alpha, Scratch& scratch) {
    int64_t total = 0;
    for (int64_t j = 0; j < model.num_params; j++) total += model.sizes[j];
    float* mixed = scratch.floats(16, total);
    for (int64_t j = 0; j < model.num_params; mixed += model.sizes[j++]) {
      if (own.net.offsets[j] < 0) continue;  // a constant is the same in both
      const float *v = flat + own.net.offsets[j], *w = flat + model.offsets[j];
      for (int64_t i = 0; i < model.sizes[j]; i++) mixed[i] = alpha * v[i] + (1 - alpha) * w[i];
      own.params[j] = mixed;
    }
  }

  static double gradient_of(Member& net, const Client& client, const Batch& at, float share) {
    int64_t batch = at.rows.size(), classes = net.last().out_size();
    net.forward(at.rows);
    double loss = 0;
    for (int64_t b = 0; b < batch; b++) {
      float* scores = net.scores + b * net.stride();
      loss += cross_entropy(&scores, classes, client.y[at.order[b]], share / batch);
    }
    net.backward(at.rows);
    return loss / batch;
  }
};

// Copies of one network, each with the cross-entropy of every example times that copy's weight for it.
struct WeightedCopiesStep {
  double operator()(std::vector<Member>& copies, const Client& client, const Batch& at) const {
    const float* weights = *(const float* const*)client.inputs;  // (examples, copies)
    int64_t batch = at.rows.size(), classes = copies[0].last().out_size();
    double loss = 0;
    for (size_t m = 0; m < copies.size(); m++) {
      copies[m].forward(at.rows);
      for (int64_t b = 0; b < batch; b++) {
        float *scores = copies[m].scores + b * copies[m].stride(), weight = weights[at.order[b] * copies.size() + m];
        loss += weight * cross_entropy(&scores, classes, client.y[at.order[b]], weight / batch);
      }
      copies[m].backward(at.rows);
    }
    return loss / batch;
  }
};

// FedMix's experts, gate and q together over a batch; a pruned expert is neither computed nor trained.
struct FedMixStep {
  const FedMixSettings& settings;

  double operator()(std::vector<Member>& experts, const Client& client, const Batch& at) const {
    const FedMixInputs& inputs = *(const FedMixInputs*)client.inputs;
    const Layer &last = experts[0].last(), &before = experts[0].net.layers[last.source];
    ExpertOutputs outputs{(int64_t)experts.size(), (int64_t)at.rows.size(), last.out_size(), {}, {},
                          last.out_stride(), before.out_stride()};
    for (size_t h = 0; h < experts.size(); h++) {
      if (inputs.in_use[h]) experts[h].forward(at.rows);
      outputs.scores.push_back(experts[h].scores);
      outputs.features.push_back(inputs.in_use[h] ? experts[h].features() : nullptr);
    }
    Posterior posterior(client.flat, settings, inputs, outputs.H);
    float* d_pooled = at.scratch.floats(15, outputs.B * outputs.feature_stride);
    double loss = fedmix_gradient(settings, inputs, posterior, outputs, at.order, client.y, client.flat, at.gradient,
                                  d_pooled, at.scratch);
    for (size_t h = 0; h < experts.size(); h++) {
      if (inputs.in_use[h]) experts[h].backward(at.rows, {d_pooled, posterior.pooling[h]});
      else experts[h].zero_gradient();
    }
    return loss;
  }
};

// Experts that a client was sent and the router that weighs them, together over a batch.
struct RoutedStep {
  const RoutedSettings& settings;

  double operator()(std::vector<Member>& experts, const Client& client, const Batch& at) const {
    const RoutedInputs& inputs = *(const RoutedInputs*)client.inputs;
    int64_t batch = at.rows.size(), held = experts.size(), classes = experts[0].last().out_size();
    Router router{settings, inputs.router, at.scratch};
    router.forward(inputs, at.order, batch);
    for (Member& expert : experts) expert.forward(at.rows);
    std::vector<float*> scores(held);
    std::vector<float> joint(held);
    double loss = 0;
    for (int64_t b = 0; b < batch; b++) {
      for (int64_t h = 0; h < held; h++) scores[h] = experts[h].scores + b * experts[h].stride();
      float* logits = router.logits + b * settings.M;
      if (settings.over_sent) leave_sent(logits, joint.data(), inputs.expert_ids, held, settings.M);
      loss += routed_mixture(scores.data(), logits, joint.data(), inputs.expert_ids, held, settings.M, classes,
                             client.y[at.order[b]], 1.f / batch);
    }
    router.descend(batch);
    for (Member& expert : experts) expert.backward(at.rows);
    return loss / batch;
  }
};

static int64_t largest_constant(const Net* nets, int64_t num_nets) {
  int64_t largest = 0;
  for (int64_t m = 0; m < num_nets; m++)
    for (int64_t j = 0; j < nets[m].num_params; j++)
      if (nets[m].offsets[j] < 0) largest = std::max(largest, nets[m].sizes[j]);
  return largest;
}

template <class Step>
double train_one(const Net* nets, int64_t num_nets, const Client& client, int64_t num_weights,
                 const Optimizer& optimizer, const Step& loss_of) {
  static thread_local Scratch scratch;
  float* gradient = scratch.floats(10, num_weights + largest_constant(nets, num_nets));
  std::vector<Member> members;
  for (int64_t m = 0; m < num_nets; m++)
    members.emplace_back(nets[m], m, client.flat, gradient, gradient + num_weights, scratch);
  MovedRanges ranges(nets, num_nets, client, optimizer);
  std::vector<const float*> rows;
  double total = 0;
  for (int64_t step = 0, begin = 0; step < client.steps; begin = client.ends[step++]) {
    const int64_t* order = client.order + begin;
    rows.resize(client.ends[step] - begin);
    for (size_t b = 0; b < rows.size(); b++) rows[b] = client.x + order[b] * nets[0].layers[0].in_size();
    ranges.clear_words(gradient);
    total += loss_of(members, client, Batch{order, rows, gradient, scratch});
    double rate = client.rates ? client.rates[step] : optimizer.rate;
    move_weights(client, optimizer, ranges.moved, gradient, client.steps_before + step + 1, rate);
  }
  return total;
}

}  // namespace fedmoe
