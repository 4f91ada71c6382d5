// Rotary low-rank attention for CPUs with AVX-512 BF16, in two passes over the tokens:
//
//     C = sum_j f(k_j) v_j^T / total          f(x) = rotate(phi(W x))
//     O = O_s + gate size N(f(q) C)           N: over the root mean square, or nothing; size: that of O_s, or 1
//
// and the gate, sigmoid(w x_h + b). Products are bfloat16 with float32 sums, all else float32. Features come as two halves,
// the even and the odd channels of the pairs that are rotated, as the maps are handed in. A thread takes all heads of a run
// of tokens one after the other, so that tables are read once, and eight tokens at a time go through all steps in its cache.
//
// Queries and keys are taken before the rotary embedding. Where the model has only the rotated ones left they are turned
// back as they are read.

#include "../block_sparse/native_tiles.h"

namespace {

constexpr int64_t CHUNK = 128;    // tokens of a run
constexpr int64_t TOGETHER = 8;   // heads whose sums a thread holds at once: a few hundred KiB

enum Feature { SILU = 0, RELU = 1, IDENTITY = 2 };

struct Sizes {
    int64_t batch, heads, length, dim, rank, per_head, feature;

    int64_t maps() const { return per_head ? heads : 1; }
    int64_t words() const { return rank * dim / 2; }  // of a packed map or summary
};

// Cosines and sines, float32: those of the features [length, rank / 2], and those of the model [length, dim / 2] or null.
struct Tables {
    const float *cos, *sin, *model_cos, *model_sin;
};

inline __m512 apply(__m512 x, int64_t feature) {
    if (feature == IDENTITY) return x;
    if (feature == RELU) return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NLE_UQ), x);
    // To 2^-14: features are rounded to bfloat16.
    const __m512 decay = power_of_two(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504088896f)));
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(decay, _mm512_set1_ps(1.0f))));
}

// x [dim] turned by the negative angles of its pairs of channels.
inline void turn_back(const uint16_t* x, const float* cos, const float* sin, int64_t dim, uint32_t* to) {
    for (int64_t pair = 0; pair < dim / 2; pair += LANES) {
        const __m512i both = _mm512_loadu_si512(x + 2 * pair);
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
        const __m512 c = _mm512_loadu_ps(cos + pair), s = _mm512_loadu_ps(sin + pair);
        const __m512 low = _mm512_fmadd_ps(even, c, _mm512_mul_ps(odd, s)), high = _mm512_fmsub_ps(odd, c, _mm512_mul_ps(even, s));
        _mm512_storeu_si512(to + pair, pairs_of(narrow(low), narrow(high)));
    }
}

inline void prefetch_row(const uint16_t* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 32) _mm_prefetch(reinterpret_cast<const char*>(row + i), _MM_HINT_T0);
}

// Rotated features of ROWS tokens of one head.
struct Features {
    const Sizes& s;
    const Tables& tables;
    Buffer rows, wide;  // bfloat16 [ROWS, dim], float32 [ROWS, rank]

    Features(const Sizes& sizes, const Tables& tables_)
        : s(sizes), tables(tables_), rows(ROWS * sizes.dim * 2), wide(ROWS * sizes.rank * 4) {}

    bool ready() const { return rows.data && wide.data; }

