#include "tests/reference.h"

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/check.h"

namespace ftcomm::test {

double decode(const Format& format, std::uint32_t value) {
    const std::uint32_t sign_bit = 1u << (format.bits - 1);
    const double sign = (value & sign_bit) != 0 ? -1 : 1;
    const std::uint32_t magnitude = value & (sign_bit - 1);
    const int exponent = static_cast<int>(magnitude >> format.mantissa);
    const std::uint32_t fraction = magnitude & ((1u << format.mantissa) - 1);
    const int highest = (1 << (format.bits - 1 - format.mantissa)) - 1;
    if (format.has_infinity ? exponent == highest && fraction != 0 : magnitude == sign_bit - 1)
        return std::numeric_limits<double>::quiet_NaN();
    if (format.has_infinity && exponent == highest) return sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - format.bias - format.mantissa);
    return sign * std::ldexp(fraction + (1u << format.mantissa), exponent - format.bias - format.mantissa);
}

std::uint32_t encode(const Format& format, double value) {
    const std::uint32_t sign_bit = 1u << (format.bits - 1);
    const std::uint32_t sign = std::signbit(value) ? sign_bit : 0;
    const double x = std::fabs(value);
    // Magnitudes are ordered as their codes: find the last that is not above x, counting what overflow becomes
    // (infinity, or all ones where there is none) as the number that would come next.
    const std::uint32_t overflow = format.has_infinity ? sign_bit - (1u << format.mantissa) : sign_bit - 1;
    const double largest = decode(format, overflow - 1);
    const double beyond = largest + (largest - decode(format, overflow - 2));
    const auto at = [&](std::uint32_t code) { return code == overflow ? beyond : decode(format, code); };
    std::uint32_t low = 0, high = overflow;
    if (x >= beyond) return sign | overflow;
    while (high - low > 1) {
        const std::uint32_t middle = (low + high) / 2;
        (at(middle) <= x ? low : high) = middle;
    }
    const double down = x - at(low), up = at(high) - x;
    if (down < up) return sign | low;
    if (up < down) return sign | high;
    return sign | (low % 2 == 0 ? low : high);
}

namespace {

template <class T>
T get(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
template <class T>
void put(void* p, T value) {
    std::memcpy(p, &value, sizeof value);
}

const Format* format_of(DType dtype) {
    switch (dtype) {
        case DType::Float16: return &kFloat16;
        case DType::BFloat16: return &kBFloat16;
        case DType::Float8E4M3: return &kFloat8E4M3;
        case DType::Float8E5M2: return &kFloat8E5M2;
        default: return nullptr;
    }
}

float get_small(const Format& format, const void* p) {
    return static_cast<float>(decode(format, format.bits == 16 ? get<std::uint16_t>(p) : get<std::uint8_t>(p)));
}
void put_small(const Format& format, void* p, float value) {
    const std::uint32_t nan = (1u << (format.bits - 1)) - 1;
    const std::uint32_t code = std::isnan(value) ? nan : encode(format, value);
    if (format.bits == 16) put(p, static_cast<std::uint16_t>(code));
    else put(p, static_cast<std::uint8_t>(code));
}

template <class T>
T float_op(ReduceOp op, T a, T b) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    switch (op) {
        case ReduceOp::Product: return a * b;
        case ReduceOp::Min: return a < b ? a : b;
        case ReduceOp::Max: return a > b ? a : b;
        default: return a + b;
    }
}

template <class T>
T integer_op(ReduceOp op, T a, T b) {
    using U = std::make_unsigned_t<T>;
    // 128 bits hold every exact sum and product of 64-bit numbers modulo 2^64.
    const auto x = static_cast<unsigned __int128>(static_cast<U>(a)), y = static_cast<unsigned __int128>(static_cast<U>(b));
    switch (op) {
        case ReduceOp::Product: return static_cast<T>(static_cast<U>(x * y));
        case ReduceOp::Min: return a < b ? a : b;
        case ReduceOp::Max: return a > b ? a : b;
        case ReduceOp::BAnd: return static_cast<T>(static_cast<U>(x & y));
        case ReduceOp::BOr: return static_cast<T>(static_cast<U>(x | y));
        case ReduceOp::BXor: return static_cast<T>(static_cast<U>(x ^ y));
        default: return static_cast<T>(static_cast<U>(x + y));
    }
}

template <class T>
void complex_op(ReduceOp op, void* out, const void* a, const void* b) {
    const T ar = get<T>(a), ai = get<T>(static_cast<const char*>(a) + sizeof(T));
    const T br = get<T>(b), bi = get<T>(static_cast<const char*>(b) + sizeof(T));
    const bool product = op == ReduceOp::Product;
    // Volatile: no fused multiply-add here either.
    volatile T rr = ar * br, ii = ai * bi, ri = ar * bi, ir = ai * br;
    put<T>(out, product ? rr - ii : ar + br);
    put<T>(static_cast<char*>(out) + sizeof(T), product ? ri + ir : ai + bi);
}

// Calls f with a value of the element type; small floats are not for here.
template <class F>
void with_type(DType dtype, F f) {
    switch (dtype) {
        case DType::Float64: return f(double{});
        case DType::Float32: return f(float{});
        case DType::Int8: return f(std::int8_t{});
        case DType::Int16: return f(std::int16_t{});
        case DType::Int32: return f(std::int32_t{});
        case DType::Int64: return f(std::int64_t{});
        case DType::UInt8: return f(std::uint8_t{});
        case DType::UInt16: return f(std::uint16_t{});
        case DType::UInt32: return f(std::uint32_t{});
        case DType::UInt64: return f(std::uint64_t{});
        case DType::Bool: return f(bool{});
        case DType::Complex64: return f(std::complex<float>{});
        case DType::Complex128: return f(std::complex<double>{});
        default: FT_CHECK(false, "no plain type for %s", to_string(dtype));
    }
}

template <class T>
constexpr bool is_complex = std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

}  // namespace

