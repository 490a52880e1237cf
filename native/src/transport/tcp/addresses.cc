#include "transport/tcp/addresses.h"

#include <arpa/inet.h>

#include <cstring>

namespace ftcomm::tcp {
namespace {

constexpr std::uint32_t kBlobMagic = 0x41544654;  // "TFTA"

}  // namespace

bool Address::from_sockaddr(const sockaddr* from, Address* out) {
    *out = {};
    if (from == nullptr) return false;
    if (from->sa_family == AF_INET) {
        sockaddr_in in{};
        std::memcpy(&in, from, sizeof in);
        std::memcpy(out->ip.data(), &in.sin_addr, 4);
        out->port = ntohs(in.sin_port);
        return true;
    }
    if (from->sa_family == AF_INET6) {
        sockaddr_in6 in{};
        std::memcpy(&in, from, sizeof in);
        std::memcpy(out->ip.data(), &in.sin6_addr, 16);
        out->port = ntohs(in.sin6_port);
        out->v6 = true;
        return true;
    }
    return false;
}

socklen_t Address::to_sockaddr(sockaddr_storage* out) const {
    std::memset(out, 0, sizeof *out);
    if (v6) {
        sockaddr_in6 in{};
        in.sin6_family = AF_INET6;
        in.sin6_port = htons(port);
        std::memcpy(&in.sin6_addr, ip.data(), 16);
        std::memcpy(out, &in, sizeof in);
        return sizeof in;
    }
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = htons(port);
    std::memcpy(&in.sin_addr, ip.data(), 4);
    std::memcpy(out, &in, sizeof in);
    return sizeof in;
}

bool Address::is_loopback() const {
    if (!v6) return ip[0] == std::byte{127};
    in6_addr in{};
    std::memcpy(&in, ip.data(), 16);
    if (IN6_IS_ADDR_V4MAPPED(&in)) return ip[12] == std::byte{127};
    return IN6_IS_ADDR_LOOPBACK(&in);
}

std::string Address::text() const {
    char buffer[INET6_ADDRSTRLEN] = "?";
    ::inet_ntop(v6 ? AF_INET6 : AF_INET, ip.data(), buffer, sizeof buffer);
    return (v6 ? "[" + std::string(buffer) + "]" : std::string(buffer)) + ":" + std::to_string(port);
}

Bytes AddressBlob::encode() const {
    ByteWriter w;
    w.put(kBlobMagic).put(slot).put(incarnation).put(host).put(process);
    w.put(static_cast<std::uint32_t>(addresses.size()));
    for (const auto& a : addresses) w.put(static_cast<std::uint8_t>(a.v6 ? 6 : 4)).bytes(a.ip).put(a.port);
    return w.take();
}

Status AddressBlob::decode(ByteView data, AddressBlob* out) {
    const auto bad = [](const char* what) {
        return Status::error(Code::Invalid, std::string("the address of a rank is malformed (") + what +
                                                "): do all ranks run the same version of ftcomm?");
    };
    ByteReader r(data);
    if (r.get<std::uint32_t>() != kBlobMagic) return bad("wrong mark");
    *out = {};
    out->slot = r.get<std::uint32_t>();
    out->incarnation = r.get<std::uint32_t>();
    out->host = r.get<std::uint64_t>();
    out->process = r.get<std::uint64_t>();
    const auto n = r.count(23);
    if (!r.ok() || n > kMaxAddresses) return bad("wrong length");
    for (std::uint32_t i = 0; i < n; ++i) {
        Address a;
        const auto family = r.get<std::uint8_t>();
        const auto ip = r.bytes();
        a.port = r.get<std::uint16_t>();
        if (!r.ok() || ip.size() != 16 || (family != 4 && family != 6) || a.port == 0) return bad("an address");
        a.v6 = family == 6;
        std::memcpy(a.ip.data(), ip.data(), 16);
        out->addresses.push_back(a);
    }
    if (!r.done() || out->slot >= static_cast<std::uint32_t>(kMaxRanks)) return bad("its end or its rank");
    return {};
}

}  // namespace ftcomm::tcp
