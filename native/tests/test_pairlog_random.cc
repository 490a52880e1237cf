// Thousands of random operations against a model: the lengths of the records that must be there.
#include <algorithm>
#include <map>

#include "tests/pairlog_rig.h"

namespace ftcomm::pairlog {
namespace {

struct Model {
    std::map<std::uint64_t, std::size_t> lengths;   // of the records that are not collected
    std::uint64_t last = 0, collected = 0;
};

std::size_t some_length(Random& random) {
    switch (random.below(4)) {
        case 0: return random.below(200);
        case 1: return random.below(3 * kSmall);
        default: return random.below(kSmall / 4);
    }
}

void compare(Model& model, StreamWriter& writer, StreamReader& reader, Random& random) {
    reader.refresh();
    EXPECT_EQ(writer.last_seq(), model.last);
    EXPECT_EQ(reader.last_seq(), model.last);
    EXPECT_EQ(writer.first_seq(), model.collected + 1);
    RecordInfo info;
    ByteView view;
    for (int i = 0; i < 3 && model.last > model.collected; ++i) {
        const auto seq = model.collected + 1 + random.below(model.last - model.collected);
        EXPECT(writer.find(seq, &info, &view).ok());
        EXPECT(same(view, content(seq, model.lengths[seq])));
        EXPECT(reader.find(seq, &info, &view).ok());
        EXPECT(same(view, content(seq, model.lengths[seq])));
    }
    EXPECT_EQ(writer.find(model.last + 1, &info, &view).code, Code::Invalid);
    EXPECT_EQ(reader.find(model.collected, &info, &view).code, Code::Invalid);
}

void run(std::uint64_t seed, int operations) {
    Folder folder;
    Random random(seed);
    auto config = folder.config();
    config.limit = 12 * kSmall;
    if (seed % 2 == 0) config.spill_path = folder.path + "/spill";
    if (seed % 3 == 0) config.keep_free_ns = 0;
    if (seed % 4 < 2) config.grown_bytes = 4 * kSmall;
    auto readers_dir = open_log(config);
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    auto reader = open_reader(*readers_dir, Role::Consumer);
    Model model;
    std::uint64_t wanted = 0;
    const auto collect = [&](std::uint64_t through) {
        EXPECT(writer->collect(through).ok());
        wanted = std::max(wanted, std::min(through, model.last));
        model.collected = std::max(model.collected, std::min(wanted, reader->acknowledged()));
    };
    for (int i = 0; i < operations; ++i) {
        const auto what = random.below(100);
        if (what < 70) {
            const auto length = some_length(random);
            const auto status = add(*writer, length);
            model.collected = writer->first_seq() - 1;  // a new segment may have done the rest of a collect
            EXPECT(model.collected <= std::min(wanted, reader->acknowledged()));
            if (status) {
                model.lengths[++model.last] = length;
            } else {
                EXPECT_EQ(status.code, Code::LogFull);
                EXPECT(config.spill_path.empty());
                compare(model, *writer, *reader, random);
                reader->acknowledge(model.last);
                collect(model.last - std::min<std::uint64_t>(model.last, random.below(4)));
            }
        } else if (what < 80) {
            reader->refresh();
            reader->acknowledge(reader->last_seq() - random.below(std::min<std::uint64_t>(reader->last_seq() + 1, 20)));
        } else if (what < 88) {
            collect(model.last - random.below(std::min<std::uint64_t>(model.last + 1, 20)));
        } else if (what < 92) {
            writer.reset();
            if (what < 90) dir = open_log(config);
            writer = open_writer(*dir);
            wanted = model.collected;
        } else if (what < 94) {
            reader = open_reader(*readers_dir, Role::Consumer);
        } else {  // a writer that is killed on its way, perhaps with a record more than it could tell
            writer.reset();
            dir.reset();
            static const char* const kPoints[] = {"payload.before",   "payload.after",   "header.before", "header.after",
                                                  "watermark.before", "watermark.after", "roll.before",   "roll.after",
                                                  "spill.before",     "spill.after",     "collect.after"};
            const auto lengths = random.below(3 * kSmall);
            const auto through = model.last;
            child_with("rank=0,at=log." + std::string(kPoints[random.below(std::size(kPoints))]) + ",do=kill", [&] {
                auto theirs = open_log(config);
                auto victim = open_writer(*theirs);
                (void)victim->collect(through);
                (void)add(*victim, lengths);
            });
            dir = open_log(config);
            writer = open_writer(*dir);
            EXPECT(writer->last_seq() == model.last || writer->last_seq() == model.last + 1);
            if (writer->last_seq() > model.last) model.lengths[++model.last] = lengths;
            model.collected = writer->first_seq() - 1;
            EXPECT(model.collected <= reader->acknowledged());
            wanted = model.collected;
        }
        EXPECT(dir->resident() <= config.limit);
        if (i % 5 == 0) compare(model, *writer, *reader, random);
    }
    compare(model, *writer, *reader, random);
    EXPECT(model.last > static_cast<std::uint64_t>(operations) / 4);
}

}  // namespace

FT_TEST(pairlog_random_operations) {
    for (std::uint64_t seed = 1; seed <= 12; ++seed) run(seed, 500);
}

}  // namespace ftcomm::pairlog
