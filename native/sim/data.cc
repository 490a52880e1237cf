#include "sim/data.h"

#include <bit>

#include "base/reduce.h"

namespace ftcomm::sim {

namespace {

std::uint32_t mix(std::uint32_t slot, std::uint32_t step, std::uint64_t index) {
    auto x = (slot + 1) * 0x9e3779b1u ^ (step + 1) * 0x85ebca6bu ^ static_cast<std::uint32_t>(index) * 0xc2b2ae35u;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    x *= 0x297a2d39u;
    return x ^ (x >> 15);
}

std::uint16_t half_of(std::uint32_t v) {
    if (v == 0) return 0;
    const int e = std::bit_width(v) - 1;
    return static_cast<std::uint16_t>(((e + 15) << 10) | ((v << (10 - e)) & 0x3ff));
}

template <class T>
void put(std::byte* out, std::uint64_t i, T value) {
    std::memcpy(out + i * sizeof(T), &value, sizeof(T));
}

}  // namespace

void fill(const Step& step, int step_index, int slot, std::uint64_t start, std::uint64_t count, std::byte* out) {
    const bool whole_range = step.reduce == ReduceOp::BXor || step.reduce == ReduceOp::BAnd || step.reduce == ReduceOp::BOr;
    for (std::uint64_t i = 0; i < count; ++i) {
        std::uint32_t v = mix(static_cast<std::uint32_t>(slot), static_cast<std::uint32_t>(step_index), start + i);
        if (step.dtype == DType::Bool) v &= 1;
        else if (step.reduce == ReduceOp::Product) v = 1 + (v & 1);
        else if (!whole_range) v &= 7;
        switch (step.dtype) {
            case DType::Float64: put(out, i, static_cast<double>(v)); break;
            case DType::Float32: put(out, i, static_cast<float>(v)); break;
            case DType::Float16: put(out, i, half_of(v)); break;
            case DType::BFloat16:
                put(out, i, static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(v)) >> 16));
                break;
            case DType::Int8:
            case DType::UInt8:
            case DType::Bool: put(out, i, static_cast<std::uint8_t>(v)); break;
            case DType::Int16:
            case DType::UInt16: put(out, i, static_cast<std::uint16_t>(v)); break;
            case DType::Int32:
            case DType::UInt32: put(out, i, v); break;
            case DType::Int64:
            case DType::UInt64: put(out, i, static_cast<std::uint64_t>(v)); break;
            case DType::Complex64: {
                const float parts[2] = {static_cast<float>(v),
                                        step.reduce == ReduceOp::Product ? 0.0f : static_cast<float>(v ^ 1)};
                std::memcpy(out + i * 8, parts, 8);
                break;
            }
            default: FT_CHECK(false, "type %d is not simulated", static_cast<int>(step.dtype));
        }
    }
}

Bytes reduced(const Step& step, int step_index, const std::vector<int>& slots, std::uint64_t start, std::uint64_t count) {
    const auto bytes = count * size_of(step.dtype);
    Bytes sum(bytes), one(bytes);
    bool first = true;
    for (int slot : slots) {
        auto* into = first ? sum.data() : one.data();
        fill(step, step_index, slot, start, count, into);
        if (step.reduce == ReduceOp::PremulSum) scale(step.dtype, into, into, count, 2.0);
        if (!first) reduce(step.dtype, step.reduce, sum.data(), sum.data(), one.data(), count);
        first = false;
    }
    if (step.reduce == ReduceOp::Avg) divide(step.dtype, sum.data(), count, static_cast<std::uint32_t>(slots.size()));
    return sum;
}

std::uint64_t piece(const Step& step, int from, int to) {
    if (!step.uneven) return step.count;
    return step.count == 0 ? 0 : (step.count + static_cast<std::uint64_t>(from * 7 + to * 3)) % 20;
}

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
    std::uint64_t x = a * 0x9e3779b97f4a7c15ULL ^ (b + 0x632be59bd9b4e019ULL);
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 32)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 29);
}

void fill_rough(DType dtype, std::uint64_t state, std::uint64_t count, std::byte* out) {
    for (std::uint64_t i = 0; i < count; ++i) {
        const auto v = mixed(state, i);
        const double value = static_cast<double>((v >> 8) % 100'003) / 3.0 / static_cast<double>(std::uint64_t{1} << (v & 15));
        switch (dtype) {
            case DType::Float64: put(out, i, value); break;
            case DType::Float32: put(out, i, static_cast<float>(value)); break;
            case DType::Float16: put(out, i, static_cast<std::uint16_t>(((4 + (v & 15)) << 10) | ((v >> 8) & 0x3ff))); break;
            case DType::BFloat16:
                put(out, i, static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16));
                break;
            case DType::Int32: put(out, i, static_cast<std::uint32_t>(v)); break;
            case DType::UInt8: put(out, i, static_cast<std::uint8_t>(v)); break;
            default: FT_CHECK(false, "type %d is not drawn for replay", static_cast<int>(dtype));
        }
    }
}

int message_count(const Step& step, int step_index, int from, int to) {
    if (step.kind == StepKind::FanIn || step.kind == StepKind::Answer) return from == to ? step_index % 2 : step.each;
    const auto v = mix(static_cast<std::uint32_t>(from * 64 + to), static_cast<std::uint32_t>(step_index), 1);
    return static_cast<int>(v % (static_cast<std::uint32_t>(step.each) + 1));
}

std::uint64_t message_bytes(int step_index, int from, int to, int number) {
    static constexpr std::uint64_t sizes[] = {0, 1, 8, 30, 64, 65, 300, 300, 5000, 9000};
    return sizes[mix(static_cast<std::uint32_t>(from * 64 + to), static_cast<std::uint32_t>(step_index),
                     static_cast<std::uint64_t>(number) + 2) %
                 std::size(sizes)];
}

void fill_message(int step_index, int from_slot, int number, std::uint64_t bytes, std::byte* out) {
    for (std::uint64_t i = 0; i < bytes; ++i)
        out[i] = static_cast<std::byte>(
            mix(static_cast<std::uint32_t>(from_slot * 16 + number), static_cast<std::uint32_t>(step_index), i));
}

}  // namespace ftcomm::sim
