// Normalisation of groups of channels (Wu and He 2018), with what is added to it and a ReLU in the same pass. A vector is
// an image of one pixel, so that one group of all its channels is a LayerNorm.
#pragma once
#include <cmath>
#include <vector>
#include "layer.h"
#include "vectors.h"

namespace fedmoe {

// sums[c] += what `value` of each pixel (whole vectors of channels, from k on) is; four sums at a time, for their latency.
template <int64_t COUNT, class Value>
inline void sum_pixels(int64_t pixels, int64_t channels, int64_t k, const Value& value, vec sums[COUNT]) {
  vec partial[4][COUNT] = {};
  int64_t p = 0;
  for (; p + 4 <= pixels; p += 4)
    for (int u = 0; u < 4; u++) value((p + u) * channels + k, partial[u]);
  for (; p < pixels; p++) value(p * channels + k, partial[0]);
  for (int n = 0; n < COUNT; n++) sums[n] = (partial[0][n] + partial[1][n]) + (partial[2][n] + partial[3][n]);
}

// Means of groups: of sums per channel, each over so many pixels.
inline void mean_of_groups(const Layer& a, const float* of_channel, float* of_group) {
  int64_t width = a.c / a.groups;
  for (int64_t g = 0; g < a.groups; g++) {
    double total = 0;
    for (int64_t i = 0; i < width; i++) total += of_channel[g * width + i];
    of_group[g] = total / (width * a.h * a.w);
  }
}

inline int lanes_from(int64_t k, int64_t channels) { return channels - k < LANES ? channels - k : LANES; }

// Per channel, in whole vectors.
struct NormRoom {
  float *sums, *more, *scale, *shift, *mean, *d_weight, *d_bias;
  NormRoom(const Layer& a, Scratch& scratch) {
    int64_t width = round_up(a.c, LANES);
    float* room = scratch.floats(7, 7 * width);
    for (float** part : {&sums, &more, &scale, &shift, &mean, &d_weight, &d_bias}) *part = room, room += width;
  }
};

// Each channel's mean, and the mean and 1 / standard deviation of each group: in two passes, since a variance that is
// the difference of two large numbers would lose what PyTorch's keeps.
inline void norm_statistics(const Layer& a, const float* x, const NormRoom& room, float* mean, float* inverse) {
  int64_t width = a.c / a.groups, pixels = a.h * a.w;
  for (int64_t k = 0; k < a.c; k += LANES) {
    int lanes = lanes_from(k, a.c);
    vec total;
    sum_pixels<1>(pixels, a.c, k, [&](int64_t at, vec* sums) { sums[0] += load_first(x + at, lanes); }, &total);
    store(room.sums + k, total);
  }
  mean_of_groups(a, room.sums, mean);
  for (int64_t c = 0; c < a.c; c++) room.mean[c] = mean[c / width];
  for (int64_t k = 0; k < a.c; k += LANES) {
    int lanes = lanes_from(k, a.c);
    vec total, middle = load<vec>(room.mean + k);
    sum_pixels<1>(pixels, a.c, k, [&](int64_t at, vec* sums) {
      vec away = load_first(x + at, lanes) - middle;
      sums[0] += away * away;
    }, &total);
    store(room.sums + k, total);
  }
  mean_of_groups(a, room.sums, inverse);
  for (int64_t g = 0; g < a.groups; g++) inverse[g] = 1 / std::sqrt(inverse[g] + a.epsilon());
}

// y = relu(norm(x) + added) of one example; `statistics` (2, groups) are kept for the way back.
inline void norm_forward(const Layer& a, const float* weight, const float* bias, const float* x, const float* added,
                         float* y, float* statistics, Scratch& scratch) {
  NormRoom room(a, scratch);
  float *mean = statistics, *inverse = statistics + a.groups;
  norm_statistics(a, x, room, mean, inverse);
  int64_t width = a.c / a.groups;
  for (int64_t c = 0; c < a.c; c++) {
    room.scale[c] = (weight ? weight[c] : 1.f) * inverse[c / width];
    room.shift[c] = bias ? bias[c] : 0.f;
  }
  for (int64_t k = 0; k < a.c; k += LANES) {
    vec scale = load<vec>(room.scale + k), shift = load<vec>(room.shift + k), middle = load<vec>(room.mean + k);
    int lanes = lanes_from(k, a.c);
    for (int64_t at = k; at < a.out_size(); at += a.c) {
      vec v = (load_first(x + at, lanes) - middle) * scale + shift;
      if (added) v += load_first(added + at, lanes);
      if (a.relu) v = v <= vec{} ? vec{} : v;
      store_first(y + at, v, lanes);
    }
  }
}

// The gradient by relu(norm(x) + added) -> by norm(x) + added, in place; and by x, to which it is added where ADD.
// d_weight and d_bias (whole vectors) grow by this example's share.
template <bool ADD>
void norm_backward(const Layer& a, const float* weight, const float* x, const float* y, const float* statistics, float* dy,
                   float* dx, const NormRoom& room) {
  int64_t width = a.c / a.groups, pixels = a.h * a.w;
  const float *mean = statistics, *inverse = statistics + a.groups;
  for (int64_t c = 0; c < a.c; c++) room.mean[c] = mean[c / width];
  for (int64_t k = 0; k < a.c; k += LANES) {
    int lanes = lanes_from(k, a.c);
    vec totals[2], middle = load<vec>(room.mean + k);
    sum_pixels<2>(pixels, a.c, k, [&](int64_t at, vec* sums) {
      vec d = load_first(dy + at, lanes);
      if (a.relu) {
        d = load_first(y + at, lanes) <= vec{} ? vec{} : d;
        store_first(dy + at, d, lanes);
      }
      sums[0] += d;
      sums[1] += d * (load_first(x + at, lanes) - middle);
    }, totals);
    store(room.sums + k, totals[0]), store(room.more + k, totals[1]);
  }
  for (int64_t c = 0; c < a.c; c++) {
    room.d_bias[c] += room.sums[c], room.d_weight[c] += room.more[c] * inverse[c / width];
    float w = weight ? weight[c] : 1.f;
    room.sums[c] *= w, room.more[c] *= w;
    room.scale[c] = w * inverse[c / width];
  }
  // dx = scale d - (mean of w d + (x - mean) inverse^2 mean of w d (x - mean)) inverse, means over a group.
  std::vector<float> of_group(2 * a.groups);
  mean_of_groups(a, room.sums, of_group.data());
  mean_of_groups(a, room.more, of_group.data() + a.groups);
  for (int64_t c = 0; c < a.c; c++) {
    float spread = inverse[c / width];
    room.shift[c] = -of_group[c / width] * spread;
    room.more[c] = -of_group[a.groups + c / width] * spread * spread * spread;
  }
  if (!dx) return;
  for (int64_t k = 0; k < a.c; k += LANES) {
    vec scale = load<vec>(room.scale + k), shift = load<vec>(room.shift + k), slope = load<vec>(room.more + k),
        middle = load<vec>(room.mean + k);
    int lanes = lanes_from(k, a.c);
    for (int64_t at = k; at < a.out_size(); at += a.c) {
      vec d = load_first(dy + at, lanes) * scale + shift + (load_first(x + at, lanes) - middle) * slope;
      store_first(dx + at, ADD ? load_first(dx + at, lanes) + d : d, lanes);
    }
  }
}

// The backward pass of a batch, example by example.
class NormBackward {
 public:
  NormBackward(const Layer& a, const float* weight, const float* const* x, const float* y, const float* statistics,
               float* dy, Scratch& scratch)
      : a(a), weight(weight), x(x), y(y), statistics(statistics), dy(dy), room(a, scratch) {
    memset(room.d_weight, 0, a.c * sizeof(float)), memset(room.d_bias, 0, a.c * sizeof(float));
  }
  void example(int64_t b, float* dx, bool add) const {
    auto one = add ? norm_backward<true> : norm_backward<false>;
    int64_t at = b * a.out_stride();
    one(a, weight, x[b], y + at, statistics + 2 * b * a.groups, dy + at, dx, room);
  }
  void finish(float* d_weight, float* d_bias) const {
    if (d_weight) memcpy(d_weight, room.d_weight, a.c * sizeof(float));
    if (d_bias) memcpy(d_bias, room.d_bias, a.c * sizeof(float));
  }

 private:
  const Layer& a;
  const float* weight;
  const float* const* x;
  const float *y, *statistics;
  float* dy;
  NormRoom room;
};

}  // namespace fedmoe
