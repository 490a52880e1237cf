#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "runtime/store_authority.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

Bytes bytes(const std::string& s) {
    const auto v = std::as_bytes(std::span(s.data(), s.size()));
    return {v.begin(), v.end()};
}

// Behaves as torch's TCPStore does, and fails or hangs on request.
struct FakeStore {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, std::string> values;
    int failing = 0;             // so many calls from now on fail
    bool swap_then_fail = false; // the connection breaks after the store has acted
    bool hanging = false, inside = false;

    ft_store functions() { return {this, &FakeStore::get, &FakeStore::compare_set}; }
    void set(const std::string& key, const std::string& value) {
        std::lock_guard guard(mutex);
        values[key] = value;
    }

    bool enter(std::unique_lock<std::mutex>& lock) {
        inside = true;
        changed.notify_all();
        changed.wait(lock, [&] { return !hanging; });
        return failing == 0 || failing-- == 0;
    }
    static int64_t give(const std::string& value, uint8_t* out, size_t cap) {
        std::memcpy(out, value.data(), std::min(cap, value.size()));
        return static_cast<int64_t>(value.size());
    }
    static int64_t get(void* context, const char* key, uint8_t* out, size_t cap) {
        auto& self = *static_cast<FakeStore*>(context);
        std::unique_lock lock(self.mutex);
        if (!self.enter(lock)) return -1;
        const auto it = self.values.find(key);
        return it == self.values.end() ? 0 : give(it->second, out, cap);
    }
    static int64_t compare_set(void* context, const char* key, const uint8_t* expected, size_t expected_len,
                               const uint8_t* desired, size_t desired_len, uint8_t* out, size_t cap) {
        auto& self = *static_cast<FakeStore*>(context);
        std::unique_lock lock(self.mutex);
        if (!self.enter(lock)) return -1;
        const std::string want(reinterpret_cast<const char*>(expected), expected_len);
        const auto it = self.values.find(key);
        if (it == self.values.end() && !want.empty()) return give(want, out, cap);
        if (it == self.values.end() || it->second == want) {
            self.values[key].assign(reinterpret_cast<const char*>(desired), desired_len);
        }
        if (self.swap_then_fail) {
            self.swap_then_fail = false;
            return -1;
        }
        return give(self.values[key], out, cap);
    }
};

