// Products of bfloat16 tiles with AVX-512: layouts, register tiles and 2^x, shared by the kernels of this package.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifndef __AVX512BF16__
#error "this processor has no AVX-512 BF16"
#endif

namespace {

constexpr int64_t ROWS = 8;    // rows of a register tile
constexpr int64_t LANES = 16;  // float32 numbers in a register

struct Layout {
    int64_t batch, token, head;  // strides, in numbers
};

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Room that a thread works in; no memory leaves `data` null.
struct Buffer {
    void* data;
    explicit Buffer(int64_t bytes) : data(std::aligned_alloc(64, round_up(bytes, 64))) {}
    ~Buffer() { std::free(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
};

// [columns / 16][dim / 2][16] of 32 bits: column c of pair p holds channels 2p and 2p + 1 of row c of `from`.
inline void pack_columns(const uint16_t* from, int64_t stride, int64_t tokens, int64_t room, int64_t dim, uint32_t* packed) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i offsets = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(stride)));
    for (int64_t first = 0; first < room; first += LANES) {
        const int64_t there = std::clamp<int64_t>(tokens - first, 0, LANES);
        const __mmask16 mask = static_cast<__mmask16>((1u << there) - 1);
        const uint16_t* base = from + first * stride;
        for (int64_t pair = 0; pair < dim / 2; ++pair, packed += LANES)
            _mm512_store_si512(packed, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, offsets, base + 2 * pair, 2));
    }
}

// Two vectors of 16 bfloat16 as pairs, the first one low.
inline __m512i pairs_of(__m256i low, __m256i high) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// [dim / 16][room / 2][16] of 32 bits: column c of pair p holds channel c of rows 2p and 2p + 1 of `from`.
inline void pack_rows(const uint16_t* from, int64_t stride, int64_t tokens, int64_t room, int64_t dim, uint32_t* packed) {
    for (int64_t channel = 0; channel < dim; channel += LANES)
        for (int64_t token = 0; token < room; token += 2, packed += LANES) {
            __m256i low = _mm256_setzero_si256(), high = low;
            if (token < tokens) low = _mm256_loadu_si256((const __m256i*)(from + token * stride + channel));
            if (token + 1 < tokens) high = _mm256_loadu_si256((const __m256i*)(from + (token + 1) * stride + channel));
            _mm512_store_si512(packed, pairs_of(low, high));
        }
}

// ROWS x (16 WIDTH) float32 sums in registers.
template <int WIDTH>
struct Tile {
    __m512 sums[ROWS][WIDTH];

    void clear() {
        for (auto& row : sums)
            for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    void read(const float* from, int64_t stride) {
        for (int64_t row = 0; row < ROWS; ++row)
            for (int64_t column = 0; column < WIDTH; ++column) sums[row][column] = _mm512_load_ps(from + row * stride + column * LANES);
    }
    void write(float* to, int64_t stride) const {
        for (int64_t row = 0; row < ROWS; ++row)
            for (int64_t column = 0; column < WIDTH; ++column) _mm512_store_ps(to + row * stride + column * LANES, sums[row][column]);
    }
    // Adds left by right. Pair p of row r of left lies at r row_step + p pair_step; right is packed as above, with `step`
    // between its groups of 16 columns.
    void add(const uint32_t* left, int64_t row_step, int64_t pair_step, const uint32_t* right, int64_t step, int64_t pairs) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
            __m512i columns[WIDTH];
            for (int64_t column = 0; column < WIDTH; ++column) columns[column] = _mm512_load_si512(right + column * step + pair * LANES);
            for (int64_t row = 0; row < ROWS; ++row) {
                const __m512bh broadcast = (__m512bh)_mm512_set1_epi32(static_cast<int>(left[row * row_step + pair * pair_step]));
                for (int64_t column = 0; column < WIDTH; ++column)
                    sums[row][column] = _mm512_dpbf16_ps(sums[row][column], broadcast, (__m512bh)columns[column]);
            }
        }
    }
};

// 2^x to about 3e-6, zero far below; NaN stays.
inline __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.333355815e-3f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.618129107e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.550410866e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.402265070e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.931471806e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

}  // namespace
