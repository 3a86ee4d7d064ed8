// Convolution with its ReLU and max pooling as one block, for small images: examples are (height, width, channels).
//
// Forward: vectors run over output channels, a tile of a row's pixels stays in registers. Backward: a pooled output has
// its gradient at one pixel of its window, and ReLU cuts more, so both gradients visit only the pixels that survive.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>
#include "layer.h"
#include "vectors.h"

namespace fedmoe {

constexpr uint8_t DEAD = 255;  // ReLU cut the whole window

template <class V, int NV, int U>
void conv_tile(const float* x, int64_t row, int64_t step, const float* w, int64_t channels, int64_t kh, int64_t run,
               const float* bias, float* y) {
  constexpr int N = sizeof(V) / 4;
  V acc[U][NV];
  for (int u = 0; u < U; u++)
    for (int n = 0; n < NV; n++) acc[u][n] = load<V>(bias + n * N);
  for (int64_t i = 0; i < kh; i++)
    for (int64_t t = 0; t < run; t++) {
      const float* q = x + i * row + t;
      V weight[NV];
      for (int n = 0; n < NV; n++) weight[n] = load<V>(w + (i * run + t) * channels + n * N);
      for (int u = 0; u < U; u++) {
        V value = splat<V>(q[u * step]);
        for (int n = 0; n < NV; n++) acc[u][n] += value * weight[n];
      }
    }
  for (int u = 0; u < U; u++)
    for (int n = 0; n < NV; n++) store(y + u * channels + n * N, acc[u][n]);
}

typedef void (*Tile)(const float*, int64_t, int64_t, const float*, int64_t, int64_t, int64_t, const float*, float*);

template <class V, int NV, int... U> Tile tile_of(int pixels, std::integer_sequence<int, U...>) {
  static const Tile tiles[] = {conv_tile<V, NV, U + 1>...};
  return tiles[pixels - 1];
}

// All pixels of one example for the NV vectors of channels from `first` on; y is (ch, cw, channels).
template <class V, int NV, int LARGEST>
void conv_channels(const Layer& a, const float* x, int64_t row, const float* w, int64_t channels, const float* bias,
                   float* y) {
  int tiles = (a.cw + LARGEST - 1) / LARGEST, width = (a.cw + tiles - 1) / tiles;
  int64_t step = a.sw * a.c;
  for (int64_t i = 0; i < a.ch; i++)
    for (int64_t j = 0; j < a.cw; j += width) {
      int pixels = j + width <= a.cw ? width : a.cw - j;
      Tile tile = tile_of<V, NV>(pixels, std::make_integer_sequence<int, LARGEST>());
      tile(x + i * a.sh * row + j * step, row, step, w, channels, a.kh, a.kw * a.c, bias, y + (i * a.cw + j) * channels);
    }
}

#if defined(__AVX512F__)
// Up to 8 channels fill half a vector. So two rows of pixels share one: channels of the upper row in even lanes, of the
// lower in odd ones. `pairs` holds each float of a row beside the one `sh` rows below it; weights and bias come twice.
template <int U>
void conv_pair_tile(const float* pairs, int64_t row, int64_t step, const float* w, int64_t kh, int64_t run, vec bias,
                    float* upper, float* lower) {
  typedef double Doubles __attribute__((vector_size(64)));
  vec acc[U];
  for (int u = 0; u < U; u++) acc[u] = bias;
  for (int64_t i = 0; i < kh; i++)
    for (int64_t t = 0; t < run; t++) {
      vec weight = load<vec>(w + (i * run + t) * 16);
      for (int u = 0; u < U; u++) {
        double pair;
        memcpy(&pair, pairs + 2 * (i * row + t + u * step), sizeof pair);
        acc[u] += (vec)(pair - Doubles{}) * weight;
      }
    }
  const __m512i apart = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  for (int u = 0; u < U; u++) {
    vec sorted = (vec)_mm512_permutexvar_ps(apart, (__m512)acc[u]);
    memcpy(upper + u * 8, &sorted, 32);
    memcpy(lower + u * 8, (const float*)&sorted + 8, 32);
  }
}

typedef void (*PairTile)(const float*, int64_t, int64_t, const float*, int64_t, int64_t, vec, float*, float*);

template <int... U> PairTile pair_tile_of(int pixels, std::integer_sequence<int, U...>) {
  static const PairTile tiles[] = {conv_pair_tile<U + 1>...};
  return tiles[pixels - 1];
}

inline void conv_few_channels(const Layer& a, const float* x, const float* w, const float* bias, float* y,
                              Scratch& scratch) {
  constexpr int LARGEST = 14;
  int64_t row = a.padded_width() * a.c, run = a.kw * a.c, step = a.sw * a.c;
  int64_t rows = a.h + 2 * a.ph - a.sh, even = a.ch / 2 * 2;
  float* pairs = scratch.floats(5, std::max<int64_t>(rows, 1) * row * 2);
  float* twice = scratch.floats(6, (a.kh * run + 1) * 16);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t t = 0; t < row; t++) {
      pairs[2 * (r * row + t)] = x[r * row + t];
      pairs[2 * (r * row + t) + 1] = x[(r + a.sh) * row + t];
    }
  for (int64_t t = 0; t < a.kh * run; t++)
    for (int64_t o = 0; o < 16; o++) twice[t * 16 + o] = w[t * 8 + o / 2];
  for (int64_t o = 0; o < 16; o++) twice[a.kh * run * 16 + o] = bias[o / 2];
  vec start = load<vec>(twice + a.kh * run * 16);
  int tiles = (a.cw + LARGEST - 1) / LARGEST, width = (a.cw + tiles - 1) / tiles;
  for (int64_t i = 0; i < even; i += 2)
    for (int64_t j = 0; j < a.cw; j += width) {
      int pixels = j + width <= a.cw ? width : a.cw - j;
      PairTile tile = pair_tile_of(pixels, std::make_integer_sequence<int, LARGEST>());
      float* upper = y + (i * a.cw + j) * 8;
      tile(pairs + 2 * (i * a.sh * row + j * step), row, step, twice, a.kh, run, start, upper, upper + a.cw * 8);
    }
  Layer last = a;  // an odd row at the end
  last.ch = a.ch - even;
  if (last.ch) conv_channels<Lanes<8>::type, 1, 14>(last, x + even * a.sh * row, row, w, 8, bias, y + even * a.cw * 8);
}
#endif

