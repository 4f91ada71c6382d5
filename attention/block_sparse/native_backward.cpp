// Gradients of block-sparse softmax attention for CPUs with AVX-512 BF16. With P = 2^(scores - log), the weights of the
// forward pass, and G the slope of the output O:
//
//     D = sum_d G O        dS = P (G V^T - D)        dQ = scale dS K        dK = scale dS^T Q        dV = P^T G
//
// dQ goes through the kept key blocks of each query block; dK and dV go through the query blocks that kept a key block,
// by the inverse of the list. Either way scores are computed again, sums stay with one thread and are made in a fixed
// order, so that results repeat. Products are bfloat16 with float32 sums; P and dS are rounded once.

#include "native_tiles.h"

namespace {

constexpr int64_t RUN = 128;  // columns of scores that are worked on at a time
constexpr float LOG2_E = 1.44269504088896f;

struct Sizes {
    int64_t batch, heads, length_q, length_k, dim, block_q, block_k, blocks_q, blocks_k, kept;
    float scale;
};

// Tokens of one head, packed block by block: channels as columns, or tokens as rows of a product.
struct Packed {
    uint32_t *columns, *rows;
    int64_t words;  // of a block

    uint32_t* column(int64_t block) const { return columns + block * words; }
    uint32_t* row(int64_t block) const { return rows + block * words; }
};

// What one thread needs to go through blocks of columns for one block of rows. In the walk for dQ rows are queries, in
// that for dK and dV they are keys.
struct Worker {
    const Sizes& s;
    int64_t rows_max, block, run_blocks, stride;
    Buffer left, other, scores, slopes, weights, turned, sums, more;

    Worker(const Sizes& sizes, int64_t row_block, int64_t column_block)
        : s(sizes), rows_max(round_up(row_block, ROWS)), block(column_block), run_blocks(std::max<int64_t>(1, RUN / column_block)),
          stride(run_blocks * column_block), left(rows_max * s.dim * 2), other(rows_max * s.dim * 2), scores(rows_max * stride * 4),
          slopes(rows_max * stride * 4), weights(rows_max * stride * 2), turned(rows_max * stride * 2), sums(rows_max * s.dim * 4),
          more(rows_max * s.dim * 4) {}

    bool ready() const {
        return left.data && other.data && scores.data && slopes.data && weights.data && turned.data && sums.data && more.data;
    }

    void read(const uint16_t* x, int64_t x_step, const uint16_t* y, int64_t y_step, int64_t tokens) {
        const int64_t rows = round_up(tokens, ROWS);
        copy_rows(x, x_step, tokens, rows, s.dim, static_cast<uint16_t*>(left.data));
        copy_rows(y, y_step, tokens, rows, s.dim, static_cast<uint16_t*>(other.data));
    }

    // Scores and slopes of `count` blocks: left by the columns of `x`, other by those of `y`.
    void multiply(int64_t rows, const Packed& x, const Packed& y, const int64_t* picks, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            multiply_columns(static_cast<uint16_t*>(left.data), rows, s.dim, x.column(picks[i]), block,
                             static_cast<float*>(scores.data) + i * block, stride);
            multiply_columns(static_cast<uint16_t*>(other.data), rows, s.dim, y.column(picks[i]), block,
                             static_cast<float*>(slopes.data) + i * block, stride);
        }
    }

    // P and dS of 16 columns of a row.
    void soften(int64_t at, __m512 log, __m512 inner, bool keep_weights) {
        const __m512 score = _mm512_load_ps(static_cast<float*>(scores.data) + at);
        const __m512 weight = power_of_two(_mm512_fmsub_ps(score, _mm512_set1_ps(s.scale * LOG2_E), log));
        const __m512 slope = _mm512_sub_ps(_mm512_load_ps(static_cast<float*>(slopes.data) + at), inner);
        if (keep_weights) _mm256_store_si256((__m256i*)(static_cast<uint16_t*>(weights.data) + at), narrow(weight));
        _mm256_store_si256((__m256i*)(static_cast<uint16_t*>(turned.data) + at), narrow(_mm512_mul_ps(weight, slope)));
    }

