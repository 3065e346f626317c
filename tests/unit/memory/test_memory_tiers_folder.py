"""The disk tier's folder: what comes back is what was written, or nothing; what is not ours is left alone."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_faults import FaultyFiles
from tier_stage import IDENTITY

from kvwatch.errors import ConfigError
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.tiers.block_file import HEADER_BYTES, StoreIdentity, is_intact, make_header, read_header
from kvwatch_engine.memory.tiers.file_system import FileSystem
from kvwatch_engine.memory.tiers.folder import BlockFolder
from kvwatch_engine.memory.tiers.stores import Bytes, TransferError

SIZE = 64


def hash_of(number: int) -> BlockHash:
    return BlockHash(sha256(bytes([number])).digest())


def data_of(*numbers: int) -> Bytes:
    return np.stack([np.frombuffer(sha256(bytes([number, 1])).digest() * 2, np.uint8) for number in numbers])


def open_folder(path: Path, identity: StoreIdentity = IDENTITY, files: FileSystem | None = None) -> BlockFolder:
    folder = BlockFolder(path, identity, SIZE, files or FileSystem())
    folder.found = folder.open()  # type: ignore[attr-defined]
    return folder


def filled(path: Path, *numbers: int) -> BlockFolder:
    folder = open_folder(path)
    folder.write([hash_of(number) for number in numbers], data_of(*numbers))
    return folder


def read(folder: BlockFolder, *numbers: int) -> Bytes:
    out = np.zeros((len(numbers), SIZE), np.uint8)
    folder.read([hash_of(number) for number in numbers], out)
    return out


def files_in(path: Path) -> list[Path]:
    return sorted(path.glob("blocks/*/*.kvb"))


@given(st.integers(0, (HEADER_BYTES + SIZE) * 8 - 1))
def test_a_flipped_bit_anywhere_in_a_file_is_found(bit: int) -> None:
    data = data_of(1)[0].tobytes()
    head = make_header(hash_of(1), IDENTITY.encode(), data)
    whole = bytearray(head + data)
    whole[bit // 8] ^= 1 << bit % 8

    damaged = read_header(bytes(whole))

    assert damaged is None or not is_intact(bytes(whole[:HEADER_BYTES]), bytes(whole[HEADER_BYTES:]))
    assert is_intact(head, data)


def test_a_long_identity_is_told_from_another_by_its_digest() -> None:
    long, other = (replace(IDENTITY, weights_fingerprint=end * 500) for end in "ab")

    assert len(long.encode()) == len(IDENTITY.encode()) == len(other.encode())
    assert long.encode() != other.encode()


def test_blocks_survive_a_restart_in_the_order_of_their_use(tmp_path: Path) -> None:
    folder = filled(tmp_path, 1, 2, 3)
    for age, number in enumerate([1, 2, 3]):
        os.utime(tmp_path / "blocks" / hash_of(number).hex()[:2] / f"{hash_of(number).hex()}.kvb", ns=(age, age))
    read(folder, 1)
    folder.close()

    again = open_folder(tmp_path)

    assert again.found == [hash_of(2), hash_of(3), hash_of(1)]  # type: ignore[attr-defined]
    assert np.array_equal(read(again, 3, 1, 2), data_of(3, 1, 2))
    assert not again.ignored


@pytest.mark.parametrize(
    "change",
    [{"weights_fingerprint": "w2"}, {"kv_dtype": "int8"}, {"layout": 2}, {"block_size": 4}, {"num_kv_heads": 2}],
)
def test_nothing_of_another_identity_is_found_and_it_makes_room(tmp_path: Path, change: dict[str, object]) -> None:
    filled(tmp_path, 1, 2).close()

    folder = open_folder(tmp_path, replace(IDENTITY, **change))  # type: ignore[arg-type]

    assert folder.found == []  # type: ignore[attr-defined]
    assert folder.ignored == {"stale": 2}
    assert files_in(tmp_path) == []


def test_files_of_others_are_counted_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path, 1).close()
    (tmp_path / "notes.txt").write_text("mine")
    name = hash_of(2).hex()
    place = tmp_path / "blocks" / name[:2]
    place.mkdir(exist_ok=True)
    (place / f"{name}.kvb").write_bytes(b"something else entirely" * 30)
    (place / "readme").write_text("x")
    (place / "link.kvb").symlink_to(tmp_path / "notes.txt")

    folder = open_folder(tmp_path)

    assert folder.found == [hash_of(1)]  # type: ignore[attr-defined]
    assert folder.ignored == {"foreign": 3}
    assert hash_of(2) in folder.occupied
    assert (place / f"{name}.kvb").read_bytes().startswith(b"something else")


def test_what_a_power_failure_leaves_is_removed(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3, 4, 5).close()
    for path, damage in zip(files_in(tmp_path), ["short", "empty", "zeros", "header", "grown"], strict=True):
        content = path.read_bytes()
        cut = {"short": content[:-1], "empty": b"", "zeros": bytes(len(content)), "header": content[:100]}
        path.write_bytes(cut.get(damage, content + b"x"))
    (tmp_path / "incoming" / f"{hash_of(9).hex()}.part").write_bytes(b"KVW")

    folder = open_folder(tmp_path)

    assert folder.found == []  # type: ignore[attr-defined]
    assert folder.ignored == {"torn": 6}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "kvwatch.lock"]


def test_a_defective_file_ends_a_read_before_it_and_is_removed(tmp_path: Path) -> None:
    folder = filled(tmp_path, 1, 2, 3)
    path = next(path for path in files_in(tmp_path) if path.stem == hash_of(2).hex())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    out = np.zeros((3, SIZE), np.uint8)

    with pytest.raises(TransferError) as caught:
        folder.read([hash_of(1), hash_of(2), hash_of(3)], out)

    assert (caught.value.reason, caught.value.num_good) == ("corrupt", 1)
    assert np.array_equal(out[0], data_of(1)[0])
    assert not out[1:].any()
    assert not path.exists()


def test_a_file_under_another_blocks_name_is_not_taken_for_it(tmp_path: Path) -> None:
    folder = filled(tmp_path, 1, 2)
    paths = {path.stem: path for path in files_in(tmp_path)}
    paths[hash_of(1).hex()].replace(paths[hash_of(2).hex()])

    with pytest.raises(TransferError, match="corrupt"):
        read(folder, 2)


@pytest.mark.parametrize(("number", "reason"), [(28, "disk_full"), (122, "disk_full"), (30, "disk_write")])
def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, number: int, reason: str) -> None:
    files = FaultyFiles(number)
    folder = open_folder(tmp_path, files=files)
    files.writes.arm(2)

    with pytest.raises(TransferError) as caught:
        folder.write([hash_of(1), hash_of(2)], data_of(1, 2))

    assert (caught.value.reason, caught.value.num_good) == (reason, 1)
    assert np.array_equal(read(folder, 1), data_of(1))
    assert list((tmp_path / "incoming").iterdir()) == []


def test_a_second_engine_is_refused_with_a_remedy(tmp_path: Path) -> None:
    first = open_folder(tmp_path)
    with pytest.raises(ConfigError, match="a folder of its own"):
        open_folder(tmp_path)
    first.close()
    first.close()

    open_folder(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="a folder that this user may write to"):
        open_folder(tmp_path / "file" / "tier")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_stands_in_the_place_of_a_block_and_is_no_file_is_neither_waited_for_nor_followed(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = filled(tmp_path, 1, 2)
    path = next(each for each in files_in(tmp_path) if each.stem == hash_of(1).hex())
    path.unlink()
    make(path)

    with pytest.raises(TransferError, match="disk_read"):
        read(folder, 1)
    assert np.array_equal(read(folder, 2), data_of(2))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.parent.parent / "mine")])
def test_nothing_is_written_through_what_stands_in_the_place_of_an_unfinished_file(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "mine").write_text("mine")
    folder = open_folder(tmp_path)
    make(tmp_path / "incoming" / f"{hash_of(1).hex()}.part")

    with pytest.raises(TransferError, match="disk_write"):
        folder.write([hash_of(1)], data_of(1))

    assert (tmp_path / "mine").read_text() == "mine"
    folder.write([hash_of(2)], data_of(2))
    assert np.array_equal(read(folder, 2), data_of(2))


def test_subfolders_that_somebody_has_cleaned_away_are_made_again(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    (tmp_path / "incoming").rmdir()
    (tmp_path / "blocks").rmdir()

    folder.write([hash_of(1)], data_of(1))

    assert np.array_equal(read(folder, 1), data_of(1))


def test_a_folder_that_is_gone_as_a_whole_is_not_made_again_where_it_was(tmp_path: Path) -> None:
    """It may have been a disk that was unmounted: what stands there now is another one."""
    folder = open_folder(tmp_path / "tier")
    shutil.rmtree(tmp_path / "tier")
    (tmp_path / "tier").mkdir()

    with pytest.raises(TransferError, match="disk_write"):
        folder.write([hash_of(1)], data_of(1))

    assert list((tmp_path / "tier").iterdir()) == []