inline void conv_example(const Layer& a, const float* x, const float* w, const float* bias, float* y, Scratch& scratch) {
  int64_t channels = a.padded_channels(), row = a.padded_width() * a.c, n = 0;
#if defined(__AVX512F__)
  if (channels == 8) return conv_few_channels(a, x, w, bias, y, scratch);
#else
  (void)scratch;
  if (channels == 8) return conv_channels<Lanes<8>::type, 1, 12>(a, x, row, w, 8, bias, y);
#endif
  for (; n + 2 * LANES <= channels; n += 2 * LANES)
    conv_channels<vec, 2, LANES == 16 ? 12 : 6>(a, x, row, w + n, channels, bias + n, y + n);
  for (; n < channels; n += LANES)
    conv_channels<vec, 1, LANES == 16 ? 14 : 12>(a, x, row, w + n, channels, bias + n, y + n);
}

// y (ch, cw, channels) -> out (oh, ow, oc) without gaps, and where each maximum was. Both have room for a vector more.
template <int N> void pool_example(const Layer& a, const float* y, float* out, uint8_t* where) {
  typedef typename Lanes<N>::type V;
  typedef typename Lanes<N>::ints I;
  int64_t channels = a.padded_channels();
  for (int64_t i = 0; i < a.oh; i++)
    for (int64_t j = 0; j < a.ow; j++)
      for (int64_t c = 0; c < channels; c += N) {
        const float* window = y + ((i * a.rh * a.cw) + j * a.rw) * channels + c;
        V best = load<V>(window);
        I at = {};
        for (int64_t u = 1; u < a.qh * a.qw; u++) {
          V v = load<V>(window + ((u / a.qw) * a.cw + u % a.qw) * channels);
          I better = (v > best) | (v != v);  // NaN is the largest, as in PyTorch
          best = better ? v : best;
          at = better ? I{} + (int32_t)u : at;
        }
        if (a.relu) {
          I dead = best <= V{};
          best = dead ? V{} : best;
          at = dead ? I{} + (int32_t)DEAD : at;
        }
        // Lanes past the last channel fall on the next pixel, which comes later, or on the room behind the last.
        int64_t start = (i * a.ow + j) * a.oc + c;
        store(out + start, best);
        typename Lanes<N>::bytes places = __builtin_convertvector(at, typename Lanes<N>::bytes);
        memcpy(where + start, &places, N);
      }
}

// Zeros around an image, where the convolution pads.
inline const float* with_border(const Layer& a, const float* x, float* scratch) {
  if (!a.ph && !a.pw) return x;
  int64_t row = a.padded_width() * a.c;
  memset(scratch, 0, a.padded_size() * sizeof(float));
  for (int64_t i = 0; i < a.h; i++) memcpy(scratch + (i + a.ph) * row + a.pw * a.c, x + i * a.w * a.c, a.w * a.c * 4);
  return scratch;
}

