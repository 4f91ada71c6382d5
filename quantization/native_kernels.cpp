// What lies between the products of a quantized Wan block, each in one pass over its rows, for CPUs.
//
// Plain C++ that compilers turn into vector code. Sums and factors are float32; what is quantized is the number after
// its rounding to the type of the tensor, so that a product does not depend on whether the quantization was fused.
// Rows are shared out to threads. Every entry point exists for bfloat16 (_bf16) and float32 (_f32).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline void put(float& to, float x) { to = x; }
inline void put(BFloat16& to, float x) {
    // Nearest, ties to even; NaN stays one.
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// The magnitude as an integer: it orders as the number does, with infinity and then NaN above everything.
inline uint32_t magnitude(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7fffffffu;
}

// e^x to about 1e-7; NaN stays.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float whole = __builtin_rintf(x * 1.44269504088896f);
    const float rest = (x - whole * 0.693145751953125f) - whole * 1.42860682030941723e-6f;
    float sum = 1.98412698e-4f;
    sum = sum * rest + 1.38888889e-3f;
    sum = sum * rest + 8.33333333e-3f;
    sum = sum * rest + 4.16666667e-2f;
    sum = sum * rest + 1.66666667e-1f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return sum * power;
}

inline float gelu(float x) {
    const float inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-inner));
}

constexpr float LIMIT = 127.0f, FLOOR = 1e-12f;

// int8 values and the scale of one row; returns whether the row is finite.
template <typename T>
inline bool quantize_row(const T* x, int64_t columns, int8_t* values, float* scale) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < columns; ++i) largest = std::max(largest, magnitude(wide(x[i])));
    float top;
    std::memcpy(&top, &largest, 4);
    float step = top / LIMIT;
    step = step < FLOOR ? FLOOR : step;
    *scale = step;
    if (largest >= 0x7f800000u) {
        // Numbers do not matter here: the scale carries the fault on.
        std::memset(values, 0, columns);
        return false;
    }
    for (int64_t i = 0; i < columns; ++i) values[i] = static_cast<int8_t>(static_cast<int32_t>(__builtin_rintf(wide(x[i]) / step)));
    return true;
}

template <typename T>
int64_t quantize_rows(const T* x, int64_t stride, int64_t rows, int64_t columns, int8_t* values, float* scales, int threads) {
    int64_t broken = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : broken)
    for (int64_t row = 0; row < rows; ++row)
        broken += !quantize_row(x + row * stride, columns, values + row * columns, scales + row);
    return broken;
}

// out = activation(products * row_scale * column_scale + bias); a step of 0 repeats one scale.
template <typename T, bool GELU>
void scale_products(const int32_t* products, int64_t product_stride, int64_t rows, int64_t columns, const float* row_scale,
                    int64_t row_step, const float* column_scale, int64_t column_step, const float* bias, T* out,
                    int64_t out_stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int32_t* from = products + row * product_stride;
        T* to = out + row * out_stride;
        const float scale = row_scale[row * row_step];
        const auto finish = [&](int64_t i, float x) {
            if (GELU) {
                T rounded;
                put(rounded, x);
                x = gelu(wide(rounded));
            }
            put(to[i], x);
        };
        const float single = column_scale[0];
        if (column_step && bias)
            for (int64_t i = 0; i < columns; ++i) finish(i, static_cast<float>(from[i]) * scale * column_scale[i] + bias[i]);
        else if (column_step)
            for (int64_t i = 0; i < columns; ++i) finish(i, static_cast<float>(from[i]) * scale * column_scale[i]);
        else if (bias)
            for (int64_t i = 0; i < columns; ++i) finish(i, static_cast<float>(from[i]) * scale * single + bias[i]);
        else
            for (int64_t i = 0; i < columns; ++i) finish(i, static_cast<float>(from[i]) * scale * single);
    }
}

template <typename T>
inline void normalize_row(const T* x, int64_t columns, const float* scale, const float* shift, float one, float epsilon, T* y) {
    // Lanes of their own keep the sums vectors without reordering anything else.
    float lanes[16] = {};
    int64_t i = 0;
    for (; i + 16 <= columns; i += 16)
        for (int64_t lane = 0; lane < 16; ++lane) lanes[lane] += wide(x[i + lane]);
    float sum = 0;
    for (; i < columns; ++i) sum += wide(x[i]);
    for (const float lane : lanes) sum += lane;
    const float mean = sum / columns;
    float squares[16] = {};
    for (i = 0; i + 16 <= columns; i += 16)
        for (int64_t lane = 0; lane < 16; ++lane) {
            const float off = wide(x[i + lane]) - mean;
            squares[lane] += off * off;
        }
    float variance = 0;
    for (; i < columns; ++i) variance += (wide(x[i]) - mean) * (wide(x[i]) - mean);
    for (const float lane : squares) variance += lane;
    const float factor = 1.0f / std::sqrt(variance / columns + epsilon);
    for (i = 0; i < columns; ++i) put(y[i], (wide(x[i]) - mean) * factor * (one + scale[i]) + shift[i]);
}

