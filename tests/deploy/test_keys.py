"""Documents of the coordinator: a signature holds for one document, one purpose and one key."""

from __future__ import annotations

import stat

import pytest

from holdfast.core.errors import HoldfastError
from holdfast_deploy.keys import Signature, fingerprint, load_key, make_key, sign, verify


def test_a_signature_is_of_one_document_one_purpose_and_one_key(tmp_path):
    key, other = make_key(tmp_path), make_key(tmp_path / "elsewhere")
    signed = sign("federation", b"rounds = 3", key)
    again = Signature.model_validate_json(signed.model_dump_json())
    verify("federation", b"rounds = 3", again)
    verify("federation", b"rounds = 3", again, trusted=signed.key)
    with pytest.raises(HoldfastError, match="not of this document"):
        verify("federation", b"rounds = 4", signed)
    with pytest.raises(HoldfastError, match="not of this document"):
        verify("revocations", b"rounds = 3", signed)
    forged = sign("federation", b"rounds = 3", other)
    with pytest.raises(HoldfastError, match=fingerprint(forged.key)):
        verify("federation", b"rounds = 3", forged, trusted=signed.key)
    with pytest.raises(HoldfastError, match="not of this document"):
        verify("federation", b"rounds = 3", Signature(key=signed.key, signature=forged.signature))


def test_the_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    key = make_key(tmp_path)
    assert make_key(tmp_path).private_bytes_raw() == key.private_bytes_raw()
    assert stat.S_IMODE((tmp_path / "coordinator.key").stat().st_mode) == 0o600
    with pytest.raises(HoldfastError, match="only the coordinator can sign"):
        load_key(tmp_path / "elsewhere")
    (tmp_path / "coordinator.key").write_text("no key")
    with pytest.raises(HoldfastError, match="not a private key"):
        load_key(tmp_path)