inline void conv_forward(const Layer& a, const float* weight, const float* bias, int64_t batch, const float* const* x,
                         float* out, int64_t out_stride, uint8_t* where, Scratch& scratch) {
  int64_t channels = a.padded_channels(), run = a.kw * a.c;
  float* w = scratch.floats(0, a.kh * run * channels);  // (kh, kw, c, channels)
  float* b = scratch.floats(1, channels);
  float* y = scratch.floats(2, a.ch * a.cw * channels);
  float* border = scratch.floats(3, a.padded_size() + LANES);
  memset(w, 0, a.kh * run * channels * sizeof(float));
  memset(b, 0, channels * sizeof(float));
  if (bias) memcpy(b, bias, a.oc * sizeof(float));
  for (int64_t o = 0; o < a.oc; o++)
    for (int64_t c = 0; c < a.c; c++)
      for (int64_t i = 0; i < a.kh; i++)
        for (int64_t j = 0; j < a.kw; j++)
          w[(i * run + j * a.c + c) * channels + o] = weight[((o * a.c + c) * a.kh + i) * a.kw + j];
  for (int64_t n = 0; n < batch; n++) {
    conv_example(a, with_border(a, x[n], border), w, b, y, scratch);
    if (channels == 8) pool_example<8>(a, y, out + n * out_stride, where + n * a.out_size());
    else pool_example<LANES>(a, y, out + n * out_stride, where + n * a.out_size());
  }
}

// The pixels of the convolution's output that have a gradient, of one example and one channel.
struct Survivors {
  int64_t count;
  int32_t* at;   // offset in the (padded) image of the window that the pixel saw
  float* value;  // its gradient
};

inline void find_survivors(const Layer& a, int64_t o, const float* dy, const uint8_t* where, const int32_t* base,
                           const int32_t* offset, Survivors& s) {
  s.count = 0;
  for (int64_t p = 0; p < a.oh * a.ow; p++) {
    uint8_t u = where[p * a.oc + o];
    s.at[s.count] = base[p] + offset[u];
    s.value[s.count] = u == DEAD ? 0.f : dy[p * a.oc + o];
    s.count += u != DEAD;
  }
}

// The same with every pixel, zeros too: where they multiply what is not finite.
inline void find_all(const Layer& a, int64_t o, const float* dy, const uint8_t* where, Survivors& s) {
  int64_t row = a.padded_width() * a.c;
  s.count = a.ch * a.cw;
  for (int64_t p = 0; p < s.count; p++) {
    s.at[p] = (p / a.cw) * a.sh * row + (p % a.cw) * a.sw * a.c;
    s.value[p] = 0.f;
  }
  for (int64_t p = 0; p < a.oh * a.ow; p++) {
    int64_t u = where[p * a.oc + o];
    if (u == DEAD) continue;
    s.value[((p / a.ow) * a.rh + u / a.qw) * a.cw + (p % a.ow) * a.rw + u % a.qw] += dy[p * a.oc + o];
  }
}

// g[r][v] += sum over survivors of value * x[at + r * row + v * LANES]: sums stay in registers. Each example is summed by
// itself first: two short sums round less than a long one.
template <int R, int V> void add_weight_gradient(const Survivors& s, const float* x, int64_t row, float* g, int64_t g_row) {
  vec acc[R][V] = {};
  for (int64_t k = 0; k < s.count; k++) {
    vec value = splat<vec>(s.value[k]);
    const float* q = x + s.at[k];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] += value * load<vec>(q + r * row + v * LANES);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(g + r * g_row + v * LANES, load<vec>(g + r * g_row + v * LANES) + acc[r][v]);
}

// dx[at + r * row + v * LANES] += value * w[r][v]: the weights stay in registers.
template <int R, int V> void add_input_gradient(const Survivors& s, const float* w, int64_t w_row, int64_t row, float* dx) {
  vec weight[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) weight[r][v] = load<vec>(w + r * w_row + v * LANES);
  for (int64_t k = 0; k < s.count; k++) {
    vec value = splat<vec>(s.value[k]);
    float* q = dx + s.at[k];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(q + r * row + v * LANES, load<vec>(q + r * row + v * LANES) + value * weight[r][v]);
  }
}

// The same without lanes past the end of a row: a zero weight there times infinity would be NaN in a neighbour.
inline void add_input_gradient_exactly(const Survivors& s, const float* w, int64_t w_row, int64_t rows, int64_t run,
                                       int64_t row, float* dx) {
  for (int64_t k = 0; k < s.count; k++)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < run; t++) dx[s.at[k] + r * row + t] += s.value[k] * w[r * w_row + t];
}

// Both work on blocks of R rows and V vectors of the kernel, so that a block fits the registers.
template <int R, class Block> void over_vectors(int64_t vectors, const Block& block) {
  int64_t v = 0;
  for (; v + 2 <= vectors; v += 2) block(std::integral_constant<int, R>(), std::integral_constant<int, 2>(), v);
  if (v < vectors) block(std::integral_constant<int, R>(), std::integral_constant<int, 1>(), v);
}
template <class Block> void over_kernel(int64_t rows, int64_t vectors, const Block& block) {
  int64_t r = 0;
  auto at = [&](int64_t start) { return [&block, start](auto R, auto V, int64_t v) { block(R, V, start, v); }; };
  for (; r + 5 <= rows; r += 5) over_vectors<5>(vectors, at(r));
  for (; r + 3 <= rows; r += 3) over_vectors<3>(vectors, at(r));
  for (; r < rows; r++) over_vectors<1>(vectors, at(r));
}

