// An LSTM layer backwards, one time after another; all weight gradients come at the end, as products over all rows.
#pragma once
#include "lstm_forward.h"

namespace fedmoe {

// Back through one time of one text: the gradients of the state (with what comes from above) and of the cell become those
// of the gates; `d_cell` then belongs to the time before.
inline void gates_backward(const float* gates, const float* tanh_cell, const float* cell_before, const float* d_output,
                           const float* d_state, float* d_cell, float* d_gates) {
  vec one = splat<vec>(1.f), i = load<vec>(gates), f = load<vec>(gates + LANES), g = load<vec>(gates + 2 * LANES);
  vec o = load<vec>(gates + 3 * LANES), tanh_c = load<vec>(tanh_cell);
  vec dh = load<vec>(d_output) + load<vec>(d_state);
  vec dc = load<vec>(d_cell) + dh * o * (one - tanh_c * tanh_c);
  store(d_gates, dc * g * i * (one - i));
  store(d_gates + LANES, dc * load<vec>(cell_before) * f * (one - f));
  store(d_gates + 2 * LANES, dc * i * (one - g * g));
  store(d_gates + 3 * LANES, dh * tanh_c * o * (one - o));
  store(d_cell, dc * f);
}

// All times of one cell, from the last: d_output (rows, padded) -> d_gates (rows, gates).
inline void cell_backward(const Recurrent& a, const Rows& rows, const float* recurrent, const ReadTape& tape,
                          const float* d_output, float* d_gates, Scratch& scratch) {
  int64_t P = a.padded(), N = a.gates();
  float* packed = scratch.floats(1, N * P);
  float* d_state = scratch.floats(3, 2 * rows.batch * P + P);
  float *d_cell = d_state + rows.batch * P, *zeros = d_cell + rows.batch * P;
  memset(d_state, 0, (2 * rows.batch * P + P) * sizeof(float));
  pack_rows(a, recurrent, a.H, P, packed);
  for (int64_t t = rows.longest - 1; t >= 0; t--) {
    for (int64_t b = 0; b < rows.at_work(t); b++)
      for (int64_t u = 0; u < P; u += LANES) {
        int64_t row = rows.start[t] + b;
        gates_backward(tape.gates + row * N + 4 * u, tape.tanh_cell + row * P + u,
                       t ? tape.cell + rows.previous(t, b) * P + u : zeros, d_output + row * P + u,
                       d_state + b * P + u, d_cell + b * P + u, d_gates + row * N + 4 * u);
      }
    if (t) product({d_gates + rows.start[t] * N, N, 1}, {packed, P}, N, rows.at_work(t), P, d_state, P);
  }
}

// Sums of `values` (rows, width) by their index: (count, width).
inline void sum_by_index(const float* values, const int32_t* index, int64_t rows, int64_t width, float* sums,
                         int64_t count) {
  memset(sums, 0, count * width * sizeof(float));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i += LANES) {
      float* sum = sums + index[r] * width + i;
      store(sum, load<vec>(sum) + load<vec>(values + r * width + i));
    }
}

// Many small terms: sums of sixteen first, which round less than one long sum.
inline void column_sums(const float* values, int64_t rows, int64_t width, float* sums) {
  memset(sums, 0, width * sizeof(float));
  for (int64_t begin = 0; begin < rows; begin += 16)
    for (int64_t i = 0; i < width; i += LANES) {
      vec part = {};
      for (int64_t r = begin; r < std::min(rows, begin + 16); r++) part += load<vec>(values + r * width + i);
      store(sums + i, load<vec>(sums + i) + part);
    }
}

// Gradients of a cell's weights: products over all rows at once.
inline void weight_gradients(const Recurrent& a, const Rows& rows, const LevelInputs& in, const ReadTape& tape,
                             const float* d_gates, const float* d_products, float* const* grads, Scratch& scratch) {
  int64_t P = a.padded(), N = a.gates(), widest = std::max(P, round_up(in.width, LANES));
  float *before = scratch.floats(1, rows.count * P), *packed = scratch.floats(5, N * widest + N);
  memset(before, 0, std::min(rows.count, rows.batch) * P * sizeof(float));
  for (int64_t t = 1; t < rows.longest; t++)
    memcpy(before + rows.start[t] * P, tape.state + rows.start[t - 1] * P, rows.at_work(t) * P * sizeof(float));
  product({d_gates, 1, N}, {before, P}, rows.count, N, P, packed, P);
  unpack_rows(a, packed, a.H, P, grads[1]);
  int64_t stride = round_up(in.width, LANES);
  product({d_products, 1, N}, {in.rows, in.stride}, in.count, N, stride, packed, stride);
  unpack_rows(a, packed, in.width, stride, grads[0]);
  if (!a.biased) return;
  column_sums(d_gates, rows.count, N, packed);
  unpack_rows(a, packed, 1, 1, grads[2]);
  memcpy(grads[3], grads[2], 4 * a.H * sizeof(float));
}

