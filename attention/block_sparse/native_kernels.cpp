// Block-sparse softmax attention for CPUs with AVX-512 BF16: O = softmax(scale Q K^T over the kept blocks) V.
//
// Keys and values of one head are laid out once as the dot-product instruction wants them (pairs of bfloat16 side by
// side for 16 columns), so that kept blocks are read where they lie: nothing is gathered. A thread takes a query block,
// goes through its kept key blocks in runs of up to RUN_KEYS keys, and keeps a running softmax (arXiv 2205.14135);
// sums are float32, weights bfloat16. Sums are rescaled only when the maximum grows by more than a factor of 2^8.

#include "native_tiles.h"

namespace {

constexpr int64_t RUN_KEYS = 256;  // keys per step of the running softmax
constexpr float GROWTH = 8.0f;     // in powers of two

struct Sizes {
    int64_t batch, heads, length_q, length_k, dim, block_q, block_k, blocks_q, blocks_k, kept;
};

// One query block against its kept key blocks.
struct Worker {
    const Sizes& s;
    float scale;  // of the scores, in powers of two
    int64_t rows_max, run_blocks, run_keys;
    Buffer queries, scores, weights, sums, state;

    Worker(const Sizes& sizes, float scale_)
        : s(sizes), scale(scale_ * 1.44269504088896f), rows_max(round_up(sizes.block_q, ROWS)),
          run_blocks(std::max<int64_t>(1, RUN_KEYS / sizes.block_k)), run_keys(run_blocks * sizes.block_k),
          queries(rows_max * sizes.dim * 2), scores(rows_max * run_keys * 4), weights(rows_max * run_keys * 2),
          sums(rows_max * sizes.dim * 4), state(rows_max * 8) {}

    bool ready() const { return queries.data && scores.data && weights.data && sums.data && state.data; }

    void run(const uint16_t* query, const Layout& q, int64_t tokens, const int64_t* picks, const uint32_t* keys,
             const uint32_t* values, uint16_t* out, const Layout& o, float* logs) {
        const int64_t rows = round_up(tokens, ROWS);
        auto* own = static_cast<uint16_t*>(queries.data);
        copy_rows(query, q.token, tokens, rows, s.dim, own);
        auto* largest = static_cast<float*>(state.data);
        float* total = largest + rows_max;
        int64_t count = 0;
        while (count < s.kept && picks[count] < s.blocks_k) ++count;
        for (int64_t first = 0; first < count; first += run_blocks) {
            const int64_t blocks = std::min(run_blocks, count - first);
            for (int64_t block = 0; block < blocks; ++block)
                multiply_columns(own, rows, s.dim, keys + picks[first + block] * s.block_k * s.dim / 2, s.block_k,
                                 static_cast<float*>(scores.data) + block * s.block_k, run_keys);
            // Only the last key block can be short, and it comes last.
            const int64_t last = picks[first + blocks - 1];
            const int64_t real = (blocks - 1) * s.block_k + std::min(s.block_k, s.length_k - last * s.block_k);
            for (int64_t row = 0; row < rows; ++row) soften(row, blocks * s.block_k, real, first == 0, largest, total);
            add_rows(static_cast<uint16_t*>(weights.data), run_keys, rows, values, picks + first, blocks, s.block_k, s.dim,
                     static_cast<float*>(sums.data), first == 0);
        }
        for (int64_t row = 0; row < tokens; ++row) finish(row, total[row], out + row * o.token);
        if (logs)
            for (int64_t row = 0; row < tokens; ++row) logs[row] = largest[row] + std::log2(total[row]);
    }

