// Rotary low-rank attention for CPUs with AVX-512 BF16, in two passes over the tokens of each head:
//
//     C = sum_j f(k_j) v_j^T / total          f(x) = rotate(phi(W x))
//     O = O_s + gate size N(f(q) C)           N: over the root mean square, or nothing; size: that of O_s, or 1
//
// Products are bfloat16 with float32 sums, all else float32. Features come as two halves, the even and the odd channels
// of the pairs that are rotated, as the maps are handed in.

#include "../block_sparse/native_tiles.h"

namespace {

constexpr int64_t CHUNK = 128;  // tokens that a thread works on at a time

enum Feature { SILU = 0, RELU = 1, IDENTITY = 2 };

struct Sizes {
    int64_t batch, heads, length, dim, rank, per_head, feature;
};

inline __m512 apply(__m512 x, int64_t feature) {
    if (feature == IDENTITY) return x;
    if (feature == RELU) return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NLE_UQ), x);
    const __m512 decay = power_of_two(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504088896f)));
    return _mm512_div_ps(x, _mm512_add_ps(decay, _mm512_set1_ps(1.0f)));
}

// Rotated features of up to CHUNK tokens of one head.
struct Features {
    const Sizes& s;
    Buffer map, rows, wide;  // packed map, copied tokens, float32 [CHUNK, rank]

    explicit Features(const Sizes& sizes)
        : s(sizes), map(sizes.rank * sizes.dim * 2), rows(CHUNK * sizes.dim * 2), wide(CHUNK * sizes.rank * 4) {}

    bool ready() const { return map.data && rows.data && wide.data; }

    void set_map(const uint16_t* maps, int64_t head) {
        pack_columns(maps + (s.per_head ? head * s.rank * s.dim : 0), s.dim, s.rank, s.rank, s.dim, static_cast<uint32_t*>(map.data));
    }

    const float* compute(const uint16_t* x, int64_t stride, int64_t tokens, const float* cos, const float* sin) {
        const int64_t room = round_up(tokens, ROWS), pairs = s.dim / 2, half = s.rank / 2;
        auto* own = static_cast<uint16_t*>(rows.data);
        for (int64_t token = 0; token < room; ++token) {
            if (token < tokens)
                std::memcpy(own + token * s.dim, x + token * stride, s.dim * 2);
            else
                std::memset(own + token * s.dim, 0, s.dim * 2);
        }
        auto* out = static_cast<float*>(wide.data);
        for (int64_t column = 0; column < s.rank; column += 2 * LANES)
            for (int64_t token = 0; token < room; token += ROWS) {
                Tile<2> tile;
                tile.clear();
                tile.add(static_cast<uint32_t*>(rows.data) + token * pairs, pairs, 1, static_cast<uint32_t*>(map.data) + column * pairs,
                         pairs * LANES, pairs);
                tile.write(out + token * s.rank + column, s.rank);
            }
        for (int64_t token = 0; token < tokens; ++token) {
            float *even = out + token * s.rank, *odd = even + half;
            for (int64_t i = 0; i < half; i += LANES) {
                const __m512 a = apply(_mm512_load_ps(even + i), s.feature), b = apply(_mm512_load_ps(odd + i), s.feature);
                const __m512 c = _mm512_loadu_ps(cos + token * half + i), d = _mm512_loadu_ps(sin + token * half + i);
                _mm512_store_ps(even + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, d)));
                _mm512_store_ps(odd + i, _mm512_fmadd_ps(a, d, _mm512_mul_ps(b, c)));
            }
        }
        return out;
    }
};

inline __m256i narrow(const float* from) { return (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(from)); }

