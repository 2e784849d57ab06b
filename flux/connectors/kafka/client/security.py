"""Connection options for brokers with TLS or a login, by the names that kafka-python gives them, checked at once.

Law: secrets are in no message and in no ``repr``.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from flux.errors import UsageError

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_TLS = ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_crlfile", "ssl_check_hostname")
_SASL = (
    "sasl_mechanism", "sasl_plain_username", "sasl_plain_password", "sasl_kerberos_name", "sasl_kerberos_service_name",
    "sasl_kerberos_domain_name", "sasl_oauth_token_provider",
)  # fmt: skip
OPTIONS = ("security_protocol", *_TLS, *_SASL)
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI", "AWS_MSK_IAM")
_WITH_PASSWORD = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


class Security:
    """Checked options for connections. They are shipped to workers as they are: files named here must be there, too."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise UsageError(f"flux.kafka has no option {unknown[0]!r}; for security there are {', '.join(OPTIONS)}")
        self.options = {name: value for name, value in options.items() if value is not None}
        self.protocol = str(self.options.get("security_protocol", "PLAINTEXT")).upper()
        if self.protocol not in PROTOCOLS:
            raise UsageError(f"security_protocol must be one of {', '.join(PROTOCOLS)}; got {self.protocol!r}")
        self.tls, self.login = self.protocol.endswith("SSL"), self.protocol.startswith("SASL")
        for names, wanted, other in ((_TLS, self.tls, "SSL or SASL_SSL"), (_SASL, self.login, "SASL_SSL")):
            idle = [name for name in names if name in self.options]
            if idle and not wanted:
                raise UsageError(f"{idle[0]} has no effect with security_protocol={self.protocol!r}; use {other}")
        if self.login:
            self._check_login()

    @property
    def mechanism(self) -> str:
        return str(self.options["sasl_mechanism"])

    def _check_login(self) -> None:
        mechanism = self.options.get("sasl_mechanism")
        if mechanism not in MECHANISMS:
            raise UsageError(f"sasl_mechanism must be one of {', '.join(MECHANISMS)}; got {mechanism!r}")
        if mechanism in _WITH_PASSWORD:
            for name in ("sasl_plain_username", "sasl_plain_password"):
                if not isinstance(self.options.get(name), str):
                    raise UsageError(f"sasl_mechanism {mechanism} needs {name}, a string")
        if mechanism == "OAUTHBEARER" and "sasl_oauth_token_provider" not in self.options:
            raise UsageError(
                "sasl_mechanism OAUTHBEARER needs sasl_oauth_token_provider, an object with a method token()"
            )

    def context(self) -> ssl.SSLContext:
        """Make the TLS context of a new connection. UsageError names the file that cannot be read."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = bool(self.options.get("ssl_check_hostname", True))
        name = "ssl_cafile"
        try:
            if name in self.options:
                context.load_verify_locations(self.options[name])
            else:
                context.load_default_certs()
            name = "ssl_crlfile"
            if name in self.options:
                context.load_verify_locations(self.options[name])
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
            name = "ssl_certfile"
            if name in self.options:
                context.load_cert_chain(
                    self.options[name], self.options.get("ssl_keyfile"), self.options.get("ssl_password")
                )
        except OSError as error:  # ssl.SSLError is one
            raise UsageError(f"cannot use {name}={self.options.get(name)!r}: {error}") from error
        return context

    def who(self) -> str:
        """Describe the login, for messages."""
        if not self.login:
            return "without a login"
        return f"as {self.options.get('sasl_plain_username', 'the owner of the token')!r} by {self.mechanism}"

    def __repr__(self) -> str:
        return f"<{self.protocol}, {self.who()}>"
