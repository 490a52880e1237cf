#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/io_loop.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

struct Rig {
    Rig() : loop(engine) { REQUIRE(loop.start().ok()); }
    ~Rig() { loop.stop(); }
    template <class F>
    bool wait(F condition) {
        std::unique_lock lock(engine);
        return changed.wait_for(lock, std::chrono::seconds(60), condition);
    }
    std::mutex engine;
    std::condition_variable changed;
    IoLoop loop;
};

void ring(int fd) {
    const std::uint64_t one = 1;
    EXPECT(::write(fd, &one, sizeof one) == sizeof one);
}

}  // namespace

FT_TEST(io_loop_timers_in_order) {
    Rig rig;
    std::vector<int> fired;
    {
        std::lock_guard guard(rig.engine);
        const auto now = IoLoop::now();
        const auto mark = [&](int i) {
            return [&rig, &fired, i] {
                fired.push_back(i);
                rig.changed.notify_all();
            };
        };
        rig.loop.at(now + 3'000'000, mark(3));
        rig.loop.at(now + 1'000'000, mark(1));
        const auto cancelled = rig.loop.at(now + 1'500'000, mark(9));
        rig.loop.at(now + 2'000'000, [&, mark] {
            EXPECT(rig.loop.on_thread());
            mark(2)();
            rig.loop.at(0, mark(4));  // in the past: next round, before or after 3
        });
        rig.loop.cancel(cancelled);
        rig.loop.cancel(cancelled);
        rig.loop.cancel(0);
    }
    EXPECT(rig.wait([&] { return fired.size() == 4; }));
    EXPECT_EQ(fired[0], 1);
    EXPECT_EQ(fired[1], 2);
}

FT_TEST(io_loop_posts_from_other_threads) {
    Rig rig;
    std::vector<int> seen;
    std::thread other([&] {
        for (int i = 0; i < 1000; ++i)
            rig.loop.post([&, i] {
                seen.push_back(i);
                rig.changed.notify_all();
            });
    });
    other.join();
    EXPECT(rig.wait([&] { return seen.size() == 1000; }));
    EXPECT_EQ(seen.back(), 999);
}

FT_TEST(io_loop_handlers_remove_each_other) {
    Rig rig;
    const int a = ::eventfd(0, EFD_CLOEXEC), b = ::eventfd(0, EFD_CLOEXEC);
    int ran = 0;
    bool over = false;
    {
        std::lock_guard guard(rig.engine);
        const auto both = [&](std::uint32_t) {  // whoever comes first removes both
            ++ran;
            rig.loop.remove(a);
            rig.loop.remove(b);
            rig.loop.at(IoLoop::now() + 1'000'000, [&] {
                over = true;
                rig.changed.notify_all();
            });
        };
        ring(a);
        ring(b);
        EXPECT(rig.loop.add(a, EPOLLIN, both).ok());
        EXPECT(rig.loop.add(b, EPOLLIN, both).ok());
    }
    EXPECT(rig.wait([&] { return over; }));
    EXPECT_EQ(ran, 1);
    std::lock_guard guard(rig.engine);
    EXPECT(rig.loop.add(a, EPOLLIN, [](std::uint32_t) {}).ok());  // may come back
    rig.loop.remove(a);
    ::close(a);
    ::close(b);
}

FT_TEST(io_loop_lends_its_sockets) {
    Rig rig;
    const int fd = ::eventfd(0, EFD_CLOEXEC), other = ::eventfd(0, EFD_CLOEXEC);
    std::vector<bool> on_loop;
    bool turned = false;
    {
        std::lock_guard guard(rig.engine);
        EXPECT(rig.loop
                   .add(other, EPOLLIN,
                        [&](std::uint32_t) {
                            turned = true;
                            rig.loop.remove(other);
                            rig.changed.notify_all();
                        })
                   .ok());
        EXPECT(!rig.loop.has_sockets());
        EXPECT(rig.loop
                   .add_socket(fd, EPOLLIN,
                               [&](std::uint32_t) {
                                   on_loop.push_back(rig.loop.on_thread());
                                   std::uint64_t value = 0;
                                   EXPECT(::read(fd, &value, sizeof value) == sizeof value);
                                   rig.changed.notify_all();
                               })
                   .ok());
        EXPECT(!rig.loop.sockets_ready());
    }
    ring(fd);
    EXPECT(rig.wait([&] { return on_loop == std::vector<bool>{true}; }));
    {
        std::lock_guard guard(rig.engine);
        rig.loop.lend_sockets(true);
        EXPECT(!rig.loop.poll_sockets());
    }
    ring(fd);
    ring(other);
    EXPECT(rig.wait([&] { return turned; }));
    EXPECT_EQ(on_loop.size(), 1u);  // left alone
    EXPECT(rig.loop.sockets_ready());
    {
        std::lock_guard guard(rig.engine);
        EXPECT(rig.loop.poll_sockets());
        EXPECT((on_loop == std::vector<bool>{true, false}));
    }
    // What has arrived comes before a deadline, and before what was posted, whoever has the sockets (M11).
    std::size_t before = 0;
    const auto look = [&] {
        before = on_loop.size();
        rig.changed.notify_all();
    };
    ring(fd);
    {
        std::lock_guard guard(rig.engine);
        rig.loop.at(0, look);
    }
    EXPECT(rig.wait([&] { return before > 0; }));
    EXPECT_EQ(before, 3u);
    ring(fd);
    rig.loop.post(look);
    EXPECT(rig.wait([&] { return before > 3; }));
    // What came while they were lent is seen when they are given back.
    ring(fd);
    {
        std::lock_guard guard(rig.engine);
        rig.loop.lend_sockets(false);
    }
    EXPECT(rig.wait([&] { return on_loop.size() == 5; }));
    EXPECT(on_loop.back());
    std::lock_guard guard(rig.engine);
    rig.loop.remove(fd);
    EXPECT(!rig.loop.has_sockets());
    ::close(fd);
    ::close(other);
}

FT_TEST(io_loop_stops_with_work_pending) {
    std::mutex engine;
    IoLoop loop(engine);
    REQUIRE(loop.start().ok());
    {
        std::lock_guard guard(engine);
        loop.at(IoLoop::now() + 3'600'000'000'000, [] {});
    }
    loop.post([&] { loop.post([] {}); });
    loop.stop();
    loop.stop();
    loop.post([] { EXPECT(false); });
}

FT_TEST(io_loop_closes_in_child) {
    Rig rig;
    const int counter = ::dup(0);
    ::close(counter);
    const auto child = ::fork();
    if (child == 0) {
        rig.loop.close_in_child();
        // All of the loop's descriptors lie just below the number that was free in the parent.
        const int fd = ::dup(0);
        ::_exit(fd >= 0 && fd < counter ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    bool ran = false;  // the parent's loop is untouched
    rig.loop.post([&] {
        ran = true;
        rig.changed.notify_all();
    });
    EXPECT(rig.wait([&] { return ran; }));
}

}  // namespace ftcomm
