// 3x3 convolutions with stride 1 and padding 1 by Winograd's F(2x2, 3x3) (Lavin and Gray 2016), forward and backward.
//
// Outputs come in tiles of 2x2, each from 4x4 inputs, as 16 products of transformed numbers instead of 36: for each of 16
// places one matrix product over channels. Examples are (height, width, channels), channels a multiple of a vector.
//
// Accuracy, to first order: |error| <= (channels + 12) eps |A^T| (|G| |g| |G^T| * |B^T| |d| |B|) |A|, element by element, with
// the matrices of the paper, weights g and inputs d: what is really added up. An infinity may become NaN in its tile.
#pragma once
#include <algorithm>
#include <vector>
#include "layer.h"
#include "products.h"
#include "vectors.h"

namespace fedmoe {

constexpr int POINTS = 16;

// The points of a block of tiles: for each of POINTS (channels / LANES, tiles, LANES), so that a tile is a constant away
// from the next. From point to point not a power of two, which would put all points on the same cache lines.
constexpr int64_t point_step(int64_t block, int64_t channels) { return block * channels + LANES; }

// How an image (h, w, c) falls into tiles; the last row and column of them may be cut.
struct Tiling {
  int64_t h, w, down, across;
  Tiling(int64_t h, int64_t w) : h(h), w(w), down((h + 1) / 2), across((w + 1) / 2) {}
  int64_t count() const { return down * across; }
};

// v[4][4] = B^T d B: 4x4 pixels become 16 points.
inline void to_points(vec d[4][4]) {
  for (int j = 0; j < 4; j++) {
    vec a = d[0][j] - d[2][j], b = d[1][j] + d[2][j], c = d[2][j] - d[1][j], e = d[1][j] - d[3][j];
    d[0][j] = a, d[1][j] = b, d[2][j] = c, d[3][j] = e;
  }
  for (int i = 0; i < 4; i++) {
    vec a = d[i][0] - d[i][2], b = d[i][1] + d[i][2], c = d[i][2] - d[i][1], e = d[i][1] - d[i][3];
    d[i][0] = a, d[i][1] = b, d[i][2] = c, d[i][3] = e;
  }
}

// The 4x4 pixels around one tile, zero beyond the image.
inline void load_tile(const Tiling& at, const float* x, int64_t c, int64_t ti, int64_t tj, vec d[4][4]) {
  int64_t top = 2 * ti - 1, left = 2 * tj - 1;
  if (top >= 0 && left >= 0 && top + 4 <= at.h && left + 4 <= at.w) {
    const float* q = x + (top * at.w + left) * c;
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++) d[i][j] = load<vec>(q + (i * at.w + j) * c);
    return;
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      bool inside = top + i >= 0 && top + i < at.h && left + j >= 0 && left + j < at.w;
      d[i][j] = inside ? load<vec>(x + ((top + i) * at.w + left + j) * c) : vec{};
    }
}

// Tiles [begin, begin + count) of a row of examples -> points (POINTS, block, c).
inline void input_points(const Tiling& at, const float* const* x, int64_t c, int64_t begin, int64_t count, int64_t block, float* points) {
  Cursor tile(at.down, at.across, begin);
  for (int64_t t = 0; t < count; t++, tile.advance()) {
    for (int64_t k = 0; k < c; k += LANES) {
      vec d[4][4];
      load_tile(at, x[tile.n] + k, c, tile.i, tile.j, d);
      to_points(d);
      for (int p = 0; p < POINTS; p++) store(points + p * point_step(block, c) + k * block + t * LANES, d[p / 4][p % 4]);
    }
  }
}

// A^T m A: 16 points become 2x2 pixels.
inline void output_tile(const float* m, int64_t step, vec y[2][2]) {
  vec r[2][4];
  for (int j = 0; j < 4; j++) {
    vec m0 = load<vec>(m + j * step), m1 = load<vec>(m + (4 + j) * step), m2 = load<vec>(m + (8 + j) * step),
        m3 = load<vec>(m + (12 + j) * step);
    r[0][j] = m0 + m1 + m2, r[1][j] = m1 - m2 - m3;
  }
  for (int i = 0; i < 2; i++) y[i][0] = r[i][0] + r[i][1] + r[i][2], y[i][1] = r[i][1] - r[i][2] - r[i][3];
}