    // Of tokens at .. at + tokens, tokens <= ROWS; to: bfloat16 [ROWS, rank], zero past the last one.
    void compute(const uint16_t* x, int64_t step, int64_t at, int64_t tokens, const uint32_t* map, uint16_t* to) {
        const int64_t pairs = s.dim / 2, half = s.rank / 2;
        auto* own = static_cast<uint16_t*>(rows.data);
        auto* out = static_cast<float*>(wide.data);
        if (tables.model_cos) {
            for (int64_t row = 0; row < tokens; ++row)
                turn_back(x + row * step, tables.model_cos + (at + row) * pairs, tables.model_sin + (at + row) * pairs, s.dim,
                          static_cast<uint32_t*>(rows.data) + row * pairs);
            copy_rows(nullptr, 0, 0, ROWS - tokens, s.dim, own + tokens * s.dim);
        } else {
            copy_rows(x, step, tokens, ROWS, s.dim, own);
        }
        for (int64_t row = 0; row < tokens; ++row) prefetch_row(x + (ROWS + row) * step, s.dim);
        multiply_columns(own, ROWS, s.dim, map, s.rank, out, s.rank);
        for (int64_t row = 0; row < tokens; ++row) {
            const float *even = out + row * s.rank, *odd = even + half, *cos = tables.cos + (at + row) * half, *sin = tables.sin + (at + row) * half;
            for (int64_t i = 0; i < half; i += LANES) {
                const __m512 a = apply(_mm512_load_ps(even + i), s.feature), b = apply(_mm512_load_ps(odd + i), s.feature);
                const __m512 c = _mm512_loadu_ps(cos + i), d = _mm512_loadu_ps(sin + i);
                _mm256_storeu_si256((__m256i*)(to + row * s.rank + i), narrow(_mm512_fmsub_ps(a, c, _mm512_mul_ps(b, d))));
                _mm256_storeu_si256((__m256i*)(to + row * s.rank + half + i), narrow(_mm512_fmadd_ps(a, d, _mm512_mul_ps(b, c))));
            }
        }
        if (tokens < ROWS) std::memset(to + tokens * s.rank, 0, (ROWS - tokens) * s.rank * 2);
    }
};

// What a thread sums keys up with, run by run.
struct Summing {
    Features features;
    Buffer turned, pairs, values;  // bfloat16 [CHUNK, rank], the same as pairs of tokens, packed values

    Summing(const Sizes& s, const Tables& tables)
        : features(s, tables), turned(CHUNK * s.rank * 2), pairs(CHUNK * s.rank * 2), values(CHUNK * s.dim * 2) {}

    bool ready() const { return features.ready() && turned.data && pairs.data && values.data; }

    // Adds the tokens at .. at + tokens to `sum` [rank, dim].
    void add(const uint16_t* key, int64_t key_step, const uint16_t* value, int64_t value_step, int64_t at, int64_t tokens,
             const uint32_t* map, float* sum) {
        const Sizes& s = features.s;
        auto* rows = static_cast<uint16_t*>(turned.data);
        for (int64_t row = 0; row < tokens; row += ROWS)
            features.compute(key + row * key_step, key_step, at + row, std::min(ROWS, tokens - row), map, rows + row * s.rank);
        // Whole ROWS are there, so that pairs are too.
        const int64_t count = (tokens + 1) / 2;
        auto* left = static_cast<uint32_t*>(pairs.data);
        for (int64_t pair = 0; pair < count; ++pair)
            for (int64_t i = 0; i < s.rank; i += LANES) {
                const uint16_t* low = rows + 2 * pair * s.rank + i;
                _mm512_store_si512(left + pair * s.rank + i, pairs_of(_mm256_loadu_si256((const __m256i*)low),
                                                                      _mm256_loadu_si256((const __m256i*)(low + s.rank))));
            }
        auto* packed = static_cast<uint32_t*>(values.data);
        pack_rows(value, value_step, tokens, 2 * count, s.dim, packed);
        for (int64_t channel = 0; channel < s.dim; channel += 2 * LANES)
            for (int64_t row = 0; row < s.rank; row += ROWS) {
                Tile<2> tile;
                tile.read(sum + row * s.dim + channel, s.dim);
                tile.add(left + row, 1, s.rank, packed + channel * count, count * LANES, count);
                tile.write(sum + row * s.dim + channel, s.dim);
            }
    }
};

inline float sum_of_squares(const float* x, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += LANES) {
        const __m512 part = _mm512_load_ps(x + i);
        sum = _mm512_fmadd_ps(part, part, sum);
    }
    return _mm512_reduce_add_ps(sum);
}

struct Merging {
    int64_t normalized, matched;
    float epsilon, match_epsilon;

