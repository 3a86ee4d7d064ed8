// Embedding, LSTM in one or both directions, and the state that a text is read into, as one layer: forward and backward.
//
// The products of all inputs come first, once for each distinct word of the batch; then one time after another, with the
// gates of a block of units in registers; and backwards all weight gradients at the end, as products over all rows.
#pragma once
#include "lstm_rows.h"
#include "row_products.h"
#include "smooth.h"

namespace fedmoe {

// One time of R texts for one block of units: gates of the input's product and the states before.
template <int R> struct StepTile {
  static void run(const float* weight, int64_t H, int64_t P, const float* const* input, const float* state_before,
                  const float* cell_before, int64_t before_stride, float* gates, float* cell, float* tanh_cell,
                  float* state) {
    vec acc[R][4];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < 4; v++) acc[r][v] = load<vec>(input[r] + v * LANES);
    for (int64_t k = 0; k < H; k++) {
      vec w[4];
      for (int v = 0; v < 4; v++) w[v] = load<vec>(weight + (k * 4 + v) * LANES);
      for (int r = 0; r < R; r++) {
        vec h = splat<vec>(state_before[r * before_stride + k]);
        for (int v = 0; v < 4; v++) acc[r][v] += h * w[v];
      }
    }
    for (int r = 0; r < R; r++) {
      vec i = sigmoid(acc[r][0]), f = sigmoid(acc[r][1]), g = hyperbolic_tangent(acc[r][2]), o = sigmoid(acc[r][3]);
      vec c = f * load<vec>(cell_before + r * before_stride) + i * g, tanh_c = hyperbolic_tangent(c);
      vec all[4] = {i, f, g, o};
      for (int v = 0; v < 4; v++) store(gates + r * 4 * P + v * LANES, all[v]);
      store(cell + r * P, c);
      store(tanh_cell + r * P, tanh_c);
      store(state + r * P, o * tanh_c);
    }
  }
};

// All times of one cell. `products` (inputs, gates) are those of the distinct inputs, `index` says which a row has.
inline void cell_forward(const Recurrent& a, const Rows& rows, const float* recurrent, const float* products,
                         const int32_t* index, const CellTape& tape, Scratch& scratch) {
  int64_t P = a.padded(), N = a.gates();
  float* packed = scratch.floats(2, N * a.H);
  float* zeros = scratch.floats(5, P);
  memset(zeros, 0, P * sizeof(float));
  pack_columns(a, recurrent, a.H, packed);
  for (int64_t t = 0; t < rows.longest; t++)
    for (int64_t block = 0; block < P / LANES; block++) {
      const float* weight = packed + block * a.H * 4 * LANES;
      in_tiles<StepTile>(rows.at_work(t), [&](auto tile, int64_t b, int R) {
        int64_t row = rows.start[t] + b, at = row * P + block * LANES;
        int64_t before = t ? rows.previous(t, b) * P : 0, stride = t ? P : 0;
        const float* input[LARGEST_TILE];
        for (int r = 0; r < R; r++) input[r] = products + index[row + r] * N + block * 4 * LANES;
        tile(weight, a.H, P, input, (t ? tape.state + before : zeros),
             (t ? tape.cell + before + block * LANES : zeros), stride, tape.gates + row * N + block * 4 * LANES,
             tape.cell + at, tape.tanh_cell + at, tape.state + at);
      });
    }
}

// The inputs of one level, side by side: (count, stride), and which of them the rows of each direction have.
struct LevelInputs {
  const float* rows;
  int64_t count, stride, width;
  const int32_t* index[2];
};

// Row for row in the order of the first direction: both directions' states of the level below.
inline void join_states(const Recurrent& a, const Rows& rows, const float* memory, int64_t level, float* joined, int64_t stride) {
  for (int64_t d = 0; d < a.directions; d++) {
    ReadTape below(a, memory, rows.count, level - 1, d);
    for (int64_t r = 0; r < rows.count; r++)
      memcpy(joined + r * stride + d * a.H, below.state + (d ? rows.mirror[r] : r) * a.padded(), a.H * sizeof(float));
  }
}

struct Indices {
  std::vector<int32_t> turned, identity;  // of the second direction's rows to the distinct inputs; of rows to themselves

  explicit Indices(const Rows& rows) : turned(rows.count), identity(rows.count) {
    for (int64_t r = 0; r < rows.count; r++) turned[r] = rows.source[rows.mirror[r]];
    std::iota(identity.begin(), identity.end(), 0);
  }
};

