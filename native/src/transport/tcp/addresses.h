// Where a rank listens: sockets, the addresses to publish, and the blob that carries them through the rendezvous.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace ftcomm::tcp {

inline constexpr std::size_t kMaxAddresses = 16;

struct Address {
    bool v6 = false;
    std::array<std::byte, 16> ip{};  // network order; IPv4 in the first 4
    std::uint16_t port = 0;          // host order

    static bool from_sockaddr(const sockaddr* from, Address* out);
    socklen_t to_sockaddr(sockaddr_storage* out) const;
    bool is_loopback() const;
    std::string text() const;        // "10.0.0.1:4000", "[fd00::1]:4000"
    bool operator==(const Address&) const = default;
};

struct AddressBlob {
    std::uint32_t slot = 0;
    std::uint32_t incarnation = 0;
    std::uint64_t host = 0;
    std::uint64_t process = 0;       // random per process
    std::vector<Address> addresses;

    Bytes encode() const;
    static Status decode(ByteView data, AddressBlob* out);  // validates everything
};

// Listens at the chosen interface: its name, an address, or empty for all usable ones. Without a secret only loopback
// is accepted. `addresses` are those to publish, loopback first (for ranks on the same host).
Status open_listeners(const std::string& interface_, bool has_secret, std::vector<int>* sockets, std::vector<Address>* addresses);

}  // namespace ftcomm::tcp
