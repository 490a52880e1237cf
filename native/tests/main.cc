#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

struct Test {
    const char* name;
    void (*body)();
};

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

int failures = 0;  // of the running test

constexpr int kShown = 20;  // of each test: a broken kernel fails in a million places

bool wanted(const char* name, int argc, char** argv) {
    if (argc < 2) return true;
    for (int i = 1; i < argc; ++i)
        if (std::strstr(name, argv[i]) != nullptr) return true;
    return false;
}

void run(const Test& test) {
    try {
        test.body();
    } catch (const Abandon&) {
    } catch (const std::exception& e) { failed(test.name, 0, std::string("exception: ") + e.what()); }
}

}  // namespace

Registration::Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }

void failed(const char* file, int line, const std::string& what) {
    if (++failures <= kShown) std::fprintf(stderr, "  %s:%d: %s\n", file, line, what.c_str());
}

static int run_all(int argc, char** argv) {
    int ran = 0, red = 0;
    for (const auto& test : tests()) {
        if (!wanted(test.name, argc, argv)) continue;
        failures = 0;
        run(test);
        ++ran;
        red += failures > 0;
        if (failures > kShown) std::fprintf(stderr, "  ... %d more\n", failures - kShown);
        std::fprintf(stderr, "%s %s\n", failures > 0 ? "FAILED" : "ok    ", test.name);
    }
    std::fprintf(stderr, "%d tests, %d failed\n", ran, red);
    return ran == 0 || red > 0 ? 1 : 0;
}

}  // namespace ftcomm::unit

int main(int argc, char** argv) { return ftcomm::unit::run_all(argc, argv); }
