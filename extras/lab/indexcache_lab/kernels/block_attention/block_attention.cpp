// Attention of one decode step over chosen blocks. A task is a part of the blocks of one request and key head: it reads
// each key and value once for all query heads that share them. Parts are put together by their denominators.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr char kOutside[] = "lengths or blocks name tokens that are not in the cache";
constexpr int64_t kPartTokens = 512;  // at least, of a part: what it costs to put parts together is spread over them

#ifdef __AVX512F__
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif
typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

inline Vec load(const float* from) {
  Vec result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

inline Vec load(const c10::BFloat16* from) {
  HalfVec half;
  std::memcpy(&half, from, sizeof(half));
  return reinterpret_cast<Vec>(__builtin_convertvector(half, BitVec) << 16);
}

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof(value)); }

// One vector with the sum of each of kWidth vectors: pairs are added until one is left.
inline Vec sums(Vec* rows) {
  for (int count = kWidth, step = 1; count > 1; count /= 2, step *= 2) {
    IntVec even, odd;
    for (int lane = 0; lane < kWidth; lane++) {  // lanes in groups of 2 * step: one group of the first, one of the second
      const int position = lane % step, group = lane / step / 2, second = lane / step % 2;
      even[lane] = second * kWidth + group * 2 * step + position;
      odd[lane] = even[lane] + step;
    }
    for (int row = 0; row < count / 2; row++) {
      const Vec a = rows[2 * row], b = rows[2 * row + 1];
      rows[row] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    }
  }
  return rows[0];
}

// Rows that are needed next, asked for a few at a time while others are computed with: blocks lie anywhere, so the
// hardware sees no stream that goes on, and all at once would only wait.
template <typename T>
struct Ahead {
  const T* rows;
  int64_t stride, bytes, left, share;

  Ahead(const T* rows, int64_t stride, int64_t dim, int64_t tokens, int64_t turns)
      : rows(rows), stride(stride), bytes(dim * sizeof(T)), left(tokens), share((tokens + turns - 1) / turns) {}

