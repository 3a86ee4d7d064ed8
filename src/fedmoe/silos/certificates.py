"""`fedmoe flower certs DIR`: an authority of one's own, the server's certificate, and a key for each node.

For a federation among people who know each other. Who has an authority already uses that one. Keys are for their owner
only (0600); the authority's key signs certificates and is best kept on a machine that is none of these.
"""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedmoe.engines.extras import require
from fedmoe.errors import ConfigError
from fedmoe.storage.files import make_private_folder, write_atomically

AUTHORITY_DAYS, SERVER_DAYS = 3650, 365


def write_certificates(folder: Path, hosts: Sequence[str], num_nodes: int) -> list[Path]:
    """The files: ca.crt, ca.key, server.crt, server.key, and node-0, node-0.pub … What is there is never replaced."""
    require("cryptography", "flower")
    from cryptography.hazmat.primitives.asymmetric import ec

    names = ["ca.crt", "ca.key", "server.crt", "server.key"]
    names += [f"node-{number}{suffix}" for number in range(num_nodes) for suffix in ("", ".pub")]
    if taken := [name for name in names if (folder / name).exists()]:
        raise ConfigError(f"{folder / taken[0]} is there already. Name another folder: keys are never replaced.")
    make_private_folder(folder)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    contents = {
        "ca.crt": _pem(_certificate("fedmoe authority", authority, authority, "fedmoe authority", None)),
        "ca.key": _private_pem(authority),
        "server.crt": _pem(_certificate(hosts[0], server, authority, "fedmoe authority", hosts)),
        "server.key": _private_pem(server),
    }
    for number in range(num_nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        contents[f"node-{number}"], contents[f"node-{number}.pub"] = _openssh(key)
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def _certificate(name: str, key: Any, signer: Any, issuer: str, hosts: Sequence[str] | None) -> Any:
    """Without hosts: the authority's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.now(UTC)
    days = AUTHORITY_DAYS if hosts is None else SERVER_DAYS
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=hosts is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts is None:
        builder = builder.add_extension(_signs_certificates(), critical=True)
    else:
        usage = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(usage, critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _name(text: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])


def _host(text: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _signs_certificates() -> Any:
    from cryptography import x509

    uses = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
            "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**dict.fromkeys(uses, False), key_cert_sign=True, crl_sign=True)


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    content: bytes = certificate.public_bytes(Encoding.PEM)
    return content


def _private_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return content


def _openssh(key: Any) -> tuple[bytes, bytes]:
    """Flower reads nodes' keys in this format only."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
