// What one layer of a chain is; the same numbers in the same order as `Layer` in program.py.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>
#include "vectors.h"

namespace fedmoe {

enum Kind : int64_t { CONV, DENSE, MAX_POOL, AVERAGE_POOL, RELU, SIGMOID, TANH, TO_CHANNELS_FIRST, EMBEDDING_MEAN, LSTM };

struct Layer {
  int64_t kind;
  int64_t c, h, w;         // input: channels, height, width; a vector is (c, 1, 1)
  int64_t oc, oh, ow;      // output
  int64_t ch, cw;          // output of the convolution, before its pooling
  int64_t kh, kw, sh, sw;  // kernel and stride of the convolution, or of a pooling layer
  int64_t ph, pw;          // padding
  int64_t qh, qw, rh, rw;  // window and stride of the pooling that follows a convolution; 1 for none
  int64_t relu;            // whether a ReLU follows
  int64_t weight, bias;    // which parameters; -1 for none

  int64_t in_size() const { return c * h * w; }
  int64_t out_size() const { return oc * oh * ow; }
  int64_t padded_width() const { return w + 2 * pw; }
  int64_t padded_size() const { return (h + 2 * ph) * padded_width() * c; }
  int64_t padded_channels() const { return oc <= 8 ? 8 : round_up(oc, LANES); }
  // Examples of a layer's output start this many floats apart: room for a vector that reads or writes past the end.
  int64_t out_stride() const { return round_up(out_size(), 16) + 16; }
  bool reads_words() const { return (kind == EMBEDDING_MEAN || kind == LSTM) && weight >= 0; }
  int64_t word_width() const { return kind == LSTM ? qh : oc; }
  bool remembers_places() const { return kind == CONV || kind == MAX_POOL; }
};

// Memory that is reused from step to step: a few buffers by number, each as large as it ever had to be.
class Scratch {
 public:
  float* floats(int which, int64_t n) { return grow(float_buffers, which, n); }
  int32_t* ints(int which, int64_t n) { return grow(int_buffers, which, n); }
  const float** rows(int64_t n) { return grow(row_buffers, 0, n); }
  float** results(int64_t n) { return grow(result_buffers, 0, n); }

 private:
  template <class T> static T* grow(std::vector<std::vector<T>>& buffers, int which, int64_t n) {
    if ((int)buffers.size() <= which) buffers.resize(which + 1);
    if ((int64_t)buffers[which].size() < n) buffers[which].resize(n);
    return buffers[which].data();
  }
  std::vector<std::vector<float>> float_buffers;
  std::vector<std::vector<int32_t>> int_buffers;
  std::vector<std::vector<const float*>> row_buffers;
  std::vector<std::vector<float*>> result_buffers;
};

}  // namespace fedmoe
