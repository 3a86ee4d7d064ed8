// How an LSTM finds the tokens of a batch, its weights and what it remembers.
//
// Rows are the tokens of a batch by time, the longest text first: those of one time lie together, and no row is padding.
// A direction reads its texts from their own end, so time t of the second one is the text's t-th token from behind. Units
// stand in blocks of LANES, of each block the gates i, f, g, o one after another: what a unit needs meets in registers.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>
#include "layer.h"
#include "vectors.h"

namespace fedmoe {

enum ReadOut : int64_t { FINAL_STATES, LAST_OUTPUT, MEAN_OUTPUT };

// The numbers of a layer of this kind, by their names here; the same in the same fields in recurrent.py.
struct Recurrent {
  int64_t steps, width;        // of an example: tokens, and numbers of each; 1 for words
  int64_t levels, directions;  // a cell each, level by level
  int64_t read_out;
  bool ragged;                 // words of number 0 are padding, wherever they are
  bool joint;                  // upper levels read both directions, else each its own
  bool biased;
  int64_t embedded;   // width of the embedding; `width` without one
  int64_t no_gradient;  // a word whose row is not trained; -1 for none
  int64_t embedding, first_param, H;

  explicit Recurrent(const Layer& a)
      : steps(a.c), width(a.h), levels(a.kh), directions(a.kw), read_out(a.sh), ragged(a.sw), joint(a.ph), biased(a.pw),
        embedded(a.qh), no_gradient(a.qw), embedding(a.weight), first_param(a.bias), H(a.oc / a.kw) {}
  int64_t padded() const { return round_up(H, LANES); }
  int64_t gates() const { return 4 * padded(); }
  int64_t inputs(int64_t level) const { return !level ? embedded : joint ? directions * H : H; }
  int64_t param(int64_t level, int64_t direction) const {
    return first_param + (level * directions + direction) * (biased ? 4 : 2);
  }
  // Where PyTorch has the gate that stands at `column` here; -1 for what fills the last block.
  int64_t row_of(int64_t column) const {
    int64_t unit = column / (4 * LANES) * LANES + column % LANES, gate = column / LANES % 4;
    return unit < H ? gate * H + unit : -1;
  }
  int64_t tape_size(int64_t batch) const { return levels * directions * batch * steps * (gates() + 3 * padded()); }
};

// How the tokens of a batch lie.
struct Rows {
  int64_t batch, count = 0, longest = 0;
  std::vector<int32_t> text, length;  // (batch), by falling length
  std::vector<int32_t> start;         // (longest + 1): the first row of each time
  std::vector<int32_t> source;        // (count): which of the distinct inputs
  std::vector<int32_t> mirror;        // (count): the row of the same token in the other direction
  std::vector<const float*> inputs;   // distinct words' rows of the embedding, or the numbers of each token
  std::vector<int32_t> words;         // whose rows these are

  Rows(const Recurrent& a, const float* embedding, int64_t batch, const float* const* x) : batch(batch) {
    std::vector<std::vector<int32_t>> tokens(batch);
    for (int64_t b = 0; b < batch; b++) {
      for (int32_t t = 0; t < a.steps; t++)
        if (!a.ragged || x[b][t] != 0) tokens[b].push_back(t);
      if (tokens[b].empty()) tokens[b].push_back(0);  // an empty text is read as one padding token
    }
    text.resize(batch), length.resize(batch);
    std::iota(text.begin(), text.end(), 0);
    std::stable_sort(text.begin(), text.end(), [&](int i, int j) { return tokens[i].size() > tokens[j].size(); });
    for (int64_t b = 0; b < batch; b++) length[b] = tokens[text[b]].size();
    longest = batch ? length[0] : 0;
    start.push_back(0);
    for (int64_t t = 0, active = batch; t < longest; t++) {
      while (length[active - 1] <= t) active--;
      start.push_back(count += active);
    }
    source.resize(count), mirror.resize(count);
    for (int64_t t = 0; t < longest; t++)
      for (int64_t b = 0; b < at_work(t); b++) {
        const float* token = x[text[b]] + tokens[text[b]][t] * a.width;
        source[start[t] + b] = embedding ? input_of((int32_t)*token, embedding, a.embedded) : inputs.size();
        if (!embedding) inputs.push_back(token);
        mirror[start[t] + b] = start[length[b] - 1 - t] + b;
      }
  }
  int64_t at_work(int64_t t) const { return start[t + 1] - start[t]; }
  int64_t last_row(int64_t b) const { return start[length[b] - 1] + b; }
  int64_t previous(int64_t t, int64_t b) const { return start[t - 1] + b; }

 private:
  std::vector<int32_t> seen;  // by word: its place among the inputs, and one more

  int32_t input_of(int32_t word, const float* embedding, int64_t width) {
    if ((int64_t)seen.size() <= word) seen.resize(word + 1);
    if (!seen[word]) {
      inputs.push_back(embedding + word * width);
      words.push_back(word);
      seen[word] = inputs.size();
    }
    return seen[word] - 1;
  }
};

// What a cell remembers of every row.
template <class Float> struct TapeOf {
  Float *gates, *cell, *tanh_cell, *state;

  TapeOf(const Recurrent& a, Float* memory, int64_t rows, int64_t level, int64_t direction) {
    gates = memory + (level * a.directions + direction) * rows * (a.gates() + 3 * a.padded());
    cell = gates + rows * a.gates();
    tanh_cell = cell + rows * a.padded(), state = tanh_cell + rows * a.padded();
  }
};
typedef TapeOf<float> CellTape;
typedef TapeOf<const float> ReadTape;

// The weights of a cell in the order of blocks.
struct CellWeights {
  const float *input, *recurrent, *input_bias, *recurrent_bias;

  CellWeights(const Recurrent& a, const float* const* params, int64_t level, int64_t direction) {
    const float* const* own = params + a.param(level, direction);
    input = own[0], recurrent = own[1];
    input_bias = a.biased ? own[2] : nullptr, recurrent_bias = a.biased ? own[3] : nullptr;
  }
};

// weight (4H, width) -> (blocks, width, 4 * LANES), for products from the left by rows of `width`.
inline void pack_columns(const Recurrent& a, const float* weight, int64_t width, float* packed) {
  for (int64_t column = 0; column < a.gates(); column++) {
    int64_t row = a.row_of(column), block = column / (4 * LANES), within = column % (4 * LANES);
    for (int64_t k = 0; k < width; k++)
      packed[(block * width + k) * 4 * LANES + within] = row < 0 ? 0.f : weight[row * width + k];
  }
}

// weight (4H, width) -> (4 * padded, stride) in the order of blocks, for products from the left by rows of gates.
inline void pack_rows(const Recurrent& a, const float* weight, int64_t width, int64_t stride, float* packed) {
  memset(packed, 0, a.gates() * stride * sizeof(float));
  for (int64_t column = 0; column < a.gates(); column++)
    if (a.row_of(column) >= 0) memcpy(packed + column * stride, weight + a.row_of(column) * width, width * sizeof(float));
}

inline void unpack_rows(const Recurrent& a, const float* packed, int64_t width, int64_t stride, float* weight) {
  for (int64_t column = 0; column < a.gates(); column++)
    if (a.row_of(column) >= 0) memcpy(weight + a.row_of(column) * width, packed + column * stride, width * sizeof(float));
}

}  // namespace fedmoe