// y[n] (h, w, o) = the convolution of x[n] (h, w, c) with the transformed weights u (POINTS, c, o); room: (2, POINTS,
// block, max(c, o)). ADD: to what is there.
template <bool ADD>
void winograd(const Tiling& at, int64_t batch, const float* const* x, int64_t c, const float* u, int64_t o, float* const* y,
              int64_t block, float* room) {
  float *v = room, *m = room + POINTS * point_step(block, c);
  int64_t total = batch * at.count();
  for (int64_t begin = 0; begin < total; begin += block) {
    int64_t count = std::min(block, total - begin);
    input_points(at, x, c, begin, count, block, v);
    for (int p = 0; p < POINTS; p++) panel_products(count, block, v + p * point_step(block, c), c, u + p * c * o, o, m + p * point_step(block, o));
    Cursor tile(at.down, at.across, begin);
    for (int64_t t = 0; t < count; t++, tile.advance()) {
      int64_t top = 2 * tile.i, left = 2 * tile.j;
      for (int64_t k = 0; k < o; k += LANES) {
        vec out[2][2];
        output_tile(m + k * block + t * LANES, point_step(block, o), out);
        for (int i = 0; i < 2 && top + i < at.h; i++)
          for (int j = 0; j < 2 && left + j < at.w; j++) {
            float* to = y[tile.n] + ((top + i) * at.w + left + j) * o + k;
            store(to, ADD ? load<vec>(to) + out[i][j] : out[i][j]);
          }
      }
    }
  }
}

// Gradients by the 2x2 outputs of tiles -> A dy A^T; the pixels of a cut tile that are not there are zero.
inline void output_points(const Tiling& at, const float* const* dy, int64_t o, int64_t begin, int64_t count, int64_t block, float* points) {
  Cursor tile(at.down, at.across, begin);
  for (int64_t t = 0; t < count; t++, tile.advance()) {
    int64_t top = 2 * tile.i, left = 2 * tile.j;
    for (int64_t k = 0; k < o; k += LANES) {
      vec d[2][2] = {};
      for (int i = 0; i < 2 && top + i < at.h; i++)
        for (int j = 0; j < 2 && left + j < at.w; j++)
          d[i][j] = load<vec>(dy[tile.n] + ((top + i) * at.w + left + j) * o + k);
      vec r[4][2];
      for (int j = 0; j < 2; j++) r[0][j] = d[0][j], r[1][j] = d[0][j] + d[1][j], r[2][j] = d[0][j] - d[1][j], r[3][j] = -d[1][j];
      float* to = points + k * block + t * LANES;
      for (int i = 0; i < 4; i++) {
        store(to + (4 * i) * point_step(block, o), r[i][0]);
        store(to + (4 * i + 1) * point_step(block, o), r[i][0] + r[i][1]);
        store(to + (4 * i + 2) * point_step(block, o), r[i][0] - r[i][1]);
        store(to + (4 * i + 3) * point_step(block, o), -r[i][1]);
      }
    }
  }
}

// g (POINTS, c, o) += what the tiles of a row of examples give.
inline void winograd_weight_gradient(const Tiling& at, int64_t batch, const float* const* x, int64_t c,
                                     const float* const* dy, int64_t o, float* g, int64_t block, float* room) {
  float *v = room, *d = room + POINTS * point_step(block, c);
  int64_t total = batch * at.count();
  for (int64_t begin = 0; begin < total; begin += block) {
    int64_t count = std::min(block, total - begin);
    input_points(at, x, c, begin, count, block, v);
    output_points(at, dy, o, begin, count, block, d);
    for (int p = 0; p < POINTS; p++)
      panel_outers(count, block, v + p * point_step(block, c), c, d + p * point_step(block, o), o, g + p * c * o);
  }
}

// Which of the 16 points a kernel that is turned around has at point p.
inline int turned(int p) {
  auto other = [](int i) { return i == 0 ? 3 : i == 3 ? 0 : i; };
  return 4 * other(p / 4) + other(p % 4);
}