    void soften(int64_t row, int64_t columns, int64_t real, bool first, float* largest, float* total) {
        float* from = static_cast<float*>(scores.data) + row * run_keys;
        auto* to = static_cast<uint16_t*>(weights.data) + row * run_keys;
        for (int64_t column = real; column < columns; ++column) from[column] = -INFINITY;
        __m512 top = _mm512_load_ps(from);
        for (int64_t column = LANES; column < columns; column += LANES) top = _mm512_max_ps(top, _mm512_load_ps(from + column));
        const float peak = _mm512_reduce_max_ps(top) * scale;
        if (first) {
            largest[row] = peak;
            total[row] = 0;
        } else if (peak > largest[row] + GROWTH) {
            const float shrink = std::exp2(largest[row] - peak);
            auto* sum = static_cast<float*>(sums.data) + row * s.dim;
            for (int64_t channel = 0; channel < s.dim; channel += LANES)
                _mm512_store_ps(sum + channel, _mm512_mul_ps(_mm512_load_ps(sum + channel), _mm512_set1_ps(shrink)));
            total[row] *= shrink;
            largest[row] = peak;
        }
        const __m512 factor = _mm512_set1_ps(scale), base = _mm512_set1_ps(largest[row]);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t column = 0; column < columns; column += LANES) {
            const __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from + column), factor, base));
            sum = _mm512_add_ps(sum, weight);
            _mm256_store_si256((__m256i*)(to + column), narrow(weight));
        }
        total[row] += _mm512_reduce_add_ps(sum);
    }

    void finish(int64_t row, float total, uint16_t* to) {
        const float* sum = static_cast<const float*>(sums.data) + row * s.dim;
        const __m512 factor = _mm512_set1_ps(1.0f / total);
        for (int64_t channel = 0; channel < s.dim; channel += LANES)
            _mm256_storeu_si256((__m256i*)(to + channel), narrow(_mm512_mul_ps(_mm512_load_ps(sum + channel), factor)));
    }
};

}  // namespace

// Tensors are bfloat16 [batch, tokens, heads, dim] with channels side by side; `strides` holds those of batch, token and
// head of query, key, value and out in turn; `indices` int64 [batch, heads, blocks_q, kept], ascending, `blocks_k` for
// none; out must be contiguous; `logs` float32 [batch, heads, length_q] or null takes log2 of the sums of 2^(scaled
// scores), for the backward pass. Returns 0, or 1 where memory ran out.
extern "C" int block_sparse_attention(const uint16_t* query, const uint16_t* key, const uint16_t* value, uint16_t* out,
                                      const int64_t* strides, const int64_t* indices, float* logs, const int64_t* numbers,
                                      float scale, int threads) {
    const Sizes s{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6],
                  (numbers[2] + numbers[5] - 1) / numbers[5], (numbers[3] + numbers[6] - 1) / numbers[6], numbers[7]};
    const Layout q = layout_of(strides, 0), k = layout_of(strides, 1), v = layout_of(strides, 2), o = layout_of(strides, 3);
    const int64_t block_words = s.block_k * s.dim / 2;
    Buffer packed_keys(s.blocks_k * block_words * 4), packed_values(s.blocks_k * block_words * 4);
    if (!packed_keys.data || !packed_values.data) return 1;
    // The result is fresh memory of the caller, its numbers side by side.
    use_huge_pages(out, s.batch * s.heads * s.length_q * s.dim * 2);
    auto* keys = static_cast<uint32_t*>(packed_keys.data);
    auto* values = static_cast<uint32_t*>(packed_values.data);
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
    {
        Worker worker(s, scale);
        if (!worker.ready()) failed = 1;
#pragma omp barrier
        if (!failed)
            for (int64_t sequence = 0; sequence < s.batch * s.heads; ++sequence) {
                const int64_t batch = sequence / s.heads, head = sequence % s.heads;
#pragma omp for schedule(static)
                for (int64_t block = 0; block < s.blocks_k; ++block) {
                    const int64_t first = block * s.block_k, tokens = std::min(s.block_k, s.length_k - first);
                    pack_columns(key + batch * k.batch + head * k.head + first * k.token, k.token, tokens, s.block_k, s.dim,
                                 keys + block * block_words);
                    pack_rows(value + batch * v.batch + head * v.head + first * v.token, v.token, tokens, s.block_k, s.dim,
                              values + block * block_words);
                }
#pragma omp for schedule(dynamic)
                for (int64_t block = 0; block < s.blocks_q; ++block) {
                    const int64_t first = block * s.block_q, tokens = std::min(s.block_q, s.length_q - first);
                    worker.run(query + batch * q.batch + head * q.head + first * q.token, q, tokens,
                               indices + (sequence * s.blocks_q + block) * s.kept, keys, values,
                               out + batch * o.batch + head * o.head + first * o.token, o,
                               logs ? logs + sequence * s.length_q + first : nullptr);
                }
            }
    }
    return failed;
}