    // `to` may be `sparse`.
    void row(const float* out, const uint16_t* sparse, float gate, int64_t dim, uint16_t* to) const {
        float factor = gate;
        if (normalized) factor /= std::sqrt(sum_of_squares(out, dim) / dim + epsilon);
        if (matched) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = 0; i < dim; i += LANES) {
                const __m512 part = widen(sparse + i);
                sum = _mm512_fmadd_ps(part, part, sum);
            }
            factor *= std::sqrt(_mm512_reduce_add_ps(sum) / dim + match_epsilon);
        }
        for (int64_t i = 0; i < dim; i += LANES) {
            const __m512 merged = _mm512_fmadd_ps(_mm512_load_ps(out + i), _mm512_set1_ps(factor), widen(sparse + i));
            _mm256_storeu_si256((__m256i*)(to + i), narrow(merged));
        }
    }
};

Sizes read_sizes(const int64_t* n) { return {n[0], n[1], n[2], n[3], n[4], n[5], n[6]}; }

}  // namespace

// Tensors are bfloat16 [batch, length, heads, dim] with channels side by side, `strides` those of batch, token and head of
// each in turn; maps bfloat16 [rank, dim] or [heads, rank, dim]; cos and sin float32 [length, rank / 2]; model_cos and
// model_sin float32 [length, dim / 2] where query or key is rotated, else null; `numbers`: batch, heads, length, dim, rank,
// whether maps are per head, feature. All return 0, or 1 where memory ran out.

// summary float32 [batch, heads, rank, dim] = sum over the tokens, divided by `total`.
extern "C" int rola_sum(const uint16_t* key, const uint16_t* value, const int64_t* strides, const uint16_t* maps, const float* cos,
                        const float* sin, const float* model_cos, const float* model_sin, float* summary, const int64_t* numbers,
                        int64_t total, int threads) {
    const Sizes s = read_sizes(numbers);
    const Tables tables{cos, sin, model_cos, model_sin};
    const Layout k = layout_of(strides, 0), v = layout_of(strides, 1);
    const int64_t size = s.rank * s.dim;
    // Every thread sums a fixed run of tokens, so that the same threads give the same bits.
    Buffer partial(threads * TOGETHER * size * 4), packed(s.maps() * s.words() * 4);
    if (!partial.data || !packed.data) return 1;
    auto* map = static_cast<uint32_t*>(packed.data);
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        Summing summing(s, tables);
        if (!summing.ready()) failed = 1;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < s.maps(); ++i) pack_columns(maps + i * size, s.dim, s.rank, s.rank, s.dim, map + i * s.words());
        const int64_t share = round_up((s.length + team - 1) / team, CHUNK);
        const int64_t begin = std::min(thread * share, s.length), end = std::min(begin + share, s.length);
        float* own = static_cast<float*>(partial.data) + thread * TOGETHER * size;
        for (int64_t group = 0; !failed && group < s.batch * s.heads; group += TOGETHER) {
            const int64_t last = std::min(group + TOGETHER, s.batch * s.heads);
            std::fill(own, own + (last - group) * size, 0.0f);
            for (int64_t token = begin; token < end; token += CHUNK)
                for (int64_t sequence = group; sequence < last; ++sequence) {
                    const int64_t batch = sequence / s.heads, head = sequence % s.heads;
                    summing.add(key + batch * k.batch + head * k.head + token * k.token, k.token,
                                value + batch * v.batch + head * v.head + token * v.token, v.token, token, std::min(CHUNK, end - token),
                                map + (s.per_head ? head * s.words() : 0), own + (sequence - group) * size);
                }
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t i = 0; i < (last - group) * size; ++i) {
                float sum = 0;
                for (int64_t other = 0; other < team; ++other) sum += static_cast<float*>(partial.data)[other * TOGETHER * size + i];
                summary[group * size + i] = sum / total;
            }
        }
    }
    return failed;
}