    void add(const Buffer& factors, const Packed& x, int64_t rows, const int64_t* picks, int64_t count, const Buffer& to, bool first) {
        add_rows(static_cast<uint16_t*>(factors.data), stride, rows, x.rows, picks, count, block, s.dim,
                 static_cast<float*>(to.data), first);
    }

    void write(const Buffer& from, int64_t tokens, float factor, uint16_t* to, int64_t step) const {
        const auto* sum = static_cast<const float*>(from.data);
        for (int64_t row = 0; row < tokens; ++row)
            for (int64_t i = 0; i < s.dim; i += LANES)
                _mm256_storeu_si256((__m256i*)(to + row * step + i),
                                    narrow(_mm512_mul_ps(_mm512_load_ps(sum + row * s.dim + i), _mm512_set1_ps(factor))));
    }
};

// dQ of one query block; `logs` and `inner` are those of its tokens.
void grad_query(Worker& w, const Packed& keys, const Packed& values, const int64_t* picks, int64_t tokens, const float* logs,
                const float* inner, uint16_t* out, int64_t out_step) {
    const Sizes& s = w.s;
    const int64_t rows = round_up(tokens, ROWS);
    int64_t count = 0;
    while (count < s.kept && picks[count] < s.blocks_k) ++count;
    for (int64_t first = 0; first < count; first += w.run_blocks) {
        const int64_t blocks = std::min(w.run_blocks, count - first);
        w.multiply(rows, keys, values, picks + first, blocks);
        // Only the last key block can be short, and it comes last.
        const int64_t last = picks[first + blocks - 1];
        const int64_t real = (blocks - 1) * s.block_k + std::min(s.block_k, s.length_k - last * s.block_k);
        for (int64_t row = 0; row < rows; ++row) {
            float* scores = static_cast<float*>(w.scores.data) + row * w.stride;
            std::fill(scores + real, scores + blocks * s.block_k, -INFINITY);
            const __m512 log = _mm512_set1_ps(row < tokens ? logs[row] : INFINITY), own = _mm512_set1_ps(row < tokens ? inner[row] : 0.0f);
            for (int64_t column = 0; column < blocks * w.block; column += LANES) w.soften(row * w.stride + column, log, own, false);
        }
        w.add(w.turned, keys, rows, picks + first, blocks, w.sums, first == 0);
    }
    w.write(w.sums, tokens, s.scale, out, out_step);
}

// dK and dV of one key block, from the query blocks picks[0 .. count] that kept it; `logs` and `inner` are those of all
// query blocks, infinite and zero past the last query: the weight there is zero.
void grad_key_value(Worker& w, const Packed& queries, const Packed& grads, const int64_t* picks, int64_t count, int64_t tokens,
                    const float* logs, const float* inner, uint16_t* grad_key, int64_t key_step, uint16_t* grad_value,
                    int64_t value_step) {
    const int64_t rows = round_up(tokens, ROWS);
    for (int64_t first = 0; first < count; first += w.run_blocks) {
        const int64_t blocks = std::min(w.run_blocks, count - first);
        w.multiply(rows, queries, grads, picks + first, blocks);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = 0; i < blocks; ++i)
                for (int64_t column = 0; column < w.block; column += LANES) {
                    const int64_t token = picks[first + i] * w.block + column;
                    w.soften(row * w.stride + i * w.block + column, _mm512_loadu_ps(logs + token), _mm512_loadu_ps(inner + token), true);
                }
        w.add(w.weights, grads, rows, picks + first, blocks, w.more, first == 0);
        w.add(w.turned, queries, rows, picks + first, blocks, w.sums, first == 0);
    }
    if (count == 0) {
        std::memset(w.sums.data, 0, rows * w.s.dim * 4);
        std::memset(w.more.data, 0, rows * w.s.dim * 4);
    }
    w.write(w.sums, tokens, w.s.scale, grad_key, key_step);
    w.write(w.more, tokens, 1.0f, grad_value, value_step);
}