void reduce_one(DType dtype, ReduceOp op, void* out, const void* a, const void* b) {
    if (const Format* format = format_of(dtype))
        return put_small(*format, out, float_op<float>(op, get_small(*format, a), get_small(*format, b)));
    with_type(dtype, [&]<class T>(T) {
        if constexpr (std::is_same_v<T, bool>) {
            const bool x = get<std::uint8_t>(a) != 0, y = get<std::uint8_t>(b) != 0;
            const bool both = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::BAnd;
            put<std::uint8_t>(out, op == ReduceOp::BXor ? x != y : both ? x && y : x || y);
        } else if constexpr (is_complex<T>) {
            complex_op<typename T::value_type>(op, out, a, b);
        } else if constexpr (std::is_floating_point_v<T>) {
            put(out, float_op(op, get<T>(a), get<T>(b)));
        } else {
            put(out, integer_op(op, get<T>(a), get<T>(b)));
        }
    });
}

void divide_one(DType dtype, void* element, std::uint32_t divisor) {
    if (const Format* format = format_of(dtype))
        return put_small(*format, element, get_small(*format, element) / static_cast<float>(divisor));
    with_type(dtype, [&]<class T>(T) {
        if constexpr (is_complex<T>) {
            using V = typename T::value_type;
            for (std::size_t i : {std::size_t{0}, sizeof(V)}) {
                char* p = static_cast<char*>(element) + i;
                put<V>(p, get<V>(p) / static_cast<V>(divisor));
            }
        } else if constexpr (std::is_floating_point_v<T>) {
            put(element, get<T>(element) / static_cast<T>(divisor));
        } else if constexpr (!std::is_same_v<T, bool>) {
            put(element, static_cast<T>(static_cast<__int128>(get<T>(element)) / static_cast<__int128>(divisor)));
        }
    });
}

void scale_one(DType dtype, void* out, const void* in, double factor) {
    if (const Format* format = format_of(dtype))
        return put_small(*format, out, get_small(*format, in) * static_cast<float>(factor));
    with_type(dtype, [&]<class T>(T) {
        if constexpr (is_complex<T>) {
            using V = typename T::value_type;
            for (std::size_t i : {std::size_t{0}, sizeof(V)})
                put<V>(static_cast<char*>(out) + i, get<V>(static_cast<const char*>(in) + i) * static_cast<V>(factor));
        } else if constexpr (std::is_floating_point_v<T>) {
            put(out, get<T>(in) * static_cast<T>(factor));
        }
    });
}

bool same_element(DType dtype, const void* a, const void* b) {
    if (std::memcmp(a, b, size_of(dtype)) == 0) return true;
    if (const Format* format = format_of(dtype)) return std::isnan(get_small(*format, a)) && std::isnan(get_small(*format, b));
    bool same = false;
    with_type(dtype, [&]<class T>(T) {
        if constexpr (is_complex<T>) {
            using V = typename T::value_type;
            const auto part = [&](std::size_t i) {
                const void* p = static_cast<const char*>(a) + i;
                const void* q = static_cast<const char*>(b) + i;
                return std::memcmp(p, q, sizeof(V)) == 0 || (std::isnan(get<V>(p)) && std::isnan(get<V>(q)));
            };
            same = part(0) && part(sizeof(V));
        } else if constexpr (std::is_floating_point_v<T>) {
            same = std::isnan(get<T>(a)) && std::isnan(get<T>(b));
        }
    });
    return same;
}

}  // namespace ftcomm::test
