// Choosing interfaces and binding to them.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "transport/tcp/addresses.h"

namespace ftcomm::tcp {
namespace {

struct Interface {
    std::string name;
    Address address;
    std::uint32_t scope = 0;
};

bool link_local(const Address& a) {
    const auto b = [&](std::size_t i) { return static_cast<unsigned>(a.ip[i]); };
    return a.v6 ? b(0) == 0xfe && (b(1) & 0xc0) == 0x80 : b(0) == 169 && b(1) == 254;
}

// Bridges of containers and virtual machines: they exist on many hosts with the same address. Tried last.
bool is_bridge(const std::string& name) {
    for (const char* prefix : {"docker", "br-", "veth", "virbr", "cni", "lxc"}) {
        if (name.rfind(prefix, 0) == 0) return true;
    }
    return false;
}

Status list_interfaces(std::vector<Interface>* out) {
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) {
        return Status::error(Code::System, std::string("the network interfaces can't be listed: ") + std::strerror(errno));
    }
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> guard(list, ::freeifaddrs);
    for (const auto* i = list; i != nullptr; i = i->ifa_next) {
        Interface found;
        if ((i->ifa_flags & IFF_UP) == 0 || !Address::from_sockaddr(i->ifa_addr, &found.address)) continue;
        if (link_local(found.address)) continue;  // means nothing without the interface it belongs to
        found.name = i->ifa_name;
        out->push_back(std::move(found));
    }
    std::stable_sort(out->begin(), out->end(), [](const Interface& a, const Interface& b) {
        const auto rank = [](const Interface& i) { return i.address.is_loopback() ? 0 : is_bridge(i.name) ? 2 : 1; };
        return rank(a) < rank(b);
    });
    return {};
}

Status listen_at(Address* address, int* out) {
    const auto failed = [&](const char* what) {
        const int error = errno;
        return Status::error(Code::System, "ftcomm can't listen at " + address->text() + ": " + what + ": " +
                                               std::strerror(error) +
                                               " (set the option `interface` to an interface or address of this host)");
    };
    const int fd = ::socket(address->v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return failed("socket");
    Status status;
    const int one = 1;
    sockaddr_storage where;
    socklen_t length = address->to_sockaddr(&where);
    if (address->v6 && ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one) != 0) {
        status = failed("setsockopt");
    } else if (::bind(fd, reinterpret_cast<sockaddr*>(&where), length) != 0) {
        status = failed("bind");
    } else if (::listen(fd, SOMAXCONN) != 0) {
        status = failed("listen");
    } else {
        length = sizeof where;
        if (::getsockname(fd, reinterpret_cast<sockaddr*>(&where), &length) != 0) status = failed("getsockname");
    }
    if (!status.ok()) {
        ::close(fd);
        return status;
    }
    Address bound;
    Address::from_sockaddr(reinterpret_cast<sockaddr*>(&where), &bound);
    address->port = bound.port;
    *out = fd;
    return {};
}

Address any_address(bool v6) {
    Address a;
    a.v6 = v6;
    return a;
}

}  // namespace

Status open_listeners(const std::string& interface_, bool has_secret, std::vector<int>* sockets,
                      std::vector<Address>* addresses) {
    std::vector<Interface> all, chosen;
    if (auto s = list_interfaces(&all); !s.ok()) return s;
    Interface literal;
    if (::inet_pton(AF_INET, interface_.c_str(), literal.address.ip.data()) == 1) {
        chosen.push_back(literal);
    } else if (::inet_pton(AF_INET6, interface_.c_str(), literal.address.ip.data()) == 1) {
        literal.address.v6 = true;
        chosen.push_back(literal);
    } else {
        for (const auto& i : all) {
            if (interface_.empty() ? has_secret || i.address.is_loopback() : i.name == interface_) chosen.push_back(i);
        }
    }
    if (chosen.empty()) {
        std::string names;
        for (const auto& i : all) {
            if (names.find(i.name) == std::string::npos) names += (names.empty() ? "" : ", ") + i.name;
        }
        return Status::error(Code::Invalid, interface_.empty() ? "this host has no usable network address"
                                                               : "there is no network interface \"" + interface_ +
                                                                     "\" with an address; this host has: " + names);
    }
    if (!has_secret) {
        for (const auto& i : chosen) {
            if (i.address.is_loopback()) continue;
            return Status::error(Code::Invalid, "interface \"" + interface_ +
                                                    "\" is not loopback and the job has no secret: set FTCOMM_SECRET to "
                                                    "the same value on all ranks (ftrun makes one)");
        }
    }
    if (chosen.size() > kMaxAddresses) chosen.resize(kMaxAddresses);

    // Everything: one socket per family, at the wildcard. Chosen addresses: one socket each.
    const bool wildcard = interface_.empty() && has_secret;
    std::uint16_t ports[2] = {0, 0};
    bool opened[2] = {false, false};
    Status first_error;
    for (auto& i : chosen) {
        auto& a = i.address;
        if (wildcard && opened[a.v6]) {
            a.port = ports[a.v6];
        } else {
            Address at = wildcard ? any_address(a.v6) : a;
            int fd = -1;
            if (auto s = listen_at(&at, &fd); !s.ok()) {
                // One family may be switched off; an error only when nothing is left.
                if (first_error.ok()) first_error = s;
                continue;
            }
            sockets->push_back(fd);
            a.port = ports[a.v6] = at.port;
            opened[a.v6] = true;
        }
        addresses->push_back(a);
    }
    if (addresses->empty()) return first_error;
    return {};
}

}  // namespace ftcomm::tcp