// G w G^T of every kernel in w (o, c, 3, 3) -> u (POINTS, c, o); or, for the gradient by the input, of the kernels turned
// around -> u (POINTS, o, c).
inline void weight_points(const float* w, int64_t c, int64_t o, bool backward, float* u) {
  int64_t rows = backward ? o : c, wide = backward ? c : o, row_step = backward ? 9 * c : 9, step = backward ? 9 : 9 * c;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < wide; k += LANES) {
      float kernels[9][LANES];
      for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 9; i++) kernels[i][lane] = w[r * row_step + (k + lane) * step + i];
      vec g[4][3];
      for (int j = 0; j < 3; j++) {
        vec a = load<vec>(kernels[j]), b = load<vec>(kernels[3 + j]), d = load<vec>(kernels[6 + j]);
        g[0][j] = a, g[1][j] = 0.5f * (a + d + b), g[2][j] = 0.5f * (a + d - b), g[3][j] = d;
      }
      for (int i = 0; i < 4; i++) {
        vec outer = g[i][0] + g[i][2];
        const vec points[4] = {g[i][0], 0.5f * (outer + g[i][1]), 0.5f * (outer - g[i][1]), g[i][2]};
        for (int j = 0; j < 4; j++) {
          int p = backward ? turned(4 * i + j) : 4 * i + j;
          store(u + (p * rows + r) * wide + k, points[j]);
        }
      }
    }
}

// G^T g G: points (POINTS, c, o) of the gradient -> d_weight (o, c, 3, 3).
inline void gradient_of_points(const float* g, int64_t c, int64_t o, float* d_weight) {
  auto back = [](vec a, vec b, vec d, vec e, vec out[3]) {
    out[0] = a + 0.5f * (b + d), out[1] = 0.5f * (b - d), out[2] = 0.5f * (b + d) + e;
  };
  for (int64_t r = 0; r < c; r++)
    for (int64_t k = 0; k < o; k += LANES) {
      vec point[POINTS], rows[4][3];
      for (int p = 0; p < POINTS; p++) point[p] = load<vec>(g + (p * c + r) * o + k);
      for (int i = 0; i < 4; i++) back(point[4 * i], point[4 * i + 1], point[4 * i + 2], point[4 * i + 3], rows[i]);
      float kernels[9][LANES];
      for (int j = 0; j < 3; j++) {
        vec column[3];
        back(rows[0][j], rows[1][j], rows[2][j], rows[3][j], column);
        for (int i = 0; i < 3; i++) store(kernels[3 * i + j], column[i]);
      }
      for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 9; i++) d_weight[((k + lane) * c + r) * 9 + i] = kernels[i][lane];
    }
}

constexpr int64_t BLOCK = 32;  // tiles that are transformed together

inline float* points_room(const Layer& a, Scratch& scratch) {
  return scratch.floats(2, POINTS * (point_step(BLOCK, a.c) + point_step(BLOCK, a.oc)));
}

// The convolution with its weights ready.
struct WinogradForward {
  const Layer& a;
  float *u, *room;

  WinogradForward(const Layer& a, const float* weight, Scratch& scratch)
      : a(a), u(scratch.floats(0, POINTS * a.c * a.oc)), room(points_room(a, scratch)) {
    weight_points(weight, a.c, a.oc, false, u);
  }
  void operator()(int64_t batch, const float* const* x, float* const* y) const {
    winograd<false>(Tiling(a.h, a.w), batch, x, a.c, u, a.oc, y, BLOCK, room);
  }
};

// Both gradients, of examples in several parts; the one by the weights is there in the end.
struct WinogradBackward {
  const Layer& a;
  float *u, *g, *room;
  bool add;

  WinogradBackward(const Layer& a, const float* weight, bool input_too, bool add, Scratch& scratch)
      : a(a), u(scratch.floats(0, POINTS * a.c * a.oc)), g(scratch.floats(1, POINTS * a.c * a.oc)),
        room(points_room(a, scratch)), add(add) {
    memset(g, 0, POINTS * a.c * a.oc * sizeof(float));
    if (input_too) weight_points(weight, a.c, a.oc, true, u);
  }
  void operator()(int64_t batch, const float* const* x, const float* const* dy, float* const* dx) const {
    Tiling at(a.h, a.w);
    winograd_weight_gradient(at, batch, x, a.c, dy, a.oc, g, BLOCK, room);
    if (dx) (add ? winograd<true> : winograd<false>)(at, batch, dy, a.oc, u, a.c, dx, BLOCK, room);
  }
  void finish(float* d_weight) const { gradient_of_points(g, a.c, a.oc, d_weight); }
};

}  // namespace fedmoe
