// Who keeps the deadlines: with tcp the thread that reads the sockets, not the progress thread (M11).
#include "runtime/engine.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime/io_loop.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

constexpr Time kHeartbeat = 200'000'000;

struct NoWires final : Transport {
    std::byte* reserve(int, std::uint32_t) override { return nullptr; }
    void commit(int, const FrameHeader&) override {}
    void attach(int, std::uint32_t) override {}
    void detach(int) override {}
    std::uint32_t max_payload() const override { return 4096; }
};

struct NoCells final : Authority {
    void read(const std::string&, std::uint64_t) override {}
    void compare_and_set(const std::string&, const Bytes&, const Bytes&, std::uint64_t) override {}
};

// What a thread passes before it takes the engine: closed, it is as if it had no processor.
class Gate {
public:
    void pass() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return open_; });
    }
    void open(bool on) {
        std::lock_guard guard(mutex_);
        open_ = on;
        changed_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = true;
};

struct Progress {
    explicit Progress(Engine& e) : engine(e), thread([&e] { e.run_progress(); }) {}
    ~Progress() {
        engine.stop();
        thread.join();
        Engine::Hold hold(engine);
        engine.drop_node();
    }
    Engine& engine;
    std::thread thread;
};

NodeConfig config_of(Time heartbeat) {
    NodeConfig config;
    config.job = "engine";
    config.world_size = 3;
    config.boot = 7;
    config.heartbeat = heartbeat;
    config.hosts = {1, 2, 3};
    config.initial_view = Node::make_initial_view(config.job, config.boot, {0, 0, 0});
    return config;
}

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

}  // namespace

FT_TEST(peers_are_not_suspected_while_nobody_reads_the_sockets) {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::string> suspicions;
    Dispatcher dispatcher;
    REQUIRE(dispatcher.start().ok());
    Engine engine(dispatcher, [&](const NodeEvent* e, const std::string&) {
        std::lock_guard guard(mutex);
        if (e != nullptr && e->kind == NodeEvent::Kind::Suspected) suspicions.push_back(to_string(e->evidence));
        changed.notify_all();
    });
    Gate gate;
    IoLoop loop(
        [&] {
            gate.pass();
            engine.lock_urgently();
        },
        [&] { engine.unlock(); });
    REQUIRE(loop.start().ok());
    NoWires wires;
    NoCells cells;
    auto self = std::make_unique<shm::Instance>();
    {
        Engine::Hold hold(engine);
        Engine::Parts parts;
        parts.self = self.get();
        parts.sockets = &loop;
        engine.set_parts(parts);
        engine.set_node(std::make_unique<Node>(config_of(kHeartbeat), wires, cells, engine, IoLoop::now()));
    }
    gate.open(false);
    Progress progress(engine);
    // The progress thread runs on; what it counts is what it would take for deadlines.
    const auto until = IoLoop::now() + 3 * kHeartbeat;
    while (IoLoop::now() < until || self->ticks.load() < 40) nap();
    {
        std::lock_guard guard(mutex);
        EXPECT(suspicions.empty());
    }
    // It reads again, and the gap is its own. From then on silence counts.
    gate.open(true);
    {
        Engine::Hold hold(engine);
        for (int slot : {1, 2}) engine.on_heard(slot, 0);
    }
    {
        std::unique_lock lock(mutex);
        EXPECT(changed.wait_for(lock, std::chrono::seconds(60), [&] { return suspicions.size() == 2; }));
    }
    loop.stop();
}

}  // namespace ftcomm
