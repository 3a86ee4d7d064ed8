// A convolution of any shape as matrix products: the windows of a block of pixels are laid out as the rows of a panel.
#pragma once
#include <algorithm>
#include <vector>
#include "layer.h"
#include "products.h"

namespace fedmoe {

constexpr int64_t PIXELS = 32;  // of a block

// How windows (kh, kw, c) and outputs lie in panels: in whole vectors.
struct Windows {
  const Layer& a;
  int64_t window, wide, outputs;
  explicit Windows(const Layer& a)
      : a(a), window(a.kh * a.kw * a.c), wide(round_up(window, LANES)), outputs(round_up(a.oc, LANES)) {}

  Cursor pixel(int64_t begin) const { return Cursor(a.ch, a.cw, begin); }

  // For each row of a pixel's window that is within the image: where its floats start in a panel's row and in the image,
  // and how many they are.
  template <class Visit> void stretches(const Cursor& pixel, const Visit& visit) const {
    int64_t top = pixel.i * a.sh - a.ph, left = pixel.j * a.sw - a.pw;
    int64_t first = std::max<int64_t>(0, -left), end = std::min(a.kw, a.w - left);
    for (int64_t i = std::max<int64_t>(0, -top); i < a.kh && top + i < a.h && first < end; i++)
      visit((i * a.kw + first) * a.c, ((top + i) * a.w + left + first) * a.c, (end - first) * a.c);
  }
};

// Windows of the pixels [begin, begin + count) of a row of examples -> panel (window, pixels); zeros beyond the image.
inline void pack_windows(const Windows& in, const float* const* x, int64_t begin, int64_t count, float* row, float* panel) {
  Cursor pixel = in.pixel(begin);
  for (int64_t t = 0; t < count; t++, pixel.advance()) {
    const float* image = x[pixel.n];
    memset(row, 0, in.wide * sizeof(float));
    in.stretches(pixel, [&](int64_t to, int64_t from, int64_t n) {
      int64_t k = 0;
      for (; k + LANES <= n; k += LANES) store(row + to + k, load<vec>(image + from + k));
      if (k < n) store_first(row + to + k, load_first(image + from + k, n - k), n - k);
    });
    for (int64_t k = 0; k < in.wide; k += LANES) store(panel + k * PIXELS + t * LANES, load<vec>(row + k));
  }
}

// The other way: images += what their windows got.
inline void add_windows(const Windows& in, const float* panel, int64_t begin, int64_t count, float* row, float* const* dx) {
  Cursor pixel = in.pixel(begin);
  for (int64_t t = 0; t < count; t++, pixel.advance()) {
    float* image = dx[pixel.n];
    for (int64_t k = 0; k < in.wide; k += LANES) store(row + k, load<vec>(panel + k * PIXELS + t * LANES));
    in.stretches(pixel, [&](int64_t from, int64_t to, int64_t n) {
      int64_t k = 0;
      for (; k + LANES <= n; k += LANES) store(image + to + k, load<vec>(image + to + k) + load<vec>(row + from + k));
      for (; k < n; k++) image[to + k] += row[from + k];
    });
  }
}

// Output pixels (oc) of a block, from their panel or into it.
inline void unpack_outputs(const Windows& in, const float* panel, int64_t begin, int64_t count, float* const* y) {
  Cursor pixel = in.pixel(begin);
  for (int64_t t = 0; t < count; t++, pixel.advance()) {
    float* to = y[pixel.n] + (pixel.i * in.a.cw + pixel.j) * in.a.oc;
    for (int64_t o = 0; o < in.a.oc; o += LANES)
      store_first(to + o, load<vec>(panel + o * PIXELS + t * LANES), std::min<int64_t>(LANES, in.a.oc - o));
  }
}
inline void pack_outputs(const Windows& in, const float* const* dy, int64_t begin, int64_t count, float* panel) {
  Cursor pixel = in.pixel(begin);
  for (int64_t t = 0; t < count; t++, pixel.advance()) {
    const float* from = dy[pixel.n] + (pixel.i * in.a.cw + pixel.j) * in.a.oc;
    for (int64_t o = 0; o < in.a.oc; o += LANES)
      store(panel + o * PIXELS + t * LANES, load_first(from + o, std::min<int64_t>(LANES, in.a.oc - o)));
  }
}

// Every parameter: where it is in PyTorch's order (oc, c, kh, kw), in which column of a window, and its output.
template <class Visit> void over_weights(const Layer& a, const Visit& visit) {
  for (int64_t o = 0, at = 0; o < a.oc; o++)
    for (int64_t c = 0; c < a.c; c++)
      for (int64_t place = 0; place < a.kh * a.kw; place++) visit(at++, place * a.c + c, o);
}

struct ProductForward {
  Windows in;
  float *u, *windows, *outputs, *row;

