// Chains of layers for cohorts of clients: forward, backward and whole local training, one client after another.
//
// Inputs of images are (height, width, channels); parameters and their gradients are in PyTorch's layout. Each client
// is computed by itself, so nothing depends on who else is in the cohort. The caller holds no lock meanwhile.
#include <algorithm>
#include <cmath>
#include "conv.h"
#include "dense.h"
#include "layer.h"

namespace fedmoe {

// The outputs of all layers for one batch, and where maxima were: what the backward pass needs.
struct Tape {
  float* memory;
  int64_t batch;

  static int64_t size(const Layer* layers, int64_t count, int64_t batch) {  // in floats
    int64_t total = 0;
    for (int64_t l = 0; l < count; l++) total += of_layer(layers[l], batch);
    return total;
  }
  static int64_t of_layer(const Layer& a, int64_t batch) {
    if (!a.remembers_places()) return batch * a.out_stride();
    return batch * a.out_stride() + round_up(batch * a.out_size(), 4) / 4 + 4;  // and a vector of bytes more
  }
  float* output(const Layer* layers, int64_t l) const { return memory + size(layers, l, batch); }
  uint8_t* places(const Layer* layers, int64_t l) const {
    return (uint8_t*)(output(layers, l) + batch * layers[l].out_stride());
  }
};

struct Chain {
  const Layer* layers;
  int64_t count;
  Scratch* scratch;

  void forward(const float* const* params, const float* const* x, const Tape& tape) const {
    std::vector<const float*> in(x, x + tape.batch);
    for (int64_t l = 0; l < count; l++) {
      const Layer& a = layers[l];
      float* y = tape.output(layers, l);
      forward_layer(a, params, tape.batch, in.data(), y, tape.places(layers, l));
      for (int64_t b = 0; b < tape.batch; b++) in[b] = y + b * a.out_stride();
    }
  }

  // dy of the last layer is (batch, its out_stride) and is overwritten; dx (batch, in_size) may be null.
  void backward(const float* const* params, float* const* grads, const float* const* x, const Tape& tape, float* dy,
                float* dx) const {
    int64_t widest = 0;
    for (int64_t l = 0; l < count; l++) widest = std::max(widest, layers[l].out_stride());
    float* buffers[2] = {scratch->floats(8, tape.batch * widest), scratch->floats(9, tape.batch * widest)};
    std::vector<const float*> in(tape.batch);
    for (int64_t l = count - 1; l >= 0; l--) {
      bool first = l == 0;
      for (int64_t b = 0; b < tape.batch; b++)
        in[b] = first ? x[b] : tape.output(layers, l - 1) + b * layers[l - 1].out_stride();
      float* down = first ? dx : buffers[l % 2];
      int64_t down_stride = first ? layers[0].in_size() : layers[l - 1].out_stride();
      backward_layer(layers[l], params, grads, tape.batch, in.data(), tape.output(layers, l), tape.places(layers, l), dy,
                     down, down_stride);
      dy = down;
    }
  }

