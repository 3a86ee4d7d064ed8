// Convolution with its ReLU and max pooling as one block, forward, for small images (height, width, channels): vectors run
// over output channels, a tile of a row's pixels stays in registers.
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

// The gradient by an image with its border becomes, or is added to, that by the image.
inline void without_border(const Layer& a, const float* padded_dx, float* dx, bool add) {
  for (int64_t i = 0; i < a.h; i++) {
    const float* from = padded_dx + ((i + a.ph) * a.padded_width() + a.pw) * a.c;
    float* to = dx + i * a.w * a.c;
    if (!add) memcpy(to, from, a.w * a.c * sizeof(float));
    else for (int64_t t = 0; t < a.w * a.c; t++) to[t] += from[t];
  }
}

inline void direct_forward(const Layer& a, const float* weight, const float* bias, int64_t batch, const float* const* x,
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

}  // namespace fedmoe
