"""Devices, addresses and routes of the calling thread's network namespace, over rtnetlink.

The program ``ip`` is not needed: machines and containers without it have the same kernel interface. Requests are those of
``linux/rtnetlink.h``; each is answered by the kernel before the next one is made.
"""

from __future__ import annotations

import os
import socket
import struct

_NEWLINK, _NEWADDR, _NEWROUTE, _DELROUTE = 16, 20, 24, 25
_REQUEST, _ACK, _REPLACE, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x100, 0x200, 0x400
_ERROR = 2  # the kind of the kernel's answer
# Attributes of a link, of an address and of a route.
_IFNAME, _MTU, _MASTER, _LINKINFO, _NET_NS_FD = 3, 4, 10, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_ADDRESS, _LOCAL = 1, 2
_DST, _OIF, _PREFSRC = 1, 4, 7
_MAIN_TABLE, _STATIC, _LINK_SCOPE, _ANY_SCOPE = 254, 4, 253, 255
_UNICAST, _BLACKHOLE = 1, 6
_UP = 1


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("I", value))


def _ask(kind: int, flags: int, body: bytes) -> None:
    """Make a request and wait for its answer. OSError if the kernel refuses it."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.settimeout(5)
        link.send(struct.pack("IHHII", 16 + len(body), kind, flags | _REQUEST | _ACK, 1, 0) + body)
        answer = link.recv(65536)
    _, answered, *_ = struct.unpack_from("IHHII", answer)
    (error,) = struct.unpack_from("i", answer, 16)
    if answered != _ERROR or error:
        raise OSError(-error, os.strerror(-error))


def _link(index: int = 0, flags: int = 0) -> bytes:
    return struct.pack("BxHiII", socket.AF_UNSPEC, 0, index, flags, flags)


def bridge(name: str) -> None:
    """Add a bridge."""
    _ask(
        _NEWLINK,
        _CREATE | _EXCLUSIVE,
        _link() + _text(_IFNAME, name) + _attribute(_LINKINFO, _text(_INFO_KIND, "bridge")),
    )


def veth(name: str, peer: str, namespace: int) -> None:
    """Add two devices that are the ends of a cable, the peer in the ``namespace`` with this descriptor."""
    end = _link() + _text(_IFNAME, peer) + _number(_NET_NS_FD, namespace)
    kind = _text(_INFO_KIND, "veth") + _attribute(_INFO_DATA, _attribute(_VETH_PEER, end))
    _ask(_NEWLINK, _CREATE | _EXCLUSIVE, _link() + _text(_IFNAME, name) + _attribute(_LINKINFO, kind))


def up(name: str, mtu: int = 0, master: str = "") -> None:
    """Switch a device on, with this largest packet, as a port of the bridge ``master``."""
    body = _link(socket.if_nametoindex(name), _UP)
    body += _number(_MTU, mtu) if mtu else b""
    body += _number(_MASTER, socket.if_nametoindex(master)) if master else b""
    _ask(_NEWLINK, 0, body)


def address(name: str, host: str, bits: int) -> None:
    """Give a device an address in a network of this many bits."""
    raw = socket.inet_aton(host)
    head = struct.pack("BBBBi", socket.AF_INET, bits, 0, 0, socket.if_nametoindex(name))
    _ask(_NEWADDR, _CREATE | _EXCLUSIVE, head + _attribute(_LOCAL, raw) + _attribute(_ADDRESS, raw))


def _route(kind: int, scope: int, protocol: int = _STATIC) -> bytes:
    return struct.pack("BBBBBBBBI", socket.AF_INET, 32, 0, 0, _MAIN_TABLE, protocol, scope, kind, 0)


def route(to: str, device: str, source: str) -> None:
    """Send packets to a host out of a device, from this address; in place of an earlier route to the host."""
    body = _route(_UNICAST, _LINK_SCOPE) + _attribute(_DST, socket.inet_aton(to))
    body += _number(_OIF, socket.if_nametoindex(device)) + _attribute(_PREFSRC, socket.inet_aton(source))
    _ask(_NEWROUTE, _CREATE | _REPLACE, body)


def blackhole(to: str) -> None:
    """Drop packets to a host; in place of an earlier route to the host."""
    _ask(_NEWROUTE, _CREATE | _REPLACE, _route(_BLACKHOLE, 0) + _attribute(_DST, socket.inet_aton(to)))


def no_route(to: str) -> None:
    """Remove the route to a single host; the route to its network stays."""
    _ask(_DELROUTE, 0, _route(0, _ANY_SCOPE, 0) + _attribute(_DST, socket.inet_aton(to)))