// Tensors query, sparse, out, which may be sparse; gate float32 [batch, length, heads]; summary float32 [batch, heads, rank,
// dim].
extern "C" int rola_merge(const uint16_t* query, const uint16_t* sparse, uint16_t* out, const int64_t* strides, const float* gate,
                          const uint16_t* maps, const float* cos, const float* sin, const float* model_cos, const float* model_sin,
                          const float* summary, const int64_t* numbers, int64_t normalized, float epsilon, int64_t matched,
                          float match_epsilon, int threads) {
    const Sizes s = read_sizes(numbers);
    const Tables tables{cos, sin, model_cos, model_sin};
    const Merging merging{normalized, matched, epsilon, match_epsilon};
    const Layout q = layout_of(strides, 0), p = layout_of(strides, 1), o = layout_of(strides, 2);
    const int64_t size = s.rank * s.dim, chunks = (s.length + CHUNK - 1) / CHUNK, pick = 0;
    Buffer packed_maps(s.maps() * s.words() * 4), packed_sums(s.batch * s.heads * s.words() * 4);
    if (!packed_maps.data || !packed_sums.data) return 1;
    auto *map = static_cast<uint32_t*>(packed_maps.data), *sums = static_cast<uint32_t*>(packed_sums.data);
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
    {
        Features features(s, tables);
        Buffer rounded(size * 2), turned(ROWS * s.rank * 2), made(ROWS * s.dim * 4);
        if (!features.ready() || !rounded.data || !turned.data || !made.data) failed = 1;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < s.maps(); ++i) pack_columns(maps + i * size, s.dim, s.rank, s.rank, s.dim, map + i * s.words());
#pragma omp for schedule(static)
        for (int64_t sequence = 0; sequence < s.batch * s.heads; ++sequence) {
            if (!rounded.data) continue;
            auto* to = static_cast<uint16_t*>(rounded.data);
            for (int64_t i = 0; i < size; i += LANES)
                _mm256_storeu_si256((__m256i*)(to + i), narrow(_mm512_loadu_ps(summary + sequence * size + i)));
            pack_rows(to, s.dim, s.rank, s.rank, s.dim, sums + sequence * s.words());
        }
        auto* left = static_cast<uint16_t*>(turned.data);
        auto* linear = static_cast<float*>(made.data);
#pragma omp for schedule(dynamic)
        for (int64_t chunk = 0; chunk < s.batch * chunks; ++chunk) {
            if (failed) continue;
            const int64_t batch = chunk / chunks, begin = chunk % chunks * CHUNK, end = std::min(begin + CHUNK, s.length);
            for (int64_t head = 0; head < s.heads; ++head)
                for (int64_t first = begin; first < end; first += ROWS) {
                    const int64_t tokens = std::min(ROWS, end - first);
                    const uint16_t* own = sparse + batch * p.batch + head * p.head + first * p.token;
                    for (int64_t row = 0; row < tokens; ++row) prefetch_row(own + row * p.token, s.dim);
                    features.compute(query + batch * q.batch + head * q.head + first * q.token, q.token, first, tokens,
                                     map + (s.per_head ? head * s.words() : 0), left);
                    add_rows(left, s.rank, ROWS, sums + (batch * s.heads + head) * s.words(), &pick, 1, s.rank, s.dim, linear, true);
                    for (int64_t row = 0; row < tokens; ++row)
                        merging.row(linear + row * s.dim, own + row * p.token, gate[(batch * s.length + first + row) * s.heads + head], s.dim,
                                    out + batch * o.batch + head * o.head + (first + row) * o.token);
                }
        }
    }
    return failed;
}

// gate float32 [tokens, heads] = sigmoid(w x_h + bias) size, from x [tokens, heads, dim]; w float32 [dim], bias and size
// float32 [heads]. `step`: from one token of x to the next.
extern "C" int rola_gate(const uint16_t* x, int64_t step, int64_t tokens, int64_t heads, int64_t dim, const float* w,
                         const float* bias, const float* size, float* gate, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t head = 0; head < heads; ++head) {
            const uint16_t* own = x + token * step + head * dim;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = 0; i < dim; i += LANES) sum = _mm512_fmadd_ps(widen(own + i), _mm512_loadu_ps(w + i), sum);
            gate[token * heads + head] = size[head] / (1.0f + std::exp(-(_mm512_reduce_add_ps(sum) + bias[head])));
        }
    return 0;
}