// Adds the sum over the tokens of one run to `sum` [rank, dim].
void add_keys(Features& features, const uint16_t* key, int64_t key_step, const uint16_t* value, int64_t value_step, int64_t tokens,
              const float* cos, const float* sin, uint32_t* pairs_of_features, uint32_t* packed_values, float* sum) {
    const Sizes& s = features.s;
    const float* wide = features.compute(key, key_step, tokens, cos, sin);
    const int64_t pairs = (tokens + 1) / 2;
    for (int64_t pair = 0; pair < pairs; ++pair)
        for (int64_t i = 0; i < s.rank; i += LANES) {
            const __m256i low = narrow(wide + 2 * pair * s.rank + i);
            const __m256i high = 2 * pair + 1 < tokens ? narrow(wide + (2 * pair + 1) * s.rank + i) : _mm256_setzero_si256();
            _mm512_store_si512(pairs_of_features + pair * s.rank + i, ::pairs_of(low, high));
        }
    pack_rows(value, value_step, tokens, 2 * pairs, s.dim, packed_values);
    for (int64_t channel = 0; channel < s.dim; channel += 2 * LANES)
        for (int64_t row = 0; row < s.rank; row += ROWS) {
            Tile<2> tile;
            tile.read(sum + row * s.dim + channel, s.dim);
            tile.add(pairs_of_features + row, 1, s.rank, packed_values + channel * pairs, pairs * LANES, pairs);
            tile.write(sum + row * s.dim + channel, s.dim);
        }
}

inline float sum_of_squares(const float* x, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += LANES) {
        const __m512 part = _mm512_load_ps(x + i);
        sum = _mm512_fmadd_ps(part, part, sum);
    }
    return _mm512_reduce_add_ps(sum);
}

inline __m512 widen(const uint16_t* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

void merge_row(const float* out, const uint16_t* sparse, float gate, int64_t dim, bool normalized, float epsilon, bool matched,
               float match_epsilon, uint16_t* to) {
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
        _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(merged));
    }
}

Sizes read_sizes(const int64_t* n) { return {n[0], n[1], n[2], n[3], n[4], n[5], n[6]}; }

Layout layout(const int64_t* strides, int64_t tensor) { return {strides[3 * tensor], strides[3 * tensor + 1], strides[3 * tensor + 2]}; }

}  // namespace

// Tensors are bfloat16 [batch, length, heads, dim] with channels side by side, `strides` those of batch, token and head of
// each in turn; maps bfloat16 [rank, dim] or [heads, rank, dim]; cos and sin float32 [length, rank / 2]; `numbers`: batch,
// heads, length, dim, rank, whether maps are per head, feature. Both return 0, or 1 where memory ran out.

// summary float32 [batch, heads, rank, dim] = sum over the tokens, divided by `total`.
extern "C" int rola_sum(const uint16_t* key, const uint16_t* value, const int64_t* strides, const uint16_t* maps, const float* cos,
                        const float* sin, float* summary, const int64_t* numbers, int64_t total, int threads) {
    const Sizes s = read_sizes(numbers);
    const Layout k = layout(strides, 0), v = layout(strides, 1);
    const int64_t size = s.rank * s.dim, half = s.rank / 2;
    // Every thread sums a fixed run of tokens, so that the same threads give the same bits.
    Buffer partial(threads * size * 4);
    if (!partial.data) return 1;
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        Features features(s);
        Buffer pairs(CHUNK / 2 * s.rank * 4), values(CHUNK * s.dim * 2);
        if (!features.ready() || !pairs.data || !values.data) failed = 1;
#pragma omp barrier
        if (!failed)
            for (int64_t sequence = 0; sequence < s.batch * s.heads; ++sequence) {
                const int64_t batch = sequence / s.heads, head = sequence % s.heads;
                const int64_t share = round_up((s.length + team - 1) / team, CHUNK);
                const int64_t begin = std::min(thread * share, s.length), end = std::min(begin + share, s.length);
                float* own = static_cast<float*>(partial.data) + thread * size;
                std::fill(own, own + size, 0.0f);
                features.set_map(maps, head);
                for (int64_t token = begin; token < end; token += CHUNK)
                    add_keys(features, key + batch * k.batch + head * k.head + token * k.token, k.token,
                             value + batch * v.batch + head * v.head + token * v.token, v.token, std::min(CHUNK, end - token),
                             cos + token * half, sin + token * half, static_cast<uint32_t*>(pairs.data),
                             static_cast<uint32_t*>(values.data), own);
#pragma omp barrier
#pragma omp for schedule(static)
                for (int64_t i = 0; i < size; ++i) {
                    float sum = 0;
                    for (int64_t other = 0; other < team; ++other) sum += static_cast<float*>(partial.data)[other * size + i];
                    summary[sequence * size + i] = sum / total;
                }
            }
    }
    return failed;
}