// y = LayerNorm(x) (one + scale) + shift; quantized too where `values` is given.
template <typename T>
void layer_norm_modulate(const T* x, int64_t rows, int64_t columns, const float* scale, int64_t scale_step, const float* shift,
                         int64_t shift_step, float one, float epsilon, T* y, int8_t* values, float* scales, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        T* to = y + row * columns;
        normalize_row(x + row * columns, columns, scale + row * scale_step, shift + row * shift_step, one, epsilon, to);
        if (values) quantize_row(to, columns, values + row * columns, scales + row);
    }
}

template <typename T>
void gelu_rows(const T* x, int64_t rows, int64_t columns, T* y, int8_t* values, float* scales, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * columns;
        T* to = y + row * columns;
        for (int64_t i = 0; i < columns; ++i) put(to[i], gelu(wide(from[i])));
        if (values) quantize_row(to, columns, values + row * columns, scales + row);
    }
}

// y = rotate(RMSNorm(x) weight) by head; cos and sin [rows, dim] hold every angle twice.
template <typename T>
void rms_norm_rope(const T* x, int64_t rows, int64_t heads, int64_t dim, const float* weight, float epsilon, const float* cos,
                   const float* sin, T* y, int threads) {
    const int64_t columns = heads * dim;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * columns;
        T* to = y + row * columns;
        float lanes[16] = {};
        int64_t i = 0;
        for (; i + 16 <= columns; i += 16)
            for (int64_t lane = 0; lane < 16; ++lane) lanes[lane] += wide(from[i + lane]) * wide(from[i + lane]);
        float sum = 0;
        for (; i < columns; ++i) sum += wide(from[i]) * wide(from[i]);
        for (const float lane : lanes) sum += lane;
        const float root = std::sqrt(sum / columns + epsilon);
        const float *c = cos + row * dim, *s = sin + row * dim;
        for (int64_t head = 0; head < heads; ++head)
            for (i = 0; i < dim; i += 2) {
                const int64_t at = head * dim + i;
                const float even = wide(from[at]) / root * weight[at], odd = wide(from[at + 1]) / root * weight[at + 1];
                put(to[at], even * c[i] - odd * s[i + 1]);
                put(to[at + 1], even * s[i + 1] + odd * c[i]);
            }
    }
}

template <typename T>
void residual_gate(const T* x, const T* update, const float* gate, int64_t gate_step, int64_t rows, int64_t columns, T* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float* own = gate + row * gate_step;
        for (int64_t i = 0; i < columns; ++i) {
            const int64_t at = row * columns + i;
            put(y[at], wide(x[at]) + wide(update[at]) * own[i]);
        }
    }
}

}  // namespace

#define ENTRY_POINTS(SUFFIX, T)                                                                                                     \
    extern "C" int64_t quantize_rows_##SUFFIX(const T* x, int64_t stride, int64_t rows, int64_t columns, int8_t* values,           \
                                              float* scales, int threads) {                                                        \
        return quantize_rows(x, stride, rows, columns, values, scales, threads);                                                   \
    }                                                                                                                              \
    extern "C" void scale_products_##SUFFIX(const int32_t* products, int64_t product_stride, int64_t rows, int64_t columns,        \
                                            const float* row_scale, int64_t row_step, const float* column_scale,                   \
                                            int64_t column_step, const float* bias, T* out, int64_t out_stride, int with_gelu,     \
                                            int threads) {                                                                         \
        (with_gelu ? scale_products<T, true> : scale_products<T, false>)(products, product_stride, rows, columns, row_scale,       \
                                                                         row_step, column_scale, column_step, bias, out,          \
                                                                         out_stride, threads);                                    \
    }                                                                                                                              \
    extern "C" void layer_norm_modulate_##SUFFIX(const T* x, int64_t rows, int64_t columns, const float* scale,                    \
                                                 int64_t scale_step, const float* shift, int64_t shift_step, float one,            \
                                                 float epsilon, T* y, int8_t* values, float* scales, int threads) {                \
        layer_norm_modulate(x, rows, columns, scale, scale_step, shift, shift_step, one, epsilon, y, values, scales, threads);     \
    }                                                                                                                              \
    extern "C" void gelu_rows_##SUFFIX(const T* x, int64_t rows, int64_t columns, T* y, int8_t* values, float* scales,             \
                                       int threads) {                                                                              \
        gelu_rows(x, rows, columns, y, values, scales, threads);                                                                   \
    }                                                                                                                              \
    extern "C" void rms_norm_rope_##SUFFIX(const T* x, int64_t rows, int64_t heads, int64_t dim, const float* weight,              \
                                           float epsilon, const float* cos, const float* sin, T* y, int threads) {                 \
        rms_norm_rope(x, rows, heads, dim, weight, epsilon, cos, sin, y, threads);                                                 \
    }                                                                                                                              \
    extern "C" void residual_gate_##SUFFIX(const T* x, const T* update, const float* gate, int64_t gate_step, int64_t rows,        \
                                           int64_t columns, T* y, int threads) {                                                   \
        residual_gate(x, update, gate, gate_step, rows, columns, y, threads);                                                      \
    }

ENTRY_POINTS(bf16, BFloat16)
ENTRY_POINTS(f32, float)