struct StoreRig {
    StoreRig() : loop(engine) {
        REQUIRE(loop.start().ok());
        REQUIRE(StoreAuthority::write_boot(store.functions(), "j", 0xabc).ok());
        authority = std::make_unique<StoreAuthority>(store.functions(), "j", loop, [this](CellReply r) {
            last = std::move(r);
            ++replies;
            changed.notify_all();
        });
        REQUIRE(authority->start().ok());
    }
    ~StoreRig() {
        EXPECT(authority->stop(60'000'000'000));
        loop.stop();
    }
    CellReply wait() {
        std::unique_lock lock(engine);
        EXPECT(changed.wait_for(lock, std::chrono::seconds(60), [&] { return replies == asked; }));
        return last;
    }
    CellReply read(const std::string& key) {
        {
            std::lock_guard guard(engine);
            authority->read(key, ++asked);
        }
        return wait();
    }
    CellReply swap(const std::string& key, const std::string& expected, const std::string& desired) {
        {
            std::lock_guard guard(engine);
            authority->compare_and_set(key, bytes(expected), bytes(desired), ++asked);
        }
        return wait();
    }

    FakeStore store;
    std::mutex engine;
    std::condition_variable changed;
    IoLoop loop;
    std::unique_ptr<StoreAuthority> authority;
    CellReply last;
    std::uint64_t asked = 0, replies = 0;
};

}  // namespace

FT_TEST(store_authority_cells) {
    StoreRig rig;
    auto r = rig.read("j/view");
    EXPECT_EQ(r.result, CellResult::Value);
    EXPECT(r.value.empty());
    EXPECT_EQ(r.boot, 0xabcu);
    EXPECT_EQ(r.request, 1u);
    EXPECT_EQ(rig.swap("j/view", "", "one").result, CellResult::Swapped);
    r = rig.swap("j/view", "", "two");
    EXPECT_EQ(r.result, CellResult::Conflict);
    EXPECT(r.value == bytes("one"));
    EXPECT_EQ(rig.swap("j/view", "one", "two").result, CellResult::Swapped);
    EXPECT_EQ(rig.swap("j/view", "one", "two").result, CellResult::Swapped);  // its own, again
    EXPECT(rig.read("j/view").value == bytes("two"));
    EXPECT_EQ(rig.swap("j/other", "something", "two").result, CellResult::Unknown);  // a missing cell
    const std::string large(300'000, 'x');
    EXPECT_EQ(rig.swap("j/large", "", large).result, CellResult::Swapped);
    EXPECT(rig.read("j/large").value == bytes(large));
    r = rig.swap("j/large", "", "y");
    EXPECT_EQ(r.result, CellResult::Conflict);
    EXPECT(r.value == bytes(large));
}

FT_TEST(store_authority_failures) {
    StoreRig rig;
    rig.store.failing = 1;
    EXPECT_EQ(rig.read("j/view").result, CellResult::Value);  // one retry
    rig.store.swap_then_fail = true;
    EXPECT_EQ(rig.swap("j/view", "", "one").result, CellResult::Unknown);
    EXPECT(rig.read("j/view").value == bytes("one"));
    rig.store.failing = 100;
    EXPECT_EQ(rig.swap("j/view", "one", "two").result, CellResult::Lost);
    EXPECT_EQ(rig.read("j/view").result, CellResult::Lost);
}

// A store that was restarted empty is not the store (M3).
FT_TEST(store_authority_blank_store) {
    StoreRig rig;
    EXPECT_EQ(rig.swap("j/view", "", "one").result, CellResult::Swapped);
    {
        std::lock_guard guard(rig.store.mutex);
        rig.store.values.clear();
    }
    EXPECT_EQ(rig.read("j/view").result, CellResult::Lost);
    EXPECT_EQ(rig.swap("j/view", "one", "two").result, CellResult::Lost);
    rig.store.set("j/boot", "00000000000000ff");
    EXPECT_EQ(rig.read("j/view").boot, 0xffu);  // the node compares
    rig.store.set("j/boot", "nonsense");
    EXPECT_EQ(rig.read("j/view").result, CellResult::Lost);
}

FT_TEST(store_authority_boot) {
    FakeStore store;
    const auto f = store.functions();
    std::uint64_t boot = 0;
    EXPECT_EQ(StoreAuthority::read_boot(f, "j", &boot).code, Code::NoAuthority);
    EXPECT(StoreAuthority::write_boot(f, "j", 0x0123456789abcdef).ok());
    EXPECT(StoreAuthority::write_boot(f, "j", 0x0123456789abcdef).ok());
    EXPECT_EQ(StoreAuthority::write_boot(f, "j", 5).code, Code::Invalid);
    EXPECT(StoreAuthority::check_boot(f, "j", 0x0123456789abcdef).ok());
    EXPECT_EQ(StoreAuthority::check_boot(f, "j", 5).code, Code::NoAuthority);
    EXPECT(StoreAuthority::read_boot(f, "j", &boot).ok());
    EXPECT_EQ(boot, 0x0123456789abcdefu);
    store.swap_then_fail = true;
    EXPECT(StoreAuthority::write_boot(f, "k", 9).ok());  // it had been written
}

// A call that hangs in the store holds up neither the engine nor the end.
FT_TEST(store_authority_hanging_store) {
    const auto store = std::make_shared<FakeStore>();  // outlives the thread's call
    std::mutex engine;
    IoLoop loop(engine);
    REQUIRE(loop.start().ok());
    REQUIRE(StoreAuthority::write_boot(store->functions(), "j", 1).ok());
    auto authority = std::make_unique<StoreAuthority>(store->functions(), "j", loop, [](CellReply) { EXPECT(false); });
    REQUIRE(authority->start().ok());
    {
        std::lock_guard guard(store->mutex);
        store->hanging = true;
        store->inside = false;
    }
    authority->read("j/view", 1);
    authority->read("j/view", 2);
    {
        std::unique_lock lock(store->mutex);
        store->changed.wait(lock, [&] { return store->inside; });
    }
    EXPECT(!authority->stop(1'000'000));
    loop.stop();
    {
        std::lock_guard guard(store->mutex);
        store->hanging = false;
        store->changed.notify_all();
    }
    EXPECT(authority->stop(60'000'000'000));
}

}  // namespace ftcomm
