// Which stretches of a client's vector a call of the kernels moves at all.
//
// An embedding has a row for every word, and a client uses few of them. A row without a gradient stays exactly as it is
// under SGD, and under momentum and Adam as long as its moments are zero: 0 / (0 + epsilon) = 0. So rows of words that are
// in none of the client's batches are not visited, unless something else moves them: weight decay, a pull towards an
// anchor, a constant that is added to the gradient, or a clipped norm, which may be NaN.
#pragma once
#include <algorithm>
#include <vector>
#include "client.h"

namespace fedmoe {

struct Range {
  int64_t begin, end;
};
typedef std::vector<Range> Ranges;

// An embedding in a client's vector, and which of its rows may have a gradient or moments.
struct WordTable {
  int64_t begin, width;
  std::vector<uint8_t> used;

  int64_t end() const { return begin + width * used.size(); }

  // The words of all batches of this call, and what earlier calls have moved.
  void mark(const Client& client, int64_t in_size) {
    for (int64_t n = 0; n < client.ends[client.steps - 1]; n++)
      for (int64_t t = 0; t < in_size; t++) used[(int64_t)client.x[client.order[n] * in_size + t]] = 1;
    for (const float* state : {client.mean, client.square})
      for (int64_t row = 0; state && client.steps_before && row < (int64_t)used.size(); row++)
        used[row] |= !all_zero(state + begin + row * width);
  }
  bool all_zero(const float* row) const {
    int32_t others = 0;  // without an early end, so that the compiler makes vectors of it
    for (int64_t i = 0; i < width; i++) others += row[i] != 0;
    return !others;
  }
};

class MovedRanges {
 public:
  Ranges moved;  // of all that the optimizer visits

  MovedRanges(const Net* nets, int64_t num_nets, const Client& client, const Optimizer& o) {
    for (int64_t m = 0; m < num_nets; m++)
      for (int64_t l = 0; l < nets[m].count; l++) find_table(nets[m], nets[m].layers[l], client, o);
    auto earlier = [](const WordTable& a, const WordTable& b) { return a.begin < b.begin; };
    std::sort(tables.begin(), tables.end(), earlier);
    for (int64_t r = 0; r < o.num_ranges; r++) add_range(o.ranges[2 * r], o.ranges[2 * r + 1]);
    for (const WordTable& table : tables) add_rows(words, table);
  }

  // Kernels add to the gradients of words, and set all others.
  void clear_words(float* gradient) const {
    for (const Range& r : words) std::fill(gradient + r.begin, gradient + r.end, 0.f);
  }

 private:
  std::vector<WordTable> tables;
  Ranges words;

  void find_table(const Net& net, const Layer& layer, const Client& client, const Optimizer& o) {
    if (!layer.reads_words() || net.offsets[layer.weight] < 0 || !client.steps) return;
    int64_t width = layer.word_width(), rows = net.sizes[layer.weight] / width;
    bool rest_stays =
        !o.weight_decay && !o.max_norm && !client.anchor && !client.gradient_offset && (!o.adam || o.epsilon > 0);
    tables.push_back({net.offsets[layer.weight], width, std::vector<uint8_t>(rows, !rest_stays)});
    if (rest_stays) tables.back().mark(client, layer.in_size());
  }

  // A stretch that is trained holds an embedding as a whole or not at all.
  void add_range(int64_t begin, int64_t end) {
    for (const WordTable& table : tables)
      if (table.begin >= begin && table.end() <= end) {
        add(moved, begin, table.begin);
        add_rows(moved, table);
        begin = table.end();
      }
    add(moved, begin, end);
  }
  static void add_rows(Ranges& ranges, const WordTable& table) {
    for (int64_t row = 0; row < (int64_t)table.used.size(); row++)
      if (table.used[row]) add(ranges, table.begin + row * table.width, table.begin + (row + 1) * table.width);
  }
  static void add(Ranges& ranges, int64_t begin, int64_t end) {
    if (begin == end) return;
    if (!ranges.empty() && ranges.back().end == begin) ranges.back().end = end;
    else ranges.push_back({begin, end});
  }
};

}  // namespace fedmoe
