"""Translates the S3 settings of Spark's Hadoop configuration into options of s3fs. Driver only.

So a user whose Spark reads `s3a://` need not configure S3 again. Settings of one bucket
(`fs.s3a.bucket.NAME.…`) take precedence over the general ones, as in Hadoop; options that the user
passes take precedence over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sparkdml.errors import ParameterError

_CREDENTIALS = frozenset({"key", "secret", "token", "anon", "profile", "session", "username"})
_ANONYMOUS = "AnonymousAWSCredentialsProvider"
# It means "use the region's own endpoint", which is what s3fs does without one.
_CENTRAL_ENDPOINT = "s3.amazonaws.com"


class HadoopSettings(Protocol):
    def setting(self, key: str) -> str | None: ...

    def secret(self, key: str) -> str | None: ...


def s3_options(
    settings: HadoopSettings, bucket: str, storage_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `storage_options`, completed by the Hadoop configuration of this bucket."""
    options = _BucketSettings(settings, bucket)
    given = dict(storage_options)
    client = {**options.client(), **given.pop("client_kwargs", {})}
    config = {**options.config(), **given.pop("config_kwargs", {})}
    result = {**options.connection(), **options.encryption(given)}
    if "endpoint_url" in client:
        result.pop("endpoint_url", None)  # s3fs refuses two
    # All or none: the server would refuse half of one identity with half of another.
    if not _CREDENTIALS & given.keys() and "aws_access_key_id" not in client:
        result.update(options.credentials())
    if client:
        result["client_kwargs"] = client
    if config:
        result["config_kwargs"] = config
    return {**result, **given}


class _BucketSettings:
    def __init__(self, settings: HadoopSettings, bucket: str) -> None:
        self._settings = settings
        self._bucket = bucket

    def _get(self, key: str) -> str | None:
        own = self._settings.setting(f"fs.s3a.bucket.{self._bucket}.{key}")
        return own or self._settings.setting(f"fs.s3a.{key}")

    def _secret(self, key: str) -> str | None:
        own = self._settings.secret(f"fs.s3a.bucket.{self._bucket}.{key}")
        return own or self._settings.secret(f"fs.s3a.{key}")

    def credentials(self) -> dict[str, Any]:
        if _ANONYMOUS in (self._get("aws.credentials.provider") or ""):
            return {"anon": True}
        key, secret = self._secret("access.key"), self._secret("secret.key")
        if key is None or secret is None:
            return {}  # s3fs looks where AWS's own tools do: environment, profile, instance role
        token = self._secret("session.token")
        return {"key": key, "secret": secret, **({"token": token} if token else {})}

    def connection(self) -> dict[str, Any]:
        ssl = (self._get("connection.ssl.enabled") or "true").lower() != "false"
        options: dict[str, Any] = {} if ssl else {"use_ssl": False}
        endpoint = self._get("endpoint")
        if endpoint and endpoint != _CENTRAL_ENDPOINT:
            if "://" not in endpoint:
                endpoint = f"{'https' if ssl else 'http'}://{endpoint}"
            options["endpoint_url"] = endpoint
        return options

    def client(self) -> dict[str, Any]:
        region = self._get("endpoint.region")
        return {"region_name": region} if region else {}

    def config(self) -> dict[str, Any]:
        if (self._get("path.style.access") or "false").lower() != "true":
            return {}
        return {"s3": {"addressing_style": "path"}}

    def encryption(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that encrypt objects as configured; raise an error if s3fs can't."""
        algorithm = self._get("encryption.algorithm") or self._get(
            "server-side-encryption-algorithm"
        )
        if algorithm is None or "s3_additional_kwargs" in given:
            return {}
        if algorithm == "AES256":
            return {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}
        if algorithm == "SSE-KMS":
            key = self._secret("encryption.key") or self._secret("server-side-encryption.key")
            arguments = {"ServerSideEncryption": "aws:kms"}
            return {"s3_additional_kwargs": {**arguments, **({"SSEKMSKeyId": key} if key else {})}}
        raise ParameterError(
            "fs.s3a.encryption.algorithm",
            algorithm,
            "AES256 or SSE-KMS, for checkpoints that go through s3fs",
            "Set storage_options={'s3_additional_kwargs': {…}} for how s3fs encrypts",
        )
