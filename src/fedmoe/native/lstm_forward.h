// Embedding, LSTM in one or both directions, and the state that a text is read into, as one layer: forward.
//
// The products of all inputs come first, once for each distinct word of the batch; then one time after another, with the
// gates of a block of units in registers.
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

}  // namespace fedmoe
