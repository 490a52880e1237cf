// Records that come in pieces: written as they come, and read by others while they do.
#include "base/check.h"
#include "base/crc32c.h"
#include "runtime/file_log.h"

namespace ftcomm {

namespace {

// Of a message that comes in pieces this is one half, between hosts: while it is written, whoever wants it has its pieces from elsewhere.
constexpr std::uint64_t kLong = 256u << 10;

Status gone() { return Status::error(Code::Invalid, "what another rank was writing to its log is not there"); }

}  // namespace

Status FileLog::append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                             ByteView piece, std::uint32_t* crc) {
    pairlog::StreamWriter* w = nullptr;
    auto s = own_writer(key, &w);
    if (!s) return s;
    if (at == 0) {
        if (w->is_open()) w->abandon();
        std::byte* to = nullptr;
        if (s = begin(*w, key, tag, aux, bytes, &to); !s) return s;
    }
    FT_CHECK(w->is_open(), "a piece of a log record comes that was not begun");
    w->put(piece, key.dst == kResults ? into_for(piece.size(), kLongResult) : into_for(bytes, kLong));
    *crc = w->last_record().crc;
    return {};
}

std::byte* FileLog::piece_room(const LogKey& key, std::uint64_t at, std::uint64_t bytes) {
    auto* w = own(key) ? used_writer(key) : nullptr;
    return w != nullptr ? w->room(at, bytes) : nullptr;
}

Held FileLog::hold(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) {
    auto* w = own(key) ? used_writer(key) : nullptr;
    return w != nullptr ? w->hold(seq, at, bytes) : Held{};
}

// What has arrived is acted on at once. What goes out in pieces was late anyway, and is synced with all that was late with it.
Status FileLog::commit_pieces(const LogKey& key) {
    auto* w = writer(key);
    if (key.src != config_.slot || key.dst == kResults) return commit(*w);
    auto s = w->commit();
    if (s && dir_->host_durable()) unsynced_.insert(w);
    return s;
}

void FileLog::abandon_pieces(const LogKey& key) {
    auto* w = writer(key);
    if (w != nullptr && w->is_open()) w->abandon();
}

// A piece up to `end` of a record that another rank writes, or has written.
Status FileLog::find_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t end, Found* out) {
    FT_CHECK(!own(key), "slot %d reads its own log as if it were another's", config_.slot);
    Status s;
    auto* r = out->reader = reader(key, &s);
    if (r == nullptr) return s;
    // Twice: its writer may commit it between two looks.
    for (int attempt = 0; attempt < 2; ++attempt) {
        r->refresh();
        if (!r->error()) return r->error();
        out->committed = seq <= r->last_seq();
        if (out->committed && !(s = r->find(seq, &out->info, &out->payload, false))) return s;
        if (!out->committed && (seq != r->last_seq() + 1 || !r->partial(&out->info, &out->payload, &out->generation))) continue;
        if (end > out->payload.size()) break;
        if (auto& segment = shown_[r]; segment != r->newest_segment()) {
            segment = r->newest_segment();
            // Their writers need room: what is spilled of the others takes memory as long as it is mapped.
            for (const auto& [other, newest] : shown_)
                if (other != r) other->refresh();
        }
        return {};
    }
    return gone();
}

// Nothing else was written there.
bool FileLog::stands(const Found& found, std::uint64_t seq) {
    const auto* r = found.reader;
    return found.committed ? r->intact(seq) : r->generation() == found.generation || r->is_at(found.info, found.payload);
}

Status FileLog::read_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::span<std::byte> to, std::uint32_t* crc) {
    Found found;
    if (auto s = find_pieces(key, seq, at + to.size(), &found); !s) return s;
    *crc = crc32c_copy(to.data(), found.payload.data() + at, to.size(), *crc, into_for(found.payload.size(), kLongReceived));
    // Its writer may have died meanwhile, and its successor have given the record up, and begun another one there. (Looked at once: between two
    // looks that may happen, too.)
    if (!found.committed) return found.reader->generation() == found.generation ? Status{} : gone();
    FT_CHECK(stands(found, seq), "record %llu of slot %d was overwritten while it was read", static_cast<unsigned long long>(seq),
             key.src);
    return {};
}

Status FileLog::view_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes, View* out) {
    Found found;
    if (auto s = find_pieces(key, seq, at + bytes, &found); !s) return s;
    out->bytes = found.payload.subspan(at, bytes);
    out->stands = [found, seq] { return stands(found, seq); };
    return {};
}

}  // namespace ftcomm
