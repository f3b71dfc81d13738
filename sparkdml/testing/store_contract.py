"""The contract suite of stores: subclass it, and override the fixture that opens yours.

    class TestMine(StoreContract):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda: MyStore(tmp_path)

Each call of `open_store` opens the same, initially empty, store, as another process would.
"""

from __future__ import annotations

import array
import threading
from collections.abc import Callable, Iterator

import pytest

from sparkdml.checkpoint.stores.base import Buffer, CheckpointStore

OpenStore = Callable[[], CheckpointStore]


class FailingChunks:
    """Chunks whose source fails after `num_chunks` of them, each time that they are iterated."""

    class Failure(Exception):
        pass

    def __init__(self, num_chunks: int, chunk: Buffer) -> None:
        self._num_chunks = num_chunks
        self._chunk = chunk

    def __iter__(self) -> Iterator[Buffer]:
        for _ in range(self._num_chunks):
            yield self._chunk
        raise self.Failure


class StoreContract:
    """What every store promises."""

    # More than one part or buffer of the store under test, if that is affordable.
    large_bytes = 3 << 20

    @pytest.fixture
    def open_store(self) -> OpenStore:
        raise NotImplementedError("override this fixture")

    @pytest.fixture
    def store(self, open_store: OpenStore) -> CheckpointStore:
        return open_store()

    def test_an_object_is_its_chunks_in_order(self, store: CheckpointStore) -> None:
        numbers = array.array("d", [1.5, 2.5])
        chunks: list[Buffer] = [
            b"ab",
            bytearray(b"cd"),
            b"",
            memoryview(b"ef"),
            memoryview(numbers),
        ]
        store.write("checkpoints/7/state", chunks)
        assert store.read("checkpoints/7/state") == b"abcdef" + numbers.tobytes()

    def test_an_object_may_be_empty(self, store: CheckpointStore) -> None:
        store.write("empty", [])
        assert store.read("empty") == b""
        assert store.names() == ["empty"]

    def test_a_large_object(self, store: CheckpointStore, open_store: OpenStore) -> None:
        pattern = bytes(range(256)) * 4096
        store.write("large", [memoryview(pattern)] * (self.large_bytes // len(pattern)))
        content = open_store().read("large")
        assert len(content) == self.large_bytes
        assert content == pattern * (self.large_bytes // len(pattern))

    def test_what_one_wrote_another_reads_and_lists(self, open_store: OpenStore) -> None:
        writer, reader = open_store(), open_store()
        assert reader.names() == []
        writer.write("a/1", [b"one"])
        assert reader.names() == ["a/1"]
        writer.write("a/2", [b"two"])
        assert reader.names() == ["a/1", "a/2"]
        assert reader.read("a/2") == b"two"
        writer.remove("a/1")
        assert reader.names() == ["a/2"]

    def test_a_write_replaces_the_whole_object(self, open_store: OpenStore) -> None:
        writer, reader = open_store(), open_store()
        for content in (b"long, as it was at first", b"short", b"", b"longer once more"):
            writer.write("folder/state", [content])
            assert reader.names("folder/") == ["folder/state"]
            assert reader.read("folder/state") == content

    def test_a_missing_object_is_file_not_found(self, store: CheckpointStore) -> None:
        with pytest.raises(FileNotFoundError):
            store.read("nothing/there")
        store.write("folder/state", [b"x"])
        with pytest.raises(FileNotFoundError):
            store.read("folder/other")
        with pytest.raises(FileNotFoundError):
            store.read("folder")

    def test_names_are_sorted_and_filtered_by_prefix(self, store: CheckpointStore) -> None:
        names = ["checkpoints/10/a", "checkpoints/2/b", "checkpoints/2/deep/c", "plan.json"]
        for name in reversed(names):
            store.write(name, [b"x"])
        assert store.names() == names
        assert store.names("checkpoints/") == names[:3]
        assert store.names("checkpoints/2/") == names[1:3]
        assert store.names("checkpoints/1") == names[:1]
        assert store.names("pl") == names[3:]
        assert store.names("checkpoints/2/b") == ["checkpoints/2/b"]
        assert store.names("checkpoints/2/b/") == []
        assert store.names("elsewhere/") == []

    def test_a_removed_object_is_gone(self, store: CheckpointStore) -> None:
        store.write("folder/a", [b"x"])
        store.write("folder/ab", [b"x"])
        store.remove("folder/a")
        assert store.names() == ["folder/ab"]
        with pytest.raises(FileNotFoundError):
            store.read("folder/a")

    def test_removing_what_is_not_there_is_no_error(self, store: CheckpointStore) -> None:
        store.remove("nothing/there")
        store.write("folder/a", [b"x"])
        store.remove("folder/b")
        assert store.names() == ["folder/a"]

    def test_a_write_that_fails_leaves_nothing(
        self, store: CheckpointStore, open_store: OpenStore
    ) -> None:
        with pytest.raises(FailingChunks.Failure):
            store.write("folder/state", FailingChunks(3, b"half"))
        assert open_store().names() == []
        with pytest.raises(FileNotFoundError):
            open_store().read("folder/state")

    def test_a_large_write_that_fails_leaves_the_older_object(
        self, store: CheckpointStore, open_store: OpenStore
    ) -> None:
        store.write("folder/state", [b"older"])
        with pytest.raises(FailingChunks.Failure):
            store.write("folder/state", FailingChunks(self.large_bytes >> 20, bytes(1 << 20)))
        assert open_store().read("folder/state") == b"older"
        assert open_store().names() == ["folder/state"]
        store.write("folder/state", [b"newer"])
        assert open_store().read("folder/state") == b"newer"

    def test_an_unfinished_object_is_not_listed(
        self, store: CheckpointStore, open_store: OpenStore
    ) -> None:
        seen: list[list[str]] = []

        class Watching:
            def __iter__(self) -> Iterator[bytes]:
                yield b"first half"
                seen.append(open_store().names())
                yield b"second half"

        store.write("folder/state", Watching())
        assert seen == [[]]
        assert store.names() == ["folder/state"]

    def test_writers_at_once_leave_one_whole_object(self, open_store: OpenStore) -> None:
        contents = [letter * 200_000 for letter in (b"a", b"b", b"c")]
        failures: list[BaseException] = []

        def write(content: bytes) -> None:
            try:
                open_store().write("folder/state", [content[:100_000], content[100_000:]])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(content,)) for content in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert open_store().read("folder/state") in contents
        assert open_store().names() == ["folder/state"]

    @pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../../up", "a//b", "a/"])
    def test_a_name_that_leaves_the_store_is_refused(
        self, store: CheckpointStore, name: str
    ) -> None:
        with pytest.raises(ValueError, match="name must be a relative path"):
            store.write(name, [b"x"])
        with pytest.raises(ValueError, match="name must be a relative path"):
            store.read(name)
        with pytest.raises(ValueError, match="name must be a relative path"):
            store.remove(name)
        with pytest.raises(ValueError, match="name must be a relative path"):
            store.names("../up")