  void ask() {
    for (int64_t end = std::max<int64_t>(left - share, 0); left > end; left--, rows += stride) {
      const char* row = reinterpret_cast<const char*>(rows);
      for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
  }
};

// Products of one query of N * kWidth numbers with `tokens` keys; `scores` has room for whole vectors.
template <int N, typename T>
void multiply(const float* q, const T* k, int64_t stride, int64_t tokens, float* scores, Ahead<T>& ahead) {
  Vec query[N];
  for (int n = 0; n < N; n++) query[n] = load(q + n * kWidth);
  for (int64_t first = 0; first < tokens; first += kWidth) {
    ahead.ask();
    Vec rows[kWidth];
    for (int lane = 0; lane < kWidth; lane++) {
      const T* key = k + std::min(first + lane, tokens - 1) * stride;
      rows[lane] = query[0] * load(key);
      for (int n = 1; n < N; n++) rows[lane] += query[n] * load(key + n * kWidth);
    }
    store(scores + first, sums(rows));
  }
}

// Adds the values of `tokens` tokens by their weights to `out`, N * kWidth numbers, of which `shrink` is left.
template <int N, typename T>
void add_values(const float* weights, const T* v, int64_t stride, int64_t tokens, float shrink, float* out,
                Ahead<T>& ahead) {
  Vec even[N], odd[N];  // two sums, so that an addition need not wait for the one before
  for (int n = 0; n < N; n++) {
    even[n] = load(out + n * kWidth) * shrink;
    odd[n] = Vec{};
  }
  int64_t t = 0;
  for (; t + 1 < tokens; t += 2) {
    if (t % kWidth == 0) ahead.ask();
    for (int n = 0; n < N; n++) even[n] += weights[t] * load(v + t * stride + n * kWidth);
    for (int n = 0; n < N; n++) odd[n] += weights[t + 1] * load(v + (t + 1) * stride + n * kWidth);
  }
  for (int n = 0; n < N; n++) {
    if (t < tokens) even[n] += weights[t] * load(v + t * stride + n * kWidth);
    store(out + n * kWidth, even[n] + odd[n]);
  }
}

template <typename T>
using Multiply = void (*)(const float*, const T*, int64_t, int64_t, float*, Ahead<T>&);
template <typename T>
using AddValues = void (*)(const float*, const T*, int64_t, int64_t, float, float*, Ahead<T>&);

template <typename T>
Multiply<T> multiply_of(int64_t dim) {
  switch (dim) {
    case 32: return multiply<32 / kWidth, T>;
    case 64: return multiply<64 / kWidth, T>;
    case 80: return multiply<80 / kWidth, T>;
    case 96: return multiply<96 / kWidth, T>;
    case 128: return multiply<128 / kWidth, T>;
    case 256: return multiply<256 / kWidth, T>;
    default: TORCH_CHECK(false, "heads of ", dim, " dimensions");
  }
}

template <typename T>
AddValues<T> add_values_of(int64_t dim) {
  switch (dim) {
    case 32: return add_values<32 / kWidth, T>;
    case 64: return add_values<64 / kWidth, T>;
    case 80: return add_values<80 / kWidth, T>;
    case 96: return add_values<96 / kWidth, T>;
    case 128: return add_values<128 / kWidth, T>;
    case 256: return add_values<256 / kWidth, T>;
    default: TORCH_CHECK(false, "heads of ", dim, " dimensions");
  }
}

// One part: adds up into out [group, v_dim], highest [group] and total [group].
template <typename T>
void attend(const float* q, const T* k, const T* v, int64_t k_stride, int64_t v_stride, const int32_t* blocks,
            int64_t count, int64_t block_tokens, int64_t length, int64_t group, int64_t dim, int64_t v_dim,
            float* scores, float* out, float* highest, float* total) {
  const Multiply<T> multiply_keys = multiply_of<T>(dim);
  const AddValues<T> add = add_values_of<T>(v_dim);
  std::fill(out, out + group * v_dim, 0.0f);
  std::fill(highest, highest + group, kNone);
  std::fill(total, total + group, 0.0f);
  std::vector<float> shrink(group);
  const int64_t row = block_tokens + kWidth, turns = group * ((block_tokens + kWidth - 1) / kWidth);
  for (int64_t number = 0; number < count; number++) {
    if (blocks[number] < 0) continue;
    const int64_t first = blocks[number] * block_tokens;
    const int64_t tokens = std::min(block_tokens, length - first);
    Ahead<T> values(v + first * v_stride, v_stride, v_dim, tokens, turns);
    for (int64_t head = 0; head < group; head++) {
      float* score = scores + head * row;
      multiply_keys(q + head * dim, k + first * k_stride, k_stride, tokens, score, values);
      float higher = highest[head], sum = 0.0f;
#pragma omp simd reduction(max : higher)
      for (int64_t t = 0; t < tokens; t++) higher = std::max(higher, score[t]);
#pragma omp simd reduction(+ : sum)
      for (int64_t t = 0; t < tokens; t++) {
        score[t] = std::exp(score[t] - higher);
        sum += score[t];
      }
      shrink[head] = std::exp(highest[head] - higher);
      total[head] = total[head] * shrink[head] + sum;
      highest[head] = higher;
    }
    const int64_t next = number + 1 < count && blocks[number + 1] >= 0 ? blocks[number + 1] * block_tokens : length;
    Ahead<T> keys(k + next * k_stride, k_stride, dim, std::min(block_tokens, length - next), turns);
    for (int64_t head = 0; head < group; head++) {
      add(scores + head * row, v + first * v_stride, v_stride, tokens, shrink[head], out + head * v_dim, keys);
    }
  }
}

template <typename T>
void run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& blocks,
         const at::Tensor& lengths, double scale, int64_t block_tokens, at::Tensor& result) {
  const int64_t batch = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = k.size(1), v_dim = v.size(3);
  const int64_t group = heads / kv_heads, most = blocks.size(-1);
  const bool by_head = blocks.dim() == 3;  // each key head has blocks of its own
  const int64_t pairs = batch * kv_heads;
  const int64_t threads = at::get_num_threads();
  const int64_t part_blocks = (kPartTokens + block_tokens - 1) / block_tokens;
  // parts enough for all threads, a few each, so that none waits for another's last one
  const int64_t needed = (4 * threads + pairs - 1) / std::max<int64_t>(pairs, 1);
  const int64_t parts = std::max<int64_t>(1, std::min(needed, most / std::max<int64_t>(part_blocks, 1)));
  const int64_t each = (most + parts - 1) / parts;
  std::vector<float> queries(q.numel()), outs(pairs * parts * group * v_dim);
  std::vector<float> highest(pairs * parts * group), total(pairs * parts * group);
  const T* q_data = q.const_data_ptr<T>();
  for (int64_t i = 0; i < q.numel(); i++) queries[i] = static_cast<float>(q_data[i]) * static_cast<float>(scale);
  const T *k_data = k.const_data_ptr<T>(), *v_data = v.const_data_ptr<T>();
  const int32_t *block_data = blocks.const_data_ptr<int32_t>(), *length_data = lengths.const_data_ptr<int32_t>();
  at::parallel_for(0, pairs * parts, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(group * (block_tokens + kWidth));
    for (int64_t task = begin; task < end; task++) {
      const int64_t pair = task / parts, part = task % parts, row = pair / kv_heads, kv_head = pair % kv_heads;
      const int64_t from = std::min(part * each, most), count = std::min(each, most - from);
      attend<T>(queries.data() + (row * heads + kv_head * group) * dim, k_data + row * k.stride(0) + kv_head * k.stride(1),
                v_data + row * v.stride(0) + kv_head * v.stride(1), k.stride(2), v.stride(2),
                block_data + (by_head ? pair : row) * most + from, count, block_tokens, length_data[row], group, dim, v_dim, scores.data(),
                outs.data() + task * group * v_dim, highest.data() + task * group, total.data() + task * group);
    }
  });
  T* target = result.data_ptr<T>();
  for (int64_t pair = 0; pair < pairs; pair++) {
    for (int64_t head = 0; head < group; head++) {
      float top = kNone, sum = 0.0f;
      bool any = false;  // also where a score is NaN: the result then is, too
      for (int64_t part = 0; part < parts; part++) {
        top = std::max(top, highest[(pair * parts + part) * group + head]);
        any |= total[(pair * parts + part) * group + head] != 0.0f;
      }
      std::vector<float> mean(v_dim, 0.0f);
      for (int64_t part = 0; part < parts && any; part++) {
        const int64_t at = (pair * parts + part) * group + head;
        const float weight = std::exp(highest[at] - top);
        sum += weight * total[at];
        for (int64_t d = 0; d < v_dim; d++) mean[d] += weight * outs[at * v_dim + d];
      }
      const float scaled = any ? 1.0f / sum : 0.0f;
      const int64_t offset = ((pair / kv_heads) * heads + (pair % kv_heads) * group + head) * v_dim;
      for (int64_t d = 0; d < v_dim; d++) target[offset + d] = static_cast<T>(mean[d] * scaled);
    }
  }
}

at::Tensor block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& blocks,
                           const at::Tensor& lengths, double scale, int64_t block_tokens) {
  const int32_t *block_data = blocks.const_data_ptr<int32_t>(), *length_data = lengths.const_data_ptr<int32_t>();
  const int64_t each = q.size(0) ? blocks.numel() / q.size(0) : 0;  // of a request
  for (int64_t row = 0; row < q.size(0); row++) {
    TORCH_CHECK_VALUE(length_data[row] >= 0 && length_data[row] <= k.size(2), kOutside);
    for (int64_t n = 0; n < each; n++) {
      TORCH_CHECK_VALUE(block_data[row * each + n] * block_tokens < length_data[row], kOutside);
    }
  }
  at::Tensor result = at::empty({q.size(0), q.size(1), v.size(3)}, q.options());
  if (q.scalar_type() == at::kFloat) {
    run<float>(q, k, v, blocks, lengths, scale, block_tokens, result);
  } else {
    run<c10::BFloat16>(q, k, v, blocks, lengths, scale, block_tokens, result);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY(LIBRARY, library) {
  library.def(
      "block_attention(Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor lengths, float scale, int block_tokens) -> "
      "Tensor",
      &block_attention);
}