  ProductForward(const Layer& a, const float* weight, Scratch& scratch)
      : in(a), u(scratch.floats(0, in.wide * in.outputs)), windows(scratch.floats(2, PIXELS * in.wide)),
        outputs(scratch.floats(3, PIXELS * in.outputs)), row(scratch.floats(5, in.wide)) {
    memset(u, 0, in.wide * in.outputs * sizeof(float));
    over_weights(a, [&](int64_t at, int64_t column, int64_t o) { u[column * in.outputs + o] = weight[at]; });
  }
  void operator()(int64_t batch, const float* const* x, float* const* y) const {
    int64_t total = batch * in.a.ch * in.a.cw;
    for (int64_t begin = 0; begin < total; begin += PIXELS) {
      int64_t count = std::min(PIXELS, total - begin);
      pack_windows(in, x, begin, count, row, windows);
      panel_products(count, PIXELS, windows, in.wide, u, in.outputs, outputs);
      unpack_outputs(in, outputs, begin, count, y);
    }
  }
};

struct ProductBackward {
  Windows in;
  float *u, *g, *windows, *d_windows, *outputs, *row;
  bool add;

  ProductBackward(const Layer& a, const float* weight, bool input_too, bool add, Scratch& scratch)
      : in(a), u(scratch.floats(0, in.wide * in.outputs)), g(scratch.floats(1, in.wide * in.outputs)),
        windows(scratch.floats(2, PIXELS * in.wide)), d_windows(scratch.floats(4, PIXELS * in.wide)),
        outputs(scratch.floats(3, PIXELS * in.outputs)), row(scratch.floats(5, in.wide)), add(add) {
    memset(g, 0, in.wide * in.outputs * sizeof(float));
    if (!input_too) return;
    memset(u, 0, in.wide * in.outputs * sizeof(float));
    over_weights(a, [&](int64_t at, int64_t column, int64_t o) { u[o * in.wide + column] = weight[at]; });
  }
  void operator()(int64_t batch, const float* const* x, const float* const* dy, float* const* dx) const {
    for (int64_t n = 0; dx && !add && n < batch; n++) memset(dx[n], 0, in.a.in_size() * sizeof(float));
    int64_t total = batch * in.a.ch * in.a.cw;
    for (int64_t begin = 0; begin < total; begin += PIXELS) {
      int64_t count = std::min(PIXELS, total - begin);
      pack_windows(in, x, begin, count, row, windows);
      pack_outputs(in, dy, begin, count, outputs);
      panel_outers(count, PIXELS, windows, in.wide, outputs, in.outputs, g);
      if (!dx) continue;
      panel_products(count, PIXELS, outputs, in.outputs, u, in.wide, d_windows);
      add_windows(in, d_windows, begin, count, row, dx);
    }
  }
  void finish(float* d_weight) const {
    over_weights(in.a, [&](int64_t at, int64_t column, int64_t o) { d_weight[at] = g[column * in.outputs + o]; });
  }
};

}  // namespace fedmoe
