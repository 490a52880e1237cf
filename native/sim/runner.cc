#include "sim/runner.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "sim/world.h"

namespace ftcomm::sim {

namespace {

constexpr std::uint64_t kBatch = 64;
constexpr int kSecondsPerSeed = 20;

// Shared with one child: survives its abort.
struct Shared {
    std::atomic<std::uint64_t> current;
    std::atomic<std::uint64_t> finished;
    Counters::Cell cells[Counters::kSlots];
};

World* current_world = nullptr;

void on_fatal(int signal) {
    if (current_world != nullptr) current_world->trace().print_last(40);
    std::signal(signal, SIG_DFL);
    std::raise(signal);
}

void arm_timer(int seconds) {
    itimerval timer{};
    timer.it_value.tv_sec = seconds;
    setitimer(ITIMER_REAL, &timer, nullptr);
}

void run_world(World& world, const Scenario& scenario, Finding& finding) {
    current_world = &world;
    world.run();
    current_world = nullptr;
    if (!world.violation().found()) return;
    const auto& v = world.violation();

    char head[96];
    std::snprintf(head, sizeof head, "seed %llu at %.6f s: ", static_cast<unsigned long long>(finding.seed),
                  static_cast<double>(v.at) * 1e-9);
    finding.invariant = v.invariant;
    finding.text = head + v.what + "\n" + describe(scenario) + "  last events:\n" + world.trace().last(40);
}

Finding run_one(std::uint64_t seed, const std::vector<std::string>& mutations, Counters& counters, bool live) {
    const Scenario scenario = draw_scenario(seed);
    if (live) std::printf("%s", describe(scenario).c_str());
    History undisturbed;
    Finding finding;
    finding.seed = seed;
    if (scenario.replay) {
        static Counters::Cell ignored[Counters::kSlots];
        Counters none;
        none.attach(ignored);
        const Scenario calm = ftcomm::sim::undisturbed(scenario);
        World world(calm, mutations, none, false);
        run_world(world, calm, finding);
        if (!finding.invariant.empty()) return finding;
        undisturbed = world.checker().take_history();
    }
    World world(scenario, mutations, counters, live);
    if (scenario.replay) world.compare_with(&undisturbed);
    run_world(world, scenario, finding);
    return finding;
}

void send_text(int fd, const std::string& text) {
    const auto n = static_cast<std::uint32_t>(text.size());
    std::string all(reinterpret_cast<const char*>(&n), sizeof n);
    all += text;
    for (std::size_t at = 0; at < all.size();) {
        const auto w = write(fd, all.data() + at, all.size() - at);
        if (w <= 0) _exit(3);
        at += static_cast<std::size_t>(w);
    }
}

[[noreturn]] void child(Shared& shared, int out, int errors, std::uint64_t first, std::uint64_t count, const RunPlan& plan) {
    dup2(errors, STDERR_FILENO);
    for (int s : {SIGABRT, SIGALRM, SIGSEGV}) std::signal(s, on_fatal);
    Counters counters;
    counters.attach(shared.cells);
    for (std::uint64_t seed = first; seed < first + count; ++seed) {
        if (plan.only_replay && !is_replay(seed)) continue;
        shared.current = seed;
        arm_timer(kSecondsPerSeed);
        const Finding f = run_one(seed, plan.mutations, counters, false);
        shared.finished.fetch_add(1);
        if (f.invariant.empty()) continue;
        send_text(out, std::to_string(f.seed) + "\n" + f.invariant + "\n" + f.text);
        if (plan.stop_at_first) break;
    }
    _exit(0);
}

struct Worker {
    Shared* shared = nullptr;
    pid_t pid = 0;
    int fd = -1, errors = -1;
    std::uint64_t end = 0;
    std::string buffer;
};

std::string read_all(int fd) {
    std::string out;
    char block[4096];
    lseek(fd, 0, SEEK_SET);
    for (ssize_t n; (n = read(fd, block, sizeof block)) > 0;) out.append(block, static_cast<std::size_t>(n));
    return out;
}

void start(Worker& w, std::uint64_t first, std::uint64_t count, const RunPlan& plan) {
    int pipes[2];
    if (pipe(pipes) != 0) std::perror("pipe"), std::exit(3);
    w.errors = memfd_create("ftcomm-sim-errors", 0);
    w.end = first + count;
    w.shared->current = first;
    std::fflush(stdout);
    w.pid = fork();
    if (w.pid < 0) std::perror("fork"), std::exit(3);
    if (w.pid == 0) {
        close(pipes[0]);
        child(*w.shared, pipes[1], w.errors, first, count, plan);
    }
    close(pipes[1]);
    w.fd = pipes[0];
    w.buffer.clear();
}

void take_messages(Worker& w, std::vector<Finding>& into, const std::function<void(const Finding&)>& found) {
    while (w.buffer.size() >= 4) {
        std::uint32_t n = 0;
        std::memcpy(&n, w.buffer.data(), 4);
        if (w.buffer.size() < 4 + n) return;
        const std::string text = w.buffer.substr(4, n);
        w.buffer.erase(0, 4 + n);
        Finding f;
        const auto a = text.find('\n'), b = text.find('\n', a + 1);
        f.seed = std::stoull(text.substr(0, a));
        f.invariant = text.substr(a + 1, b - a - 1);
        f.text = text.substr(b + 1);
        found(f);
        into.push_back(std::move(f));
    }
}

}  // namespace

RunResult run_seeds(const RunPlan& plan, const std::function<void(const Finding&)>& found) {
    RunResult result;
    const auto begun = std::chrono::steady_clock::now();
    std::vector<Worker> workers(static_cast<std::size_t>(plan.jobs));
    for (auto& w : workers) {
        void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) std::perror("mmap"), std::exit(3);
        w.shared = new (memory) Shared();
    }
    std::uint64_t next = plan.first;
    const std::uint64_t end = plan.first + plan.count;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> redo;  // what an aborted child has left over
    const auto more = [&](Worker& w) {
        if (plan.stop_at_first && !result.findings.empty()) return;
        if (!redo.empty()) {
            const auto [first, count] = redo.back();
            redo.pop_back();
            start(w, first, count, plan);
        } else if (next < end) {
            const auto count = std::min(kBatch, end - next);
            start(w, next, count, plan);
            next += count;
        }
    };
    for (auto& w : workers) more(w);
    for (;;) {
        std::vector<pollfd> fds;
        std::vector<Worker*> who;
        for (auto& w : workers)
            if (w.fd >= 0) {
                fds.push_back({w.fd, POLLIN, 0});
                who.push_back(&w);
            }
        if (fds.empty()) break;
        poll(fds.data(), fds.size(), -1);
        for (std::size_t i = 0; i < fds.size(); ++i) {
            if (fds[i].revents == 0) continue;
            Worker& w = *who[i];
            char block[65536];
            const auto n = read(w.fd, block, sizeof block);
            if (n > 0) {
                w.buffer.append(block, static_cast<std::size_t>(n));
                take_messages(w, result.findings, found);
                continue;
            }
            close(w.fd);
            w.fd = -1;
            int status = 0;
            waitpid(w.pid, &status, 0);
            if (WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) != 0)) {
                Finding f;
                f.seed = w.shared->current;
                const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
                f.invariant = signal == SIGALRM ? "HANG" : signal == SIGABRT ? "CHECK" : "CRASH";
                f.text = "seed " + std::to_string(f.seed) + ": " +
                         (signal == SIGALRM ? "an input did not return or the run did not end" : "") + read_all(w.errors) +
                         describe(draw_scenario(f.seed));
                found(f);
                result.findings.push_back(std::move(f));
                w.shared->finished.fetch_add(1);
                const std::uint64_t after = w.shared->current + 1;
                if (after < w.end) redo.push_back({after, w.end - after});
            }
            close(w.errors);
            more(w);
        }
    }
    for (auto& w : workers) {
        result.seeds += w.shared->finished;
        Counters::merge(w.shared->cells, result.counters);
        munmap(w.shared, sizeof(Shared));
    }
    std::sort(result.findings.begin(), result.findings.end(), [](const Finding& a, const Finding& b) { return a.seed < b.seed; });
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    return result;
}

bool run_traced(std::uint64_t seed, const std::vector<std::string>& mutations) {
    static Counters::Cell cells[Counters::kSlots];
    Counters counters;
    counters.attach(cells);
    const Finding f = run_one(seed, mutations, counters, true);
    if (f.invariant.empty()) {
        std::printf("seed %llu: all invariants held\n", static_cast<unsigned long long>(seed));
        return true;
    }
    std::printf("%s: %s", f.invariant.c_str(), f.text.c_str());
    return false;
}

}  // namespace ftcomm::sim
