"""The failure domain of a worker, such as its rack or its zone: ``spark.flux.domain``, read on the worker's executor."""

from __future__ import annotations

from collections.abc import Mapping


def parse(setting: str) -> str | dict[str, str]:
    """Return the name of an environment variable, or labels by host: ``host1=rack1,host2=rack1``. ValueError if it is neither."""
    setting = setting.strip()
    if "=" not in setting:
        if setting and not setting.isidentifier():
            raise ValueError(setting)
        return setting
    pairs = [pair.partition("=") for pair in setting.split(",")]
    labels = {host.strip(): label.strip() for host, _, label in pairs}
    if not all(labels) or not all(labels.values()) or len(labels) < len(pairs):
        raise ValueError(setting)
    return labels


def label(setting: str, host: str, environment: Mapping[str, str]) -> str:
    """Return the domain of a host. Empty if none is given: the host is a domain of its own then."""
    found = parse(setting)
    if isinstance(found, dict):
        return found.get(host) or found.get(host.partition(".")[0], "")
    return environment.get(found, "").strip()
