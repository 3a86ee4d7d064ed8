// What one layer of a network is; the same numbers in the same order as `Layer` in program.py.
#pragma once
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>
#include "vectors.h"

namespace fedmoe {

enum Kind : int64_t { CONV, DENSE, MAX_POOL, AVERAGE_POOL, RELU, SIGMOID, TANH, TO_CHANNELS_FIRST, EMBEDDING_MEAN,
                      GROUP_NORM, ADD, SUBSAMPLE, LSTM };

constexpr int64_t INPUT = -1, NONE = -2;  // instead of the number of a layer: the network's input, nothing

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
  int64_t source;          // the layer whose output it reads, or INPUT
  int64_t second;          // the layer whose output is added before the ReLU, INPUT or NONE; of GROUP_NORM and ADD
  int64_t groups;          // of channels that are normed together
  int64_t epsilon_bits;    // of a double: what is added to their variance

  int64_t in_size() const { return c * h * w; }
  int64_t out_size() const { return oc * oh * ow; }
  int64_t padded_width() const { return w + 2 * pw; }
  int64_t padded_size() const { return (h + 2 * ph) * padded_width() * c; }
  int64_t padded_channels() const { return oc <= 8 ? 8 : round_up(oc, LANES); }
  // Examples of a layer's output start this many floats apart: room for a vector that reads or writes past the end.
  int64_t out_stride() const { return round_up(out_size(), 16) + 16; }
  double epsilon() const {
    double value;
    memcpy(&value, &epsilon_bits, sizeof value);
    return value;
  }
  bool reads_words() const { return (kind == EMBEDDING_MEAN || kind == LSTM) && weight >= 0; }
  int64_t word_width() const { return kind == LSTM ? qh : oc; }
  bool is_pooled() const { return qh * qw > 1 || rh > 1 || rw > 1; }
  // A convolution whose gradient is at most pixels and fills vectors: both of its gradients visit all of them.
  bool is_dense_conv() const { return kind == CONV && !is_pooled() && oc >= LANES; }
  // 3x3 with stride 1 and padding 1, on whole vectors of channels.
  bool is_winograd() const {
    return is_dense_conv() && kh == 3 && kw == 3 && sh == 1 && sw == 1 && ph == 1 && pw == 1 && c % LANES == 0 && oc % LANES == 0;
  }
  bool remembers_places() const { return (kind == CONV && !is_dense_conv()) || kind == MAX_POOL; }
};

// A vector whose memory starts at a cache line: vectors that straddle two cost twice.
template <class T> struct AtCacheLine {
  typedef T value_type;
  AtCacheLine() = default;
  template <class U> AtCacheLine(const AtCacheLine<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  template <class U> bool operator==(const AtCacheLine<U>&) const { return true; }
  template <class U> bool operator!=(const AtCacheLine<U>&) const { return false; }
};

// Memory that is reused from step to step: a few buffers by number, each as large as it ever had to be.
class Scratch {
 public:
  float* floats(int which, int64_t n) { return grow(float_buffers, which, n); }
  float* gradients(int which, int64_t n) { return grow(gradient_buffers, which, n); }
  int32_t* ints(int which, int64_t n) { return grow(int_buffers, which, n); }
  const float** rows(int64_t n) { return grow(row_buffers, 0, n); }
  float** results(int64_t n) { return grow(result_buffers, 0, n); }

 private:
  template <class T> using Buffers = std::vector<std::vector<T, AtCacheLine<T>>>;
  template <class T> static T* grow(Buffers<T>& buffers, int which, int64_t n) {
    if ((int)buffers.size() <= which) buffers.resize(which + 1);
    if ((int64_t)buffers[which].size() < n) buffers[which].resize(n);
    return buffers[which].data();
  }
  Buffers<float> float_buffers, gradient_buffers;
  Buffers<int32_t> int_buffers;
  Buffers<const float*> row_buffers;
  Buffers<float*> result_buffers;
};

}  // namespace fedmoe
