// What Python calls: chains of layers for cohorts of clients, one client after another.
//
// Each client is computed by itself, so nothing depends on who else is in the cohort. The caller holds no lock meanwhile.
#include "private.h"
#include "training.h"

using namespace fedmoe;

extern "C" {

// Images (count, channels, pixels) -> (count, pixels, channels).
void fedmoe_channels_last(const float* x, float* images, int64_t count, int64_t channels, int64_t pixels) {
  for (int64_t n = 0; n < count; n++, x += channels * pixels, images += channels * pixels)
    for (int64_t p = 0; p < pixels; p++)
      for (int64_t c = 0; c < channels; c++) images[p * channels + c] = x[c * pixels + p];
}

int64_t fedmoe_tape_size(const Layer* layers, int64_t count, int64_t batch) { return Tape::size(layers, count, batch); }

// For each item its examples x[item] (batch, in_size), parameters params[item * num_params + j] and scores (batch, outputs).
// With a tape (items, tape size) the whole batch is kept for the backward pass; without, a few examples run at a time.
void fedmoe_forward(const Layer* layers, int64_t count, int64_t items, int64_t batch, const float* const* x,
                    const float* const* params, int64_t num_params, float* scores, float* tape) {
  static thread_local Scratch scratch;
  Chain chain{layers, count, &scratch};
  const Layer& last = layers[count - 1];
  int64_t chunk = tape ? batch : std::min<int64_t>(batch, 32), step = Tape::size(layers, count, chunk);
  std::vector<const float*> rows(chunk);
  for (int64_t s = 0; s < items; s++)
    for (int64_t begin = 0; begin < batch; begin += chunk) {
      int64_t n = std::min(chunk, batch - begin);
      for (int64_t b = 0; b < n; b++) rows[b] = x[s] + (begin + b) * layers[0].in_size();
      Tape here{tape ? tape + s * step : scratch.floats(11, step), n};
      chain.forward(params + s * num_params, rows.data(), here);
      for (int64_t b = 0; b < n; b++)
        memcpy(scores + (s * batch + begin + b) * last.out_size(), here.output(layers, count - 1) + b * last.out_stride(),
               last.out_size() * sizeof(float));
    }
}

// d_scores (items, batch, outputs) -> grads[item * num_params + j] and, unless null, dx (items, batch, in_size). Layers
// before `lowest` have no gradients.
void fedmoe_backward(const Layer* layers, int64_t count, int64_t lowest, int64_t items, int64_t batch, const float* const* x,
                     const float* const* params, const int64_t* param_size, int64_t num_params, const float* tape,
                     const float* d_scores, float* const* grads, float* dx) {
  static thread_local Scratch scratch;
  Chain chain{layers, count, &scratch};
  const Layer& last = layers[count - 1];
  std::vector<const float*> rows(batch);
  float* dy = scratch.floats(12, batch * last.out_stride());
  int64_t step = Tape::size(layers, count, batch);
  for (int64_t s = 0; s < items; s++) {
    for (int64_t b = 0; b < batch; b++) {
      rows[b] = x[s] + b * layers[0].in_size();
      memcpy(dy + b * last.out_stride(), d_scores + (s * batch + b) * last.out_size(), last.out_size() * sizeof(float));
    }
    clear_embeddings(chain, grads + s * num_params, param_size);
    Tape here{const_cast<float*>(tape) + s * step, batch};
    chain.backward(params + s * num_params, grads + s * num_params, rows.data(), here, dy,
                   dx ? dx + s * batch * layers[0].in_size() : nullptr, lowest);
  }
}

// For each item the sum over its examples with real[item * batch + b] of their gradients, each clipped by itself, of the
// losses whose gradients d_scores (items, batch, outputs) are given, or of the cross-entropy at labels (items, batch) of
// the scores with offsets (items, outputs), which may be null. sums[item * num_params + j] start as zeros.
void fedmoe_clipped_sums(const Layer* layers, int64_t count, int64_t lowest, int64_t items, int64_t batch,
                         const float* const* x, const float* const* params, const int64_t* param_size,
                         int64_t num_params, const uint8_t* real, const float* d_scores, const int64_t* labels,
                         const float* offsets, const uint8_t* trained, double clip, int64_t per_tensor,
                         float* const* sums) {
  static thread_local Scratch scratch;
  Chain chain{layers, count, &scratch};
  int64_t outputs = layers[count - 1].out_size();
  ClippedSums clipped(chain, lowest, param_size, num_params, {clip, per_tensor, trained});
  for (int64_t s = 0; s < items; s++) {
    std::vector<int64_t> examples;
    for (int64_t b = 0; b < batch; b++)
      if (real[s * batch + b]) examples.push_back(b);
    Targets targets{d_scores ? d_scores + s * batch * outputs : nullptr, labels ? labels + s * batch : nullptr,
                    offsets ? offsets + s * outputs : nullptr};
    clipped.add(params + s * num_params, examples, x[s], targets, sums + s * num_params);
  }
}

// Local training of clients, one after another. Writes the sum of each client's mean losses of its batches. One function
// for each objective, all with the same arguments; the last points to the objective's own settings.

// Cross-entropy of one network, or of a mixture of two experts; it has no settings.
void fedmoe_train_classifier(const Net* nets, int64_t num_nets, const Client* clients, int64_t count,
                             int64_t num_weights, const Optimizer* optimizer, double* losses, const void*) {
  for (int64_t c = 0; c < count; c++)
    losses[c] = train_one(nets, num_nets, clients[c], num_weights, *optimizer, ClassifierStep{});
}

// A model of a client's own and a shared one, the first within a mixture of both.
void fedmoe_train_mixed_weights(const Net* nets, int64_t num_nets, const Client* clients, int64_t count,
                                int64_t num_weights, const Optimizer* optimizer, double* losses, const void* settings) {
  MixedWeightsStep step{*(const MixedWeightsSettings*)settings};
  for (int64_t c = 0; c < count; c++) losses[c] = train_one(nets, num_nets, clients[c], num_weights, *optimizer, step);
}

// Copies of one network; it has no settings.
void fedmoe_train_weighted_copies(const Net* nets, int64_t num_nets, const Client* clients, int64_t count,
                                  int64_t num_weights, const Optimizer* optimizer, double* losses, const void*) {
  for (int64_t c = 0; c < count; c++)
    losses[c] = train_one(nets, num_nets, clients[c], num_weights, *optimizer, WeightedCopiesStep{});
}

void fedmoe_train_fedmix(const Net* nets, int64_t num_nets, const Client* clients, int64_t count, int64_t num_weights,
                         const Optimizer* optimizer, double* losses, const void* settings) {
  FedMixStep step{*(const FedMixSettings*)settings};
  for (int64_t c = 0; c < count; c++) losses[c] = train_one(nets, num_nets, clients[c], num_weights, *optimizer, step);
}

void fedmoe_train_routed(const Net* nets, int64_t num_nets, const Client* clients, int64_t count, int64_t num_weights,
                         const Optimizer* optimizer, double* losses, const void* settings) {
  RoutedStep step{*(const RoutedSettings*)settings};
  for (int64_t c = 0; c < count; c++) losses[c] = train_one(nets, num_nets, clients[c], num_weights, *optimizer, step);
}
}
