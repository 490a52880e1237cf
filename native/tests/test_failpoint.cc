#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/failpoint.h"
#include "base/failpoint_spec.h"
#include "base/failpoint_table.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

using fault::Action;
using fault::Deed;
using fault::Fault;

struct Disarm {
    ~Disarm() { fault::configure("", 0, 0); }
};

// Runs body in a child, returns its wait status; the child counts as exited 99 when the body returns.
template <class F>
int in_child(F body) {
    const pid_t child = fork();
    if (child == 0) {
        body();
        _exit(99);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
}

void refused(const std::string& spec, const std::string& part) {
    std::vector<Fault> faults{Fault{}};
    const Status status = fault::parse_faults(spec, &faults);
    EXPECT(!status.ok());
    EXPECT_EQ(status.code, Code::Invalid);
    EXPECT_EQ(faults.size(), 1u);  // untouched
    if (status.message.find(part) == std::string::npos)
        unit::failed(__FILE__, __LINE__, "for \"" + spec + "\": \"" + part + "\" is not in \"" + status.message + "\"");
}

}  // namespace

FT_TEST(failpoint_table_is_sound) {
    std::size_t count = 0;
    const auto* points = fault::all_points(&count);
    std::set<std::string> names;
    for (std::size_t i = 0; i < count; ++i) {
        EXPECT(names.insert(points[i].name).second);
        const std::string where = points[i].where;
        EXPECT(where.size() > 20 && where.back() == '.');
        EXPECT_EQ(fault::find_point(points[i].name), static_cast<int>(i));
    }
    EXPECT_EQ(fault::find_point("no.such"), -1);
}

FT_TEST(failpoint_spec_is_read) {
    std::vector<Fault> f;
    REQUIRE(
        fault::parse_faults(" rank=2,at=ring.rs.hop:3,do=kill ; rank=1.4, at = fence.before, step=40 , do=stop:2.5;", &f).ok());
    REQUIRE(f.size() == 2);
    EXPECT_EQ(f[0].rank, 2);
    EXPECT_EQ(f[0].incarnation, 0);
    EXPECT_EQ(f[0].point, fault::find_point("ring.rs.hop"));
    EXPECT_EQ(f[0].nth, 3u);
    EXPECT_EQ(f[0].deed, Deed::Kill);
    EXPECT(!f[0].has_step);
    EXPECT_EQ(f[1].rank, 1);
    EXPECT_EQ(f[1].incarnation, 4);
    EXPECT_EQ(f[1].nth, 1u);
    EXPECT(f[1].has_step);
    EXPECT_EQ(f[1].step, 40u);
    EXPECT_EQ(f[1].deed, Deed::Stop);
    EXPECT_EQ(f[1].seconds, 2.5);
    REQUIRE(
        fault::parse_faults("do=exit:7,rank=0,at=step:0;rank=0,at=step:120,do=delay:250;rank=3,at=tcp.send,do=cut:1", &f).ok());
    REQUIRE(f.size() == 3);
    EXPECT_EQ(f[0].argument, 7);
    EXPECT_EQ(f[0].nth, 0u);
    EXPECT_EQ(f[1].nth, 120u);
    EXPECT_EQ(f[1].seconds, 0.25);
    EXPECT_EQ(f[2].argument, 1);
    EXPECT(fault::parse_faults("", &f).ok());
    EXPECT(f.empty());
}