// Tensors query, sparse, out; gate float32 [batch, length, heads]; summary float32 [batch, heads, rank, dim].
extern "C" int rola_merge(const uint16_t* query, const uint16_t* sparse, uint16_t* out, const int64_t* strides, const float* gate,
                          const uint16_t* maps, const float* cos, const float* sin, const float* summary, const int64_t* numbers,
                          int64_t normalized, float epsilon, int64_t matched, float match_epsilon, int threads) {
    const Sizes s = read_sizes(numbers);
    const Layout q = layout(strides, 0), p = layout(strides, 1), o = layout(strides, 2);
    const int64_t size = s.rank * s.dim, half = s.rank / 2, pairs = s.rank / 2, chunks = (s.length + CHUNK - 1) / CHUNK;
    Buffer rounded(size * 2), packed(size * 2);
    if (!rounded.data || !packed.data) return 1;
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
    {
        Features features(s);
        Buffer narrow_features(CHUNK * s.rank * 2), sums(CHUNK * s.dim * 4);
        if (!features.ready() || !narrow_features.data || !sums.data) failed = 1;
#pragma omp barrier
        if (!failed)
            for (int64_t sequence = 0; sequence < s.batch * s.heads; ++sequence) {
                const int64_t batch = sequence / s.heads, head = sequence % s.heads;
#pragma omp single
                {
                    auto* to = static_cast<uint16_t*>(rounded.data);
                    for (int64_t i = 0; i < size; i += LANES)
                        _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(summary + sequence * size + i)));
                    pack_rows(to, s.dim, s.rank, s.rank, s.dim, static_cast<uint32_t*>(packed.data));
                }
                features.set_map(maps, head);
#pragma omp for schedule(dynamic)
                for (int64_t chunk = 0; chunk < chunks; ++chunk) {
                    const int64_t first = chunk * CHUNK, tokens = std::min(CHUNK, s.length - first), room = round_up(tokens, ROWS);
                    const float* wide = features.compute(query + batch * q.batch + head * q.head + first * q.token, q.token, tokens,
                                                         cos + first * half, sin + first * half);
                    auto* left = static_cast<uint16_t*>(narrow_features.data);
                    for (int64_t i = 0; i < room * s.rank; i += LANES) _mm256_store_si256((__m256i*)(left + i), narrow(wide + i));
                    auto* sum = static_cast<float*>(sums.data);
                    for (int64_t channel = 0; channel < s.dim; channel += 2 * LANES)
                        for (int64_t token = 0; token < room; token += ROWS) {
                            Tile<2> tile;
                            tile.clear();
                            tile.add(static_cast<uint32_t*>(narrow_features.data) + token * pairs, pairs, 1,
                                     static_cast<uint32_t*>(packed.data) + channel * pairs, pairs * LANES, pairs);
                            tile.write(sum + token * s.dim + channel, s.dim);
                        }
                    for (int64_t token = 0; token < tokens; ++token) {
                        const int64_t at = first + token;
                        merge_row(sum + token * s.dim, sparse + batch * p.batch + at * p.token + head * p.head,
                                  gate[(batch * s.length + at) * s.heads + head], s.dim, normalized, epsilon, matched, match_epsilon,
                                  out + batch * o.batch + at * o.token + head * o.head);
                    }
                }
            }
    }
    return failed;
}
