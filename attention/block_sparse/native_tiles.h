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

#ifdef __linux__
#include <sys/mman.h>
#endif

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

constexpr int64_t HUGE_PAGE = 2 << 20;

// Asks for huge pages where these fit whole: a fault for each 4 KiB of fresh memory costs more than filling them.
inline void use_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const int64_t first = round_up(reinterpret_cast<intptr_t>(data), HUGE_PAGE);
    const int64_t last = (reinterpret_cast<intptr_t>(data) + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Room to work in; no memory leaves `data` null.
struct Buffer {
    void* data;
    explicit Buffer(int64_t bytes) {
        const int64_t unit = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : 64;
        data = std::aligned_alloc(unit, round_up(bytes, unit));
        if (data && unit == HUGE_PAGE) use_huge_pages(data, round_up(bytes, unit));
    }
    ~Buffer() { std::free(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
};

// Swaps rows and columns of 16 x 16 numbers of 32 bits.
inline void transpose(__m512i (&x)[LANES]) {
    __m512i t[LANES];
    for (int64_t i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int64_t i = 0; i < LANES; i += 4) {
        x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // Quarter l of x[i + j] holds column 4 l + j of rows i .. i + 3.
    for (int64_t j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd), d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        t[j] = _mm512_shuffle_i32x4(a, b, 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
    for (int64_t i = 0; i < LANES; ++i) x[i] = t[i];
}

// [columns / 16][dim / 2][16] of 32 bits: column c of pair p holds channels 2p and 2p + 1 of row c of `from`.
inline void pack_columns(const uint16_t* from, int64_t stride, int64_t tokens, int64_t room, int64_t dim, uint32_t* packed) {
    for (int64_t first = 0; first < room; first += LANES) {
        const int64_t there = std::clamp<int64_t>(tokens - first, 0, LANES);
        for (int64_t pair = 0; pair < dim / 2; pair += LANES) {
            const int64_t pairs = std::min(LANES, dim / 2 - pair);
            const __mmask16 mask = static_cast<__mmask16>((1u << pairs) - 1);
            __m512i block[LANES];
            for (int64_t row = 0; row < LANES; ++row)
                block[row] = row < there ? _mm512_maskz_loadu_epi32(mask, from + (first + row) * stride + 2 * pair) : _mm512_setzero_si512();
            transpose(block);
            for (int64_t i = 0; i < pairs; ++i, packed += LANES) _mm512_store_si512(packed, block[i]);
        }
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
    __m512 sum = _mm512_set1_ps(9.58285e-3f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.590643e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.4024099e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9312419e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

// 16 bfloat16 as float32.
inline __m512 widen(const uint16_t* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// to [rows, columns] = left [rows, dim] by the columns packed by `pack_columns`. Rows in whole ROWS, columns in whole LANES.
inline void multiply_columns(const uint16_t* left, int64_t rows, int64_t dim, const uint32_t* packed, int64_t columns, float* to,
                             int64_t stride) {
    const auto* words = reinterpret_cast<const uint32_t*>(left);
    const int64_t pairs = dim / 2, step = pairs * LANES;
    const auto part = [&](auto tile, int64_t column) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            tile.clear();
            tile.add(words + row * pairs, pairs, 1, packed + column * pairs, step, pairs);
            tile.write(to + row * stride + column, stride);
        }
    };
    int64_t column = 0;
    for (; column + 2 * LANES <= columns; column += 2 * LANES) part(Tile<2>(), column);
    for (; column < columns; column += LANES) part(Tile<1>(), column);
}

// sums [rows, dim] += left [rows, blocks block] by `blocks` blocks of `block` rows packed by `pack_rows`, those that
// `picks` names; `first`: instead of what was there. Rows in whole ROWS, block even, dim in whole LANES.
inline void add_rows(const uint16_t* left, int64_t stride, int64_t rows, const uint32_t* packed, const int64_t* picks, int64_t blocks,
                     int64_t block, int64_t dim, float* sums, bool first) {
    const auto* words = reinterpret_cast<const uint32_t*>(left);
    const int64_t pairs = block / 2, step = pairs * LANES;
    const auto part = [&](auto tile, int64_t channel) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            float* to = sums + row * dim + channel;
            if (first)
                tile.clear();
            else
                tile.read(to, dim);
            for (int64_t i = 0; i < blocks; ++i)
                tile.add(words + row * stride / 2 + i * pairs, stride / 2, 1, packed + picks[i] * block * dim / 2 + channel * pairs, step,
                         pairs);
            tile.write(to, dim);
        }
    };
    int64_t channel = 0;
    for (; channel + 2 * LANES <= dim; channel += 2 * LANES) part(Tile<2>(), channel);
    for (; channel < dim; channel += LANES) part(Tile<1>(), channel);
}

// Rows first .. first + tokens of `from`, side by side; zeros up to `rows`.
inline void copy_rows(const uint16_t* from, int64_t stride, int64_t tokens, int64_t rows, int64_t dim, uint16_t* to) {
    for (int64_t row = 0; row < tokens; ++row) std::memcpy(to + row * dim, from + row * stride, dim * 2);
    if (rows > tokens) std::memset(to + tokens * dim, 0, (rows - tokens) * dim * 2);
}

inline Layout layout_of(const int64_t* strides, int64_t tensor) {
    return {strides[3 * tensor], strides[3 * tensor + 1], strides[3 * tensor + 2]};
}

}  // namespace