FT_TEST(failpoint_spec_errors_name_the_part) {
    refused("rank=2,at=ring.rs.hpo:3,do=kill", "near it: ring.rs.hop");
    refused("rank=2,at=ring.rs.hpo:3,do=kill", "\"at=ring.rs.hpo:3\"");
    refused("rank=2,at=,do=kill", "no failpoint");
    refused("rank=2,at=zzzzzzzzzz,do=kill", "no failpoint is called \"zzzzzzzzzz\"; \"ftcomm faults\"");
    refused("rank=x,at=step:1,do=kill", "\"rank=x\"");
    refused("rank=-1,at=step:1,do=kill", "\"rank=-1\"");
    refused("rank=5000,at=step:1,do=kill", "0 to 1023");
    refused("rank=2.,at=step:1,do=kill", "incarnation");
    refused("rank=2.x,at=step:1,do=kill", "incarnation");
    refused("rank=2,at=step:x,do=kill", "step:N");
    refused("rank=2,at=tcp.send:0,do=kill", "1 or more");
    refused("rank=2,at=tcp.send:1x,do=kill", "1 or more");
    refused("rank=2,at=tcp.send:99999999999999999999,do=kill", "1 or more");
    refused("rank=2,at=tcp.send", "do= is missing");
    refused("at=tcp.send,do=kill", "rank= is missing");
    refused("rank=1,do=kill", "at= is missing");
    refused("rank=1,rank=2,at=tcp.send,do=kill", "given twice");
    refused("rank=1,at=tcp.send,do=kill,when=now", "no key \"when\"");
    refused("rank=1,tcp.send,do=kill", "\"tcp.send\" is not of the form");
    refused("rank=1,,at=tcp.send,do=kill", "is not of the form");
    refused("rank=1,at=tcp.send,do=explode", "no action is called \"explode\"");
    refused("rank=1,at=tcp.send,do=kill:9", "takes no argument");
    refused("rank=1,at=tcp.send,do=corrupt:", "takes no argument");
    for (const char* seconds : {"stop", "stop:", "stop:0", "stop:-1", "stop:nan", "stop:inf", "stop:1e9", "stop:3s"})
        refused(std::string("rank=1,at=tcp.send,do=") + seconds, "stop needs");
    for (const char* ms : {"delay", "delay:-1", "delay:nan", "delay:x"})
        refused(std::string("rank=1,at=tcp.send,do=") + ms, "delay needs");
    for (const char* code : {"exit", "exit:256", "exit:-1", "exit:1.5"})
        refused(std::string("rank=1,at=tcp.send,do=") + code, "exit needs");
    refused("rank=1,at=tcp.send,do=cut", "cut needs");
    refused("rank=1,at=tcp.send,do=cut:1", "the rank itself");
    refused("rank=1,at=step:3,step=3,do=kill", "at=step:N alone");
    refused("rank=1,at=tcp.send,step=-3,do=kill", "step takes");
    refused("rank=0,at=tcp.send,do=kill;rank=1,at=tcp.send,do=oops", "oops");  // a later entry, another rank's
}

FT_TEST(failpoint_counts_passes) {
    Disarm disarm;
    REQUIRE(fault::configure("rank=1,at=tcp.send:3,do=corrupt; rank=1,at=tcp.receive,do=cut:2", 1, 0).ok());
    EXPECT(fault::armed.load());
    EXPECT(FT_POINT("tcp.send").action == Action::None);
    EXPECT(FT_POINT("shm.commit").action == Action::None);
    EXPECT(FT_POINT("tcp.send").action == Action::None);
    EXPECT(FT_POINT("tcp.send").action == Action::Corrupt);
    EXPECT(FT_POINT("tcp.send").action == Action::None);
    const auto cut = FT_POINT("tcp.receive");
    EXPECT(cut.action == Action::Cut);
    EXPECT_EQ(cut.argument, 2);
    EXPECT(fault::hit("unknown in Python").action == Action::None);
    // A bad spec leaves what was there; another rank's or incarnation's faults do not arm.
    REQUIRE(fault::configure("rank=1,at=tcp.send,do=corrupt", 1, 0).ok());
    EXPECT(!fault::configure("rank=1,at=nonsense,do=kill", 1, 0).ok());
    EXPECT(FT_POINT("tcp.send").action == Action::Corrupt);
    REQUIRE(fault::configure("rank=1,at=tcp.send,do=corrupt", 1, 1).ok());
    EXPECT(!fault::armed.load());
    REQUIRE(fault::configure("rank=1,at=tcp.send,do=corrupt", 2, 0).ok());
    EXPECT(!fault::armed.load());
    REQUIRE(fault::configure("rank=1.1,at=tcp.send,do=corrupt", 1, 1).ok());
    EXPECT(FT_POINT("tcp.send").action == Action::Corrupt);
}

FT_TEST(failpoint_that_never_came_is_known) {
    Disarm disarm;
    REQUIRE(fault::configure("rank=0,at=tcp.send:3,do=corrupt; rank=0,at=tcp.receive,do=corrupt; rank=0,at=step:9,do=kill;"
                             "rank=0,at=shm.commit,step=5,do=kill; rank=1,at=tcp.send,do=kill",
                             0, 0)
                .ok());
    FT_POINT("tcp.send");
    FT_POINT("tcp.receive");
    FT_POINT("shm.commit");
    fault::set_step(4);
    const auto missed = fault::missed();
    REQUIRE(missed.size() == 3);  // not what has acted, not another rank's
    EXPECT_EQ(missed[0].at, "tcp.send:3");
    EXPECT_EQ(missed[0].passes, 1u);
    EXPECT(!missed[0].has_step);
    EXPECT_EQ(missed[1].at, "step:9");
    EXPECT_EQ(missed[2].at, "shm.commit:1");
    EXPECT(missed[2].has_step);
    EXPECT_EQ(missed[2].step, 5u);
    EXPECT_EQ(missed[2].passes, 0u);
}

