#include "transport/tcp/tcp_transport.h"

#include "base/check.h"
#include "base/failpoint.h"
#include "transport/tcp/tcp_impl.h"

namespace ftcomm {

using namespace tcp;

TcpTransport::TcpTransport(TcpConfig config, IoLoop& loop, TcpEvents& events)
    : impl_(std::make_unique<TcpImpl>(std::move(config), loop, events)) {}

TcpTransport::~TcpTransport() {
    if (impl_ == nullptr) return;
    if (impl_->forked_) {
        // The descriptor numbers may be the child's own by now: nothing may close them.
        static_cast<void>(impl_.release());
        return;
    }
    impl_->stop();
}

Status TcpTransport::listen() { return impl_->listen(); }
const Bytes& TcpTransport::address() const { return impl_->address_; }
Status TcpTransport::start(const std::vector<Bytes>& peers, std::uint64_t boot) { return impl_->start(peers, boot); }
void TcpTransport::attach(int slot, std::uint32_t incarnation) { impl_->attach(slot, incarnation); }
void TcpTransport::detach(int slot) { impl_->detach(slot); }
void TcpTransport::drain(int slot) { impl_->drain(impl_->current(slot)); }
void TcpTransport::drain(int slot, std::uint32_t incarnation) { impl_->drain(impl_->find(slot, incarnation)); }
void TcpTransport::cut(int slot) { impl_->cut(slot); }
void TcpTransport::stop() { impl_->stop(); }
bool TcpTransport::all_acknowledged() const { return impl_->all_acknowledged(); }

Status TcpTransport::parse_address(ByteView blob, PeerInfo* out) {
    AddressBlob decoded;
    if (auto s = AddressBlob::decode(blob, &decoded); !s.ok()) return s;
    *out = {static_cast<int>(decoded.slot), decoded.incarnation, decoded.host};
    return {};
}

void TcpTransport::close_in_child() {
    impl_->forked_ = true;
    impl_->fds_.close_all();
}

RankSet TcpTransport::unlinked() const {
    RankSet out;
    for (int slot = 0; slot < impl_->config_.world_size; ++slot) {
        const auto link = impl_->current(slot);
        if (link != nullptr && !link->linked && !link->addresses.empty()) out.add(slot);
    }
    return out;
}

std::string TcpTransport::why(int slot) const {
    const auto link = impl_->current(slot);
    return link == nullptr || link->current != nullptr ? "" : link->why;
}

void TcpTransport::flush() {
    for (const auto& slot : impl_->links_)
        for (const auto& [incarnation, link] : slot)
            if (!link->session.all_acknowledged()) impl_->ask(link);
}

std::uint32_t TcpTransport::max_payload() const { return Session(impl_->config_.ring_bytes).max_payload(); }

std::byte* TcpTransport::reserve(int slot, std::uint32_t length) {
    const auto link = impl_->current(slot);
    if (link == nullptr) {
        impl_->waiting_for_attach_.insert(slot);
        return nullptr;
    }
    return link->session.reserve(length);
}

void TcpTransport::commit(int slot, const FrameHeader& header) {
    const auto link = impl_->current(slot);
    FT_CHECK(link != nullptr, "commit to slot %d without a reserve", slot);
    link->session.commit(header);
    impl_->committed(link);
}

bool TcpTransport::send_from(int slot, const FrameHeader& header, const Held& payload) {
    const auto link = impl_->current(slot);
    if (link == nullptr) {
        impl_->waiting_for_attach_.insert(slot);
        return false;
    }
    if (!link->session.send_from(header, payload)) return false;
    impl_->committed(link);
    return true;
}

void TcpTransport::take_back(int slot, std::uint64_t comm, bool has_come) {
    for (const auto& [incarnation, link] : impl_->links_[static_cast<std::size_t>(slot)]) link->session.take_back(comm, has_come);
}

void TcpImpl::committed(const LinkPtr& link) {
    was_idle_ = false;
    const auto verdict = FT_POINT("tcp.send");
    if (verdict.action == fault::Action::Corrupt) link->session.corrupt_last();
    // A socket that was full stays full until the loop says otherwise.
    if (link->current != nullptr && !link->current->waits_to_write()) flush(link);
    if (verdict.action == fault::Action::Cut) cut(verdict.argument);
}

std::string TcpTransport::stats_json() const {
    std::string out;
    for (const auto& slot : impl_->links_) {
        for (const auto& [incarnation, link] : slot) {
            const auto& s = link->session.stats();
            const auto field = [](const char* name, std::uint64_t value) {
                return ",\"" + std::string(name) + "\":" + std::to_string(value);
            };
            out += (out.empty() ? "" : ",") + std::string("{\"slot\":") + std::to_string(link->slot) +
                   field("incarnation", incarnation) + ",\"connected\":" + (link->current != nullptr ? "true" : "false") +
                   field("sent", s.sent) + field("received", s.received) + field("resent", s.resent) +
                   field("duplicates", s.duplicates) + field("broken", s.broken) +
                   field("reconnects", s.connections > 0 ? s.connections - 1 : 0) + "}";
        }
    }
    return "{\"peers\":[" + out + "]}";
}

}  // namespace ftcomm
