// What Python tells of one client's training: networks, optimizer, and where everything lies.
#pragma once
#include <cstdint>
#include "layer.h"

namespace fedmoe {

struct Optimizer {
  double rate, momentum, beta1, beta2, epsilon, weight_decay;
  int64_t adam, decoupled;  // decoupled: weights decay by themselves (AdamW), else as a part of the gradient
  double proximal;          // strength of the pull towards a client's anchor
  double max_norm;          // of a client's whole gradient; 0 for no limit
  const int64_t* ranges;  // begin and end of each stretch of the flat vector that is trained; the rest stays
  int64_t num_ranges;
};

// One network among those that a client trains together: its parameters start at `offsets` of the flat vector. Where an
// offset is negative, the parameter is frozen: a constant, the same for all clients, without a gradient.
struct Net {
  const Layer* layers;
  int64_t count;
  const int64_t* offsets;
  const int64_t* sizes;
  int64_t num_params;
  const float* const* constants;
  int64_t lowest;  // the first layer with a parameter that is trained: where the backward pass ends
};

// One client's part in a call. `flat` (P) and the optimizer's state are changed in place; `order` holds the row numbers of
// all batches, `ends` where each batch ends in it.
struct Client {
  const float* x;
  const int64_t* y;
  const float* second;        // the frozen second expert's log-probability at each row's label; else null
  const float* logit_offset;  // (classes), added to the first network's scores; or null
  const float* score_offset;  // (rows, classes), added to them for each row; or null
  const float* class_weight;  // (classes): the loss of an example is multiplied by that of its label; or null
  float *flat, *mean, *square;
  const float* anchor;           // (P): the gradient of proximal / 2 |flat - anchor|^2 is added; or null
  const float* gradient_offset;  // (P), added to every gradient; or null
  const void* inputs;            // what the objective alone reads
  const int64_t *order, *ends;
  int64_t steps, steps_before;
  const double* rates;  // of each step; null: the optimizer's
};

}  // namespace fedmoe