FT_TEST(failpoint_steps) {
    Disarm disarm;
    REQUIRE(fault::configure("rank=0,at=tcp.send:2,step=5,do=corrupt", 0, 0).ok());
    for (int i = 0; i < 5; ++i) EXPECT(FT_POINT("tcp.send").action == Action::None);  // before any step
    for (std::uint64_t step = 0; step < 5; ++step) {
        fault::set_step(step);
        EXPECT(FT_POINT("tcp.send").action == Action::None);
        EXPECT(FT_POINT("tcp.send").action == Action::None);
    }
    fault::set_step(5);
    EXPECT(FT_POINT("tcp.send").action == Action::None);
    EXPECT(FT_POINT("tcp.send").action == Action::Corrupt);
    // step:N means that number, also when this process started at a later one.
    const auto steps = [](std::uint64_t from) {
        return in_child([from] {
            fault::configure("rank=0,at=step:3,do=exit:7", 0, 0);
            for (std::uint64_t step = from; step < 3; ++step) fault::set_step(step);
            fault::set_step(from > 3 ? from : 3);
        });
    };
    EXPECT_EQ(WEXITSTATUS(steps(0)), 7);
    EXPECT_EQ(WEXITSTATUS(steps(10)), 7);
    EXPECT_EQ(WEXITSTATUS(in_child([] {
                  fault::configure("rank=0,at=step:3,do=exit:7", 0, 0);
                  for (std::uint64_t step = 0; step < 3; ++step) fault::set_step(step);
              })),
              99);
}

FT_TEST(failpoint_kills_exits_delays) {
    const auto run = [](const char* deed) {
        return in_child([deed] {
            fault::configure(std::string("rank=0,at=tcp.send,do=") + deed, 0, 0);
            FT_POINT("tcp.send");
        });
    };
    const int killed = run("kill");
    EXPECT(WIFSIGNALED(killed) && WTERMSIG(killed) == SIGKILL);
    const int exited = run("exit:42");
    EXPECT(WIFEXITED(exited) && WEXITSTATUS(exited) == 42);
    EXPECT_EQ(WEXITSTATUS(run("delay:1")), 99);
}

FT_TEST(failpoint_stops_and_goes_on) {
    int pipe_ends[2];
    REQUIRE(pipe2(pipe_ends, O_CLOEXEC) == 0);
    const pid_t child = fork();
    if (child == 0) {
        close(pipe_ends[0]);
        fault::configure("rank=0,at=tcp.send,do=stop:0.05", 0, 0);
        FT_POINT("tcp.send");
        // Whatever the helper was, nothing of it is left to wait for.
        _exit(waitpid(-1, nullptr, __WALL) < 0 && errno == ECHILD ? 55 : 56);
    }
    close(pipe_ends[1]);
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, WUNTRACED), child);
    EXPECT(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 55);
    char byte;
    EXPECT_EQ(::read(pipe_ends[0], &byte, 1), 0);
    close(pipe_ends[0]);
}

FT_TEST(failpoint_stop_helper_dies_with_its_process) {
    int pipe_ends[2];
    REQUIRE(pipe2(pipe_ends, O_CLOEXEC) == 0);
    const pid_t child = fork();
    if (child == 0) {
        close(pipe_ends[0]);
        fault::configure("rank=0,at=tcp.send,do=stop:3600", 0, 0);
        FT_POINT("tcp.send");
        _exit(1);
    }
    close(pipe_ends[1]);
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, WUNTRACED), child);
    REQUIRE(WIFSTOPPED(status));
    const std::string path = "/proc/" + std::to_string(child) + "/task/" + std::to_string(child) + "/children";
    char text[32] = {};
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const pid_t helper = fd >= 0 && ::read(fd, text, sizeof text - 1) > 0 ? std::atoi(text) : 0;
    if (fd >= 0) close(fd);
    // Opened while the helper lives: becomes readable at its end.
    const long pidfd = helper > 0 ? syscall(434 /* pidfd_open */, helper, 0) : -1;
    EXPECT(pidfd >= 0);
    kill(child, SIGKILL);
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT(WIFSIGNALED(status));
    // The helper holds no end of the pipe, so this is the end of file even while it is being killed.
    char byte;
    EXPECT_EQ(::read(pipe_ends[0], &byte, 1), 0);
    close(pipe_ends[0]);
    pollfd wait{static_cast<int>(pidfd), POLLIN, 0};
    EXPECT_EQ(poll(&wait, 1, 20000), 1);
    if (pidfd >= 0) close(static_cast<int>(pidfd));
}

FT_TEST(failpoint_counts_across_threads) {
    Disarm disarm;
    REQUIRE(fault::configure("rank=0,at=tcp.send:4000,do=corrupt", 0, 0).ok());
    std::atomic<int> hits{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&] {
            for (int i = 0; i < 1000; ++i) hits += FT_POINT("tcp.send").action == Action::Corrupt;
        });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(hits.load(), 1);
    EXPECT(FT_POINT("tcp.send").action == Action::None);
}

}  // namespace ftcomm