  void forward_layer(const Layer& a, const float* const* params, int64_t batch, const float* const* x, float* y,
                     uint8_t* places) const;
  void backward_layer(const Layer& a, const float* const* params, float* const* grads, int64_t batch,
                      const float* const* x, const float* y, const uint8_t* places, float* dy, float* dx,
                      int64_t dx_stride) const;
};

static const float* param(const float* const* params, int64_t index) { return index < 0 ? nullptr : params[index]; }
static float* param(float* const* params, int64_t index) { return index < 0 ? nullptr : params[index]; }

static void max_pool(const Layer& a, const float* x, float* y, uint8_t* places) {
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      for (int64_t c = 0; c < a.c; c++) {
        const float* window = x + (i * a.sh * a.w + j * a.sw) * a.c + c;
        float best = window[0];
        int64_t at = 0;
        for (int64_t u = 1; u < a.kh * a.kw; u++) {
          float v = window[((u / a.kw) * a.w + u % a.kw) * a.c];
          if (v > best || v != v) { best = v; at = u; }
        }
        y[(i * a.ow + j) * a.c + c] = best;
        places[(i * a.ow + j) * a.c + c] = (uint8_t)at;
      }
}

static void average_pool(const Layer& a, const float* x, float* y) {
  float share = 1.f / (a.kh * a.kw);
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      for (int64_t c = 0; c < a.c; c++) {
        float total = 0;
        for (int64_t u = 0; u < a.kh * a.kw; u++)
          total += x[((i * a.sh + u / a.kw) * a.w + j * a.sw + u % a.kw) * a.c + c];
        y[(i * a.ow + j) * a.c + c] = total * share;
      }
}

// dx += what each pooled pixel got, at its maximum or spread over its window.
static void pool_backward(const Layer& a, const uint8_t* places, const float* dy, float* dx) {
  memset(dx, 0, a.in_size() * sizeof(float));
  float share = 1.f / (a.kh * a.kw);
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      for (int64_t c = 0; c < a.c; c++) {
        int64_t pixel = (i * a.ow + j) * a.c + c;
        float* window = dx + (i * a.sh * a.w + j * a.sw) * a.c + c;
        for (int64_t u = 0; u < a.kh * a.kw; u++) {
          float part = a.kind == AVERAGE_POOL ? dy[pixel] * share : u == places[pixel] ? dy[pixel] : 0.f;
          window[((u / a.kw) * a.w + u % a.kw) * a.c] += part;
        }
      }
}

static float elementwise(int64_t kind, float x) {
  if (kind == SIGMOID) return 1.f / (1.f + std::exp(-x));
  if (kind == TANH) return std::tanh(x);
  return x <= 0 ? 0.f : x;
}
static float elementwise_slope(int64_t kind, float y) {  // of the output
  if (kind == SIGMOID) return y * (1.f - y);
  if (kind == TANH) return 1.f - y * y;
  return y <= 0 ? 0.f : 1.f;
}

void Chain::forward_layer(const Layer& a, const float* const* params, int64_t batch, const float* const* x, float* y,
                          uint8_t* places) const {
  const float *weight = param(params, a.weight), *bias = param(params, a.bias);
  if (a.kind == CONV) return conv_forward(a, weight, bias, batch, x, y, a.out_stride(), places, *scratch);
  if (a.kind == DENSE) dense_forward(weight, bias, a.c, a.oc, batch, x, y, a.out_stride());
  for (int64_t b = 0; b < batch; b++) {
    float* out = y + b * a.out_stride();
    if (a.kind == DENSE) {
      if (a.relu) for (int64_t i = 0; i < a.oc; i++) out[i] = out[i] <= 0 ? 0.f : out[i];
    } else if (a.kind == MAX_POOL) {
      max_pool(a, x[b], out, places + b * a.out_size());
    } else if (a.kind == AVERAGE_POOL) {
      average_pool(a, x[b], out);
    } else if (a.kind == TO_CHANNELS_FIRST) {
      for (int64_t p = 0; p < a.h * a.w; p++)
        for (int64_t c = 0; c < a.c; c++) out[c * a.h * a.w + p] = x[b][p * a.c + c];
    } else if (a.kind == EMBEDDING_MEAN) {  // x holds c row numbers as floats
      memset(out, 0, a.oc * sizeof(float));
      for (int64_t t = 0; t < a.c; t++)
        for (int64_t i = 0; i < a.oc; i++) out[i] += weight[(int64_t)x[b][t] * a.oc + i];
      for (int64_t i = 0; i < a.oc; i++) out[i] /= a.c;
    } else {
      for (int64_t i = 0; i < a.out_size(); i++) out[i] = elementwise(a.kind, x[b][i]);
    }
  }
}

void Chain::backward_layer(const Layer& a, const float* const* params, float* const* grads, int64_t batch,
                           const float* const* x, const float* y, const uint8_t* places, float* dy, float* dx,
                           int64_t dx_stride) const {
  const float* weight = param(params, a.weight);
  float *d_weight = param(grads, a.weight), *d_bias = param(grads, a.bias);
  int64_t stride = a.out_stride();
  if (a.kind == CONV)
    return conv_backward(a, weight, batch, x, dy, stride, places, d_weight, d_bias, dx, dx_stride, *scratch);
  if (a.kind == DENSE) {
    if (a.relu)
      for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < a.oc; i++) dy[b * stride + i] = y[b * stride + i] <= 0 ? 0.f : dy[b * stride + i];
    int64_t rows = std::max(a.oc, batch);
    return dense_backward(weight, a.c, a.oc, batch, x, dy, stride, d_weight, d_bias, dx, dx_stride, scratch->rows(rows),
                          scratch->results(rows));
  }
  if (a.kind == EMBEDDING_MEAN) {  // its input are words: they have no gradient
    for (int64_t b = 0; b < batch; b++)
      for (int64_t t = 0; t < a.c; t++)
        for (int64_t i = 0; i < a.oc; i++) d_weight[(int64_t)x[b][t] * a.oc + i] += dy[b * stride + i] / a.c;
    return;
  }
  for (int64_t b = 0; b < batch && dx; b++) {
    float *up = dy + b * stride, *down = dx + b * dx_stride;
    if (a.kind == MAX_POOL || a.kind == AVERAGE_POOL) {
      pool_backward(a, places + b * a.out_size(), up, down);
    } else if (a.kind == TO_CHANNELS_FIRST) {
      for (int64_t p = 0; p < a.h * a.w; p++)
        for (int64_t c = 0; c < a.c; c++) down[p * a.c + c] = up[c * a.h * a.w + p];
    } else if (a.kind == RELU) {
      for (int64_t i = 0; i < a.out_size(); i++) down[i] = y[b * stride + i] <= 0 ? 0.f : up[i];
    } else {
      for (int64_t i = 0; i < a.out_size(); i++) down[i] = up[i] * elementwise_slope(a.kind, y[b * stride + i]);
    }
  }
}

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