inline void conv_backward(const Layer& a, const float* weight, int64_t batch, const float* const* x, const float* dy,
                          int64_t dy_stride, const uint8_t* where, float* d_weight, float* d_bias, float* dx,
                          int64_t dx_stride, Scratch& scratch) {
  int64_t run = a.kw * a.c, vectors = round_up(run, LANES) / LANES, k_row = vectors * LANES, k_size = a.kh * k_row;
  int64_t row = a.padded_width() * a.c, pixels = a.ch * a.cw + a.oh * a.ow;
  float* w = scratch.floats(0, a.oc * k_size);  // (oc, kh, kw * c padded)
  float* g = scratch.floats(1, a.oc * k_size);
  float* border = scratch.floats(2, a.padded_size() + 2 * LANES);
  float* padded_dx = scratch.floats(3, a.padded_size() + 2 * LANES);
  float* value = scratch.floats(4, pixels + 1);
  int32_t* at = scratch.ints(0, pixels + 1);
  int32_t* base = scratch.ints(1, a.oh * a.ow);
  int32_t offset[256] = {};
  for (int64_t u = 0; u < a.qh * a.qw; u++) offset[u] = (u / a.qw) * a.sh * row + (u % a.qw) * a.sw * a.c;
  for (int64_t p = 0; p < a.oh * a.ow; p++)
    base[p] = (p / a.ow) * a.rh * a.sh * row + (p % a.ow) * a.rw * a.sw * a.c;
  memset(g, 0, a.oc * k_size * sizeof(float));
  memset(w, 0, a.oc * k_size * sizeof(float));
  bool weight_finite = true;
  if (dx) {
    weight_finite = all_finite(weight, a.oc * a.c * a.kh * a.kw);
    for (int64_t o = 0; o < a.oc; o++)
      for (int64_t c = 0; c < a.c; c++)
        for (int64_t i = 0; i < a.kh; i++)
          for (int64_t j = 0; j < a.kw; j++)
            w[o * k_size + i * k_row + j * a.c + c] = weight[((o * a.c + c) * a.kh + i) * a.kw + j];
  }
  std::vector<double> bias_sums(a.oc);  // many small terms: float would lose what PyTorch's pairwise sums keep
  for (int64_t n = 0; n < batch; n++) {
    const float* image = with_border(a, x[n], border);
    bool finite = weight_finite && all_finite(x[n], a.in_size());
    bool exact = !weight_finite || !all_finite(dy + n * dy_stride, a.out_size());
    if (dx) memset(padded_dx, 0, a.padded_size() * sizeof(float));
    for (int64_t o = 0; o < a.oc; o++) {
      Survivors s{0, at, value};
      if (finite) find_survivors(a, o, dy + n * dy_stride, where + n * a.out_size(), base, offset, s);
      else find_all(a, o, dy + n * dy_stride, where + n * a.out_size(), s);
      bias_sums[o] += sum(s.value, s.count);
      over_kernel(a.kh, vectors, [&](auto R, auto V, int64_t r, int64_t v) {
        add_weight_gradient<R, V>(s, image + r * row + v * LANES, row, g + o * k_size + r * k_row + v * LANES, k_row);
      });
      if (dx && exact) add_input_gradient_exactly(s, w + o * k_size, k_row, a.kh, run, row, padded_dx);
      else if (dx) over_kernel(a.kh, vectors, [&](auto R, auto V, int64_t r, int64_t v) {
        add_input_gradient<R, V>(s, w + o * k_size + r * k_row + v * LANES, k_row, row, padded_dx + r * row + v * LANES);
      });
    }
    if (dx)
      for (int64_t i = 0; i < a.h; i++)
        memcpy(dx + n * dx_stride + i * a.w * a.c, padded_dx + (i + a.ph) * row + a.pw * a.c, a.w * a.c * 4);
  }
  for (int64_t o = 0; d_bias && o < a.oc; o++) d_bias[o] = (float)bias_sums[o];
  for (int64_t o = 0; o < a.oc; o++)
    for (int64_t c = 0; c < a.c; c++)
      for (int64_t i = 0; i < a.kh; i++)
        for (int64_t j = 0; j < a.kw; j++)
          d_weight[((o * a.c + c) * a.kh + i) * a.kw + j] = g[o * k_size + i * k_row + j * a.c + c];
}

}  // namespace fedmoe
