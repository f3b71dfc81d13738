"""The key of a job."""

from sparkdml.parameter_server.wire.seal import JobKey


def test_the_key_is_the_same_for_all_tasks_of_a_run_and_for_no_other() -> None:
    first, other = JobKey.derive(b"a", encrypted=True), JobKey.derive(b"b", encrypted=True)
    assert first == JobKey.derive(b"a", encrypted=True)
    assert JobKey.derive(b"a").secret == first.secret
    assert first.curve_public != other.curve_public
    assert JobKey.derive(b"a").curve_public is None


def test_what_is_secret_is_never_shown() -> None:
    key = JobKey.derive(b"a", encrypted=True)
    assert key.curve_secret is not None
    assert repr(key.secret) not in repr(key)
    assert repr(key.curve_secret) not in repr(key)
