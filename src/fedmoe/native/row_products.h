// Matrix products whose sums stay in registers: a tile of rows from the left against up to four vectors of columns.
#pragma once
#include <algorithm>
#include <utility>
#include "vectors.h"

namespace fedmoe {

constexpr int LARGEST_TILE = LANES == 16 ? 6 : 2;  // rows: with four vectors each, as many as there are registers for

// An entry of the left matrix is at[r * across + k * step], a row of the right one starts at at[k * stride].
struct Left {
  const float* at;
  int64_t across, step;
};
struct Right {
  const float* at;
  int64_t stride;
};

template <template <int> class Tile, int... R> auto tile_for(int rows, std::integer_sequence<int, R...>) {
  static decltype(&Tile<1>::run) const tiles[] = {Tile<R + 1>::run...};
  return tiles[rows - 1];
}

// Calls use(function, first row, rows) for tiles of about equal height.
template <template <int> class Tile, class Use> void in_tiles(int64_t rows, const Use& use) {
  if (!rows) return;
  int64_t tiles = (rows + LARGEST_TILE - 1) / LARGEST_TILE, height = (rows + tiles - 1) / tiles;
  for (int64_t r = 0; r < rows; r += height) {
    int here = std::min(height, rows - r);
    use(tile_for<Tile>(here, std::make_integer_sequence<int, LARGEST_TILE>()), r, here);
  }
}

template <int NV> struct OfVectors {
  template <int R> struct Tile {
    static void run(Left left, Right right, int64_t K, const float* start, float* result, int64_t result_stride) {
      vec acc[R][NV] = {};
      if (start)
        for (int r = 0; r < R; r++)
          for (int v = 0; v < NV; v++) acc[r][v] = load<vec>(start + v * LANES);
      for (int64_t k = 0; k < K; k++) {
        vec b[NV];
        for (int v = 0; v < NV; v++) b[v] = load<vec>(right.at + k * right.stride + v * LANES);
        for (int r = 0; r < R; r++) {
          vec a = splat<vec>(left.at[r * left.across + k * left.step]);
          for (int v = 0; v < NV; v++) acc[r][v] += a * b[v];
        }
      }
      for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) store(result + r * result_stride + v * LANES, acc[r][v]);
    }
  };
};

// result (rows, NV vectors) = start (or zero) + left (rows, K) right (K, NV vectors).
template <int NV>
void panel_of_rows(Left left, Right right, int64_t K, int64_t rows, const float* start, float* result,
                   int64_t result_stride) {
  in_tiles<OfVectors<NV>::template Tile>(rows, [&](auto tile, int64_t r, int) {
    tile({left.at + r * left.across, left.across, left.step}, right, K, start, result + r * result_stride, result_stride);
  });
}

// result (rows, columns) = left (rows, K) right (K, columns); columns fill whole vectors.
inline void product(Left left, Right right, int64_t K, int64_t rows, int64_t columns, float* result,
                    int64_t result_stride) {
  int64_t n = 0;
  auto panel = [&](auto of_width) { of_width(left, Right{right.at + n, right.stride}, K, rows, nullptr, result + n, result_stride); };
  for (; n + 4 * LANES <= columns; n += 4 * LANES) panel(panel_of_rows<4>);
  int64_t rest = (columns - n) / LANES;
  if (rest == 3) panel(panel_of_rows<3>);
  if (rest == 2) panel(panel_of_rows<2>);
  if (rest == 1) panel(panel_of_rows<1>);
}

}  // namespace fedmoe
