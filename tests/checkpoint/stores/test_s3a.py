"""Hadoop's settings for S3 as options of s3fs."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdml.checkpoint.stores.s3a import s3_options
from sparkdml.errors import ParameterError


class Settings:
    """A Hadoop configuration; secrets are kept apart, as in a credential provider."""

    def __init__(self, settings: dict[str, str], secrets: dict[str, str] | None = None) -> None:
        self._settings, self._secrets = settings, secrets or {}

    def setting(self, key: str) -> str | None:
        return self._settings.get(key)

    def secret(self, key: str) -> str | None:
        return self._secrets.get(key) or self._settings.get(key)


KEYS = {"fs.s3a.access.key": "KEY", "fs.s3a.secret.key": "SECRET"}


def options(settings: dict[str, str], given: dict[str, Any] | None = None) -> dict[str, Any]:
    return s3_options(Settings(settings), "bucket", given or {})


def test_without_settings_s3fs_finds_its_own() -> None:
    assert options({}) == {}
    assert options({"fs.s3a.endpoint": "s3.amazonaws.com", "fs.s3a.access.key": "half"}) == {}


def test_keys_token_and_region() -> None:
    settings = {**KEYS, "fs.s3a.session.token": "TOKEN", "fs.s3a.endpoint.region": "eu-west-1"}
    assert options(settings) == {
        "key": "KEY",
        "secret": "SECRET",
        "token": "TOKEN",
        "client_kwargs": {"region_name": "eu-west-1"},
    }


def test_secrets_may_come_from_a_credential_provider() -> None:
    found = s3_options(Settings({}, KEYS), "bucket", {})
    assert found == {"key": "KEY", "secret": "SECRET"}


def test_anonymous_access() -> None:
    provider = "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"
    assert options({**KEYS, "fs.s3a.aws.credentials.provider": provider}) == {"anon": True}


@pytest.mark.parametrize(
    ("endpoint", "ssl", "url"),
    [
        ("minio:9000", None, "https://minio:9000"),
        ("minio:9000", "false", "http://minio:9000"),
        ("http://minio:9000", None, "http://minio:9000"),
    ],
)
def test_endpoints(endpoint: str, ssl: str | None, url: str) -> None:
    settings = {"fs.s3a.endpoint": endpoint}
    if ssl:
        settings["fs.s3a.connection.ssl.enabled"] = ssl
    assert options(settings)["endpoint_url"] == url


def test_a_buckets_own_settings_win() -> None:
    settings = {"fs.s3a.endpoint": "http://all", "fs.s3a.bucket.bucket.endpoint": "http://one"}
    assert options(settings)["endpoint_url"] == "http://one"


def test_what_the_user_says_wins() -> None:
    settings = {
        **KEYS,
        "fs.s3a.session.token": "TOKEN",
        "fs.s3a.endpoint": "http://hadoop",
        "fs.s3a.endpoint.region": "eu-west-1",
        "fs.s3a.path.style.access": "true",
    }
    given = {"key": "MINE", "secret": "MY SECRET", "endpoint_url": "http://mine"}
    assert options(settings, given) == {
        **given,  # and no token, which would belong to the other key
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    nested = options(settings, {"client_kwargs": {"endpoint_url": "http://mine"}})
    assert "endpoint_url" not in nested
    assert nested["client_kwargs"] == {"region_name": "eu-west-1", "endpoint_url": "http://mine"}
    assert "key" not in options(settings, {"profile": "me"})


def test_encryption_is_kept_or_refused() -> None:
    algorithm = "fs.s3a.encryption.algorithm"
    assert options({algorithm: "AES256"}) == {
        "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}
    }
    assert options({algorithm: "SSE-KMS", "fs.s3a.encryption.key": "arn"}) == {
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn"}
    }
    with pytest.raises(ParameterError, match=r"encryption\.algorithm must be AES256 or SSE-KMS"):
        options({algorithm: "SSE-C"})
    mine = {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256"}}
    assert options({algorithm: "SSE-C"}, mine) == mine
