// Unit tests without a framework: FT_TEST(name) { ... EXPECT(...); EXPECT_EQ(a, b); } in any .cc of this folder.
//   ftcomm-unit [PART...]   runs the tests whose name contains a PART, all without
// A failed expectation is counted and the test goes on; REQUIRE ends the test. FT_CHECK stays what it is: it aborts.
#pragma once

#include <sstream>
#include <string>
#include <type_traits>

namespace ftcomm::unit {

struct Registration {
    Registration(const char* name, void (*body)());
};

struct Abandon {};  // thrown by REQUIRE

void failed(const char* file, int line, const std::string& what);

template <class T>
std::string show(const T& value) {
    std::ostringstream out;
    if constexpr (std::is_enum_v<T>) out << static_cast<long long>(value);
    else if constexpr (sizeof(T) == 1 && std::is_integral_v<T>) out << static_cast<int>(value);
    else if constexpr (requires { out << value; }) out << value;
    else out << "(value)";
    return out.str();
}

template <class A, class B>
bool expect_equal(const char* file, int line, const char* text, const A& a, const B& b) {
    if (a == b) return true;
    failed(file, line, std::string(text) + ": " + show(a) + " is not " + show(b));
    return false;
}

inline bool expect(const char* file, int line, const char* text, bool value) {
    if (!value) failed(file, line, text);
    return value;
}

}  // namespace ftcomm::unit

#define FT_TEST(name)                                                                  \
    static void test_##name();                                                         \
    static const ::ftcomm::unit::Registration registration_##name(#name, test_##name); \
    static void test_##name()
#define EXPECT(condition) ::ftcomm::unit::expect(__FILE__, __LINE__, #condition, static_cast<bool>(condition))
#define EXPECT_EQ(a, b) ::ftcomm::unit::expect_equal(__FILE__, __LINE__, #a " == " #b, (a), (b))
#define REQUIRE(condition)                                       \
    do {                                                         \
        if (!EXPECT(condition)) throw ::ftcomm::unit::Abandon(); \
    } while (false)
