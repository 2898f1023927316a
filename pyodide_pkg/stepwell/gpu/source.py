"""Byte sources on the host: memory and files, for CPython and tests.  Those of the browser: ``gpu/js_device.py``."""

from pathlib import Path

from stepwell.errors import BadFile


class BytesSource:
    """A ``ByteSource`` over bytes in memory."""

    __slots__ = ("_data", "name", "size")

    def __init__(self, data: bytes | bytearray | memoryview, name: str) -> None:
        self._data = memoryview(data).cast("B")
        self.name = name
        self.size = len(self._data)

    async def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._data[offset : offset + nbytes])


class FileSource:
    """A ``ByteSource`` over a file on disk.  The file is opened for each read, so there is nothing to close.

    Raises BadFile when the file cannot be opened or read.
    """

    __slots__ = ("_path", "name", "size")

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.name = self._path.name
        try:
            self.size = self._path.stat().st_size
        except OSError as error:
            raise self._unreadable(error) from error

    async def read(self, offset: int, nbytes: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                return file.read(nbytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> BadFile:
        return BadFile(f"{self._path} cannot be read: {error.strerror or error}. Check the path and its permissions.")