inline LevelInputs inputs_of_level(const Recurrent& a, const Rows& rows, const Indices& indices, const float* memory,
                                   int64_t level, int64_t direction, Scratch& scratch) {
  int64_t width = a.inputs(level), stride = round_up(width, LANES);
  if (level && !a.joint) {
    ReadTape below(a, memory, rows.count, level - 1, direction);
    return {below.state, rows.count, a.padded(), width, {indices.identity.data(), indices.identity.data()}};
  }
  int64_t count = level ? rows.count : rows.inputs.size();
  float* gathered = scratch.floats(0, count * stride);
  for (int64_t u = 0; u < count; u++) {
    for (int64_t i = width; i < stride; i++) gathered[u * stride + i] = 0.f;
    if (!level) memcpy(gathered + u * stride, rows.inputs[u], width * sizeof(float));
  }
  if (level) {
    join_states(a, rows, memory, level, gathered, stride);
    return {gathered, count, stride, width, {indices.identity.data(), rows.mirror.data()}};
  }
  return {gathered, count, stride, width, {rows.source.data(), indices.turned.data()}};
}

inline void input_products(const Recurrent& a, const CellWeights& weights, const LevelInputs& in, float* products,
                           Scratch& scratch) {
  int64_t N = a.gates();
  float *packed = scratch.floats(1, N * in.width), *bias = scratch.floats(4, N);
  pack_columns(a, weights.input, in.width, packed);
  for (int64_t column = 0; column < N; column++) {
    int64_t row = a.row_of(column);
    bias[column] = row < 0 || !a.biased ? 0.f : weights.input_bias[row] + weights.recurrent_bias[row];
  }
  for (int64_t block = 0; block < N / (4 * LANES); block++)
    panel_of_rows<4>({in.rows, in.stride, 1}, {packed + block * in.width * 4 * LANES, 4 * LANES}, in.width, in.count,
                     bias + block * 4 * LANES, products + block * 4 * LANES, N);
}

// Calls (b, direction, row, share): the state of which row is how much of a text's output.
template <class Use> void over_read_out(const Recurrent& a, const Rows& rows, const Use& use) {
  for (int64_t b = 0; b < rows.batch; b++)
    for (int64_t d = 0; d < a.directions; d++) {
      if (a.read_out == FINAL_STATES || (a.read_out == LAST_OUTPUT && d == 0)) use(b, d, rows.last_row(b), 1.f);
      else if (a.read_out == LAST_OUTPUT) use(b, d, b, 1.f);
      else
        for (int64_t t = 0; t < rows.length[b]; t++) use(b, d, (int64_t)rows.start[t] + b, 1.f / rows.length[b]);
    }
}

inline void lstm_forward(const Layer& layer, const float* const* params, int64_t batch, const float* const* x, float* y,
                         float* memory, Scratch& scratch) {
  Recurrent a(layer);
  Rows rows(a, a.embedding < 0 ? nullptr : params[a.embedding], batch, x);
  Indices indices(rows);
  for (int64_t level = 0; level < a.levels; level++)
    for (int64_t d = 0; d < a.directions; d++) {
      CellWeights weights(a, params, level, d);
      LevelInputs in = inputs_of_level(a, rows, indices, memory, level, d, scratch);
      float* products = scratch.floats(3, in.count * a.gates());
      input_products(a, weights, in, products, scratch);
      cell_forward(a, rows, weights.recurrent, products, in.index[d], CellTape(a, memory, rows.count, level, d), scratch);
    }
  for (int64_t b = 0; b < batch; b++) memset(y + b * layer.out_stride(), 0, layer.oc * sizeof(float));
  over_read_out(a, rows, [&](int64_t b, int64_t d, int64_t row, float share) {
    const float* state = ReadTape(a, memory, rows.count, a.levels - 1, d).state + row * a.padded();
    float* out = y + rows.text[b] * layer.out_stride() + d * a.H;
    for (int64_t i = 0; i < a.H; i++) out[i] += share * state[i];
  });
}

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
  memset(d_outputs, 0, 2 * of_level * sizeof(float));
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
    std::swap(d_outputs, d_below);
    memset(d_below, 0, of_level * sizeof(float));
  }
}

}  // namespace fedmoe