// Which query blocks kept each key block: those of key block k are inverse[starts[k] .. starts[k + 1]], ascending.
void invert(const Sizes& s, const int64_t* picks, int64_t* starts, int64_t* inverse) {
    std::fill(starts, starts + s.blocks_k + 1, 0);
    const auto each = [&](auto use) {
        for (int64_t row = 0; row < s.blocks_q; ++row)
            for (int64_t i = 0; i < s.kept && picks[row * s.kept + i] < s.blocks_k; ++i) use(row, picks[row * s.kept + i]);
    };
    each([&](int64_t, int64_t pick) { ++starts[pick + 1]; });
    for (int64_t k = 0; k < s.blocks_k; ++k) starts[k + 1] += starts[k];
    each([&](int64_t row, int64_t pick) { inverse[starts[pick]++] = row; });
    // Each start has moved to its end, which is the start of the next.
    for (int64_t k = s.blocks_k; k > 0; --k) starts[k] = starts[k - 1];
    starts[0] = 0;
}

// D of up to LANES tokens, zero past the last one. Summed in the order in which a tile sums G V^T, so that over one key
// alone, where O is V, the two cancel and the gradients are zero.
void inner_products(const uint16_t* grad, int64_t grad_step, const uint16_t* out, int64_t out_step, int64_t tokens, int64_t dim,
                    float* to) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i x = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(grad_step)));
    const __m512i y = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(out_step)));
    const __m512i none = _mm512_setzero_si512();
    const __mmask16 mask = static_cast<__mmask16>((1u << std::clamp<int64_t>(tokens, 0, LANES)) - 1);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += 2)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_mask_i32gather_epi32(none, mask, x, grad + i, 2),
                               (__m512bh)_mm512_mask_i32gather_epi32(none, mask, y, out + i, 2));
    _mm512_store_ps(to, sum);
}

template <typename T>
T* at(T* x, const Layout& l, int64_t batch, int64_t head, int64_t token) {
    return x + batch * l.batch + head * l.head + token * l.token;
}

void pack(const Packed& to, int64_t block, int64_t size, const uint16_t* x, int64_t step, int64_t tokens, int64_t dim) {
    pack_columns(x, step, tokens, size, dim, to.column(block));
    if (to.rows) pack_rows(x, step, tokens, size, dim, to.row(block));
}

}  // namespace