static void clear_embeddings(const Chain& chain, float* const* grads, const int64_t* sizes) {
  for (int64_t l = 0; l < chain.count; l++)
    if (chain.layers[l].kind == EMBEDDING_MEAN)
      memset(grads[chain.layers[l].weight], 0, sizes[chain.layers[l].weight] * sizeof(float));
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
  const int64_t *order, *ends;
  int64_t steps, steps_before;
};

static double train_one(const Net* nets, int64_t num_nets, const Client& client, int64_t num_weights,
                        const Optimizer& optimizer) {
  static thread_local Scratch scratch;
  float* gradient = scratch.floats(10, num_weights);
  int64_t in_size = nets[0].layers[0].in_size(), classes = nets[0].layers[nets[0].count - 1].out_size();
  std::vector<Tape> tapes(num_nets);
  std::vector<float*> dy(num_nets), scores(num_nets);
  std::vector<std::vector<const float*>> params(num_nets);
  std::vector<std::vector<float*>> grads(num_nets);
  std::vector<const float*> rows;
  for (int64_t m = 0; m < num_nets; m++)
    for (int64_t j = 0; j < nets[m].num_params; j++) {
      params[m].push_back(client.flat + nets[m].offsets[j]);
      grads[m].push_back(gradient + nets[m].offsets[j]);
    }
  double total = 0;
  for (int64_t step = 0, begin = 0; step < client.steps; begin = client.ends[step++]) {
    int64_t batch = client.ends[step] - begin;
    rows.resize(batch);
    for (int64_t b = 0; b < batch; b++) rows[b] = client.x + client.order[begin + b] * in_size;
    for (int64_t m = 0; m < num_nets; m++) {
      Chain chain{nets[m].layers, nets[m].count, &scratch};
      const Layer& last = chain.layers[chain.count - 1];
      tapes[m] = Tape{scratch.floats(20 + m, Tape::size(chain.layers, chain.count, batch)), batch};
      chain.forward(params[m].data(), rows.data(), tapes[m]);
      dy[m] = scratch.floats(30 + m, batch * last.out_stride());
      memcpy(dy[m], tapes[m].output(chain.layers, chain.count - 1), batch * last.out_stride() * sizeof(float));
    }
    double loss = 0;
    for (int64_t b = 0; b < batch; b++) {
      int64_t row = client.order[begin + b];
      for (int64_t m = 0; m < num_nets; m++) scores[m] = dy[m] + b * nets[m].layers[nets[m].count - 1].out_stride();
      const float* given = client.given ? client.given + row : nullptr;
      loss += num_nets == 1 ? cross_entropy(scores.data(), classes, client.y[row], 1.f / batch)
                            : mixture(scores.data(), classes, client.y[row], given, 1.f / batch);
    }
    total += loss / batch;
    for (int64_t m = 0; m < num_nets; m++) {
      Chain chain{nets[m].layers, nets[m].count, &scratch};
      clear_embeddings(chain, grads[m].data(), nets[m].sizes);
      chain.backward(params[m].data(), grads[m].data(), rows.data(), tapes[m], dy[m], nullptr);
    }
    descend(optimizer, client.flat, gradient, client.mean, client.square, num_weights, client.steps_before + step + 1);
  }
  return total;
}

}  // namespace fedmoe

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

// d_scores (items, batch, outputs) -> grads[item * num_params + j] and, unless null, dx (items, batch, in_size).
void fedmoe_backward(const Layer* layers, int64_t count, int64_t items, int64_t batch, const float* const* x,
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
                   dx ? dx + s * batch * layers[0].in_size() : nullptr);
  }
}

// Local training of clients, one after another: by cross-entropy of one network, or of a mixture of several. Writes the
// sum of each client's mean losses of its batches.
void fedmoe_train(const Net* nets, int64_t num_nets, const Client* clients, int64_t count, int64_t num_weights,
                  const Optimizer* optimizer, double* losses) {
  for (int64_t c = 0; c < count; c++) losses[c] = train_one(nets, num_nets, clients[c], num_weights, *optimizer);
}
}