// The gradient of a level's distinct inputs (count, stride) is added to rows of the embedding, or to the outputs of the
// level below: (directions, rows, padded).
inline void add_to_embedding(const Recurrent& a, const Rows& rows, const float* d_inputs, int64_t stride, float* d_embedding) {
  for (size_t u = 0; u < rows.words.size(); u++)
    for (int64_t i = 0; rows.words[u] != a.no_gradient && i < a.embedded; i++)
      d_embedding[rows.words[u] * a.embedded + i] += d_inputs[u * stride + i];
}

inline void add_to_level_below(const Recurrent& a, const Rows& rows, const float* d_inputs, int64_t stride,
                               int64_t direction, float* d_below) {
  int64_t P = a.padded();
  for (int64_t to = a.joint ? 0 : direction; to < (a.joint ? a.directions : direction + 1); to++)
    for (int64_t r = 0; r < rows.count; r++) {
      const float* d = d_inputs + r * stride + (a.joint ? to * a.H : 0);
      float* below = d_below + (to * rows.count + (a.joint && to ? rows.mirror[r] : r)) * P;
      for (int64_t i = 0; i < a.H; i++) below[i] += d[i];
    }
}

// Numbers: every token is an input of its own, and all texts are equally long.
inline void add_to_examples(const Recurrent& a, const Rows& rows, const float* d_inputs, int64_t stride, float* dx,
                            int64_t dx_stride) {
  for (int64_t r = 0; r < rows.count; r++) {
    float* d = dx + rows.text[r % rows.batch] * dx_stride + r / rows.batch * a.width;
    for (int64_t i = 0; i < a.width; i++) d[i] += d_inputs[r * stride + i];
  }
}

// dy (batch, out_stride) -> gradients of all parameters; dx (batch, dx_stride) of numbers, where it is asked for.
inline void lstm_backward(const Layer& layer, const float* const* params, float* const* grads, int64_t batch,
                          const float* const* x, const float* memory, const float* dy, float* dx, int64_t dx_stride,
                          Scratch& scratch) {
  Recurrent a(layer);
  Rows rows(a, a.embedding < 0 ? nullptr : params[a.embedding], batch, x);
  Indices indices(rows);
  int64_t P = a.padded(), N = a.gates(), of_level = a.directions * rows.count * P;
  float *d_outputs = scratch.floats(6, 2 * of_level), *d_below = d_outputs + of_level;
  memset(d_outputs, 0, (a.levels > 1 ? 2 : 1) * of_level * sizeof(float));
  for (int64_t b = 0; dx && b < batch; b++) memset(dx + b * dx_stride, 0, layer.in_size() * sizeof(float));
  over_read_out(a, rows, [&](int64_t b, int64_t d, int64_t row, float share) {
    const float* up = dy + rows.text[b] * layer.out_stride() + d * a.H;
    for (int64_t i = 0; i < a.H; i++) d_outputs[(d * rows.count + row) * P + i] += share * up[i];
  });
  for (int64_t level = a.levels - 1; level >= 0; level--) {
    for (int64_t d = 0; d < a.directions; d++) {
      CellWeights weights(a, params, level, d);
      ReadTape tape(a, memory, rows.count, level, d);
      float* d_gates = scratch.floats(2, rows.count * N);
      cell_backward(a, rows, weights.recurrent, tape, d_outputs + d * rows.count * P, d_gates, scratch);
      LevelInputs in = inputs_of_level(a, rows, indices, memory, level, d, scratch);
      float* d_products = scratch.floats(3, in.count * N);
      sum_by_index(d_gates, in.index[d], rows.count, N, d_products, in.count);
      weight_gradients(a, rows, in, tape, d_gates, d_products, grads + a.param(level, d), scratch);
      if (!level && a.embedding < 0 && !dx) continue;
      int64_t stride = round_up(in.width, LANES);
      float *packed = scratch.floats(1, N * stride), *d_inputs = scratch.floats(7, in.count * stride);
      pack_rows(a, weights.input, in.width, stride, packed);
      product({d_products, N, 1}, {packed, stride}, N, in.count, stride, d_inputs, stride);
      if (level) add_to_level_below(a, rows, d_inputs, stride, d, d_below);
      else if (a.embedding >= 0) add_to_embedding(a, rows, d_inputs, stride, grads[a.embedding]);
      else add_to_examples(a, rows, d_inputs, stride, dx, dx_stride);
    }
    if (!level) break;
    std::swap(d_outputs, d_below);
    memset(d_below, 0, of_level * sizeof(float));
  }
}

}  // namespace fedmoe
