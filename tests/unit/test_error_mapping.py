"""What each foreign error becomes, and whether it is worth another try: on purpose, for every class there is."""

from __future__ import annotations

import errno
import inspect

import aiohttp.client_exceptions
import botocore.exceptions
import pytest
from s3fs.errors import translate_boto_error

from elastic_runner.errors import AccessDenied, AlreadyExists, NotFound, StorageError, StorageFull, StorageTimeout
from elastic_runner.storage.faults import is_transient, map_error

# Another try may help ...
BOTO_PASSES = {
    "HTTPClientError ConnectionError EndpointConnectionError SSLError ConnectionClosedError ProxyConnectionError": (
        StorageError
    ),
    "ResponseStreamingError IncompleteReadError ChecksumError FlexibleChecksumError": StorageError,
    "CredentialRetrievalError TokenRetrievalError MetadataRetrievalError CapacityNotAvailableError": StorageError,
    "ReadTimeoutError ConnectTimeoutError": StorageTimeout,
    # Without an answer in it nobody knows; by status: below.
    "ClientError EventStreamError": StorageError,
    "UndefinedModelAttributeError MissingServiceIdError": StorageError,
}
# ... or something is set up wrong and stays so.
BOTO_LASTS = {
    "NoCredentialsError PartialCredentialsError UnknownCredentialError NoAuthTokenError": AccessDenied,
    "SSOError SSOTokenLoadError UnauthorizedSSOTokenError RefreshWithMFAUnsupportedError": AccessDenied,
    "LoginError LoginRefreshRequired LoginInsufficientPermissions LoginTokenLoadError": AccessDenied,
    "LoginAuthorizationCodeError": AccessDenied,
    "BotoCoreError DataNotFoundError UnknownServiceError UnknownRegionError ApiVersionNotFoundError": StorageError,
    "InvalidIMDSEndpointError InvalidIMDSEndpointModeError UnknownTokenProviderError": StorageError,
    "UnknownSignatureVersionError ServiceNotInRegionError BaseEndpointResolverError NoRegionError": StorageError,
    "EndpointVariantError UnknownEndpointError UnknownFIPSEndpointError ProfileNotFound ConfigParseError": StorageError,
    "ConfigNotFound MissingParametersError ValidationError ParamValidationError UnknownKeyError": StorageError,
    "RangeError UnknownParameterError InvalidRegionError AliasConflictParameterError": StorageError,
    "UnknownServiceStyle PaginationError OperationNotPageableError UnseekableStreamError WaiterError": StorageError,
    "InvalidExpressionError WaiterConfigError UnknownClientMethodError": StorageError,
    "UnsupportedSignatureVersionError InvalidDNSNameError InvalidS3AddressingStyleError": StorageError,
    "UnsupportedS3ArnError UnsupportedS3ControlArnError InvalidHostLabelError UnsupportedOutpostResourceError": (
        StorageError
    ),
    "UnsupportedS3ConfigurationError UnsupportedS3AccesspointConfigurationError": StorageError,
    "InvalidEndpointDiscoveryConfigurationError UnsupportedS3ControlConfigurationError": StorageError,
    "InvalidRetryConfigurationError InvalidMaxRetryAttemptsError InvalidRetryModeError": StorageError,
    "InvalidS3UsEast1RegionalEndpointConfigError InvalidSTSRegionalEndpointsConfigError": StorageError,
    "StubResponseError StubAssertionError UnStubbedResponseError InvalidConfigError": StorageError,
    "InfiniteLoopConfigError MD5UnavailableError MissingDependencyException": StorageError,
    "InvalidProxiesConfigError InvalidDefaultsMode AwsChunkedWrapperError": StorageError,
    "InvalidEndpointConfigurationError EndpointProviderError EndpointResolutionError": StorageError,
    "UnknownEndpointResolutionBuiltInName InvalidChecksumConfigError UnsupportedServiceProtocolsError": StorageError,
}
AIOHTTP_PASSES = {
    "ClientError ClientConnectionError ClientOSError ClientConnectorError ClientProxyConnectionError": StorageError,
    "ClientConnectorDNSError ClientConnectionResetError ClientSSLError ClientConnectorSSLError": StorageError,
    "ServerDisconnectedError ServerConnectionError ClientPayloadError ClientResponseError": StorageError,
    "ClientHttpProxyError WSServerHandshakeError ContentTypeError TooManyRedirects": StorageError,
    "UnixClientConnectorError UploadAbortedError ServerFingerprintMismatch": StorageError,
    # Where a server sends us is no mistake of ours.
    "RedirectClientError NonHttpUrlClientError NonHttpUrlRedirectClientError": StorageError,
    "ServerTimeoutError ConnectionTimeoutError SocketTimeoutError": StorageTimeout,
}
AIOHTTP_LASTS = {
    "InvalidURL InvalidUrlClientError InvalidUrlRedirectClientError": StorageError,
    "ClientConnectorCertificateError WSMessageTypeError": StorageError,
}


def table(passes: dict[str, type], lasts: dict[str, type]) -> dict[str, tuple[type, bool]]:
    return {
        name: (kind, may_pass)
        for names_to_kind, may_pass in ((passes, True), (lasts, False))
        for names, kind in names_to_kind.items()
        for name in names.split()
    }


