// How a processor adds: rounding to nearest, and small numbers as they are.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ftcomm {

// A program may have changed that for its thread (torch.set_flush_denormal, fesetround), on one rank and not on another; and a sum is made by
// whichever thread gets to it, of the program or the library's. Here it is made by the same rules on all, or replicas would part.
class FloatRules {
public:
    FloatRules() : before_(get()) {
        if (is_changed()) set((before_ & ~kRules) | kDefault);
    }
    ~FloatRules() {
        if (is_changed()) set(before_);
    }
    FloatRules(const FloatRules&) = delete;
    FloatRules& operator=(const FloatRules&) = delete;

private:
    bool is_changed() const { return (before_ & kRules) != kDefault; }
#if defined(__x86_64__)
    using Word = std::uint32_t;
    static constexpr Word kRules = 0x8040 | 0x6000 | 0x1f80;  // flush to zero, denormals are zero; rounding; exceptions
    static constexpr Word kDefault = 0x1f80;
    static Word get() { return _mm_getcsr(); }
    static void set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
    using Word = std::uint64_t;
    static constexpr Word kRules =
        (Word{1} << 19) | (Word{1} << 24) | (Word{3} << 22) | (Word{1} << 25) | 0x9f00;  // FZ16, FZ; rounding; DN; exceptions
    static constexpr Word kDefault = 0;
    static Word get() {
        Word word;
        asm volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
    using Word = std::uint32_t;
    static constexpr Word kRules = 0, kDefault = 0;
    static Word get() { return 0; }
    static void set(Word) {}
#endif
    const Word before_;
};

}  // namespace ftcomm