// Tensors as in `block_sparse_attention`: query, key, value, out, grad_out, grad_query, grad_key, grad_value, `strides`
// those of each in turn; `logs` as that function left them. Returns 0, or 1 where memory ran out.
extern "C" int block_sparse_backward(const uint16_t* query, const uint16_t* key, const uint16_t* value, const uint16_t* out,
                                     const uint16_t* grad_out, uint16_t* grad_q, uint16_t* grad_k, uint16_t* grad_v,
                                     const int64_t* strides, const int64_t* indices, const float* logs, const int64_t* numbers,
                                     float scale, int threads) {
    const Sizes s{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6],
                  (numbers[2] + numbers[5] - 1) / numbers[5], (numbers[3] + numbers[6] - 1) / numbers[6], numbers[7], scale};
    Layout layouts[8];
    for (int64_t i = 0; i < 8; ++i) layouts[i] = layout_of(strides, i);
    const Layout &q = layouts[0], &k = layouts[1], &v = layouts[2], &o = layouts[3], &g = layouts[4];
    const Layout &gq = layouts[5], &gk = layouts[6], &gv = layouts[7];
    const int64_t filled = s.blocks_q * s.block_q, room = std::max(filled, s.blocks_k * s.block_k) * s.dim * 2;
    // The walk for dQ reads packed keys and values, the one after it packed queries and slopes, in the same places.
    Buffer places[4] = {Buffer(room), Buffer(room), Buffer(room), Buffer(room)};
    Buffer own_logs(filled * 4), own_inner(filled * 4), starts((s.blocks_k + 1) * 8), inverse(std::max<int64_t>(1, s.blocks_q * s.kept) * 8);
    uint32_t* place[4];
    for (int64_t i = 0; i < 4; ++i) place[i] = static_cast<uint32_t*>(places[i].data);
    const int64_t words_q = s.block_q * s.dim / 2, words_k = s.block_k * s.dim / 2;
    const Packed keys{place[0], place[1], words_k}, values{place[2], nullptr, words_k};
    const Packed queries{place[0], place[1], words_q}, grads{place[2], place[3], words_q};
    if (!place[0] || !place[1] || !place[2] || !place[3] || !own_logs.data || !own_inner.data || !starts.data || !inverse.data)
        return 1;
    auto *log = static_cast<float*>(own_logs.data), *inner = static_cast<float*>(own_inner.data);
    auto *start = static_cast<int64_t*>(starts.data), *rows_of = static_cast<int64_t*>(inverse.data);
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
    {
        Worker by_query(s, s.block_q, s.block_k), by_key(s, s.block_k, s.block_q);
        if (!by_query.ready() || !by_key.ready()) failed = 1;
#pragma omp barrier
        if (!failed)
            for (int64_t sequence = 0; sequence < s.batch * s.heads; ++sequence) {
                const int64_t batch = sequence / s.heads, head = sequence % s.heads;
                const int64_t* picks = indices + sequence * s.blocks_q * s.kept;
#pragma omp single nowait
                invert(s, picks, start, rows_of);
#pragma omp for schedule(static) nowait
                for (int64_t first = 0; first < filled; first += LANES) {
                    inner_products(at(grad_out, g, batch, head, first), g.token, at(out, o, batch, head, first), o.token,
                                   s.length_q - first, s.dim, inner + first);
                    for (int64_t token = first; token < first + LANES; ++token)
                        log[token] = token < s.length_q ? logs[sequence * s.length_q + token] : INFINITY;
                }
#pragma omp for schedule(static)
                for (int64_t block = 0; block < s.blocks_k; ++block) {
                    const int64_t first = block * s.block_k, tokens = std::min(s.block_k, s.length_k - first);
                    pack(keys, block, s.block_k, at(key, k, batch, head, first), k.token, tokens, s.dim);
                    pack(values, block, s.block_k, at(value, v, batch, head, first), v.token, tokens, s.dim);
                }
#pragma omp for schedule(dynamic)
                for (int64_t block = 0; block < s.blocks_q; ++block) {
                    const int64_t first = block * s.block_q, tokens = std::min(s.block_q, s.length_q - first);
                    by_query.read(at(query, q, batch, head, first), q.token, at(grad_out, g, batch, head, first), g.token, tokens);
                    grad_query(by_query, keys, values, picks + block * s.kept, tokens, log + first, inner + first,
                               at(grad_q, gq, batch, head, first), gq.token);
                }
#pragma omp for schedule(static)
                for (int64_t block = 0; block < s.blocks_q; ++block) {
                    const int64_t first = block * s.block_q, tokens = std::min(s.block_q, s.length_q - first);
                    pack(queries, block, s.block_q, at(query, q, batch, head, first), q.token, tokens, s.dim);
                    pack(grads, block, s.block_q, at(grad_out, g, batch, head, first), g.token, tokens, s.dim);
                }
#pragma omp for schedule(dynamic)
                for (int64_t block = 0; block < s.blocks_k; ++block) {
                    const int64_t first = block * s.block_k, tokens = std::min(s.block_k, s.length_k - first);
                    by_key.read(at(key, k, batch, head, first), k.token, at(value, v, batch, head, first), v.token, tokens);
                    grad_key_value(by_key, queries, grads, rows_of + start[block], start[block + 1] - start[block], tokens, log, inner,
                                   at(grad_k, gk, batch, head, first), gk.token,
                                   at(grad_v, gv, batch, head, first), gv.token);
                }
            }
    }
    return failed;
}