BOTO = table(BOTO_PASSES, BOTO_LASTS)
AIOHTTP = table(AIOHTTP_PASSES, AIOHTTP_LASTS)


def classes(module: object) -> dict[str, type[Exception]]:
    """Those that the module defines."""
    return {
        name: each
        for name, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, Exception) and not issubclass(each, Warning) and each.__module__ == module.__name__  # type: ignore[attr-defined]
    }


def judged(error: BaseException) -> tuple[type, bool]:
    ours = map_error(error, "read x")
    return type(ours), is_transient(ours)


def bare(kind: type[Exception]) -> Exception:
    """An instance without the many arguments that some want."""

    class Bare(kind):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            Exception.__init__(self)

        def __str__(self) -> str:
            return "bare"

    return Bare()


@pytest.mark.parametrize(("module", "known"), [(botocore.exceptions, BOTO), (aiohttp.client_exceptions, AIOHTTP)])
def test_every_class_is_judged_on_purpose(module: object, known: dict[str, tuple[type, bool]]) -> None:
    found = {name: judged(bare(each)) for name, each in classes(module).items()}
    assert found == {name: known.get(name, "not in the table") for name in found}


def client_error(status: int, code: str) -> Exception:
    answer = {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(answer, "PutObject")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "code", "kind", "may_pass"),
    [
        (301, "PermanentRedirect", StorageError, False),
        (400, "AuthorizationHeaderMalformed", AccessDenied, False),
        (400, "BadDigest", StorageError, True),
        (400, "EntityTooLarge", StorageError, False),
        (400, "ExpiredToken", AccessDenied, False),
        (400, "IncompleteBody", StorageError, True),
        (400, "InvalidArgument", StorageError, False),
        (400, "InvalidPart", StorageError, True),
        (400, "InvalidToken", AccessDenied, False),
        (400, "RequestTimeout", StorageTimeout, True),
        (400, "XAmzContentSHA256Mismatch", StorageError, True),
        (401, "Unauthorized", AccessDenied, False),
        (403, "403", AccessDenied, False),
        (403, "AccessDenied", AccessDenied, False),
        (403, "InvalidAccessKeyId", AccessDenied, False),
        (403, "QuotaExceeded", StorageFull, False),
        (403, "RequestTimeTooSkewed", AccessDenied, False),
        (403, "SignatureDoesNotMatch", AccessDenied, False),
        (404, "404", NotFound, False),
        (404, "NoSuchBucket", NotFound, False),
        (404, "NoSuchKey", NotFound, False),
        (404, "NoSuchUpload", StorageError, True),
        (405, "MethodNotAllowed", AccessDenied, False),
        (408, "408", StorageError, True),
        (409, "ConditionalRequestConflict", StorageError, True),
        (409, "OperationAborted", StorageError, True),
        (412, "PreconditionFailed", AlreadyExists, False),
        (416, "InvalidRange", StorageError, False),
        (429, "TooManyRequests", StorageError, True),
        (500, "InternalError", StorageError, True),
        (501, "NotImplemented", StorageError, False),
        (502, "502", StorageError, True),
        (503, "SlowDown", StorageError, True),
        (503, "ServiceUnavailable", StorageError, True),
        (504, "504", StorageError, True),
        (507, "InsufficientStorage", StorageFull, False),
    ],
)
def test_answers_of_s3(status: int, code: str, kind: type, may_pass: bool) -> None:
    """As s3fs passes them on."""
    assert judged(translate_boto_error(client_error(status, code))) == (kind, may_pass)


PASSES = "EAGAIN EBUSY ECONNABORTED ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH EINTR EIO EMFILE ENETDOWN ENETRESET"
PASSES += " ENETUNREACH ENFILE ENOBUFS ENOLCK ENOMEM ENOTCONN EPIPE EPROTO EREMOTEIO ESHUTDOWN ESTALE"
LASTS = "EBADF EINVAL EISDIR ELOOP EMSGSIZE ENAMETOOLONG ENODEV ENOSYS ENOTEMPTY EOPNOTSUPP EXDEV"
ERRNO = table(
    {PASSES: StorageError, "ETIMEDOUT": StorageTimeout},
    {
        LASTS: StorageError,
        "EEXIST": AlreadyExists,
        "ENOENT ENOTDIR": NotFound,
        "EACCES EPERM EROFS": AccessDenied,
        "ENOSPC EDQUOT EFBIG": StorageFull,
    },
)


@pytest.mark.parametrize("name", ERRNO)
def test_answers_of_the_operating_system(name: str) -> None:
    assert judged(OSError(getattr(errno, name), "said")) == ERRNO[name]


def test_a_path_in_a_message_does_not_decide() -> None:
    assert judged(FileNotFoundError("bucket/PreconditionFailed/pre-condition")) == (NotFound, False)


def test_a_mistake_stays_one_when_its_cause_must_be_hidden() -> None:
    """The cause is cut off where it tells a secret, and with it went the reason not to try again."""
    ours = map_error(TypeError("no hunter22"), "read x", ["hunter22"])
    assert not is_transient(ours)
